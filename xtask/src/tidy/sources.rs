//! Rules about source files: their names, sizes and content.

use std::path::Path;

use anyhow::Result;

use super::Problems;
use crate::workspace::{TEST_CRATES, Workspace};

const LINES_MAX: usize = 700;
/// Names that do not describe the content.
const VAGUE_NAMES: &[&str] = &["common", "utils", "util", "helpers", "helper", "misc", "manager"];
const DB: &str = "crates/db/src";
/// Tests are never ignored, have a sentence as their name, and assert the failure that they expect. Written in halves,
/// so that this file does not match.
const NOT_IN_TESTS: &[&str] =
    &[concat!("#[ign", "ore"), concat!("#[should_", "panic"), concat!("fn te", "st_")];

/// What the database code must not depend on: the network and the layers above it. The table of crates allows it none of
/// ours.
const FOREIGN_TO_DB: &[&str] = &["axum", "hyper", "hyper-util", "reqwest", "russh", "bollard"];

fn rust_files(workspace: &Workspace) -> Result<Vec<String>> {
    Ok(workspace.files()?.into_iter().filter(|path| path.ends_with(".rs")).collect())
}

pub(super) fn check_names(workspace: &Workspace) -> Result<Problems> {
    let files = rust_files(workspace)?;
    Ok(files.iter().filter_map(|path| is_vague(path)).collect())
}

fn is_vague(path: &str) -> Option<String> {
    let mut parts = Path::new(path).with_extension("");
    loop {
        let name = parts.file_name()?.to_str()?;
        if VAGUE_NAMES.contains(&name) {
            return Some(format!("`{path}`: `{name}` is too vague; name it after its contents"));
        }
        parts = parts.parent()?.to_owned();
    }
}

pub(super) fn check_lengths(workspace: &Workspace) -> Result<Problems> {
    let mut problems = Vec::new();
    for path in rust_files(workspace)?.iter().filter(|path| path.contains("/src/")) {
        let lines = workspace.read(path)?.lines().count();
        if lines > LINES_MAX {
            problems.push(format!("`{path}` has {lines} lines; the limit is {LINES_MAX}"));
        }
    }
    Ok(problems)
}

pub(super) fn check_sql_location(workspace: &Workspace) -> Result<Problems> {
    let mut problems = Vec::new();
    let product = |path: &&String| path.starts_with("crates/") && !is_sql_allowed(path);
    for path in rust_files(workspace)?.iter().filter(product) {
        let source = workspace.read(path)?;
        let found = source.lines().enumerate().filter(|(_, line)| has_sql(line));
        problems.extend(found.map(|(at, _)| format!("`{path}:{}`: SQL belongs in `{DB}/`", at + 1)));
    }
    Ok(problems)
}

/// Checkers read the database independently of the code they check; so may tests.
fn is_sql_allowed(path: &str) -> bool {
    path.contains("/tests/") || path.starts_with(DB) || TEST_CRATES.iter().any(|dir| path.starts_with(dir))
}

/// Returns whether a line starts a statement at the start of a literal or of the line; words in a sentence do not
/// count.
fn has_sql(line: &str) -> bool {
    let verbs = ["SELECT ", "INSERT INTO ", "UPDATE ", "DELETE FROM "];
    verbs.iter().any(|verb| line.contains(&format!("\"{verb}")) || line.trim_start().starts_with(verb))
}

pub(super) fn check_db_dependencies(workspace: &Workspace) -> Result<Problems> {
    const MANIFEST: &str = "crates/db/Cargo.toml";
    let manifest = workspace.read(MANIFEST)?;
    let dependency = |line: &str| line.split(['.', ' ', '=']).next().unwrap_or_default().to_owned();
    let found = manifest.lines().map(dependency).filter(|name| FOREIGN_TO_DB.contains(&name.as_str()));
    Ok(found.map(|name| format!("`{MANIFEST}` must not depend on `{name}`")).collect())
}

pub(super) fn check_tests_enabled(workspace: &Workspace) -> Result<Problems> {
    let mut problems = Vec::new();
    for path in rust_files(workspace)? {
        let source = workspace.read(&path)?;
        for (at, line) in source.lines().enumerate() {
            let found = NOT_IN_TESTS.iter().filter(|text| line.contains(**text));
            problems.extend(found.map(|text| format!("`{path}:{}`: `{text}` is not allowed", at + 1)));
        }
    }
    Ok(problems)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vague_file_and_folder_names_are_found() {
        assert!(is_vague("crates/server/src/utils.rs").is_some());
        assert!(is_vague("crates/server/src/common/time.rs").is_some());
        assert!(is_vague("crates/db/src/unit.rs").is_none());
    }

    #[test]
    fn sql_statements_are_detected_in_literals_and_at_line_starts() {
        assert!(has_sql("    db.query(\"SELECT id FROM runs\")"));
        assert!(has_sql("        INSERT INTO runs (id) VALUES ($1)"));
        assert!(!has_sql("    /// UPDATE is a word in a sentence."));
        assert!(!has_sql("    let UPDATE_EVERY = 3;"));
        assert!(!has_sql("    UPDATES.push(1);"));
    }

    #[test]
    fn only_the_db_module_and_test_code_may_contain_sql() {
        assert!(is_sql_allowed("crates/db/src/jobs.rs"));
        assert!(is_sql_allowed("crates/server-tests/tests/it/runs.rs"));
        assert!(is_sql_allowed("crates/sim/src/invariants.rs"));
        assert!(is_sql_allowed("crates/testenv/src/replicas.rs"));
        assert!(!is_sql_allowed("crates/server/src/services/runs.rs"));
    }
}
