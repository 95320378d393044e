//! The list of findings of reviews: it is complete, and every row names existing tests or a reason.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use super::{Problems, security::known_functions};
use crate::workspace::Workspace;

const DOCUMENT: &str = "docs/reference/review-findings.md";
/// Numbered findings.
const FINDINGS: u32 = 56;

/// One row of a table: a finding, its state, what happens now, and the tests.
struct FindingRow<'a> {
    /// Number, or the finding itself in tables without numbers.
    name: &'a str,
    state: &'a str,
    now: &'a str,
    tests: Vec<&'a str>,
}

fn parse_row(line: &str) -> Option<FindingRow<'_>> {
    let cells: Vec<&str> = line.strip_prefix('|')?.strip_suffix('|')?.split('|').map(str::trim).collect();
    let (name, rest) = match cells[..] {
        [number, _, ref rest @ ..] if rest.len() == 3 => (number, rest),
        [finding, ref rest @ ..] if rest.len() == 3 => (finding, rest),
        _ => return None,
    };
    let [state, now, tests] = rest[..] else { return None };
    let is_header = state == "state" || state.starts_with("---");
    let tests = tests.split('`').skip(1).step_by(2).collect();
    (!is_header).then_some(FindingRow { name, state, now, tests })
}

pub(super) fn check(workspace: &Workspace) -> Result<Problems> {
    Ok(find_problems(&workspace.read(DOCUMENT)?, &known_functions(workspace)?))
}

fn find_problems(text: &str, known: &BTreeSet<String>) -> Problems {
    let mut problems = Vec::new();
    let mut seen: BTreeMap<u32, usize> = BTreeMap::new();
    for row in text.lines().filter_map(parse_row) {
        let at = format!("finding `{}`", row.name);
        if let Ok(number) = row.name.parse() {
            *seen.entry(number).or_default() += 1;
        }
        match row.state {
            "fixed" | "refused" if row.tests.is_empty() => {
                problems.push(format!("{at} is `{}` but names no test", row.state));
            }
            "documented" | "open" if row.now.is_empty() => {
                problems.push(format!("{at} does not state the reason"));
            }
            "fixed" | "refused" | "documented" | "open" => {}
            other => problems.push(format!("{at} has the unknown state `{other}`")),
        }
        let lost = row.tests.iter().filter(|name| !known.contains(**name));
        problems.extend(lost.map(|name| format!("{at} names `{name}`, which is not a test")));
    }
    let wrong = (1..=FINDINGS).filter(|number| seen.get(number) != Some(&1));
    problems.extend(wrong.map(|number| format!("finding {number} is not listed exactly once")));
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_untested_and_unexplained_findings_are_problems() {
        let whole: String =
            (1..=FINDINGS).map(|n| format!("| {n} | text | fixed | now | `a_test` |\n")).collect();
        let known = BTreeSet::from(["a_test".to_owned()]);
        assert_eq!(find_problems(&whole, &known), [""; 0]);
        // A table without numbers.
        let header = "| finding | state | now | tests |\n| --- | --- | --- | --- |\n";
        let small = format!("{header}| small | fixed | now | |\n{whole}");
        assert_eq!(find_problems(&small, &known), ["finding `small` is `fixed` but names no test"]);
        assert_eq!(find_problems(&whole, &BTreeSet::new()).len(), FINDINGS as usize);
        let first = "| 1 | text | fixed | now | `a_test` |";
        let reason = whole.replace(first, "| 1 | text | documented | | |");
        assert_eq!(find_problems(&reason, &known), ["finding `1` does not state the reason"]);
        let state = whole.replace(first, "| 1 | text | done | now | `a_test` |");
        assert_eq!(find_problems(&state, &known), ["finding `1` has the unknown state `done`"]);
        let twice = whole.replace("| 4 | text", "| 3 | text");
        assert_eq!(
            find_problems(&twice, &known),
            ["finding 3 is not listed exactly once", "finding 4 is not listed exactly once"]
        );
    }
}
