//! Generated files: JSON Schema, transition tables, OpenAPI, snapshots of the command line.
//!
//! Each is written by the test that compares it, so generator and check cannot diverge. Such a test reads `UPDATE` from
//! the environment, which is how the crates that contain one are found.

use std::{collections::BTreeSet, process::Command};

use anyhow::{Result, ensure};

use crate::{output, process, workspace::Workspace};

/// Expression with which a test checks whether to write instead of compare.
const UPDATE_MARKER: &str = "var_os(\"UPDATE\")";

pub(crate) fn run(workspace: &Workspace, check: bool) -> Result<()> {
    let crates = crates_with_generated_files(workspace)?;
    ensure!(!crates.is_empty(), "no test under `crates/` compares a generated file");
    let mut command = workspace.cargo();
    command.args(["nextest", "run"]).args(crates.iter().flat_map(|name| ["-p", name]));
    if check {
        return process::run(command.env_remove("UPDATE"));
    }
    process::run(command.env("UPDATE", "1"))?;
    let mut status = Command::new("git");
    status.current_dir(&workspace.root).args([
        "status",
        "--short",
        "--",
        "docs",
        "schema",
        "crates/cli/tests/snapshots",
    ]);
    let changed = process::run_for_stdout(&mut status)?;
    output::print_result(if changed.is_empty() { "no changes" } else { changed.trim_end() });
    Ok(())
}

fn crates_with_generated_files(workspace: &Workspace) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for path in workspace.files()?.iter().filter(|path| path.ends_with(".rs")) {
        let folder = path.strip_prefix("crates/").and_then(|rest| rest.split('/').next());
        if let Some(folder) = folder
            && workspace.read(path)?.contains(UPDATE_MARKER)
        {
            found.insert(format!("windlass-{folder}"));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codegen_finds_the_crate_of_the_transition_tables() {
        assert!(crates_with_generated_files(&Workspace::find().unwrap()).unwrap().contains("windlass-model"));
    }
}
