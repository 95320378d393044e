//! How many replicas a service has, and which: scaling by what is asked of it, and rolling deployment.
//!
//! Groups are judged one by one. A deployment under way pauses the scaling of its group. Old replicas leave only as
//! newer ones take requests, so that there are never fewer ready ones than wanted because of it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{
    decide::runs::Start,
    time::{Span, Timestamp},
};

/// Replicas above the wanted number while a deployment lasts.
const SURGE: u32 = 1;
/// The window of a scaling that names none.
pub const WINDOW: Span = Span::secs(60);

/// A group of equal replicas, as it is configured and as it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    pub name: String,
    pub min: u32,
    pub max: u32,
    pub scaling: Option<Scaling>,
    /// Those that are there, or will be: not those that a scale-down took away.
    pub replicas: Vec<Replica>,
    /// Numbers of former replicas, free to be used again.
    pub free: Vec<u32>,
    /// Numbers of replicas on their way out.
    pub leaving: Vec<u32>,
    /// Requests that came within the window; nothing where nobody counts.
    pub requests: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// Requests per second that one replica is to get.
    pub target: f64,
    pub window: Span,
    pub up_after: Span,
    pub down_after: Span,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    pub num: u32,
    /// Of the configuration as it is now.
    pub current: bool,
    pub stage: Stage,
}

/// How far it has come; the first ones go first when there are too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Submitted, or to be tried again.
    Waits,
    Starts,
    /// Runs and takes no requests yet.
    Runs,
    Ready,
}

/// What is remembered of a group between passes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    pub desired: u32,
    /// When that changed last.
    pub scaled_at: Timestamp,
}

/// What becomes of the replicas of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wanted {
    /// All that shall be there, also those that are.
    pub start: Vec<Start>,
    /// The group of each of those.
    pub groups: BTreeMap<u32, String>,
    pub surplus: Vec<u32>,
    pub memory: BTreeMap<String, Memory>,
    /// Why the number changed, for the event.
    pub why: Vec<String>,
}

/// `began` is when the run was submitted.
pub fn decide(
    groups: &[Group],
    memory: &BTreeMap<String, Memory>,
    began: Timestamp,
    now: Timestamp,
) -> Wanted {
    let mut wanted = Wanted::default();
    let mut used = BTreeSet::new();
    for group in groups {
        used.extend(group.replicas.iter().map(|replica| replica.num));
        used.extend(group.free.iter().chain(&group.leaving));
    }
    for group in groups {
        let before = memory.get(&group.name).cloned();
        let before = before.unwrap_or(Memory { desired: group.min, scaled_at: began });
        let after = scaled(group, before, now, &mut wanted.why);
        let (keep, mut missing) = split(group, after.desired, &mut wanted.surplus);
        let mut free = group.free.iter().copied().collect::<BTreeSet<u32>>();
        let mut nums: Vec<u32> = keep;
        while missing > 0 {
            let num =
                free.pop_first().unwrap_or_else(|| (0..).find(|n| !used.contains(n)).unwrap_or(u32::MAX));
            used.insert(num);
            nums.push(num);
            missing -= 1;
        }
        for num in nums {
            wanted.start.push(Start { replica: num, jobs: 1 });
            wanted.groups.insert(num, group.name.clone());
        }
        wanted.memory.insert(group.name.clone(), after);
    }
    wanted.start.sort_by_key(|start| start.replica);
    wanted.surplus.sort_unstable();
    wanted
}

/// How many there shall be.
fn scaled(group: &Group, before: Memory, now: Timestamp, why: &mut Vec<String>) -> Memory {
    let current = before.desired.clamp(group.min, group.max);
    let bounded = Memory { desired: current, ..before };
    let is_rolling = group.replicas.iter().any(|replica| !replica.current);
    let (Some(scaling), Some(requests), false) = (group.scaling, group.requests, is_rolling) else {
        return bounded;
    };
    let rate = requests as f64 / (scaling.window.0 as f64 / 1e6);
    let wish = count((rate / scaling.target).ceil()).clamp(group.min, group.max);
    let waited = now.since(bounded.scaled_at);
    let moves = match wish.cmp(&current) {
        std::cmp::Ordering::Equal => false,
        // Somebody waits for the first one.
        std::cmp::Ordering::Greater => current == 0 || waited >= scaling.up_after,
        std::cmp::Ordering::Less => waited >= scaling.down_after,
    };
    if !moves {
        return bounded;
    }
    why.push(format!(
        "group {}: {current} to {wish} replicas, because of {rate:.2} requests per second over {} s (target {} each)",
        group.name,
        scaling.window.as_secs(),
        scaling.target
    ));
    Memory { desired: wish, scaled_at: now }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it saturates, and is bounded after"
)]
fn count(replicas: f64) -> u32 {
    replicas as u32
}

/// Those that stay, and how many are to be made. Those that go are added to `surplus`.
fn split(group: &Group, desired: u32, surplus: &mut Vec<u32>) -> (Vec<u32>, u32) {
    let mut current: Vec<Replica> = group.replicas.iter().copied().filter(|r| r.current).collect();
    let mut old: Vec<Replica> = group.replicas.iter().copied().filter(|r| !r.current).collect();
    // The furthest first, then the lowest number: those at the end go.
    let by_worth = |a: &Replica, b: &Replica| b.stage.cmp(&a.stage).then(a.num.cmp(&b.num));
    current.sort_by(by_worth);
    old.sort_by(by_worth);
    let too_many = current.split_off(current.len().min(desired as usize));
    surplus.extend(too_many.iter().map(|replica| replica.num));
    if desired == 0 {
        surplus.extend(old.iter().map(|replica| replica.num));
        return (Vec::new(), 0);
    }
    let ready = |all: &[Replica]| all.iter().filter(|replica| replica.stage == Stage::Ready).count();
    let spare = (ready(&current) + ready(&old)).saturating_sub(desired as usize);
    let leaves = old.iter().filter(|replica| replica.stage != Stage::Ready);
    let leaves = leaves.chain(old.iter().rev().filter(|replica| replica.stage == Stage::Ready).take(spare));
    let leaves: BTreeSet<u32> = leaves.map(|replica| replica.num).collect();
    surplus.extend(&leaves);
    old.retain(|replica| !leaves.contains(&replica.num));

    // Whoever is on its way out still has its place on a host: a new one that came too early would find none.
    let there = current.len() + old.len() + leaves.len() + group.leaving.len();
    let room = if old.is_empty() { desired } else { desired + SURGE };
    let missing = (desired as usize - current.len()).min((room as usize).saturating_sub(there));
    let keep = current.iter().chain(&old).map(|replica| replica.num).collect();
    (keep, u32::try_from(missing).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(10_000);

    /// `0:ready 1:starts! 2:-`: a `!` is out of date, a `-` was there once.
    fn group(text: &str, range: (u32, u32)) -> Group {
        let mut group = Group {
            name: "0".to_owned(),
            min: range.0,
            max: range.1,
            scaling: None,
            replicas: vec![],
            free: vec![],
            leaving: vec![],
            requests: None,
        };
        for word in text.split_whitespace() {
            let (num, stage) = word.split_once(':').unwrap();
            let num = num.parse().unwrap();
            let stage = match stage.trim_end_matches('!') {
                "waits" => Stage::Waits,
                "starts" => Stage::Starts,
                "runs" => Stage::Runs,
                "ready" => Stage::Ready,
                "leaves" => {
                    group.leaving.push(num);
                    continue;
                }
                _ => {
                    group.free.push(num);
                    continue;
                }
            };
            group.replicas.push(Replica { num, current: !word.ends_with('!'), stage });
        }
        group
    }

    fn told(wanted: &Wanted) -> String {
        let start: Vec<_> = wanted.start.iter().map(|start| start.replica.to_string()).collect();
        let surplus: Vec<_> = wanted.surplus.iter().map(u32::to_string).collect();
        format!("want {}; away {}", start.join(","), surplus.join(","))
    }

    #[track_caller]
    fn check(text: &str, desired: u32, expect: &str) {
        let memory = BTreeMap::from([("0".to_owned(), Memory { desired, scaled_at: NOW })]);
        let wanted = decide(&[group(text, (0, 9))], &memory, NOW, NOW);
        assert_eq!(told(&wanted), expect, "{text}");
    }

    #[test]
    fn replicas_are_added_and_taken_away_to_the_wanted_number() {
        check("", 2, "want 0,1; away ");
        check("0:ready", 3, "want 0,1,2; away ");
        check("0:ready 1:-", 2, "want 0,1; away ");
        // One that leaves is waited for: its place is not free yet.
        check("0:ready 1:leaves", 2, "want 0; away ");
        check("0:ready 1:leaves", 3, "want 0,2; away ");
        check("0:leaves 1:leaves 2:-", 1, "want ; away ");
        check("0:- 1:leaves", 2, "want 0; away ");
        check("0:- 1:-", 1, "want 0; away ");
        // Those that are furthest stay, of equals the lower numbers.
        check("0:waits 1:ready 2:ready 3:runs", 2, "want 1,2; away 0,3");
        check("0:ready 1:ready 2:ready", 1, "want 0; away 1,2");
        check("0:ready 1:ready!", 0, "want ; away 0,1");
    }

    #[test]
    fn old_replicas_leave_only_as_newer_ones_are_ready() {
        check("0:ready! 1:ready!", 2, "want 0,1,2; away ");
        check("0:ready! 1:ready! 2:starts", 2, "want 0,1,2; away ");
        check("0:ready! 1:ready! 2:ready", 2, "want 0,2; away 1");
        check("0:ready! 1:leaves 2:ready", 2, "want 0,2; away ");
        check("0:ready! 2:ready 1:-", 2, "want 0,1,2; away ");
        check("0:ready! 2:ready 1:ready", 2, "want 1,2; away 0");
        check("2:ready 1:ready", 2, "want 1,2; away ");
        // One that takes no requests is no loss.
        check("0:ready! 1:starts!", 2, "want 0,2; away 1");
        // Newer ones that never get ready leave the old ones where they are.
        check("0:ready! 1:runs", 1, "want 0,1; away ");
    }

    /// Desired before, seconds since, requests in a minute, desired after.
    #[track_caller]
    fn check_scaling(before: u32, waited: i64, requests: Option<u64>, after: u32) {
        let scaling = Scaling {
            target: 2.0,
            window: Span::secs(60),
            up_after: Span::secs(300),
            down_after: Span::secs(600),
        };
        let group = Group { scaling: Some(scaling), requests, ..group("", (0, 4)) };
        let memory = Memory { desired: before, scaled_at: NOW - Span::secs(waited) };
        let wanted = decide(&[group], &BTreeMap::from([("0".to_owned(), memory)]), NOW, NOW);
        assert_eq!(wanted.memory["0"].desired, after, "{before} {waited} {requests:?}");
        assert_eq!(wanted.why.is_empty(), before == after);
        let since = if before == after { NOW - Span::secs(waited) } else { NOW };
        assert_eq!(wanted.memory["0"].scaled_at, since);
    }

    #[test]
    fn the_rate_decides_how_many_and_the_delays_when() {
        // From nothing at once: one request is enough.
        check_scaling(0, 0, Some(1), 1);
        check_scaling(0, 0, Some(60 * 5), 3);
        check_scaling(0, 0, Some(0), 0);
        check_scaling(1, 299, Some(60 * 5), 1);
        check_scaling(1, 300, Some(60 * 5), 3);
        check_scaling(1, 300, Some(60 * 100), 4);
        check_scaling(3, 599, Some(0), 3);
        check_scaling(3, 600, Some(60 * 4), 2);
        check_scaling(3, 600, Some(0), 0);
        // Nobody counts: nothing changes.
        check_scaling(3, 6_000, None, 3);
        check_scaling(3, 6_000, Some(60 * 6), 3);
    }

    #[test]
    fn a_deployment_pauses_scaling_and_numbers_are_unique_over_groups() {
        let scaling =
            Scaling { target: 1.0, window: WINDOW, up_after: Span::secs(0), down_after: Span::secs(0) };
        let first = Group { scaling: Some(scaling), requests: Some(6_000), ..group("0:ready!", (1, 4)) };
        let second = Group { name: "1".to_owned(), ..group("1:ready", (2, 2)) };
        let wanted = decide(&[first, second], &BTreeMap::new(), NOW, NOW);
        assert_eq!(told(&wanted), "want 0,1,2,3; away ");
        let groups: Vec<_> = wanted.groups.values().map(String::as_str).collect();
        assert_eq!(groups, ["0", "1", "0", "1"]);
        assert_eq!(wanted.memory["0"].desired, 1);
    }

    #[test]
    fn a_changed_range_bounds_what_was_wanted() {
        let memory = BTreeMap::from([("0".to_owned(), Memory { desired: 1, scaled_at: NOW })]);
        assert_eq!(told(&decide(&[group("0:ready", (3, 3))], &memory, NOW, NOW)), "want 0,1,2; away ");
    }
}
