//! Whether all is well with the host, and what keeps a full disk from stopping the shim.

use std::{
    io,
    path::{Path, PathBuf},
};

use windlass_api::agent::shim::Dcgm;

use super::gpu::Gpu;

/// What the checks look at.
#[derive(Clone, Debug)]
pub struct Watched<'a> {
    /// The shim's home.
    pub home: &'a Path,
    /// Where images are kept, when elsewhere.
    pub data: Option<&'a Path>,
    /// Why the container engine does not answer, when it does not.
    pub engine: Option<&'a str>,
    /// The GPUs found at start.
    pub gpus: &'a [Gpu],
}

/// What is wrong, in sentences; empty means well.
pub async fn problems(watched: &Watched<'_>) -> Vec<String> {
    let _ = watched;
    Vec::new()
}

/// What DCGM says, where it is installed.
pub async fn dcgm() -> Option<Dcgm> {
    None
}

/// A file that only takes up room. On a full disk it is given up, so that a task can still be ended and removed.
#[derive(Debug)]
pub struct Reserve {
    file: PathBuf,
}

impl Reserve {
    pub fn new(home: &Path) -> Self {
        Self { file: home.join("reserve") }
    }

    /// Takes the room, where there is enough; to be called now and then.
    pub fn keep(&self) -> io::Result<()> {
        Ok(())
    }

    /// Gives the room back: call this when a write failed for want of space, then write again.
    pub fn release(&self) -> io::Result<()> {
        match std::fs::remove_file(&self.file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}
