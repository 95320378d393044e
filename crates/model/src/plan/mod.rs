//! Planning: placement, queue order, and the effect of configuration changes.

pub mod blocks;
pub mod diff;
pub mod execution_mode;
mod gang;
mod inventory;
pub mod offers;
pub mod place;
mod placement_round;
mod rejections;
pub mod wait_class;
