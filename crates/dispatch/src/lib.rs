//! Dispatchers: small programs that take containers from the queue and have them run.
//!
//! They speak HTTP to the server and commands to the scheduler below, and know nothing else of either. What
//! they conclude from the two is decided in `windlass_model::dispatch`.

pub mod hook;
pub mod local;
pub mod metrics;
pub mod news;
pub mod queue;
pub mod rounds;
pub mod scheduler;
pub mod slurm;
