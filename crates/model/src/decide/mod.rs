//! Decisions: one pure function per pipeline, named as its controller is.
//!
//! Each receives the stored state, the observation and the time, and returns a plan that leaves the controller no
//! meaningful choice.

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
