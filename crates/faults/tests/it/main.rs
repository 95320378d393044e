//! Tests of the fault matrix.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod faults;
