//! The benchmarks' own tests.

mod performance;
