//! For tests: real servers with their fleets, services and gateways, in separate processes.

pub mod closed;
pub mod hollow;
pub mod hosts;
pub mod process;
pub mod queue;
pub mod replicas;
pub mod server;
pub mod services;
pub mod ssh;
pub mod stage;
