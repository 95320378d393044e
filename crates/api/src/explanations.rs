//! Explanations: why a run, a managed job or an instance is in its state, and the queue for instances.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

use crate::{
    Document,
    offers::Offer,
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

/// One reason why a job does not fit somewhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Shortfall {
    pub kind: String,
    pub message: String,
    /// Change that would help; empty if there is none.
    pub cure: String,
    /// True if waiting may help.
    pub passes: bool,
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
    /// Number of locations where nothing else is missing.
    pub fits: u32,
    pub starts_now: bool,
}

/// A run before another one in the queue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RunInFront {
    pub position: i64,
    pub project: Option<String>,
    pub run: Option<String>,
    #[schemars(with = "crate::document::DateTime")]
    pub waits_since: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ExplainedJob {
    pub replica: i64,
    pub rank: i64,
    pub submission_id: Option<Uuid>,
    pub status: String,
    /// Number of jobs before it, if it waits for an instance.
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
}

/// The nearest miss of a run that waits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NearestMiss {
    pub place: String,
    pub message: String,
    pub cure: String,
}

/// A run that waits for an instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct QueueEntry {
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
