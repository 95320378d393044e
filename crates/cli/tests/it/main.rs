//! The `windlass` binary, as people and scripts run it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod apply;
mod attached;
mod background;
mod basics;
mod check;
mod completion;
mod copies;
mod dev;
mod doctor;
mod errors;
mod examples;
mod follow;
mod jobs;
mod lists;
mod login;
mod relay;
mod runs;
mod server;
mod snapshot;
mod stage;
mod terminal;
mod things;
mod top;
mod tree;

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use windlass_testkit::story::{Ran, ran};

/// A directory that goes away with its test.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        Self::called("wl")
    }

    fn called(prefix: &str) -> Self {
        let mut name = [0_u8; 4];
        getrandom::fill(&mut name).unwrap();
        let path = std::env::temp_dir().join(format!("{prefix}-{:08x}", u32::from_be_bytes(name)));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A home of its own, and at the end no server in it.
struct Home(Dir);

impl Home {
    fn new() -> Self {
        Self(Dir::new())
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_windlass"));
        command.args(args).current_dir(&self.0.0).stdin(Stdio::null());
        for name in ["URL", "TOKEN", "CERT", "PROJECT", "PROFILE", "LOG"] {
            command.env_remove(format!("WINDLASS_{name}"));
        }
        for name in ["NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"] {
            command.env_remove(name);
        }
        command.env("WINDLASS_HOME", self.0.0.join("home")).env("HOME", &self.0.0);
        command
    }

    fn windlass(&self, args: &[&str]) -> Ran {
        ran(&mut self.command(args))
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if !self.0.0.join("home/server/running.json").exists() {
            return;
        }
        // A server that stops ends an agent that has nothing to do.
        if let Ok(active) = self.command(&["ps", "-o", "name"]).output() {
            for name in String::from_utf8_lossy(&active.stdout).lines() {
                let _ = self.command(&["stop", "-x", "-y", "--wait", name]).output();
            }
        }
        let _ = self.command(&["server", "stop"]).output();
    }
}
