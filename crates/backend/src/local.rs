//! This machine as a backend: an agent next to the server.
//!
//! There is one offer and one instance. Its agent is a separate process: it and its jobs continue when the server stops
//! or crashes, and the next server finds them by the directory below its data directory. The enrolment there identifies
//! the owner: a second instance is refused while the first exists; one of a server whose database is gone is replaced.

mod volumes;

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    time::Duration,
};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::Instant;
use windlass_api::agent::shim::{HostInfo, ProcessMode};
use windlass_model::{
    backend_kind::BackendType,
    error_chain::format_chain,
    money::Price,
    plan::{
        execution_mode::Runtimes,
        offers::{Availability, HostSpec, Offer},
    },
    resources::CpuArch,
};

use crate::{
    AgentEndpoint, Backend, BackendError, BackendFuture, BackendInstance, DeleteProgress, Enrolment, GpuInfo,
    HardwareInfo, InstanceRequest, InstanceState,
    agent_program::{AgentProgram, ProgramError},
    engine_probe::{EngineProbe, EngineSearch},
    gpus_from, processes_from,
    shim_process::{Owner, ShimHome, StartOptions},
    volumes::VolumeBackend,
};

pub const NAME: &str = BackendType::Local.as_str();
/// File with the socket of the engine that responded last, in the agent's home.
const ENGINE_FILE: &str = "engine";
/// Time for which the hardware information is cached.
const HOST_INFO_TTL: Duration = Duration::from_secs(60);
const MIB: u64 = 1024 * 1024;

/// Runtime of the jobs on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Runtime {
    /// Containers for jobs with an image, plain processes for the others.
    Any,
    /// The same, with containers that the agent starts without an engine.
    AnyOci,
    /// Containers only.
    Docker,
    /// Plain processes only.
    Process,
}

impl Runtime {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::AnyOci => "any-oci",
            Self::Docker => "docker",
            Self::Process => "process",
        }
    }

    pub fn parse(word: &str) -> Option<Self> {
        [Self::Any, Self::AnyOci, Self::Docker, Self::Process].into_iter().find(|one| one.as_str() == word)
    }
}

#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Directory of the agent: `local` in the server's data directory.
    pub home: PathBuf,
    /// Program of the agent, if not next to the server's.
    pub agent: Option<PathBuf>,
    /// `None`: both if an engine responds or once did, or if there is none and the agent can run containers without one;
    /// otherwise plain processes.
    pub runtime: Option<Runtime>,
    /// Socket of the engine; `None`: `DOCKER_HOST`, or the usual sockets.
    pub docker_socket: Option<PathBuf>,
    /// Plain processes that the agent accepts.
    pub processes: ProcessMode,
}

/// Runtime that was selected, and the reason.
#[derive(Clone, Debug)]
struct SelectedRuntime {
    runtime: Runtime,
    docker_socket: Option<PathBuf>,
    /// Reason why the machine's engine does not respond; its jobs with an image wait meanwhile.
    engine_away: Option<String>,
    message: String,
}

impl SelectedRuntime {
    fn new(runtime: Runtime, docker_socket: Option<PathBuf>, why: &str) -> Self {
        let message = format!("this machine, {} ({why})", describe_runtime(runtime));
        Self { runtime, docker_socket, engine_away: None, message }
    }

    fn with_engine(runtime: Runtime, socket: PathBuf) -> Self {
        let why = format!("Docker engine at {}", socket.display());
        Self::new(runtime, Some(socket), &why)
    }

    /// Returns the runtime that the machine has: an engine that is unavailable still counts.
    fn hardware_info(&self) -> Runtime {
        if self.engine_away.is_some() && self.runtime == Runtime::Process {
            Runtime::Any
        } else {
            self.runtime
        }
    }
}

/// Output of `windlass-agent host`.
#[derive(Clone, Debug, Deserialize)]
struct HostReport {
    host: HostInfo,
    /// Absent from agents that do not report it.
    #[serde(default)]
    oci: Option<OciSupport>,
}

/// Support of the agent for containers without an engine.
#[derive(Clone, Debug, Deserialize)]
struct OciSupport {
    available: bool,
}

/// Private state of this backend in a `Machine`.
#[derive(Debug, Serialize, Deserialize)]
struct LocalState {
    /// Home of the agent. Another server replica on this machine has a different directory.
    home: PathBuf,
    /// Machine that the home is on.
    host: String,
    #[serde(rename = "said")]
    message: String,
    #[serde(default)]
    engine_away: Option<String>,
}

pub struct LocalBackend {
    settings: Settings,
    inspected: Mutex<Option<(Instant, HostReport)>>,
}

impl LocalBackend {
    pub fn new(settings: Settings) -> Self {
        Self { settings, inspected: Mutex::new(None) }
    }

    fn home(&self) -> ShimHome {
        ShimHome::new(&self.settings.home)
    }

    fn program(&self) -> Result<AgentProgram, BackendError> {
        let missing = |error: ProgramError| BackendError::Refused {
            what: "start the agent on this machine",
            message: error.to_string(),
        };
        AgentProgram::find(self.settings.agent.as_deref()).map_err(missing)
    }

    /// Starts the agent that an earlier server stopped, so that it responds before the first call.
    pub async fn wake(&self) -> Result<(), BackendError> {
        let home = self.home();
        if home.owner().is_none() {
            return Ok(());
        }
        let _alone = home.alone().await?;
        if home.owner().is_some() {
            self.ensure_agent(&home, &Default::default()).await?;
        }
        Ok(())
    }

    /// Stops the agent when the server stops, unless it has tasks.
    pub async fn rest(&self) -> Result<(), BackendError> {
        let home = self.home();
        if home.pid().is_none() {
            return Ok(());
        }
        let _alone = home.alone().await?;
        if home.is_idle() {
            home.stop().await?;
        }
        Ok(())
    }

    /// Selects the runtime. Containers of existing tasks need their engine; otherwise what the machine supports now. An
    /// engine that existed is never considered absent: while it is unavailable, jobs with an image wait for it.
    async fn select_runtime(&self, home: &ShimHome) -> Result<SelectedRuntime, BackendError> {
        let before = std::fs::read_to_string(home.dir().join("runtime")).ok();
        let before = before.filter(|_| !home.is_idle()).and_then(|word| Runtime::parse(word.trim()));
        if self.settings.runtime == Some(Runtime::Process) && before.is_none_or(|it| it == Runtime::Process) {
            return Ok(SelectedRuntime::new(Runtime::Process, None, "as configured"));
        }
        // An engine that was installed since does not know these containers.
        if before == Some(Runtime::AnyOci)
            || (before.is_none() && self.settings.runtime == Some(Runtime::AnyOci))
        {
            return Ok(SelectedRuntime::new(Runtime::AnyOci, None, "containers without an engine"));
        }
        if (before, self.settings.runtime) == (Some(Runtime::Process), Some(Runtime::Docker)) {
            return Ok(SelectedRuntime::new(Runtime::Process, None, "its jobs were started as processes"));
        }
        let engine = EngineSearch::here(self.settings.docker_socket.clone()).inspect().await;
        let runtime = match (before, self.settings.runtime) {
            // A shim with both runtimes adopts plain processes as well as one without an engine.
            (Some(before @ (Runtime::Docker | Runtime::Any)), _) => Some(before),
            (Some(Runtime::Process | Runtime::AnyOci) | None, requested) => requested,
        };
        match (engine, runtime) {
            (EngineProbe::At(socket), runtime) => {
                Ok(SelectedRuntime::with_engine(runtime.unwrap_or(Runtime::Any), socket))
            }
            // A socket that the settings name is expected to exist: without it, jobs with an image wait, and the
            // instance shows the reason.
            (EngineProbe::None { why }, None)
                if !had_engine(home) && self.settings.docker_socket.is_none() =>
            {
                let found = self.report().await.ok().and_then(|report| report.oci);
                Ok(SelectedRuntime::new(runtime_without_engine(found.as_ref()), None, &why))
            }
            (EngineProbe::None { why }, None) => {
                let message = format!("its container engine is not available: {why}");
                Ok(SelectedRuntime {
                    engine_away: Some(why),
                    ..SelectedRuntime::new(Runtime::Process, None, &message)
                })
            }
            // A running agent waits for the engine; one that does not run cannot start without it.
            (EngineProbe::None { why }, Some(runtime))
                if before.is_some() || (had_engine(home) && home.pid().is_some()) =>
            {
                let socket = self.settings.docker_socket.clone();
                let message = format!("its container engine is not available: {why}");
                Ok(SelectedRuntime {
                    engine_away: Some(why),
                    ..SelectedRuntime::new(runtime, socket, &message)
                })
            }
            (EngineProbe::None { why }, Some(_)) => {
                Err(BackendError::Unavailable { what: "run jobs in containers", message: why })
            }
        }
    }

    /// Records that there is an engine, for times when it does not respond.
    fn remember_engine(&self, home: &ShimHome, chosen: &SelectedRuntime) {
        let path = home.dir().join(ENGINE_FILE);
        let written = match (&chosen.docker_socket, &chosen.engine_away) {
            (Some(socket), None) => std::fs::write(&path, socket.as_os_str().as_encoded_bytes()),
            // The agent's own record is lost when it is started without the engine.
            (Some(_) | None, Some(_)) if !path.exists() && self.settings.docker_socket.is_none() => {
                std::fs::write(&path, "")
            }
            // With the setting `process`, there is no engine to wait for.
            (None, None) if self.settings.runtime == Some(Runtime::Process) && path.exists() => {
                std::fs::remove_file(&path)
            }
            (Some(_) | None, _) => Ok(()),
        };
        if let Err(error) = written {
            tracing::warn!(%error, path = %path.display(), "failed to record the container engine");
        }
    }

    /// Ensures that a shim responds in `home`, and returns the instance in its present state.
    async fn ensure_agent(
        &self,
        home: &ShimHome,
        env: &std::collections::BTreeMap<String, String>,
    ) -> Result<BackendInstance, BackendError> {
        let program = self.program()?;
        let chosen = self.select_runtime(home).await?;
        let with = StartOptions {
            program,
            runtime: chosen.runtime.as_str(),
            docker_socket: chosen.docker_socket.clone(),
            processes: self.settings.processes,
            env: env.clone(),
        };
        let health = home.ensure(&with).await?;
        self.remember_engine(home, &chosen);
        let info = self.inspect().await?;
        let has = has(&info, &chosen);
        let memo = LocalState {
            home: home.dir().to_owned(),
            host: hostname(),
            message: chosen.message,
            engine_away: chosen.engine_away,
        };
        Ok(BackendInstance {
            id: hostname(),
            reach: Some(AgentEndpoint::Socket { path: home.socket() }),
            hostname: Some("localhost".into()),
            internal_ip: Some("127.0.0.1".into()),
            has: Some(has),
            agent_version: Some(health.version),
            memo: json!(memo),
        })
    }

    /// Returns the hardware of this machine, as reported by its agent.
    async fn inspect(&self) -> Result<HostInfo, BackendError> {
        Ok(self.report().await?.host)
    }

    async fn report(&self) -> Result<HostReport, BackendError> {
        if let Some((when, info)) = &*self.inspected.lock()
            && when.elapsed() < HOST_INFO_TTL
        {
            return Ok(info.clone());
        }
        let failed = |message: String| BackendError::Unavailable { what: "inspect this machine", message };
        let disk = self.settings.home.ancestors().find(|dir| dir.is_dir()).unwrap_or(Path::new("/"));
        let program = self.program()?;
        let mode = OsStr::new(self.settings.processes.as_str());
        let args = [OsStr::new("host"), "--data".as_ref(), disk.as_os_str(), "--processes".as_ref(), mode];
        let message = program.output(&args).await.map_err(|error| failed(format_chain(&error)))?;
        let report: HostReport = serde_json::from_str(&message).map_err(|error| failed(error.to_string()))?;
        *self.inspected.lock() = Some((Instant::now(), report.clone()));
        Ok(report)
    }

    async fn create_instance(&self, order: &InstanceRequest) -> Result<BackendInstance, BackendError> {
        let home = self.home();
        let _alone = home.alone().await?;
        let program = self.program()?;
        let wanted = owner_from(&order.enrolment);
        match home.owner() {
            Some(found) if found == wanted => {}
            Some(found) if found.instance_id == wanted.instance_id => home.enrol(&program, &wanted).await?,
            Some(found) if found.server_keys == wanted.server_keys => {
                let message = format!("this machine is already instance {}", found.instance_id);
                return Err(BackendError::NoCapacity { message });
            }
            Some(found) => {
                tracing::warn!(
                    instance = %found.instance_id, home = %home.dir().display(),
                    "this machine was enrolled with a server with another database; terminating its jobs"
                );
                self.end(&home).await?;
                home.enrol(&program, &wanted).await?;
            }
            None => home.enrol(&program, &wanted).await?,
        }
        self.ensure_agent(&home, &order.env).await
    }

    async fn found(
        &self,
        order: &InstanceRequest,
        machine: &BackendInstance,
    ) -> Result<InstanceState, BackendError> {
        let home = self.home_for(order, Some(machine))?;
        let gone = |message: String| Ok(InstanceState::Gone { message });
        let Some(owner) = home.owner() else {
            return gone(format!("its directory {} no longer exists", home.dir().display()));
        };
        if owner.instance_id != order.instance {
            return gone(format!("this machine is now instance {}", owner.instance_id));
        }
        let _alone = home.alone().await?;
        // Restarts the agent only if it is dead, or older than this server's.
        self.ensure_agent(&home, &order.env).await.map(InstanceState::Running)
    }

    /// Returns the home of the instance's agent. An agent on another machine can only be managed by a server there.
    fn home_for(
        &self,
        order: &InstanceRequest,
        machine: Option<&BackendInstance>,
    ) -> Result<ShimHome, BackendError> {
        let memo =
            machine.and_then(|machine| serde_json::from_value::<LocalState>(machine.memo.clone()).ok());
        match memo {
            None => Ok(self.home()),
            Some(memo) if memo.host == hostname() => Ok(ShimHome::new(&memo.home)),
            Some(memo) => Err(BackendError::Unavailable {
                what: "manage the agent of another machine",
                message: format!(
                    "instance {} is on {}, and this server runs on {}",
                    order.instance,
                    memo.host,
                    hostname()
                ),
            }),
        }
    }

    async fn end(&self, home: &ShimHome) -> Result<(), BackendError> {
        if !home.is_idle() {
            let chosen = self.select_runtime(home).await?;
            let with = StartOptions {
                program: self.program()?,
                runtime: chosen.runtime.as_str(),
                docker_socket: chosen.docker_socket,
                processes: self.settings.processes,
                env: Default::default(),
            };
            home.end_tasks(&with).await?;
        }
        home.stop().await?;
        Ok(home.remove()?)
    }

    async fn delete_instance(
        &self,
        order: &InstanceRequest,
        machine: Option<&BackendInstance>,
    ) -> Result<DeleteProgress, BackendError> {
        let home = self.home_for(order, machine)?;
        if home.owner().is_none_or(|owner| owner.instance_id != order.instance) {
            return Ok(DeleteProgress::Gone);
        }
        let _alone = home.alone().await?;
        self.end(&home).await?;
        Ok(DeleteProgress::Gone)
    }
}

/// Returns the runtime of a machine that has no engine and never had one.
fn runtime_without_engine(found: Option<&OciSupport>) -> Runtime {
    if found.is_some_and(|oci| oci.available) { Runtime::AnyOci } else { Runtime::Process }
}

/// Returns whether the machine had an engine before.
fn had_engine(home: &ShimHome) -> bool {
    let noted = std::fs::read_to_string(home.dir().join("runtime")).unwrap_or_default();
    home.dir().join(ENGINE_FILE).exists() || matches!(noted.trim(), "any" | "docker")
}

fn describe_runtime(runtime: Runtime) -> &'static str {
    match runtime {
        Runtime::Any | Runtime::AnyOci => "jobs with an image in containers, others as plain processes",
        Runtime::Docker => "jobs in containers",
        Runtime::Process => "jobs as plain processes",
    }
}

fn owner_from(enrolment: &Enrolment) -> Owner {
    Owner {
        instance_id: enrolment.instance,
        credential_sha256: vec![enrolment.credential_sha256.clone()],
        server_keys: vec![enrolment.server_key.clone()],
    }
}

/// Returns the host name of this machine.
fn hostname() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".to_owned() } else { name.to_owned() }
}

const fn arch() -> Option<CpuArch> {
    if cfg!(target_arch = "x86_64") {
        Some(CpuArch::X86)
    } else if cfg!(target_arch = "aarch64") {
        Some(CpuArch::Arm)
    } else {
        None
    }
}

fn has(info: &HostInfo, chosen: &SelectedRuntime) -> HardwareInfo {
    HardwareInfo {
        cpus: info.cpus,
        arch: arch().map(|arch| {
            let word = match arch {
                CpuArch::X86 => "x86",
                CpuArch::Arm => "arm",
            };
            word.to_owned()
        }),
        memory_mib: info.memory / MIB,
        disk_mib: info.disk_size / MIB,
        gpus: gpus_from(info).iter().map(GpuInfo::from).collect(),
        runtime: chosen.hardware_info().as_str().to_owned(),
        engine_away: chosen.engine_away.clone(),
        processes: info.processes.clone(),
        addresses: info.addresses.clone(),
    }
}

fn build_offer(info: &HostInfo, availability: Availability, runtimes: Option<Runtimes>) -> Offer {
    Offer {
        backend: NAME.into(),
        region: NAME.into(),
        zones: Vec::new(),
        instance_type: NAME.into(),
        price: Price::from_dollars(0.0),
        availability,
        reservation: None,
        host: HostSpec {
            cpus: info.cpus,
            arch: arch(),
            memory_mib: info.memory / MIB,
            disk_mib: info.disk_size / MIB,
            gpus: gpus_from(info),
            spot: false,
            runtimes,
        },
        total_blocks: 1,
    }
}

impl Backend for LocalBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn offers(&self) -> BackendFuture<'_, Vec<Offer>> {
        Box::pin(async {
            let taken = self.home().owner().is_some();
            let availability = if taken { Availability::Busy } else { Availability::Available };
            // A required engine that does not respond is reported when the instance is created.
            let chosen = self.select_runtime(&self.home()).await.ok();
            let info = self.inspect().await?;
            let reported = info.processes.as_ref();
            let processes =
                processes_from(reported, reported.map_or(self.settings.processes, |reported| reported.mode));
            let runtimes = chosen.and_then(|chosen| {
                let runtimes = Runtimes::parse(chosen.hardware_info().as_str(), processes)?;
                Some(match &chosen.engine_away {
                    Some(why) => runtimes.without_engine(why),
                    None => runtimes,
                })
            });
            Ok(vec![build_offer(&info, availability, runtimes)])
        })
    }

    fn create<'a>(&'a self, order: &'a InstanceRequest) -> BackendFuture<'a, BackendInstance> {
        Box::pin(self.create_instance(order))
    }

    fn find<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, InstanceState> {
        Box::pin(self.found(order, machine))
    }

    fn delete<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: Option<&'a BackendInstance>,
    ) -> BackendFuture<'a, DeleteProgress> {
        Box::pin(self.delete_instance(order, machine))
    }

    /// Returns whether its container engine has appeared or disappeared.
    fn is_outdated<'a>(&'a self, machine: &'a BackendInstance) -> BoxFuture<'a, bool> {
        Box::pin(async move {
            let Ok(memo) = serde_json::from_value::<LocalState>(machine.memo.clone()) else { return false };
            if memo.host != hostname() {
                return false;
            }
            let Ok(chosen) = self.select_runtime(&ShimHome::new(&memo.home)).await else { return false };
            let runtime = machine.has.as_ref().map(|has| has.runtime.as_str());
            chosen.engine_away.is_some() != memo.engine_away.is_some()
                || runtime.is_some_and(|runtime| runtime != chosen.hardware_info().as_str())
        })
    }

    fn volumes(&self) -> Option<&dyn VolumeBackend> {
        Some(self)
    }
}

#[cfg(test)]
mod tests;
