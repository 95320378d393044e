//! What the machine is: processors, memory, disks, addresses, GPUs, and whether all is well.

pub mod gpu;
pub mod health;
pub mod info;
