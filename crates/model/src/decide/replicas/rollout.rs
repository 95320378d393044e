//! Evaluation of a deployment, until it is complete or failed.
//!
//! Replicas of a changed configuration are on trial until all desired ones are ready. One that keeps ending, or does
//! not become ready in time, ends the trial: the run returns to the previous configuration, whose replicas still exist.
//! A deployment that was complete is not evaluated again.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ReplicaGroupView, ReplicaStage, ScalingState};
use crate::time::{Span, Timestamp};

/// Number of times that a replica on trial may end by itself, if it is retried.
pub const FAILURES_MAX: u32 = 3;

/// Parameters of a deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RolloutPolicy {
    /// Maximum number of replicas above the target during a deployment.
    pub surge: u32,
    /// Maximum number of replicas below the target during a deployment.
    pub unavailable: u32,
    /// Time that a new running replica has to become ready.
    pub ready_timeout: Span,
    pub should_roll_back: bool,
}

impl Default for RolloutPolicy {
    fn default() -> Self {
        Self { surge: 1, unavailable: 0, ready_timeout: Span::mins(10), should_roll_back: true }
    }
}

/// A replica that the newest deployment created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrialReplica {
    pub num: u32,
    pub stage: ReplicaStage,
    /// Time since which it runs, or when it ended.
    pub since: Option<Timestamp>,
    /// Number of times that it ended by itself.
    pub failures: u32,
    /// True if it is submitted again after that.
    pub is_retried: bool,
    /// Condition that it waits for, or how it ended.
    pub message: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutState {
    Rolling,
    /// All desired replicas have this configuration and are ready.
    Complete,
    /// It failed and was not rolled back.
    Failed,
    /// No replica is desired, so it was not tried.
    Asleep,
}

impl RolloutState {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Rolling => "rolling",
            Self::Complete => "complete",
            Self::Failed => "failed",
            Self::Asleep => "asleep",
        }
    }
}

/// State of the newest deployment; kept between passes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rollout {
    pub num: i64,
    pub state: RolloutState,
    /// New replicas that are ready, their desired number, and remaining old replicas.
    pub ready: u32,
    pub wanted: u32,
    pub old: u32,
    /// Condition that it waits for, or why it failed.
    #[serde(default, rename = "said", skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The previous deployment, if this one is its rollback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub undid: Option<Rollback>,
}

/// A deployment that was rolled back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rollback {
    pub num: i64,
    pub why: String,
}

/// Consequence for the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RolloutDecision {
    Continue,
    /// Its configuration is one that a later deployment may roll back to.
    Complete,
    RollBack,
}

/// State of the deployment, the consequence, and the message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RolloutEvaluation {
    pub rollout: Rollout,
    pub decision: RolloutDecision,
    /// A reason for programs and a message for people.
    pub event: Option<(&'static str, String)>,
    /// Time at which the verdict may change without an event.
    pub due_at: Option<Timestamp>,
}

/// Evaluates deployment `num` by its replicas. `can_go_back`: there is a previous configuration that was complete.
pub fn evaluate(
    num: i64,
    (groups, memory): (&[ReplicaGroupView], &BTreeMap<String, ScalingState>),
    trials: &[TrialReplica],
    pace: &RolloutPolicy,
    can_go_back: bool,
    before: Option<&Rollout>,
    now: Timestamp,
) -> RolloutEvaluation {
    let before = before.filter(|before| before.num == num);
    let count = count_replicas(groups, memory);
    let was = before.map(|before| before.state);
    let now_is = |state, message| Rollout {
        num,
        state,
        ready: count.ready,
        wanted: count.wanted,
        old: count.old,
        message,
        undid: before.and_then(|before| before.undid.clone()),
    };
    if count.is_complete() || was == Some(RolloutState::Complete) {
        let is_news = was != Some(RolloutState::Complete) && num > 0;
        let reported =
            format!("deployment {num} is complete: {} of {} replicas are ready", count.ready, count.wanted);
        return RolloutEvaluation {
            rollout: now_is(RolloutState::Complete, None),
            decision: RolloutDecision::Complete,
            event: is_news.then_some(("deployed", reported)),
            due_at: None,
        };
    }
    let failure = trials.iter().find_map(|trial| failure_message(trial, pace, now)).filter(|_| can_go_back);
    let due_at = trials.iter().filter_map(|trial| ready_deadline(trial, pace)).min().filter(|_| can_go_back);
    let goes_on = |rollout, reported| RolloutEvaluation {
        rollout,
        decision: RolloutDecision::Continue,
        event: reported,
        due_at,
    };
    match (failure, was) {
        // A failed deployment stays failed, unless it completes after all.
        (_, Some(RolloutState::Failed)) => {
            let message = before.and_then(|before| before.message.clone());
            RolloutEvaluation { due_at: None, ..goes_on(now_is(RolloutState::Failed, message), None) }
        }
        (Some(why), _) if pace.should_roll_back => {
            let reported =
                format!("deployment {num} failed: {why}; rolling back to the previous configuration");
            let undid = Some(Rollback { num, why });
            // The rollback is a deployment with the next number.
            let rollout = Rollout { num: num + 1, undid, ..now_is(RolloutState::Rolling, None) };
            let reported = Some(("rolled_back", reported));
            RolloutEvaluation { rollout, decision: RolloutDecision::RollBack, event: reported, due_at: None }
        }
        (Some(why), _) => {
            let reported =
                format!("deployment {num} failed: {why}; not rolled back, the previous replicas are kept");
            let reported = Some(("deployment_failed", reported));
            RolloutEvaluation { due_at: None, ..goes_on(now_is(RolloutState::Failed, Some(why)), reported) }
        }
        (None, _) if count.wanted == 0 && count.old == 0 => goes_on(now_is(RolloutState::Asleep, None), None),
        (None, _) => {
            let reported = (before.is_none() && count.old > 0).then(|| {
                let words = format!(
                    "deployment {num} started: {} to replace, with at most {} more and {} fewer than {} at a time",
                    format_replicas(count.old),
                    pace.surge,
                    pace.unavailable,
                    count.wanted
                );
                ("deployment", words)
            });
            goes_on(now_is(RolloutState::Rolling, waiting_message(trials)), reported)
        }
    }
}

struct ReplicaCounts {
    ready: u32,
    wanted: u32,
    old: u32,
    /// True if each group has its desired number.
    is_full: bool,
}

impl ReplicaCounts {
    const fn is_complete(&self) -> bool {
        self.is_full && self.old == 0 && self.wanted > 0
    }
}

fn count_replicas(groups: &[ReplicaGroupView], memory: &BTreeMap<String, ScalingState>) -> ReplicaCounts {
    let mut count = ReplicaCounts { ready: 0, wanted: 0, old: 0, is_full: true };
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    for group in groups {
        let desired = memory.get(&group.name).map_or(group.min, |memory| memory.desired);
        let ready =
            group.replicas.iter().filter(|one| one.is_current && one.stage == ReplicaStage::Ready).count();
        count.ready += number(ready).min(desired);
        count.wanted += desired;
        count.old += number(group.replicas.iter().filter(|one| !one.is_current).count());
        count.is_full &= number(ready) >= desired;
    }
    count
}

/// Returns why a replica on trial ends the deployment.
fn failure_message(trial: &TrialReplica, pace: &RolloutPolicy, now: Timestamp) -> Option<String> {
    let message = trial.message.as_deref().unwrap_or("it receives no requests");
    if trial.failures >= FAILURES_MAX || trial.failures > 0 && !trial.is_retried {
        let times = if trial.failures > 1 { format!(" {} times", trial.failures) } else { String::new() };
        return Some(format!("replica {} ended{times}: {message}", trial.num));
    }
    let late = ready_deadline(trial, pace).is_some_and(|at| at <= now);
    late.then(|| {
        format!("replica {} is not ready after {} s: {message}", trial.num, pace.ready_timeout.as_secs())
    })
}

fn ready_deadline(trial: &TrialReplica, pace: &RolloutPolicy) -> Option<Timestamp> {
    trial.since.filter(|_| trial.stage != ReplicaStage::Ready).map(|since| since + pace.ready_timeout)
}

fn waiting_message(trials: &[TrialReplica]) -> Option<String> {
    let open = trials.iter().filter(|trial| trial.stage != ReplicaStage::Ready);
    open.max_by_key(|trial| trial.stage).map(|trial| match (&trial.message, trial.stage) {
        (Some(message), _) => format!("replica {}: {message}", trial.num),
        (None, ReplicaStage::Waits) => format!("replica {} is waiting for an instance", trial.num),
        (None, ReplicaStage::Starting) => format!("replica {} is starting", trial.num),
        (None, ReplicaStage::Runs | ReplicaStage::NoLongerReady | ReplicaStage::Ready) => {
            format!("replica {} is not ready yet", trial.num)
        }
    })
}

fn format_replicas(count: u32) -> String {
    if count == 1 { "1 replica".to_owned() } else { format!("{count} replicas") }
}
