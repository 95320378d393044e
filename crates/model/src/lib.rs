//! Model: the types and decisions of windlass, without side effects.
//!
//! Pure by construction: no async, clock, I/O, SQL, environment or randomness. The inputs of a decision are arguments;
//! its effects are the return value. `clippy.toml` next to this crate's manifest holds the bans.

#![deny(clippy::wildcard_enum_match_arm)]

pub mod backend_kind;
pub mod config;
pub mod container;
pub mod deadline_policy;
pub mod decide;
pub mod device_allocator;
pub mod dispatch;
pub mod error_chain;
pub mod error_pages;
pub mod event;
pub mod explain;
pub mod fleet;
pub mod gateway;
pub mod gpu;
pub mod id;
pub mod instance;
pub mod job;
pub mod managed_job;
pub mod money;
pub mod plan;
pub mod queue;
pub mod resources;
pub mod retry;
pub mod run;
pub mod schedule;
pub mod skypilot;
pub mod state_machine;
pub mod task;
pub mod terminal_codes;
pub mod time;
pub mod volume;
pub mod yaml_text;
