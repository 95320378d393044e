//! The data plane for services.
