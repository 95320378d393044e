//! Known vulnerabilities of dependencies: compares `advisories.toml`, a reviewed list, with Cargo.lock. Works offline,
//! never skips. `cargo xtask deny` checks the age of the list, and queries the database.

use std::{cmp::Ordering, collections::BTreeSet, time::UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};

use super::Problems;
use crate::{output, process, workspace::Workspace};

const LIST_FILE: &str = "advisories.toml";
/// Maximum age of the last review, in days.
const DAYS_MAX: i64 = 90;
/// Message of cargo-deny when it cannot fetch the database.
const FETCH_FAILED: &str = "failed to fetch advisory database";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Advisory {
    id: String,
    package: String,
    affected: Vec<String>,
    about: String,
    accepted: String,
}

#[derive(Debug, Default)]
struct AdvisoryList {
    reviewed: String,
    through: String,
    advisories: Vec<Advisory>,
}

pub(super) fn check(workspace: &Workspace) -> Result<Problems> {
    let list = parse_list(&workspace.read(LIST_FILE)?)?;
    let locked = locked_versions(&workspace.read("Cargo.lock")?);
    ensure!(!locked.is_empty(), "Cargo.lock has no packages");
    let mut problems = find_problems(&list, &locked)?;
    let ignored = ignored_ids(&workspace.read("deny.toml")?)?;
    let accepted: BTreeSet<String> =
        list.advisories.iter().filter(|one| !one.accepted.is_empty()).map(|one| one.id.clone()).collect();
    if ignored != accepted {
        problems.push(format!("`deny.toml` ignores {ignored:?}, but `{LIST_FILE}` accepts {accepted:?}"));
    }
    Ok(problems)
}

/// Checks the list, and the database if it is reachable. `cargo deny check` adds duplicates and sources. It takes long
/// to build, so it stays optional.
pub(crate) fn run_cargo_deny(workspace: &Workspace) -> Result<()> {
    let problems = check(workspace)?;
    ensure!(problems.is_empty(), "{}", problems.join("\n"));
    let list = parse_list(&workspace.read(LIST_FILE)?)?;
    let (count, through) = (list.advisories.len(), &list.through);
    output::print_message(&format!("ok      checked Cargo.lock against {count} advisories, up to {through}"));
    let age = today() - parse_days(&list.reviewed).context("invalid `reviewed` date")?;
    if age > DAYS_MAX {
        output::print_message(&format!(
            "warning `{LIST_FILE}` was last reviewed {age} days ago: review new advisories and update `reviewed`"
        ));
    }
    if process::run_for_stdout(workspace.cargo().args(["deny", "--version"])).is_err() {
        output::print_message(
            "warning cargo-deny is not installed (`cargo install cargo-deny --locked`): only the list was checked",
        );
        return Ok(());
    }
    process::run(workspace.cargo().args(["deny", "check", "bans", "licenses", "sources"]))?;
    match process::run_for_stdout(workspace.cargo().args(["deny", "check", "advisories"])) {
        Ok(_) => output::print_message("ok      checked Cargo.lock against the database"),
        Err(error) if format!("{error:#}").contains(FETCH_FAILED) => {
            output::print_message(
                "warning the advisory database cannot be reached: only the list was checked",
            );
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

fn find_problems(list: &AdvisoryList, locked: &[(String, String)]) -> Result<Problems> {
    let mut problems = Vec::new();
    if parse_days(&list.reviewed).is_none() || list.through.is_empty() {
        problems.push(format!("`{LIST_FILE}` has no valid `reviewed` date, or no `through`"));
    }
    let mut seen = BTreeSet::new();
    for advisory in &list.advisories {
        let Advisory { id, package, affected, about, accepted } = advisory;
        if !seen.insert(id) || !id.starts_with("RUSTSEC-") || affected.is_empty() || about.is_empty() {
            problems.push(format!("the entry `{id}` of `{package}` is incomplete or listed twice"));
        }
        let ours = locked.iter().filter(|(name, _)| name == package);
        let mut hit = Vec::new();
        for (_, version) in ours {
            for range in affected {
                if is_in_range(range, version)? {
                    hit.push(version.as_str());
                }
            }
        }
        if !hit.is_empty() && accepted.is_empty() {
            let versions = hit.join(", ");
            problems.push(format!(
                "`{package}` {versions}: {id}, {about}; update it, or give the reason in `accepted`"
            ));
        }
        if hit.is_empty() && !accepted.is_empty() {
            problems.push(format!(
                "{id} is accepted, but no `{package}` is affected any more: remove `accepted`"
            ));
        }
    }
    Ok(problems)
}

/// Parses the subset of TOML that the list uses.
fn parse_list(text: &str) -> Result<AdvisoryList> {
    let mut list = AdvisoryList::default();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if line == "[[advisory]]" {
            list.advisories.push(Advisory::default());
            continue;
        }
        let wrong = || format!("cannot parse `{LIST_FILE}:{}`: {line}", at + 1);
        let (key, value) = line.split_once(" = ").with_context(wrong)?;
        let texts: Vec<String> = value.split('"').skip(1).step_by(2).map(str::to_owned).collect();
        let one = || texts.first().cloned().filter(|_| texts.len() == 1).with_context(wrong);
        match (list.advisories.last_mut(), key) {
            (None, "reviewed") => list.reviewed = one()?,
            (None, "through") => list.through = one()?,
            (Some(advisory), "id") => advisory.id = one()?,
            (Some(advisory), "crate") => advisory.package = one()?,
            (Some(advisory), "about") => advisory.about = one()?,
            (Some(advisory), "accepted") => advisory.accepted = one()?,
            (Some(advisory), "affected") => advisory.affected = texts,
            _ => bail!(wrong()),
        }
    }
    Ok(list)
}

/// Returns names and versions of locked packages.
fn locked_versions(lock: &str) -> Vec<(String, String)> {
    let field = |block: &str, name: &str| {
        let line = block.lines().find_map(|line| line.strip_prefix(&format!("{name} = \"")))?;
        line.strip_suffix('"').map(str::to_owned)
    };
    let blocks = lock.split("[[package]]").skip(1);
    blocks.filter_map(|block| Some((field(block, "name")?, field(block, "version")?))).collect()
}

/// Returns the IDs that cargo-deny ignores: those in `ignore = [` of the section `[advisories]`.
fn ignored_ids(deny: &str) -> Result<BTreeSet<String>> {
    let section = deny.split("[advisories]").nth(1).context("deny.toml has no section [advisories]")?;
    let section = section.split("\n[").next().unwrap_or_default();
    let list =
        section.split("ignore = [").nth(1).and_then(|rest| rest.split("\n]").next()).unwrap_or_default();
    Ok(list.split('"').filter(|word| word.starts_with("RUSTSEC-")).map(str::to_owned).collect())
}

/// Returns whether a version is in a range such as `>=1.2.0, <1.3.0`, `<2.0.0` or `*`.
fn is_in_range(range: &str, version: &str) -> Result<bool> {
    let has = Version::parse(version)?;
    for part in range.split(',').map(str::trim).filter(|part| *part != "*") {
        let (from, to) = (part.strip_prefix(">="), part.strip_prefix('<'));
        let is_in = match (from, to) {
            (Some(least), None) => has.compare(&Version::parse(least)?) != Ordering::Less,
            (None, Some(end)) => has.compare(&Version::parse(end)?) == Ordering::Less,
            _ => bail!("invalid range `{range}`: expected `>=A, <B`, `<B` or `*`"),
        };
        if !is_in {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A version with Cargo's ordering.
struct Version {
    numbers: [u64; 3],
    /// Identifiers of a pre-release; empty for a release.
    before: Vec<String>,
}

impl Version {
    fn parse(text: &str) -> Result<Self> {
        let wrong = || format!("invalid version `{text}`");
        let text = text.split('+').next().unwrap_or_default();
        let (numbers, before) = text.split_once('-').unwrap_or((text, ""));
        let numbers: Vec<u64> =
            numbers.split('.').map(str::parse).collect::<Result<_, _>>().with_context(wrong)?;
        let numbers = <[u64; 3]>::try_from(numbers).ok().with_context(wrong)?;
        let before = before.split('.').filter(|part| !part.is_empty()).map(str::to_owned).collect();
        Ok(Self { numbers, before })
    }

    fn compare(&self, other: &Self) -> Ordering {
        let parts = || {
            for (one, two) in self.before.iter().zip(&other.before) {
                let order = match (one.parse::<u64>(), two.parse::<u64>()) {
                    (Ok(one), Ok(two)) => one.cmp(&two),
                    (Ok(_), Err(_)) => Ordering::Less,
                    (Err(_), Ok(_)) => Ordering::Greater,
                    (Err(_), Err(_)) => one.cmp(two),
                };
                if order != Ordering::Equal {
                    return order;
                }
            }
            self.before.len().cmp(&other.before.len())
        };
        // A pre-release is lower than its release, regardless of its identifiers.
        let released = other.before.is_empty().cmp(&self.before.is_empty()).reverse();
        self.numbers.cmp(&other.numbers).then(released).then_with(parts)
    }
}

/// Days since 1970 for a date like `2026-11-17`.
fn parse_days(date: &str) -> Option<i64> {
    let mut parts = date.split('-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    if parts.next().is_some() || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // The year starts in March, so that the leap day is its last day.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leaps = year / 4 - year / 100 + year / 400;
    Some(365 * year + leaps + (153 * month + 2) / 5 + day - 1 - 719_468)
}

#[expect(clippy::disallowed_methods, reason = "how old a list is, is a question to the calendar")]
fn today() -> i64 {
    let since = std::time::SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs() / 86_400).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# words\nreviewed = \"2026-11-17\"\nthrough = \"RUSTSEC-2026-0001\"\n\n[[advisory]]\n\
        id = \"RUSTSEC-2020-0001\"\ncrate = \"a\"\naffected = [\">=1.0.0, <1.2.0\", \"<0.3.0\"]\nabout = \"x\"\n";

    fn problems(more: &str, version: &str) -> Problems {
        let list = parse_list(&format!("{TEXT}{more}")).unwrap();
        find_problems(&list, &[("a".to_owned(), version.to_owned()), ("b".to_owned(), "1.1.0".to_owned())])
            .unwrap()
    }

    #[test]
    fn affected_versions_need_a_reason_and_unaffected_ones_must_have_none() {
        for fine in ["1.2.0", "0.3.0", "2.0.0", "0.9.9"] {
            assert_eq!(problems("", fine), Problems::new(), "{fine}");
        }
        for bad in ["1.1.9", "1.0.0", "0.2.9", "1.2.0-rc.1"] {
            let found = problems("", bad);
            assert!(found.len() == 1 && found[0].contains("RUSTSEC-2020-0001"), "{bad}: {found:?}");
            assert_eq!(problems("accepted = \"we never call it\"\n", bad), Problems::new());
        }
        assert!(problems("accepted = \"we never call it\"\n", "1.2.0")[0].contains("remove `accepted`"));
    }

    #[test]
    fn versions_are_ordered_as_cargo_orders_them() {
        let ordered =
            ["0.9.10", "0.10.0-alpha.2", "0.10.0-rc.2", "0.10.0-rc.18", "0.10.0", "0.10.1", "1.0.0"];
        for pair in ordered.windows(2) {
            assert!(is_in_range(&format!("<{}", pair[1]), pair[0]).unwrap(), "{pair:?}");
            assert!(!is_in_range(&format!("<{}", pair[0]), pair[1]).unwrap(), "{pair:?}");
        }
        assert!(
            is_in_range("*", "0.10.0-rc.18").unwrap() && is_in_range(">=1.0.0", "1.0.0+build.5").unwrap()
        );
        assert!(is_in_range("^1", "1.0.0").is_err() && is_in_range("<1", "1.0.0").is_err());
    }

    #[test]
    fn incomplete_advisory_lists_are_rejected() {
        assert!(parse_list("reviewed = 2026-11-17\n").is_err());
        assert!(parse_list("[[advisory]]\nodd = \"x\"\n").is_err());
        assert!(
            problems("[[advisory]]\nid = \"RUSTSEC-2020-0001\"\ncrate = \"a\"\n", "9.0.0")[0]
                .contains("incomplete")
        );
        assert_eq!(
            (parse_days("1970-01-01"), parse_days("2000-03-01"), parse_days("2026-11-17")),
            (Some(0), Some(11_017), Some(20_774))
        );
        assert_eq!((parse_days("2026-13-01"), parse_days("soon")), (None, None));
    }

    #[test]
    fn ignored_advisories_are_read_from_the_advisories_section_of_cargo_deny() {
        let deny = "[advisories]\nyanked = \"deny\"\nignore = [\n  { id = \"RUSTSEC-2023-0071\", reason = \"see the list [here]\" },\n]\n\n[bans]\n";
        assert_eq!(ignored_ids(deny).unwrap(), BTreeSet::from(["RUSTSEC-2023-0071".to_owned()]));
        assert!(ignored_ids("[advisories]\n[bans]\n").unwrap().is_empty());
    }
}
