//! The program of a container: its directory, its control group, its output and its exit.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::{Child, ChildStdin, Command},
    sync::mpsc,
    time::Instant,
};

use super::{
    AttemptError, container_group, container_network,
    guard::{ENVIRONMENT_FILE, ROOT_DIR, START_ERROR_FILE, attempt_groups},
    image::{
        ContainerSpec, Engine, EngineReport, ImageRuntime, Network, OciDirs, check_process_allowed,
        choose_engine, confine_container, host_for_bridge,
    },
    oci::{self, OciContainer},
    process_isolation::{UserClaim, UserRange, chown_tree, reject_symlinks},
    program_environment::{ENGINE_VARIABLES, GPU_VARIABLES, engine_variables, environment, is_multiline},
    program_mounts::{MountAccess, create_mounts, path_in_root},
    work_dir::remove_files,
};
use crate::{
    cgroup::task::{TaskGroup, TaskLimits},
    shim::{
        docker::ContainerConfinement,
        oci::attempt::{AttemptContainer, ImageClaim},
    },
};
use windlass_model::queue::{JOB_VARIABLE, reuse::IMAGE_IGNORED};

/// Exit code of a program that was killed.
const EXIT_KILLED: i32 = 137;
/// Maximum number of output chunks that wait to be received. A program that writes faster is blocked.
const OUTPUT_QUEUE_MAX: usize = 64;
const CHUNK_BYTES: usize = 64 * 1024;
/// Reason for which a program was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndRequest {
    Stopped,
    TimedOut,
}

/// A request to the program to exit.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProgramEnd {
    pub(super) request: EndRequest,
    /// Time at which the program was signalled.
    pub(super) at: Instant,
    /// Time that it has to exit.
    pub(super) grace: Duration,
    pub(super) was_killed: bool,
}

impl ProgramEnd {
    /// Returns the message about a program that was stopped; nothing else describes one that was killed.
    fn message(&self) -> String {
        if self.was_killed {
            let secs = self.grace.as_secs();
            format!("it was still running {secs} s after the stop request (`stop_duration`) and was killed")
        } else {
            "it was stopped".to_owned()
        }
    }
}

/// Inputs of an attempt.
pub(super) struct ProgramSpec<'a> {
    /// `UUID.NUMBER`.
    pub(super) name: &'a str,
    pub(super) record: &'a Value,
    pub(super) secrets: &'a Value,
    pub(super) dir: &'a Path,
    /// True if the directory is removed with the attempt.
    pub(super) is_own: bool,
    /// Token for the program.
    pub(super) token: &'a str,
    pub(super) host: &'a str,
    /// True if a program cannot verify the certificate of `host`.
    pub(super) is_unknown: bool,
    pub(super) runtime: ImageRuntime,
    pub(super) allow_process: bool,
    /// User ids for plain processes, used if the executor is root.
    pub(super) users: UserRange,
    /// Paths that are hidden from plain processes.
    pub(super) hidden: &'a [PathBuf],
    pub(super) network: Network,
    /// Images of containers without an engine.
    pub(super) images: &'a Path,
    /// Policy file of this host.
    pub(super) policy: &'a Path,
}

pub(super) struct Program {
    /// Command that the guard runs.
    command: Vec<String>,
    /// Command that the guard runs if the executor dies.
    after: Vec<String>,
    environment: Vec<(String, String)>,
    dir: PathBuf,
    is_own: bool,
    cwd: PathBuf,
    /// `UUID.NUMBER`, also the name of the control group.
    attempt: String,
    group: TaskGroup,
    oom_before: u64,
    engine: Option<Engine>,
    /// Image of a container without an engine.
    image: Option<ImageClaim>,
    /// True if it is a job of a run.
    is_job: bool,
    /// Separate user of a plain process.
    claim: Option<UserClaim>,
    hidden: Vec<PathBuf>,
    /// Set if the image was ignored.
    warning: Option<String>,
    started: std::sync::OnceLock<std::time::Instant>,
}

pub(super) struct RunningProgram {
    pub(super) child: Child,
    pub(super) output: mpsc::Receiver<(&'static str, Vec<u8>)>,
    guard: Option<Pid>,
    /// Pipe to the guard, which has the other end. Not left in the child: waiting for the child would close it.
    lifeline: Option<ChildStdin>,
}

impl RunningProgram {
    /// Sends SIGTERM to the guard, which forwards it to the program.
    fn request_stop(&self) {
        self.guard.into_iter().for_each(terminate);
    }

    /// Closes the pipe. The guard treats that as the death of the executor and kills everything.
    pub(super) fn kill(&mut self) {
        drop(self.lifeline.take());
    }
}

fn terminate(guard: Pid) {
    // A process that has already exited needs no signal.
    let _ = kill_process(guard, Signal::TERM);
}

/// Options for a new file that no other user can read.
pub(super) fn private_file_options() -> fs::OpenOptions {
    let mut options = fs::File::options();
    options.create(true).truncate(true).write(true).mode(0o600);
    options
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

impl Program {
    /// Performs everything that can fail before the program runs.
    pub(super) async fn prepare(given: &ProgramSpec<'_>) -> Result<Self, AttemptError> {
        let record = given.record;
        let image = record["container_image"].as_str().unwrap_or_default();
        let dirs = OciDirs { store: given.images, attempt: given.dir };
        let (engine, warning) = choose_engine(given.runtime, given.allow_process, image, dirs).await?;
        let gpus = std::env::var(GPU_VARIABLES[0]).ok().filter(|gpus| !gpus.is_empty());
        let mut confinement = None;
        let mut network = None;
        let mut host = given.host.to_owned();
        if let Some(engine) = engine {
            let wanted = [&record["mounts"], given.secrets].into_iter().filter_map(Value::as_object);
            let wanted: Vec<String> = wanted.flat_map(|mounts| mounts.keys().cloned()).collect();
            let mut kept_in =
                confine_container(given.policy, engine, image, given.network, &wanted, gpus.as_deref())?;
            engine.filter_system_calls(&mut kept_in, given.dir).map_err(AttemptError::Host)?;
            if kept_in.network != "host" {
                network = container_network::ensure(engine).await?;
                let gateway = network.as_ref().and_then(|network| network.gateway);
                host = host_for_bridge(&host, gateway);
            }
            engine.pull_image(image).await?;
            confinement = Some(kept_in);
        }
        let mut container = None;
        if let (Some(Engine::Oci), Some(kept_in)) = (engine, &confinement) {
            let found =
                OciContainer::prepare(dirs, image, given.name, kept_in, given.policy, gpus.as_deref())
                    .await?;
            host = host_for_bridge(&host, found.gateway);
            container = Some(found);
        }
        if engine.is_none() {
            check_process_allowed(given.policy)?;
        }
        let claim = if engine.is_none() && rustix::process::geteuid().is_root() {
            Some(UserClaim::take(given.users, given.name).map_err(AttemptError::Host)?)
        } else {
            None
        };
        let root = given.dir.join(ROOT_DIR);
        fs::create_dir_all(&root).map_err(AttemptError::Host)?;
        fs::set_permissions(&root, fs::Permissions::from_mode(0o700)).map_err(AttemptError::Host)?;
        let access = if engine.is_some() { MountAccess::AnyUserInContainer } else { MountAccess::Owner };
        let mut targets = create_mounts(&root, &record["mounts"], access)?;
        targets.extend(create_mounts(&root, given.secrets, access)?);
        let requirements = &record["runtime_constraints"];
        let (memory, cpus) = (requirements["ram"].as_u64(), requirements["vcpus"].as_u64());
        // The engine limits its containers; its command-line program needs no limit.
        let limits = match engine {
            None => TaskLimits { memory, ..TaskLimits::default() },
            Some(Engine::Oci) => oci::group_limits(memory, cpus, confinement.as_ref()),
            Some(Engine::Docker(_) | Engine::Apptainer(_)) => TaskLimits::default(),
        };
        let (group, unenforced) = attempt_groups().map_err(AttemptError::Host)?.make(given.name, &limits);
        for limit in unenforced {
            super::print_message(&limit.to_string());
        }
        if claim.is_some() || matches!(engine, Some(Engine::Apptainer(_))) {
            container_group::block_metadata(&group);
        }
        let oom_before = group.group.oom_kills();
        let mut work = Self {
            command: strings(&record["command"]),
            after: Vec::new(),
            environment: environment(given, &host),
            dir: given.dir.to_owned(),
            is_own: given.is_own,
            cwd: root.clone(),
            attempt: given.name.to_owned(),
            group,
            oom_before,
            engine,
            image: None,
            is_job: record["environment"][JOB_VARIABLE].is_string(),
            claim,
            hidden: given.hidden.to_vec(),
            warning,
            started: std::sync::OnceLock::new(),
        };
        let requested = record["cwd"].as_str().unwrap_or_default();
        let ready = match (engine, confinement) {
            (Some(Engine::Oci), Some(confinement)) => {
                let binds =
                    targets.iter().map(|target| (path_in_root(&root, target), target.clone())).collect();
                let group = container_group::create_for(Engine::Oci, given.name, confinement.network).await;
                work.prepare_oci(container, &confinement, binds, (memory, cpus), requested, group).await
            }
            (Some(engine), Some(confinement)) => {
                let binds =
                    targets.iter().map(|target| (path_in_root(&root, target), target.clone())).collect();
                let name = work.container_name();
                let variables = work.environment.clone();
                let (env_file, names) = match engine_variables(engine, &variables, &root) {
                    Ok(reported) => reported,
                    Err(stopped) => {
                        work.clean_up().await;
                        return Err(stopped);
                    }
                };
                let order = ContainerSpec {
                    group: container_group::create_for(engine, given.name, confinement.network).await,
                    name: &name,
                    image,
                    command: &work.command.clone(),
                    cwd: if requested == "." { "" } else { requested },
                    binds,
                    env_file,
                    names,
                    memory,
                    cpus,
                    gpus,
                    network: network.as_ref().map_or(confinement.network, |network| network.name.as_str()),
                    confinement,
                };
                work.prepare_container(engine, &order);
                Ok(())
            }
            (None | Some(_), _) => work.prepare_process(&root, requested),
        };
        match ready {
            Ok(()) => Ok(work),
            Err(stopped) => {
                work.clean_up().await;
                Err(stopped)
            }
        }
    }

    fn prepare_process(&mut self, root: &Path, cwd: &str) -> Result<(), AttemptError> {
        self.cwd = if cwd.is_empty() || cwd == "." { root.to_owned() } else { path_in_root(root, cwd) };
        fs::create_dir_all(&self.cwd).map_err(AttemptError::Host)?;
        let path = self.environment.iter().rfind(|(name, _)| name == "PATH").map(|(_, value)| value.clone());
        let path = path
            .or_else(|| std::env::var("PATH").ok())
            .unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".to_owned());
        let program = self.command.first().cloned().unwrap_or_default();
        if !program_exists(&program, &path, &self.cwd) {
            let why = format!("program `{program}` does not exist on this host");
            return Err(AttemptError::CannotRun { reason: "start_failed", why });
        }
        let root = root.display().to_string();
        let own = [("PATH", path), ("HOME", root.clone()), ("WINDLASS_ROOT", root)];
        let own = own.map(|(name, value)| (name.to_owned(), value));
        // Variables of the container come last and therefore take precedence.
        self.environment.splice(0..0, own);
        match &self.claim {
            Some(claim) => chown_tree(&self.dir.join(ROOT_DIR), claim.uid).map_err(AttemptError::Host),
            None => Ok(()),
        }
    }

    /// Writes the files of a container without an engine.
    async fn prepare_oci(
        &mut self,
        container: Option<OciContainer>,
        confinement: &ContainerConfinement,
        binds: Vec<(PathBuf, String)>,
        (memory, cpus): (Option<u64>, Option<u64>),
        cwd: &str,
        group: Option<String>,
    ) -> Result<(), AttemptError> {
        let missing = || AttemptError::Host(io::Error::other("the image is missing"));
        let mut container = container.ok_or_else(missing)?;
        if !container.gpus.is_empty() {
            // The container has its own GPUs only, which the driver numbers from zero.
            for name in GPU_VARIABLES {
                let is_inherited =
                    |one: &(String, String)| one.0 == name && std::env::var(name).as_ref() == Ok(&one.1);
                let at = self.environment.iter().position(is_inherited);
                at.map(|at| self.environment.remove(at));
            }
        }
        let name = self.container_name();
        let spec = AttemptContainer {
            dir: &self.dir.clone(),
            name: &name,
            image: &container.image.clone(),
            command: &std::mem::take(&mut self.command),
            stops_all: self.is_job,
            cwd: if cwd == "." { "" } else { cwd },
            binds,
            env: std::mem::take(&mut self.environment),
            memory,
            cpus,
            gpus: std::mem::take(&mut container.gpus),
            limits: oci::policy_limits(confinement),
            network: oci::network_mode(confinement),
            group: &group.unwrap_or_else(|| container_group::path(&self.attempt)),
        };
        let (command, image) = container.into_command(spec, &self.dir.join(START_ERROR_FILE)).await?;
        self.command = command;
        self.image = Some(image);
        Ok(())
    }

    fn prepare_container(&mut self, engine: Engine, order: &ContainerSpec<'_>) {
        (self.command, self.after) = engine.words(order);
        for words in [&mut self.command, &mut self.after] {
            // By its path: the container may set its own `PATH`.
            if let Some(program) = words.first_mut() {
                *program = program_path(program);
            }
        }
        // The engine's program receives its own variables, and of the container's only those that do not affect it:
        // otherwise the author of a container could load a library into it.
        let theirs =
            ENGINE_VARIABLES.iter().filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?)));
        let mut environment: Vec<(String, String)> = theirs.collect();
        match engine {
            Engine::Apptainer(_) => {
                let inside = |name: &str| format!("APPTAINERENV_{name}");
                environment.extend(self.environment.drain(..).map(|(name, value)| (inside(&name), value)));
            }
            Engine::Docker(_) => {
                environment.extend(self.environment.drain(..).filter(|(_, value)| is_multiline(value)));
            }
            // They are in the configuration of the container.
            Engine::Oci => {}
        }
        self.environment = environment;
    }

    pub(super) fn start(&self) -> io::Result<RunningProgram> {
        // Not as the guard's own environment: these variables belong to the program, and other processes must not read
        // them.
        let mut file = private_file_options().open(self.dir.join(ENVIRONMENT_FILE))?;
        file.write_all(json!(self.environment).to_string().as_bytes())?;
        let mut command = Command::new("/proc/self/exe");
        command.arg("exec-guard").arg("--dir").arg(&self.dir).args(["--group", &self.attempt]);
        if self.is_own {
            command.arg("--whole");
        }
        if self.engine.is_none() {
            command.arg("--plain");
        }
        if let Some(claim) = &self.claim {
            // Directories of attempts have a common parent, unless each has a separate location.
            let above = self.dir.parent().filter(|_| !self.is_own);
            command.args(["--user", &claim.uid.to_string()]).arg("--apart").arg(above.unwrap_or(&self.dir));
            for path in &self.hidden {
                command.arg("--hide").arg(path);
            }
        }
        for word in &self.after {
            command.arg("--after").arg(word);
        }
        command
            .arg("--")
            .args(&self.command)
            .env_clear()
            .current_dir(&self.cwd)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        let mut child = command.spawn()?;
        let _ = self.started.set(std::time::Instant::now());
        let (pieces, output) = mpsc::channel(OUTPUT_QUEUE_MAX);
        if let Some(stdout) = child.stdout.take() {
            tokio::spawn(forward_output("stdout", stdout, pieces.clone()));
        }
        if let Some(stderr) = child.stderr.take() {
            tokio::spawn(forward_output("stderr", stderr, pieces));
        }
        let guard = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let lifeline = child.stdin.take();
        Ok(RunningProgram { child, output, guard, lifeline })
    }

    /// Name of the container in the engine.
    fn container_name(&self) -> String {
        format!("windlass-{}", self.attempt)
    }

    /// Sends SIGTERM to the program. An engine forwards it to the first process of a container only; in that of a job,
    /// which is a script, every process gets it.
    pub(super) fn request_stop(&self, running: &RunningProgram) {
        match self.engine.filter(|_| self.is_job) {
            Some(engine @ Engine::Docker(_)) => {
                let (name, guard) = (self.container_name(), running.guard);
                tokio::spawn(async move {
                    // A container that does not run yet.
                    if engine.terminate_all(&name).await.is_err() {
                        guard.into_iter().for_each(terminate);
                    }
                });
            }
            Some(Engine::Apptainer(_) | Engine::Oci) | None => running.request_stop(),
        }
    }

    pub(super) async fn kill(&self) {
        self.kill_leftovers();
        if let Some(engine) = self.engine {
            engine.remove(&self.container_name()).await;
        }
    }

    /// Kills processes that outlived the program; the engine still has the exit status.
    pub(super) fn kill_leftovers(&self) {
        self.group.kill();
        if let Some(group) = self.oci_group() {
            group.kill();
        }
    }

    /// Group of a container without an engine, if it is not that of the attempt.
    fn oci_group(&self) -> Option<TaskGroup> {
        let is_separate = self.image.is_some() && rustix::process::geteuid().is_root();
        is_separate.then(|| container_group::find_container(&self.attempt).ok()).flatten()
    }

    /// Builds the final update of the container: how it ended, and what it used.
    pub(super) async fn ending(&self, status: ExitStatus, end: Option<ProgramEnd>) -> Value {
        let mut message = json!({ "usage": self.usage() });
        if let Some(warning) = &self.warning {
            message["warning"] = warning.as_str().into();
            message[IMAGE_IGNORED] = "true".into();
        }
        let verdict = match self.engine {
            Some(engine) => engine.verdict(&self.container_name()).await,
            None => EngineReport::default(),
        };
        if let Ok(why) = fs::read_to_string(self.dir.join(START_ERROR_FILE)) {
            message["reason"] = "start_failed".into();
            message["error"] = format!("cannot start the program: {why}").into();
            return json!({ "state": "Cancelled", "runtime_status": message });
        }
        if let (None, Some(refusal)) = (end, verdict.refusal()) {
            return refusal;
        }
        let own_kills = self.oci_group().map_or(0, |group| group.group.oom_kills());
        if verdict.out_of_memory || own_kills > 0 || self.group.group.oom_kills() > self.oom_before {
            message["reason"] = "oom_killed".into();
            message["error"] = "it used more memory than it requested".into();
            return json!({ "state": "Complete", "exit_code": EXIT_KILLED, "runtime_status": message });
        }
        let exit_code = end.map(|end| if end.was_killed { Some(EXIT_KILLED) } else { status.code() });
        match end {
            Some(ProgramEnd { request: EndRequest::TimedOut, .. }) => {
                message["reason"] = "max_run_time".into();
                message["error"] = "it exceeded `max_run_time`".into();
                json!({ "state": "Cancelled", "exit_code": exit_code, "runtime_status": message })
            }
            Some(end @ ProgramEnd { request: EndRequest::Stopped, .. }) => {
                message["error"] = end.message().into();
                json!({ "state": "Cancelled", "exit_code": exit_code, "runtime_status": message })
            }
            // The status of a guard that was killed does not describe the program.
            None if status.code().is_none() => {
                message["reason"] = "crashed".into();
                message["error"] = "its guard process was killed".into();
                json!({ "state": "Cancelled", "runtime_status": message })
            }
            None => {
                json!({ "state": "Complete", "exit_code": status.code(), "runtime_status": message })
            }
        }
    }

    /// Returns the resource usage. Containers of Docker run in groups of the engine, which are not counted here.
    fn usage(&self) -> Value {
        let own = self.oci_group();
        let group = &own.as_ref().unwrap_or(&self.group).group;
        let counted = match self.engine {
            None | Some(Engine::Apptainer(_) | Engine::Oci) => true,
            Some(Engine::Docker(_)) => false,
        };
        let wall = self.started.get().map(|at| u64::try_from(at.elapsed().as_micros()).unwrap_or(u64::MAX));
        let mut usage = json!({
            "cpu_us": group.usage().cpu_us.filter(|_| counted),
            "memory_peak": group.memory_peak().filter(|_| counted),
            "wall_us": wall,
        });
        if let Some(usage) = usage.as_object_mut() {
            usage.retain(|_, value| !value.is_null());
        }
        usage
    }

    /// Returns the host's path of a path of the container, once none of its processes run. Changes the owner of files
    /// of the program's user to root.
    pub(super) fn reclaim_path(&self, path: &str) -> io::Result<PathBuf> {
        let root = self.dir.join(ROOT_DIR);
        let path = reject_symlinks(&root, &path_in_root(&root, path))?;
        if self.claim.is_some() && path.exists() {
            chown_tree(&path, 0)?;
        }
        Ok(path)
    }

    pub(super) async fn clean_up(&self) {
        if let Some(engine) = self.engine {
            engine.remove(&self.container_name()).await;
            container_group::remove(&self.attempt);
        }
        if let Err(error) = self.group.remove() {
            super::print_message(&format!("failed to remove the control group: {error}"));
        }
        remove_files(&self.dir, false);
        let _ = fs::remove_file(self.dir.join(ENVIRONMENT_FILE));
    }
}

fn program_exists(program: &str, path: &str, cwd: &Path) -> bool {
    if program.contains('/') {
        return cwd.join(program).is_file();
    }
    !program.is_empty() && path.split(':').any(|dir| Path::new(dir).join(program).is_file())
}

/// Returns the path of a program found in `PATH`; its name if it is not found.
fn program_path(program: &str) -> String {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join(program)).find(|path| path.is_file());
    found.map_or_else(|| program.to_owned(), |path| path.display().to_string())
}

async fn forward_output(
    name: &'static str,
    mut from: impl AsyncRead + Unpin,
    to: mpsc::Sender<(&'static str, Vec<u8>)>,
) {
    let mut buffer = vec![0; CHUNK_BYTES];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        if to.send((name, buffer[..length].to_vec())).await.is_err() {
            break;
        }
    }
}
