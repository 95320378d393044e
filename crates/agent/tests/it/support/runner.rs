//! A real runner under its init, in a separate directory, and a small HTTP client for its socket.

use std::{
    io::{Read, Write},
    os::unix::{net::UnixStream, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use windlass_agent::{
    proc::{self, ProcessHandle},
    task_dir::RunnerConfig,
};
use windlass_api::agent::runner::JobState;
use windlass_testkit::wait::{TIMEOUT, eventually};

use super::{TempDir, agent, temp_dir};

const TOKEN: &str = "a token for tests";
const POLL_INTERVAL: Duration = Duration::from_millis(5);

pub(crate) struct RunnerResponse {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

impl RunnerResponse {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// Settings with which a runner is started.
pub(crate) struct RunnerSetup {
    pub(crate) config: RunnerConfig,
    /// User that it runs as; root if absent.
    pub(crate) uid: Option<u32>,
    pub(crate) env: Vec<(&'static str, String)>,
    /// A script that ends in `exec "$@"`.
    pub(crate) wrapper: Option<String>,
}

impl RunnerSetup {
    pub(crate) fn new() -> Self {
        let mut random = [0; 16];
        getrandom::fill(&mut random).unwrap();
        let task = uuid::Builder::from_random_bytes(random).into_uuid().to_string().parse().unwrap();
        let config = RunnerConfig {
            task,
            token_sha256: windlass_agent::digest::sha256_hex(TOKEN.as_bytes()),
            compat_http: None,
            ssh_listen: None,
            ssh_any_port_if_taken: false,
            node_ssh_listen: None,
            ssh_authorized_keys: Vec::new(),
            gpus: Vec::new(),
            wait_secs: 60,
        };
        Self { config, uid: None, env: Vec::new(), wrapper: None }
    }

    pub(crate) fn wait_secs(mut self, secs: u64) -> Self {
        self.config.wait_secs = secs;
        self
    }

    pub(crate) fn start(self) -> Runner {
        self.start_in(temp_dir("runner").unwrap())
    }

    pub(crate) fn start_in(self, scratch: TempDir) -> Runner {
        let (run, work) = (scratch.path().join("run"), scratch.path().join("scratch"));
        for dir in [&run, &work] {
            std::fs::create_dir_all(dir).unwrap();
            std::os::unix::fs::chown(dir, self.uid, self.uid).unwrap();
        }
        std::fs::write(run.join("runner.json"), serde_json::to_vec(&self.config).unwrap()).unwrap();
        // The build directory may be inaccessible to other users.
        let own = self.uid.map(|_| scratch.path().join("windlass-agent"));
        if let Some(own) = &own {
            std::fs::copy(agent(), own).unwrap();
        }
        let agent = own.as_deref().unwrap_or_else(|| agent());
        let mut command = match &self.wrapper {
            Some(script) => {
                let mut command = Command::new("/bin/sh");
                command.args(["-c", script, "sh"]).arg(agent);
                command
            }
            None => Command::new(agent),
        };
        command.args(["runner", "--dir"]).arg(&run).current_dir(&work).env_clear().stdin(Stdio::null());
        command
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("WINDLASS_TASK_ID", self.config.task.to_string());
        command.envs(self.env.iter().map(|(name, value)| (*name, value.as_str())));
        if let Some(uid) = self.uid {
            command.uid(uid).gid(uid);
        }
        let child = command.spawn().unwrap();
        let runner = Runner { child, run, mark: self.config.task.to_string(), scratch };
        eventually("the runner listens", || UnixStream::connect(runner.run.join("runner.sock")).is_ok());
        runner
    }
}

pub(crate) struct Runner {
    child: Child,
    run: PathBuf,
    mark: String,
    scratch: TempDir,
}

impl Runner {
    pub(crate) fn start() -> Self {
        RunnerSetup::new().start()
    }

    pub(crate) fn run_dir(&self) -> &Path {
        &self.run
    }

    /// Initial directory of the job.
    pub(crate) fn work(&self) -> PathBuf {
        self.scratch.path().join("scratch")
    }

    pub(crate) fn init(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    /// Returns the runner itself, below its init.
    pub(crate) fn inner(&self) -> i32 {
        let all = proc::list().unwrap();
        all.iter().find(|one| one.parent == self.init()).unwrap().name.pid
    }

    pub(crate) fn call(&self, method: &str, path: &str, body: &[u8]) -> RunnerResponse {
        let head = format!("Authorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n");
        self.call_with(method, path, &head, body)
    }

    /// Uses HTTP/1.0: the response ends with the connection.
    pub(crate) fn call_with(&self, method: &str, path: &str, head: &str, body: &[u8]) -> RunnerResponse {
        self.try_call(method, path, head, body).unwrap()
    }

    fn try_call(&self, method: &str, path: &str, head: &str, body: &[u8]) -> std::io::Result<RunnerResponse> {
        let mut stream = UnixStream::connect(self.run.join("runner.sock"))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        write!(stream, "{method} {path} HTTP/1.0\r\nContent-Length: {}\r\n{head}\r\n", body.len())?;
        // The response may come before all was sent.
        let _ = stream.write_all(body);
        Ok(read_response(stream))
    }

    pub(crate) fn get(&self, path: &str) -> RunnerResponse {
        self.call("GET", path, b"")
    }

    pub(crate) fn post(&self, path: &str) -> RunnerResponse {
        self.call("POST", path, b"")
    }

    pub(crate) fn submit(&self, submit: &Value) {
        let answer = self.call("POST", "/api/submit", &serde_json::to_vec(submit).unwrap());
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    /// Submits and runs, and returns the response of `run`.
    pub(crate) fn go(&self, submit: &Value) -> RunnerResponse {
        self.submit(submit);
        let answer = self.post("/api/run");
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer
    }

    /// Runs a script to its end, and returns its last state.
    pub(crate) fn run_to_end(&self, submit: &Value) -> JobState {
        self.go(submit);
        self.ended()
    }

    /// Returns the states on disk: they are written before they are reported.
    pub(crate) fn states(&self) -> Vec<JobState> {
        let text = std::fs::read_to_string(self.run.join("states.jsonl")).unwrap_or_default();
        // The last line may be incomplete.
        text.split_inclusive('\n')
            .filter(|line| line.ends_with('\n'))
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// Waits for the job's last state.
    #[track_caller]
    pub(crate) fn ended(&self) -> JobState {
        let last = || self.states().pop().filter(|state| state.state != "running");
        eventually("the job has ended", || last().is_some());
        last().unwrap()
    }

    pub(crate) fn log(&self) -> Vec<u8> {
        std::fs::read(self.run.join("job.log")).unwrap()
    }

    pub(crate) fn log_text(&self) -> String {
        String::from_utf8(self.log()).unwrap()
    }

    #[track_caller]
    pub(crate) fn wait_printed(&self, text: &str) {
        eventually(&format!("the job prints {text:?}"), || self.log_text().contains(text));
    }

    /// Acknowledges all output to the runner.
    pub(crate) fn read_all(&self) {
        let size = self.log().len();
        assert_eq!(self.post(&format!("/api/logs/read?stream=job&offset={size}")).status, 200);
    }

    /// Waits for the whole task to end; returns its exit code.
    #[track_caller]
    pub(crate) fn exited(&mut self) -> i32 {
        let mut code = None;
        eventually("the runner exits", || {
            code = self.child.try_wait().unwrap();
            code.is_some()
        });
        code.unwrap().code().unwrap()
    }

    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Returns the live processes of the task, except init and runner.
    pub(crate) fn others(&self) -> Vec<i32> {
        let mark = format!("WINDLASS_TASK_ID={}", self.mark);
        let own = [self.init(), self.inner()];
        let all = proc::list().unwrap().into_iter().filter(|one| one.state == proc::ProcessState::Alive);
        all.map(|one| one.name.pid)
            .filter(|pid| !own.contains(pid) && proc::was_started_with(*pid, &[&mark]))
            .collect()
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        // The runner first: its init then ends everything else, and itself.
        for below in proc::descendants(self.init()).unwrap_or_default() {
            if let Ok(Some(held)) = ProcessHandle::open(below.name) {
                let _ = held.signal(Signal::KILL);
            }
        }
        let until = Instant::now() + Duration::from_secs(10);
        while Instant::now() < until {
            if matches!(self.child.try_wait(), Ok(Some(_)) | Err(_)) {
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_response(mut stream: UnixStream) -> RunnerResponse {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
    let head = std::str::from_utf8(&bytes[..end]).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    RunnerResponse { status, body: bytes.split_off(end + 4) }
}

/// Returns a job of one script.
pub(crate) fn script(text: &str) -> Value {
    job(json!({ "commands": ["/bin/sh", "-c", text] }))
}

pub(crate) fn job(spec: Value) -> Value {
    json!({ "run": { "id": "run-1" }, "job_submission": { "id": "job-1" }, "job_spec": spec })
}

pub(crate) fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}
