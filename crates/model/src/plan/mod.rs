//! Planning: placement, queue order, and the effect of configuration changes.

pub mod blocks;
pub mod diff;
mod gang;
pub mod offers;
pub mod place;
mod queue;
mod refuse;
pub mod runs_in;
mod stock;
