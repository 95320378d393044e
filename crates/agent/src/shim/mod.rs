//! The shim: one per host. It manages tasks from their submission to their removal.

pub mod api;
pub mod boot;
pub mod cli;
mod disk;
pub mod docker;
pub mod enrolment;
pub mod events;
pub mod growth;
#[cfg(feature = "testing")]
pub mod hollow;
pub mod journal;
pub mod keys;
pub mod mixed;
pub mod mounts;
pub mod policy;
pub mod premises;
pub mod process;
pub mod runtime;
pub mod standin;
pub mod tasks;
pub mod volumes;
