//! Generated files: JSON Schema, transition tables, OpenAPI.
//!
//! Each is written by the test that compares it, so generator and check cannot drift apart.
//! `UPDATE=1` turns the comparison into a write.

use std::process::Command;

use anyhow::{Result, bail};

use crate::{out, process, workspace::Workspace};

const CRATES: &[&str] = &["windlass-model", "windlass-api"];
/// Tests that keep a generated file carry one of these words in their name.
const FILTER: &str = "test(/schema|transition|openapi|generated/)";
const GENERATED: &[&str] = &["schema", "docs/transitions", "docs/openapi.json"];

pub(crate) fn run(workspace: &Workspace, check: bool) -> Result<()> {
    let mut command = workspace.cargo();
    command.args(["nextest", "run", "--no-tests", "fail", "-E", FILTER]);
    for name in CRATES {
        command.args(["-p", name]);
    }
    if check {
        return process::run(command.env_remove("UPDATE"));
    }
    process::run(command.env("UPDATE", "1"))?;
    let paths: Vec<&str> =
        GENERATED.iter().copied().filter(|path| workspace.root.join(path).exists()).collect();
    if paths.is_empty() {
        bail!("the tests ran, but none of {} exists", GENERATED.join(", "));
    }
    let mut status = Command::new("git");
    status.current_dir(&workspace.root).args(["status", "--short", "--"]).args(&paths);
    let changed = process::read(&mut status)?;
    out::say(if changed.is_empty() { "nothing changed" } else { changed.trim_end() });
    Ok(())
}
