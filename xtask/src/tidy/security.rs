//! Security rules: the list of attacks is complete and names existing tests; unsafe code and shells are limited to the
//! listed files.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use super::Problems;
use crate::workspace::{TEST_CRATES, Workspace};

const DOCUMENT: &str = "docs/security.md";
const ATTACKS: u32 = 29;
/// Crates that may replace the workspace's ban of unsafe code with a lint that is allowed case by case.
const UNSAFE_CRATES: &[&str] = &["crates/agent/"];
/// Files that start a shell on purpose: one that the job's user requested, and one for debug builds.
const SHELL_FILES: &[&str] = &[
    "crates/agent/src/runner/ssh/program.rs",
    "crates/agent/src/runner/init.rs",
    // Runs a script of windlass, locally or on a host; all arguments in it are quoted.
    "crates/cli/src/commands/gateway/install.rs",
];

/// One row of the table.
struct AttackRow<'a> {
    number: u32,
    state: &'a str,
    tests: Vec<&'a str>,
    missing: &'a str,
}

fn parse_row(line: &str) -> Option<AttackRow<'_>> {
    let cells: Vec<&str> = line.strip_prefix('|')?.strip_suffix('|')?.split('|').map(str::trim).collect();
    let [number, _, state, tests, missing] = cells[..] else { return None };
    let tests = tests.split('`').skip(1).step_by(2).collect();
    Some(AttackRow { number: number.parse().ok()?, state, tests, missing })
}

pub(super) fn check_attacks(workspace: &Workspace) -> Result<Problems> {
    let known = known_functions(workspace)?;
    let text = workspace.read(DOCUMENT)?;
    let mut problems = find_problems(&text, &known);
    let words = text.split('`').skip(1).step_by(2);
    let tests = words
        .filter(|word| word.contains('_') && word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'));
    let lost = tests.filter(|name| !known.contains(*name));
    problems.extend(lost.map(|name| format!("`{DOCUMENT}` names `{name}`, which is not a test")));
    Ok(problems)
}

/// Names of all functions of the workspace, which include all tests.
pub(super) fn known_functions(workspace: &Workspace) -> Result<BTreeSet<String>> {
    let mut known = BTreeSet::new();
    for path in workspace.files()?.iter().filter(|path| path.ends_with(".rs")) {
        known.extend(function_names(&workspace.read(path)?).map(str::to_owned));
    }
    Ok(known)
}

fn function_names(source: &str) -> impl Iterator<Item = &str> {
    let name = |rest: &str| rest.find('(').or_else(|| rest.find('<')).unwrap_or(0);
    source.split("fn ").skip(1).map(move |rest| &rest[..name(rest)])
}

fn find_problems(text: &str, known: &BTreeSet<String>) -> Problems {
    let mut problems = Vec::new();
    let mut seen: BTreeMap<u32, usize> = BTreeMap::new();
    for row in text.lines().filter_map(parse_row) {
        *seen.entry(row.number).or_default() += 1;
        let at = format!("attack {}", row.number);
        match row.state {
            "proven" if row.tests.is_empty() => problems.push(format!("{at} is `proven` but names no test")),
            "partly" if row.tests.is_empty() => {
                problems.push(format!("{at} is `partly` proven but names no test"))
            }
            "partly" | "later" if row.missing.is_empty() => {
                problems.push(format!("{at} does not state what is missing"))
            }
            "proven" | "partly" | "later" => {}
            other => problems.push(format!("{at} has the unknown state `{other}`")),
        }
        let commands = |name: &&&str| name.starts_with("cargo xtask ");
        let lost = row.tests.iter().filter(|name| !known.contains(**name) && !commands(name));
        problems.extend(lost.map(|name| format!("{at} names `{name}`, which is not a test")));
    }
    let wrong = (1..=ATTACKS).filter(|number| seen.get(number) != Some(&1));
    problems.extend(wrong.map(|number| format!("attack {number} is not listed exactly once")));
    problems
}

/// Checks that every crate uses the workspace's lints, which forbid unsafe code, except for those listed.
pub(super) fn check_unsafe_code(workspace: &Workspace) -> Result<Problems> {
    let mut problems = Vec::new();
    for path in workspace.files()?.iter().filter(|path| path.ends_with("/Cargo.toml")) {
        let text = workspace.read(path)?;
        let listed = UNSAFE_CRATES.iter().any(|place| path.starts_with(place));
        if !listed && !text.replace(' ', "").contains("[lints]\nworkspace=true") {
            problems.push(format!("`{path}` does not use the workspace's lints"));
        }
    }
    if !workspace.read("Cargo.toml")?.contains("unsafe_code = \"forbid\"") {
        problems.push("the workspace does not forbid unsafe code".to_owned());
    }
    Ok(problems)
}

/// Checks that programs are started with an argument list, without a shell.
pub(super) fn check_shells(workspace: &Workspace) -> Result<Problems> {
    let mut problems = Vec::new();
    let ours = |path: &&String| {
        path.ends_with(".rs")
            && path.starts_with("crates/")
            && path.contains("/src/")
            && !TEST_CRATES.iter().any(|dir| path.starts_with(dir))
    };
    for path in workspace.files()?.iter().filter(ours).filter(|path| !SHELL_FILES.contains(&path.as_str())) {
        let source = workspace.read(path)?;
        let code = source.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        let found = code.lines().enumerate().filter(|(_, line)| starts_a_shell(line));
        problems.extend(found.map(|(at, _)| format!("`{path}:{}` starts a shell", at + 1)));
    }
    Ok(problems)
}

fn starts_a_shell(line: &str) -> bool {
    let shells = ["sh", "bash", "dash", "/bin/sh", "/bin/bash", "/usr/bin/env"];
    shells.iter().any(|shell| line.contains(&format!("Command::new(\"{shell}\")")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_duplicate_and_untested_attacks_are_problems() {
        let whole: String = (1..=ATTACKS).map(|n| format!("| {n} | x | proven | `a_test` | |\n")).collect();
        let known = BTreeSet::from(["a_test".to_owned()]);
        assert!(find_problems(&whole, &known).is_empty());
        assert_eq!(find_problems(&whole, &BTreeSet::new()).len(), ATTACKS as usize);
        let first = whole.replace("| 1 | x | proven | `a_test` | |", "| 1 | x | proven | | |");
        assert_eq!(find_problems(&first, &known), ["attack 1 is `proven` but names no test"]);
        let second = whole.replace("| 2 | x | proven |", "| 2 | x | partly |");
        assert_eq!(find_problems(&second, &known), ["attack 2 does not state what is missing"]);
        let twice = whole.replace("| 4 | ", "| 3 | ");
        assert_eq!(
            find_problems(&twice, &known),
            ["attack 3 is not listed exactly once", "attack 4 is not listed exactly once"]
        );
        let commands = whole.replace("`a_test`", "`cargo xtask fuzz api`");
        assert!(find_problems(&commands, &known).is_empty());
    }

    #[test]
    fn shell_invocations_are_detected() {
        assert!(starts_a_shell("    Command::new(\"/bin/sh\").arg(\"-c\")"));
        assert!(starts_a_shell("std::process::Command::new(\"bash\")"));
        assert!(!starts_a_shell("    Command::new(\"git\")"));
        assert!(!starts_a_shell("    let usual = \"/bin/sh\";"));
    }
}
