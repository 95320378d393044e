//! Tests of the engine: the store's conformance suite and the engine itself, on virtual time.

#![expect(clippy::unwrap_used, reason = "a test that unwraps nothing fails, as it should")]

mod batch;
mod conformance;
mod failures;
mod fetching;
mod leases;
mod planted_bugs;
mod random_faults;
mod shutdown;
mod support;
