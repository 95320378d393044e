//! Output of real jobs under the real runner: large, in all write sizes, and with the runner killed in between.

use std::{
    fs,
    io::{Read, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::StreamExt;
use http_body_util::{BodyExt, Full};
use hyper::{Request, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use sha2::{Digest, Sha256};
use tokio::{net::UnixStream, time::timeout};
use tokio_tungstenite::{
    client_async,
    tungstenite::{Message, client::IntoClientRequest},
};

use windlass_agent::{
    safe_open::DirHandle,
    spool::{Reader, Stream},
};
use windlass_api::agent::{LOG_END_HEADER, runner::PullResponse};
use windlass_testkit::rng::Rng;
use windlass_testkit::wait::{TIMEOUT, eventually_async};

use crate::support::{TempDir, agent, temp_dir};

const TOKEN: &str = "a token of the shim";
/// Maximum growth of a runner's memory over its job, however much that prints. A good part of it is the program's text,
/// which is large here.
const MEMORY_GROWTH_KB_MAX: u64 = 8 * 1024;

/// A runner in a separate directory; the guard ends all its descendants.
struct OutputRunner {
    init: Child,
    dir: TempDir,
}

impl OutputRunner {
    async fn start(name: &str) -> Self {
        let dir = temp_dir(name).unwrap();
        let config = serde_json::json!({
            "task": "7b6d2b41-6d0c-4a53-9b4e-0d7f0a3c9e11", "token_sha256": hex::encode(Sha256::digest(TOKEN)),
            "compat_http": null, "ssh_listen": null, "ssh_authorized_keys": [], "gpus": [], "wait_secs": 120,
        });
        fs::create_dir(dir.path().join("run")).unwrap();
        fs::write(dir.path().join("run/runner.json"), config.to_string()).unwrap();
        let mut command = Command::new(agent());
        command.args(["runner", "--dir"]).arg(dir.path().join("run")).current_dir(dir.path());
        let runner = Self { init: command.process_group(0).spawn().unwrap(), dir };
        let up = async {
            while UnixStream::connect(runner.socket()).await.is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(TIMEOUT, up).await.expect("the runner does not listen");
        runner
    }

    fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    fn socket(&self) -> PathBuf {
        self.run_dir().join("runner.sock")
    }

    /// Returns the runner itself: the first child of the init.
    fn pid(&self) -> i32 {
        let pid = self.init.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        children.split_whitespace().next().expect("the runner is gone").parse().unwrap()
    }

    fn peak_kb(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    async fn call(&self, method: &str, path: &str, body: String) -> (u16, hyper::HeaderMap, Bytes) {
        let stream = UnixStream::connect(self.socket()).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "runner")
            .header("content-type", "application/json")
            .header("authorization", format!("Bearer {TOKEN}"));
        let response = sender.send_request(request.body(Full::<Bytes>::from(body)).unwrap()).await.unwrap();
        let (head, body) = response.into_parts();
        (head.status.as_u16(), head.headers, body.collect().await.unwrap().to_bytes())
    }

    async fn run_job(&self, script: &str, quota: Option<u64>) {
        let submit = serde_json::json!({
            "run": {"id": "r"}, "log_quota_hour": quota,
            "job_spec": {"commands": ["/bin/sh", "-c", script], "working_dir": self.dir.path(), "stop_duration": 1},
        });
        assert_eq!(self.call("POST", "/api/submit", submit.to_string()).await.0, 200);
        assert_eq!(self.call("POST", "/api/run", String::new()).await.0, 200);
    }

    /// Follows the output over a WebSocket to its end.
    async fn tail(&self) -> (u64, String) {
        let mut request = "ws://runner/logs_ws".into_client_request().unwrap();
        request.headers_mut().insert("authorization", format!("Bearer {TOKEN}").parse().unwrap());
        let stream = UnixStream::connect(self.socket()).await.unwrap();
        let (mut socket, _) = client_async(request, stream).await.unwrap();
        let (mut size, mut hash) = (0, Sha256::new());
        loop {
            match timeout(TIMEOUT, socket.next()).await.expect("the tailer starves").unwrap().unwrap() {
                Message::Binary(bytes) => {
                    size += bytes.len() as u64;
                    hash.update(&bytes);
                }
                Message::Close(_) => return (size, hex::encode(hash.finalize())),
                Message::Text(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            }
        }
    }

    /// Waits for the job's last state and returns its state and reason.
    async fn ended(&self) -> (String, String) {
        let deadline = Instant::now() + TIMEOUT;
        // States only: a pull of the output's end would let the runner exit.
        let states = self.run_dir().join("states.jsonl");
        while Instant::now() < deadline {
            let text = fs::read_to_string(&states).unwrap_or_default();
            if let Some(last) = text.lines().last().filter(|line| !line.contains("\"running\"")) {
                let state: serde_json::Value = serde_json::from_str(last).unwrap();
                let word = |name: &str| state[name].as_str().unwrap().to_owned();
                return (word("state"), word("termination_reason"));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the job does not end");
    }

    async fn end(&self) -> u64 {
        let (_, headers, _) = self.call("GET", "/api/logs?stream=job&limit=0", String::new()).await;
        headers[LOG_END_HEADER].to_str().unwrap().parse().unwrap()
    }

    /// Returns a reader as the shim uses it.
    fn reader(&self) -> Reader {
        Reader::new(Arc::new(DirHandle::open(&self.run_dir()).unwrap()), Stream::Job)
    }

    async fn wait_exited(&mut self) -> i32 {
        let status = eventually_async("the runner exits", async || self.init.try_wait().unwrap()).await;
        status.code().unwrap_or(-1)
    }
}

impl Drop for OutputRunner {
    fn drop(&mut self) {
        let Some(pid) = i32::try_from(self.init.id()).ok().and_then(Pid::from_raw) else { return };
        if matches!(self.init.try_wait(), Ok(None)) {
            // With SIGTERM: it ends everything below it.
            let _ = kill_process(pid, Signal::TERM);
            let deadline = Instant::now() + Duration::from_secs(10);
            while matches!(self.init.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
            // Its group includes the runner, in case it is stuck.
            let _ = kill_process_group(pid, Signal::KILL);
            let _ = self.init.wait();
        }
    }
}

/// Writes a file of reproducible noise, and returns its hash.
fn noise(path: &Path, size: usize) -> String {
    let mut file = std::io::BufWriter::new(fs::File::create(path).unwrap());
    let (mut rng, mut hash, mut left) = (Rng::new(1), Sha256::new(), size);
    while left > 0 {
        let part = rng.bytes(left.min(64 * 1024));
        file.write_all(&part).unwrap();
        hash.update(&part);
        left -= part.len();
    }
    file.flush().unwrap();
    hex::encode(hash.finalize())
}

fn hash_file(path: &Path) -> String {
    let (mut file, mut hash) = (fs::File::open(path).unwrap(), Sha256::new());
    let mut block = [0; 64 * 1024];
    loop {
        match file.read(&mut block).unwrap() {
            0 => return hex::encode(hash.finalize()),
            size => hash.update(&block[..size]),
        }
    }
}

#[tokio::test]
async fn o1_o4_fast_output_is_stored_and_tailed_with_little_memory() {
    const SIZE: usize = 200_000_000;
    let runner = OutputRunner::start("fast").await;
    let expected = noise(&runner.dir.path().join("noise"), SIZE);
    let before = runner.peak_kb();
    runner.run_job("cat noise", None).await;
    let (one, two, ended) = tokio::join!(runner.tail(), runner.tail(), runner.ended());
    assert_eq!(ended.0, "done");
    assert_eq!(one, (SIZE as u64, expected.clone()));
    assert_eq!(two, one);
    assert_eq!(hash_file(&runner.run_dir().join("job.log")), expected);
    let growth = runner.peak_kb() - before;
    assert!(growth < MEMORY_GROWTH_KB_MAX, "the runner took {growth} kB more");
    assert_eq!(runner.reader().damage().unwrap(), []);
    assert!(runner.reader().is_complete().unwrap());
}

#[tokio::test]
async fn o1_writes_of_any_size_are_stored_unchanged() {
    const SIZE: usize = 3_000_000;
    let runner = OutputRunner::start("sizes").await;
    let expected = noise(&runner.dir.path().join("noise"), SIZE);
    // Single bytes, odd sizes, more than a pipe holds; to both outputs, in order.
    let script = "cat() { dd if=noise status=none iflag=skip_bytes,count_bytes \"$@\"; }
        cat bs=1 skip=0 count=20000; cat bs=7 skip=20000 count=70000 >&2; cat bs=4095 skip=90000 count=910000;
        cat bs=65537 skip=1000000 count=1000000 >&2; cat bs=1M skip=2000000";
    runner.run_job(script, None).await;
    assert_eq!(runner.ended().await.0, "done");
    assert_eq!(hash_file(&runner.run_dir().join("job.log")), expected);
}

#[tokio::test]
async fn o3_f16_a_killed_runner_keeps_every_byte_it_had_reported() {
    let mut runner = OutputRunner::start("killed").await;
    runner.run_job("i=0; while :; do i=$((i+1)); echo line $i; done", None).await;
    let deadline = Instant::now() + TIMEOUT;
    let reported = loop {
        let end = runner.end().await;
        if end > 300_000 {
            break end;
        }
        assert!(Instant::now() < deadline, "nothing is printed");
    };
    kill_process(Pid::from_raw(runner.pid()).unwrap(), Signal::KILL).unwrap();
    assert_eq!(runner.wait_exited().await, 128 + 9);

    let reader = runner.reader();
    let mut kept = Vec::new();
    loop {
        let bytes = reader.read(kept.len() as u64, 1 << 20).unwrap();
        if bytes.is_empty() {
            break;
        }
        kept.extend(bytes);
    }
    assert!(kept.len() as u64 >= reported, "{} of {reported} bytes", kept.len());
    assert!(!reader.is_complete().unwrap(), "nobody said so");
    let text = String::from_utf8(kept).unwrap();
    let whole = &text[..=text.rfind('\n').unwrap()];
    assert!(
        whole.lines().enumerate().all(|(at, line)| line == format!("line {}", at + 1)),
        "a line is wrong"
    );
}

#[tokio::test]
async fn o6_a_job_over_its_log_quota_fails_with_its_output_cut_at_the_quota() {
    let runner = OutputRunner::start("quota").await;
    let expected = noise(&runner.dir.path().join("noise"), 100_000);
    runner.run_job("cat noise; echo one too many; while :; do sleep 1; done", Some(100_000)).await;
    assert_eq!(runner.ended().await, ("failed".to_owned(), "log_quota_exceeded".to_owned()));
    assert_eq!(hash_file(&runner.run_dir().join("job.log")), expected);
}

#[tokio::test]
async fn o2_o7_the_last_line_is_kept_and_the_runner_exits_once_all_output_was_read() {
    let mut runner = OutputRunner::start("last").await;
    runner.run_job("echo first; echo last; exit 3", None).await;
    assert_eq!(runner.ended().await.0, "failed");
    let (_, _, body) = runner.call("GET", "/api/pull?timestamp=0", String::new()).await;
    let pull: PullResponse = serde_json::from_slice(&body).unwrap();
    assert!(!pull.has_more);
    assert_eq!(pull.job_states.last().unwrap().exit_status, Some(3));
    assert_eq!(runner.wait_exited().await, 3);
    let left = runner.reader().read(0, 100).unwrap();
    assert_eq!(String::from_utf8(left).unwrap(), "first\nlast\n");
}
