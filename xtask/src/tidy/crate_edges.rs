//! Permitted dependencies between crates: compares the table in ARCHITECTURE.md with cargo's metadata.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};

use super::Problems;
use crate::workspace::{Member, Workspace};

type CrateEdges = BTreeMap<String, BTreeSet<String>>;

/// Not part of the table: it builds the others.
const XTASK: &str = "xtask";

pub(super) fn check(workspace: &Workspace) -> Result<Problems> {
    let allowed = documented_edges(&workspace.read("ARCHITECTURE.md")?)?;
    Ok(compare(&allowed, &actual_edges(&workspace.members()?)))
}

fn actual_edges(members: &BTreeMap<String, Member>) -> CrateEdges {
    let short = |name: &String| name.strip_prefix("windlass-").unwrap_or(name).to_owned();
    let others = members.iter().filter(|(name, _)| *name != XTASK);
    others.map(|(name, member)| (short(name), member.uses.iter().map(short).collect())).collect()
}

/// Parses rows like ``| `server` | what it is | model, api |``. `—` means none, `all` every crate, `all but agent`
/// every other crate; neither includes the crate itself.
fn documented_edges(markdown: &str) -> Result<CrateEdges> {
    let mut rows = BTreeMap::new();
    for line in markdown.lines().skip_while(|line| !line.contains("may use, of ours")).skip(2) {
        if !line.starts_with('|') {
            break;
        }
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        ensure!(cells.len() == 3, "a row of the crate table must have three cells: `{line}`");
        let name = cells[0].trim_matches('`');
        rows.insert(name.to_owned(), cells[2].to_owned());
    }
    ensure!(!rows.is_empty(), "ARCHITECTURE.md has no crate table with the column `may use, of ours`");
    let names: BTreeSet<String> = rows.keys().cloned().collect();
    rows.iter().map(|(name, cell)| Ok((name.clone(), parse_uses(name, cell, &names)?))).collect()
}

fn parse_uses(name: &str, cell: &str, names: &BTreeSet<String>) -> Result<BTreeSet<String>> {
    if cell == "—" {
        return Ok(BTreeSet::new());
    }
    if let Some(rest) = cell.strip_prefix("all") {
        let but: BTreeSet<&str> = rest
            .trim()
            .strip_prefix("but")
            .into_iter()
            .flat_map(|list| list.split(','))
            .map(str::trim)
            .collect();
        let all = names.iter().filter(|other| *other != name && !but.contains(other.as_str()));
        return Ok(all.cloned().collect());
    }
    let one = |other: &str| {
        names
            .get(other)
            .cloned()
            .with_context(|| format!("`{name}` uses `{other}`, which is not in the table"))
    };
    cell.split(',').map(str::trim).map(one).collect()
}

fn compare(allowed: &CrateEdges, actual: &CrateEdges) -> Problems {
    let mut problems = Vec::new();
    for name in allowed.keys().chain(actual.keys()).collect::<BTreeSet<_>>() {
        match (allowed.get(name), actual.get(name)) {
            (Some(may), Some(does)) => {
                problems.extend(does.difference(may).map(|used| format!("`{name}` must not use `{used}`")));
            }
            (None, _) => problems.push(format!("crate `{name}` is missing in the table of ARCHITECTURE.md")),
            (_, None) => {
                problems.push(format!("the table of ARCHITECTURE.md names `{name}`, which is not a crate"))
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
text
| crate | what it is | may use, of ours |
| --- | --- | --- |
| `model` | pure | — |
| `api` | wire | model |
| `agent` | machines | model, api |
| `cli` | people | all but agent |
| `testkit` | tests | all |

more";

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn dependency_table_is_parsed_including_all_and_all_but() {
        let edges = documented_edges(TABLE).unwrap();
        assert_eq!(edges["model"], set(&[]));
        assert_eq!(edges["agent"], set(&["model", "api"]));
        assert_eq!(edges["cli"], set(&["model", "api", "testkit"]));
        assert_eq!(edges["testkit"], set(&["model", "api", "agent", "cli"]));
    }

    #[test]
    fn undocumented_edges_and_unknown_crates_are_problems() {
        let allowed = documented_edges(TABLE).unwrap();
        let mut actual = allowed.clone();
        assert!(compare(&allowed, &actual).is_empty());
        actual.insert("model".to_owned(), set(&["api"]));
        actual.insert("extra".to_owned(), set(&[]));
        actual.remove("api");
        let problems = compare(&allowed, &actual);
        assert_eq!(problems.len(), 3, "{problems:?}");
    }

    #[test]
    fn a_dependency_table_with_an_unknown_crate_is_rejected() {
        assert!(documented_edges("| crate | x | may use, of ours |\n|-|-|-|\n| `a` | x | b |").is_err());
        assert!(documented_edges("no table").is_err());
    }
}
