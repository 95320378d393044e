//! Test infrastructure without dependencies on windlass crates. Every crate may use it without building the rest.

pub mod cli_snapshot;
pub mod fault_proxy;
pub mod kubernetes;
pub mod lab;
pub mod lxd;
pub mod moto;
pub mod ports;
pub mod postgres;
pub mod rng;
pub mod slurm;
pub mod wait;
pub mod without_engine;

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
pub use tempfile::TempDir;

const MEMORY_DIR_MIN_BYTES: u64 = 4 << 30;

/// Number of inputs of a fuzz test: a few hundred, or the value of `FUZZ`.
pub fn fuzz_cases() -> u32 {
    std::env::var("FUZZ").ok().and_then(|text| text.parse().ok()).unwrap_or(300)
}

/// Creates a directory that is removed on drop. It is world-readable, because servers and jobs of tests run as other
/// users.
pub fn temp_dir(name: &str) -> Result<TempDir> {
    temp_dir_in(&std::env::temp_dir(), name)
}

/// Directory for databases: in memory if there is enough of it, because each test creates and deletes hundreds of files.
pub fn database_dir() -> PathBuf {
    let memory = Path::new("/dev/shm");
    let size = rustix::fs::statvfs(memory).map_or(0, |filesystem| filesystem.f_blocks * filesystem.f_frsize);
    if size >= MEMORY_DIR_MIN_BYTES { memory.to_owned() } else { std::env::temp_dir() }
}

/// Creates the directory elsewhere: `/tmp` is not the same directory for all processes.
pub fn temp_dir_in(parent: &Path, name: &str) -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix(&format!("windlass-{name}-"))
        .permissions(PermissionsExt::from_mode(0o755))
        .tempdir_in(parent)
        .context("failed to make a temporary directory")
}
