//! Dispatchers: programs that lock containers of the queue and have a scheduler run them.
//!
//! They use the HTTP API of the server and the commands of the scheduler, and nothing else of either. The decisions are
//! in `windlass_model::dispatch`.

pub mod local;
pub mod metrics;
pub mod queue_client;
pub mod queue_events;
pub mod reconcile_loop;
pub mod scheduler;
pub mod slurm;
pub mod wake_socket;
