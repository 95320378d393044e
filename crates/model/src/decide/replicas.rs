//! Number and selection of the replicas of a service: autoscaling and rolling deployment.
//!
//! Groups are evaluated one by one. A deployment in progress pauses the scaling of its group. Old replicas are removed
//! only as newer ones become ready, except for as many as the configuration permits to be unavailable.

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

/// Configuration and state of a group of identical replicas.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaGroupView {
    pub name: String,
    pub min: u32,
    pub max: u32,
    pub scaling: Option<ScalingPolicy>,
    /// Replicas that exist or will: without those that a scale-down removed.
    pub replicas: Vec<GroupReplica>,
    /// Numbers of former replicas, free for reuse.
    pub free_nums: Vec<u32>,
    /// Numbers of replicas that are terminating.
    pub leaving_nums: Vec<u32>,
    /// Traffic within the window; `None` if it is not measured.
    pub traffic: Option<Traffic>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupReplica {
    pub num: u32,
    /// True if it has the current configuration.
    pub is_current: bool,
    pub stage: ReplicaStage,
}

/// Progress of a replica; the lowest stages are removed first if there are too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReplicaStage {
    /// Submitted, or to be retried.
    Waits,
    Starting,
    /// Running, and not ready yet.
    Runs,
    /// Running, was ready, and is not at the moment.
    NoLongerReady,
    Ready,
}

/// State of a group that is kept between passes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScalingState {
    pub desired: u32,
    /// Time of the last change of `desired`.
    pub scaled_at: Timestamp,
    /// Reason for the number, for display.
    #[serde(default, rename = "said", skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Desired replicas of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplicaPlan {
    /// All replicas that should exist, including those that do.
    pub start: Vec<ReplicaStart>,
    /// Group of each of those.
    pub groups: BTreeMap<u32, String>,
    pub surplus: Vec<u32>,
    pub scaling: BTreeMap<String, ScalingState>,
    /// Reasons for changes of the number, for the event.
    pub reasons: Vec<String>,
}

/// Decides which replicas should exist. `began` is when the run was submitted.
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
        used.extend(group.free_nums.iter().chain(&group.leaving_nums));
    }
    for group in groups {
        let before = memory.get(&group.name).cloned();
        let before = before.unwrap_or(ScalingState { desired: group.min, scaled_at: began, message: None });
        let after = scaling::scale(group, before, now, &mut wanted.reasons);
        let (keep, mut missing) = plan_group(group, after.desired, pace, &mut wanted.surplus);
        let mut free = group.free_nums.iter().copied().collect::<BTreeSet<u32>>();
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
        wanted.scaling.insert(group.name.clone(), after);
    }
    wanted.start.sort_by_key(|start| start.replica);
    wanted.surplus.sort_unstable();
    wanted
}

/// Returns the replicas that stay and the number to create. Adds those to remove to `surplus`.
fn plan_group(
    group: &ReplicaGroupView,
    desired: u32,
    pace: &RolloutPolicy,
    surplus: &mut Vec<u32>,
) -> (Vec<u32>, u32) {
    let mut current: Vec<GroupReplica> = group.replicas.iter().copied().filter(|r| r.is_current).collect();
    let mut old: Vec<GroupReplica> = group.replicas.iter().copied().filter(|r| !r.is_current).collect();
    // Most advanced first, then the lowest number: those at the end are removed.
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
    // One that failed a probe may soon be the only one that answers, while its successor is still starting.
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

    // A terminating replica still occupies its host: a replacement that starts too early would find no capacity.
    let there = current.len() + old.len() + leaves.len() + group.leaving_nums.len();
    let room = if old.is_empty() { desired } else { desired.saturating_add(pace.surge) };
    let missing = (desired as usize - current.len()).min((room as usize).saturating_sub(there));
    let keep = current.iter().chain(&old).map(|replica| replica.num).collect();
    (keep, u32::try_from(missing).unwrap_or_default())
}
