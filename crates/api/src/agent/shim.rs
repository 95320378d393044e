//! Calls of the shim: tasks of a host, and the host itself.
//!
//! | call | body → answer |
//! |---|---|
//! | `GET /api/healthcheck` | → [`Health`](super::Health) |
//! | `GET /api/tasks` | → [`TaskList`] |
//! | `POST /api/tasks` | [`TaskSpec`], signed → 200; 400, 403 forbidden, 410 was removed before, 412 older epoch |
//! | `GET /api/tasks/ID` | → [`TaskInfo`]; 404 |
//! | `POST /api/tasks/ID/terminate` | [`TerminateRequest`] → [`TaskInfo`]; 404, 412 |
//! | `POST /api/tasks/ID/remove` | → 200; 409 while it runs, 412. With an epoch, an unknown task is removed too: it can never start later |
//! | `GET /api/tasks/ID/logs?stream=job&offset=N&limit=M&wait_ms=W` | → raw bytes from the spool, also after the runner's end; `LOG_END_HEADER`, `LOG_COMPLETE_HEADER` |
//! | `GET /api/tasks/ID/job` | → [`JobRecord`](super::runner::JobRecord) from disk, also after the runner's end |
//! | `ANY /api/tasks/ID/runner/…` | forwarded to the runner of the task |
//! | `GET /api/events?after=SEQ&boot=BOOT` | → one [`ShimEvent`](super::events::ShimEvent) per line, without end |
//! | `GET /api/instance/health`, `…/info`, `GET /api/components`, `POST /api/components/install`, `POST /api/shutdown` | as dstack's |
//! | `GET /api/instance/host` | → [`HostInfo`] |

use serde::{Deserialize, Serialize};

use windlass_model::id::{InstanceId, SubmissionId};

/// Value of `Health::service`; dstack's server accepts no other.
pub const SERVICE: &str = "dstack-shim";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskStatus {
    /// Waits for its turn, on a host that is a queue. Agents never report this status for tasks that they run.
    Queued,
    Pending,
    Preparing,
    Pulling,
    Creating,
    Running,
    Terminated,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskList {
    pub tasks: Vec<TaskItem>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskItem {
    pub id: SubmissionId,
    pub status: TaskStatus,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NetworkMode {
    #[default]
    #[serde(alias = "")]
    Host,
    Bridge,
}

/// Isolation of a task without an image, which is a plain process on its host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessIsolation {
    /// Runs as a separate user, without access to other tasks, the agent or the server.
    #[default]
    Confined,
    /// Runs as the agent's user, with all its rights. Hosts reject it unless their owner has allowed it.
    Own,
}

impl ProcessIsolation {
    pub fn is_confined(&self) -> bool {
        *self == Self::Confined
    }
}

/// Specification of a task. The job's secrets are not included: the runner receives them over its own socket.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskSpec {
    pub id: SubmissionId,
    pub name: String,
    #[serde(default)]
    pub registry_username: String,
    #[serde(default)]
    pub registry_password: String,
    pub image_name: String,
    #[serde(default)]
    pub container_user: String,
    #[serde(default)]
    pub privileged: bool,
    /// −1: all GPUs, if any; 0: none; n: exactly n.
    #[serde(default)]
    pub gpu: i64,
    /// Cores; 0 means no limit.
    #[serde(default)]
    pub cpu: f64,
    /// Bytes; 0 means no limit.
    #[serde(default)]
    pub memory: i64,
    /// Bytes; 0 means the engine's default.
    #[serde(default)]
    pub shm_size: i64,
    #[serde(default)]
    pub network_mode: NetworkMode,
    #[serde(default, deserialize_with = "null_is_empty")]
    pub volumes: Vec<Volume>,
    #[serde(default, deserialize_with = "null_is_empty")]
    pub volume_mounts: Vec<VolumeMount>,
    #[serde(default, deserialize_with = "null_is_empty")]
    pub instance_mounts: Vec<InstanceMount>,
    #[serde(default, deserialize_with = "null_is_empty")]
    pub gpu_devices: Vec<GpuDevice>,
    /// Project of the job, for the policy of the host. A dstack server sends none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub project: String,
    #[serde(default)]
    pub host_ssh_user: String,
    #[serde(default, deserialize_with = "null_is_empty")]
    pub host_ssh_keys: Vec<String>,
    #[serde(default, deserialize_with = "null_is_empty")]
    pub container_ssh_keys: Vec<String>,
    /// Ports that the program listens on. On a network shared with other tasks, the task gets separate ports for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub app_ports: Vec<u16>,
    /// Maximum number of processes and threads; 0 means the agent's default.
    #[serde(default)]
    pub pids: i64,
    /// Maximum disk usage in bytes, of the task's directory and container together; 0 means no limit.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub disk: i64,
    /// True for one node of several: the others must reach its SSH port, which is then the standard port on every
    /// address.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cluster: bool,
    /// Loopback address of a node that shares the host with the other nodes: its SSH server listens for them there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_address: Option<std::net::Ipv4Addr>,
    /// Applies to a plain process only; a container is isolated anyway.
    #[serde(default, skip_serializing_if = "ProcessIsolation::is_confined")]
    pub process_isolation: ProcessIsolation,
    /// Claims that the signature is bound to; absent from a dstack server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claims: Option<Claims>,
}

/// Validity of a signed specification: the instance, the epoch of the lock and the expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    pub instance_id: InstanceId,
    pub epoch: i64,
    /// Unix seconds.
    pub expires_at: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    pub backend: String,
    pub name: String,
    pub volume_id: String,
    #[serde(default)]
    pub init_fs: bool,
    #[serde(default)]
    pub device_name: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeMount {
    pub name: String,
    pub path: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceMount {
    pub instance_path: String,
    pub path: String,
    #[serde(default)]
    pub optional: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuDevice {
    pub path_on_host: String,
    pub path_in_container: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    pub host: u16,
    pub container: u16,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullProgress {
    pub downloaded_bytes: u64,
    pub extracted_bytes: u64,
    pub total_bytes: u64,
    pub is_total_bytes_final: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskInfo {
    pub id: SubmissionId,
    pub status: TaskStatus,
    /// Job termination reason; empty until the task has ended.
    pub termination_reason: String,
    /// For a queued task: the reason why it waits.
    pub termination_message: String,
    /// `None` until the container runs; empty if no ports are mapped.
    pub ports: Option<Vec<Port>>,
    pub image_pull_progress: Option<PullProgress>,
    pub container_name: String,
    pub container_id: String,
    pub gpus_ids: Vec<String>,
    /// Exit status of the container or of the main process.
    #[serde(default)]
    pub exit_status: Option<i32>,
    /// Termination detail (`oom_killed`, `host_reboot`, …), where the reason alone is not specific enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Highest epoch seen for this submission.
    #[serde(default)]
    pub epoch: i64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminateRequest {
    #[serde(default)]
    pub termination_reason: String,
    #[serde(default)]
    pub termination_message: String,
    /// Seconds between SIGTERM and SIGKILL.
    #[serde(default)]
    pub timeout: u64,
}

/// Resources of the host. Also written to `host_info.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostInfo {
    /// `nvidia`, `amd`, `intel`, `tenstorrent` or `none`.
    pub gpu_vendor: String,
    pub gpu_name: String,
    /// MiB of one GPU.
    pub gpu_memory: u64,
    pub gpu_count: u32,
    /// NVIDIA only, as reported by the driver: `[9, 0]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_compute_capability: Option<(u32, u32)>,
    /// Addresses of all interfaces except loopback, with prefix length.
    pub addresses: Vec<String>,
    /// Bytes, of the disk that holds images and scratch directories.
    pub disk_size: u64,
    pub cpus: u32,
    /// Bytes.
    pub memory: u64,
    /// Absent from agents that do not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<ProcessesInfo>,
}

/// Handling of tasks without an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessesInfo {
    pub mode: ProcessMode,
    /// `None`: this host cannot confine a process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confined_by: Option<ConfinementMethod>,
    /// Reason why the host cannot confine processes, or the missing part of the isolation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Plain processes that a host accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessMode {
    /// Confined processes only.
    #[default]
    Confined,
    /// Also processes that run as the agent's user.
    Own,
    /// None: every task needs an image.
    Refused,
}

impl ProcessMode {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Confined => "confined",
            Self::Own => "own",
            Self::Refused => "refused",
        }
    }

    pub fn parse(word: &str) -> Option<Self> {
        [Self::Confined, Self::Own, Self::Refused].into_iter().find(|mode| mode.as_str() == word)
    }
}

/// Mechanism that confines a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConfinementMethod {
    /// A separate user for each task, and namespaces. Requires that the agent is root.
    Users,
    /// Namespaces only: the task keeps the agent's user.
    Namespaces,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceInfo {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_vendor: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_driver_version: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct InstanceHealth {
    pub dcgm: Option<Dcgm>,
    /// Problems found by the checks of windlass itself; empty if healthy.
    #[serde(default)]
    pub problems: Vec<String>,
    /// Reason why the host's container engine does not respond; absent while it responds, and where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dcgm {
    /// 0 pass, 10 warn, 20 fail.
    pub overall_health: i64,
    pub incidents: Vec<DcgmIncident>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DcgmIncident {
    pub system: i64,
    pub health: i64,
    pub error_message: String,
    pub error_code: i64,
    pub entity_group_id: i64,
    pub entity_id: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Components {
    pub components: Vec<Component>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Component {
    pub name: String,
    pub version: String,
    /// `not-installed`, `installed`, `installing` or `error`.
    pub status: String,
}

impl std::fmt::Debug for TaskSpec {
    /// Omits the credentials, because the text may be logged.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskSpec")
            .field("id", &self.id)
            .field("name", &self.name)
            .field("image_name", &self.image_name)
            .field("claims", &self.claims)
            .finish_non_exhaustive()
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands it so")]
fn is_zero(number: &i64) -> bool {
    *number == 0
}

/// Reads `null` as an empty list, because Go encodes empty lists as `null`.
fn null_is_empty<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::<Vec<T>>::deserialize(deserializer).map(Option::unwrap_or_default)
}
