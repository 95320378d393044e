//! JSON columns: the server decodes them with `windlass_db::documents`, so that an error names the table and the row.

use anyhow::Result;

use super::Problems;
use crate::workspace::Workspace;

const SOURCES: &[&str] = &["crates/db/src/", "crates/server/src/"];
const PARSERS: &[&str] = &["serde_json::from_str", "serde_json::from_slice"];

/// Files that parse JSON which is in no column: requests, files, responses of other servers; and the decoder itself.
const OTHER_JSON: &[&str] = &[
    "crates/db/src/documents.rs",
    "crates/db/src/value.rs",
    "crates/server/src/config/projects.rs",
    "crates/server/src/http/terminal.rs",
    "crates/server/src/oidc.rs",
    "crates/server/src/oidc/id_token.rs",
    "crates/server/src/routes/arvados/call.rs",
    "crates/server/src/routes/arvados/socket.rs",
    "crates/server/src/services/oidc.rs",
];

pub(super) fn check(workspace: &Workspace) -> Result<Problems> {
    let mut problems = Problems::new();
    for path in workspace.files()? {
        if !SOURCES.iter().any(|folder| path.starts_with(folder)) || !path.ends_with(".rs") || is_test(&path)
        {
            continue;
        }
        problems.extend(problem(&path, &workspace.read(&path)?));
    }
    Ok(problems)
}

fn is_test(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.ends_with("_tests.rs") || path.contains("/tests/")
}

fn problem(path: &str, source: &str) -> Option<String> {
    let product = source.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
    let parses = PARSERS.iter().any(|parser| product.contains(parser));
    match (parses, OTHER_JSON.contains(&path)) {
        (true, false) => Some(format!(
            "`{path}` parses JSON: decode a column with `db::documents`, or add the file to \
             `xtask/src/tidy/json_columns.rs` if the text is in no column"
        )),
        (false, true) => Some(format!("`{path}` no longer parses JSON: remove it from the list")),
        (true, true) | (false, false) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_files_parse_json_and_tests_may() {
        let parses = "fn f() { serde_json::from_str(text).ok() }";
        assert!(problem("crates/server/src/new.rs", parses).is_some());
        assert!(problem(OTHER_JSON[0], parses).is_none());
        assert!(problem(OTHER_JSON[0], "fn f() {}").is_some());
        let test = format!("fn f() {{}}\n#[cfg(test)]\nmod tests {{ {parses} }}");
        assert!(problem("crates/server/src/new.rs", &test).is_none());
    }
}
