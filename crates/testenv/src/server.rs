//! The real server in a separate process, and a small client for it.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    closed_loop::{self, LoadFigures, RequestLoad},
    process,
};

pub const TOKEN: &str = "bench-token-0123456789abcdef0123456789abcdef";
const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the path of a binary of the same build as this program.
pub fn binary_path(name: &str) -> Result<PathBuf> {
    let here = std::env::current_exe()?;
    // Programs are in the same directory, tests one directory deeper.
    let found = here.ancestors().skip(1).take(2).map(|dir| dir.join(name)).find(|path| path.is_file());
    found.with_context(|| format!("`{name}` is not built in the profile of {}", here.display()))
}

/// Options for starting a server.
pub struct ServerOptions<'a> {
    pub binary: &'a Path,
    pub data: &'a Path,
    /// Defaults to SQLite in the data directory.
    pub database: Option<&'a str>,
    /// CPU core to pin the server to.
    pub core: Option<u32>,
    /// True if this machine is an instance too.
    pub local: bool,
    pub env: Vec<(&'static str, PathBuf)>,
    /// Log file; discarded by default.
    pub log: Option<&'a Path>,
}

/// The server ends on drop.
pub struct Server {
    child: Child,
    address: String,
    /// Its agent on this machine ends only with an orderly stop.
    local: bool,
    pub ready: Duration,
}

impl Server {
    pub async fn start(options: &ServerOptions<'_>) -> Result<Self> {
        let mut command = match options.core {
            Some(core) => {
                let mut command = Command::new("taskset");
                command.args(["-c", &core.to_string()]).arg(options.binary);
                command
            }
            None => Command::new(options.binary),
        };
        command.args(["server", "--port", "0", "--data-dir"]).arg(options.data);
        // Hosts of tests are on this machine.
        command.env("WINDLASS_SERVER_ALLOW_HOST_NETWORKS", "127.0.0.0/8,::1");
        command.args(["--admin-token", TOKEN]).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(match options.log {
            Some(path) => std::fs::File::options().create(true).append(true).open(path)?.into(),
            None => Stdio::null(),
        });
        // Jobs of most tests write files of this machine.
        command.env("WINDLASS_SERVER_LOCAL_PROCESSES", "own").env("WINDLASS_TEST_OWN_PROCESSES", "1");
        command.envs(options.env.iter().map(|(name, value)| (name, value)));
        if let Some(url) = options.database {
            command.args(["--database-url", url]);
        }
        if !options.local {
            command.arg("--no-local");
        }
        let started = Instant::now();
        let child = command.spawn().context("start the server (is `taskset` there?)")?;
        let mut server = Self { child, address: String::new(), local: options.local, ready: Duration::ZERO };
        while !server.read_address(options.data) || !server.is_answering().await {
            if let Some(status) = server.child.try_wait()? {
                bail!("the server ended early: {status}");
            }
            ensure!(started.elapsed() < TIMEOUT, "the server did not get ready");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        server.ready = started.elapsed();
        Ok(server)
    }

    /// Returns whether the server has written its address. A killed server leaves such a file as well.
    fn read_address(&mut self, data: &Path) -> bool {
        let text = std::fs::read_to_string(data.join("running.json")).unwrap_or_default();
        let found: Value = serde_json::from_str(&text).unwrap_or_default();
        let url = found["url"].as_str().filter(|_| found["pid"] == self.child.id());
        let address = url.and_then(|url| url.strip_prefix("http://"));
        self.address = address.unwrap_or_default().to_owned();
        !self.address.is_empty()
    }

    async fn is_answering(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(&self.address).await else { return false };
        let requested = stream.write_all(b"GET /healthcheck HTTP/1.1\r\nhost: bench\r\n\r\n").await;
        requested.is_ok() && closed_loop::read_response(&mut stream, &mut Vec::new()).await.is_ok()
    }

    /// Repeats a request for a while; `make` may change it each time.
    pub async fn load(
        &self,
        path: &str,
        body: &str,
        connections: usize,
        lasts: Duration,
        make: impl Fn(usize, usize) -> Option<Vec<u8>> + Copy + Send + 'static,
    ) -> Result<LoadFigures> {
        let request = closed_loop::build_post(path, TOKEN, body);
        let load = RequestLoad { address: self.address.clone(), request, connections, lasts };
        closed_loop::run_load(&load, make).await.with_context(|| format!("load {path}"))
    }

    pub async fn client(&self) -> Result<Client> {
        Client::connect(&self.address).await
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Stops the server as Ctrl-C does, and waits for its end.
    pub fn stop(mut self) -> Result<()> {
        self.interrupt()?;
        let ended = self.child.wait()?;
        ensure!(ended.success(), "the server ended with {ended}");
        Ok(())
    }

    fn interrupt(&self) -> Result<()> {
        let status = Command::new("kill").args(["-INT", &self.child.id().to_string()]).status()?;
        ensure!(status.success(), "signal the server");
        Ok(())
    }

    pub fn resident_mb(&self) -> Result<f64> {
        process::resident_mb(self.child.id())
    }

    /// CPU seconds that it has used.
    pub fn cpu_secs(&self) -> Result<f64> {
        process::cpu_secs(self.child.id())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.local && matches!(self.child.try_wait(), Ok(None)) && self.interrupt().is_ok() {
            let start = Instant::now();
            while matches!(self.child.try_wait(), Ok(None)) && start.elapsed() < TIMEOUT {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One keep-alive connection.
pub struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    pub async fn connect(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address).await.context("connect")?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: Vec::new() })
    }

    pub async fn post(&mut self, path: &str, body: &Value) -> Result<Value> {
        self.stream.write_all(&closed_loop::build_post(path, TOKEN, &body.to_string())).await?;
        // Any status but 200 is an error with the response.
        closed_loop::read_response(&mut self.stream, &mut self.buffer)
            .await
            .with_context(|| path.to_owned())?;
        let head = self.buffer.windows(4).position(|w| w == b"\r\n\r\n").context("no head")?;
        serde_json::from_slice(&self.buffer[head + 4..]).with_context(|| format!("read the answer of {path}"))
    }
}

/// A response of a server.
#[derive(Clone, Debug)]
pub struct ApiResponse {
    pub status: u16,
    /// Value of `Retry-After`, in seconds.
    pub retry_after: Option<u64>,
    pub body: Value,
}

impl ApiResponse {
    /// Returns the body of a successful response.
    pub fn ok(self) -> Result<Value> {
        ensure!(self.status == 200, "{}: {}", self.status, self.body);
        Ok(self.body)
    }
}

/// Sends one call over a separate connection and returns any response. A missing response is an error.
pub async fn call_api(address: &str, path: &str, body: &Value) -> Result<ApiResponse> {
    call_api_idempotent(address, path, body, None).await
}

/// Sends a call with an idempotency key.
pub async fn call_api_idempotent(
    address: &str,
    path: &str,
    body: &Value,
    key: Option<&str>,
) -> Result<ApiResponse> {
    call_api_with(address, TOKEN, path, body, key).await
}

/// Sends a call with another token.
pub async fn call_api_as(address: &str, token: &str, path: &str, body: &Value) -> Result<ApiResponse> {
    call_api_with(address, token, path, body, None).await
}

async fn call_api_with(
    address: &str,
    token: &str,
    path: &str,
    body: &Value,
    key: Option<&str>,
) -> Result<ApiResponse> {
    let body = body.to_string();
    let key = key.map_or(String::new(), |key| format!("idempotency-key: {key}\r\n"));
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: test\r\nauthorization: Bearer {token}\r\nconnection: close\r\n{key}\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = TcpStream::connect(address).await.context("connect")?;
    stream.write_all(request.as_bytes()).await.context("send")?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.context("read the answer")?;
    let head = bytes.windows(4).position(|w| w == b"\r\n\r\n").context("no answer")?;
    let (head, body) = (std::str::from_utf8(&bytes[..head])?, &bytes[head + 4..]);
    let status = head.split(' ').nth(1).context("no status")?.parse()?;
    let field = |name: &str| {
        let pairs = head.lines().filter_map(|line| line.split_once(':'));
        pairs.into_iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    };
    let retry_after = field("retry-after").and_then(|value| value.parse().ok());
    let length: Option<usize> = field("content-length").and_then(|value| value.parse().ok());
    ensure!(length.is_none_or(|length| length == body.len()), "the answer was cut off");
    Ok(ApiResponse { status, retry_after, body: serde_json::from_slice(body).unwrap_or(Value::Null) })
}

/// Request body for submitting a run.
pub fn submission(configuration: &Value) -> Value {
    let spec = serde_json::json!({"run_name": configuration["name"], "configuration": configuration,
        "profile": {"name": "default"}});
    serde_json::json!({"plan": {"run_spec": spec}, "force": false})
}

/// Raw request for submitting a run, for load tests.
pub fn submission_bytes(configuration: &Value) -> Vec<u8> {
    closed_loop::build_post("/api/project/main/runs/apply", TOKEN, &submission(configuration).to_string())
}
