//! Decisions: one brain per pipeline, named as its hands are.
//!
//! Each takes what was stored, what was seen and what time it is, and returns a plan that leaves the
//! hands no meaningful choice.

pub mod runs;
