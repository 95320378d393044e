//! Environment for tests of agents: a server's side, and real agents.

use std::{
    fs,
    io::{Read, Write},
    os::unix::{fs::OpenOptionsExt, net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use serde_json::json;
use windlass_api::agent::{runner::JobStarted, shim::TaskSpec};
use windlass_backend::{AgentEndpoint, BackendInstance};
use windlass_model::{
    id::{InstanceId, RunId, SubmissionId},
    instance,
};
use windlass_server::{
    agents::{AgentApi, AgentError, CallContext, HttpAgents, JobStart, discard, enrolment},
    app::App,
    config::{Settings, SettingsSource},
    db::{Db, Unit, Val, instances},
    encryption::Keyring,
    params,
};
use windlass_testkit::wait::{TIMEOUT, eventually_async, eventually_ok_async};
use windlass_testkit::{TempDir, temp_dir};
use windlass_tunnel::{Backoff, SshPool};

use crate::{
    db::DbFixture,
    db_fixtures::{self, TestOwner},
};

/// A server without routes and pipelines: database, keys, and the agent client.
pub(crate) struct AgentTestEnv {
    home: DbFixture,
    pub(crate) dir: TempDir,
    pub(crate) app: App,
    pub(crate) wire: Arc<HttpAgents>,
    pub(crate) made: TestOwner,
}

impl AgentTestEnv {
    pub(crate) async fn sqlite() -> Self {
        Self::with_database(DbFixture::sqlite().await).await
    }

    pub(crate) async fn postgres() -> Self {
        Self::with_database(DbFixture::postgres().await).await
    }

    async fn with_database(home: DbFixture) -> Self {
        let dir = temp_dir("agents").unwrap();
        let given = SettingsSource { data_dir: Some(dir.path().join("data")), ..SettingsSource::default() };
        let settings = Settings::new(given, None).unwrap();
        let keys = Keyring::open(&dir.path().join("keys/master")).unwrap();
        let app = App::new(home.db().clone(), settings, keys).unwrap();
        windlass_server::services::secrets::claim_key(&app).await.unwrap();
        let made = db_fixtures::create_owner(home.db()).await;
        let wire = HttpAgents::new(&app, ssh_hosts());
        Self { home, dir, app, wire, made }
    }

    pub(crate) fn db(&self) -> &Db {
        self.home.db()
    }

    /// The client of another replica to the same hosts.
    pub(crate) fn second_agents(&self) -> Arc<HttpAgents> {
        HttpAgents::new(&self.app, ssh_hosts())
    }

    /// Inserts an instance whose agent answers at `reach`, now or later.
    pub(crate) async fn instance(&self, num: i64, reach: AgentEndpoint) -> InstanceId {
        let id = InstanceId(self.db().new_id().unwrap());
        let row = new_instance(self, id, num, Some(&new_machine(reach)), None);
        self.write(Unit::new().and([instances::insert(row)])).await;
        id
    }

    pub(crate) async fn write(&self, unit: Unit) {
        self.db().write(unit).await.unwrap().done().unwrap();
    }

    /// Inserts a job on the instance that is due in an hour.
    pub(crate) async fn job_start(
        &self,
        run: RunId,
        num: i64,
        instance: InstanceId,
        status: &str,
    ) -> SubmissionId {
        let id = SubmissionId(self.db().new_id().unwrap());
        let values = vec![
            ("id", id.into()),
            ("run_id", run.into()),
            ("project_id", self.made.project.into()),
            ("job_name", format!("train-0-{num}").into()),
            ("replica_num", 0_i64.into()),
            ("job_num", num.into()),
            ("submission_num", 0_i64.into()),
            ("job_spec", "{}".into()),
            ("instance_id", instance.into()),
            ("submitted_at", Val::Now),
            ("status", status.into()),
            ("last_processed_at", Val::Now),
            ("due_at", Val::NowPlus(3_600_000_000)),
        ];
        self.write(Unit::new().insert("jobs", values)).await;
        id
    }

    pub(crate) async fn run(&self, name: &str) -> RunId {
        db_fixtures::insert_run(self.db(), &self.made, name).await
    }

    /// Returns whether the row is due at once.
    pub(crate) async fn is_due(&self, table: &str, id: uuid::Uuid) -> bool {
        let sql = format!("SELECT due_at FROM {table} WHERE id = $1");
        let row = self.db().query_opt(sql, params![id]).await.unwrap().unwrap();
        row.opt_int(0).unwrap().is_none()
    }

    pub(crate) async fn postpone(&self, table: &str, id: uuid::Uuid) {
        let sql = format!("UPDATE {table} SET due_at = now_us() + 3600000000 WHERE id = $1");
        self.write(Unit::new().exec(sql, params![id])).await;
    }

    pub(crate) async fn wait_until_due(&self, table: &str, id: uuid::Uuid) {
        let what = format!("the row of {table} is due");
        eventually_async(&what, async || self.is_due(table, id).await.then_some(())).await;
    }

    /// Waits for a host that was restarted and returns its tasks. Calls while it was down (such as copies of output)
    /// delay the next connection attempt.
    pub(crate) async fn wait_until_reachable(&self, instance: InstanceId) -> Vec<SubmissionId> {
        eventually_ok_async("the host answers", async || self.wire.tasks(instance).await).await
    }

    /// Waits until the task has this status.
    pub(crate) async fn wait_for_task(
        &self,
        call: CallContext,
        status: windlass_api::agent::shim::TaskStatus,
    ) {
        eventually_ok_async(&format!("the task is {status:?}"), async || {
            let info = self.wire.task(call).await.unwrap();
            if info.status == status { Ok(()) } else { Err(format!("{info:?}")) }
        })
        .await;
    }

    /// Ends and removes the task as a pass does: the end takes time, and nothing is removed before it.
    pub(crate) async fn discard(&self, call: CallContext) {
        let gone = async || match discard(&*self.wire, call, "terminated_by_server").await {
            Err(AgentError::Conflict { reason }) => Err(reason),
            answer => {
                answer.unwrap();
                Ok(())
            }
        };
        eventually_ok_async("the task is removed", gone).await;
    }

    /// Starts the job as a pass does: the call is repeated until the runner listens.
    pub(crate) async fn start_job(&self, call: CallContext, job: &JobStart) -> Option<JobStarted> {
        eventually_ok_async("the runner takes the job", async || match self.wire.start_job(call, job).await {
            Err(AgentError::Conflict { reason }) => Err(reason),
            answer => Ok(answer.unwrap()),
        })
        .await
    }

    /// Waits until the job has ended, and returns its state and exit status.
    pub(crate) async fn wait_until_ended(&self, call: CallContext) -> (String, Option<i32>) {
        eventually_ok_async("the job ends", async || {
            let pulled = self.wire.pull(call).await.unwrap();
            match pulled.record.states.last() {
                Some(last) if last.state != "running" => Ok((last.state.clone(), last.exit_status)),
                Some(_) | None => Err(format!("{pulled:?}")),
            }
        })
        .await
    }
}

pub(crate) fn ssh_hosts() -> Arc<SshPool<InstanceId>> {
    let backoff = Backoff { initial: Duration::from_millis(50), max: Duration::from_secs(1) };
    Arc::new(SshPool::new(backoff))
}

pub(crate) fn new_machine(reach: AgentEndpoint) -> BackendInstance {
    BackendInstance {
        id: "test".into(),
        reach: Some(reach),
        hostname: None,
        internal_ip: None,
        has: None,
        agent_version: None,
        memo: serde_json::Value::Null,
    }
}

pub(crate) fn new_instance(
    kit: &AgentTestEnv,
    id: InstanceId,
    num: i64,
    machine: Option<&BackendInstance>,
    ssh_sealed: Option<Vec<u8>>,
) -> instances::NewInstance {
    instances::NewInstance {
        id,
        project_id: kit.made.project,
        fleet_id: None,
        name: format!("host-{num}"),
        instance_num: num,
        backend: Some("local".into()),
        region: None,
        hostname: None,
        price: Some(0.0),
        spot: false,
        instance_type: None,
        offer: None,
        provisioning: machine.map(|machine| serde_json::to_string(machine).unwrap()),
        ssh: None,
        ssh_sealed,
        requirements: None,
        profile: None,
        status: instance::Status::Idle,
        total_blocks: None,
        idle_seconds_max: None,
    }
}

pub(crate) fn call_context(instance: InstanceId, submission: SubmissionId, epoch: i64) -> CallContext {
    CallContext { instance, submission, epoch }
}

/// A minimal task.
pub(crate) fn minimal_task(id: SubmissionId) -> TaskSpec {
    serde_json::from_value(json!({"id": id, "name": "train-0-0", "image_name": "none"})).unwrap()
}

pub(crate) fn job(commands: &[&str]) -> JobStart {
    let job = json!({
        "run": {"id": "1", "run_spec": {"run_name": "train"}},
        "job_spec": {"commands": commands, "env": {"GREETING": "hello"}},
    });
    JobStart { submit: serde_json::from_value(job).unwrap(), code: None, archives: Vec::new() }
}

/// Prints a measurement: timings are not tests.
pub(crate) fn print_measurement(text: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Path of the agent binary next to this test. `cargo xtask test` builds it; otherwise it is built now.
pub(crate) fn agent_binary() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let binary = test.parent().and_then(Path::parent).unwrap().join("windlass-agent");
    if !binary.exists() {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
        let built = Command::new(cargo).args(["build", "-q", "-p", "windlass-agent"]).status().unwrap();
        assert!(built.success() && binary.exists(), "build windlass-agent first");
    }
    binary
}

/// A real, enrolled shim. Dropping it ends everything that it started.
pub(crate) struct TestShim {
    pub(crate) instance: InstanceId,
    home: PathBuf,
    args: Vec<String>,
    credential: String,
    child: Option<Child>,
}

impl TestShim {
    /// Creates an instance and starts its shim, reachable over a socket.
    pub(crate) async fn start(kit: &AgentTestEnv, runtime: &str) -> Self {
        let home = kit.dir.path().join("agent");
        let instance = kit.instance(0, AgentEndpoint::Socket { path: home.join("shim.sock") }).await;
        Self::of(kit, instance, home, &["--runtime", runtime]).await
    }

    pub(crate) async fn of(kit: &AgentTestEnv, instance: InstanceId, home: PathBuf, args: &[&str]) -> Self {
        let reported = enrolment::enrolment(kit.db(), kit.app.keys(), instance).await.unwrap();
        let credential = enrolment::credential(kit.db(), kit.app.keys(), instance).await.unwrap();
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        let mut shim = Self { instance, home, args, credential, child: None };
        shim.enrol(&reported.credential_sha256, &reported.server_key);
        shim.start_again();
        shim
    }

    pub(crate) fn enrol(&self, credential_sha256: &str, server_key: &str) {
        let mut command = Command::new(agent_binary());
        command.args(["shim", "enrol", "--home"]).arg(&self.home);
        command.args(["--instance", &self.instance.to_string(), "--server-key", server_key]);
        command.args(["--credential-sha256", credential_sha256]);
        assert!(command.status().unwrap().success());
    }

    pub(crate) fn start_again(&mut self) {
        let mut policy = fs::OpenOptions::new();
        policy.create(true).append(true).mode(0o600).open(self.home.join("policy.yml")).unwrap();
        let log = fs::OpenOptions::new().create(true).append(true).open(self.home.join("log")).unwrap();
        let mut command = Command::new(agent_binary());
        command.args(["shim", "--log", "debug", "--home"]).arg(&self.home);
        command.arg("--policy").arg(self.home.join("policy.yml")).args(&self.args);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.child = Some(command.spawn().unwrap());
        let until = Instant::now() + TIMEOUT;
        while self.call("GET", "/api/healthcheck").is_none() {
            let exited = self.child.as_mut().unwrap().try_wait().unwrap();
            assert!(exited.is_none() && Instant::now() < until, "no shim: {exited:?}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Sends SIGKILL.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        let many = self.args.iter().any(|arg| arg == "--hosts");
        self.home.join(if many { "host-0001/shim.sock" } else { "shim.sock" })
    }

    fn log(&self) -> String {
        fs::read_to_string(self.home.join("log")).unwrap_or_default()
    }

    /// Sends one request without an async runtime.
    fn call(&self, method: &str, path: &str) -> Option<String> {
        let mut stream = UnixStream::connect(self.socket()).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: shim\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\
             Content-Length: 2\r\n\r\n{{}}",
            self.credential
        );
        stream.write_all(head.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned())
    }

    /// Ends and removes every task that a failed test left.
    fn clear(&mut self) {
        let left = fs::read_dir(self.home.join("tasks")).map_or(0, Iterator::count);
        if left == 0 || self.child.is_none() {
            return;
        }
        let until = Instant::now() + Duration::from_secs(10);
        while Instant::now() < until {
            let Some(list) = self.call("GET", "/api/tasks") else { return };
            let list: serde_json::Value = serde_json::from_str(&list).unwrap_or_default();
            let ids: Vec<_> =
                list["tasks"].as_array().into_iter().flatten().filter_map(|t| t["id"].as_str()).collect();
            if ids.is_empty() {
                return;
            }
            for id in ids {
                self.call("POST", &format!("/api/tasks/{id}/terminate"));
                self.call("POST", &format!("/api/tasks/{id}/remove"));
            }
        }
    }
}

impl Drop for TestShim {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = writeln!(std::io::stderr(), "── the shim said\n{}", self.log());
        }
        self.clear();
        self.kill();
        kill_all_below(&self.home);
    }
}

/// Kills all processes with a path below `home` in their command line.
fn kill_all_below(home: &Path) {
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until {
        let mut found = false;
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let name = entry.file_name();
            let Some(pid) = name.to_str().filter(|name| name.bytes().all(|b| b.is_ascii_digit())) else {
                continue;
            };
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let named = String::from_utf8_lossy(&line).contains(&*home.to_string_lossy());
            if named && pid != std::process::id().to_string() {
                found = true;
                let _ = Command::new("kill").args(["-9", pid]).stderr(Stdio::null()).status();
            }
        }
        if !found {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs each test, a function of `&AgentTestEnv`, on both databases.
macro_rules! on_both_kits {
    ($($name:ident)*) => {
        mod sqlite {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name(&crate::agents_host::AgentTestEnv::sqlite().await).await;
                }
            )*
        }
        mod postgres {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name(&crate::agents_host::AgentTestEnv::postgres().await).await;
                }
            )*
        }
    };
}
pub(crate) use on_both_kits;
