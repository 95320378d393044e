//! Dispatchers: programs that lock containers of the queue and have a scheduler run them.
//!
//! They use the HTTP API of the server and the commands of the scheduler, and nothing else of either. The decisions are
//! in `windlass_model::dispatch`.

pub mod hook;
pub mod local;
pub mod metrics;
pub mod news;
pub mod queue;
pub mod rounds;
pub mod scheduler;
pub mod slurm;
