//! The server's backends, and the SSH connections that backends and agents share.

use std::sync::Arc;

use windlass_backend::{
    Backend, Backends,
    agent_program::AgentProgram,
    local::{self, LocalBackend},
    remote::{AgentBinaries, RemoteBackend},
};
use windlass_kubernetes::KubernetesBackend;
use windlass_model::id::InstanceId;
use windlass_tunnel::{Backoff, SshPool};

use crate::{StartError, config::Settings, configured_backends};

/// Backends that the settings enable.
pub struct BackendSet {
    pub backends: Backends,
    /// One connection per SSH host, for the installation of its agent and for the calls to it.
    pub hosts: Arc<SshPool<InstanceId>>,
    local: Option<Arc<LocalBackend>>,
}

impl BackendSet {
    /// Builds the backends; starts nothing.
    pub fn new(settings: &Settings) -> Result<Self, StartError> {
        let hosts = SshPool::new(Backoff::STANDARD).with_allowed(settings.allowed_hosts.clone());
        let hosts = Arc::new(hosts);
        let program = AgentProgram::find(settings.agent_binary.as_deref());
        if let Err(error) = &program {
            tracing::warn!(%error, "failed to find the agent binary; cannot install agents");
        }
        let binaries =
            || program.as_ref().map(|program| AgentBinaries::next_to(program.path())).unwrap_or_default();
        let remote = RemoteBackend::new(Arc::clone(&hosts), binaries());
        let remote = Arc::new(remote.with_oci_programs(settings.oci_programs.clone()));
        let mut backends: Vec<Arc<dyn Backend>> = vec![Arc::clone(&remote) as Arc<dyn Backend>];
        for configured in configured_backends::collect(&settings.projects)? {
            backends.push(configured_backends::open(&configured, &remote)?);
        }
        let local = settings.local.then(|| Arc::new(LocalBackend::new(local_settings(settings))));
        backends.extend(local.clone().map(|local| local as Arc<dyn Backend>));
        if let Some(clusters) = &settings.kubernetes {
            backends.push(Arc::new(KubernetesBackend::new(clusters.clone(), binaries())?));
        }
        #[cfg(feature = "testing")]
        backends.extend(mock_cloud(settings)?);
        Ok(Self { backends: Backends::new(backends), hosts, local })
    }

    /// Starts the local agent again if an earlier server stopped it, so that it answers before the first call.
    pub async fn wake(&self) {
        if let Some(local) = &self.local
            && let Err(error) = local.wake().await
        {
            tracing::warn!(%error, "failed to start the local agent");
        }
    }

    /// Stops the local agent if it is idle, because the server stops. An agent with work keeps running.
    pub async fn rest(&self) {
        if let Some(local) = &self.local
            && let Err(error) = local.rest().await
        {
            tracing::warn!(%error, "failed to stop the idle local agent");
        }
    }
}

fn local_settings(settings: &Settings) -> local::Settings {
    local::Settings {
        home: settings.data_dir.join(local::NAME),
        agent: settings.agent_binary.clone(),
        runtime: settings.local_runtime,
        docker_socket: settings.docker_socket.clone(),
        processes: settings.local_processes,
    }
}

/// Environment variable that names the script of a mock cloud.
#[cfg(feature = "testing")]
const MOCK_CLOUD: &str = "WINDLASS_MOCK_CLOUD";

/// The mock cloud, if a test configures one.
#[cfg(feature = "testing")]
fn mock_cloud(settings: &Settings) -> Result<Option<Arc<dyn Backend>>, StartError> {
    use windlass_backend::mock::{MockCloud, script::MockScript};
    let Some(file) = std::env::var_os(MOCK_CLOUD).map(std::path::PathBuf::from) else { return Ok(None) };
    // Next to the script, so that all replicas that read it see one cloud.
    let mut dir = file.clone().into_os_string();
    dir.push(".d");
    let mock =
        MockCloud::new(MockScript::read(&file)?, std::path::Path::new(&dir), settings.agent_binary.clone());
    Ok(Some(Arc::new(mock)))
}
