//! Managed jobs: work that survives the loss of its instances.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

use crate::Document;

/// Task file to launch, with overrides.
#[derive(Clone, Serialize, Deserialize, JsonSchema)]
pub struct LaunchRequest {
    /// Text of a task file, with all its documents.
    pub text: String,
    /// Name to use instead of the name in the file.
    #[serde(default)]
    pub name: Option<String>,
    /// Environment variables; they override those of the file.
    #[serde(default)]
    pub envs: BTreeMap<String, String>,
    /// Values of secrets; they override those of the file. They are stored encrypted and never returned.
    #[serde(default)]
    pub secrets: BTreeMap<String, String>,
    /// Priority from -1000 to 1000. Jobs with a higher priority are launched first.
    #[serde(default)]
    pub priority: Option<i32>,
    /// Number of jobs to launch from the file, all or none.
    #[serde(default)]
    pub num_jobs: Option<u32>,
    /// Archives that were uploaded for its tasks.
    #[serde(default)]
    pub files: Vec<TaskFile>,
    /// Overrides of the file, for each of its tasks.
    #[serde(default)]
    pub overrides: Overrides,
}

/// Values that replace those of the file, in the syntax of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Overrides {
    #[serde(default)]
    pub gpus: Option<String>,
    #[serde(default)]
    pub cpus: Option<String>,
    #[serde(default)]
    pub memory: Option<String>,
    #[serde(default)]
    pub num_nodes: Option<u32>,
    #[serde(default)]
    pub use_spot: Option<bool>,
    #[serde(default)]
    pub infra: Option<String>,
    /// Strategy, or a one-line map.
    #[serde(default)]
    pub job_recovery: Option<String>,
    /// Duration, or a one-line map.
    #[serde(default)]
    pub deadline: Option<String>,
}

impl From<Overrides> for windlass_model::skypilot::Overrides {
    fn from(wire: Overrides) -> Self {
        let Overrides { gpus, cpus, memory, num_nodes, use_spot, infra, job_recovery, deadline } = wire;
        Self { gpus, cpus, memory, num_nodes, use_spot, infra, job_recovery, deadline }
    }
}

/// Omits the values of variables and secrets.
impl std::fmt::Debug for LaunchRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LaunchRequest").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Archive for a task, and the path to unpack it to.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct TaskFile {
    pub task: u32,
    pub archive_id: Uuid,
    pub path: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct LaunchResponse {
    /// Launched jobs, in the order of their ranks.
    pub jobs: Vec<LaunchedJob>,
    /// Parts of the file that have no effect.
    pub warnings: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct LaunchedJob {
    pub id: Uuid,
    /// Number that users refer to the job by.
    pub job_id: i64,
    pub name: String,
}

/// Filter of managed jobs. The newest are returned first.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct ListRequest {
    /// Only jobs with these numbers.
    #[serde(default)]
    pub job_ids: Option<Vec<i64>>,
    #[serde(default)]
    pub name: Option<String>,
    /// Only jobs with one of these statuses.
    #[serde(default)]
    pub statuses: Vec<String>,
    #[serde(default)]
    pub skip_finished: bool,
    /// Jobs of all users instead of the caller's only.
    #[serde(default)]
    pub all_users: bool,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub since: Option<Timestamp>,
    /// Only jobs older than this one.
    #[serde(default)]
    pub prev_job_id: Option<i64>,
    /// Maximum number of jobs. Default: 100.
    #[serde(default)]
    pub limit: Option<i64>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ReadRequest {
    pub job_id: i64,
}

/// Jobs to cancel, selected by exactly one of the first four fields.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct CancelRequest {
    #[serde(default)]
    pub job_ids: Option<Vec<i64>>,
    #[serde(default)]
    pub name: Option<String>,
    /// All jobs of the caller.
    #[serde(default)]
    pub all: bool,
    /// All jobs of all users.
    #[serde(default)]
    pub all_users: bool,
    /// Lets pending output be written before the jobs end.
    #[serde(default)]
    pub graceful: bool,
    /// Seconds to wait for pending output; then the jobs are ended at once.
    #[serde(default)]
    pub graceful_timeout: Option<i64>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CancelResponse {
    /// Jobs that had not ended, the oldest first.
    pub job_ids: Vec<i64>,
}

/// A finished job to resume under its number.
#[derive(Clone, Serialize, Deserialize, JsonSchema)]
pub struct ResumeRequest {
    pub job_id: i64,
    /// Values of the job's secrets, which were deleted when it ended.
    #[serde(default)]
    pub secrets: BTreeMap<String, String>,
}

/// Omits the values of secrets.
impl std::fmt::Debug for ResumeRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResumeRequest").field("job_id", &self.job_id).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ManagedJob {
    pub id: Uuid,
    /// Number that users refer to the job by.
    pub job_id: i64,
    pub name: String,
    pub project_name: String,
    pub user: String,
    #[schemars(extend("enum" = ["single", "pipeline", "dag", "group"]))]
    pub shape: String,
    pub priority: i64,
    /// Priority of its runs in the queue for instances, from 0 to 100, unless a task sets its own.
    #[serde(default)]
    pub run_priority: i64,
    /// Position among the jobs of one launch, of which there are `num_jobs`.
    pub rank: i64,
    pub num_jobs: i64,
    pub status: String,
    pub schedule_state: String,
    /// Reason why it waits, recovers, failed or was cancelled: that of the first of its tasks that has one.
    #[serde(default)]
    pub reason: Option<String>,
    #[serde(rename = "cancel_asked")]
    pub cancel_requested: bool,
    #[schemars(with = "crate::document::DateTime")]
    pub created_at: Timestamp,
    /// Time at which the first of its tasks first got a launch slot.
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub submitted_at: Option<Timestamp>,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub end_at: Option<Timestamp>,
    /// Seconds from the first launch slot to the end, or to now.
    #[serde(default)]
    pub total_duration: Option<i64>,
    /// Seconds during which its tasks ran.
    pub job_duration: i64,
    pub recovery_count: u32,
    /// Cost of its attempts so far, in dollars. Only when a single job is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
    /// Its plan as YAML, without secrets. Only when a single job is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    pub tasks: Vec<Task>,
}

/// One attempt of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TaskAttempt {
    pub attempt: u32,
    pub run: String,
    pub run_id: Option<Uuid>,
    /// `spot` or `on-demand`.
    pub market: Option<String>,
    /// Instance of its first node.
    pub placement: Option<String>,
    #[schemars(with = "crate::document::DateTime")]
    pub from: Timestamp,
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub to: Option<Timestamp>,
    /// Reason of its end.
    pub reason: Option<String>,
    /// Dollars so far.
    pub cost: f64,
}

/// Cost of a job on spot nodes, compared with on-demand nodes.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Savings {
    /// Dollars so far.
    pub spent: f64,
    /// Dollars for the same time on demand; null if the on-demand price of a node is not known.
    pub on_demand: Option<f64>,
    pub saved: Option<f64>,
    /// Number of times that the job got other nodes.
    pub changeovers: u32,
    pub deadline: Option<DeadlineLine>,
    /// Time, and seconds of work done until then.
    #[schemars(with = "Vec<(crate::document::DateTime, f64)>")]
    pub progress: Vec<(Timestamp, f64)>,
    pub decisions: Vec<MarketDecision>,
}

/// Line that the work must stay above to meet the deadline.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeadlineLine {
    #[schemars(with = "crate::document::DateTime")]
    pub from: Timestamp,
    #[schemars(with = "crate::document::DateTime")]
    pub to: Timestamp,
    /// Work in seconds.
    pub work_seconds: i64,
}

/// A choice of nodes.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct MarketDecision {
    #[schemars(with = "crate::document::DateTime")]
    pub at: Timestamp,
    pub market: Option<String>,
    pub message: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Task {
    pub task_id: u32,
    pub name: String,
    /// Requested resources, as text.
    pub resources: String,
    pub status: String,
    pub schedule_state: String,
    /// Kind of wait of a pending task: `queued`, `launch_backoff` or `recovery_backoff`.
    #[serde(default)]
    pub pending_kind: Option<String>,
    /// Reason why it waits, recovers, failed or was cancelled, in one sentence.
    #[serde(default)]
    pub reason: Option<String>,
    /// Reason of the last failed launch, or of the last loss of nodes.
    #[serde(default)]
    pub last_failure: Option<String>,
    /// Reasons why the newest attempt did not fit, nearest miss first: `{refusals: [{place, count, shortfalls}],
    /// left_out}`. Only when a single job is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<Document>,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub submitted_at: Option<Timestamp>,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub start_at: Option<Timestamp>,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub end_at: Option<Timestamp>,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub last_recovered_at: Option<Timestamp>,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub next_retry_at: Option<Timestamp>,
    #[serde(default)]
    pub total_duration: Option<i64>,
    pub job_duration: i64,
    pub recovery_count: u32,
    pub restarts_on_errors: u32,
    /// Location where it runs or last ran.
    #[serde(default)]
    pub placement: Option<String>,
    /// Number of the newest attempt; 0 before the first.
    pub attempt: u32,
    /// Names of the runs of its attempts, the oldest first. Their logs are those of the task.
    pub runs: Vec<String>,
    /// Cost of its attempts so far, in dollars. Only when a single job is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
    /// Progress towards its deadline, if it has one and got its first launch slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<DeadlineReport>,
    /// Attempts, the oldest first. Only when a single job is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempts: Option<Vec<TaskAttempt>>,
    /// Tasks that must end before it. Only when a single job is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Vec<u32>>,
}

/// A task with a deadline: on time or not, and its use of spot and on-demand nodes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeadlineReport {
    #[schemars(with = "crate::document::DateTime")]
    pub due_at: Timestamp,
    /// Whether it ended, or still can end, before that time.
    pub on_time: bool,
    /// Seconds left at its end, or now; negative after the deadline.
    pub spare: i64,
    /// Seconds in which it ran on spot nodes, times the number of nodes.
    pub spot_node_seconds: i64,
    pub on_demand_node_seconds: i64,
    /// Number of times that it got nodes.
    pub changeovers: u32,
}
