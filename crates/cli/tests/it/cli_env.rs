//! A separate server, and commands that use it.

use std::process::Command;

use crate::{CommandOutput, TestHome, run_command, server};

pub(crate) const TOKEN: &str = "a-token-for-this-test-only";

pub(crate) struct CliEnv {
    /// Stopped before its data is deleted.
    pub(crate) server: server::TestServer,
    pub(crate) home: TestHome,
}

impl CliEnv {
    /// Starts a server without instances: submitted runs wait or are refused.
    pub(crate) fn new() -> Self {
        let home = TestHome::new();
        // Hosts of tests are on this machine.
        let args = ["--admin-token", TOKEN, "--allow-host-networks", "127.0.0.0/8"];
        let server = server::start_quiet(&home.path().join("data"), &args);
        Self { server, home }
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = self.home.command(args);
        command.env("WINDLASS_URL", self.server.url()).env("WINDLASS_TOKEN", TOKEN);
        command
    }

    pub(crate) fn windlass(&self, args: &[&str]) -> CommandOutput {
        run_command(&mut self.command(args))
    }

    pub(crate) fn file(&self, name: &str, text: &str) {
        self.home.0.file(name, text);
    }
}
