//! A real shim in a separate home, enrolled, and removed with everything that it started.
//!
//! ```text
//! let shim = Shim::start(Setup::process());                 // or docker(), simulated()
//! let mut spec = shim.spec("train");                        // a serde_json::Value: change it as needed
//! spec["memory"] = json!(64 << 20);
//! let id = shim.submit(&spec, 1).await;                     // signed, under epoch 1
//! let info = shim.wait_for(id, TaskStatus::Running).await;  // with a deadline
//! shim.client().epoch(1).post(&format!("/api/tasks/{id}/terminate"), &json!({"timeout": 0})).await.expect(200);
//! shim.kill(); shim.restart();                              // simulates a crash
//! ```

use std::{
    fs,
    io::{Read, Write},
    net::SocketAddr,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use base64::{Engine, prelude::BASE64_STANDARD};
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde_json::{Value, json};
use windlass_agent::digest::sha256_hex;
use windlass_api::agent::{
    SIGNATURE_HEADER, SIGNED_PREFIX,
    shim::{TaskInfo, TaskStatus},
};
use windlass_model::id::{InstanceId, SubmissionId};
use windlass_testkit::wait::{TIMEOUT, eventually_ok_async};

use super::{
    TempDir, agent,
    client::{Client, Reply},
    engine,
    images::Image,
    oci, temp_dir,
};

pub(crate) const CREDENTIAL: &str = "credential-of-the-test";

/// Settings with which a shim is started.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    runtime: &'static str,
    policy: String,
    compat: bool,
    enrolled: bool,
    is_own: bool,
    user: Option<u32>,
    /// First of the user's subordinate ids.
    first_id: Option<u32>,
    /// Directories that are mounted with these options for the user.
    locked: Vec<(PathBuf, &'static str)>,
    args: Vec<String>,
    env: Vec<(String, String)>,
}

impl Setup {
    /// Plain processes with the rights of the test: they share files with it.
    pub(crate) fn process() -> Self {
        Self { is_own: true, ..Self::new("process") }.arg("--processes").arg("own")
    }

    /// Plain processes with the default confinement.
    pub(crate) fn confined() -> Self {
        Self::new("process")
    }

    /// Runs the shim itself as this user instead of root.
    pub(crate) fn user(mut self, id: u32) -> Self {
        self.user = Some(id);
        self
    }

    /// Assigns subordinate ids to the user of [`Setup::user`].
    pub(crate) fn subordinate_ids(mut self, first: u32) -> Self {
        self.first_id = Some(first);
        self
    }

    /// Mounts the directory with these options before the shim starts as the user of [`Setup::user`].
    pub(crate) fn locked_mount(mut self, dir: &Path, options: &'static str) -> Self {
        self.locked.push((dir.to_owned(), options));
        self
    }

    /// Hides a program from the user of [`Setup::user`].
    pub(crate) fn without_program(self, path: &str) -> Self {
        self.locked_mount(Path::new(path), "hidden")
    }

    /// Mounts the home with these options, as [`Setup::locked_mount`].
    pub(crate) fn locked_home(self, options: &'static str) -> Self {
        self.locked_mount(Path::new(""), options)
    }

    pub(crate) fn simulated() -> Self {
        Self::new("simulated")
    }

    /// Needs the engine of `WINDLASS_TEST_DOCKER`.
    pub(crate) fn docker() -> Self {
        let socket = std::env::var("WINDLASS_TEST_DOCKER")
            .expect("WINDLASS_TEST_DOCKER names the socket of a container engine for tests");
        Self::new("docker").arg("--docker-socket").arg(&socket)
    }

    /// Containers without an engine.
    pub(crate) fn oci() -> Self {
        oci::require_program();
        Self::new("oci")
    }

    /// A shim that chooses its runtime, on a host where no engine is installed: it does not see that of this machine.
    pub(crate) fn without_engine() -> Self {
        oci::require_program();
        Self::new("auto")
    }

    /// Hides `crun` and `runc` of this machine, for [`Setup::without_engine`].
    pub(crate) fn without_oci_program(self) -> Self {
        self.env(windlass_testkit::without_engine::HIDE_OCI_PROGRAMS, "yes")
    }

    fn new(runtime: &'static str) -> Self {
        let (args, env) = (Vec::new(), Vec::new());
        let (is_own, user, first_id) = (false, None, None);
        Self {
            runtime,
            policy: String::new(),
            compat: false,
            enrolled: true,
            is_own,
            user,
            first_id,
            locked: Vec::new(),
            args,
            env,
        }
    }

    /// Returns an image that the engine has, if there is an engine.
    fn image(&self) -> String {
        if matches!(self.runtime, "oci" | "auto") {
            return oci::serve_image(Image::Busybox);
        }
        let at = self.args.iter().rposition(|arg| arg == "--docker-socket");
        let Some(socket) = at.and_then(|at| self.args.get(at + 1)) else { return "none".to_owned() };
        let socket = PathBuf::from(socket);
        // A separate runtime: the test may already have one, and this function is not async.
        let ensured = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(Image::Busybox.ensure(&engine::client(&socket)))
        });
        ensured.join().unwrap()
    }

    /// Sets the text of the policy file.
    pub(crate) fn policy(mut self, yaml: &str) -> Self {
        yaml.clone_into(&mut self.policy);
        self
    }

    /// Also opens the loopback port; [`Shim::compat`] connects to it.
    pub(crate) fn compat(mut self) -> Self {
        self.compat = true;
        self
    }

    pub(crate) fn not_enrolled(mut self) -> Self {
        self.enrolled = false;
        self
    }

    pub(crate) fn arg(mut self, arg: &str) -> Self {
        self.args.push(arg.to_owned());
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }
}

/// A running shim. Dropping it ends its tasks and the shim, and removes its home.
pub(crate) struct Shim {
    setup: Setup,
    scratch: TempDir,
    child: Option<Child>,
    compat: Option<SocketAddr>,
    /// Image of the minimal task.
    image: String,
    pub(crate) instance: InstanceId,
}

impl Shim {
    /// Starts a shim and waits until it responds.
    #[track_caller]
    pub(crate) fn start(setup: Setup) -> Self {
        let scratch = temp_dir("shim").unwrap();
        fs::write(scratch.path().join("policy.yml"), &setup.policy).unwrap();
        let compat = setup.compat.then(free_port);
        let instance = InstanceId(random_uuid());
        let image = setup.image();
        let mut shim = Self { setup, scratch, child: None, compat, image, instance };
        if let Some(user) = shim.setup.user {
            fs::create_dir(shim.home()).unwrap();
            // The build directory may be inaccessible to other users.
            fs::copy(agent(), shim.program()).unwrap();
            for path in [shim.scratch.path(), &shim.home()] {
                std::os::unix::fs::chown(path, Some(user), Some(user)).unwrap();
            }
        }
        if shim.setup.enrolled {
            shim.enrol(&shim.home(), &[CREDENTIAL]);
        }
        shim.restart();
        shim
    }

    /// Writes an enrolment as the server would, with the binary's own subcommand.
    #[track_caller]
    pub(crate) fn enrol(&self, home: &Path, credentials: &[&str]) {
        let mut command = Command::new(self.program());
        command.args(["shim", "enrol", "--home"]).arg(home);
        command.args(["--instance", &self.instance.to_string(), "--server-key", &server_key()]);
        for credential in credentials {
            command.args(["--credential-sha256", &sha256_hex(credential.as_bytes())]);
        }
        self.set_user(&mut command);
        assert!(command.status().unwrap().success());
    }

    /// Returns the path of the binary under test that the shim's user may read.
    fn program(&self) -> PathBuf {
        if self.setup.user.is_some() { self.scratch.path().join("agent") } else { agent().to_owned() }
    }

    fn set_user(&self, command: &mut Command) {
        use std::os::unix::process::CommandExt as _;
        if let Some(user) = self.setup.user {
            command.uid(user).gid(user);
        }
    }

    /// Returns the command line that [`Shim::start`] runs.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(self.program());
        if let (Some(user), Some(first)) = (self.setup.user, self.setup.first_id) {
            command = oci::command_with_ids(self.scratch.path(), user, first, &self.program());
            command.args(["shim", "--runtime", self.setup.runtime, "--log", "debug"]);
        } else if let (Some(user), false) = (self.setup.user, self.setup.locked.is_empty()) {
            // An absolute path replaces the home.
            let locked = self.setup.locked.iter().map(|(dir, options)| (self.home().join(dir), *options));
            let locked: Vec<_> = locked.collect();
            command = oci::command_with_locked_mounts(&locked, user, &self.program());
            command.args(["shim", "--runtime", self.setup.runtime, "--log", "debug"]);
        } else if self.setup.runtime == "auto" {
            command = oci::command_without_engine(self.scratch.path(), &self.program());
            command.args(["shim", "--log", "debug"]);
        } else {
            command.args(["shim", "--runtime", self.setup.runtime, "--log", "debug"]);
        }
        command.arg("--home").arg(self.home());
        command.arg("--policy").arg(self.scratch.path().join("policy.yml"));
        if let Some(address) = self.compat {
            command.args(["--compat-tcp", &address.to_string()]);
        }
        command.args(&self.setup.args).envs(self.setup.env.iter().cloned());
        command.stdin(Stdio::null()).stdout(Stdio::null());
        if self.setup.first_id.is_none() && self.setup.locked.is_empty() {
            self.set_user(&mut command);
        }
        command
    }

    /// Starts the shim on the same home again, after [`Shim::kill`] or [`Shim::stop`].
    #[track_caller]
    pub(crate) fn restart(&mut self) {
        assert!(self.child.is_none(), "it runs");
        let log = fs::OpenOptions::new().create(true).append(true).open(self.log_path()).unwrap();
        self.child = Some(self.command().stderr(log).spawn().unwrap());
        let until = Instant::now() + TIMEOUT;
        while call(&self.socket(), "GET", "/api/healthcheck", "").is_none() {
            let exited = self.child.as_mut().unwrap().try_wait().unwrap();
            assert!(
                exited.is_none() && Instant::now() < until,
                "the shim does not answer: {exited:?}\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Removes a variable, from the next start on.
    pub(crate) fn without_env(&mut self, name: &str) {
        self.setup.env.retain(|(known, _)| known != name);
    }

    /// Ends the shim by `kill -9`, without a clean exit.
    pub(crate) fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Requests the shim to stop, and returns its exit status.
    #[track_caller]
    pub(crate) fn stop(&mut self) -> Option<i32> {
        let child = self.child.as_ref().unwrap();
        let pid = rustix::process::Pid::from_child(child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.wait_for_exit()
    }

    /// Waits until the process has ended by itself.
    #[track_caller]
    pub(crate) fn wait_for_exit(&mut self) -> Option<i32> {
        let mut child = self.child.take().unwrap();
        let until = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status.code();
            }
            if Instant::now() > until {
                child.kill().unwrap();
                panic!("the shim does not stop");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// A directory for the test, next to the home.
    pub(crate) fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    pub(crate) fn home(&self) -> PathBuf {
        self.scratch.path().join("home")
    }

    /// Socket of the first host, if there are many.
    pub(crate) fn socket(&self) -> PathBuf {
        let many = self.setup.args.iter().any(|arg| arg == "--hosts");
        self.home().join(if many { "host-0001/shim.sock" } else { "shim.sock" })
    }

    fn log_path(&self) -> PathBuf {
        self.scratch.path().join("shim.log")
    }

    /// Returns the standard error of the shim, over all its starts.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Returns a client with the credential; add an epoch where the call needs one.
    pub(crate) fn client(&self) -> Client {
        Client::unix(&self.socket()).credential(CREDENTIAL)
    }

    /// Returns a client of the loopback port, as a dstack server uses it.
    pub(crate) fn compat(&self) -> Client {
        Client::tcp(self.compat.expect("Setup::compat"))
    }

    /// Returns the minimal specification, with a new id, valid for an hour.
    pub(crate) fn spec(&self, name: &str) -> Value {
        let isolation = if self.setup.is_own { "own" } else { "confined" };
        json!({
            "id": random_uuid(),
            "name": name,
            "image_name": self.image,
            "process_isolation": isolation,
            "claims": {
                "instance_id": self.instance,
                "epoch": 1,
                "expires_at": windlass_agent::clock::now_ms() / 1000 + 3600,
            },
        })
    }

    /// Submits under an epoch, which is written into the claims.
    pub(crate) async fn try_submit(&self, spec: &Value, epoch: i64) -> Reply {
        let mut spec = spec.clone();
        spec["claims"]["epoch"] = epoch.into();
        let body = serde_json::to_vec(&spec).unwrap();
        let client = self.client().epoch(epoch).header(SIGNATURE_HEADER, &sign(&body));
        client.call(axum::http::Method::POST, "/api/tasks", body.into()).await
    }

    pub(crate) async fn submit(&self, spec: &Value, epoch: i64) -> SubmissionId {
        self.try_submit(spec, epoch).await.expect(200);
        serde_json::from_value(spec["id"].clone()).unwrap()
    }

    pub(crate) async fn info(&self, id: SubmissionId) -> TaskInfo {
        self.client().get(&format!("/api/tasks/{id}")).await.json()
    }

    /// Submits a job to the runner of a running task, and starts it.
    pub(crate) async fn play(&self, id: SubmissionId, job: &Value) {
        self.wait_for_runner(id).await;
        let calls = self.client().epoch(1);
        let path = |call: &str| format!("/api/tasks/{id}/runner/api/{call}");
        calls.post(&path("submit"), job).await.expect(200);
        calls.post(&path("run"), &json!({})).await.expect(200);
    }

    /// Waits until the runner listens, which is a moment after the start of the container. Its SSH server listens then.
    pub(crate) async fn wait_for_runner(&self, id: SubmissionId) {
        let calls = self.client().epoch(1);
        let path = format!("/api/tasks/{id}/runner/api/healthcheck");
        eventually_ok_async("the runner responds", async || {
            if calls.get(&path).await.status.is_success() { Ok(()) } else { Err(self.log()) }
        })
        .await;
    }

    /// Waits until the task has this status. A task that ends instead fails the test.
    pub(crate) async fn wait_for(&self, id: SubmissionId, status: TaskStatus) -> TaskInfo {
        eventually_ok_async(&format!("the task is {status:?}"), async || {
            let info = self.info(id).await;
            if info.status == status {
                return Ok(info);
            }
            assert_ne!(info.status, TaskStatus::Terminated, "{info:?}\n{}", self.log());
            Err(format!("{info:?}\n{}", self.log()))
        })
        .await
    }

    /// Waits until the task has ended by itself.
    pub(crate) async fn wait_for_end(&self, id: SubmissionId) -> TaskInfo {
        eventually_ok_async("the task ends", async || {
            let info = self.info(id).await;
            let is_over = info.status == TaskStatus::Terminated;
            if is_over { Ok(info) } else { Err(format!("{info:?}\n{}", self.log())) }
        })
        .await
    }

    pub(crate) async fn terminate(&self, id: SubmissionId, epoch: i64, timeout: u64) -> TaskInfo {
        let body = json!({"termination_reason": "terminated_by_user", "termination_message": "", "timeout": timeout});
        self.client().epoch(epoch).post(&format!("/api/tasks/{id}/terminate"), &body).await.expect(200);
        self.wait_for(id, TaskStatus::Terminated).await
    }

    pub(crate) async fn remove(&self, id: SubmissionId, epoch: i64) {
        self.client().epoch(epoch).post(&format!("/api/tasks/{id}/remove"), &json!({})).await.expect(200);
    }

    /// Ends and removes every task, whatever state the shim is in.
    fn clear(&mut self) -> Option<()> {
        let tasks = fs::read_dir(self.home().join("tasks")).map_or(0, Iterator::count);
        if tasks == 0 || !self.setup.enrolled && self.compat.is_none() {
            return Some(());
        }
        if self.child.is_none() {
            self.without_env("WINDLASS_AGENT_PAUSE_AT");
            let log = fs::OpenOptions::new().create(true).append(true).open(self.log_path()).ok()?;
            self.child = Some(self.command().stderr(log).spawn().ok()?);
        }
        let until = Instant::now() + TIMEOUT;
        while Instant::now() < until {
            let list = call(&self.socket(), "GET", "/api/tasks", "")
                .and_then(|text| serde_json::from_str(&text).ok());
            let Some(list): Option<Value> = list else {
                std::thread::sleep(Duration::from_millis(10));
                continue;
            };
            let tasks = list["tasks"].as_array().cloned().unwrap_or_default();
            if tasks.is_empty() {
                return Some(());
            }
            for id in tasks.iter().filter_map(|task| task["id"].as_str()) {
                call(&self.socket(), "POST", &format!("/api/tasks/{id}/terminate"), "{}");
                call(&self.socket(), "POST", &format!("/api/tasks/{id}/remove"), "{}");
            }
        }
        None
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = writeln!(std::io::stderr(), "── the shim said\n{}", self.log());
        }
        let cleared = self.clear();
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        kill_processes_of(&self.home());
        if cleared.is_none() && !std::thread::panicking() {
            panic!("tasks could not be taken away\n{}", self.log());
        }
    }
}

/// Kills processes with a path below `home` in their command line or as their working directory.
fn kill_processes_of(home: &Path) {
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until {
        let mut found = false;
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let named = String::from_utf8_lossy(&line).contains(&*home.to_string_lossy());
            let there = fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(home));
            if (named || there) && pid != std::process::id().cast_signed() {
                found = true;
                if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
            }
        }
        if !found {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Makes one call without a runtime, for guards. `None` if there is no response.
fn call(socket: &Path, method: &str, path: &str, body: &str) -> Option<String> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: shim\r\nAuthorization: Bearer {CREDENTIAL}\r\nConnection: close\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    )
    .ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned())
}

fn server_key_pair() -> Ed25519KeyPair {
    Ed25519KeyPair::from_seed_unchecked(&[42; 32]).unwrap()
}

pub(crate) fn server_key() -> String {
    BASE64_STANDARD.encode(server_key_pair().public_key().as_ref())
}

/// Encodes a pass as the server does for a gateway.
pub(crate) fn sign_pass(pass: &windlass_api::agent::port_pass::PortPass) -> String {
    pass.encode(|message| server_key_pair().sign(message).as_ref().to_vec()).unwrap()
}

/// Signs a specification as the server does.
pub(crate) fn sign(body: &[u8]) -> String {
    BASE64_STANDARD.encode(server_key_pair().sign(&[SIGNED_PREFIX, body].concat()).as_ref())
}

pub(crate) fn random_uuid() -> uuid::Uuid {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).unwrap();
    uuid::Builder::from_random_bytes(bytes).into_uuid()
}

pub(crate) fn free_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], windlass_testkit::ports::reserve_free_port()))
}
