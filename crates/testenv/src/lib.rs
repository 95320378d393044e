//! For tests: real servers with their fleets, services and gateways, in separate processes.

pub mod closed_loop;
pub mod images;
pub mod process;
pub mod queue_env;
pub mod replicas;
pub mod server;
pub mod services;
pub mod simulated_hosts;
pub mod ssh;
pub mod test_env;
pub mod test_hosts;
