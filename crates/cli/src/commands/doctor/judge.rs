//! What was found, and what it means. Pure: every case is in a table of tests.

use serde::Serialize;
use windlass_api::agent::shim::HostInfo;

/// The version of this program; the others should have the same.
const OURS: &str = env!("CARGO_PKG_VERSION");
/// Below this a first image does not fit.
const DISK_FREE_MIN: u64 = 5 << 30;
const GIB: u64 = 1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Grade {
    #[serde(rename = "ok")]
    Well,
    /// It works, and could be better.
    Note,
    /// It keeps windlass from working.
    Bad,
}

#[derive(Debug, Serialize)]
pub(super) struct Check {
    pub(super) name: &'static str,
    #[serde(rename = "status")]
    pub(super) grade: Grade,
    pub(super) found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fix: Option<String>,
}

impl Check {
    fn well(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, grade: Grade::Well, found: found.into(), fix: None }
    }

    fn note(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, grade: Grade::Note, found: found.into(), fix: Some(fix.into()) }
    }

    fn bad(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, grade: Grade::Bad, found: found.into(), fix: Some(fix.into()) }
    }
}

/// All that `look` saw.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) home: Home,
    pub(super) server: Server,
    pub(super) port: Port,
    pub(super) agent: Agent,
    pub(super) engine: Engine,
    pub(super) gpus: Gpus,
    /// What `ssh -V` says; `None` when there is none.
    pub(super) ssh: Option<String>,
    pub(super) git: Option<String>,
}

#[derive(Clone, Debug)]
pub(super) enum Home {
    Unset,
    /// Others may read it.
    Open {
        path: String,
        mode: u32,
    },
    Refused {
        path: String,
        why: String,
    },
    Fine {
        path: String,
        free: u64,
    },
}

#[derive(Clone, Debug)]
pub(super) enum Server {
    /// Nothing names one, and none runs here.
    None,
    /// What a command would say instead of trying.
    Unusable {
        why: String,
        hint: String,
    },
    Away {
        url: String,
        why: String,
        here: bool,
    },
    Denied {
        url: String,
        why: String,
    },
    Up {
        url: String,
        version: Option<String>,
        user: String,
        project: Result<String, String>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Port {
    Free(u16),
    Ours(u16),
    Taken(u16),
}

#[derive(Clone, Debug)]
pub(super) enum Agent {
    Missing { why: String },
    Broken { why: String },
    Fine { path: String, version: String, host: Box<HostInfo> },
}

#[derive(Clone, Debug)]
pub(super) enum Engine {
    At(String),
    None { why: String },
}

/// What the agent does not tell, because nobody told the agent.
#[derive(Clone, Debug, Default)]
pub(super) struct Gpus {
    /// Of NVIDIA, on the bus.
    pub(super) nvidia: usize,
    pub(super) toolkit: bool,
    pub(super) driver: Option<String>,
    pub(super) problems: Vec<String>,
}

pub(super) fn all(seen: &Seen) -> Vec<Check> {
    let mut checks = vec![
        home(&seen.home),
        server(&seen.server),
        version(&seen.server),
        port(&seen.port),
        agent(&seen.agent),
        engine(&seen.engine),
        gpu(seen),
    ];
    checks.push(match &seen.ssh {
        Some(version) => Check::well("ssh", version),
        None => Check::note(
            "ssh",
            "no program `ssh`",
            "`attach` and editors need it: `apt install openssh-client`",
        ),
    });
    checks.push(match &seen.git {
        Some(version) => Check::well("git", version),
        None => {
            Check::note("git", "no program `git`", "`repos` in a configuration needs it: `apt install git`")
        }
    });
    checks
}

fn home(home: &Home) -> Check {
    match home {
        Home::Unset => {
            Check::bad("home", "neither `WINDLASS_HOME` nor `HOME` is set", "`export WINDLASS_HOME=DIR`")
        }
        Home::Refused { path, why } => {
            Check::bad("home", format!("{path}: {why}"), "make it yours, or `export WINDLASS_HOME=DIR`")
        }
        Home::Open { path, mode } => Check::note(
            "home",
            format!("{path} is open to others (mode {mode:03o})"),
            format!("tokens are in it: `chmod 700 {path}`"),
        ),
        Home::Fine { path, free } if *free < DISK_FREE_MIN => Check::note(
            "home",
            format!("{path} has {} GB left", free / GIB),
            "make room, or `export WINDLASS_HOME=DIR` on another disk",
        ),
        Home::Fine { path, free } => Check::well("home", format!("{path}, {} GB free", free / GIB)),
    }
}

fn server(server: &Server) -> Check {
    match server {
        Server::None => {
            Check::well("server", "none is configured: the first command starts one on this machine")
        }
        Server::Unusable { why, hint } => Check::bad("server", why, hint),
        Server::Away { url, why, here: true } => Check::bad(
            "server",
            format!("{url} does not answer: {why}"),
            "start it: `windlass server`, or choose another: `windlass login --url URL --token -`",
        ),
        Server::Away { url, why, here: false } => Check::bad(
            "server",
            format!("{url} does not answer: {why}"),
            "see whether it runs and the way is open, or `windlass login --url URL --token -`",
        ),
        Server::Denied { url, why } => Check::bad(
            "server",
            format!("{url} refuses: {why}"),
            format!("`windlass login --url {url} --token -` with a token of that server"),
        ),
        Server::Up { url, user, project: Ok(project), .. } => {
            Check::well("server", format!("{url} as `{user}`, project `{project}`"))
        }
        Server::Up { url, user, project: Err(why), .. } => Check::bad(
            "server",
            format!("{url} as `{user}`: {why}"),
            "`windlass project` lists yours; `--project` or `WINDLASS_PROJECT` chooses one",
        ),
    }
}

fn version(server: &Server) -> Check {
    match server {
        Server::Up { version: Some(theirs), .. } if theirs != OURS => Check::note(
            "version",
            format!("this program is {OURS}, the server {theirs}"),
            "use the same version of both",
        ),
        Server::Up { version: None, .. } => Check::note(
            "version",
            format!("this program is {OURS}, and the server does not say its own"),
            "it is older, or no windlass: upgrade it",
        ),
        Server::Up { .. } => Check::well("version", format!("{OURS}, like the server")),
        Server::None | Server::Unusable { .. } | Server::Away { .. } | Server::Denied { .. } => {
            Check::well("version", OURS)
        }
    }
}

fn port(port: &Port) -> Check {
    match port {
        Port::Free(port) => Check::well("port", format!("{port} is free for `windlass server`")),
        Port::Ours(port) => Check::well("port", format!("{port} is that of the server")),
        Port::Taken(port) => Check::note(
            "port",
            format!("{port} is taken by another program"),
            format!("a server in the foreground wants it: `windlass server --port {}`", port.wrapping_add(1)),
        ),
    }
}

fn agent(agent: &Agent) -> Check {
    match agent {
        Agent::Missing { why } => Check::note(
            "agent",
            why,
            "jobs on this machine and on SSH hosts need it: put `windlass-agent` beside `windlass`, or name it in \
             `WINDLASS_AGENT`",
        ),
        Agent::Broken { why } => {
            Check::bad("agent", why, "install it again, of the same version as `windlass`")
        }
        Agent::Fine { version, path, .. } if version != OURS => Check::bad(
            "agent",
            format!("{path} is {version}, this program {OURS}"),
            "install both of the same version",
        ),
        Agent::Fine { path, host, .. } => {
            Check::well("agent", format!("{path}: {} CPUs, {} GB", host.cpus, host.memory / GIB))
        }
    }
}

fn engine(engine: &Engine) -> Check {
    match engine {
        Engine::At(socket) => Check::well("docker", format!("an engine answers at {socket}")),
        Engine::None { why } if why.contains("ermission denied") => Check::note(
            "docker",
            why,
            "`sudo usermod -aG docker $USER`, then log in again; until then jobs run as plain processes, and those with an image not at all",
        ),
        Engine::None { why } => Check::note(
            "docker",
            why,
            "`apt install docker.io`; until then jobs run here as plain processes, and those with an image not at all",
        ),
    }
}

fn gpu(seen: &Seen) -> Check {
    const TOOLKIT: &str = "containers need it: `apt install nvidia-container-toolkit && nvidia-ctk runtime configure --runtime=docker \
         && systemctl restart docker`";
    let told = match &seen.agent {
        Agent::Fine { host, .. } if host.gpu_count > 0 => Some(host),
        Agent::Fine { .. } | Agent::Missing { .. } | Agent::Broken { .. } => None,
    };
    if let Some(problem) = seen.gpus.problems.first() {
        return Check::note("gpu", problem, "`nvidia-smi` should run without a complaint; a reboot may help");
    }
    match told {
        None if seen.gpus.nvidia > 0 => Check::note(
            "gpu",
            format!("{} of NVIDIA on the bus, and no driver tells of them", seen.gpus.nvidia),
            "install the driver, so that `nvidia-smi` runs",
        ),
        None => Check::well("gpu", "none in this machine"),
        Some(host) => {
            let name =
                format!("{} × {} ({} GB)", host.gpu_count, host.gpu_name, host.gpu_memory.div_ceil(1024));
            let name = match &seen.gpus.driver {
                Some(driver) => format!("{name}, driver {driver}"),
                None => name,
            };
            let containers = matches!(seen.engine, Engine::At(_));
            if containers && host.gpu_vendor == "nvidia" && !seen.gpus.toolkit {
                return Check::note("gpu", format!("{name}; no NVIDIA container toolkit"), TOOLKIT);
            }
            Check::well("gpu", name)
        }
    }
}

#[cfg(test)]
mod tests {
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

    fn fine() -> Seen {
        Seen {
            home: Home::Fine { path: "/h".into(), free: 10 * GIB },
            server: Server::None,
            port: Port::Free(3000),
            agent: Agent::Fine { path: "/a".into(), version: OURS.into(), host: Box::new(host()) },
            engine: Engine::At("/run/docker.sock".into()),
            gpus: Gpus::default(),
            ssh: Some("OpenSSH".into()),
            git: Some("git".into()),
        }
    }

    #[track_caller]
    fn check(seen: &Seen, name: &str, grade: Grade, part: &str) {
        let all = all(seen);
        let found = all.iter().find(|check| check.name == name).unwrap();
        let text = format!("{} / {}", found.found, found.fix.clone().unwrap_or_default());
        assert_eq!((found.grade, text.contains(part)), (grade, true), "{text}");
        assert_eq!(found.fix.is_some(), grade != Grade::Well, "a fix exactly where one is needed: {text}");
        let others = all.iter().filter(|check| check.name != name && check.name != "version");
        assert!(others.into_iter().all(|check| check.grade == Grade::Well), "{all:?}");
    }

    #[test]
    fn a_machine_that_is_well_gets_no_advice() {
        assert!(all(&fine()).iter().all(|check| check.grade == Grade::Well && check.fix.is_none()));
    }

    #[test]
    fn each_way_to_a_server_is_judged() {
        let with = |server| Seen { server, ..fine() };
        let url = || "http://h:3000".to_owned();
        let up = |project, version: Option<&str>| {
            with(Server::Up { url: url(), version: version.map(str::to_owned), user: "u".into(), project })
        };
        let away = |here| with(Server::Away { url: url(), why: "refused".into(), here });
        check(&away(true), "server", Grade::Bad, "`windlass server`");
        check(&away(false), "server", Grade::Bad, "windlass login");
        check(&with(Server::Denied { url: url(), why: "no".into() }), "server", Grade::Bad, "--token -");
        check(&up(Ok("main".into()), Some(OURS)), "server", Grade::Well, "project `main`");
        check(&up(Err("no project `x`".into()), Some(OURS)), "server", Grade::Bad, "no project `x`");
        check(&up(Ok("main".into()), Some("9.9.9")), "version", Grade::Note, "9.9.9");
        check(&up(Ok("main".into()), None), "version", Grade::Note, "upgrade it");
    }

    #[test]
    fn what_jobs_need_of_this_machine_is_judged() {
        let with = |agent| Seen { agent, ..fine() };
        check(&with(Agent::Missing { why: "not there".into() }), "agent", Grade::Note, "WINDLASS_AGENT");
        check(&with(Agent::Broken { why: "exec format".into() }), "agent", Grade::Bad, "exec format");
        let host = Box::new(host());
        let old = Agent::Fine { path: "/a".into(), version: "0.0.1".into(), host };
        check(&with(old), "agent", Grade::Bad, "0.0.1");
        let denied = Engine::None { why: "Permission denied (os error 13)".into() };
        check(&Seen { engine: denied, ..fine() }, "docker", Grade::Note, "usermod");
        let none = Engine::None { why: "no Docker engine at /x".into() };
        check(&Seen { engine: none, ..fine() }, "docker", Grade::Note, "plain processes");
        check(&Seen { port: Port::Taken(3000), ..fine() }, "port", Grade::Note, "--port 3001");
        check(&Seen { ssh: None, ..fine() }, "ssh", Grade::Note, "openssh-client");
        check(&Seen { git: None, ..fine() }, "git", Grade::Note, "apt install git");
        check(&Seen { home: Home::Unset, ..fine() }, "home", Grade::Bad, "export WINDLASS_HOME");
        let open = Home::Open { path: "/h".into(), mode: 0o755 };
        check(&Seen { home: open, ..fine() }, "home", Grade::Note, "chmod 700 /h");
    }

    #[test]
    fn gpus_are_judged_by_bus_driver_and_toolkit() {
        let with = |gpus| Seen { gpus, ..fine() };
        check(&with(Gpus { nvidia: 2, ..Gpus::default() }), "gpu", Grade::Note, "install the driver");
        let told = |toolkit| {
            let host = HostInfo {
                gpu_vendor: "nvidia".into(),
                gpu_name: "H100".into(),
                gpu_memory: 81_559,
                gpu_count: 8,
                ..host()
            };
            let agent = Agent::Fine { path: "/a".into(), version: OURS.into(), host: Box::new(host) };
            let gpus = Gpus { nvidia: 8, toolkit, driver: Some("550".into()), problems: Vec::new() };
            Seen { agent, gpus, ..fine() }
        };
        check(&told(true), "gpu", Grade::Well, "8 × H100 (80 GB), driver 550");
        check(&told(false), "gpu", Grade::Note, "nvidia-container-toolkit");
        let broken = Gpus { problems: vec!["GPU 1 is gone".into()], ..Gpus::default() };
        check(&with(broken), "gpu", Grade::Note, "GPU 1 is gone");
    }
}
