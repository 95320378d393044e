//! The `windlass` binary, as people and scripts run it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod check;
mod server;

use std::path::PathBuf;

/// A directory that goes away with its test.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        let mut name = [0_u8; 8];
        getrandom::fill(&mut name).unwrap();
        let path = std::env::temp_dir().join(format!("windlass-cli-{:016x}", u64::from_be_bytes(name)));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
