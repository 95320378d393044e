//! Tests of the backends with real agents.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod conformance;
mod gpus;
mod local;
mod lxd;
mod mock;
mod support;
