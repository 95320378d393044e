//! Planning: placement, queue order, and the effect of configuration changes.

pub mod blocks;
pub mod budget;
pub mod diff;
pub mod execution_mode;
pub mod forecast;
mod gang;
mod inventory;
pub mod offers;
pub mod place;
mod placement_round;
pub mod pods;
pub mod preemption;
pub mod queue_order;
pub mod quota;
mod rejections;
pub mod slurm;
pub mod usage;
pub mod wait_class;
