//! Rules about documents: decisions, the commands of the README, and terms that no file may mention.

use std::{collections::BTreeSet, path::Path};

use anyhow::{Context, Result};

use super::Problems;
use crate::workspace::Workspace;

const DECISIONS: &str = "docs/decisions/";
const DEPENDENCIES: &str = "docs/decisions/0002-dependencies.md";
const HEADINGS: &[&str] = &["## Status", "## Context", "## Decision"];
/// Commands that the README documents; each does all its setup.
const COMMANDS: &[&str] = &["cargo xtask demo", "cargo xtask test"];

/// Directories of development machines. Written in halves, so that this file does not match.
const WORK_PATHS: &[&str] = &[concat!("/wo", "rk/"), concat!("/s", "rv/"), concat!("/ro", "ot/")];
/// Documents that are not part of the repository.
const FOREIGN_DOCUMENTS: &[&str] =
    &[concat!("DESIGN", ".md"), concat!("STYLE", ".md"), concat!("BRIEF", ".md"), concat!("fac", "ts/")];
/// In these files a path may be one inside a container.
const CONTAINER_PATHS: &[&str] = &[".rs", ".yml", ".yaml", ".json"];

pub(super) fn check_decisions(workspace: &Workspace) -> Result<Problems> {
    let mut problems = Vec::new();
    for path in workspace.files()?.iter().filter(|path| path.starts_with(DECISIONS)) {
        let text = workspace.read(path)?;
        let missing = HEADINGS.iter().filter(|heading| !text.lines().any(|line| line == **heading));
        problems.extend(missing.map(|heading| format!("`{path}` has no heading `{heading}`")));
    }
    Ok(problems)
}

pub(super) fn check_readme_commands(workspace: &Workspace) -> Result<Problems> {
    let text = workspace.read("README.md")?;
    let readme = fenced_commands(&text);
    let script = workspace.read(".ci/run")?;
    let ci: Vec<&str> = script.lines().map(str::trim).filter(|line| line.starts_with("cargo ")).collect();
    let mut problems = Vec::new();
    if readme != COMMANDS {
        problems
            .push(format!("the first block of commands in README.md is {readme:?}; expected {COMMANDS:?}"));
    }
    if ci != ["cargo xtask test"] {
        problems.push(format!(".ci/run calls {ci:?}; expected only `cargo xtask test`"));
    }
    Ok(problems)
}

/// Returns the commands of the first fenced block, without their comments.
fn fenced_commands(markdown: &str) -> Vec<&str> {
    let block = markdown.lines().skip_while(|line| !line.starts_with("```")).skip(1);
    let lines = block.take_while(|line| !line.starts_with("```"));
    lines
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .filter(|line| !line.is_empty())
        .collect()
}

/// Checks that each row of the README's status table names an existing test; "not yet" needs none.
pub(super) fn check_status_table(workspace: &Workspace) -> Result<Problems> {
    let text = workspace.read("README.md")?;
    let rows = status_rows(&text);
    let mut problems = Vec::new();
    if rows.is_empty() {
        problems.push("README.md has no status table".to_owned());
    }
    let mut missing: Vec<&str> = rows.iter().filter_map(|(_, test)| *test).collect();
    for path in workspace.files()?.iter().filter(|path| path.ends_with(".rs")) {
        let source = workspace.read(path)?;
        missing.retain(|test| !source.contains(&format!("fn {test}(")));
    }
    problems.extend(
        missing.iter().map(|test| format!("README.md's status names `{test}`, which does not exist")),
    );
    let unproved = rows.iter().filter(|(row, test)| test.is_none() && !row.ends_with("| not yet |"));
    problems.extend(unproved.map(|(row, _)| format!("README.md's status names no test for {row}")));
    Ok(problems)
}

/// Returns the rows of the status table, each with the test that it names.
fn status_rows(markdown: &str) -> Vec<(&str, Option<&str>)> {
    let section = markdown.split("\n## ").find(|section| section.starts_with("Status\n")).unwrap_or_default();
    let table = section.lines().filter(|line| line.starts_with("| ")).skip(2);
    table
        .map(|row| (row, row.split_once("<!-- test: ").and_then(|(_, rest)| rest.split(' ').next())))
        .collect()
}

pub(super) fn check_work_paths(workspace: &Workspace) -> Result<Problems> {
    let mut problems = Vec::new();
    for path in workspace.files()? {
        let bytes =
            std::fs::read(workspace.root.join(&path)).with_context(|| format!("failed to read `{path}`"))?;
        // Binary files, such as images, are skipped.
        let Ok(text) = String::from_utf8(bytes) else { continue };
        let found = text.lines().enumerate().filter_map(|(at, line)| Some((at, find_mention(&path, line)?)));
        problems.extend(found.map(|(at, word)| format!("`{path}:{}` mentions `{word}`", at + 1)));
    }
    Ok(problems)
}

fn find_mention(path: &str, line: &str) -> Option<&'static str> {
    let in_container = CONTAINER_PATHS.iter().any(|end| path.ends_with(end));
    let home = WORK_PATHS[2];
    let absolute = |place: &str| {
        line.match_indices(place).any(|(at, _)| {
            let before = line[..at].chars().next_back();
            !before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '}' | '/' | '~'))
        })
    };
    let places = WORK_PATHS.iter().filter(|place| !(in_container && **place == home));
    places
        .copied()
        .find(|place| absolute(place))
        .or_else(|| FOREIGN_DOCUMENTS.iter().copied().find(|w| find_foreign_document(line, w)))
}

/// Returns whether a line contains a path component as a whole: `artifacts/` does not contain the one that ends alike.
fn find_foreign_document(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| !line[..at].ends_with(char::is_alphanumeric))
}

/// Checks that links between documents lead to an existing file or directory.
pub(super) fn check_links(workspace: &Workspace) -> Result<Problems> {
    let mut problems = Vec::new();
    for path in workspace.files()?.iter().filter(|path| path.ends_with(".md")) {
        let text = workspace.read(path)?;
        let folder =
            workspace.root.join(path).parent().context("a document has no parent directory")?.to_owned();
        let dead = local_links(&text).into_iter().filter(|link| !folder.join(link).exists());
        problems.extend(dead.map(|link| format!("`{path}` links to `{link}`, which does not exist")));
    }
    Ok(problems)
}

fn local_links(markdown: &str) -> Vec<&str> {
    let targets = markdown.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let targets = targets.filter(|target| !target.contains("://") && !target.starts_with("mailto:"));
    targets.filter_map(|target| target.split('#').next()).filter(|path| !path.is_empty()).collect()
}

/// Checks that every external crate that a member uses is in the record of dependencies.
pub(super) fn check_dependencies(workspace: &Workspace) -> Result<Problems> {
    let record = workspace.read(DEPENDENCIES)?;
    let metadata = workspace.metadata(&["--no-deps"])?;
    let packages = metadata["packages"].as_array().context("cargo's metadata has no packages")?;
    let lists = packages.iter().filter_map(|package| package["dependencies"].as_array());
    let foreign = lists.flatten().filter(|dependency| dependency["path"].is_null());
    let names: BTreeSet<&str> = foreign.filter_map(|dependency| dependency["name"].as_str()).collect();
    let missing = names.iter().filter(|name| !record.contains(&format!("\n| `{name}` |")));
    let file = Path::new(DEPENDENCIES).display();
    Ok(missing.map(|name| format!("`{file}` gives no reason for `{name}`")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_the_status_table_are_read_with_their_tests() {
        let text = "# a\n\n## Status\n\n| part | state |\n| --- | --- |\n| x | works <!-- test: it_works --> |\n| y | not yet |\n\n## b\n| z | |\n";
        let rows = status_rows(text);
        assert_eq!(
            rows,
            [("| x | works <!-- test: it_works --> |", Some("it_works")), ("| y | not yet |", None)]
        );
    }

    #[test]
    fn work_paths_are_found_and_similar_text_is_not() {
        assert!(find_mention("README.md", &format!("cd {}x", WORK_PATHS[0])).is_some());
        assert!(find_mention("a.rs", &format!("\"{}x\"", WORK_PATHS[1])).is_some());
        assert!(find_mention("README.md", &format!("cd {}x", WORK_PATHS[2])).is_some());
        assert!(find_mention("examples/cache.yml", &format!("- /data:{}.cache", WORK_PATHS[2])).is_none());
        assert!(find_mention("README.md", &format!("see https://example.org{}x", WORK_PATHS[0])).is_none());
        assert!(find_mention("README.md", &format!("the folder a{}b", WORK_PATHS[0])).is_none());
    }

    #[test]
    fn mentions_of_documents_outside_the_repository_are_found() {
        assert!(find_mention("a.rs", &format!("// see {}", FOREIGN_DOCUMENTS[0])).is_some());
        assert!(find_mention("a.rs", &format!("// {}invariants", FOREIGN_DOCUMENTS[3])).is_some());
        assert!(find_mention("a.rs", &format!("arti{}", FOREIGN_DOCUMENTS[3])).is_none());
    }

    #[test]
    fn local_links_are_distinguished_from_urls_and_anchors() {
        let text = "[a](b.md#c), [d](https://example.org/x) and [e](#f), [g](h/i.md)";
        assert_eq!(local_links(text), ["b.md", "h/i.md"]);
    }

    #[test]
    fn commands_are_read_from_the_first_code_block() {
        let text = "# x\n\n```sh\ncargo a   # what it does\n\ncargo b\n```\n\n```sh\ncargo c\n```\n";
        assert_eq!(fenced_commands(text), ["cargo a", "cargo b"]);
    }
}
