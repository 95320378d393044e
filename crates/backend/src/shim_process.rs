//! Shim as a process of this machine: enrolled, started detached, found again, replaced and stopped.
//!
//! The process has its own session and outlives the process that started it. Its whole state is in its home, so that
//! any process of the same user finds it: owner (`enrolment.json`), running process (`lock`), build (`program.json`),
//! log (`shim.log`).

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::{
    process::{Child, Command},
    time::{Instant, sleep, timeout},
};
use windlass_api::{
    agent::{
        Health, client,
        shim::{ProcessMode, TaskStatus, TerminateRequest},
    },
    unix,
};
use windlass_model::{error_chain::format_chain, id::InstanceId};

use crate::{
    BackendError,
    agent_program::{AgentProgram, ProgramError, ProgramStamp, is_older, tail},
};

/// Directory of the volumes that the agent stores as directories.
pub(crate) const VOLUMES_DIR: &str = "volumes";
const SOCKET_FILE: &str = "shim.sock";
const ENROLMENT_FILE: &str = "enrolment.json";
const LOCK_FILE: &str = "lock";
const LOG_FILE: &str = "shim.log";
const BUILD_FILE: &str = "program.json";
const TASKS_DIR: &str = "tasks";
/// Time from the start to the first response. If a container engine is slow to start, the next check finds the agent.
const READY_WITHIN: Duration = Duration::from_secs(20);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// A shim that is stopped finishes the calls in flight.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for which a home is locked to start or stop its shim.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Killing takes moments; a task that is blocked by a dead disk is retried later.
const TASKS_TIMEOUT: Duration = Duration::from_secs(30);
/// Higher than the epoch of any other caller.
const MAX_EPOCH: i64 = i64::MAX;
const LOG_BYTES_MAX: u64 = 1024 * 1024;
const LOG_LINE_MAX: usize = 1000;
/// Message of a shim that finds another one in its home.
const HOME_IN_USE: &str = "in use by another shim";
const START_ATTEMPTS_MAX: u32 = 20;
const RETRY_DELAY: Duration = Duration::from_millis(50);
/// Environment variables that are passed on. The server's environment is not inherited as a whole, because it contains
/// the admin's token.
const INHERITED_VARIABLES: &[&str] = &[
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
    "DOCKER_HOST",
    "WINDLASS_AGENT_POLICY",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
];

#[derive(Debug, thiserror::Error)]
pub enum ShimProcessError {
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error("failed to {what} {}", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the agent did not start: {message}")]
    Ended { message: String },
    #[error("the agent at {} did not respond within {} s: {message}", socket.display(), READY_WITHIN.as_secs())]
    Silent { socket: PathBuf, message: String },
    #[error("failed to stop the agent: process {pid} is still running")]
    StillRunning { pid: i32 },
    #[error("timed out waiting for {}: another process is using it", path.display())]
    Locked { path: PathBuf },
    #[error("request to the agent failed")]
    Request(#[from] client::ShimError),
    #[error("failed to generate random bytes")]
    Random(#[from] getrandom::Error),
}

impl From<ShimProcessError> for BackendError {
    fn from(error: ShimProcessError) -> Self {
        let message = format_chain(&error);
        match error {
            ShimProcessError::Program(ProgramError::Missing { .. }) => {
                Self::Refused { what: "start the agent on this machine", message }
            }
            ShimProcessError::Program(_)
            | ShimProcessError::Io { .. }
            | ShimProcessError::Ended { .. }
            | ShimProcessError::Silent { .. }
            | ShimProcessError::StillRunning { .. }
            | ShimProcessError::Locked { .. }
            | ShimProcessError::Request(_)
            | ShimProcessError::Random(_) => {
                Self::Unavailable { what: "manage the agent of this machine", message }
            }
        }
    }
}

/// Owner of a home, as in its enrolment.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Owner {
    pub instance_id: InstanceId,
    pub credential_sha256: Vec<String>,
    pub server_keys: Vec<String>,
}

/// Start options of a shim.
#[derive(Clone, Debug)]
pub struct StartOptions {
    pub program: AgentProgram,
    /// `any`, `docker`, `process` or `simulated`.
    pub runtime: &'static str,
    pub docker_socket: Option<PathBuf>,
    /// Plain processes that it accepts.
    pub processes: ProcessMode,
    pub env: BTreeMap<String, String>,
}

impl StartOptions {
    fn how(&self) -> LaunchConfig {
        LaunchConfig { runtime: self.runtime.to_owned(), processes: self.processes }
    }
}

/// Build and configuration of the last start.
#[derive(Debug, Serialize, Deserialize)]
struct BuildRecord {
    stamp: ProgramStamp,
    /// Absent if it was started by an older server.
    #[serde(default)]
    how: Option<LaunchConfig>,
}

/// Settings that a running shim cannot change: it has to be restarted.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct LaunchConfig {
    runtime: String,
    processes: ProcessMode,
}

/// Home directory of a shim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShimHome(PathBuf);

/// Exclusive right to start or stop the shim of a home.
#[derive(Debug)]
pub struct HomeLock {
    _lock: fs::File,
}

impl ShimHome {
    pub fn new(dir: &Path) -> Self {
        Self(std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned()))
    }

    pub fn dir(&self) -> &Path {
        &self.0
    }

    pub fn socket(&self) -> PathBuf {
        self.0.join(SOCKET_FILE)
    }

    fn io_error<'a>(&'a self, what: &'static str) -> impl FnOnce(io::Error) -> ShimProcessError + 'a {
        move |source| ShimProcessError::Io { what, path: self.0.clone(), source }
    }

    /// Waits for the lock. It is next to the directory, which may be removed and created again.
    pub async fn alone(&self) -> Result<HomeLock, ShimProcessError> {
        let mut path = self.0.clone().into_os_string();
        path.push(".lock");
        if let Some(parent) = self.0.parent() {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(parent)
                .map_err(self.io_error("create"))?;
        }
        let opened = fs::OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let file = opened.map_err(self.io_error("lock"))?;
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(HomeLock { _lock: file }),
                Err(fs::TryLockError::WouldBlock) if Instant::now() < deadline => sleep(POLL_INTERVAL).await,
                Err(fs::TryLockError::WouldBlock) => {
                    return Err(ShimProcessError::Locked { path: self.0.clone() });
                }
                Err(fs::TryLockError::Error(error)) => return Err(self.io_error("lock")(error)),
            }
        }
    }

    /// `None`: not enrolled.
    pub fn owner(&self) -> Option<Owner> {
        serde_json::from_slice(&fs::read(self.0.join(ENROLMENT_FILE)).ok()?).ok()
    }

    /// Enrols the home. A running shim applies it at the next call.
    pub async fn enrol(&self, program: &AgentProgram, owner: &Owner) -> Result<(), ShimProcessError> {
        let instance = owner.instance_id.to_string();
        let mut args: Vec<&OsStr> = ["shim", "enrol", "--home"].map(OsStr::new).to_vec();
        args.extend([self.0.as_os_str(), "--instance".as_ref(), instance.as_ref()]);
        for hash in &owner.credential_sha256 {
            args.extend([OsStr::new("--credential-sha256"), hash.as_ref()]);
        }
        for key in &owner.server_keys {
            args.extend([OsStr::new("--server-key"), key.as_ref()]);
        }
        program.output(&args).await?;
        Ok(())
    }

    /// Returns whether there are no tasks, running or not.
    pub fn is_idle(&self) -> bool {
        fs::read_dir(self.0.join(TASKS_DIR)).map_or(true, |mut entries| entries.next().is_none())
    }

    /// Returns the process that serves this home, even if another process started it.
    pub fn pid(&self) -> Option<i32> {
        let pid: i32 = fs::read_to_string(self.0.join(LOCK_FILE)).ok()?.trim().parse().ok()?;
        // The pid may have been reused by another process since; a process that has ended has no arguments.
        let args = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let mut args = args.split(|byte| *byte == 0);
        let is_ours = args.clone().any(|arg| arg == b"shim")
            && args.any(|arg| arg == self.0.as_os_str().as_encoded_bytes());
        is_ours.then_some(pid)
    }

    /// Calls the health check at the socket.
    pub async fn answer(&self) -> Option<Health> {
        let requested = timeout(RESPONSE_TIMEOUT, async {
            let stream = unix::connect(&self.socket()).await.ok()?;
            client::ShimClient::connect(stream, "").await.ok()?.health().await.ok()
        });
        requested.await.ok().flatten()
    }

    /// Ensures that a shim responds: the running one, or a new one. An older build is replaced by a newer one; the
    /// tasks continue meanwhile.
    pub async fn ensure(&self, with: &StartOptions) -> Result<Health, ShimProcessError> {
        if self.pid().is_some()
            && let Some(health) = self.answer().await
        {
            if !self.is_outdated(&health, with).await? {
                return Ok(health);
            }
            tracing::info!(home = %self.0.display(), version = health.version, "running agent is outdated; replacing it");
            self.stop().await?;
        }
        let health = self.start(with).await?;
        self.note_build(with)?;
        Ok(health)
    }

    async fn start(&self, with: &StartOptions) -> Result<Health, ShimProcessError> {
        let mut tries = 1;
        loop {
            let mut child = if self.pid().is_some() { None } else { Some(self.spawn(with)?) };
            match self.wait_ready(child.as_mut()).await {
                // A killed process releases its home a moment after it has ended.
                Err(ShimProcessError::Ended { message })
                    if message.contains(HOME_IN_USE) && tries < START_ATTEMPTS_MAX =>
                {
                    tries += 1;
                    sleep(RETRY_DELAY).await;
                }
                ready => return ready,
            }
        }
    }

    /// Compares the start settings, then the version; builds of one version are compared by the file, but only if it is
    /// the same file, so that two servers with separate programs do not replace each other's agent in turns.
    async fn is_outdated(&self, running: &Health, with: &StartOptions) -> Result<bool, ShimProcessError> {
        let program = &with.program;
        let stamp = program.stamp()?;
        let noted = fs::read(self.0.join(BUILD_FILE)).ok();
        match noted.and_then(|text| serde_json::from_slice::<BuildRecord>(&text).ok()) {
            Some(build) if build.how.as_ref().is_some_and(|how| *how != with.how()) => Ok(true),
            Some(build) if build.stamp == stamp => Ok(false),
            Some(build) if build.stamp.path == stamp.path => Ok(true),
            Some(_) | None => Ok(is_older(&running.version, &program.version().await?)),
        }
    }

    fn note_build(&self, with: &StartOptions) -> Result<(), ShimProcessError> {
        let build = BuildRecord { stamp: with.program.stamp()?, how: Some(with.how()) };
        let text = serde_json::to_vec(&build)
            .map_err(io::Error::from)
            .map_err(self.io_error("record the build in"))?;
        fs::write(self.0.join(BUILD_FILE), text).map_err(self.io_error("write to"))
    }

    fn spawn(&self, with: &StartOptions) -> Result<Child, ShimProcessError> {
        let log = self.open_log().map_err(self.io_error("write the log in"))?;
        let second = log.try_clone().map_err(self.io_error("write the log in"))?;
        let mut command = Command::new(with.program.path());
        command.arg("shim").arg("--home").arg(&self.0).args(["--runtime", with.runtime, "--own-session"]);
        command.args(["--processes", with.processes.as_str()]);
        if let Some(socket) = &with.docker_socket {
            command.arg("--docker-socket").arg(socket);
        }
        // Hides the server's data directory, with its keys and its database, from jobs.
        if let Some(data) = self.0.parent().filter(|data| data.parent().is_some()) {
            command.arg("--hide").arg(data);
        }
        command.env_clear().envs(inherited_env()).envs(&with.env);
        command.current_dir("/").stdin(Stdio::null()).stdout(log).stderr(second);
        command.spawn().map_err(|source| ShimProcessError::Io {
            what: "start",
            path: with.program.path().to_owned(),
            source,
        })
    }

    fn open_log(&self) -> io::Result<fs::File> {
        let path = self.0.join(LOG_FILE);
        if fs::metadata(&path).is_ok_and(|meta| meta.len() > LOG_BYTES_MAX) {
            fs::rename(&path, self.0.join("shim.log.1"))?;
        }
        fs::OpenOptions::new().create(true).append(true).mode(0o600).open(path)
    }

    async fn wait_ready(&self, mut child: Option<&mut Child>) -> Result<Health, ShimProcessError> {
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            if let Some(health) = self.answer().await {
                return Ok(health);
            }
            // A process that finds the home in use exits; the one that uses it responds soon.
            let ended = match &mut child {
                Some(child) => child.try_wait().map_err(self.io_error("check the agent of"))?.is_some(),
                None => true,
            };
            if ended && self.pid().is_none() {
                return Err(ShimProcessError::Ended { message: self.last_log_line() });
            }
            if Instant::now() >= deadline {
                return Err(ShimProcessError::Silent {
                    socket: self.socket(),
                    message: self.last_log_line(),
                });
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns the last line of its log.
    fn last_log_line(&self) -> String {
        let log = fs::read(self.0.join(LOG_FILE)).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        match log.lines().rfind(|line| !line.trim().is_empty()) {
            Some(line) => tail(line.trim(), LOG_LINE_MAX).trim_start_matches("error: ").to_owned(),
            None => "its log is empty".to_owned(),
        }
    }

    /// Stops the process; the tasks continue.
    pub async fn stop(&self) -> Result<(), ShimProcessError> {
        for (signal, within) in [(Signal::TERM, STOP_TIMEOUT), (Signal::KILL, KILL_TIMEOUT)] {
            let Some(pid) = self.pid() else { return Ok(()) };
            let Some(process) = Pid::from_raw(pid) else { return Ok(()) };
            // It may have ended just now.
            let _ = kill_process(process, signal);
            let deadline = Instant::now() + within;
            while self.pid() == Some(pid) && Instant::now() < deadline {
                sleep(POLL_INTERVAL).await;
            }
        }
        match self.pid() {
            None => Ok(()),
            Some(pid) => Err(ShimProcessError::StillRunning { pid }),
        }
    }

    /// Ends and removes all tasks, of any owner, through a shim that is started for this if none runs.
    pub async fn end_tasks(&self, with: &StartOptions) -> Result<(), ShimProcessError> {
        let Some(owner) = self.owner().filter(|_| !self.is_idle()) else { return Ok(()) };
        self.ensure(with).await?;
        let mut random = [0; 32];
        getrandom::fill(&mut random)?;
        let credential = hex::encode(random);
        // The host accepts two credentials during a rotation, so the server's stays valid.
        let hash = hex::encode(Sha256::digest(credential.as_bytes()));
        let hashes = owner.credential_sha256.iter().take(1).cloned().chain([hash]).collect();
        self.enrol(&with.program, &Owner { credential_sha256: hashes, ..owner.clone() }).await?;
        let ended = match timeout(TASKS_TIMEOUT, self.end_all_tasks(&credential)).await {
            Ok(ended) => ended,
            Err(_) => Err(ShimProcessError::Silent {
                socket: self.socket(),
                message: "its tasks did not end".into(),
            }),
        };
        self.enrol(&with.program, &owner).await?;
        ended
    }

    async fn end_all_tasks(&self, credential: &str) -> Result<(), ShimProcessError> {
        let stream = unix::connect(&self.socket()).await.map_err(self.io_error("connect to"))?;
        let shim = client::ShimClient::connect(stream, credential).await?;
        let how = TerminateRequest {
            termination_reason: "terminated_by_server".into(),
            termination_message: "the instance is being deleted".into(),
            timeout: 0,
        };
        let tasks = shim.tasks().await?.tasks;
        for task in &tasks {
            shim.terminate(task.id, &how, MAX_EPOCH).await?;
        }
        for task in &tasks {
            while shim.task(task.id).await?.status != TaskStatus::Terminated {
                sleep(POLL_INTERVAL).await;
            }
            shim.remove(task.id, MAX_EPOCH).await?;
        }
        Ok(())
    }

    /// Removes the directory, except volumes with contents: those are deleted individually, by name. The shim must have
    /// been stopped.
    pub fn remove(&self) -> Result<(), ShimProcessError> {
        match self.remove_all_but_volumes() {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(self.io_error("remove")(error)),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn remove_all_but_volumes(&self) -> io::Result<()> {
        let volumes = self.0.join(VOLUMES_DIR);
        // Removes an empty directory only.
        if fs::remove_dir(&volumes).is_ok() || !volumes.exists() {
            return fs::remove_dir_all(&self.0);
        }
        for entry in fs::read_dir(&self.0)? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true if entry.file_name() == VOLUMES_DIR => {}
                true => fs::remove_dir_all(entry.path())?,
                false => fs::remove_file(entry.path())?,
            }
        }
        Ok(())
    }
}

fn inherited_env() -> impl Iterator<Item = (&'static str, OsString)> {
    INHERITED_VARIABLES.iter().filter_map(|name| Some((*name, std::env::var_os(name)?)))
}
