//! For tests: what stands around a program of ours, and none of ours. Every crate may use it without building the rest.

pub mod chaos;
pub mod lab;
pub mod ports;
pub mod postgres;
pub mod rng;
pub mod slurm;
pub mod story;
pub mod wait;

use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result};
pub use tempfile::TempDir;

/// How many inputs a test of bad input makes: a few hundred, or `FUZZ=100000` of them.
pub fn fuzz_cases() -> u32 {
    std::env::var("FUZZ").ok().and_then(|text| text.parse().ok()).unwrap_or(300)
}

/// A directory that is removed when it is dropped. Others may read it: servers and jobs of tests run as other users.
pub fn temp_dir(name: &str) -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix(&format!("windlass-{name}-"))
        .permissions(PermissionsExt::from_mode(0o755))
        .tempdir()
        .context("failed to make a temporary directory")
}
