//! Slim rows of lists, for the web UI: the columns that are shown, filtered, sorted and paged by the server.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

/// Filter and page of a list. Empty lists do not filter.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct RowsRequest {
    #[serde(default)]
    pub projects: Vec<String>,
    #[serde(default)]
    pub users: Vec<String>,
    #[serde(default)]
    pub statuses: Vec<String>,
    /// Types of runs, backends of instances, schedule states of managed jobs, dispatchers of containers.
    #[serde(default)]
    pub types: Vec<String>,
    #[serde(default)]
    pub fleets: Vec<String>,
    /// Part of a name, a user, a reason or a message, or the beginning of an id; letter case does not matter.
    #[serde(default)]
    pub text: Option<String>,
    /// Submitted at or after this time.
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub since: Option<Timestamp>,
    /// Submitted before this time.
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub until: Option<Timestamp>,
    /// Column to sort by; a leading `-` sorts in descending order.
    #[serde(default)]
    pub sort: Option<String>,
    /// `next` or `prev` of an earlier response.
    #[serde(default)]
    pub cursor: Option<String>,
    /// Maximum number of rows, up to 500; 0 returns only counts. Default: 100.
    #[serde(default)]
    pub limit: Option<u32>,
}

/// A page of rows.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Rows<T> {
    pub rows: Vec<T>,
    /// Cursor of the rows after these.
    pub next: Option<String>,
    /// Cursor of the rows before these.
    pub prev: Option<String>,
    /// Number of rows by status, with the same filter except for `statuses`.
    pub counts: BTreeMap<String, i64>,
    /// Number of rows, exact up to 10,000.
    pub total: i64,
    /// True if there are more than `total`.
    pub more: bool,
    /// Time of the database when the rows were read, in microseconds.
    pub as_of: i64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RunRow {
    pub id: Uuid,
    pub project: String,
    pub name: String,
    /// `task`, `service` or `dev-environment`.
    pub r#type: String,
    pub user: String,
    pub status: String,
    /// Status in words, if it says more than the status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Reason why it waits or ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub termination_reason: Option<String>,
    /// Number of runs before it in the queue, of all projects that share fleets with its project.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_position: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleet: Option<String>,
    /// Instance of its first job, and the number of others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// Requested resources in words.
    pub resources: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// GPUs that all its nodes request.
    pub gpus: i64,
    /// Running jobs, or ready replicas of a service.
    pub ready: i64,
    pub wanted: i64,
    /// Submissions of the job with the most.
    pub attempts: i64,
    /// Dollars until now.
    pub cost: f64,
    /// Dollars per hour now.
    pub price: f64,
    /// Newest submission of its first job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub submission_id: Option<Uuid>,
    /// Number of the managed job of which it is an attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed_job: Option<i64>,
    #[schemars(with = "crate::document::DateTime")]
    pub submitted_at: Timestamp,
    /// Start of its first job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub started_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub finished_at: Option<Timestamp>,
}

/// One task of a managed job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ManagedJobRow {
    /// `JOB_ID/TASK_ID`.
    pub id: String,
    pub uuid: Uuid,
    pub job_id: i64,
    pub task_id: u32,
    /// Number of tasks of the job.
    pub tasks: usize,
    pub project: String,
    pub name: String,
    /// Name of the task.
    pub task: String,
    pub user: String,
    pub status: String,
    pub schedule_state: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    pub attempt: u32,
    pub recoveries: u32,
    /// `spot` or `on-demand`, of the newest attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub market: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<String>,
    pub resources: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub deadline: Option<Timestamp>,
    /// Seconds by which it is ahead of its deadline; negative if it is late.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slack_seconds: Option<i64>,
    pub cost: f64,
    #[schemars(with = "crate::document::DateTime")]
    pub submitted_at: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub started_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub finished_at: Option<Timestamp>,
}

/// A job on an instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct InstanceJob {
    pub run: String,
    pub project: String,
    pub run_id: Uuid,
    pub job: String,
    pub blocks: i64,
}

/// Current use of an instance, from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct InstanceUse {
    pub cpu: Option<f64>,
    pub memory: Option<f64>,
    pub gpu: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct InstanceRow {
    pub id: Uuid,
    pub project: String,
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleet: Option<String>,
    pub instance_num: i64,
    pub backend: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    pub status: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    pub health: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub unreachable_since: Option<Timestamp>,
    /// True if it accepts no new jobs.
    pub draining: bool,
    pub resources: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    pub gpus: i64,
    pub cpus: i64,
    pub memory_mib: i64,
    pub blocks_total: i64,
    pub blocks_busy: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub market: Option<String>,
    /// Dollars per hour.
    pub price: f64,
    pub jobs: Vec<InstanceJob>,
    pub used: InstanceUse,
    #[schemars(with = "crate::document::DateTime")]
    pub created_at: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub finished_at: Option<Timestamp>,
}

/// One container of the queue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ContainerRow {
    /// The same as `uuid`.
    pub id: String,
    pub uuid: String,
    /// Name of the newest request for it.
    pub name: String,
    pub state: String,
    pub priority: u64,
    /// Name of the dispatcher that holds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dispatcher: Option<String>,
    /// Last report of the dispatcher.
    #[serde(default, rename = "said", skip_serializing_if = "Option::is_none")]
    pub scheduling_status: Option<String>,
    pub attempt: u32,
    pub owner: String,
    pub resources: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i64>,
    pub cost: f64,
    #[schemars(with = "crate::document::DateTime")]
    pub created_at: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub started_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub finished_at: Option<Timestamp>,
}
