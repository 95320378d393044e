//! Properties of the host: processors, memory, disks, addresses, GPUs and health.

pub mod addresses;
pub mod cli;
#[cfg(test)]
pub(crate) mod fixture;
pub mod gpu;
pub mod health;
pub mod info;
pub mod vendor_cli;
