//! For tests: servers, machines and people as they are, seeded faults around them, and the benchmarks.

pub mod bench;
pub mod chaos;
pub mod faults;
pub mod hollow;
pub mod lab;
pub mod postgres;
pub mod queue;
pub mod replicas;
pub mod server;
pub mod services;
pub mod stage;
pub mod story;
