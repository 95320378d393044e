//! Container images: the choice of an engine on this host, and the commands for it.
//!
//! Engines are used through their command-line programs, which are the same for all users of a host and know where
//! their engine is. A container without an image would be a plain process, and is refused unless the operator of the
//! executor allowed that. A container with an image is never run as a plain process because no engine is available.
//!
//! The confinement of a container is decided by the same code, and the same policy of the host, as that of tasks of
//! runs.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    process::Stdio,
};

use serde_json::{Value, json};
use tokio::process::Command;
use windlass_api::agent::shim::{NetworkMode, ProcessMode, TaskSpec};
use windlass_model::queue::REFUSED_REASON;

use super::{AttemptError, apptainer};
use crate::shim::{
    docker::{ContainerConfinement, container_confinement, podman_ulimits},
    mounts,
    oci::{
        attempt::AttemptRuntime,
        is_engine_installed,
        seccomp::{write_profile, write_profile_for_apptainer},
    },
    policy::Policy,
};

pub(super) const PODMAN: &str = "podman";
/// Image names that mean no image.
const NO_IMAGE: [&str; 2] = ["", "none"];
/// Maximum length of an engine's error message that is kept.
const ERROR_TEXT_MAX: usize = 500;

/// Runtime for containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum ImageRuntime {
    /// Docker, Podman or Apptainer, whichever is installed; if none is, `oci`
    Auto,
    /// A plain process, also for containers with an image: the image is ignored, and the result is not reused. Only
    /// with `--allow-process`
    Process,
    Docker,
    Podman,
    Apptainer,
    /// No engine: the executor pulls images itself and starts `crun` or `runc`
    Oci,
}

/// Network of containers with an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Network {
    /// A separate network, on which containers reach neither each other nor services on this host's loopback
    Bridge,
    /// The network of the host, if its policy allows it
    Host,
}

/// Engine for one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Engine {
    /// Docker, or a program with the same command line.
    Docker(&'static str),
    Apptainer(&'static str),
    /// None: `crun` or `runc`, and images of the executor's own store.
    Oci,
}

/// Directories that containers without an engine need.
#[derive(Clone, Copy, Debug)]
pub(super) struct OciDirs<'a> {
    /// Images.
    pub(super) store: &'a Path,
    /// Files of the attempt.
    pub(super) attempt: &'a Path,
}

/// Specification of a container with an image.
pub(super) struct ContainerSpec<'a> {
    /// Unique on this host, and recognizable for cleanup.
    pub(super) name: &'a str,
    pub(super) image: &'a str,
    pub(super) command: &'a [String],
    pub(super) cwd: &'a str,
    /// Directories and files of the host, and their paths inside.
    pub(super) binds: Vec<(PathBuf, String)>,
    /// File with its variables, which no other user can read.
    pub(super) env_file: Option<PathBuf>,
    /// Names of variables that a file cannot hold: their values are in the environment of the engine's program.
    pub(super) names: Vec<&'a str>,
    pub(super) memory: Option<u64>,
    pub(super) cpus: Option<u64>,
    /// Indexes of its GPUs.
    pub(super) gpus: Option<String>,
    pub(super) confinement: ContainerConfinement,
    /// Name or id of its network.
    pub(super) network: &'a str,
    /// Control group below which the engine creates that of the container.
    pub(super) group: Option<String>,
}

pub(super) fn refused_error(why: String) -> AttemptError {
    AttemptError::CannotRun { reason: REFUSED_REASON, why }
}

/// Chooses the engine. `Ok(None)` means a plain process. With a warning if the image is ignored.
pub(super) async fn choose_engine(
    runtime: ImageRuntime,
    allow_process: bool,
    image: &str,
    dirs: OciDirs<'_>,
) -> Result<(Option<Engine>, Option<String>), AttemptError> {
    if NO_IMAGE.contains(&image) {
        return if allow_process { Ok((None, None)) } else { Err(refused_error(process_refusal(image))) };
    }
    if image.starts_with('-') {
        return Err(refused_error(format!("invalid image name `{image}`: must not start with `-`")));
    }
    let candidates: &[Engine] = match runtime {
        ImageRuntime::Process if !allow_process => return Err(refused_error(process_refusal(image))),
        ImageRuntime::Process => return Ok((None, Some(format!("image `{image}` was ignored")))),
        ImageRuntime::Auto => &[
            Engine::Docker("docker"),
            Engine::Docker(PODMAN),
            Engine::Apptainer("apptainer"),
            Engine::Apptainer("singularity"),
        ],
        ImageRuntime::Docker => &[Engine::Docker("docker")],
        ImageRuntime::Podman => &[Engine::Docker(PODMAN)],
        ImageRuntime::Apptainer => &[Engine::Apptainer("apptainer"), Engine::Apptainer("singularity")],
        ImageRuntime::Oci => &[],
    };
    for engine in candidates {
        if engine.is_available().await {
            return Ok((Some(*engine), None));
        }
    }
    let problem = match runtime {
        ImageRuntime::Auto | ImageRuntime::Oci => match check_oci(runtime, dirs).await {
            Ok(()) => return Ok((Some(Engine::Oci), None)),
            Err(problem) => problem,
        },
        ImageRuntime::Process | ImageRuntime::Docker | ImageRuntime::Podman | ImageRuntime::Apptainer => {
            String::new()
        }
    };
    if runtime == ImageRuntime::Auto {
        let why = format!(
            "cannot run image `{image}`: none of Docker, Podman and Apptainer is available on this host, and it cannot \
             run containers without one: {problem}"
        );
        return Err(AttemptError::CannotRun { reason: "image", why });
    }
    if runtime == ImageRuntime::Oci {
        let why = format!("this host cannot run containers without an engine: {problem}");
        return Err(AttemptError::Host(std::io::Error::other(why)));
    }
    let why = format!("{runtime:?} is not available on this host");
    Err(AttemptError::Host(std::io::Error::new(std::io::ErrorKind::NotFound, why)))
}

/// Checks whether this host can run containers without an engine.
async fn check_oci(runtime: ImageRuntime, dirs: OciDirs<'_>) -> Result<(), String> {
    // An engine that does not respond now would come back: the administrator wants containers to run in it.
    let is_root = rustix::process::geteuid().is_root();
    if runtime == ImageRuntime::Auto && is_root && is_engine_installed(Path::new("/")) {
        return Err("a container engine is installed, but does not respond".to_owned());
    }
    let (store, attempt) = (dirs.store.to_owned(), dirs.attempt.to_owned());
    let found = tokio::task::spawn_blocking(move || AttemptRuntime::find(&store, &attempt).map(drop)).await;
    found.unwrap_or_else(|error| Err(error.to_string()))
}

fn process_refusal(image: &str) -> String {
    format!(
        "`container_image` `{image}` would run as a plain process, which the dispatcher does not allow: \
         use an image of a container engine, or start the dispatcher with `--allow-process`"
    )
}

/// Checks that the policy of this host allows a plain process, independent of the executor's flags.
pub(super) fn check_process_allowed(policy: &Path) -> Result<(), AttemptError> {
    let policy = load_policy(policy)?;
    let why = match policy.processes(ProcessMode::Own, Vec::new()).mode {
        ProcessMode::Refused => "forbids it",
        ProcessMode::Confined if !rustix::process::geteuid().is_root() => {
            "requires confinement, but the executor is not root"
        }
        ProcessMode::Confined | ProcessMode::Own => return Ok(()),
    };
    let file = policy.file().display();
    Err(refused_error(format!("cannot run a plain process: the host's policy {why} (`processes` in {file})")))
}

pub(super) fn load_policy(policy: &Path) -> Result<Policy, AttemptError> {
    Policy::load(policy).map_err(|error| {
        AttemptError::Host(std::io::Error::other(windlass_model::error_chain::format_chain(&error)))
    })
}

/// Returns the confinement of a container under the policy of this host, or an error if the policy forbids it.
pub(super) fn confine_container(
    policy: &Path,
    engine: Engine,
    image: &str,
    network: Network,
    targets: &[String],
    gpus: Option<&str>,
) -> Result<ContainerConfinement, AttemptError> {
    let policy = load_policy(policy)?;
    let network = match (engine, network) {
        (Engine::Docker(_), Network::Bridge) => NetworkMode::Bridge,
        // Apptainer supports no other network without root.
        (Engine::Apptainer(_), _) | (Engine::Docker(_) | Engine::Oci, Network::Host) => NetworkMode::Host,
        (Engine::Oci, Network::Bridge) => AttemptRuntime::network(NetworkMode::Bridge),
    };
    let name = match engine {
        Engine::Docker(_) | Engine::Oci => image,
        Engine::Apptainer(_) => apptainer::image_name(image, policy.restricts_registries())?,
    };
    let devices = gpus.into_iter().flat_map(|gpus| gpus.split(',')).map(|gpu| {
        let path = format!("/dev/nvidia{}", gpu.trim());
        json!({ "path_on_host": path, "path_in_container": path })
    });
    let spec: TaskSpec = serde_json::from_value(json!({
        "id": uuid::Uuid::nil(), "name": "container", "image_name": name, "network_mode": network,
        "volume_mounts": targets.iter().map(|path| json!({ "name": "", "path": path })).collect::<Vec<_>>(),
        "gpu_devices": devices.collect::<Vec<_>>(),
    }))
    .map_err(|error| AttemptError::Host(error.into()))?;
    let numbered = |path: &str| (path.to_owned(), Ok(PathBuf::from(path)));
    let devices = spec.gpu_devices.iter().map(|device| numbered(&device.path_on_host)).collect();
    let image = if engine == Engine::Oci { mounts::resolve_paths(&spec).image } else { None };
    let seen = mounts::ResolvedPaths { devices, image, ..mounts::ResolvedPaths::default() };
    let verdict = policy.decide(&spec, &seen);
    if verdict.problems.is_empty() {
        Ok(container_confinement(&policy.limits(&spec), false, network))
    } else {
        Err(refused_error(policy.render(&verdict.problems)))
    }
}

/// Returns the address by which a program on the bridge reaches the server, if the server's address is a loopback.
pub(super) fn host_for_bridge(host: &str, gateway: Option<IpAddr>) -> String {
    let (name, port) = host.rsplit_once(':').unwrap_or((host, ""));
    let name = name.trim_start_matches('[').trim_end_matches(']');
    let is_loopback = name == "localhost" || name.parse::<IpAddr>().is_ok_and(|at| at.is_loopback());
    match gateway.filter(|_| is_loopback) {
        Some(IpAddr::V6(gateway)) => format!("[{gateway}]:{port}"),
        Some(gateway) => format!("{gateway}:{port}"),
        None => host.to_owned(),
    }
}

pub(super) async fn run_engine(program: &str, args: &[&str]) -> Result<String, String> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let output = command.output().await.map_err(|error| format!("failed to start `{program}`: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let message = String::from_utf8_lossy(&output.stderr);
    Err(message.trim().chars().take(ERROR_TEXT_MAX).collect())
}

impl Engine {
    async fn is_available(self) -> bool {
        match self {
            // Only a running engine reports a server version.
            Self::Docker(program) => {
                run_engine(program, &["version", "--format", "{{.Server.Version}}"]).await.is_ok()
            }
            Self::Apptainer(program) => run_engine(program, &["--version"]).await.is_ok(),
            Self::Oci => false,
        }
    }

    /// Gives a container of Podman and Apptainer the filter of system calls that Docker has: Podman's own permits more, and
    /// Apptainer has none.
    pub(super) fn filter_system_calls(
        self,
        confinement: &mut ContainerConfinement,
        dir: &Path,
    ) -> std::io::Result<()> {
        let file = dir.join("seccomp.json");
        let option = match self {
            Self::Docker(PODMAN) => write_profile(&file, &confinement.cap_add)?,
            Self::Apptainer(_) => write_profile_for_apptainer(&file, &confinement.cap_add)?,
            Self::Docker(_) | Self::Oci => return Ok(()),
        };
        confinement.security_opt.push(option);
        Ok(())
    }

    /// Returns whether the engine creates control groups itself, and does not leave them to systemd.
    pub(super) async fn creates_control_groups(self) -> bool {
        let program = match self {
            Self::Docker(program) => program,
            Self::Apptainer(_) => return false,
            Self::Oci => return true,
        };
        let format = if program == PODMAN { "{{.Host.CgroupManager}}" } else { "{{.CgroupDriver}}" };
        run_engine(program, &["info", "--format", format]).await.is_ok_and(|driver| driver == "cgroupfs")
    }

    /// Pulls the image. Called before the container is reported as running: a missing image does not use up an attempt.
    pub(super) async fn pull_image(self, image: &str) -> Result<(), AttemptError> {
        let program = match self {
            Self::Docker(program) => program,
            // Apptainer pulls when it starts; for the other see `oci`.
            Self::Apptainer(_) | Self::Oci => return Ok(()),
        };
        if run_engine(program, &["image", "inspect", "--format", "{{.Id}}", image]).await.is_ok() {
            return Ok(());
        }
        run_engine(program, &["pull", "--quiet", image]).await.map(drop).map_err(|message| {
            if is_image_missing(&message) {
                AttemptError::CannotRun {
                    reason: "image",
                    why: format!("failed to pull `{image}`: {message}"),
                }
            } else {
                AttemptError::Host(std::io::Error::other(format!("failed to pull `{image}`: {message}")))
            }
        })
    }

    /// Returns the command that runs the container, and the one that removes it.
    pub(super) fn words(self, order: &ContainerSpec<'_>) -> (Vec<String>, Vec<String>) {
        match self {
            Self::Docker(program) => (docker_command(program, order), removal_command(program, order.name)),
            Self::Apptainer(program) => (apptainer::command(program, order), Vec::new()),
            Self::Oci => (Vec::new(), Vec::new()),
        }
    }

    /// Reads from the engine how the container ended: whether it ran out of memory, and whether it was ever started.
    pub(super) async fn verdict(self, name: &str) -> EngineReport {
        let program = match self {
            Self::Docker(program) => program,
            Self::Apptainer(_) | Self::Oci => return EngineReport::default(),
        };
        let format = "{{.State.OOMKilled}}\t{{.State.StartedAt}}\t{{.State.Error}}";
        let message = match run_engine(program, &["inspect", "--format", format, name]).await {
            Ok(message) => message,
            Err(message) => {
                return EngineReport { lost: Some(("crashed", message)), ..EngineReport::default() };
            }
        };
        let mut parts = message.split('\t');
        let out_of_memory = parts.next() == Some("true");
        let never = parts.next().is_some_and(|at| at.starts_with("0001-"));
        let error = parts.next().unwrap_or_default().to_owned();
        EngineReport { out_of_memory, lost: never.then_some(("start_failed", error)) }
    }

    /// Sends SIGTERM to every process of a container, except for the first one, which ends with them.
    pub(super) async fn terminate_all(self, name: &str) -> Result<(), String> {
        let program = match self {
            Self::Docker(program) | Self::Apptainer(program) => program,
            // The first process of the container passes the signal on to all.
            Self::Oci => return Ok(()),
        };
        run_engine(program, &["exec", name, "/bin/sh", "-c", "kill -TERM -1"]).await.map(drop)
    }

    pub(super) async fn remove(self, name: &str) {
        if let Self::Docker(program) = self {
            // There is nothing to remove if it was never created.
            let _ = run_engine(program, &["rm", "--force", "--volumes", name]).await;
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct EngineReport {
    pub(super) out_of_memory: bool,
    /// Set if there is no exit status: the container never ran, or the engine no longer has it. A reason and the
    /// engine's message.
    pub(super) lost: Option<(&'static str, String)>,
}

impl EngineReport {
    /// Returns the final update of a container that has no exit status.
    pub(super) fn refusal(&self) -> Option<Value> {
        let (reason, why) = self.lost.as_ref()?;
        let status = json!({ "reason": reason, "error": format!("failed to run the container: {why}") });
        Some(json!({ "state": "Cancelled", "runtime_status": status }))
    }
}

/// Returns whether the engine reports that there is no such image: then no other host can pull it either.
fn is_image_missing(message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    ["not found", "manifest unknown", "access denied", "does not exist", "invalid reference", "unauthorized"]
        .iter()
        .any(|word| message.contains(word))
}

fn removal_command(program: &str, name: &str) -> Vec<String> {
    [program, "rm", "--force", "--volumes", name].map(str::to_owned).to_vec()
}

fn docker_command(program: &str, order: &ContainerSpec<'_>) -> Vec<String> {
    let mut words =
        [program, "run", "--name", order.name, "--init", "--pull", "never"].map(str::to_owned).to_vec();
    let mut option = |name: &str, value: String| words.extend([name.to_owned(), value]);
    option("--label", format!("windlass.attempt={}", order.name));
    let kept_in = &order.confinement;
    option("--network", order.network.to_owned());
    option("--ipc", kept_in.ipc.to_owned());
    for capability in &kept_in.cap_drop {
        option("--cap-drop", capability.clone());
    }
    for capability in &kept_in.cap_add {
        option("--cap-add", capability.clone());
    }
    for given in &kept_in.security_opt {
        option("--security-opt", given.clone());
    }
    if let Some(group) = &order.group {
        option("--cgroup-parent", group.clone());
    }
    if let Some(pids) = kept_in.pids_limit {
        option("--pids-limit", pids.to_string());
    }
    if program == PODMAN {
        for (name, value) in podman_ulimits() {
            option("--ulimit", format!("{name}={value}:{value}"));
        }
    }
    // Output is read from the pipe only.
    option("--log-driver", "none".to_owned());
    if let Some(memory) = order.memory {
        option("--memory", format!("{memory}b"));
        option("--memory-swap", format!("{memory}b"));
    }
    if let Some(cpus) = order.cpus {
        option("--cpus", cpus.to_string());
    }
    if let Some(gpus) = &order.gpus {
        // In its own quotes: a comma would start another option.
        option("--gpus", format!("\"device={gpus}\""));
    }
    for (from, to) in &order.binds {
        option("--volume", format!("{}:{to}", from.display()));
    }
    if let Some(file) = &order.env_file {
        option("--env-file", file.display().to_string());
    }
    for name in &order.names {
        option("--env", (*name).to_owned());
    }
    if !order.cwd.is_empty() {
        option("--workdir", order.cwd.to_owned());
    }
    let (program, rest) = order.command.split_first().map_or(("", order.command), |(one, rest)| (one, rest));
    option("--entrypoint", program.to_owned());
    words.push(order.image.to_owned());
    words.extend(rest.iter().cloned());
    words
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::shim::docker::NETWORK;

    fn order<'a>(command: &'a [String]) -> ContainerSpec<'a> {
        ContainerSpec {
            name: "windlass-c.1",
            image: "debian:12",
            command,
            cwd: "/inside",
            binds: vec![(PathBuf::from("/tmp/r/out"), "/out".to_owned())],
            env_file: Some(PathBuf::from("/tmp/r/environment")),
            group: Some("/windlass/exec/c.1.container".to_owned()),
            names: vec!["KEY"],
            memory: Some(1024),
            cpus: Some(2),
            gpus: Some("0,1".to_owned()),
            confinement: ContainerConfinement {
                cap_drop: vec!["ALL".to_owned()],
                cap_add: vec!["CHOWN".to_owned()],
                security_opt: vec!["no-new-privileges".to_owned()],
                pids_limit: Some(100),
                ipc: "private",
                network: NETWORK,
            },
            network: "4f1c",
        }
    }

    #[test]
    fn docker_arguments_are_complete_and_contain_no_environment_values() {
        let command = ["sh", "-c", "echo 'a b'"].map(str::to_owned);
        let (words, after) = Engine::Docker("docker").words(&order(&command));
        assert_eq!(
            words.join(" "),
            "docker run --name windlass-c.1 --init --pull never --label windlass.attempt=windlass-c.1 --network \
             4f1c --ipc private --cap-drop ALL --cap-add CHOWN --security-opt no-new-privileges \
             --cgroup-parent /windlass/exec/c.1.container --pids-limit 100 --log-driver none --memory 1024b \
             --memory-swap 1024b --cpus 2 --gpus \"device=0,1\" --volume /tmp/r/out:/out --env-file /tmp/r/environment --env KEY --workdir /inside --entrypoint sh debian:12 -c echo 'a b'"
        );
        assert_eq!(after.join(" "), "docker rm --force --volumes windlass-c.1");
        // The same for Podman, except for limits that it cannot always raise as it would by itself.
        let (mut podman, _) = Engine::Docker(PODMAN).words(&order(&command));
        let first = podman.iter().position(|word| word == "--ulimit").unwrap();
        let limits: Vec<String> = podman.drain(first..first + 4).collect();
        assert!(limits[1].starts_with("nofile=") && limits[3].starts_with("nproc="), "{limits:?}");
        assert_eq!((podman.remove(0).as_str(), &podman[..]), (PODMAN, &words[1..]));
    }

    #[test]
    fn podman_and_apptainer_get_the_filter_of_system_calls_of_docker() {
        let dir = windlass_testkit::temp_dir("filter").unwrap();
        let options = |engine: Engine| {
            let mut confinement = order(&[]).confinement;
            engine.filter_system_calls(&mut confinement, dir.path()).unwrap();
            confinement.security_opt
        };
        assert_eq!(options(Engine::Docker("docker")), ["no-new-privileges"]);
        let file = dir.path().join("seccomp.json");
        let filtered = ["no-new-privileges".to_owned(), format!("seccomp={}", file.display())];
        assert_eq!(options(Engine::Docker(PODMAN)), filtered);
        assert_eq!(options(Engine::Apptainer("apptainer")), filtered);
        let written: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
        assert_eq!(written["defaultAction"], "SCMP_ACT_ERRNO");
    }

    #[test]
    fn apptainer_runs_images_from_registries_and_from_files() {
        let command = ["true".to_owned()];
        let (words, after) = Engine::Apptainer("apptainer").words(&order(&command));
        let root = if rustix::process::geteuid().is_root() { " --no-privs" } else { "" };
        let want = "--nv --bind /tmp/r/out:/out --pwd /inside docker://debian:12 true";
        let want = format!("apptainer exec --containall --no-home{root} {want}");
        assert_eq!((words.join(" "), after), (want, Vec::new()));
        let mut filtered = order(&command);
        filtered.confinement.security_opt.push("seccomp=/tmp/r/seccomp.json".to_owned());
        let (words, _) = Engine::Apptainer("apptainer").words(&filtered);
        assert!(words.join(" ").contains(" --security seccomp:/tmp/r/seccomp.json "), "{words:?}");
        let file = ContainerSpec { image: "/images/a.sif", ..order(&command) };
        assert!(Engine::Apptainer("apptainer").words(&file).0.contains(&"/images/a.sif".to_owned()));
    }

    fn dirs() -> OciDirs<'static> {
        OciDirs { store: Path::new("/nonexistent"), attempt: Path::new("/nonexistent") }
    }

    fn reason(stopped: AttemptError) -> (&'static str, String) {
        let AttemptError::CannotRun { reason, why } = stopped else { panic!("{stopped}") };
        (reason, why)
    }

    #[tokio::test]
    async fn plain_processes_are_refused_unless_the_operator_allows_them() {
        for image in ["none", ""] {
            let (word, why) =
                reason(choose_engine(ImageRuntime::Auto, false, image, dirs()).await.unwrap_err());
            assert_eq!(word, REFUSED_REASON);
            assert!(why.contains("`--allow-process`"), "{why}");
            assert_eq!(choose_engine(ImageRuntime::Auto, true, image, dirs()).await.unwrap(), (None, None));
        }
        let (word, _) =
            reason(choose_engine(ImageRuntime::Process, false, "debian", dirs()).await.unwrap_err());
        assert_eq!(word, REFUSED_REASON);
        let ignored = choose_engine(ImageRuntime::Process, true, "debian", dirs()).await.unwrap();
        assert_eq!(ignored, (None, Some("image `debian` was ignored".to_owned())));
    }

    #[tokio::test]
    async fn image_names_that_look_like_options_are_refused() {
        for image in ["--privileged", "-v/:/host", "--bind=/:/x docker://a"] {
            for runtime in [
                ImageRuntime::Auto,
                ImageRuntime::Docker,
                ImageRuntime::Apptainer,
                ImageRuntime::Oci,
                ImageRuntime::Process,
            ] {
                let (word, why) = reason(choose_engine(runtime, true, image, dirs()).await.unwrap_err());
                assert!(word == REFUSED_REASON && why.contains(image), "{why}");
            }
        }
    }

    #[test]
    fn the_host_policy_applies_to_queue_containers() {
        let dir = windlass_testkit::temp_dir("policy").unwrap();
        let file = dir.path().join("policy.yml");
        let write = |text: &str| fs::write(&file, text).unwrap();
        let docker = Engine::Docker("docker");
        let request =
            |engine, image: &str, network| confine_container(&file, engine, image, network, &[], None);
        write("pids: 77\ncapabilities: [CHOWN]\nhost_network: false\nregistries: [ghcr.io/team]\n");
        let kept_in = request(docker, "ghcr.io/team/x", Network::Bridge).unwrap();
        assert_eq!((kept_in.pids_limit, kept_in.network), (Some(77), NETWORK));
        assert_eq!((kept_in.cap_drop, kept_in.cap_add), (vec!["ALL".to_owned()], vec!["CHOWN".to_owned()]));
        assert_eq!(kept_in.security_opt, ["no-new-privileges"]);
        for (engine, image, network, reported) in [
            (docker, "evil/x", Network::Bridge, "not from an allowed registry"),
            (docker, "ghcr.io/team/x", Network::Host, "network_mode host"),
            (Engine::Apptainer("apptainer"), "docker://ghcr.io/team/x", Network::Bridge, "network_mode host"),
            (Engine::Apptainer("apptainer"), "/etc/passwd", Network::Bridge, "is a file"),
            (Engine::Oci, "evil/x", Network::Bridge, "not from an allowed registry"),
            (Engine::Oci, "ghcr.io/team/x", Network::Host, "network_mode host"),
            (Engine::Oci, "oci:/etc", Network::Bridge, "/etc"),
        ] {
            let (word, why) = reason(request(engine, image, network).unwrap_err());
            assert!(word == REFUSED_REASON && why.contains(reported), "{image}: {why}");
        }
        write("");
        for image in ["/", "/etc", "instance://other", "dir:///etc"] {
            let (word, why) = reason(request(Engine::Apptainer("a"), image, Network::Bridge).unwrap_err());
            assert!(word == REFUSED_REASON && why.contains(image), "{why}");
        }
        for target in ["/proc/x", "/a:b", "/a/../b"] {
            let requested =
                confine_container(&file, docker, "x", Network::Bridge, &[target.to_owned()], None);
            let (word, why) = reason(requested.unwrap_err());
            assert!(word == REFUSED_REASON && why.contains("mount at"), "{why}");
        }
        assert_eq!(request(docker, "x", Network::Host).unwrap().network, "host");
        check_process_allowed(&file).unwrap();
        write("processes: refused\n");
        let (word, why) = reason(check_process_allowed(&file).unwrap_err());
        assert!(word == REFUSED_REASON && why.contains("`processes` in"), "{why}");
    }

    #[test]
    fn a_server_on_loopback_is_reached_through_the_bridge_gateway() {
        let gateway = Some("10.1.2.1".parse().unwrap());
        for (host, want) in [
            ("127.0.0.1:3000", "10.1.2.1:3000"),
            ("localhost:3443", "10.1.2.1:3443"),
            ("[::1]:3000", "10.1.2.1:3000"),
            ("windlass.example:3000", "windlass.example:3000"),
            ("10.0.0.7:3000", "10.0.0.7:3000"),
        ] {
            assert_eq!(host_for_bridge(host, gateway), want);
        }
        assert_eq!(host_for_bridge("127.0.0.1:3000", None), "127.0.0.1:3000");
    }

    #[test]
    fn a_missing_image_is_distinguished_from_a_failing_engine() {
        for message in
            ["Error response from daemon: manifest unknown", "pull access denied for x", "not found: y"]
        {
            assert!(is_image_missing(message), "{message}");
        }
        for message in
            ["Cannot connect to the Docker daemon", "dial tcp: i/o timeout", "no space left on device"]
        {
            assert!(!is_image_missing(message), "{message}");
        }
    }
}
