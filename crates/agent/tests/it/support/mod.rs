//! Shared test support. Everything created here is removed by a guard, also when a test fails.

pub(crate) mod client;
pub(crate) mod engine;
pub(crate) mod gpus;
pub(crate) mod images;
pub(crate) mod leftover_check;
pub(crate) mod oci;
pub(crate) mod runner;
pub(crate) mod shim;

use std::path::Path;

pub(crate) use windlass_testkit::{TempDir, lab::registry, temp_dir};

/// The binary under test.
pub(crate) fn agent() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_windlass-agent"))
}
