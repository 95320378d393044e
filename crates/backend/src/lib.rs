//! Where machines come from: one file per backend, one trait for all of them.
//!
//! A backend makes machines with an agent on them, finds them again, and takes them back. It keeps nothing that
//! matters in its memory: whatever it must know later is in the [`Machine`] it hands out, which the server stores.
//! Every call may be repeated, by any replica, and has the effect of one.

#[cfg(feature = "testing")]
pub mod conformance;
pub mod engine;
pub mod local;
#[cfg(feature = "testing")]
pub mod mock;
pub mod program;
pub mod remote;
pub mod shim_process;
pub mod volumes;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use windlass_api::agent::shim::{ConfinementMethod, HostInfo, ProcessMode, ProcessesInfo};
use windlass_model::{
    id::InstanceId,
    plan::{
        offers::{Gpu, Offer},
        runs_in::ProcessSupport,
    },
    resources::GpuVendor,
};

use crate::{remote::RemoteHost, volumes::VolumeBackend};

pub type BackendFuture<'a, T> = BoxFuture<'a, Result<T, BackendError>>;

#[derive(Clone, Debug, thiserror::Error)]
pub enum BackendError {
    /// Nothing of the kind is to be had now. The next offer may be.
    #[error("no capacity: {said}")]
    NoCapacity { said: String },
    /// No answer, or none that helps. What was asked may or may not have happened: ask again.
    #[error("{what}: {said}")]
    Unavailable { what: &'static str, said: String },
    /// No further try would help: a wrong key, network, name, limit.
    #[error("{what}: {said}")]
    Refused { what: &'static str, said: String },
    /// The host shows another key than the one it is pinned to.
    #[error("host key of {host} changed: expected {expected}, it shows {shown}")]
    HostKeyChanged { host: String, expected: String, shown: String },
}

/// What the agent of a new machine must be told to obey this server and no other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enrolment {
    pub instance: InstanceId,
    /// Of the credential that calls carry; hexadecimal.
    pub credential_sha256: String,
    /// The Ed25519 key that signs task specifications; base64.
    pub server_key: String,
}

/// What is wanted.
#[derive(Clone, Debug)]
pub enum InstanceSource {
    /// A machine of this kind, at this place and price.
    Offer(Box<Offer>),
    /// This very host.
    Host(Box<RemoteHost>),
}

/// One machine to make. The instance's id is the key: a repeat answers with what the first made.
#[derive(Clone, Debug)]
pub struct InstanceRequest {
    pub instance: InstanceId,
    /// For people who look at the backend's own console.
    pub name: String,
    pub want: InstanceSource,
    pub enrolment: Enrolment,
    pub tags: BTreeMap<String, String>,
    /// Given to the agent and to the jobs below their own.
    pub env: BTreeMap<String, String>,
}

/// A machine as its backend knows it; stored by the server, handed back with every later call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendInstance {
    /// The backend's own name for it.
    pub id: String,
    /// How to come to its agent; `None` until that is known.
    pub reach: Option<AgentEndpoint>,
    /// Where people and other nodes find it.
    pub hostname: Option<String>,
    pub internal_ip: Option<String>,
    /// What it has, once somebody looked; `None` = what the offer said.
    pub has: Option<HardwareInfo>,
    pub agent_version: Option<String>,
    /// What the backend itself wants to remember.
    #[serde(default)]
    pub memo: serde_json::Value,
}

/// The way to the agent's socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum AgentEndpoint {
    /// On this machine.
    Socket { path: PathBuf },
    /// On a host to which the instance's own SSH settings lead.
    Ssh { socket: String },
    /// There is none: its jobs are containers of the queue, and a dispatcher has them run.
    Queue,
}

impl BackendInstance {
    /// What people should know of it beyond its numbers: how jobs run there, and why not otherwise.
    pub fn said(&self) -> Option<&str> {
        self.memo.get("said")?.as_str()
    }
}

/// What a host has, as its own agent says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HardwareInfo {
    pub cpus: u32,
    /// `x86` or `arm`.
    pub arch: Option<String>,
    pub memory_mib: u64,
    pub disk_mib: u64,
    /// One entry each.
    pub gpus: Vec<GpuInfo>,
    /// What tasks run in there: `any`, `docker` or `process`; empty where that is not known.
    pub runtime: String,
    /// Why the container engine that it has does not answer now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_away: Option<String>,
    /// What it does with plain processes; `None` where its agent did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<ProcessesInfo>,
    /// Of all interfaces, with prefix length.
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

/// The GPUs of a host, as everybody but its driver calls them. A host is told to have GPUs of one kind.
pub fn gpus_from(info: &HostInfo) -> Vec<Gpu> {
    let vendor = GpuVendor::parse(&info.gpu_vendor);
    let gpu = Gpu::known(vendor, &info.gpu_name, info.gpu_memory, info.gpu_compute_capability);
    vec![gpu; info.gpu_count as usize]
}

/// What a host does with plain processes in this mode. `told`: what it can, as its agent says.
pub fn processes_of(told: Option<&ProcessesInfo>, mode: ProcessMode) -> ProcessSupport {
    let confined = match told {
        None => ProcessSupport::Unknown,
        Some(ProcessesInfo { confined_by: Some(ConfinementMethod::Users), .. }) => ProcessSupport::Users,
        Some(ProcessesInfo { confined_by: Some(ConfinementMethod::Namespaces), .. }) => {
            ProcessSupport::Namespaces
        }
        Some(ProcessesInfo { confined_by: None, problem, .. }) => {
            let why = problem.clone().unwrap_or_else(|| "its agent does not say why".to_owned());
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

/// What the backend says of a machine it made.
#[derive(Clone, Debug, PartialEq)]
pub enum InstanceState {
    /// It exists and is not usable yet.
    Starting(BackendInstance),
    /// Its agent may be asked.
    Running(BackendInstance),
    /// It was there and is over; `said` is for people: taken back, deleted by hand.
    Gone { said: String },
    /// The backend has no such machine. Clouds list what they just made with a delay, so a young one may still come.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteProgress {
    /// Nothing of it is left.
    Gone,
    /// Asked for; look again.
    InProgress,
}

/// One source of machines.
pub trait Backend: Send + Sync + 'static {
    /// The word that configurations use: `local`, `remote`, `mock`, …
    fn name(&self) -> &'static str;

    /// What it would create now, with prices. SSH hosts are given, not offered.
    fn offers(&self) -> BackendFuture<'_, Vec<Offer>>;

    /// Makes the machine, or finds the one made for this instance before.
    fn create<'a>(&'a self, order: &'a InstanceRequest) -> BackendFuture<'a, BackendInstance>;

    /// How it is now. An agent that is down is started again; a host that was given is made a node again if need be.
    fn find<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, InstanceState>;

    /// Takes it back, agent and all. One that was never made, or is gone already, is `Gone`.
    fn delete<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: Option<&'a BackendInstance>,
    ) -> BackendFuture<'a, DeleteProgress>;

    /// Whether the machine's agent is another than it should be. Cheap; [`Self::find`] then brings it up to date.
    fn is_outdated<'a>(&'a self, _machine: &'a BackendInstance) -> BoxFuture<'a, bool> {
        Box::pin(std::future::ready(false))
    }

    /// Where a [`Self::create`] or [`Self::find`] that is under way stands, in words for people. `None`: nothing is
    /// under way, or there is nothing to tell.
    fn progress(&self, _instance: InstanceId) -> Option<String> {
        None
    }

    /// Network volumes, where the backend has them.
    fn volumes(&self) -> Option<&dyn VolumeBackend> {
        None
    }
}

/// The backends of a server, by name.
#[derive(Clone, Default)]
pub struct Backends(Arc<BTreeMap<&'static str, Arc<dyn Backend>>>);

impl Backends {
    pub fn new(backends: impl IntoIterator<Item = Arc<dyn Backend>>) -> Self {
        Self(Arc::new(backends.into_iter().map(|backend| (backend.name(), backend)).collect()))
    }

    /// These and one more.
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
