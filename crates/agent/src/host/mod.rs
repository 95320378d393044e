//! What the machine is: processors, memory, disks, addresses, GPUs, and whether all is well.

pub mod addresses;
pub mod cli;
#[cfg(test)]
pub(crate) mod fixture;
pub mod gpu;
pub mod health;
pub mod info;
pub mod tool;
