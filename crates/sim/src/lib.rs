//! The simulation: simulated hosts and clouds, seeded faults and invariant checkers around the real server, on virtual
//! time.

pub mod cloud;
pub mod host;
pub mod invariants;
pub mod network;
pub mod queue_sim;
pub mod runs;

pub use windlass_testkit::rng;
