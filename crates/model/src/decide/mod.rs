//! Decisions: one brain per pipeline, named as its hands are.
//!
//! Each takes what was stored, what was seen and what time it is, and returns a plan that leaves the
//! hands no meaningful choice.

pub mod change;
pub mod fleets;
pub mod instances;
pub mod jobs_running;
pub mod jobs_submitted;
pub mod jobs_terminating;
pub mod managed_jobs;
pub mod readiness;
pub mod replicas;
pub mod runs;
pub mod utilization;
pub mod volumes;
