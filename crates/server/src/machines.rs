//! Where this server's machines come from: its backends, and what is shared between them and the agents.

use std::sync::Arc;

use windlass_backend::{
    Backend, Backends,
    local::{self, LocalBackend},
    program::AgentProgram,
    remote::{AgentBinaries, RemoteBackend},
};
use windlass_model::id::InstanceId;
use windlass_tunnel::{Backoff, SshPool};

use crate::{StartError, config::Settings};

/// All of them, as the settings want it.
pub struct BackendSet {
    pub backends: Backends,
    /// One connection per SSH host serves its bring-up and the calls to its agent.
    pub hosts: Arc<SshPool<InstanceId>>,
    local: Option<Arc<LocalBackend>>,
}

impl BackendSet {
    /// Starts nothing.
    pub fn new(settings: &Settings) -> Result<Self, StartError> {
        let hosts = SshPool::new(Backoff::STANDARD).with_allowed(settings.allowed_hosts.clone());
        let hosts = Arc::new(hosts);
        let binaries = match AgentProgram::find(settings.agent_binary.as_deref()) {
            Ok(program) => AgentBinaries::beside(program.path()),
            Err(error) => {
                tracing::warn!(%error, "no machine can be given an agent");
                AgentBinaries::default()
            }
        };
        let mut backends: Vec<Arc<dyn Backend>> =
            vec![Arc::new(RemoteBackend::new(Arc::clone(&hosts), binaries))];
        let local = settings.local.then(|| Arc::new(LocalBackend::new(local_settings(settings))));
        backends.extend(local.clone().map(|local| local as Arc<dyn Backend>));
        #[cfg(feature = "testing")]
        backends.extend(mock_cloud(settings)?);
        Ok(Self { backends: Backends::new(backends), hosts, local })
    }

    /// What an earlier start left asleep answers again before anybody asks.
    pub async fn wake(&self) {
        if let Some(local) = &self.local
            && let Err(error) = local.wake().await
        {
            tracing::warn!(%error, "wake the agent of this machine");
        }
    }

    /// The server stops. What has work goes on without it.
    pub async fn rest(&self) {
        if let Some(local) = &self.local
            && let Err(error) = local.rest().await
        {
            tracing::warn!(%error, "end the idle agent of this machine");
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

/// The script of a mock cloud is named by this variable.
#[cfg(feature = "testing")]
const MOCK_CLOUD: &str = "WINDLASS_MOCK_CLOUD";

/// The mock cloud, where a test wants one.
#[cfg(feature = "testing")]
fn mock_cloud(settings: &Settings) -> Result<Option<Arc<dyn Backend>>, StartError> {
    use windlass_backend::mock::{MockCloud, script::MockScript};
    let Some(file) = std::env::var_os(MOCK_CLOUD).map(std::path::PathBuf::from) else { return Ok(None) };
    // Beside the script, so that all replicas that read it see one cloud.
    let mut dir = file.clone().into_os_string();
    dir.push(".d");
    let mock =
        MockCloud::new(MockScript::read(&file)?, std::path::Path::new(&dir), settings.agent_binary.clone());
    Ok(Some(Arc::new(mock)))
}
