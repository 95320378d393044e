//! A server of its own, and commands that talk to it.

use std::process::Command;

use crate::{Home, Ran, ran, server};

pub(crate) const TOKEN: &str = "a-token-for-this-test-only";

pub(crate) struct Stage {
    /// Stopped before its data goes away.
    pub(crate) server: server::Running,
    pub(crate) home: Home,
}

impl Stage {
    /// Without a machine: what is submitted waits, or is refused.
    pub(crate) fn new() -> Self {
        let home = Home::new();
        // Hosts of tests are on this machine.
        let args = ["--admin-token", TOKEN, "--allow-host-networks", "127.0.0.0/8"];
        let server = server::quiet(&home.path().join("data"), &args);
        Self { server, home }
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = self.home.command(args);
        command.env("WINDLASS_URL", self.server.url()).env("WINDLASS_TOKEN", TOKEN);
        command
    }

    pub(crate) fn windlass(&self, args: &[&str]) -> Ran {
        ran(&mut self.command(args))
    }

    pub(crate) fn file(&self, name: &str, text: &str) {
        self.home.0.file(name, text);
    }
}
