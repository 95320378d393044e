//! The `windlass` binary, as users and scripts run it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod apply;
mod attach;
mod background;
mod backup;
mod basics;
mod check;
mod cli_env;
mod completion;
mod dev;
mod doctor;
mod errors;
mod examples;
mod first_hour;
mod flags;
mod follow;
mod jobs;
mod lists;
mod login;
mod metrics;
mod relay;
mod resources;
mod runs;
mod server;
mod snapshot;
mod terminal;
mod top;
mod tree;
mod ui;

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use windlass_testkit::{
    TempDir,
    cli_snapshot::{CommandOutput, run_command},
    temp_dir,
};

/// A directory that is deleted with its test.
struct TestDir(TempDir);

impl TestDir {
    fn new() -> Self {
        Self::named("cli")
    }

    fn named(name: &str) -> Self {
        Self(temp_dir(name).unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }
}

/// A separate home directory, whose server is stopped at the end.
struct TestHome(TestDir);

impl TestHome {
    fn new() -> Self {
        Self(TestDir::new())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_windlass"));
        command.args(args).current_dir(self.path()).stdin(Stdio::null());
        for name in ["URL", "TOKEN", "CERT", "PROJECT", "PROFILE", "LOG"] {
            command.env_remove(format!("WINDLASS_{name}"));
        }
        for name in ["NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"] {
            command.env_remove(name);
        }
        // Jobs of these tests write files of this machine. Help shows the values of variables, so it is not set there.
        if !args.iter().any(|arg| ["help", "--help", "-h"].contains(arg)) {
            command.env("WINDLASS_SERVER_LOCAL_PROCESSES", "own");
        }
        command.env("WINDLASS_HOME", self.path().join("home")).env("HOME", self.path());
        command
    }

    fn windlass(&self, args: &[&str]) -> CommandOutput {
        run_command(&mut self.command(args))
    }
}

impl Drop for TestHome {
    fn drop(&mut self) {
        if !self.path().join("home/server/running.json").exists() {
            return;
        }
        // A server that stops also ends an idle agent.
        if let Ok(active) = self.command(&["ps", "-o", "name"]).output() {
            for name in String::from_utf8_lossy(&active.stdout).lines() {
                let _ = self.command(&["stop", "-x", "-y", "--wait", name]).output();
            }
        }
        let _ = self.command(&["server", "stop"]).output();
    }
}
