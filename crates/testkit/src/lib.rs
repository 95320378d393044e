//! For tests: simulated hosts, seeded faults, invariant checkers, and the simulation that brings them
//! together with the real pipelines.

pub mod bench;
pub mod chaos;
pub mod cloud;
pub mod faults;
pub mod fortune;
pub mod hollow;
pub mod host;
pub mod invariants;
pub mod lab;
pub mod net;
pub mod postgres;
pub mod queue;
pub mod replicas;
pub mod rng;
pub mod server;
pub mod services;
pub mod sim;
pub mod stage;
pub mod story;
