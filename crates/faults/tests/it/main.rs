//! The fault matrix's own tests.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod faults;
