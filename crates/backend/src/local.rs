//! This machine: an agent of our own beside the server.
//!
//! There is one offer and one machine. Its agent is a process of its own: it and its jobs go on when the server stops
//! or dies, and the next server finds them by the directory below its data directory. Whose it is, the enrolment there
//! says: a second instance is refused while the first exists; one of a server whose database is gone makes place.

mod volumes;

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    time::Duration,
};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::Instant;
use windlass_api::agent::shim::HostInfo;
use windlass_model::{
    causes::chain,
    money::Price,
    plan::{
        offers::{Availability, Host, Offer},
        runs_in::Runtimes,
    },
    resources::CpuArch,
};

use crate::{
    Answer, Backend, BackendError, Deleted, Enrolment, Found, Has, HasGpu, Machine, Order, Reach,
    engine::{Engine, Places},
    gpus_of,
    program::{Program, ProgramError},
    shim_process::{Home, Owner, StartWith},
    volumes::Volumes,
};

pub const NAME: &str = "local";
/// How long what the machine has is taken for true.
const LOOK_EVERY: Duration = Duration::from_secs(60);
const MIB: u64 = 1024 * 1024;

/// What the jobs of this machine run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Runtime {
    /// Containers for jobs with an image, plain processes for the others.
    Any,
    /// Containers only.
    Docker,
    /// Plain processes only.
    Process,
}

impl Runtime {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Docker => "docker",
            Self::Process => "process",
        }
    }

    pub fn parse(word: &str) -> Option<Self> {
        [Self::Any, Self::Docker, Self::Process].into_iter().find(|one| one.as_str() == word)
    }
}

#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The agent's directory: `local` in the server's data directory.
    pub home: PathBuf,
    /// The agent's program, if not beside ours.
    pub agent: Option<PathBuf>,
    /// `None`: both where an engine answers, else plain processes.
    pub runtime: Option<Runtime>,
    /// The engine's socket; `None`: `DOCKER_HOST`, or the usual places.
    pub docker_socket: Option<PathBuf>,
}

/// How jobs will run, and why so.
#[derive(Clone, Debug)]
struct Chosen {
    runtime: Runtime,
    docker_socket: Option<PathBuf>,
    said: String,
}

/// What the backend wants to find in a `Machine` again.
#[derive(Debug, Serialize, Deserialize)]
struct Memo {
    /// The agent's home. Another replica on this machine has another directory of its own.
    home: PathBuf,
    /// The machine that the home is on.
    host: String,
    said: String,
}

pub struct Local {
    settings: Settings,
    looked: Mutex<Option<(Instant, HostInfo)>>,
}

impl Local {
    pub fn new(settings: Settings) -> Self {
        Self { settings, looked: Mutex::new(None) }
    }

    fn home(&self) -> Home {
        Home::new(&self.settings.home)
    }

    fn program(&self) -> Result<Program, BackendError> {
        let missing = |error: ProgramError| BackendError::Refused {
            what: "start the agent on this machine",
            said: error.to_string(),
        };
        Program::find(self.settings.agent.as_deref()).map_err(missing)
    }

    /// Starts the agent that an earlier server left asleep, so that it answers before anybody asks.
    pub async fn wake(&self) -> Result<(), BackendError> {
        let home = self.home();
        if home.owner().is_none() {
            return Ok(());
        }
        let _alone = home.alone().await?;
        if home.owner().is_some() {
            self.serve(&home, &Default::default()).await?;
        }
        Ok(())
    }

    /// The server stops: an agent without tasks has nothing to stay for. One with tasks stays.
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

    /// Tasks that exist keep what they were started with; otherwise what suits the machine now. A machine that ran
    /// containers does not become one without them by itself: an engine that is down is said, not passed over.
    async fn choose(&self, home: &Home) -> Result<Chosen, BackendError> {
        let noted = std::fs::read_to_string(home.dir().join("runtime")).ok();
        let noted = noted.and_then(|word| Runtime::parse(word.trim()));
        let before = noted.filter(|_| !home.is_idle());
        let places = Places::here(self.settings.docker_socket.clone());
        let (runtime, why) = match (before, self.settings.runtime) {
            (Some(before), _) => (before, "as its jobs were started".to_owned()),
            (None, Some(Runtime::Process)) => (Runtime::Process, "as the settings say".to_owned()),
            (None, Some(runtime @ (Runtime::Docker | Runtime::Any))) => match places.look().await {
                Engine::At(socket) => return Ok(with_engine(runtime, socket)),
                Engine::None { why } => {
                    return Err(BackendError::Unavailable { what: "run jobs in containers", said: why });
                }
            },
            (None, None) => match places.look().await {
                Engine::At(socket) => return Ok(with_engine(Runtime::Any, socket)),
                Engine::None { why } if matches!(noted, Some(Runtime::Any | Runtime::Docker)) => {
                    let said = format!(
                        "{why} (it did before: start the engine, or say `--local-runtime process` to do without)"
                    );
                    return Err(BackendError::Unavailable { what: "run jobs in containers", said });
                }
                Engine::None { why } => (Runtime::Process, why),
            },
        };
        let docker_socket = self.settings.docker_socket.clone().filter(|_| runtime != Runtime::Process);
        Ok(Chosen { runtime, docker_socket, said: format!("this machine, {} ({why})", in_words(runtime)) })
    }

    /// A shim that answers in `home`, and the machine as it is then.
    async fn serve(
        &self,
        home: &Home,
        env: &std::collections::BTreeMap<String, String>,
    ) -> Result<Machine, BackendError> {
        let program = self.program()?;
        let chosen = self.choose(home).await?;
        let with = StartWith {
            program,
            runtime: chosen.runtime.as_str(),
            docker_socket: chosen.docker_socket.clone(),
            env: env.clone(),
        };
        let health = home.ensure(&with).await?;
        let info = self.look().await?;
        let memo = Memo { home: home.dir().to_owned(), host: hostname(), said: chosen.said };
        Ok(Machine {
            id: hostname(),
            reach: Some(Reach::Socket { path: home.socket() }),
            hostname: Some("localhost".into()),
            internal_ip: Some("127.0.0.1".into()),
            has: Some(has(&info, chosen.runtime)),
            agent_version: Some(health.version),
            memo: json!(memo),
        })
    }

    /// What the machine has, by its agent's own words.
    async fn look(&self) -> Result<HostInfo, BackendError> {
        if let Some((when, info)) = &*self.looked.lock()
            && when.elapsed() < LOOK_EVERY
        {
            return Ok(info.clone());
        }
        let failed = |said: String| BackendError::Unavailable { what: "look at this machine", said };
        let disk = self.settings.home.ancestors().find(|dir| dir.is_dir()).unwrap_or(Path::new("/"));
        let program = self.program()?;
        let args = [OsStr::new("host"), "--data".as_ref(), disk.as_os_str()];
        let said = program.output(&args).await.map_err(|error| failed(chain(&error)))?;
        #[derive(Deserialize)]
        struct Said {
            host: HostInfo,
        }
        let said: Said = serde_json::from_str(&said).map_err(|error| failed(error.to_string()))?;
        *self.looked.lock() = Some((Instant::now(), said.host.clone()));
        Ok(said.host)
    }

    async fn made(&self, order: &Order) -> Result<Machine, BackendError> {
        let home = self.home();
        let _alone = home.alone().await?;
        let program = self.program()?;
        let wanted = owner(&order.enrolment);
        match home.owner() {
            Some(found) if found == wanted => {}
            Some(found) if found.instance_id == wanted.instance_id => home.enrol(&program, &wanted).await?,
            Some(found) if found.server_keys == wanted.server_keys => {
                let said = format!("this machine already is instance {}", found.instance_id);
                return Err(BackendError::NoCapacity { said });
            }
            Some(found) => {
                tracing::warn!(
                    instance = %found.instance_id, home = %home.dir().display(),
                    "this machine belonged to a server with another database; its jobs are ended"
                );
                self.end(&home).await?;
                home.enrol(&program, &wanted).await?;
            }
            None => home.enrol(&program, &wanted).await?,
        }
        self.serve(&home, &order.env).await
    }

    async fn found(&self, order: &Order, machine: &Machine) -> Result<Found, BackendError> {
        let home = self.home_of(order, Some(machine))?;
        let gone = |said: String| Ok(Found::Gone { said });
        let Some(owner) = home.owner() else {
            return gone(format!("its directory {} is gone", home.dir().display()));
        };
        if owner.instance_id != order.instance {
            return gone(format!("this machine is instance {} now", owner.instance_id));
        }
        let _alone = home.alone().await?;
        // Only one that is dead, or older than ours, is started anew; the others are left as they are.
        self.serve(&home, &order.env).await.map(Found::Running)
    }

    /// Where the machine's agent lives. What is on another computer, only a server there can look after.
    fn home_of(&self, order: &Order, machine: Option<&Machine>) -> Result<Home, BackendError> {
        let memo = machine.and_then(|machine| serde_json::from_value::<Memo>(machine.memo.clone()).ok());
        match memo {
            None => Ok(self.home()),
            Some(memo) if memo.host == hostname() => Ok(Home::new(&memo.home)),
            Some(memo) => Err(BackendError::Unavailable {
                what: "look after the agent of another machine",
                said: format!(
                    "instance {} is {}, and this server runs on {}",
                    order.instance,
                    memo.host,
                    hostname()
                ),
            }),
        }
    }

    async fn end(&self, home: &Home) -> Result<(), BackendError> {
        if !home.is_idle() {
            let chosen = self.choose(home).await?;
            let with = StartWith {
                program: self.program()?,
                runtime: chosen.runtime.as_str(),
                docker_socket: chosen.docker_socket,
                env: Default::default(),
            };
            home.end_tasks(&with).await?;
        }
        home.stop().await?;
        Ok(home.remove()?)
    }

    async fn taken_back(&self, order: &Order, machine: Option<&Machine>) -> Result<Deleted, BackendError> {
        let home = self.home_of(order, machine)?;
        if home.owner().is_none_or(|owner| owner.instance_id != order.instance) {
            return Ok(Deleted::Gone);
        }
        let _alone = home.alone().await?;
        self.end(&home).await?;
        Ok(Deleted::Gone)
    }
}

fn with_engine(runtime: Runtime, socket: PathBuf) -> Chosen {
    let said = format!("this machine, {} (Docker engine at {})", in_words(runtime), socket.display());
    Chosen { runtime, docker_socket: Some(socket), said }
}

fn in_words(runtime: Runtime) -> &'static str {
    match runtime {
        Runtime::Any => "jobs with an image in containers, others as plain processes",
        Runtime::Docker => "jobs in containers",
        Runtime::Process => "jobs as plain processes",
    }
}

fn owner(enrolment: &Enrolment) -> Owner {
    Owner {
        instance_id: enrolment.instance,
        credential_sha256: vec![enrolment.credential_sha256.clone()],
        server_keys: vec![enrolment.server_key.clone()],
    }
}

/// As people know the machine.
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

fn has(info: &HostInfo, runtime: Runtime) -> Has {
    Has {
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
        gpus: gpus_of(info).iter().map(HasGpu::from).collect(),
        runtime: runtime.as_str().to_owned(),
        addresses: info.addresses.clone(),
    }
}

fn offer(info: &HostInfo, availability: Availability, runtimes: Option<Runtimes>) -> Offer {
    Offer {
        backend: NAME.into(),
        region: NAME.into(),
        zones: Vec::new(),
        instance_type: NAME.into(),
        price: Price::dollars(0.0),
        availability,
        reservation: None,
        host: Host {
            cpus: info.cpus,
            arch: arch(),
            memory_mib: info.memory / MIB,
            disk_mib: info.disk_size / MIB,
            gpus: gpus_of(info),
            spot: false,
            runtimes,
        },
        total_blocks: 1,
    }
}

impl Backend for Local {
    fn name(&self) -> &'static str {
        NAME
    }

    fn offers(&self) -> Answer<'_, Vec<Offer>> {
        Box::pin(async {
            let taken = self.home().owner().is_some();
            let availability = if taken { Availability::Busy } else { Availability::Available };
            // An engine that is asked for and does not answer is said when the machine is made.
            let runtimes = self.choose(&self.home()).await.ok();
            let runtimes = runtimes.and_then(|chosen| Runtimes::parse(chosen.runtime.as_str()));
            Ok(vec![offer(&self.look().await?, availability, runtimes)])
        })
    }

    fn create<'a>(&'a self, order: &'a Order) -> Answer<'a, Machine> {
        Box::pin(self.made(order))
    }

    fn find<'a>(&'a self, order: &'a Order, machine: &'a Machine) -> Answer<'a, Found> {
        Box::pin(self.found(order, machine))
    }

    fn delete<'a>(&'a self, order: &'a Order, machine: Option<&'a Machine>) -> Answer<'a, Deleted> {
        Box::pin(self.taken_back(order, machine))
    }

    fn volumes(&self) -> Option<&dyn Volumes> {
        Some(self)
    }
}
