//! Runs, their jobs and submissions.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

use crate::{Document, explanations::QueueTurn, offers::Offer, rows::RunRow};

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct RunFleet {
    pub id: Uuid,
    pub name: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Run {
    pub id: Uuid,
    pub project_name: String,
    pub user: String,
    #[serde(default)]
    pub fleet: Option<RunFleet>,
    #[schemars(with = "crate::document::DateTime")]
    pub submitted_at: Timestamp,
    #[schemars(with = "crate::document::DateTime")]
    pub last_processed_at: Timestamp,
    #[schemars(extend("enum" = ["pending", "submitted", "provisioning", "running", "terminating", "terminated", "failed", "done"]))]
    pub status: String,
    #[serde(default)]
    pub status_message: String,
    #[serde(default)]
    pub termination_reason: Option<String>,
    pub run_spec: Document,
    pub jobs: Vec<Job>,
    #[serde(default)]
    pub latest_job_submission: Option<JobSubmission>,
    #[serde(default)]
    pub cost: f64,
    #[serde(default)]
    pub service: Option<Document>,
    #[serde(default)]
    pub deployment_num: i64,
    #[serde(default)]
    pub error: Option<String>,
    #[serde(default)]
    pub deleted: Option<bool>,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub next_triggered_at: Option<Timestamp>,
    /// It waits for its next attempt, or for capacity after an attempt that found none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub retrying: bool,
    /// Reason why it waits, in one sentence: for capacity, for its next attempt, for its schedule or for a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Reasons why it ended, or why its replicas are not ready, most specific first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<String>,
    /// Action that may help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// State of the newest deployment of a service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deployment: Option<Deployment>,
    /// Target number of replicas of each group of a service.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scaling: Vec<GroupScaling>,
    /// Row of the run in lists. Only if a browser reads a single run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row: Option<Box<RunRow>>,
    /// Time of the database when the row was read, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub as_of: Option<i64>,
}

/// Deployment of a service: replicas of one configuration replace those of another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Deployment {
    /// Number of the deployment. Increases with each change that affects replicas.
    pub num: i64,
    #[schemars(extend("enum" = ["rolling", "complete", "failed", "asleep"]))]
    pub state: String,
    /// New replicas that receive requests.
    pub ready: u32,
    /// Target number of replicas.
    pub wanted: u32,
    /// Remaining replicas of earlier deployments.
    pub old: u32,
    /// Reason why it waits or failed.
    #[serde(default)]
    pub message: Option<String>,
    /// Deployment that this one rolls back.
    #[serde(default)]
    pub rolled_back: Option<RolledBackDeployment>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RolledBackDeployment {
    pub num: i64,
    /// Reason why it failed.
    pub message: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct GroupScaling {
    pub group: String,
    /// Target number of replicas.
    pub desired: u32,
    /// Measurement behind the number, or the reason why there is none.
    #[serde(default)]
    pub message: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Job {
    pub job_spec: Document,
    pub job_submissions: Vec<JobSubmission>,
    #[serde(default)]
    pub job_connection_info: Option<Document>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Probe {
    pub success_streak: i64,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct JobSubmission {
    pub id: Uuid,
    pub submission_num: i64,
    #[serde(default)]
    pub deployment_num: i64,
    #[schemars(with = "crate::document::DateTime")]
    pub submitted_at: Timestamp,
    #[schemars(with = "crate::document::DateTime")]
    pub last_processed_at: Timestamp,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub finished_at: Option<Timestamp>,
    #[serde(default)]
    pub inactivity_secs: Option<i64>,
    #[schemars(extend("enum" = ["submitted", "provisioning", "pulling", "running", "terminating", "terminated", "aborted", "failed", "done"]))]
    pub status: String,
    #[serde(default)]
    pub status_message: String,
    #[serde(default)]
    pub termination_reason: Option<String>,
    #[serde(default)]
    pub termination_reason_message: Option<String>,
    #[serde(default)]
    pub exit_status: Option<i64>,
    #[serde(default)]
    pub error: Option<String>,
    #[serde(default)]
    pub job_provisioning_data: Option<Document>,
    #[serde(default)]
    pub job_runtime_data: Option<Document>,
    #[serde(default)]
    pub image_pull_progress: Option<Document>,
    #[serde(default)]
    pub probes: Vec<Probe>,
    /// Whether a running replica with probes receives requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
    /// Number of runs before it that wait for an instance, of all projects that share fleets with its project: 0 is next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_position: Option<i64>,
    /// Reasons why it waits for an instance, or got none, as in `JobPlan`. Only when a single run is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<Document>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ListRequest {
    #[serde(default)]
    pub project_name: Option<String>,
    #[serde(default)]
    pub repo_id: Option<String>,
    #[serde(default)]
    pub username: Option<String>,
    #[serde(default)]
    pub only_active: bool,
    #[serde(default = "yes")]
    pub include_jobs: bool,
    #[serde(default)]
    pub job_submissions_limit: Option<i64>,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub prev_submitted_at: Option<Timestamp>,
    #[serde(default)]
    pub prev_run_id: Option<Uuid>,
    #[serde(default = "limit")]
    pub limit: i64,
    #[serde(default)]
    pub ascending: bool,
    /// Adds `queue_position` to jobs that wait for an instance.
    #[serde(default)]
    pub queue_positions: bool,
}

impl Default for ListRequest {
    fn default() -> Self {
        Self {
            project_name: None,
            repo_id: None,
            username: None,
            only_active: Default::default(),
            include_jobs: yes(),
            job_submissions_limit: None,
            prev_submitted_at: None,
            prev_run_id: None,
            limit: limit(),
            ascending: Default::default(),
            queue_positions: Default::default(),
        }
    }
}

fn yes() -> bool {
    true
}

fn limit() -> i64 {
    100
}

/// Run by name, or by id. An id also finds a deleted run.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct ReadRequest {
    #[serde(default)]
    pub run_name: Option<String>,
    #[serde(default)]
    pub id: Option<Uuid>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PlanRequest {
    pub run_spec: Document,
    #[serde(default)]
    pub max_offers: Option<i64>,
    #[serde(default)]
    pub full_offers: bool,
    #[serde(default)]
    pub unallocated_resources: bool,
    #[serde(default)]
    pub reverse_offers: bool,
    #[serde(default)]
    pub for_offers_only: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct JobPlan {
    pub job_spec: Document,
    pub offers: Vec<Offer>,
    pub total_offers: i64,
    #[serde(default)]
    pub max_price: Option<f64>,
    /// Reasons why the job would not start at once, if any: `{refusals: [{place, count, shortfalls}], left_out}`,
    /// nearest miss first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<Document>,
    /// Instances and offers that can never run the job, in the form of `why`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub misfits: Option<Document>,
    /// Environment that the job runs in: `a container of image debian:12`, or a plain process with its confinement.
    /// Several entries if the matching instances differ.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs_in: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ApplyAction {
    Create,
    Update,
}

/// Description of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ImageReport {
    pub name: String,
    /// Reason why the registry was not asked or did not answer. The instance checks such an image when it pulls it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_checked: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Platforms that it has a build for, such as `linux/amd64`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub platforms: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_dir: Option<String>,
    /// Variables, as `NAME=VALUE`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub environment: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct RunPlan {
    pub project_name: String,
    pub user: String,
    pub run_spec: Document,
    #[serde(default)]
    pub effective_run_spec: Option<Document>,
    pub job_plans: Vec<JobPlan>,
    /// Images of the jobs, as their registries describe them. Empty if the server does not look them up.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<ImageReport>,
    #[serde(default)]
    pub current_resource: Option<Run>,
    pub action: ApplyAction,
    /// Place that it would have in the queue, if it would not start at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<QueueTurn>,
}

/// Expected state of the run: only the fields that show whether it has changed since.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ExpectedRun {
    pub id: Uuid,
    pub run_spec: Document,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ApplyInput {
    pub run_spec: Document,
    #[serde(default)]
    pub current_resource: Option<ExpectedRun>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ApplyRequest {
    pub plan: ApplyInput,
    #[serde(default)]
    pub force: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct StopRequest {
    pub runs_names: Vec<String>,
    #[serde(default)]
    pub abort: bool,
}

/// Job in which a terminal is opened.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct TerminalRequest {
    pub run_name: String,
    pub job_submission_id: Uuid,
}

/// Job and port to connect to.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ConnectRequest {
    pub run_name: String,
    pub job_submission_id: Uuid,
    /// Port as the job sees it; 0 is the SSH server that comes with every job.
    #[serde(default)]
    pub port: u16,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeleteRequest {
    pub runs_names: Vec<String>,
}
