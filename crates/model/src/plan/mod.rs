//! Planning: what fits where, who goes first, and what a change of configuration means.

pub mod blocks;
pub mod diff;
mod gang;
pub mod offers;
pub mod place;
mod queue;
mod refuse;
pub mod runs_in;
mod stock;
