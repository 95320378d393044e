//! A shim in a separate process, enrolled with a test key, and its tasks.

use std::{
    ffi::{OsStr, OsString},
    io::{Read, Write},
    os::unix::net::UnixStream as Blocking,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail, ensure};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use ring::{
    digest, rand,
    signature::{Ed25519KeyPair, KeyPair},
};
use serde_json::json;
use tokio::net::UnixStream;
use uuid::Uuid;

use windlass_api::agent::{
    SIGNED_PREFIX,
    client::{ShimClient, ShimError, SignedSpec},
    events::ShimEventKind,
    runner::SubmitBody,
    shim::{ProcessIsolation, TaskStatus, TerminateRequest},
};
use windlass_model::id::SubmissionId;

const CREDENTIAL: &str = "credential-of-the-benchmark";
const EPOCH: i64 = 1;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Polling interval.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

pub(super) struct ShimProcess {
    child: Child,
    home: PathBuf,
    hosts: usize,
    /// Its command line.
    words: Vec<OsString>,
    instance: Uuid,
    key: Ed25519KeyPair,
    /// Time from exec to the first response.
    pub(super) ready: Duration,
}

impl ShimProcess {
    pub(super) fn start(agent: &Path, home: &Path, args: &[&str]) -> Result<Self> {
        Self::start_with_policy(agent, home, args, "")
    }

    pub(super) fn start_with_policy(agent: &Path, home: &Path, args: &[&str], policy: &str) -> Result<Self> {
        let hosts = args.iter().skip_while(|arg| **arg != "--hosts").nth(1).map_or(Ok(0), |n| n.parse())?;
        let key = Ed25519KeyPair::from_seed_unchecked(&[7; 32]).ok().context("failed to create a key")?;
        let instance = random_uuid()?;
        std::fs::create_dir_all(home)?;
        enrol(agent, home, instance, &key)?;
        for number in 1..=hosts {
            let below = home.join(host_name(number));
            std::fs::create_dir(&below)?;
            std::fs::copy(home.join("enrolment.json"), below.join("enrolment.json"))?;
        }
        std::fs::write(home.join("policy.yml"), policy)?;
        let file = home.join("policy.yml");
        let last: [&OsStr; 6] = [
            "--home".as_ref(),
            home.as_ref(),
            "--policy".as_ref(),
            file.as_ref(),
            "--log".as_ref(),
            "error".as_ref(),
        ];
        let mut words: Vec<OsString> = vec![agent.into(), "shim".into()];
        words.extend(args.iter().map(OsString::from));
        words.extend(last.map(OsStr::to_os_string));
        let started = Instant::now();
        let child = spawn(&words)?;
        let mut host =
            Self { child, home: home.to_owned(), hosts, words, instance, key, ready: Duration::ZERO };
        host.wait_until_ready(started)?;
        host.ready = started.elapsed();
        Ok(host)
    }

    fn wait_until_ready(&mut self, started: Instant) -> Result<()> {
        // The last of many: then all are up.
        while !is_answering(&self.socket(self.hosts)) {
            if let Some(status) = self.child.try_wait()? {
                bail!("the shim exited early: {status}");
            }
            ensure!(started.elapsed() < TIMEOUT, "the shim does not respond");
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Kills the shim as a crash does, and starts it again.
    pub(super) fn restart_after_kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        self.child = spawn(&self.words)?;
        self.wait_until_ready(Instant::now())
    }

    /// Ends and removes all tasks.
    pub(super) fn remove_all(&self) -> Result<()> {
        self.clear()
    }

    fn socket(&self, number: usize) -> PathBuf {
        if self.hosts == 0 {
            self.home.join("shim.sock")
        } else {
            self.home.join(host_name(number)).join("shim.sock")
        }
    }

    pub(super) async fn connect(&self) -> Result<ShimClient> {
        self.connect_to(1).await
    }

    pub(super) async fn connect_to(&self, number: usize) -> Result<ShimClient> {
        let stream =
            UnixStream::connect(self.socket(number)).await.context("failed to connect to the shim")?;
        Ok(ShimClient::connect(stream, CREDENTIAL).await?)
    }

    pub(super) fn resident_kb(&self) -> Result<f64> {
        memory_kb(self.child.id(), "VmRSS")
    }

    /// Submits a task to the shim, which starts it immediately.
    pub(super) async fn submit(
        &self,
        shim: &ShimClient,
        image: &str,
        isolation: ProcessIsolation,
    ) -> Result<ShimTask> {
        self.submit_on(shim, image, isolation, "host").await
    }

    /// Submits a task on this network: `host` or `bridge`.
    pub(super) async fn submit_on(
        &self,
        shim: &ShimClient,
        image: &str,
        isolation: ProcessIsolation,
        network: &str,
    ) -> Result<ShimTask> {
        let id = random_uuid()?;
        let expires = unix_secs()? + 3600;
        let body = serde_json::to_vec(&json!({
            "id": id, "name": "bench", "image_name": image, "network_mode": network, "process_isolation": isolation,
            "claims": {"instance_id": self.instance, "epoch": EPOCH, "expires_at": expires},
        }))?;
        let signature = STANDARD.encode(self.key.sign(&[SIGNED_PREFIX, &body].concat()).as_ref());
        shim.submit(&SignedSpec { body, signature }, EPOCH).await?;
        Ok(ShimTask { shim: shim.clone(), id: SubmissionId(id) })
    }

    /// Process of a task's runner, if tasks are processes.
    pub(super) fn runner(&self, id: SubmissionId) -> Result<RunnerProcess> {
        // Its directory depends on the confinement.
        let dir = format!("/{id}/run");
        for entry in std::fs::read_dir("/proc")? {
            let path = entry?.path();
            let line = std::fs::read(path.join("cmdline")).unwrap_or_default();
            let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
            if words.contains(&b"--inner".as_slice())
                && words.iter().any(|word| word.ends_with(dir.as_bytes()))
            {
                let pid = path.file_name().and_then(|name| name.to_str()).context("invalid process id")?;
                return Ok(RunnerProcess { pid: pid.parse()? });
            }
        }
        bail!("no runner process for {id}")
    }
}

impl Drop for ShimProcess {
    fn drop(&mut self) {
        // Tasks outlive a shim; those of a failed benchmark are ended here.
        let _ = self.clear();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl ShimProcess {
    fn clear(&self) -> Result<()> {
        if self.hosts > 0 {
            return Ok(());
        }
        let started = Instant::now();
        while started.elapsed() < TIMEOUT {
            let list = call_shim(&self.socket(0), "GET", "/api/tasks")?;
            let list: serde_json::Value = serde_json::from_str(&list)?;
            let tasks = list["tasks"].as_array().cloned().unwrap_or_default();
            if tasks.is_empty() {
                break;
            }
            for id in tasks.iter().filter_map(|task| task["id"].as_str()) {
                call_shim(&self.socket(0), "POST", &format!("/api/tasks/{id}/terminate"))?;
                call_shim(&self.socket(0), "POST", &format!("/api/tasks/{id}/remove"))?;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

/// An active task.
pub(super) struct ShimTask {
    pub(super) shim: ShimClient,
    pub(super) id: SubmissionId,
}

impl ShimTask {
    /// Submits the job to the task's runner, as soon as it exists.
    pub(super) async fn submit_job(&self, job: &SubmitBody) -> Result<()> {
        self.wait_for_status(TaskStatus::Running).await?;
        let started = Instant::now();
        loop {
            match self.shim.submit_job(self.id, job, EPOCH).await {
                Ok(()) => return Ok(()),
                Err(error @ (ShimError::Status { .. } | ShimError::Conflict { .. })) => {
                    ensure!(started.elapsed() < TIMEOUT, "the runner accepts no job: {error}");
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    pub(super) async fn run(&self) -> Result<()> {
        self.shim.run_job(self.id, EPOCH).await?;
        Ok(())
    }

    pub(super) async fn wait_until_running(&self) -> Result<()> {
        self.wait_for_status(TaskStatus::Running).await
    }

    /// Ends and removes a task that has no job.
    pub(super) async fn abort(self) -> Result<()> {
        self.shim.terminate(self.id, &TerminateRequest::default(), EPOCH).await?;
        self.wait_for_status(TaskStatus::Terminated).await?;
        self.shim.remove(self.id, EPOCH).await?;
        Ok(())
    }

    /// Acknowledges the whole log, waits for the end and removes the task.
    pub(super) async fn finish(self) -> Result<()> {
        let end = loop {
            let part = self.shim.log(self.id, "job", u64::MAX, 0, TIMEOUT).await?;
            if part.is_complete {
                break part.end;
            }
        };
        // The runner may have ended already.
        let _ = self.shim.acknowledge_log(self.id, "job", end).await;
        self.shim.terminate(self.id, &TerminateRequest::default(), EPOCH).await?;
        self.wait_for_status(TaskStatus::Terminated).await?;
        self.shim.remove(self.id, EPOCH).await?;
        Ok(())
    }

    /// Waits for a status, using the host's events.
    async fn wait_for_status(&self, status: TaskStatus) -> Result<()> {
        let wait = async {
            let mut events = self.shim.events(None).await?;
            while let Some(event) = events.next().await? {
                let ShimEventKind::Task { info } = event.kind else { continue };
                if info.id == self.id && info.status == status {
                    return Ok(());
                }
                let over = info.id == self.id && info.status == TaskStatus::Terminated;
                ensure!(!over, "the task ended: {} {}", info.termination_reason, info.termination_message);
            }
            bail!("the event stream ended")
        };
        tokio::time::timeout(TIMEOUT, wait).await.context("the task took too long")?
    }
}

pub(super) struct RunnerProcess {
    pid: u32,
}

impl RunnerProcess {
    pub(super) fn peak_kb(&self) -> Result<f64> {
        memory_kb(self.pid, "VmHWM")
    }
}

fn spawn(words: &[OsString]) -> Result<Child> {
    let (program, args) = words.split_first().context("no program")?;
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().context("failed to start the shim")
}

fn enrol(agent: &Path, home: &Path, instance: Uuid, key: &Ed25519KeyPair) -> Result<()> {
    let hash = digest::digest(&digest::SHA256, CREDENTIAL.as_bytes());
    let hash: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let status = Command::new(agent)
        .args(["shim", "enrol", "--instance", &instance.to_string(), "--credential-sha256", &hash])
        .args(["--server-key", &STANDARD.encode(key.public_key().as_ref()), "--home"])
        .arg(home)
        .status()?;
    ensure!(status.success(), "failed to enrol the host");
    Ok(())
}

#[expect(
    clippy::disallowed_methods,
    reason = "the shim compares it with its host's clock, which is this one"
)]
fn unix_secs() -> Result<u64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())
}

fn random_uuid() -> Result<Uuid> {
    let bytes: [u8; 16] =
        rand::generate(&rand::SystemRandom::new()).ok().context("failed to generate random bytes")?.expose();
    Ok(uuid::Builder::from_random_bytes(bytes).into_uuid())
}

fn host_name(number: usize) -> String {
    format!("host-{number:04}")
}

fn memory_kb(pid: u32, what: &str) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|line| line.starts_with(what)).with_context(|| format!("no {what}"))?;
    Ok(line.split_whitespace().nth(1).context("no number")?.parse()?)
}

fn is_answering(socket: &Path) -> bool {
    call_shim(socket, "GET", "/api/healthcheck").is_ok_and(|body| body.contains("service"))
}

/// Sends one call, with minimal overhead.
fn call_shim(socket: &Path, method: &str, path: &str) -> Result<String> {
    let mut stream = Blocking::connect(socket)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let body = if method == "POST" { "{}" } else { "" };
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: shim\r\nauthorization: Bearer {CREDENTIAL}\r\nwindlass-epoch: {EPOCH}\r\n\
         content-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (_, body) = answer.split_once("\r\n\r\n").context("no response")?;
    Ok(body.to_owned())
}
