//! Explanations: why a run, a managed job or an instance is in its state, and the queue for instances.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

use crate::{
    Document,
    offers::Offer,
    quotas::Quota,
    runs::{Deployment, GroupScaling},
};

#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct RunRequest {
    #[serde(default)]
    pub run_name: Option<String>,
    #[serde(default)]
    pub id: Option<Uuid>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ManagedJobRequest {
    /// Number of the job.
    pub job_id: i64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
pub struct InstanceRequest {
    pub id: Uuid,
}

/// A change of a configuration: values by path; null removes a field.
pub type Patch = BTreeMap<String, serde_json::Value>;

/// One reason why a job does not fit somewhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Shortfall {
    pub kind: String,
    pub message: String,
    /// Change that would help; empty if there is none.
    pub cure: String,
    /// True if waiting may help.
    pub passes: bool,
    /// The change as values of the configuration by path, such as `resources.gpu.count`; null removes a field.
    #[serde(default)]
    pub patch: Option<Patch>,
}

/// A location that does not accept a job, or several equal ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Refusal {
    pub place: String,
    /// Instance or fleet.
    pub place_id: Option<Uuid>,
    /// `instance`, `fleet` or `offer`.
    pub place_kind: String,
    pub count: u32,
    pub shortfalls: Vec<Shortfall>,
}

/// A change that would make a job fit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Cure {
    pub message: String,
    /// All of its changes as values of the configuration, if they are changes of the configuration.
    pub patch: Option<Patch>,
    /// Number of locations where nothing else is missing.
    pub fits: u32,
    pub starts_now: bool,
}

/// A run before another one in the queue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RunInFront {
    pub position: i64,
    /// Absent, as the run, if the caller may not see the project.
    pub project: Option<String>,
    pub run: Option<String>,
    /// Requested resources in words.
    #[serde(default, rename = "wants")]
    pub requested: String,
    /// Rule that puts it there: `class`, `share`, `usage`, `priority` or `age`.
    #[serde(default)]
    pub rule: String,
    #[schemars(with = "crate::document::DateTime")]
    pub waits_since: Timestamp,
}

/// An instance whose blocks are kept for a waiting run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ReservedInstance {
    pub place: String,
    /// Absent, as the run, if the caller may not see the project.
    pub project: Option<String>,
    pub run: Option<String>,
    /// True if jobs there were preempted for it.
    pub is_preempted: bool,
    /// Time until which they are kept at most, or at which the run starts; null if that is not known.
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub until: Option<Timestamp>,
}

/// Place of a waiting run in the queue for instances, among the runs of all projects that share fleets with its project.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct QueueTurn {
    /// Number of runs before it.
    pub position: i64,
    /// Number of runs in the queue.
    pub length: i64,
    /// Class of the run: `urgent`, `normal` or `idle`.
    pub class: String,
    pub priority: i64,
    /// True if its project keeps within its guaranteed share when it starts.
    pub is_within_share: bool,
    /// Quotas of its project and of its user, with their use.
    pub quotas: Vec<Quota>,
    /// Usage of its project, in hours of a GPU (or of 8 CPUs, or of 64 GB). It counts half after seven days.
    pub usage: f64,
    /// Weight of its project: usage is divided by it.
    pub weight: i64,
    /// Runs before it, at most ten.
    pub in_front: Vec<RunInFront>,
    /// Instances that are kept for it, and for others on fleets that it may use.
    pub reserved: Vec<ReservedInstance>,
    /// Start of the run if all jobs last until their time limits and nothing else is submitted; null if that depends on
    /// a job without a limit.
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub starts_at: Option<Timestamp>,
    /// All of this in sentences.
    pub sentences: Vec<String>,
}

/// Preemption of a run that has not run again since.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PreemptionReport {
    #[schemars(with = "crate::document::DateTime")]
    pub at: Timestamp,
    /// `class` or `share`.
    pub rule: String,
    /// Run that takes its place. Absent, as its project, if the caller may not see that.
    pub project: Option<String>,
    pub run: Option<String>,
    /// Time that its jobs have to exit.
    pub grace_seconds: i64,
    /// All of this in sentences, and what follows.
    pub sentences: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ExplainedJob {
    pub replica: i64,
    pub rank: i64,
    pub submission_id: Option<Uuid>,
    pub status: String,
    /// Number of runs before it, if it waits for an instance.
    pub position: Option<i64>,
    pub in_front: Vec<RunInFront>,
    /// Nearest miss first.
    pub refusals: Vec<Refusal>,
    /// Number of locations that are not listed.
    pub left_out: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProbeReport {
    pub replica: i64,
    pub ready: bool,
    pub success_streak: u32,
    pub message: Option<String>,
}

/// Expected end of a run that occupies an instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ExpectedEnd {
    pub run: Option<String>,
    #[schemars(with = "crate::document::DateTime")]
    pub ends_at: Timestamp,
}

/// Reasons why an object is in its state.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Explanation {
    /// The answer in one sentence.
    pub sentence: String,
    /// Further sentences, most important first.
    pub reasons: Vec<String>,
    pub jobs: Vec<ExplainedJob>,
    /// Best first.
    pub cures: Vec<Cure>,
    pub deployment: Option<Deployment>,
    pub scaling: Vec<GroupScaling>,
    pub probes: Vec<ProbeReport>,
    /// Next time at which the server acts on it.
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub next_look_at: Option<Timestamp>,
    pub expected: Option<ExpectedEnd>,
    pub hint: Option<String>,
    /// Command with the same answer.
    pub command: String,
    /// Place in the queue, if it waits for an instance.
    #[serde(default)]
    pub turn: Option<QueueTurn>,
    #[serde(default)]
    pub preempted: Option<PreemptionReport>,
}

/// The nearest miss of a run that waits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NearestMiss {
    pub place: String,
    pub message: String,
    pub cure: String,
    pub patch: Option<Patch>,
}

/// A run that waits for an instance. Names are absent if the caller may not see its project.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct QueueEntry {
    /// Number of its queue in this list: projects that share fleets have one queue. The first run of the list is in queue 0.
    #[serde(default)]
    pub queue: u32,
    /// Number of runs before it in its queue.
    pub position: i64,
    pub project: Option<String>,
    pub run: Option<String>,
    pub run_id: Option<Uuid>,
    pub user: Option<String>,
    pub r#type: Option<String>,
    /// True for runs of the caller.
    pub mine: bool,
    /// Requested resources in words.
    #[serde(rename = "wants")]
    pub requested: String,
    #[schemars(with = "crate::document::DateTime")]
    pub waits_since: Timestamp,
    pub nearest: Option<NearestMiss>,
    /// True if waiting is enough.
    pub passes: bool,
    pub blocked_by: Vec<ExpectedEndAt>,
    /// `urgent`, `normal` or `idle`.
    #[serde(default)]
    pub class: String,
    /// Rule that puts it after the run before it in its queue: `class`, `share`, `usage`, `priority` or `age`.
    #[serde(default)]
    pub rule: Option<String>,
    /// Absent if the caller may not see its project.
    #[serde(default)]
    pub turn: Option<QueueTurn>,
}

/// Expected end of a run, with its location.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ExpectedEndAt {
    pub project: Option<String>,
    pub run: Option<String>,
    pub place: String,
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub ends_at: Option<Timestamp>,
}

/// Slots of managed jobs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Slots {
    pub launching: u32,
    pub launching_max: u32,
    pub alive: u32,
    pub alive_max: u32,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct QueueList {
    /// Time of the database, in microseconds.
    pub as_of: i64,
    pub entries: Vec<QueueEntry>,
    pub slots: Slots,
    /// Next runs to end by their time limits.
    pub next_free: Vec<ExpectedEndAt>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct TimelineRequest {
    /// Run.
    #[serde(default)]
    pub id: Option<Uuid>,
    /// Managed job: all its attempts.
    #[serde(default)]
    pub job_id: Option<i64>,
}

/// Time that a submission of a job spent in one phase.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PhaseSpan {
    pub replica: i64,
    pub rank: i64,
    pub submission: i64,
    pub submission_id: Uuid,
    /// Attempt of a managed job; 0 for other runs.
    pub attempt: u32,
    /// `queue`, `machine`, `image`, `run` or `stop`.
    pub phase: String,
    #[schemars(with = "crate::document::DateTime")]
    pub from: Timestamp,
    /// Null if the phase has not ended.
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub to: Option<Timestamp>,
    pub instance: Option<String>,
    pub market: Option<String>,
    /// Reason of its end, if the next phase did not follow.
    pub reason: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TimelineMark {
    #[schemars(with = "crate::document::DateTime")]
    pub at: Timestamp,
    /// `recovery` or `stop`.
    pub what: String,
    pub message: String,
    pub replica: Option<i64>,
    pub rank: Option<i64>,
}

/// An earlier run of the same name, with the seconds of its first job in each phase.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EarlierRun {
    pub id: Uuid,
    #[schemars(with = "crate::document::DateTime")]
    pub submitted_at: Timestamp,
    pub status: String,
    pub phases: BTreeMap<String, f64>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Timeline {
    pub spans: Vec<PhaseSpan>,
    pub marks: Vec<TimelineMark>,
    /// Newest first, at most ten.
    pub previous: Vec<EarlierRun>,
}

/// A change of a configuration.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Variant {
    pub label: String,
    /// Values by path, such as `resources.gpu.count`; null removes a field.
    #[serde(default)]
    pub patch: BTreeMap<String, serde_json::Value>,
}

/// A run or a specification, and at most 8 variants of it.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct WhatIfRequest {
    #[serde(default)]
    pub run_name: Option<String>,
    #[serde(default)]
    pub run_spec: Option<Document>,
    pub variants: Vec<Variant>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct VariantResult {
    pub label: String,
    pub patch: BTreeMap<String, serde_json::Value>,
    pub starts_now: bool,
    /// True if waiting is enough.
    pub passes: bool,
    pub offers: Vec<Offer>,
    pub total_offers: i64,
    /// Dollars per hour of the cheapest offer.
    pub cheapest: Option<f64>,
    pub refusals: Vec<Refusal>,
    pub left_out: u32,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct WhatIfResult {
    pub variants: Vec<VariantResult>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeploymentRequest {
    pub run_name: String,
}

/// A deployment to apply again.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct RedeployRequest {
    pub run_name: String,
    pub num: i64,
}

/// A deployment whose specification is stored.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct StoredDeployment {
    pub num: i64,
    #[schemars(with = "crate::document::DateTime")]
    pub at: Timestamp,
    pub user: Option<String>,
    /// `rolling`, `complete`, `failed`, `superseded` or `asleep`.
    pub state: String,
    pub reason: Option<String>,
    /// Configuration as YAML.
    pub text: String,
    pub current: bool,
}

/// Deployments, newest first.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeploymentList {
    pub deployments: Vec<StoredDeployment>,
    pub state: Option<Deployment>,
}
