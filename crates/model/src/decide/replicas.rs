//! How many replicas a service has, and which: scaling by what is asked of it, and rolling deployment.
//!
//! Groups are judged one by one. A deployment under way pauses the scaling of its group. Old replicas leave only as
//! newer ones take requests, but for as many as the configuration can do without.

pub mod rollout;
pub mod scaling;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use self::{
    rollout::{Rollout, RolloutDecision, RolloutEvaluation, RolloutPolicy, TrialReplica, evaluate},
    scaling::{DEFAULT_WINDOW, ScalingPolicy, Traffic},
};
use crate::{decide::runs::ReplicaStart, time::Timestamp};

/// A group of equal replicas, as it is configured and as it is.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaGroupView {
    pub name: String,
    pub min: u32,
    pub max: u32,
    pub scaling: Option<ScalingPolicy>,
    /// Those that are there, or will be: not those that a scale-down took away.
    pub replicas: Vec<GroupReplica>,
    /// Numbers of former replicas, free to be used again.
    pub free: Vec<u32>,
    /// Numbers of replicas on their way out.
    pub leaving: Vec<u32>,
    /// What came within the window; nothing where nobody measures.
    pub traffic: Option<Traffic>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupReplica {
    pub num: u32,
    /// Of the configuration as it is now.
    pub current: bool,
    pub stage: ReplicaStage,
}

/// How far it has come; the first ones go first when there are too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReplicaStage {
    /// Submitted, or to be tried again.
    Waits,
    Starting,
    /// Runs and takes no requests yet.
    Runs,
    /// Runs, took requests, and takes none at the moment.
    NoLongerReady,
    Ready,
}

/// What is remembered of a group between passes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScalingState {
    pub desired: u32,
    /// When that changed last.
    pub scaled_at: Timestamp,
    /// Why there are so many, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub said: Option<String>,
}

/// What becomes of the replicas of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplicaPlan {
    /// All that shall be there, also those that are.
    pub start: Vec<ReplicaStart>,
    /// The group of each of those.
    pub groups: BTreeMap<u32, String>,
    pub surplus: Vec<u32>,
    pub memory: BTreeMap<String, ScalingState>,
    /// Why the number changed, for the event.
    pub why: Vec<String>,
}

/// `began` is when the run was submitted.
pub fn decide(
    groups: &[ReplicaGroupView],
    memory: &BTreeMap<String, ScalingState>,
    pace: &RolloutPolicy,
    began: Timestamp,
    now: Timestamp,
) -> ReplicaPlan {
    let mut wanted = ReplicaPlan::default();
    let mut used = BTreeSet::new();
    for group in groups {
        used.extend(group.replicas.iter().map(|replica| replica.num));
        used.extend(group.free.iter().chain(&group.leaving));
    }
    for group in groups {
        let before = memory.get(&group.name).cloned();
        let before = before.unwrap_or(ScalingState { desired: group.min, scaled_at: began, said: None });
        let after = scaling::scale(group, before, now, &mut wanted.why);
        let (keep, mut missing) = plan_group(group, after.desired, pace, &mut wanted.surplus);
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
            wanted.start.push(ReplicaStart { replica: num, jobs: 1 });
            wanted.groups.insert(num, group.name.clone());
        }
        wanted.memory.insert(group.name.clone(), after);
    }
    wanted.start.sort_by_key(|start| start.replica);
    wanted.surplus.sort_unstable();
    wanted
}

/// Those that stay, and how many are to be made. Those that go are added to `surplus`.
fn plan_group(
    group: &ReplicaGroupView,
    desired: u32,
    pace: &RolloutPolicy,
    surplus: &mut Vec<u32>,
) -> (Vec<u32>, u32) {
    let mut current: Vec<GroupReplica> = group.replicas.iter().copied().filter(|r| r.current).collect();
    let mut old: Vec<GroupReplica> = group.replicas.iter().copied().filter(|r| !r.current).collect();
    // The furthest first, then the lowest number: those at the end go.
    let by_worth = |a: &GroupReplica, b: &GroupReplica| b.stage.cmp(&a.stage).then(a.num.cmp(&b.num));
    current.sort_by(by_worth);
    old.sort_by(by_worth);
    let too_many = current.split_off(current.len().min(desired as usize));
    surplus.extend(too_many.iter().map(|replica| replica.num));
    if desired == 0 {
        surplus.extend(old.iter().map(|replica| replica.num));
        return (Vec::new(), 0);
    }
    let ready =
        |all: &[GroupReplica]| all.iter().filter(|replica| replica.stage == ReplicaStage::Ready).count();
    let needed = desired.saturating_sub(pace.unavailable);
    let answer = ready(&current) + ready(&old);
    let spare = answer.saturating_sub(needed as usize);
    // One that had a bad moment may be all that there is soon, while its successor still starts beside it.
    let is_kept = |stage| match stage {
        ReplicaStage::Ready => true,
        ReplicaStage::NoLongerReady => answer < needed as usize && pace.surge > 0,
        ReplicaStage::Waits | ReplicaStage::Starting | ReplicaStage::Runs => false,
    };
    let leaves = old.iter().filter(|replica| !is_kept(replica.stage));
    let leaves =
        leaves.chain(old.iter().rev().filter(|replica| replica.stage == ReplicaStage::Ready).take(spare));
    let leaves: BTreeSet<u32> = leaves.map(|replica| replica.num).collect();
    surplus.extend(&leaves);
    old.retain(|replica| !leaves.contains(&replica.num));

    // Whoever is on its way out still has its place on a host: a new one that came too early would find none.
    let there = current.len() + old.len() + leaves.len() + group.leaving.len();
    let room = if old.is_empty() { desired } else { desired.saturating_add(pace.surge) };
    let missing = (desired as usize - current.len()).min((room as usize).saturating_sub(there));
    let keep = current.iter().chain(&old).map(|replica| replica.num).collect();
    (keep, u32::try_from(missing).unwrap_or_default())
}
