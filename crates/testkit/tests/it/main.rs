//! The testkit's own tests, and those of hosts that are reached over SSH.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod chaos;
mod faults;
mod lab;
mod performance;
mod remote;
