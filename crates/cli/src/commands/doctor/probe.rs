//! Collects the facts for `windlass doctor`. Changes nothing and starts nothing.

use std::{
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde::Deserialize;
use windlass_api::{
    agent::shim::HostInfo,
    client::CallError,
    operations::{ReadMyUser, ReadProject, ReadServerInfo},
    server::EmptyRequest,
};
use windlass_backend::{
    agent_program::{AgentProgram, VARIABLE},
    engine_probe::{self, EngineSearch},
};
use windlass_dial::DialError;
use windlass_model::error_chain::format_chain;

use super::{
    super::instance,
    evaluate::{
        AgentStatus, EngineStatus, Findings, GpuStatus, HomeStatus, InstanceStatus, PortStatus, ServerStatus,
    },
};
use crate::{cli::ServerArgs, context::Context, error::CliError, home, login};

/// Default port of `windlass server`.
const SERVER_PORT: u16 = 3000;
/// Directory in which the kernel lists PCI devices.
const PCI_DEVICES_DIR: &str = "/sys/bus/pci/devices";
const NVIDIA_VENDOR_ID: &str = "0x10de";
/// PCI classes of display controllers and accelerators.
const GPU_DEVICE_CLASSES: [&str; 2] = ["0x03", "0x12"];
const TOOLKIT_PROGRAMS: [&str; 2] = ["nvidia-container-runtime", "nvidia-ctk"];

pub(super) async fn probe_all(at: &ServerArgs) -> Findings {
    let home_path = home::Home::path();
    let (server, hosts) = probe_server(at).await;
    let (agent, mut gpus) = probe_agent(home_path.as_deref()).await;
    gpus.nvidia = count_pci_gpus(Path::new(PCI_DEVICES_DIR));
    gpus.toolkit = TOOLKIT_PROGRAMS.iter().any(|name| find_in_path(name).is_some());
    let engine =
        match EngineSearch::here(std::env::var_os("WINDLASS_SERVER_DOCKER_SOCKET").map(PathBuf::from))
            .inspect()
            .await
        {
            engine_probe::EngineProbe::At(socket) => EngineStatus::Found(socket.display().to_string()),
            engine_probe::EngineProbe::None { why } => EngineStatus::None { why },
        };
    Findings {
        home: probe_home(home_path),
        port: probe_port(SERVER_PORT, &server),
        server,
        hosts,
        agent,
        engine,
        gpus,
        ssh: program_version("ssh", "-V"),
        git: program_version("git", "--version"),
    }
}

fn probe_home(path: Option<PathBuf>) -> HomeStatus {
    let Some(path) = path else { return HomeStatus::Unset };
    let shown = path.display().to_string();
    // The first command creates a missing directory, so the nearest existing ancestor must be writable.
    let Some(there) = path.ancestors().find(|dir| dir.is_dir()) else {
        return HomeStatus::Unusable { path: shown, why: "no parent directory exists".to_owned() };
    };
    if let Err(error) = rustix::fs::access(there, rustix::fs::Access::WRITE_OK) {
        return HomeStatus::Unusable { path: shown, why: error.to_string() };
    }
    let mode = std::fs::metadata(there).map_or(0, |meta| meta.permissions().mode() & 0o777);
    if there == path && mode & 0o077 != 0 {
        return HomeStatus::OpenToOthers { path: shown, mode };
    }
    let free = rustix::fs::statvfs(there).map_or(u64::MAX, |fs| fs.f_bavail.saturating_mul(fs.f_frsize));
    HomeStatus::Fine { path: shown, free }
}

/// Returns the state of the server, and its instances of the project.
async fn probe_server(at: &ServerArgs) -> (ServerStatus, Vec<InstanceStatus>) {
    let unusable = |problem: CliError| {
        let (why, hint) = problem.parts();
        (ServerStatus::Unusable { why, hint }, Vec::new())
    };
    let chosen = match login::choose_running(at) {
        Ok(Some(chosen)) => chosen,
        Ok(None) => return (ServerStatus::None, Vec::new()),
        Err(problem) => return unusable(problem),
    };
    let (url, project) = (chosen.url.clone(), chosen.project.clone());
    let cx = match Context::new(chosen) {
        Ok(cx) => cx,
        Err(problem) => return unusable(problem),
    };
    let server = probe_server_api(&cx, url, project).await;
    let hosts = match &server {
        ServerStatus::Reachable { project: Ok(_), .. } => {
            instance::list(&cx, true, None).await.unwrap_or_default()
        }
        ServerStatus::None
        | ServerStatus::Unusable { .. }
        | ServerStatus::Unreachable { .. }
        | ServerStatus::Denied { .. }
        | ServerStatus::Reachable { .. } => Vec::new(),
    };
    let hosts = hosts.iter().map(|found| InstanceStatus {
        name: found.name.clone(),
        processes: instance::processes(found),
        engine_away: instance::engine_error(found),
    });
    (server, hosts.collect())
}

async fn probe_server_api(cx: &Context, url: String, project: String) -> ServerStatus {
    let here = ["127.0.0.1", "localhost", "[::1]"].iter().any(|host| url.contains(host));
    let version = match cx.try_call::<ReadServerInfo>(&EmptyRequest {}).await {
        Ok(info) => info.windlass_version,
        Err(CallError::Dial(DialError::Connect { source, .. })) => {
            return ServerStatus::Unreachable { url, why: source.to_string(), here };
        }
        Err(error) => return ServerStatus::Unreachable { url, why: format_chain(&error), here },
    };
    let user = match cx.try_call::<ReadMyUser>(&EmptyRequest {}).await {
        Ok(user) => user.username,
        Err(error) => return ServerStatus::Denied { url, why: format_chain(&error) },
    };
    let project = match cx.call::<ReadProject>(&EmptyRequest {}).await {
        Ok(_) => Ok(project),
        Err(problem) => Err(problem.parts().0),
    };
    ServerStatus::Reachable { url, version, user, project }
}

fn probe_port(port: u16, server: &ServerStatus) -> PortStatus {
    let ours = match server {
        ServerStatus::Reachable { url, .. } => url.ends_with(&format!(":{port}")),
        ServerStatus::None
        | ServerStatus::Unusable { .. }
        | ServerStatus::Unreachable { .. }
        | ServerStatus::Denied { .. } => false,
    };
    if ours {
        return PortStatus::UsedByServer(port);
    }
    match TcpListener::bind(("127.0.0.1", port)) {
        Ok(_) => PortStatus::Free(port),
        Err(_) => PortStatus::InUse(port),
    }
}

/// Output of `windlass-agent host`.
#[derive(Deserialize)]
struct AgentHostReport {
    host: HostInfo,
    #[serde(default)]
    driver_version: Option<String>,
    #[serde(default)]
    problems: Vec<String>,
}

async fn probe_agent(home: Option<&Path>) -> (AgentStatus, GpuStatus) {
    let named = std::env::var_os(VARIABLE).map(PathBuf::from);
    let program = match AgentProgram::find(named.as_deref()) {
        Ok(program) => program,
        Err(error) => return (AgentStatus::Missing { why: format_chain(&error) }, GpuStatus::default()),
    };
    let broken = |why: String| (AgentStatus::Broken { why }, GpuStatus::default());
    let version = match program.version().await {
        Ok(version) => version,
        Err(error) => return broken(format_chain(&error)),
    };
    let disk = home.into_iter().flat_map(Path::ancestors).find(|dir| dir.is_dir()).unwrap_or(Path::new("/"));
    let report = match program.output(&["host".as_ref(), "--data".as_ref(), disk.as_os_str()]).await {
        Ok(text) => serde_json::from_str::<AgentHostReport>(&text),
        Err(error) => return broken(format_chain(&error)),
    };
    match report {
        Ok(AgentHostReport { host, driver_version, problems }) => {
            let path = program.path().display().to_string();
            let gpus = GpuStatus { driver: driver_version, problems, ..GpuStatus::default() };
            (AgentStatus::Fine { path, version, host: Box::new(host) }, gpus)
        }
        Err(error) => broken(format!("failed to parse the output of the agent: {error}")),
    }
}

fn count_pci_gpus(bus: &Path) -> usize {
    let Ok(devices) = std::fs::read_dir(bus) else { return 0 };
    let starts = |path: PathBuf, with: &[&str]| {
        std::fs::read_to_string(path).is_ok_and(|text| with.iter().any(|with| text.starts_with(with)))
    };
    let gpu = |dir: PathBuf| {
        starts(dir.join("vendor"), &[NVIDIA_VENDOR_ID]) && starts(dir.join("class"), &GPU_DEVICE_CLASSES)
    };
    devices.flatten().filter(|device| gpu(device.path())).count()
}

fn find_in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// First line of a program's version output, from stdout or stderr.
fn program_version(program: &str, flag: &str) -> Option<String> {
    let done = Command::new(find_in_path(program)?).arg(flag).stdin(Stdio::null()).output().ok()?;
    let text = if done.stdout.is_empty() { done.stderr } else { done.stdout };
    let text = String::from_utf8_lossy(&text).into_owned();
    Some(text.lines().next().unwrap_or(program).trim().to_owned())
}
