//! Licences of all dependencies, from cargo's metadata: works offline, never skips.
//!
//! The permitted licences are those in `deny.toml`, which cargo-deny uses too.

use std::collections::BTreeSet;

use anyhow::{Context, Result};

use super::Problems;
use crate::workspace::Workspace;

pub(super) fn check(workspace: &Workspace) -> Result<Problems> {
    let allowed = allowed(&workspace.read("deny.toml")?)?;
    let metadata = workspace.metadata(&["--filter-platform", "host-tuple"])?;
    let packages = metadata["packages"].as_array().context("cargo's metadata has no packages")?;
    let mut problems = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        match package["license"].as_str() {
            None => problems.push(format!("`{name}` does not state its licence")),
            Some(text) if !permits(text, &allowed) => {
                problems.push(format!("`{name}` has the licence `{text}`, which is not allowed"))
            }
            Some(_) => {}
        }
    }
    Ok(problems)
}

/// Returns the names between `allow = [` and `]` in the section `[licenses]`.
fn allowed(deny: &str) -> Result<BTreeSet<String>> {
    let section = deny.split("[licenses]").nth(1).context("deny.toml has no section [licenses]")?;
    let list = section.split("allow = [").nth(1).and_then(|rest| rest.split(']').next());
    let list = list.context("deny.toml has no list `allow`")?;
    Ok(list.split('"').skip(1).step_by(2).map(str::to_owned).collect())
}

/// Checks an SPDX expression against the list. `AND` binds tighter than `OR`; the old `/` means `OR`. An exception
/// after `WITH` only ever permits more.
fn permits(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let verdict = parse_or(&words, &mut at, allowed);
    verdict && at == words.len()
}

fn parse_or(words: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut verdict = parse_and(words, at, allowed);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        verdict |= parse_and(words, at, allowed);
    }
    verdict
}

fn parse_and(words: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut verdict = parse_term(words, at, allowed);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        verdict &= parse_term(words, at, allowed);
    }
    verdict
}

fn parse_term(words: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let Some(word) = words.get(*at) else { return false };
    *at += 1;
    if *word == "(" {
        let verdict = parse_or(words, at, allowed);
        let closed = words.get(*at) == Some(&")");
        *at += 1;
        return verdict && closed;
    }
    if words.get(*at) == Some(&"WITH") {
        *at += 2;
    }
    allowed.contains(*word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_expressions_are_evaluated_with_their_operators() {
        let allowed = allowed("[licenses]\nallow = [\n  \"MIT\",\n  \"Apache-2.0\",\n]\n").unwrap();
        for good in [
            "MIT",
            "MIT/Apache-2.0",
            "GPL-3.0 OR MIT",
            "(MIT OR GPL-3.0) AND Apache-2.0",
            "Apache-2.0 WITH LLVM-exception",
        ] {
            assert!(permits(good, &allowed), "{good}");
        }
        for bad in
            ["GPL-3.0", "MIT AND GPL-3.0", "(MIT", "", "MIT GPL-3.0", "GPL-2.0 WITH Classpath-exception-2.0"]
        {
            assert!(!permits(bad, &allowed), "{bad}");
        }
    }
}
