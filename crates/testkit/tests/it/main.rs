//! Tests of the testkit.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod fault_proxy;
