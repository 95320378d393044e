//! Tables over the builders.
