//! Checks the head of each pipeline, which lists what it claims, which columns it owns and what wakes it. A column has
//! one owner, or several that each name the statuses for which they own it: `jobs.status (Running)`.

use std::collections::BTreeMap;

use anyhow::Result;

use super::Problems;
use crate::workspace::Workspace;

const PIPELINES_DIR: &str = "crates/server/src/pipelines/";
const HEAD_FIELDS: &[&str] = &["Claims", "Owns", "Wakes"];

pub(super) fn check(workspace: &Workspace) -> Result<Problems> {
    let is_pipeline = |path: &String| {
        let name = path.strip_prefix(PIPELINES_DIR).and_then(|rest| rest.strip_suffix(".rs"));
        name.is_some_and(|name| name != "mod" && !name.contains('/'))
    };
    let mut heads = Vec::new();
    for path in workspace.files()?.into_iter().filter(is_pipeline) {
        let source = workspace.read(&path)?;
        heads.push((path, source));
    }
    Ok(find_problems(&heads))
}

fn find_problems(heads: &[(String, String)]) -> Problems {
    let mut problems = Vec::new();
    let mut owners: BTreeMap<String, Vec<(&str, bool)>> = BTreeMap::new();
    for (path, source) in heads {
        for word in HEAD_FIELDS.iter().filter(|word| head_entry(source, word).is_none()) {
            problems.push(format!("`{path}`: the module comment has no line `{word}`"));
        }
        for (column, qualified) in parse_columns(&head_entry(source, "Owns").unwrap_or_default()) {
            owners.entry(column).or_default().push((path, qualified));
        }
    }
    for (column, claims) in owners {
        if claims.len() > 1 && claims.iter().any(|(_, qualified)| !qualified) {
            let paths: Vec<&str> = claims.iter().map(|(path, _)| *path).collect();
            problems.push(format!("column `{column}` has several owners: {}", paths.join(", ")));
        }
    }
    problems
}

/// Returns the text after `//! WORD`, with the indented lines that continue it.
fn head_entry(source: &str, word: &str) -> Option<String> {
    let mut head = source.lines().map_while(|line| line.strip_prefix("//!"));
    let starts = |line: &&str| line.strip_prefix(' ').and_then(|rest| rest.strip_prefix(word)).is_some();
    let first = head.by_ref().find(starts)?;
    let mut text = first.trim().strip_prefix(word)?.trim().to_owned();
    for line in head.take_while(|line| line.starts_with("    ")) {
        text.push(' ');
        text.push_str(line.trim());
    }
    Some(text)
}

/// Parses `jobs.status (those), jobs.seen_at.` to `jobs.status`, qualified, and `jobs.seen_at`, not qualified.
fn parse_columns(owns: &str) -> Vec<(String, bool)> {
    let mut found: Vec<(String, bool)> = Vec::new();
    let mut depth = 0_usize;
    for word in owns.split_whitespace() {
        if depth == 0
            && word.starts_with('(')
            && let Some(last) = found.last_mut()
        {
            last.1 = true;
        }
        let name = word.trim_end_matches([',', '.', ';']).trim_matches('`');
        let is_name =
            |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_lowercase() || c == '_');
        if depth == 0 && name.split_once('.').is_some_and(|(table, column)| is_name(table) && is_name(column))
        {
            found.push((name.to_owned(), false));
        }
        depth = (depth + word.matches('(').count()).saturating_sub(word.matches(')').count());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(owns: &str) -> String {
        format!(
            "//! Pipeline `x`.\n//!\n//! Claims   jobs.\n//! Owns     {owns}\n//! Wakes    on hint.\n\nuse a;\n"
        )
    }

    fn found(heads: &[(&str, String)]) -> Problems {
        let heads: Vec<_> = heads.iter().map(|(path, text)| ((*path).to_owned(), text.clone())).collect();
        find_problems(&heads)
    }

    #[test]
    fn a_pipeline_header_with_a_missing_line_is_a_problem() {
        assert!(
            found(&[("a.rs", head("jobs.status (Running), jobs.seen_at,\n//!          jobs.note."))])
                .is_empty()
        );
        assert_eq!(found(&[("a.rs", "//! Claims jobs.\n//! Owns jobs.status.\n".to_owned())]).len(), 1);
    }

    #[test]
    fn two_owners_of_a_column_are_a_problem_unless_both_name_their_statuses() {
        let both =
            [("a.rs", head("jobs.status (Running), jobs.note.")), ("b.rs", head("jobs.status (Done)."))];
        assert!(found(&both).is_empty());
        let clash = [("a.rs", head("jobs.status (Running).")), ("b.rs", head("jobs.status."))];
        assert_eq!(found(&clash).len(), 1);
    }

    #[test]
    fn columns_on_continuation_lines_are_parsed() {
        let text = head_entry(&head("jobs.a,\n//!          jobs.b (Pulling, Running)."), "Owns").unwrap();
        assert_eq!(parse_columns(&text), [("jobs.a".to_owned(), false), ("jobs.b".to_owned(), true)]);
    }
}
