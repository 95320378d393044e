//! What the tests share. Everything made here is taken away by a guard, also when a test fails.

pub(crate) mod client;
pub(crate) mod engine;
pub(crate) mod images;
pub(crate) mod runner;
pub(crate) mod shim;
pub(crate) mod sweep;

use std::path::{Path, PathBuf};

pub(crate) use windlass_testkit::lab::registry;

/// A directory of its own, removed at the end.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let mut random = [0u8; 6];
        getrandom::fill(&mut random).unwrap();
        let tag: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let path = std::env::temp_dir().join(format!("windlass-{name}-{tag}"));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The binary under test.
pub(crate) fn agent() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_windlass-agent"))
}
