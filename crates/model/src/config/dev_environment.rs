//! `type: dev-environment`: an instance to work on with an IDE or over SSH.

use super::{
    config_macros::{table, words},
    decode::Ctx,
    interpolate::{self, ReferenceScope},
    ports::PortMapping,
    profile,
    quantities::InactivityDuration,
    run,
    yaml::Node,
};

words! {
    /// IDE of a dev environment.
    pub enum Ide {
        Vscode = "vscode",
        Cursor = "cursor",
        Windsurf = "windsurf",
        Zed = "zed",
    }
}

table! {
    /// An instance to work on with an IDE or over SSH.
    pub struct DevEnvironment {
        /// IDE to prepare the environment for.
        pub ide: Option<Ide> = None,
        /// Version of the IDE; `version@commit` for windsurf. Has no effect and produces a warning.
        pub version: Option<String> = None,
        /// Commands that run before the environment is ready.
        pub init: Vec<String> = vec![],
        /// Stops the environment after this time without a connection.
        pub inactivity_duration: InactivityDuration = InactivityDuration(None),
        /// Ports to forward to the client.
        pub ports: Vec<PortMapping> = vec![],
    }
    flatten {
        pub run: run::Run,
        pub profile: profile::ProfileProperties,
    }
    tag = "dev-environment";
    check = Self::check;
}

impl DevEnvironment {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        if self.run.entrypoint.is_some() {
            cx.conflict(node, "entrypoint", "`entrypoint` is not allowed in dev environments");
        }
        if let Some(version) = &self.version {
            match self.ide {
                None => cx.conflict(node, "version", "`version` requires `ide`"),
                Some(Ide::Windsurf) if !is_windsurf_version(version) => {
                    cx.conflict(
                        node,
                        "version",
                        "the `version` of windsurf must have the form `version@commit`",
                    );
                }
                Some(Ide::Windsurf | Ide::Vscode | Ide::Cursor | Ide::Zed) => {}
            }
        }
        if self.run.dstack && self.inactivity_duration.0.is_some() {
            cx.conflict(node, "dstack", "`dstack` and `inactivity_duration` are mutually exclusive");
        }
        interpolate::check(node, ReferenceScope::DevEnvironment, cx);
    }
}

fn is_windsurf_version(version: &str) -> bool {
    version
        .split_once('@')
        .is_some_and(|(version, commit)| !version.is_empty() && !commit.is_empty() && !commit.contains('@'))
}
