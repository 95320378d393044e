//! A separate server for each test, with or without this machine as an instance, and a client for the test.
//!
//! Failures panic with the last log lines of the server.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop")]

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
    time::{Duration, Instant},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use crate::server::{Client, Server, ServerOptions, TOKEN, binary_path, submission};
use windlass_testkit::{
    TempDir,
    lab::{Lab, LabHost},
    temp_dir,
    wait::{TIMEOUT, eventually_ok, eventually_ok_async},
};

const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// A user ID without an account.
pub const UNPRIVILEGED_UID: u32 = 47_111;
const FINAL_STATUSES: [&str; 3] = ["done", "failed", "terminated"];

/// Instances of the server, and the runtime of their jobs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum HostMode {
    /// This machine, with jobs as processes.
    Processes,
    /// This machine, with jobs as containers of the test engine.
    Containers,
    /// No instances, until a test adds some.
    None,
}

pub struct TestEnv {
    home: PathBuf,
    /// Deleted at the end. `None` if the caller chose the directory and keeps it.
    temp: Option<TempDir>,
    machines: HostMode,
    /// Container engine of this machine, if it is not that of the tests.
    engine: Option<PathBuf>,
    /// Additional environment of the server.
    env: Vec<(&'static str, PathBuf)>,
    /// Binary of the server.
    windlass: PathBuf,
    /// Agent binary for hosts.
    agent: PathBuf,
    server: Option<Server>,
    client: Option<Client>,
    /// Time of the last request: the server closes idle connections.
    requested: Instant,
}

/// Idle time after which a connection is not reused.
const CONNECTION_IDLE_MAX: Duration = Duration::from_secs(10);

impl TestEnv {
    pub async fn new(machines: HostMode) -> Self {
        let mut env = Self::new_unstarted(machines);
        env.start().await;
        env
    }

    /// Starts a server with settings that shorten the waits of a test.
    pub async fn with_settings(machines: HostMode, settings: &[(&'static str, &str)]) -> Self {
        let mut env = Self::new_unstarted(machines);
        for (name, value) in settings {
            env = env.with_env(name, value);
        }
        env.start().await;
        env
    }

    /// Starts a server with the default isolation of plain processes.
    pub async fn confined(machines: HostMode) -> Self {
        Self::with_settings(machines, &[("WINDLASS_SERVER_LOCAL_PROCESSES", "confined")]).await
    }

    /// Starts a server as a user other than root.
    pub async fn unprivileged() -> Self {
        Self::unprivileged_with("own").await
    }

    /// Starts an unprivileged server with the given privileges of plain processes.
    pub async fn unprivileged_with(processes: &str) -> Self {
        let mut env = Self::new_unprivileged().with_env("WINDLASS_SERVER_LOCAL_PROCESSES", processes);
        env.start().await;
        env
    }

    /// A server of a user other than root, not started yet.
    pub fn new_unprivileged() -> Self {
        let mut env = Self::new_unstarted(HostMode::Processes);
        // The build directory of the tests may be inaccessible to other users.
        let copy = |name: &str| {
            let copy = env.home.join(name);
            std::fs::copy(binary_path(name).unwrap(), &copy).unwrap();
            copy
        };
        let (windlass, agent) = (copy("windlass"), copy("windlass-agent"));
        let script = format!(
            "#!/bin/sh\nexec setpriv --reuid={UNPRIVILEGED_UID} --regid={UNPRIVILEGED_UID} --clear-groups --no-new-privs env HOME={} {} \"$@\"\n",
            env.home.display(),
            windlass.display()
        );
        let start = env.home.join("start");
        std::fs::write(&start, script).unwrap();
        std::fs::set_permissions(&start, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        for path in [&env.home, &env.home.join("server")] {
            std::os::unix::fs::chown(path, Some(UNPRIVILEGED_UID), Some(UNPRIVILEGED_UID)).unwrap();
        }
        (env.windlass, env.agent) = (start, agent);
        env
    }

    /// A server in a separate directory that is not started yet.
    pub fn new_unstarted(machines: HostMode) -> Self {
        let temp = temp_dir("e2e").unwrap();
        let mut env = Self::at(temp.path().to_owned(), machines);
        env.temp = Some(temp);
        env
    }

    /// Uses a directory that is kept; the server is not started yet.
    pub fn at(home: PathBuf, machines: HostMode) -> Self {
        std::fs::create_dir_all(home.join("server")).unwrap();
        let (windlass, agent) = (binary_path("windlass").unwrap(), stripped_agent());
        Self {
            home,
            temp: None,
            machines,
            engine: None,
            env: Vec::new(),
            windlass,
            agent,
            server: None,
            client: None,
            requested: Instant::now(),
        }
    }

    /// Sets a variable for the next start of the server.
    #[must_use]
    pub fn with_env(mut self, name: &'static str, value: impl Into<PathBuf>) -> Self {
        self.env.push((name, value.into()));
        self
    }

    /// Sets the container engine of this machine.
    #[must_use]
    pub fn with_engine(mut self, socket: PathBuf) -> Self {
        self.engine = Some(socket);
        self
    }

    /// Sets the binary of the server, from its next start on.
    #[must_use]
    pub fn with_server(mut self, program: PathBuf) -> Self {
        self.windlass = program;
        self
    }

    /// Sets the agent binary for hosts.
    #[must_use]
    pub fn with_agent(mut self, program: PathBuf) -> Self {
        self.agent = program;
        self
    }

    pub fn pid(&self) -> u32 {
        self.server.as_ref().unwrap().pid()
    }

    pub fn address(&self) -> &str {
        self.server.as_ref().unwrap().address()
    }

    /// Directory of this test.
    pub fn home(&self) -> &Path {
        &self.home
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.server.as_ref().unwrap().address())
    }

    /// Runs `windlass` in a directory to its end.
    pub fn windlass(&self, dir: &Path, args: &[&str]) -> Output {
        self.command(dir, args).output().unwrap()
    }

    /// Returns the command without running it.
    pub fn command(&self, dir: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(binary_path("windlass").unwrap());
        command.args(args).current_dir(dir).stdin(std::process::Stdio::null());
        command.env("WINDLASS_URL", self.url()).env("WINDLASS_TOKEN", TOKEN);
        command.env("WINDLASS_HOME", self.home.join("person")).env("HOME", &self.home);
        command
    }

    /// Starts or restarts the server.
    pub async fn start(&mut self) {
        let engine = match self.machines {
            HostMode::Containers => self.engine.clone().unwrap_or_else(engine_socket),
            // This socket does not exist, so that jobs are processes on any machine.
            HostMode::Processes | HostMode::None => self.home.join("no-engine.sock"),
        };
        let (data, log) = (self.home.join("server"), self.home.join("server.log"));
        let mut env = vec![
            ("WINDLASS_AGENT", self.agent.clone()),
            ("DOCKER_HOST", PathBuf::from(format!("unix://{}", engine.display()))),
        ];
        env.extend(self.env.iter().cloned());
        let options = ServerOptions {
            binary: &self.windlass,
            data: &data,
            database: None,
            core: None,
            local: self.machines != HostMode::None,
            env,
            log: Some(&log),
        };
        let server = Server::start(&options).await.unwrap();
        self.client = Some(server.client().await.unwrap());
        self.requested = Instant::now();
        self.server = Some(server);
    }

    /// Kills the server alone, as a power cut would.
    pub fn kill(&mut self) {
        self.client = None;
        self.server = None;
    }

    /// Stops the server as a user does.
    pub fn stop_server(&mut self) {
        self.client = None;
        self.server.take().unwrap().stop().unwrap();
    }

    pub async fn post(&mut self, path: &str, body: &Value) -> Value {
        if self.requested.elapsed() > CONNECTION_IDLE_MAX {
            self.client = Some(self.server.as_ref().unwrap().client().await.unwrap());
        }
        self.requested = Instant::now();
        let answer = self.client.as_mut().unwrap().post(path, body).await;
        answer.unwrap_or_else(|error| panic!("{path}: {error:#}\n{}", self.server_log()))
    }

    pub async fn project(&mut self, path: &str, body: &Value) -> Value {
        self.post(&format!("/api/project/main/{path}"), body).await
    }

    /// Submits a run.
    pub async fn apply(&mut self, configuration: &Value) -> Value {
        self.project("runs/apply", &submission(configuration)).await
    }

    pub async fn run(&mut self, name: &str) -> Value {
        self.project("runs/get", &json!({"run_name": name})).await
    }

    /// Waits until the run has one of these statuses; any other final status is a failure.
    pub async fn reaches(&mut self, name: &str, statuses: &[&str]) -> Value {
        self.wait_for_status_within(name, statuses, TIMEOUT).await
    }

    pub async fn wait_for_status_within(
        &mut self,
        name: &str,
        statuses: &[&str],
        timeout: Duration,
    ) -> Value {
        let wanted = statuses.join(" or ");
        let (mut run, requested) = (self.run(name).await, Instant::now());
        loop {
            let status = run["status"].as_str().unwrap_or_default();
            if statuses.contains(&status) {
                return run;
            }
            let over = FINAL_STATUSES.contains(&status);
            if over || requested.elapsed() > timeout {
                let why = if over { "ended otherwise" } else { "takes too long" };
                panic!("{name} {why}, want {wanted}:\n{run:#}\n{}", self.server_log());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
            run = self.run(name).await;
        }
    }

    /// Submits a run and waits for any final status.
    pub async fn ends(&mut self, configuration: &Value) -> Value {
        self.apply(configuration).await;
        let name = configuration["name"].as_str().unwrap().to_owned();
        self.reaches(&name, &FINAL_STATUSES).await
    }

    pub async fn stop(&mut self, name: &str, abort: bool) {
        self.project("runs/stop", &json!({"runs_names": [name], "abort": abort})).await;
    }

    /// The complete output of the newest submission of the first job.
    pub async fn log(&mut self, run: &Value) -> String {
        self.log_of_job(run, 0, usize::MAX).await
    }

    /// The output of one job, for one submission or the newest.
    pub async fn log_of_job(&mut self, run: &Value, job: usize, submission: usize) -> String {
        let submissions = run["jobs"][job]["job_submissions"].as_array().unwrap();
        let id = submissions[submission.min(submissions.len() - 1)]["id"].clone();
        let (mut bytes, mut next) = (Vec::new(), Value::Null);
        loop {
            let name = run["run_spec"]["run_name"].clone();
            let body = json!({"run_name": name, "job_submission_id": id, "limit": 1000, "next_token": next});
            let page = self.project("logs/poll", &body).await;
            for event in page["logs"].as_array().unwrap() {
                bytes.extend(STANDARD.decode(event["message"].as_str().unwrap()).unwrap());
            }
            next = page["next_token"].clone();
            if next.is_null() {
                return String::from_utf8(bytes).unwrap();
            }
        }
    }

    /// Waits until the log of an active run contains a text.
    pub async fn says(&mut self, name: &str, words: &str) -> String {
        eventually_ok_async(&format!("{name} says {words:?}"), async || {
            let run = self.run(name).await;
            let log = self.log(&run).await;
            if log.contains(words) {
                return Ok(log);
            }
            let over = FINAL_STATUSES.contains(&run["status"].as_str().unwrap_or_default());
            assert!(!over, "{name} does not say {words:?}: {log:?}\n{run:#}");
            Err(format!("{log:?}\n{run:#}"))
        })
        .await
    }

    pub async fn fleet(&mut self, name: &str) -> Value {
        self.project("fleets/get", &json!({"name": name})).await
    }

    /// Creates a fleet `lab` of hosts of a lab, and waits until it is ready.
    pub async fn create_lab_fleet(&mut self, lab: &Lab, hosts: &[LabHost], blocks: u32) {
        let (private, public) = lab.key_pair().unwrap();
        let addresses: Vec<String> = hosts.iter().map(|host| host.addr().to_string()).collect();
        let configuration = json!({"type": "fleet", "name": "lab", "placement": "cluster", "blocks": blocks,
            "ssh_config": {"user": "root", "port": 22, "ssh_key": {"public": public, "private": private},
                "network": lab.network(), "hosts": addresses}});
        let spec = json!({"configuration": configuration, "profile": {"name": "default"}});
        self.project("fleets/apply", &json!({"plan": {"spec": spec}, "force": false})).await;
        self.wait_for_hosts("lab", hosts.len()).await;
    }

    /// Waits until the given number of hosts of a fleet accept jobs.
    pub async fn wait_for_hosts(&mut self, fleet: &str, hosts: usize) -> Value {
        eventually_ok_async(&format!("{hosts} hosts are ready"), async || {
            let found = self.fleet(fleet).await;
            let instances = found["instances"].as_array().unwrap().iter();
            let ready = instances.filter(|i| i["status"] == "idle" && i["unreachable"] != true).count();
            if ready >= hosts { Ok(found) } else { Err(format!("{ready}: {found:#}\n{}", self.server_log())) }
        })
        .await
    }

    /// Waits until a condition holds for a fleet.
    pub async fn eventually_fleet(&mut self, name: &str, holds: impl Fn(&Value) -> bool) -> Value {
        eventually_ok_async(&format!("fleet {name} is as it should be"), async || {
            let found = self.fleet(name).await;
            if holds(&found) { Ok(found) } else { Err(format!("{found:#}\n{}", self.server_log())) }
        })
        .await
    }

    /// Waits until a volume has a status.
    pub async fn eventually_volume(&mut self, name: &str, status: &str) -> Value {
        eventually_ok_async(&format!("volume {name} is {status}"), async || {
            let found = self.project("volumes/get", &json!({"name": name})).await;
            if found["status"] == status { Ok(found) } else { Err(format!("{found:#}")) }
        })
        .await
    }

    /// Waits for a condition outside of the server.
    pub fn eventually(&self, what: &str, holds: impl Fn() -> bool) {
        eventually_ok(what, || if holds() { Ok(()) } else { Err(self.server_log()) });
    }

    /// Waits until a condition holds for a run.
    pub async fn eventually_run(
        &mut self,
        name: &str,
        timeout: Duration,
        holds: impl Fn(&Value) -> bool,
    ) -> Value {
        let start = Instant::now();
        loop {
            let run = self.run(name).await;
            if holds(&run) {
                return run;
            }
            assert!(start.elapsed() < timeout, "{run:#}\n{}", self.server_log());
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Gives the server a different build of the agent from its next start on: the same with an appended byte.
    pub fn use_another_agent(&mut self) {
        let copy = self.home.join("windlass-agent");
        let mut bytes = std::fs::read(binary_path("windlass-agent").unwrap()).unwrap();
        bytes.push(0);
        std::fs::write(&copy, bytes).unwrap();
        std::fs::set_permissions(&copy, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        self.agent = copy;
    }

    pub fn server_log(&self) -> String {
        let text = std::fs::read_to_string(self.home.join("server.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

impl Drop for TestEnv {
    fn drop(&mut self) {
        self.kill();
        kill_processes_of(&self.home);
    }
}

/// Ends every process that was started from this directory: the agent, and jobs that outlived their server.
pub fn kill_processes_of(home: &Path) {
    // With a trailing slash: the directory of another test may have this name as a prefix.
    let needle = format!("{}/", home.display());
    for _ in 0..20 {
        let mut found = false;
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            let path = entry.path();
            let line = std::fs::read(path.join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            let inside = std::fs::read_link(path.join("cwd")).is_ok_and(|cwd| cwd.starts_with(home));
            if pid != std::process::id() && (inside || line.contains(&needle)) {
                found = true;
                let _ = std::process::Command::new("kill").args(["-KILL", &pid.to_string()]).status();
            }
        }
        if !found {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Preempts a machine of the mock cloud: its processes stop, and the cloud reports it as deleted.
pub fn preempt_machine(cloud_state: &Path, machine: &str) -> std::io::Result<()> {
    let signs = cloud_state.join("preempt");
    std::fs::create_dir_all(&signs)?;
    std::fs::write(signs.join(machine), "")?;
    kill_processes_of(&cloud_state.join(&machine[..8]));
    Ok(())
}

/// Socket of the container engine of the tests.
pub fn engine_socket() -> PathBuf {
    let socket = std::env::var_os("WINDLASS_TEST_DOCKER");
    PathBuf::from(
        socket.expect("WINDLASS_TEST_DOCKER names no container engine; `cargo xtask test` starts one"),
    )
}

/// The image that [`load_busybox_image`] loads into an engine.
pub const IMAGE: &str = "windlass-e2e/busybox:1";

/// Loads an image with only a static busybox into an engine.
pub fn load_busybox_image(engine: &Path) {
    load_image(engine, IMAGE, None);
}

/// Loads an image with a static busybox and perhaps one other program, in `/bin`, into an engine.
pub fn load_image(engine: &Path, name: &str, program: Option<&Path>) {
    load_image_with(engine, name, program, "");
}

/// Loads an image like that of [`load_busybox_image`] whose programs run as this user.
pub fn load_image_of_user(engine: &Path, name: &str, user: &str) {
    load_image_with(engine, name, None, &format!("--change 'USER {user}'"));
}

fn load_image_with(engine: &Path, name: &str, program: Option<&Path>, options: &str) {
    let temp = temp_dir("e2e-image").unwrap();
    let dir = temp.path();
    std::fs::create_dir(dir.join("bin")).unwrap();
    std::fs::copy("/usr/bin/busybox", dir.join("bin/busybox")).unwrap();
    for name in ["sh", "echo", "sleep", "cat", "env", "hostname", "mkdir", "tail", "grep", "tr"] {
        let _ = std::os::unix::fs::symlink("busybox", dir.join("bin").join(name));
    }
    if let Some(program) = program {
        std::fs::copy(program, dir.join("bin").join(program.file_name().unwrap())).unwrap();
    }
    let host = format!("unix://{}", engine.display());
    let script = format!("tar -C {} -c . | docker --host {host} import {options} - {name}", dir.display());
    assert!(Command::new("sh").args(["-c", &script]).output().unwrap().status.success());
}

/// A task with only a name and commands.
pub fn task_config(name: &str, commands: &[&str]) -> Value {
    json!({"type": "task", "name": name, "image": "none", "user": "root", "commands": commands})
}

/// The newest submission of a run's first job.
pub fn newest_submission(run: &Value) -> &Value {
    run["jobs"][0]["job_submissions"].as_array().unwrap().last().unwrap()
}

/// A task that needs only a part of a lab host.
pub fn small_task_config(name: &str, commands: &[&str]) -> Value {
    let mut job = task_config(name, commands);
    job["resources"] = json!({"cpu": {"count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null});
    job
}

/// Number of the lab host that runs the newest submission of a job.
pub fn host_of_job(lab: &Lab, run: &Value, job: usize) -> usize {
    let submission = run["jobs"][job]["job_submissions"].as_array().unwrap().last().unwrap();
    let address = submission["job_provisioning_data"]["hostname"].as_str().unwrap();
    let found = lab.hosts().iter().position(|host| host.addr().to_string() == address);
    found.unwrap_or_else(|| panic!("no host is {address}: {run:#}")) + 1
}

/// The agent without debug information: a third of the upload. Created once per build.
pub fn stripped_agent() -> PathBuf {
    use std::os::unix::fs::MetadataExt as _;
    // Threads of one process must not write it concurrently.
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    let make = || {
        let whole = binary_path("windlass-agent").unwrap();
        let stamp = std::fs::metadata(&whole).unwrap();
        let slim = whole.with_file_name(format!("windlass-agent.slim-{}-{}", stamp.mtime(), stamp.size()));
        if !slim.exists() {
            let fresh = slim.with_extension(std::process::id().to_string());
            let strip = Command::new("strip").arg("-o").arg(&fresh).arg(&whole).status();
            assert!(strip.unwrap().success());
            std::fs::rename(&fresh, &slim).unwrap();
        }
        slim
    };
    MADE.get_or_init(make).clone()
}
