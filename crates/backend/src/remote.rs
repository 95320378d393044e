//! SSH hosts: existing machines that are added to a fleet.
//!
//! Everything on a host is in one directory ([`ROOT`]), apart from one systemd unit or cron line that starts the agent
//! at boot. Every operation is idempotent: a second setup finds everything present and changes nothing, and an
//! interrupted one resumes.

mod address;
mod agent_binaries;
mod error_hints;
mod host_setup;
mod oci_programs;
mod shell_scripts;

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use windlass_model::{backend_kind::BackendType, id::InstanceId, plan::offers::Offer};
use windlass_tunnel::{SshDestination, SshPool};

use self::host_setup::{HostSetup, is_newer, unavailable};
pub use self::{
    agent_binaries::{AgentBinaries, AgentBinary, BinaryError},
    oci_programs::{OciProgram, OciProgramError, OciPrograms},
    shell_scripts::{AGENT, CRON, ROOT, SOCKET, UNIT},
};
use crate::{
    Backend, BackendError, BackendFuture, BackendInstance, DeleteProgress, InstanceRequest, InstanceSource,
    InstanceState,
};

/// Name that configurations use.
pub const NAME: &str = BackendType::Remote.as_str();
/// Maximum number of concurrent uploads of the agent's binary.
const UPLOADS_MAX: usize = 8;
/// Version of both server and agent, which are built together.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Host of an SSH fleet, with everything needed to log in and to set it up.
#[derive(Clone, Debug)]
pub struct RemoteHost {
    /// Includes the pinned host keys, once they are known, also those of jump hosts.
    pub target: SshDestination,
    /// Address that other nodes use; searched in `network` if not given.
    pub internal_ip: Option<IpAddr>,
    /// Private network in CIDR notation that contains the host's internal address.
    pub network: Option<String>,
}

/// State that [`Remote`] stores in [`Machine::memo`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteState {
    /// SHA-256 of the agent's binary that was uploaded.
    #[serde(default)]
    pub agent_sha256: String,
    /// Keys that the host and its jump hosts have presented, by [`SshDestination::known_hosts_name`]: to be pinned from
    /// now on.
    #[serde(default)]
    pub host_keys: BTreeMap<String, String>,
    /// Mechanism that starts the agent after a reboot, as text for users.
    #[serde(default)]
    pub keeper: String,
}

impl RemoteState {
    /// Returns the stored state of an instance; empty for one of another backend.
    pub fn of(machine: &BackendInstance) -> Self {
        serde_json::from_value(machine.memo.clone()).unwrap_or_default()
    }
}

pub struct RemoteBackend {
    hosts: Arc<SshPool<InstanceId>>,
    binaries: Arc<AgentBinaries>,
    /// For hosts without an engine.
    oci_programs: OciPrograms,
    uploads: Semaphore,
    progress: Mutex<HashMap<InstanceId, String>>,
}

impl RemoteBackend {
    /// `hosts` is the pool that calls to agents use as well: one connection per host serves both.
    pub fn new(hosts: Arc<SshPool<InstanceId>>, binaries: AgentBinaries) -> Self {
        let (binaries, uploads) = (Arc::new(binaries), Semaphore::new(UPLOADS_MAX));
        Self { hosts, binaries, oci_programs: OciPrograms::default(), uploads, progress: Mutex::default() }
    }

    /// Brings these programs along to hosts, which then need not have `crun` or `runc`.
    pub fn with_oci_programs(self, oci_programs: OciPrograms) -> Self {
        Self { oci_programs, ..self }
    }

    /// Logs in to a host. After a failure the next attempt is made at once, because a new machine may accept it.
    pub(crate) async fn log_in(&self, order: &InstanceRequest) -> Result<(), BackendError> {
        match HostSetup::begin(self, order, remote_host(order)?).await {
            Ok(_) => Ok(()),
            Err(error) => {
                self.forget(order.instance);
                Err(error)
            }
        }
    }

    /// Closes the connections to a host.
    pub(crate) fn forget(&self, instance: InstanceId) {
        self.hosts.forget(&instance);
    }

    fn report_progress(&self, order: &InstanceRequest, step: impl FnOnce() -> String) {
        if let Some(message) = self.progress.lock().get_mut(&order.instance) {
            *message = step();
        }
    }

    /// Tracks the progress of a call; removed when the call ends or is dropped.
    fn track_progress(&self, order: &InstanceRequest) -> ProgressGuard<'_> {
        self.progress.lock().insert(order.instance, String::new());
        ProgressGuard { remote: self, instance: order.instance }
    }

    /// Returns the SHA-256 of the server's binary for an architecture.
    async fn sum(&self, arch: &'static str) -> Result<String, BackendError> {
        self.binary(arch, |binaries, arch| binaries.sum(arch)).await
    }

    async fn load(&self, arch: &'static str) -> Result<Arc<AgentBinary>, BackendError> {
        self.binary(arch, |binaries, arch| binaries.load(arch)).await
    }

    async fn binary<T: Send + 'static>(
        &self,
        arch: &'static str,
        read: impl FnOnce(&AgentBinaries, &str) -> Result<Option<T>, BinaryError> + Send + 'static,
    ) -> Result<T, BackendError> {
        let binaries = Arc::clone(&self.binaries);
        let read = tokio::task::spawn_blocking(move || read(&binaries, arch)).await;
        let what = "read the agent binary";
        match read {
            Ok(Ok(Some(found))) => Ok(found),
            Ok(Ok(None)) => Err(unavailable(what, format!("there is no binary for {arch}"))),
            Ok(Err(error)) => {
                let cause =
                    std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
                Err(unavailable(what, format!("{error}{cause}")))
            }
            Err(error) => Err(unavailable(what, error.to_string())),
        }
    }

    /// Returns whether the host's agent is outdated.
    async fn has_outdated_agent(
        &self,
        machine: &BackendInstance,
        version: &str,
    ) -> Result<bool, BackendError> {
        let arch = machine.has.as_ref().and_then(|has| shell_scripts::binary_arch(has.arch.as_deref()?));
        let Some(arch) = arch else { return Ok(false) };
        Ok(self.sum(arch).await? != RemoteState::of(machine).agent_sha256 && !is_newer(version, VERSION))
    }

    async fn found(
        &self,
        order: &InstanceRequest,
        machine: &BackendInstance,
    ) -> Result<InstanceState, BackendError> {
        let setup = HostSetup::begin(self, order, remote_host(order)?).await?;
        match setup.health().await {
            Ok(health) if !self.has_outdated_agent(machine, &health.version).await? => {
                let agent_version = Some(health.version);
                Ok(InstanceState::Running(BackendInstance { agent_version, ..machine.clone() }))
            }
            Err(error @ BackendError::Refused { .. }) => Err(error),
            // Down after a crash or a reboot, or an outdated agent.
            Ok(_) | Err(_) => setup.bring_up().await.map(InstanceState::Running),
        }
    }
}

struct ProgressGuard<'a> {
    remote: &'a RemoteBackend,
    instance: InstanceId,
}

impl Drop for ProgressGuard<'_> {
    fn drop(&mut self) {
        self.remote.progress.lock().remove(&self.instance);
    }
}

fn remote_host(order: &InstanceRequest) -> Result<&RemoteHost, BackendError> {
    match &order.want {
        InstanceSource::Host(site) => Ok(site),
        InstanceSource::Offer(_) => {
            let message = "SSH hosts must be listed in the `ssh_config` of a fleet".to_owned();
            Err(BackendError::Refused { what: "create a host", message })
        }
    }
}

impl std::fmt::Debug for RemoteBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let binaries = &self.binaries;
        f.debug_struct("Remote")
            .field("hosts", &self.hosts)
            .field("binaries", binaries)
            .finish_non_exhaustive()
    }
}

impl Backend for RemoteBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    /// Empty: hosts are configured, not offered.
    fn offers(&self) -> BackendFuture<'_, Vec<Offer>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn create<'a>(&'a self, order: &'a InstanceRequest) -> BackendFuture<'a, BackendInstance> {
        Box::pin(async move {
            let _in_progress = self.track_progress(order);
            HostSetup::begin(self, order, remote_host(order)?).await?.bring_up().await
        })
    }

    fn find<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, InstanceState> {
        Box::pin(async move {
            let _in_progress = self.track_progress(order);
            self.found(order, machine).await
        })
    }

    fn delete<'a>(
        &'a self,
        order: &'a InstanceRequest,
        _machine: Option<&'a BackendInstance>,
    ) -> BackendFuture<'a, DeleteProgress> {
        Box::pin(async move {
            let _in_progress = self.track_progress(order);
            let setup = HostSetup::begin(self, order, remote_host(order)?).await?;
            setup.uninstall().await?;
            self.hosts.forget(&order.instance);
            Ok(DeleteProgress::Gone)
        })
    }

    fn is_outdated<'a>(&'a self, machine: &'a BackendInstance) -> BoxFuture<'a, bool> {
        Box::pin(async move {
            let version = machine.agent_version.as_deref().unwrap_or_default();
            // A server that cannot read its own binary upgrades no agents; the creation of a host reports the error.
            self.has_outdated_agent(machine, version).await.unwrap_or(false)
        })
    }

    fn progress(&self, instance: InstanceId) -> Option<String> {
        self.progress.lock().get(&instance).filter(|message| !message.is_empty()).cloned()
    }
}
