//! Directories for tests, gone at their end.

use std::path::{Path, PathBuf};

/// A directory of its own, removed when dropped.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let tag = getrandom::u32().expect("draw a random number");
        let path = std::env::temp_dir().join(format!("wl-{name}-{tag:08x}"));
        std::fs::create_dir_all(&path).expect("make a directory for a test");
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
