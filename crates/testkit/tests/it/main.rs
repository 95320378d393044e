//! The simulation's own tests, and those of its checkers.

mod checkers;
