//! The workspace as cargo and git report it.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    path::PathBuf,
    process::Command,
};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::process;

pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
}

/// A workspace member, without its external dependencies.
#[derive(Debug)]
pub(crate) struct Member {
    /// Members that it depends on, without development dependencies.
    pub(crate) uses: BTreeSet<String>,
    /// Members that only its tests use.
    pub(crate) uses_in_tests: BTreeSet<String>,
}

/// Crates that only tests and benchmarks use. Rules for the product do not apply to them.
pub(crate) const TEST_CRATES: [&str; 5] =
    ["crates/sim/", "crates/testkit/", "crates/testenv/", "crates/faults/", "crates/bench/"];

const OWN_VARIABLES: [&str; 3] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_NAME"];

impl Workspace {
    pub(crate) fn find() -> Result<Self> {
        // Cargo and nextest set this at run time; the compiled-in value is for a binary started manually.
        let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = manifest.parent().context("cannot find the directory above xtask")?.to_owned();
        Ok(Self { root })
    }

    /// Returns a cargo command in the root.
    pub(crate) fn cargo(&self) -> Command {
        let program = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
        let mut command = Command::new(program);
        command.current_dir(&self.root);
        // Variables that cargo sets for this program. Build scripts of dependencies track them, so a later manual cargo
        // call would rebuild those dependencies and everything that uses them.
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(|name| OWN_VARIABLES.iter().any(|part| name.starts_with(part))) {
                command.env_remove(name);
            }
        }
        command
    }

    pub(crate) fn read(&self, path: &str) -> Result<String> {
        std::fs::read_to_string(self.root.join(path)).with_context(|| format!("failed to read `{path}`"))
    }

    /// Runs `cargo metadata`. Missing packages are downloaded. `extra` limits the result, for example `--no-deps`.
    pub(crate) fn metadata(&self, extra: &[&str]) -> Result<Value> {
        let mut command = self.cargo();
        command.args(["metadata", "--format-version", "1", "--locked"]).args(extra);
        serde_json::from_str(&process::run_for_stdout(&mut command)?)
            .context("failed to parse cargo's metadata")
    }

    pub(crate) fn members(&self) -> Result<BTreeMap<String, Member>> {
        let metadata = self.metadata(&["--no-deps"])?;
        let packages = metadata["packages"].as_array().context("cargo's metadata has no packages")?;
        Ok(parse_members(packages))
    }

    /// Returns the path of a binary built with `profile`.
    pub(crate) fn built(&self, profile: &str, binary: &str) -> Result<PathBuf> {
        let message = process::run_for_stdout(Command::new("rustc").arg("-vV").current_dir(&self.root))?;
        let host = message
            .lines()
            .find_map(|line| line.strip_prefix("host: "))
            .context("cannot determine the host of rustc")?;
        // Cargo calls the directory of this one profile differently.
        let directory = if profile == "dev" { "debug" } else { profile };
        Ok(self.target()?.join(host).join(directory).join(binary))
    }

    /// Returns the target directory.
    pub(crate) fn target(&self) -> Result<PathBuf> {
        let metadata = self.metadata(&["--no-deps"])?;
        let target =
            metadata["target_directory"].as_str().context("cargo's metadata has no target directory")?;
        Ok(PathBuf::from(target))
    }

    /// Returns tracked files and new ones that git does not ignore, as paths from the root.
    pub(crate) fn files(&self) -> Result<Vec<String>> {
        let mut command = Command::new("git");
        // A checkout owned by another user (containers, CI) is readable as well.
        command.current_dir(&self.root).args([
            "-c",
            "safe.directory=*",
            "ls-files",
            "-co",
            "--exclude-standard",
        ]);
        let listed = process::run_for_stdout(&mut command)?;
        let exists = |path: &&str| self.root.join(path).is_file();
        Ok(listed.lines().filter(exists).map(str::to_owned).collect())
    }
}

fn parse_members(packages: &[Value]) -> BTreeMap<String, Member> {
    let name = |value: &Value| value["name"].as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let own: BTreeSet<String> = packages.iter().map(name).collect();
    let used = |package: &Value, in_tests: bool| -> BTreeSet<String> {
        let dependencies = list(&package["dependencies"]);
        let chosen = dependencies.iter().filter(|dependency| (dependency["kind"] == "dev") == in_tests);
        chosen.map(name).filter(|used| own.contains(used) && *used != name(package)).collect()
    };
    let member = |package: &Value| Member { uses: used(package, false), uses_in_tests: used(package, true) };
    packages.iter().map(|package| (name(package), member(package))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn dev_dependencies_and_external_crates_are_not_edges() {
        let packages = [
            json!({"name": "a", "dependencies": [{"name": "b", "kind": null}, {"name": "serde", "kind": null}]}),
            json!({"name": "b", "dependencies": [{"name": "a", "kind": "dev"}]}),
        ];
        let members = parse_members(&packages);
        assert_eq!(members["a"].uses, BTreeSet::from(["b".to_owned()]));
        assert!(members["b"].uses.is_empty());
        assert_eq!(members["b"].uses_in_tests, BTreeSet::from(["a".to_owned()]));
    }
}
