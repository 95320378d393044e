//! Tests of the simulation and of its checkers.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod checkers;
mod managed_checkers;
mod planted_bugs;
mod queue_sim;
mod runs;
