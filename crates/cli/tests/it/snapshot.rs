//! Environments for the transcripts of these tests, which the testkit implements.

use std::{path::Path, process::Command};

pub(crate) use windlass_testkit::cli_snapshot::{CliSnapshot, SnapshotEnv};

use crate::{TestHome, cli_env::CliEnv};

const SNAPSHOTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/snapshots");

impl SnapshotEnv for CliEnv {
    const PROGRAM: &'static str = "windlass";

    fn home(&self) -> &Path {
        self.home.path()
    }

    fn snapshots(&self) -> &Path {
        Path::new(SNAPSHOTS)
    }

    fn masks(&self) -> Vec<(String, &'static str)> {
        self.home.masks()
    }

    fn command(&self, args: &[&str]) -> Command {
        Self::command(self, args)
    }
}

/// No server is configured: a command that needs one starts it.
impl SnapshotEnv for TestHome {
    const PROGRAM: &'static str = "windlass";

    fn home(&self) -> &Path {
        self.path()
    }

    fn snapshots(&self) -> &Path {
        Path::new(SNAPSHOTS)
    }

    fn masks(&self) -> Vec<(String, &'static str)> {
        let directory = self.path().display().to_string();
        vec![(directory, "[DIR]"), (env!("CARGO_PKG_VERSION").to_owned(), "[VERSION]")]
    }

    fn command(&self, args: &[&str]) -> Command {
        Self::command(self, args)
    }
}
