//! For tests: what stands around a program of ours, and none of ours. Every crate may use it without building the rest.

pub mod chaos;
pub mod lab;
pub mod ports;
pub mod postgres;
pub mod rng;
pub mod slurm;
pub mod story;

use anyhow::{Context, Result};
pub use tempfile::TempDir;

/// A directory that is removed when it is dropped.
pub fn temp_dir(name: &str) -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix(&format!("windlass-{name}-"))
        .tempdir()
        .context("failed to make a temporary directory")
}
