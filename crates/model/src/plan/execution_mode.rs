//! Execution mode of a job: a container of an image, or a plain process on the host.
//!
//! An image is a promise of isolation: a job that names one never runs outside of it. `image: none` explicitly requests
//! a plain process. A job without an image is a plain process if the host allows it, and otherwise runs in the default
//! image that the server, the project or the profile names.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};

use crate::{config::job_spec::JobSpec, explain::Shortfall};

/// Value of `image` for a plain process.
pub const PLAIN_PROCESS_IMAGE: &str = "none";
/// Value of `image` in a request that only lists offers: it is never run.
pub const OFFERS_ONLY_IMAGE: &str = "scratch";

/// Execution modes that a host supports.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Runtimes {
    pub containers: ContainerSupport,
    pub processes: ProcessSupport,
}

/// Container support of a host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContainerSupport {
    Run,
    None,
    /// It has an engine, which does not respond now, and why. Jobs with an image wait for it.
    Away {
        why: String,
    },
    /// The instance is a pod with the image of its job.
    Pod {
        /// True if the owner of the server allows privileged ones.
        privileged: bool,
    },
    /// The instance would be a pod, but its node takes none now, and why.
    ClosedNode {
        why: String,
    },
}

/// Support for plain processes on a host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessSupport {
    /// Each has a separate user, isolated from other tasks, the agent and the server.
    Users,
    /// Each has the agent's user, isolated from other tasks, the agent and the server.
    Namespaces,
    /// They run as the server's user with all its rights, as long as the server has a single user.
    Own { otherwise: Box<ProcessSupport> },
    /// None: the host only runs containers.
    None,
    /// None: the host's owner refuses them.
    Refused,
    /// None: they cannot be confined there, and why.
    NotConfined { why: String },
    /// None yet: its agent has not reported its support.
    Unknown,
}

impl ProcessSupport {
    /// Returns the support without the server's user: on hosts other than the server's machine, and as soon as the
    /// server has a second user.
    #[must_use]
    pub fn without_own_user(self) -> Self {
        match self {
            Self::Own { otherwise } => otherwise.without_own_user(),
            Self::Users
            | Self::Namespaces
            | Self::None
            | Self::Refused
            | Self::NotConfined { .. }
            | Self::Unknown => self,
        }
    }
}

impl Runtimes {
    /// Builds the runtimes from the name of the agent's runtime and its support for plain processes. `None` if the name
    /// is not one of real hosts.
    pub fn parse(name: &str, processes: ProcessSupport) -> Option<Self> {
        match name {
            "any" | "any-oci" => Some(Self { containers: ContainerSupport::Run, processes }),
            "docker" | "oci" => {
                Some(Self { containers: ContainerSupport::Run, processes: ProcessSupport::None })
            }
            "process" => Some(Self { containers: ContainerSupport::None, processes }),
            "pod" => Some(Self::pod(true)),
            _ => None,
        }
    }

    /// Returns the runtimes of an instance that is a pod.
    pub const fn pod(privileged: bool) -> Self {
        Self { containers: ContainerSupport::Pod { privileged }, processes: ProcessSupport::None }
    }

    /// Returns the runtimes of a node that takes no pods now.
    pub fn closed_node(why: &str) -> Self {
        let containers = ContainerSupport::ClosedNode { why: why.to_owned() };
        Self { containers, processes: ProcessSupport::None }
    }

    pub(super) fn allow_privileged_pods(&self) -> bool {
        matches!(self.containers, ContainerSupport::Pod { privileged: true })
    }

    #[must_use]
    pub fn without_own_user(self) -> Self {
        Self { processes: self.processes.without_own_user(), ..self }
    }

    /// Returns the runtimes of the host while its engine does not respond.
    #[must_use]
    pub fn without_engine(self, why: &str) -> Self {
        match self.containers {
            ContainerSupport::Run | ContainerSupport::Away { .. } => {
                Self { containers: ContainerSupport::Away { why: why.to_owned() }, ..self }
            }
            ContainerSupport::None | ContainerSupport::Pod { .. } | ContainerSupport::ClosedNode { .. } => {
                self
            }
        }
    }

    /// Returns the execution mode if a container of the image can be started there.
    fn run_container<'a>(&self, image: &'a str) -> Result<ExecutionMode<'a>, Shortfall> {
        match &self.containers {
            ContainerSupport::Run => Ok(ExecutionMode::Container { image }),
            ContainerSupport::None => Err(Shortfall::NoContainers { image: image.to_owned() }),
            ContainerSupport::Away { why } => {
                Err(Shortfall::EngineUnavailable { image: image.to_owned(), why: why.clone() })
            }
            ContainerSupport::Pod { .. } => Ok(ExecutionMode::Pod { image }),
            ContainerSupport::ClosedNode { why } => Err(Shortfall::NodeClosed { why: why.clone() }),
        }
    }
}

/// Execution mode that a job requests.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ImageChoice {
    Image(String),
    /// `image: none`.
    PlainProcess,
    /// It names no image. `image` is used if plain processes are not allowed.
    Default {
        image: Option<String>,
    },
}

impl ImageChoice {
    /// Returns the choice of a specification; `None` if it only lists offers.
    pub fn from_spec(spec: &JobSpec) -> Option<Self> {
        match spec.image_name.as_str() {
            OFFERS_ONLY_IMAGE => None,
            PLAIN_PROCESS_IMAGE => Some(Self::PlainProcess),
            "" => Some(Self::Default { image: spec.default_image.clone() }),
            image => Some(Self::Image(image.to_owned())),
        }
    }

    /// Returns the execution mode of the job on a host with these runtimes, or why it cannot run there. A host with
    /// unknown runtimes is assumed to support the request; its agent rejects what it cannot run.
    pub fn resolve_on(&self, runtimes: Option<&Runtimes>) -> Result<ExecutionMode<'_>, Shortfall> {
        let Some(runtimes) = runtimes else {
            return Ok(match self {
                Self::Image(image) => ExecutionMode::Container { image },
                Self::PlainProcess | Self::Default { .. } => ExecutionMode::Process(ProcessRights::Unknown),
            });
        };
        let default = match self {
            Self::Image(image) => return runtimes.run_container(image),
            Self::PlainProcess => None,
            Self::Default { image } => image.as_deref(),
        };
        let short = match &runtimes.processes {
            ProcessSupport::Users => return Ok(ExecutionMode::Process(ProcessRights::OwnUser)),
            ProcessSupport::Namespaces => return Ok(ExecutionMode::Process(ProcessRights::AgentUser)),
            ProcessSupport::Own { .. } => return Ok(ExecutionMode::Process(ProcessRights::Server)),
            ProcessSupport::None if matches!(self, Self::PlainProcess) => Shortfall::NoProcesses,
            ProcessSupport::None => Shortfall::NoDefaultImage,
            ProcessSupport::Refused => Shortfall::ProcessesRefused,
            ProcessSupport::NotConfined { why } => Shortfall::NotConfined { why: why.clone() },
            ProcessSupport::Unknown => Shortfall::ProcessesUnknown,
        };
        match default {
            Some(image) if runtimes.containers != ContainerSupport::None => runtimes.run_container(image),
            Some(_) | None => Err(short),
        }
    }
}

/// Execution mode of a job on one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutionMode<'a> {
    Container {
        image: &'a str,
    },
    /// A process in a pod with this image, which is its instance.
    Pod {
        image: &'a str,
    },
    Process(ProcessRights),
}

/// Rights of a plain process on its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessRights {
    /// Determined by the host; no agent has reported it yet.
    Unknown,
    /// Confined, with a separate user.
    OwnUser,
    /// Confined by namespaces, with the agent's user.
    AgentUser,
    /// Those of the server.
    Server,
}

impl<'a> ExecutionMode<'a> {
    /// Returns the image that is sent to the agent.
    pub fn image_name(self) -> &'a str {
        match self {
            Self::Container { image } => image,
            Self::Pod { .. } | Self::Process(_) => PLAIN_PROCESS_IMAGE,
        }
    }
}

/// Prints `a container of image debian:12`, `a plain process, confined (…)`.
impl Display for ExecutionMode<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Container { image } => write!(f, "a container of image {image}"),
            Self::Pod { image } => write!(f, "a pod of image {image}"),
            Self::Process(ProcessRights::Unknown) => f.write_str("a plain process"),
            Self::Process(rights) => write!(f, "a plain process, {rights}"),
        }
    }
}

impl Display for ProcessRights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "isolated as the instance defines",
            Self::OwnUser => "confined (own user)",
            Self::AgentUser => "confined (own namespaces)",
            Self::Server => "not confined: it has all rights of the server (`--local-processes own`)",
        })
    }
}

/// Prints the support for plain processes, for lists: `confined (…)`, `refused`.
impl Display for ProcessSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Users => ProcessRights::OwnUser.fmt(f),
            Self::Namespaces => ProcessRights::AgentUser.fmt(f),
            Self::Own { otherwise } => {
                write!(f, "not confined while the server has one user, otherwise {otherwise}")
            }
            Self::None => f.write_str("none, containers only"),
            Self::Refused => f.write_str("refused"),
            Self::NotConfined { why } => write!(f, "refused: they cannot be confined ({why})"),
            Self::Unknown => f.write_str("not known yet"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: Runtimes = Runtimes { containers: ContainerSupport::Run, processes: ProcessSupport::Users };
    const CONTAINERS: Runtimes =
        Runtimes { containers: ContainerSupport::Run, processes: ProcessSupport::None };
    const PROCESSES: Runtimes =
        Runtimes { containers: ContainerSupport::None, processes: ProcessSupport::Users };

    #[test]
    fn a_job_with_an_image_runs_only_in_a_container() {
        let image = ImageChoice::Image("debian:12".into());
        for runtimes in [None, Some(&BOTH), Some(&CONTAINERS)] {
            assert_eq!(image.resolve_on(runtimes), Ok(ExecutionMode::Container { image: "debian:12" }));
        }
        assert_eq!(
            image.resolve_on(Some(&PROCESSES)),
            Err(Shortfall::NoContainers { image: "debian:12".into() })
        );
    }

    #[test]
    fn a_job_with_an_image_waits_for_an_unavailable_container_engine() {
        let away = BOTH.without_engine("no answer");
        let short = ImageChoice::Image("debian:12".into()).resolve_on(Some(&away)).unwrap_err();
        assert_eq!(
            short,
            Shortfall::EngineUnavailable { image: "debian:12".into(), why: "no answer".into() }
        );
        assert!(!short.is_permanent());
        assert_eq!(
            ImageChoice::PlainProcess.resolve_on(Some(&away)),
            Ok(ExecutionMode::Process(ProcessRights::OwnUser))
        );
        let default = ImageChoice::Default { image: Some("base:1".into()) };
        let only = CONTAINERS.without_engine("no answer");
        assert_eq!(default.resolve_on(Some(&only)).unwrap_err().kind(), "engine_away");
        assert_eq!(PROCESSES.without_engine("no answer"), PROCESSES);
        // Every other job waits for the first report of the agent.
        let untold = Runtimes { containers: ContainerSupport::None, processes: ProcessSupport::Unknown };
        assert!(ImageChoice::PlainProcess.resolve_on(Some(&untold)).unwrap_err().is_temporary());
    }

    #[test]
    fn a_job_without_an_image_runs_as_a_process_or_else_in_the_default_image() {
        let with = ImageChoice::Default { image: Some("base:1".into()) };
        let without = ImageChoice::Default { image: None };
        for choice in [&with, &without, &ImageChoice::PlainProcess] {
            assert_eq!(choice.resolve_on(None), Ok(ExecutionMode::Process(ProcessRights::Unknown)));
            for runtimes in [&BOTH, &PROCESSES] {
                assert_eq!(
                    choice.resolve_on(Some(runtimes)),
                    Ok(ExecutionMode::Process(ProcessRights::OwnUser))
                );
            }
        }
        assert_eq!(with.resolve_on(Some(&CONTAINERS)), Ok(ExecutionMode::Container { image: "base:1" }));
        assert_eq!(without.resolve_on(Some(&CONTAINERS)), Err(Shortfall::NoDefaultImage));
        assert_eq!(ImageChoice::PlainProcess.resolve_on(Some(&CONTAINERS)), Err(Shortfall::NoProcesses));
    }

    #[test]
    fn a_host_that_cannot_confine_or_refuses_processes_runs_no_plain_process() {
        let default = ImageChoice::Default { image: Some("base:1".into()) };
        let why = "the kernel allows no user namespaces".to_owned();
        let cannot = ProcessSupport::NotConfined { why: why.clone() };
        for (processes, short) in
            [(cannot, Shortfall::NotConfined { why }), (ProcessSupport::Refused, Shortfall::ProcessesRefused)]
        {
            let only = Runtimes { containers: ContainerSupport::None, processes: processes.clone() };
            assert_eq!(ImageChoice::PlainProcess.resolve_on(Some(&only)), Err(short.clone()));
            assert_eq!(default.resolve_on(Some(&only)), Err(short.clone()));
            let both = Runtimes { containers: ContainerSupport::Run, processes };
            assert_eq!(ImageChoice::PlainProcess.resolve_on(Some(&both)), Err(short));
            assert_eq!(default.resolve_on(Some(&both)), Ok(ExecutionMode::Container { image: "base:1" }));
        }
    }

    #[test]
    fn processes_denied_the_servers_own_user_are_confined_or_refused() {
        let own = |otherwise| ProcessSupport::Own { otherwise: Box::new(otherwise) };
        let on = |processes| {
            let runtimes = Runtimes { containers: ContainerSupport::None, processes };
            ImageChoice::PlainProcess.resolve_on(Some(&runtimes)).map(|runs_in| runs_in.to_string())
        };
        let not = || ProcessSupport::NotConfined { why: "no namespaces".into() };
        let server =
            "a plain process, not confined: it has all rights of the server (`--local-processes own`)";
        assert_eq!(on(own(not())), Ok(server.into()));
        let confined = Ok("a plain process, confined (own user)".into());
        assert_eq!(on(own(ProcessSupport::Users).without_own_user()), confined);
        let short = on(own(not()).without_own_user()).unwrap_err();
        assert_eq!(short, Shortfall::NotConfined { why: "no namespaces".into() });
    }

    #[test]
    fn a_pod_runs_the_image_of_its_job_and_no_plain_process() {
        let pod = Runtimes::pod(false);
        let image = ImageChoice::Image("debian:13".into());
        let runs_in = image.resolve_on(Some(&pod)).unwrap();
        assert_eq!((runs_in, runs_in.image_name()), (ExecutionMode::Pod { image: "debian:13" }, "none"));
        let default = ImageChoice::Default { image: Some("base:1".into()) };
        assert_eq!(default.resolve_on(Some(&pod)), Ok(ExecutionMode::Pod { image: "base:1" }));
        let none = ImageChoice::Default { image: None };
        assert_eq!(none.resolve_on(Some(&pod)), Err(Shortfall::NoDefaultImage));
        assert_eq!(ImageChoice::PlainProcess.resolve_on(Some(&pod)), Err(Shortfall::NoProcesses));
        let closed = image.resolve_on(Some(&Runtimes::closed_node("it is cordoned"))).unwrap_err();
        assert_eq!(closed.to_string(), "is a node that takes no pods now: it is cordoned");
        assert!(!closed.is_permanent());
    }

    #[test]
    fn runtimes_parse_from_their_names() {
        let parse = |name| Runtimes::parse(name, ProcessSupport::Users);
        assert_eq!(parse("any"), Some(BOTH));
        assert_eq!(parse("any-oci"), Some(BOTH));
        assert_eq!(parse("docker"), Some(CONTAINERS));
        assert_eq!(parse("process"), Some(PROCESSES));
        assert_eq!(parse("pod"), Some(Runtimes::pod(true)));
        assert_eq!(parse("simulated"), None);
    }
}
