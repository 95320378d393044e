//! Tasks as plain processes, for hosts without a container engine. To be written.

use std::path::PathBuf;

/// The runtime of one shim.
#[derive(Debug)]
pub struct Process {
    home: PathBuf,
}

impl Process {
    /// `home` is the shim's own directory. Tasks of shims with other homes are not touched.
    pub fn new(home: PathBuf) -> Self {
        Self { home }
    }

    pub fn home(&self) -> &std::path::Path {
        &self.home
    }
}
