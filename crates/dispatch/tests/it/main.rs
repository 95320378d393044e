//! Dispatchers with a real scheduler.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on stops here")]

mod slurm;
mod wake_socket;
