//! The simulation's own tests, and those of its checkers.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod chaos;
mod checkers;
mod faults;
mod fortune;
mod lab;
mod managed_checkers;
#[cfg(feature = "mutants")]
mod mutants;
mod performance;
mod remote;
mod sim;
