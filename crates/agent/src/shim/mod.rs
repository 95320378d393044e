//! The shim: one per host. It manages tasks from their submission to their removal.

pub mod api;
pub mod authorized_keys;
pub mod boot;
pub mod cli;
mod disk_limit;
pub mod docker;
pub mod dstack_compat;
pub mod enrolment;
pub mod events;
pub mod gateway_key;
pub mod host_resources;
pub mod journal;
pub mod mixed_runtime;
pub mod mounts;
pub mod oci;
pub mod output_watcher;
pub mod policy;
pub mod process;
pub mod runtime;
#[cfg(feature = "testing")]
pub mod simulated_runtime;
pub mod tasks;
pub mod volumes;
