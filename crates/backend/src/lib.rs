//! Backends, the providers of instances: one file per backend, one trait for all.
//!
//! A backend creates instances with an agent, finds them again and deletes them. It keeps no important state in memory:
//! what it needs later is in the [`Machine`] that it returns, which the server stores. Every call is idempotent and may
//! be repeated by any server replica.

pub mod agent_program;
#[cfg(feature = "testing")]
pub mod conformance;
pub mod engine_probe;
pub mod local;
pub mod lxd;
pub mod machines;
#[cfg(feature = "testing")]
pub mod mock;
pub mod remote;
pub mod shim_process;
pub mod volumes;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use windlass_api::agent::shim::{ConfinementMethod, HostInfo, ProcessMode, ProcessesInfo};
use windlass_model::{
    id::InstanceId,
    plan::{
        execution_mode::ProcessSupport,
        offers::{Gpu, Offer},
    },
    resources::GpuVendor,
};

use windlass_tunnel::LoginKey;

use crate::{remote::RemoteHost, volumes::VolumeBackend};

pub type BackendFuture<'a, T> = BoxFuture<'a, Result<T, BackendError>>;

/// Stream to the socket of an agent.
pub trait AgentStream: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> AgentStream for T {}

#[derive(Clone, Debug, thiserror::Error)]
pub enum BackendError {
    /// No such instance is available now. The next offer may be.
    #[error("no capacity: {message}")]
    NoCapacity { message: String },
    /// No response, or no usable one. The operation may or may not have been performed: retry.
    #[error("failed to {what}: {message}")]
    Unavailable { what: &'static str, message: String },
    /// A retry does not help: wrong key, network, name or limit.
    #[error("failed to {what}: {message}")]
    Refused { what: &'static str, message: String },
    /// The host presents another key than the pinned one.
    #[error("the host key of {host} changed: expected {expected}, found {shown}")]
    HostKeyChanged { host: String, expected: String, shown: String },
}

/// Settings with which the agent of a new instance obeys this server only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enrolment {
    pub instance: InstanceId,
    /// SHA-256 of the credential of calls; hexadecimal.
    pub credential_sha256: String,
    /// Ed25519 key that signs task specifications; base64.
    pub server_key: String,
    /// Public SSH key of gateways, which a host that is reached over SSH accepts for connections to its agent.
    pub gateway_key: Option<String>,
}

/// Requested instance.
#[derive(Clone, Debug)]
pub enum InstanceSource {
    /// Any instance of this offer.
    Offer(Box<Offer>),
    /// This specific host.
    Host(Box<RemoteHost>),
}

/// Request for one instance. The instance's id is the key: a repeated request returns the existing instance.
#[derive(Clone, Debug)]
pub struct InstanceRequest {
    pub instance: InstanceId,
    /// Name for the backend's own console.
    pub name: String,
    pub want: InstanceSource,
    pub enrolment: Enrolment,
    pub tags: BTreeMap<String, String>,
    /// Environment variables for the agent and its jobs; the jobs' own variables take precedence.
    pub env: BTreeMap<String, String>,
    /// Other offers of the same backend that fit as well, for a backend that chooses among them.
    pub alternatives: Vec<Offer>,
    /// Container of the job for which the instance is created. Backends whose instances are containers need it; it is
    /// `None` in calls about an instance that exists.
    pub container: Option<ContainerRequest>,
    /// Key with which the server logs in to a rented machine; each instance has its own.
    pub login: Option<LoginKey>,
}

/// Container of one job, for backends whose instances are containers.
#[derive(Clone, PartialEq)]
pub struct ContainerRequest {
    pub image: String,
    /// User name and password for the registry of the image.
    pub registry_auth: Option<(String, String)>,
    /// Resources that the job requests; `None`: as much as there is.
    pub cpus: Option<u32>,
    pub memory_mib: Option<u64>,
    pub disk_mib: Option<u64>,
    pub shm_mib: Option<u64>,
    pub gpus: u32,
    pub privileged: bool,
}

/// Contains no password.
impl std::fmt::Debug for ContainerRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ContainerRequest").field("image", &self.image).finish_non_exhaustive()
    }
}

/// Instance as its backend knows it; stored by the server and passed to every later call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendInstance {
    /// Id assigned by the backend.
    pub id: String,
    /// Endpoint of its agent; `None` until it is known.
    pub reach: Option<AgentEndpoint>,
    /// Host name for users and other nodes.
    pub hostname: Option<String>,
    pub internal_ip: Option<String>,
    /// Actual hardware, once it is known; `None`: as in the offer.
    pub has: Option<HardwareInfo>,
    pub agent_version: Option<String>,
    /// Private state of the backend.
    #[serde(default)]
    pub memo: serde_json::Value,
}

/// Endpoint of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum AgentEndpoint {
    /// Socket on this machine.
    Socket { path: PathBuf },
    /// Socket on a host that is reached with the instance's SSH settings.
    Ssh { socket: String },
    /// No agent: its jobs are containers of the queue, which a dispatcher runs.
    Queue,
    /// Reached through its backend: [`Backend::connect`].
    Backend { backend: String },
}

impl BackendInstance {
    /// Returns additional information for users: how jobs run on the instance, and why.
    pub fn message(&self) -> Option<&str> {
        self.memo.get("said")?.as_str()
    }
}

/// Hardware of a host, as reported by its agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HardwareInfo {
    pub cpus: u32,
    /// `x86` or `arm`.
    pub arch: Option<String>,
    pub memory_mib: u64,
    pub disk_mib: u64,
    /// One entry per GPU.
    pub gpus: Vec<GpuInfo>,
    /// Runtime of tasks: `any`, `docker` or `process`; empty if unknown.
    pub runtime: String,
    /// Reason why the host's container engine does not respond now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_away: Option<String>,
    /// Handling of plain processes; `None` if its agent did not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<ProcessesInfo>,
    /// Addresses of all interfaces, with prefix length.
    pub addresses: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInfo {
    pub vendor: String,
    pub name: String,
    pub memory_mib: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<(u32, u32)>,
}

/// Returns the GPUs of a host, with normalised names. An agent reports one kind of GPU per host.
pub fn gpus_from(info: &HostInfo) -> Vec<Gpu> {
    let vendor = GpuVendor::parse(&info.gpu_vendor);
    let gpu = Gpu::from_name(vendor, &info.gpu_name, info.gpu_memory, info.gpu_compute_capability);
    vec![gpu; info.gpu_count as usize]
}

/// Returns the handling of plain processes on a host in this mode, from the capabilities that its agent reports.
pub fn processes_from(reported: Option<&ProcessesInfo>, mode: ProcessMode) -> ProcessSupport {
    let confined = match reported {
        None => ProcessSupport::Unknown,
        Some(ProcessesInfo { confined_by: Some(ConfinementMethod::Users), .. }) => ProcessSupport::Users,
        Some(ProcessesInfo { confined_by: Some(ConfinementMethod::Namespaces), .. }) => {
            ProcessSupport::Namespaces
        }
        Some(ProcessesInfo { confined_by: None, problem, .. }) => {
            let why = problem.clone().unwrap_or_else(|| "the agent reported no reason".to_owned());
            ProcessSupport::NotConfined { why }
        }
    };
    match mode {
        ProcessMode::Confined => confined,
        ProcessMode::Own => ProcessSupport::Own { otherwise: Box::new(confined) },
        ProcessMode::Refused => ProcessSupport::Refused,
    }
}

impl From<&Gpu> for GpuInfo {
    fn from(gpu: &Gpu) -> Self {
        Self {
            vendor: gpu.vendor.as_str().to_owned(),
            name: gpu.name.clone(),
            memory_mib: gpu.memory_mib,
            compute_capability: gpu.compute_capability,
        }
    }
}

/// State of an instance, as its backend reports it.
#[derive(Clone, Debug, PartialEq)]
pub enum InstanceState {
    /// It exists and is not usable yet.
    Starting(BackendInstance),
    /// Its agent can be called.
    Running(BackendInstance),
    /// It existed and has ended. `said` is a message for users, such as a preemption or a manual deletion.
    Gone { message: String },
    /// The backend has no such instance. Clouds list new instances with a delay, so a new one may still appear.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteProgress {
    /// Nothing of it is left.
    Gone,
    /// Deletion has started; check again.
    InProgress,
}

/// One thing that instances of a backend need, and whether it is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendFinding {
    pub what: String,
    /// Problem and its cure; `None`: nothing is wrong.
    pub problem: Option<String>,
}

/// Provider of instances.
pub trait Backend: Send + Sync + 'static {
    /// Returns the name that configurations use: `local`, `remote`, `mock`, …
    fn name(&self) -> &'static str;

    /// Returns the instances that it can create now, with prices. SSH hosts are configured, not offered.
    fn offers(&self) -> BackendFuture<'_, Vec<Offer>>;

    /// Creates the instance, or finds the one that was created for this id before.
    fn create<'a>(&'a self, order: &'a InstanceRequest) -> BackendFuture<'a, BackendInstance>;

    /// Returns the present state. Restarts an agent that is down; sets up a configured host again if necessary.
    fn find<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, InstanceState>;

    /// Deletes the instance and its agent. One that never existed, or no longer exists, is `Gone`.
    fn delete<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: Option<&'a BackendInstance>,
    ) -> BackendFuture<'a, DeleteProgress>;

    /// Opens a stream to the socket of the instance's agent, if it is reached through the backend
    /// ([`AgentEndpoint::Backend`]).
    fn connect<'a>(&'a self, machine: &'a BackendInstance) -> BackendFuture<'a, Box<dyn AgentStream>> {
        let message = format!("instance {} is not reached through its backend", machine.id);
        Box::pin(std::future::ready(Err(BackendError::Refused { what: "connect to the agent", message })))
    }

    /// Returns whether the instance's agent is outdated. Cheap; [`Self::find`] then updates it.
    fn is_outdated<'a>(&'a self, _machine: &'a BackendInstance) -> BoxFuture<'a, bool> {
        Box::pin(std::future::ready(false))
    }

    /// Returns the progress of a running [`Self::create`] or [`Self::find`], as text for users. `None`: no call is
    /// running, or there is nothing to report.
    fn progress(&self, _instance: InstanceId) -> Option<String> {
        None
    }

    /// Checks the settings against the provider, for people: what instances need, and whether it is there. Empty if there
    /// is nothing to check.
    fn check(&self) -> BoxFuture<'_, Vec<BackendFinding>> {
        Box::pin(std::future::ready(Vec::new()))
    }

    /// Returns the network volumes, if the backend supports them.
    fn volumes(&self) -> Option<&dyn VolumeBackend> {
        None
    }
}

/// Backends of a server, by name.
#[derive(Clone, Default)]
pub struct Backends(Arc<BTreeMap<&'static str, Arc<dyn Backend>>>);

impl Backends {
    pub fn new(backends: impl IntoIterator<Item = Arc<dyn Backend>>) -> Self {
        Self(Arc::new(backends.into_iter().map(|backend| (backend.name(), backend)).collect()))
    }

    /// Returns these backends and one more.
    #[must_use]
    pub fn and(&self, backend: Arc<dyn Backend>) -> Self {
        Self::new(self.0.values().cloned().chain([backend]))
    }

    pub fn named(&self, name: &str) -> Option<&Arc<dyn Backend>> {
        self.0.get(name)
    }

    pub fn all(&self) -> impl Iterator<Item = &Arc<dyn Backend>> {
        self.0.values()
    }
}

impl std::fmt::Debug for Backends {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}
