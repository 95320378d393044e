//! Managed jobs: work that outlives the machines it runs on.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

use crate::Document;

/// A file, and what is given beside it.
#[derive(Clone, Serialize, Deserialize, JsonSchema)]
pub struct LaunchRequest {
    /// The text of a task file, with all its documents.
    pub text: String,
    /// Instead of the name in the file.
    #[serde(default)]
    pub name: Option<String>,
    /// Variables, over those of the file.
    #[serde(default)]
    pub envs: BTreeMap<String, String>,
    /// Values of secrets, over those of the file. They are kept sealed and never shown.
    #[serde(default)]
    pub secrets: BTreeMap<String, String>,
    /// From -1000 to 1000; higher is launched first.
    #[serde(default)]
    pub priority: Option<i32>,
    /// So many jobs of the same file, all or none.
    #[serde(default)]
    pub num_jobs: Option<u32>,
    /// Archives that were uploaded for its tasks.
    #[serde(default)]
    pub files: Vec<TaskFile>,
    /// Over what the file says, for every task of it.
    #[serde(default)]
    pub overrides: Overrides,
}

/// What is given stands instead of the file's; written as the file would have it.
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
    /// A strategy, or a map of one line.
    #[serde(default)]
    pub job_recovery: Option<String>,
    /// A duration, or a map of one line.
    #[serde(default)]
    pub deadline: Option<String>,
}

impl From<Overrides> for windlass_model::sky::Overrides {
    fn from(wire: Overrides) -> Self {
        let Overrides { gpus, cpus, memory, num_nodes, use_spot, infra, job_recovery, deadline } = wire;
        Self { gpus, cpus, memory, num_nodes, use_spot, infra, job_recovery, deadline }
    }
}

/// Without the values of variables and secrets.
impl std::fmt::Debug for LaunchRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LaunchRequest").field("name", &self.name).finish_non_exhaustive()
    }
}

/// An archive for a task, and where its content goes.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct TaskFile {
    pub task: u32,
    pub archive_id: Uuid,
    pub path: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct LaunchResponse {
    /// In the order of their ranks.
    pub jobs: Vec<LaunchedJob>,
    /// What of the file has no effect here.
    pub warnings: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct LaunchedJob {
    pub id: Uuid,
    /// What people call it by.
    pub job_id: i64,
    pub name: String,
}

/// Which jobs, the newest first.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct ListRequest {
    /// Only these.
    #[serde(default)]
    pub job_ids: Option<Vec<i64>>,
    #[serde(default)]
    pub name: Option<String>,
    /// Only jobs that show one of these statuses.
    #[serde(default)]
    pub statuses: Vec<String>,
    #[serde(default)]
    pub skip_finished: bool,
    /// Everybody's, not the caller's alone.
    #[serde(default)]
    pub all_users: bool,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub since: Option<Timestamp>,
    /// Only jobs older than this one.
    #[serde(default)]
    pub prev_job_id: Option<i64>,
    /// At most so many; 100 if not given.
    #[serde(default)]
    pub limit: Option<i64>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ReadRequest {
    pub job_id: i64,
}

/// Exactly one of the first four says which jobs.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct CancelRequest {
    #[serde(default)]
    pub job_ids: Option<Vec<i64>>,
    #[serde(default)]
    pub name: Option<String>,
    /// All of the caller's.
    #[serde(default)]
    pub all: bool,
    /// Everybody's.
    #[serde(default)]
    pub all_users: bool,
    /// Let pending output be written.
    #[serde(default)]
    pub graceful: bool,
    /// For so many seconds; then they are ended at once.
    #[serde(default)]
    pub graceful_timeout: Option<i64>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CancelResponse {
    /// Those that had not ended, by age.
    pub job_ids: Vec<i64>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ManagedJob {
    pub id: Uuid,
    /// What people call it by.
    pub job_id: i64,
    pub name: String,
    pub project_name: String,
    pub user: String,
    #[schemars(extend("enum" = ["single", "pipeline", "dag", "group"]))]
    pub shape: String,
    pub priority: i64,
    /// Its position among the copies of one call, and how many there are.
    pub rank: i64,
    pub num_jobs: i64,
    pub status: String,
    pub schedule_state: String,
    /// Why it waits, recovers, failed or was cancelled: what the first of its tasks says.
    #[serde(default)]
    pub reason: Option<String>,
    pub cancel_asked: bool,
    #[schemars(with = "crate::document::DateTime")]
    pub created_at: Timestamp,
    /// When the first of its tasks was first given a launch slot.
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub submitted_at: Option<Timestamp>,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub end_at: Option<Timestamp>,
    /// Seconds from the first launch slot to the end, or to now.
    #[serde(default)]
    pub total_duration: Option<i64>,
    /// Seconds in which its tasks ran.
    pub job_duration: i64,
    pub recovery_count: u32,
    pub tasks: Vec<Task>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Task {
    pub task_id: u32,
    pub name: String,
    /// What it asks for, in words.
    pub resources: String,
    pub status: String,
    pub schedule_state: String,
    /// What a task that is pending waits for.
    #[serde(default)]
    pub pending_kind: Option<String>,
    /// Why it waits, recovers, failed or was cancelled, in one sentence.
    #[serde(default)]
    pub reason: Option<String>,
    /// Why a launch last came to nothing, or nodes were last lost.
    #[serde(default)]
    pub last_failure: Option<String>,
    /// Where the newest attempt did not fit, nearest miss first: `{refusals: [{place, count, shortfalls}], left_out}`.
    /// Only of a job that is read by itself.
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
    /// Where it runs, or ran last.
    #[serde(default)]
    pub placement: Option<String>,
    /// The newest attempt; 0 before the first.
    pub attempt: u32,
    /// The runs of its attempts, the first first. Their logs are those of the task.
    pub runs: Vec<String>,
}
