//! Calls of the runner: one job, in linear steps.
//!
//! | call | body → answer |
//! |---|---|
//! | `GET /api/healthcheck` | → [`Health`](super::Health) |
//! | `POST /api/submit` | [`SubmitBody`]; 409 once the job was started |
//! | `POST /api/upload_archive` | multipart, one part `archive` whose file name is the archive's id, a tar |
//! | `POST /api/upload_code` | raw: a git diff (remote repository) or a tar (virtual) |
//! | `POST /api/run` | → [`JobStarted`]; a repeat gets the same answer |
//! | `GET /api/pull?timestamp=MS` | → [`PullResponse`] |
//! | `POST /api/stop` | interrupts the job; any state |
//! | `POST /api/gate` | lets the job continue, because its other nodes are prepared too |
//! | `POST /api/hosts` | [`GroupHosts`]: names and addresses of the other tasks of its group |
//! | `GET /api/metrics` | → [`Metrics`] |
//! | `GET /api/logs?stream=job&offset=N&limit=M&wait_ms=W` | → raw bytes; `LOG_END_HEADER`, `LOG_COMPLETE_HEADER` |
//! | `POST /api/logs/read?stream=job&offset=N` | everything before N is stored elsewhere now |
//! | `GET /logs_ws?start_time=RFC3339` or `?offset=N` | WebSocket of binary frames, closed after the last byte |

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub const SERVICE: &str = "dstack-runner";

/// Everything that the runner needs for a job. Contains the values of secrets; must never be logged.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct SubmitBody {
    pub run: Run,
    pub job_spec: JobSpec,
    #[serde(default)]
    pub job_submission: JobSubmission,
    #[serde(default)]
    pub cluster_info: Option<ClusterInfo>,
    #[serde(default)]
    pub secrets: BTreeMap<String, String>,
    #[serde(default)]
    pub repo_credentials: Option<RepoCredentials>,
    /// Maximum output in bytes per hour; null and 0 mean no limit.
    #[serde(default)]
    pub log_quota_hour: Option<u64>,
    #[serde(default)]
    pub run_spec: Option<RunSpec>,
}

/// Present addresses of the nodes of a group of tasks. Each message contains all known nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupHosts {
    pub hosts: Vec<HostName>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostName {
    pub address: String,
    pub name: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Run {
    #[serde(default)]
    pub id: String,
    #[serde(default)]
    pub run_spec: Option<RunSpec>,
    #[serde(default)]
    pub project_name: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunSpec {
    #[serde(default)]
    pub run_name: Option<String>,
    #[serde(default)]
    pub repo_id: Option<String>,
    #[serde(default)]
    pub repo_data: Option<RepoData>,
    #[serde(default)]
    pub configuration_path: Option<String>,
    #[serde(default)]
    pub configuration: serde_json::Value,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSubmission {
    #[serde(default)]
    pub id: String,
}

#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    #[serde(default)]
    pub replica_num: i64,
    #[serde(default)]
    pub job_num: i64,
    #[serde(default)]
    pub jobs_per_replica: i64,
    /// `None`: the container's own user.
    #[serde(default)]
    pub user: Option<User>,
    /// Argument vector to run.
    #[serde(default)]
    pub commands: Vec<String>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub single_branch: bool,
    /// Seconds.
    #[serde(default)]
    pub max_duration: Option<i64>,
    /// Seconds between SIGTERM and SIGKILL.
    #[serde(default)]
    pub stop_duration: Option<i64>,
    #[serde(default)]
    pub ssh_key: Option<SshKey>,
    #[serde(default)]
    pub working_dir: Option<String>,
    #[serde(default)]
    pub repo_data: Option<RepoData>,
    #[serde(default)]
    pub repo_dir: Option<String>,
    /// `error` or `skip`.
    #[serde(default)]
    pub repo_exists_action: Option<String>,
    #[serde(default)]
    pub file_archives: Vec<FileArchive>,
    /// Version of Python to prepare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub python: Option<String>,
    /// Runs the commands in a terminal. Absent: only if the argument vector requests an interactive shell.
    #[serde(default)]
    pub tty: Option<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    #[serde(default)]
    pub uid: Option<u32>,
    #[serde(default)]
    pub gid: Option<u32>,
    #[serde(default)]
    pub username: Option<String>,
    #[serde(default)]
    pub groupname: Option<String>,
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SshKey {
    pub private: String,
    pub public: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "repo_type", rename_all = "snake_case")]
pub enum RepoData {
    Virtual {},
    Local {},
    Remote {
        #[serde(default)]
        repo_name: Option<String>,
        #[serde(default)]
        repo_branch: Option<String>,
        #[serde(default)]
        repo_hash: Option<String>,
        #[serde(default)]
        repo_config_name: Option<String>,
        #[serde(default)]
        repo_config_email: Option<String>,
    },
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepoCredentials {
    pub clone_url: String,
    #[serde(default)]
    pub private_key: Option<String>,
    #[serde(default)]
    pub oauth_token: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileArchive {
    pub id: String,
    pub path: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterInfo {
    #[serde(default)]
    pub job_ips: Vec<String>,
    #[serde(default)]
    pub master_job_ip: String,
    #[serde(default)]
    pub gpus_per_job: i64,
    /// GPUs of each node, in the order of `job_ips`.
    #[serde(default)]
    pub gpus_per_node: Option<Vec<i64>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobStarted {
    pub working_dir: String,
    pub username: String,
}

/// One change of the job's state, in order. Also the line format of the file that stores them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobState {
    /// `running`, `ready`, `done`, `failed` or `terminated`.
    pub state: String,
    /// Milliseconds; strictly increasing over states and log events.
    pub timestamp: i64,
    #[serde(default)]
    pub termination_reason: String,
    #[serde(default)]
    pub termination_message: String,
    /// Termination detail (`oom_killed`, `no_disk`, …), where the reason alone is not specific enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    #[serde(default)]
    pub exit_status: Option<i32>,
}

/// State of the job on disk, also after its runner has exited.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    pub states: Vec<JobState>,
    /// Offset after the last byte of the job's output.
    pub log_end: u64,
    /// True if nothing will be appended to the output.
    pub log_complete: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEvent {
    pub timestamp: i64,
    /// Base64.
    pub message: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullResponse {
    pub job_states: Vec<JobState>,
    pub job_logs: Vec<LogEvent>,
    pub runner_logs: Vec<LogEvent>,
    pub last_updated: i64,
    pub no_connections_secs: i64,
    pub has_more: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    pub timestamp_micro: i64,
    pub cpu_usage_micro: i64,
    pub memory_usage_bytes: i64,
    pub memory_working_set_bytes: i64,
    pub gpus: Vec<GpuMetrics>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuMetrics {
    pub gpu_memory_usage_bytes: i64,
    pub gpu_util_percent: i64,
}

macro_rules! without_secrets {
    ($($name:ident: $($field:ident),*;)*) => {$(
        impl std::fmt::Debug for $name {
            /// Omits secrets, because the text may be logged.
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name))$(.field(stringify!($field), &self.$field))*.finish_non_exhaustive()
            }
        }
    )*};
}
without_secrets! {
    SubmitBody: run, job_submission;
    JobSpec: replica_num, job_num, user, working_dir;
    SshKey: public;
    RepoCredentials: clone_url;
}
