//! Interprets the findings. Pure: every case is in a table of tests.

use serde::Serialize;
use windlass_api::agent::shim::{HostInfo, ProcessMode};
use windlass_backend::processes_from;
use windlass_model::plan::execution_mode::ProcessSupport;

/// Version of this program, which the other components should share.
const OWN_VERSION: &str = env!("CARGO_PKG_VERSION");
/// Below this amount a first image does not fit.
const DISK_FREE_MIN: u64 = 5 << 30;
const GIB: u64 = 1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Severity {
    #[serde(rename = "ok")]
    Passed,
    /// Works, but could be improved.
    Note,
    /// Prevents windlass from working.
    Bad,
}

#[derive(Debug, Serialize)]
pub(super) struct Check {
    pub(super) name: &'static str,
    #[serde(rename = "status")]
    pub(super) grade: Severity,
    pub(super) found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fix: Option<String>,
}

impl Check {
    fn passed(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, grade: Severity::Passed, found: found.into(), fix: None }
    }

    fn note(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, grade: Severity::Note, found: found.into(), fix: Some(fix.into()) }
    }

    fn bad(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, grade: Severity::Bad, found: found.into(), fix: Some(fix.into()) }
    }
}

/// Everything that `look` observed.
#[derive(Clone, Debug)]
pub(super) struct Findings {
    pub(super) home: HomeStatus,
    pub(super) server: ServerStatus,
    pub(super) port: PortStatus,
    pub(super) agent: AgentStatus,
    pub(super) engine: EngineStatus,
    pub(super) gpus: GpuStatus,
    /// Instances of the project on the server.
    pub(super) hosts: Vec<InstanceStatus>,
    /// Output of `ssh -V`; `None` if it is not installed.
    pub(super) ssh: Option<String>,
    pub(super) git: Option<String>,
}

#[derive(Clone, Debug)]
pub(super) enum HomeStatus {
    Unset,
    /// Other users may read it.
    OpenToOthers {
        path: String,
        mode: u32,
    },
    Unusable {
        path: String,
        why: String,
    },
    Fine {
        path: String,
        free: u64,
    },
}

#[derive(Clone, Debug)]
pub(super) enum ServerStatus {
    /// None is configured, and none runs on this machine.
    None,
    /// The error that a command would report without connecting.
    Unusable {
        why: String,
        hint: String,
    },
    Unreachable {
        url: String,
        why: String,
        here: bool,
    },
    Denied {
        url: String,
        why: String,
    },
    Reachable {
        url: String,
        version: Option<String>,
        user: String,
        project: Result<String, String>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PortStatus {
    Free(u16),
    UsedByServer(u16),
    InUse(u16),
}

#[derive(Clone, Debug)]
pub(super) enum AgentStatus {
    Missing { why: String },
    Broken { why: String },
    Fine { path: String, version: String, host: Box<HostInfo> },
}

/// An instance of the server.
#[derive(Clone, Debug)]
pub(super) struct InstanceStatus {
    pub(super) name: String,
    pub(super) processes: Option<ProcessSupport>,
    /// Reason why its container engine does not respond.
    pub(super) engine_away: Option<String>,
}

#[derive(Clone, Debug)]
pub(super) enum EngineStatus {
    Found(String),
    None { why: String },
}

/// GPU facts that the agent does not report.
#[derive(Clone, Debug, Default)]
pub(super) struct GpuStatus {
    /// Number of NVIDIA devices on the PCI bus.
    pub(super) nvidia: usize,
    pub(super) toolkit: bool,
    pub(super) driver: Option<String>,
    pub(super) problems: Vec<String>,
}

pub(super) fn evaluate_all(seen: &Findings) -> Vec<Check> {
    let mut checks = vec![
        check_home(&seen.home),
        check_server(&seen.server),
        check_version(&seen.server),
        check_port(&seen.port),
        check_agent(&seen.agent),
        check_engine(&seen.engine, &seen.hosts),
        check_processes(&seen.agent, &seen.hosts),
        check_gpu(seen),
    ];
    checks.push(match &seen.ssh {
        Some(version) => Check::passed("ssh", version),
        None => Check::note(
            "ssh",
            "`ssh` is not installed",
            "`attach` and editors need it: `apt install openssh-client`",
        ),
    });
    checks.push(match &seen.git {
        Some(version) => Check::passed("git", version),
        None => Check::note(
            "git",
            "`git` is not installed",
            "`repos` in a configuration needs it: `apt install git`",
        ),
    });
    checks
}

fn check_home(home: &HomeStatus) -> Check {
    match home {
        HomeStatus::Unset => {
            Check::bad("home", "neither `WINDLASS_HOME` nor `HOME` is set", "`export WINDLASS_HOME=DIR`")
        }
        HomeStatus::Unusable { path, why } => {
            Check::bad("home", format!("{path}: {why}"), "make it writable, or `export WINDLASS_HOME=DIR`")
        }
        HomeStatus::OpenToOthers { path, mode } => Check::note(
            "home",
            format!("{path} is accessible to other users (mode {mode:03o})"),
            format!("it contains tokens: run `chmod 700 {path}`"),
        ),
        HomeStatus::Fine { path, free } if *free < DISK_FREE_MIN => Check::note(
            "home",
            format!("{path} has {} GB left", free / GIB),
            "free some space, or `export WINDLASS_HOME=DIR` on another disk",
        ),
        HomeStatus::Fine { path, free } => Check::passed("home", format!("{path}, {} GB free", free / GIB)),
    }
}

fn check_server(server: &ServerStatus) -> Check {
    match server {
        ServerStatus::None => {
            Check::passed("server", "not configured: the first command starts a server on this machine")
        }
        ServerStatus::Unusable { why, hint } => Check::bad("server", why, hint),
        ServerStatus::Unreachable { url, why, here: true } => Check::bad(
            "server",
            format!("{url} does not respond: {why}"),
            "start it with `windlass server`, or log in to another server: `windlass login --url URL --token -`",
        ),
        ServerStatus::Unreachable { url, why, here: false } => Check::bad(
            "server",
            format!("{url} does not respond: {why}"),
            "check that it is running and reachable, or log in to another server: `windlass login --url URL --token -`",
        ),
        ServerStatus::Denied { url, why } => Check::bad(
            "server",
            format!("{url} rejected the request: {why}"),
            format!("run `windlass login --url {url} --token -` with a token of that server"),
        ),
        ServerStatus::Reachable { url, user, project: Ok(project), .. } => {
            Check::passed("server", format!("{url} as `{user}`, project `{project}`"))
        }
        ServerStatus::Reachable { url, user, project: Err(why), .. } => Check::bad(
            "server",
            format!("{url} as `{user}`: {why}"),
            "run `windlass project` to list your projects; select one with `--project` or `WINDLASS_PROJECT`",
        ),
    }
}

fn check_version(server: &ServerStatus) -> Check {
    match server {
        ServerStatus::Reachable { version: Some(theirs), .. } if theirs != OWN_VERSION => Check::note(
            "version",
            format!("this program is {OWN_VERSION}, the server is {theirs}"),
            "install the same version of both",
        ),
        ServerStatus::Reachable { version: None, .. } => Check::note(
            "version",
            format!("this program is {OWN_VERSION}, the server does not report its version"),
            "the server is older, or not windlass: upgrade it",
        ),
        ServerStatus::Reachable { .. } => {
            Check::passed("version", format!("{OWN_VERSION}, same as the server"))
        }
        ServerStatus::None
        | ServerStatus::Unusable { .. }
        | ServerStatus::Unreachable { .. }
        | ServerStatus::Denied { .. } => Check::passed("version", OWN_VERSION),
    }
}

fn check_port(port: &PortStatus) -> Check {
    match port {
        PortStatus::Free(port) => Check::passed("port", format!("{port} is free for `windlass server`")),
        PortStatus::UsedByServer(port) => Check::passed("port", format!("{port} is used by the server")),
        PortStatus::InUse(port) => Check::note(
            "port",
            format!("{port} is used by another program"),
            format!(
                "to run a server in the foreground, use another port: `windlass server --port {}`",
                port.wrapping_add(1)
            ),
        ),
    }
}

fn check_agent(agent: &AgentStatus) -> Check {
    match agent {
        AgentStatus::Missing { why } => Check::note(
            "agent",
            why,
            "jobs on this machine and on SSH hosts need it: put `windlass-agent` next to `windlass`, or set its path in \
             `WINDLASS_AGENT`",
        ),
        AgentStatus::Broken { why } => {
            Check::bad("agent", why, "install it again, in the same version as `windlass`")
        }
        AgentStatus::Fine { version, path, .. } if version != OWN_VERSION => Check::bad(
            "agent",
            format!("{path} is {version}, this program is {OWN_VERSION}"),
            "install the same version of both",
        ),
        AgentStatus::Fine { path, host, .. } => {
            Check::passed("agent", format!("{path}: {} CPUs, {} GB", host.cpus, host.memory / GIB))
        }
    }
}

/// Checks the isolation of jobs without an image, on this machine and on the instances of the server.
fn check_processes(agent: &AgentStatus, hosts: &[InstanceStatus]) -> Check {
    const NAME: &str = "processes";
    let reported = |host: &InstanceStatus| match host.processes.as_ref()? {
        processes @ (ProcessSupport::Own { .. } | ProcessSupport::NotConfined { .. }) => {
            Some((host.name.clone(), processes.clone()))
        }
        ProcessSupport::Users
        | ProcessSupport::Namespaces
        | ProcessSupport::None
        | ProcessSupport::Refused
        | ProcessSupport::Unknown => None,
    };
    let here = match agent {
        AgentStatus::Fine { host, .. } => host.processes.as_ref(),
        AgentStatus::Missing { .. } | AgentStatus::Broken { .. } => None,
    };
    let here = here.map(|here| processes_from(Some(here), ProcessMode::Confined));
    match (hosts.iter().find_map(reported), here) {
        (Some((name, processes @ ProcessSupport::Own { .. })), _) => Check::note(
            NAME,
            format!("plain processes on {name}: {processes}"),
            "every job has all rights of the server; unless all jobs are yours, run `windlass server --local-processes confined`",
        ),
        (Some((name, processes)), _) => {
            Check::note(NAME, format!("plain processes on {name}: {processes}"), CONFINE)
        }
        (None, Some(processes @ ProcessSupport::NotConfined { .. })) => {
            Check::note(NAME, format!("plain processes on this machine: {processes}"), CONFINE)
        }
        (None, Some(processes)) => Check::passed(NAME, format!("plain processes: {processes}")),
        (None, None) => Check::passed(NAME, "no agent reports how plain processes are isolated"),
    }
}

const CONFINE: &str = "run the agent as root, or allow it to use user namespaces; a server with one user can run them with its own rights: \
     `windlass server --local-processes own`";

fn check_engine(engine: &EngineStatus, hosts: &[InstanceStatus]) -> Check {
    let away = hosts.iter().find_map(|host| Some((&host.name, host.engine_away.as_ref()?)));
    if let Some((name, why)) = away {
        return Check::note(
            "docker",
            format!("the container engine of {name} is not available: {why}"),
            "jobs with an image wait for it: start it on that instance",
        );
    }
    match engine {
        EngineStatus::Found(socket) => Check::passed("docker", format!("an engine responds at {socket}")),
        EngineStatus::None { why } if why.contains("ermission denied") => Check::note(
            "docker",
            why,
            "run `sudo usermod -aG docker $USER`, then log in again; until then jobs run as plain processes, and jobs with an image cannot run",
        ),
        EngineStatus::None { why } => Check::note(
            "docker",
            why,
            "run `apt install docker.io`; until then jobs on this machine run as plain processes, and jobs with an image cannot run",
        ),
    }
}

fn check_gpu(seen: &Findings) -> Check {
    const TOOLKIT: &str = "containers need it: `apt install nvidia-container-toolkit && nvidia-ctk runtime configure --runtime=docker \
         && systemctl restart docker`";
    let reported = match &seen.agent {
        AgentStatus::Fine { host, .. } if host.gpu_count > 0 => Some(host),
        AgentStatus::Fine { .. } | AgentStatus::Missing { .. } | AgentStatus::Broken { .. } => None,
    };
    if let Some(problem) = seen.gpus.problems.first() {
        return Check::note("gpu", problem, "check that `nvidia-smi` runs without errors; a reboot may help");
    }
    match reported {
        None if seen.gpus.nvidia > 0 => Check::note(
            "gpu",
            format!("NVIDIA devices on the PCI bus: {}; no driver reports them", seen.gpus.nvidia),
            "install the driver, so that `nvidia-smi` runs",
        ),
        None => Check::passed("gpu", "none in this machine"),
        Some(host) => {
            let name =
                format!("{} × {} ({} GB)", host.gpu_count, host.gpu_name, host.gpu_memory.div_ceil(1024));
            let name = match &seen.gpus.driver {
                Some(driver) => format!("{name}, driver {driver}"),
                None => name,
            };
            let containers = matches!(seen.engine, EngineStatus::Found(_));
            if containers && host.gpu_vendor == "nvidia" && !seen.gpus.toolkit {
                return Check::note("gpu", format!("{name}; no NVIDIA container toolkit"), TOOLKIT);
            }
            Check::passed("gpu", name)
        }
    }
}

#[cfg(test)]
mod tests {
    use windlass_api::agent::shim::{ConfinementMethod, ProcessesInfo};

    use super::*;

    fn host() -> HostInfo {
        HostInfo {
            gpu_vendor: "none".into(),
            gpu_name: String::new(),
            gpu_memory: 0,
            gpu_count: 0,
            gpu_compute_capability: None,
            addresses: Vec::new(),
            disk_size: 100 * GIB,
            cpus: 2,
            memory: 4 * GIB,
            processes: None,
        }
    }

    fn fine() -> Findings {
        Findings {
            home: HomeStatus::Fine { path: "/h".into(), free: 10 * GIB },
            server: ServerStatus::None,
            port: PortStatus::Free(3000),
            agent: AgentStatus::Fine {
                path: "/a".into(),
                version: OWN_VERSION.into(),
                host: Box::new(host()),
            },
            engine: EngineStatus::Found("/run/docker.sock".into()),
            gpus: GpuStatus::default(),
            hosts: Vec::new(),
            ssh: Some("OpenSSH".into()),
            git: Some("git".into()),
        }
    }

    #[track_caller]
    fn check(seen: &Findings, name: &str, grade: Severity, part: &str) {
        let all = evaluate_all(seen);
        let found = all.iter().find(|check| check.name == name).unwrap();
        let text = format!("{} / {}", found.found, found.fix.clone().unwrap_or_default());
        assert_eq!((found.grade, text.contains(part)), (grade, true), "{text}");
        assert_eq!(
            found.fix.is_some(),
            grade != Severity::Passed,
            "a fix exactly where one is needed: {text}"
        );
        let others = all.iter().filter(|check| check.name != name && check.name != "version");
        assert!(others.into_iter().all(|check| check.grade == Severity::Passed), "{all:?}");
    }

    #[test]
    fn a_healthy_machine_gets_no_advice() {
        assert!(
            evaluate_all(&fine()).iter().all(|check| check.grade == Severity::Passed && check.fix.is_none())
        );
    }

    #[test]
    fn server_check_covers_connection_token_project_and_version() {
        let with = |server| Findings { server, ..fine() };
        let url = || "http://h:3000".to_owned();
        let up = |project, version: Option<&str>| {
            with(ServerStatus::Reachable {
                url: url(),
                version: version.map(str::to_owned),
                user: "u".into(),
                project,
            })
        };
        let away = |here| with(ServerStatus::Unreachable { url: url(), why: "refused".into(), here });
        check(&away(true), "server", Severity::Bad, "`windlass server`");
        check(&away(false), "server", Severity::Bad, "windlass login");
        check(
            &with(ServerStatus::Denied { url: url(), why: "no".into() }),
            "server",
            Severity::Bad,
            "--token -",
        );
        check(&up(Ok("main".into()), Some(OWN_VERSION)), "server", Severity::Passed, "project `main`");
        check(
            &up(Err("no project `x`".into()), Some(OWN_VERSION)),
            "server",
            Severity::Bad,
            "no project `x`",
        );
        check(&up(Ok("main".into()), Some("9.9.9")), "version", Severity::Note, "9.9.9");
        check(&up(Ok("main".into()), None), "version", Severity::Note, "upgrade it");
    }

    #[test]
    fn local_requirements_are_checked_and_each_problem_has_a_fix() {
        let with = |agent| Findings { agent, ..fine() };
        check(
            &with(AgentStatus::Missing { why: "not there".into() }),
            "agent",
            Severity::Note,
            "WINDLASS_AGENT",
        );
        check(
            &with(AgentStatus::Broken { why: "exec format".into() }),
            "agent",
            Severity::Bad,
            "exec format",
        );
        let host = Box::new(host());
        let old = AgentStatus::Fine { path: "/a".into(), version: "0.0.1".into(), host };
        check(&with(old), "agent", Severity::Bad, "0.0.1");
        let denied = EngineStatus::None { why: "Permission denied (os error 13)".into() };
        check(&Findings { engine: denied, ..fine() }, "docker", Severity::Note, "usermod");
        let none = EngineStatus::None { why: "no Docker engine at /x".into() };
        check(&Findings { engine: none, ..fine() }, "docker", Severity::Note, "plain processes");
        check(&Findings { port: PortStatus::InUse(3000), ..fine() }, "port", Severity::Note, "--port 3001");
        check(&Findings { ssh: None, ..fine() }, "ssh", Severity::Note, "openssh-client");
        check(&Findings { git: None, ..fine() }, "git", Severity::Note, "apt install git");
        check(&Findings { home: HomeStatus::Unset, ..fine() }, "home", Severity::Bad, "export WINDLASS_HOME");
        let open = HomeStatus::OpenToOthers { path: "/h".into(), mode: 0o755 };
        check(&Findings { home: open, ..fine() }, "home", Severity::Note, "chmod 700 /h");
    }

    #[test]
    fn process_isolation_and_engine_problems_are_reported() {
        let with = |name: &str, processes, engine_away: Option<&str>| {
            let host =
                InstanceStatus { name: name.into(), processes, engine_away: engine_away.map(str::to_owned) };
            Findings { hosts: vec![host], ..fine() }
        };
        check(&with("local-0", Some(ProcessSupport::Users), None), "processes", Severity::Passed, "");
        let own = ProcessSupport::Own { otherwise: Box::new(ProcessSupport::Users) };
        check(&with("local-0", Some(own), None), "processes", Severity::Note, "--local-processes confined");
        let not = ProcessSupport::NotConfined { why: "no user namespaces".into() };
        check(&with("rack-1", Some(not), None), "processes", Severity::Note, "no user namespaces");
        let away = with("rack-1", None, Some("connection refused"));
        check(&away, "docker", Severity::Note, "engine of rack-1 is not available: connection refused");
        let reported = |confined_by, problem: Option<&str>| {
            let problem = problem.map(str::to_owned);
            let reported = ProcessesInfo { mode: ProcessMode::Confined, confined_by, problem };
            let host = Box::new(HostInfo { processes: Some(reported), ..host() });
            Findings {
                agent: AgentStatus::Fine { path: "/a".into(), version: OWN_VERSION.into(), host },
                ..fine()
            }
        };
        check(&reported(Some(ConfinementMethod::Users), None), "processes", Severity::Passed, "own user");
        check(
            &reported(None, Some("no user namespaces")),
            "processes",
            Severity::Note,
            "--local-processes own",
        );
    }

    #[test]
    fn gpu_check_covers_pci_bus_driver_and_container_toolkit() {
        let with = |gpus| Findings { gpus, ..fine() };
        check(
            &with(GpuStatus { nvidia: 2, ..GpuStatus::default() }),
            "gpu",
            Severity::Note,
            "install the driver",
        );
        let reported = |toolkit| {
            let host = HostInfo {
                gpu_vendor: "nvidia".into(),
                gpu_name: "H100".into(),
                gpu_memory: 81_559,
                gpu_count: 8,
                ..host()
            };
            let agent =
                AgentStatus::Fine { path: "/a".into(), version: OWN_VERSION.into(), host: Box::new(host) };
            let gpus = GpuStatus { nvidia: 8, toolkit, driver: Some("550".into()), problems: Vec::new() };
            Findings { agent, gpus, ..fine() }
        };
        check(&reported(true), "gpu", Severity::Passed, "8 × H100 (80 GB), driver 550");
        check(&reported(false), "gpu", Severity::Note, "nvidia-container-toolkit");
        let broken = GpuStatus { problems: vec!["GPU 1 is gone".into()], ..GpuStatus::default() };
        check(&with(broken), "gpu", Severity::Note, "GPU 1 is gone");
    }
}
