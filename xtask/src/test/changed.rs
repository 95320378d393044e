//! Crates affected by a change: those whose files differ, and all that depend on them.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use anyhow::Result;

use crate::{
    process,
    workspace::{Member, Workspace},
};

/// The state to compare with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ChangeBase {
    /// `None`: since the branch diverged from `main`, or, on `main` itself, since the last push or commit.
    pub(super) revision: Option<String>,
}

/// Returns the names of the packages to test. Files outside of crates (the workspace manifest, the lock file, cargo's
/// settings) affect all packages; documents affect `xtask`, whose tests read them.
pub(super) fn changed_packages(workspace: &Workspace, since: &ChangeBase) -> Result<BTreeSet<String>> {
    let base = match &since.revision {
        Some(revision) => revision.clone(),
        None => find_base(workspace),
    };
    let mut files: BTreeSet<String> =
        git(workspace, &["diff", "--name-only", &base])?.lines().map(str::to_owned).collect();
    files.extend(git(workspace, &["ls-files", "--others", "--exclude-standard"])?.lines().map(str::to_owned));
    Ok(affected_packages(&workspace.members()?, &files))
}

fn find_base(workspace: &Workspace) -> String {
    let merge_base = |other: &str| {
        let found = git(workspace, &["merge-base", "HEAD", other]).ok()?;
        Some(found.trim().to_owned()).filter(|found| !found.is_empty())
    };
    let on_main =
        git(workspace, &["rev-parse", "--abbrev-ref", "HEAD"]).is_ok_and(|name| name.trim() == "main");
    let base = if on_main {
        merge_base("origin/main")
    } else {
        merge_base("main").or_else(|| merge_base("origin/main"))
    };
    base.unwrap_or_else(|| "HEAD".to_owned())
}

fn git(workspace: &Workspace, args: &[&str]) -> Result<String> {
    process::run_for_stdout(
        Command::new("git").current_dir(&workspace.root).args(["-c", "safe.directory=*"]).args(args),
    )
}

fn affected_packages(members: &BTreeMap<String, Member>, files: &BTreeSet<String>) -> BTreeSet<String> {
    let mut touched = BTreeSet::new();
    for file in files {
        let mut parts = file.split('/');
        match (parts.next(), parts.next()) {
            (Some("crates"), Some(name)) => {
                touched.insert(format!("windlass-{name}"));
            }
            (Some("Cargo.toml" | "Cargo.lock" | "rust-toolchain.toml" | ".cargo" | ".config"), _) => {
                touched.extend(members.keys().cloned());
            }
            _ => {
                touched.insert("xtask".to_owned());
            }
        }
    }
    touched.retain(|name| members.contains_key(name));
    loop {
        let depend = |member: &&Member| {
            member.uses.iter().chain(&member.uses_in_tests).any(|used| touched.contains(used))
        };
        let more: Vec<String> = members
            .iter()
            .filter(|(name, _)| !touched.contains(*name))
            .filter(|(_, member)| depend(member))
            .map(|(name, _)| name.clone())
            .collect();
        if more.is_empty() {
            return touched;
        }
        touched.extend(more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(uses: &[&str], in_tests: &[&str]) -> Member {
        let set = |names: &[&str]| names.iter().map(|name| format!("windlass-{name}")).collect();
        Member { uses: set(uses), uses_in_tests: set(in_tests) }
    }

    fn members() -> BTreeMap<String, Member> {
        BTreeMap::from([
            ("windlass-model".to_owned(), member(&[], &[])),
            ("windlass-testkit".to_owned(), member(&[], &[])),
            ("windlass-agent".to_owned(), member(&["model"], &["testkit"])),
            ("windlass-server".to_owned(), member(&["model"], &["testkit"])),
            ("windlass-cli".to_owned(), member(&["server"], &[])),
            ("xtask".to_owned(), member(&[], &[])),
        ])
    }

    #[track_caller]
    fn check(files: &[&str], expect: &[&str]) {
        let files = files.iter().map(|file| (*file).to_owned()).collect();
        let found = affected_packages(&members(), &files);
        assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), expect);
    }

    #[test]
    fn a_changed_crate_selects_its_transitive_dependents() {
        check(&["crates/agent/src/main.rs"], &["windlass-agent"]);
        check(&["crates/server/src/lib.rs"], &["windlass-cli", "windlass-server"]);
        check(
            &["crates/testkit/src/lib.rs"],
            &["windlass-agent", "windlass-cli", "windlass-server", "windlass-testkit"],
        );
    }

    #[test]
    fn workspace_settings_select_every_crate_and_documents_only_xtask() {
        check(
            &["Cargo.lock"],
            &[
                "windlass-agent",
                "windlass-cli",
                "windlass-model",
                "windlass-server",
                "windlass-testkit",
                "xtask",
            ],
        );
        check(&["docs/cli.md", "xtask/src/main.rs"], &["xtask"]);
        check(&[], &[]);
        check(&["crates/gone/src/lib.rs"], &[]);
    }
}
