//! `type: dev-environment`: a machine to work on with an IDE or over SSH.

use super::{
    decode::Ctx,
    interpolate::{self, ReferenceScope},
    ports::PortMapping,
    profile, run,
    table::{table, words},
    units::InactivityDuration,
    yaml::Node,
};

words! {
    /// The IDE that connects.
    pub enum Ide {
        Vscode = "vscode",
        Cursor = "cursor",
        Windsurf = "windsurf",
        Zed = "zed",
    }
}

table! {
    /// A machine to work on.
    pub struct DevEnvironment {
        /// The IDE to prepare for.
        pub ide: Option<Ide> = None,
        /// The version of the IDE; `version@commit` for windsurf. Without effect, and gives a warning.
        pub version: Option<String> = None,
        /// Commands to run before it is ready.
        pub init: Vec<String> = vec![],
        /// Stops when nobody is connected for so long.
        pub inactivity_duration: InactivityDuration = InactivityDuration(None),
        /// Ports to forward.
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
            cx.conflict(node, "entrypoint", "`entrypoint` is not for dev environments");
        }
        if let Some(version) = &self.version {
            match self.ide {
                None => cx.conflict(node, "version", "`version` needs `ide`"),
                Some(Ide::Windsurf) if !is_windsurf_version(version) => {
                    cx.conflict(node, "version", "the version of windsurf is `version@commit`");
                }
                Some(Ide::Windsurf | Ide::Vscode | Ide::Cursor | Ide::Zed) => {}
            }
        }
        if self.run.dstack && self.inactivity_duration.0.is_some() {
            cx.conflict(node, "dstack", "`dstack` and `inactivity_duration` exclude each other");
        }
        interpolate::check(node, ReferenceScope::DevEnvironment, cx);
    }
}

fn is_windsurf_version(version: &str) -> bool {
    version
        .split_once('@')
        .is_some_and(|(version, commit)| !version.is_empty() && !commit.is_empty() && !commit.contains('@'))
}
