//! Programs of the benchmark, each pinned to a core: upstream, nginx, wrk.

use std::{
    fmt::Write as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use windlass_testenv::process;

const READY_TIMEOUT: Duration = Duration::from_secs(10);
/// Size of each response.
const BODY_BYTES: usize = 1024;
/// Interval between two events of a stream.
pub(super) const EVENT_INTERVAL: Duration = Duration::from_secs(10);

/// A program pinned to a core, which ends on drop.
pub(super) struct PinnedProcess {
    child: Child,
    pub(super) address: SocketAddr,
}

impl PinnedProcess {
    /// Returns when it responds at `address`.
    pub(super) async fn start(
        core: u32,
        program: &Path,
        words: &[String],
        address: SocketAddr,
    ) -> Result<Self> {
        let child = Command::new("taskset")
            .args(["-c", &core.to_string()])
            .arg(program)
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("failed to start {}", program.display()))?;
        let mut pinned = Self { child, address };
        let started_at = Instant::now();
        while TcpStream::connect(address).await.is_err() {
            if let Some(status) = pinned.child.try_wait()? {
                bail!("{} exited: {status}", program.display());
            }
            ensure!(
                started_at.elapsed() < READY_TIMEOUT,
                "{} does not listen at {address}",
                program.display()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(pinned)
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for PinnedProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Raises the limit of open files of this process and its children.
pub(super) fn raise_file_limit(files: u64) -> Result<()> {
    let now = getrlimit(Resource::Nofile);
    if now.current.is_none_or(|most| most >= files) {
        return Ok(());
    }
    // Only root may raise the hard limit.
    let maximum = now.maximum.map(|most| most.max(files));
    setrlimit(Resource::Nofile, Rlimit { current: Some(files), maximum })
        .with_context(|| format!("{files} open files are required; run `ulimit -n {files}`"))
}

/// Writes the configuration of an nginx with one process, because the windlass proxy has one thread.
pub(super) fn nginx_config(scratch: &Path, listen: SocketAddr, upstream: SocketAddr) -> Result<PathBuf> {
    let place = scratch.join(format!("nginx-{}", listen.port()));
    std::fs::create_dir_all(&place)?;
    let dir = place.display();
    let mut temporary = String::new();
    for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
        writeln!(temporary, "  {kind}_temp_path {dir}/{kind};")?;
    }
    // Like the windlass proxy, it keeps connections open on both sides and sends the same headers about the client to
    // the upstream.
    let text = format!(
        "daemon off;\nmaster_process off;\nworker_processes 1;\npid {dir}/pid;\nerror_log {dir}/error.log warn;\n\
         events {{ worker_connections 20000; }}\n\
         http {{\n{temporary}  access_log off;\n  keepalive_requests 1000000000;\n\
         upstream up {{ server {upstream}; keepalive 256; keepalive_requests 1000000000; }}\n\
         server {{\n    listen {listen} backlog=4096;\n    proxy_http_version 1.1;\n\
         proxy_set_header Connection \"\";\n    proxy_set_header Host $host;\n\
         proxy_set_header X-Forwarded-For $remote_addr;\n    proxy_set_header X-Forwarded-Proto $scheme;\n\
         proxy_set_header X-Forwarded-Host $host;\n    proxy_read_timeout 1h;\n\
         location / {{ proxy_pass http://up; }}\n\
         location /sse {{ proxy_pass http://up; proxy_buffering off; }}\n  }}\n}}\n"
    );
    let file = place.join("nginx.conf");
    std::fs::write(&file, text)?;
    Ok(file)
}

/// Responds with minimal cost: `proxy-upstream LISTEN`. `/sse` streams events.
pub(super) fn run_upstream(arguments: &[String]) -> Result<()> {
    let [listen] = arguments else { bail!("expected the argument LISTEN") };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(listen).await?;
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            tokio::spawn(async move {
                // A closed connection is not an error.
                let _ = serve_requests(stream).await;
            });
        }
    })
}

async fn serve_requests(mut stream: TcpStream) -> Result<()> {
    let mut answer =
        format!("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {BODY_BYTES}\r\n\r\n")
            .into_bytes();
    answer.resize(answer.len() + BODY_BYTES, b'x');
    let mut requested = Vec::with_capacity(2048);
    loop {
        requested.clear();
        while !requested.ends_with(b"\r\n\r\n") {
            if stream.read_buf(&mut requested).await? == 0 {
                return Ok(());
            }
        }
        if requested.starts_with(b"GET /sse") {
            return serve_events(stream).await;
        }
        stream.write_all(&answer).await?;
    }
}

async fn serve_events(mut stream: TcpStream) -> Result<()> {
    let head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n\
                 Transfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head).await?;
    loop {
        stream.write_all(b"d\r\ndata: event\n\n\r\n").await?;
        tokio::time::sleep(EVENT_INTERVAL).await;
    }
}

/// One run of wrk.
pub(super) struct WrkRun {
    pub(super) core: u32,
    pub(super) address: SocketAddr,
    pub(super) connections: u32,
    pub(super) lasts: Duration,
    /// Uses a separate connection for each request.
    pub(super) closes: bool,
}

/// Output of wrk, and the usage of the proxy meanwhile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct WrkSample {
    pub(super) per_second: f64,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) errors: f64,
    /// CPU time of the proxy per request.
    pub(super) cpu_us: f64,
}

impl WrkRun {
    pub(super) async fn run(&self, proxy: u32) -> Result<WrkSample> {
        let before = process::cpu_secs(proxy)?;
        let mut command = Command::new("taskset");
        command.args(["-c", &self.core.to_string(), "wrk", "-t1", "--latency"]);
        command.args([format!("-c{}", self.connections), format!("-d{}s", self.lasts.as_secs())]);
        if self.closes {
            command.args(["-H", "Connection: close"]);
        }
        command.arg(format!("http://{}/", self.address));
        let done =
            tokio::task::spawn_blocking(move || command.output()).await?.context("failed to start wrk")?;
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        ensure!(done.status.success(), "wrk failed: {text}{}", String::from_utf8_lossy(&done.stderr));
        let (mut sample, count) =
            parse_sample(&text).with_context(|| format!("failed to parse the output of wrk:\n{text}"))?;
        sample.cpu_us = (process::cpu_secs(proxy)? - before) * 1e6 / count;
        Ok(sample)
    }
}

/// Parses a sample without the proxy's part, and the number of requests.
fn parse_sample(text: &str) -> Result<(WrkSample, f64)> {
    let after = |word: &str| text.lines().find_map(|line| line.trim().strip_prefix(word)).map(str::trim);
    let per_second: f64 = after("Requests/sec:").context("no rate")?.parse()?;
    let percentile =
        |word: &str| -> Result<f64> { parse_milliseconds(after(word).context("no percentile")?) };
    let counted = text.lines().find(|line| line.contains(" requests in ")).context("no count")?;
    let count: f64 = counted.split_whitespace().next().context("no count")?.parse()?;
    ensure!(count > 0.0, "no request was answered");
    let refused: f64 = after("Non-2xx or 3xx responses:").map_or(Ok(0.0), str::parse)?;
    let broken = after("Socket errors:")
        .map_or(0.0, |line| line.split([',', ' ']).filter_map(|word| word.parse::<f64>().ok()).sum());
    let sample = WrkSample {
        per_second,
        p50_ms: percentile("50%")?,
        p99_ms: percentile("99%")?,
        errors: refused + broken,
        cpu_us: 0.0,
    };
    Ok((sample, count))
}

/// Parses `812.00us`, `3.20ms`, `1.04s`.
fn parse_milliseconds(text: &str) -> Result<f64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text.strip_prefix(digits).unwrap_or_default();
    let value: f64 = digits.parse().with_context(|| format!("invalid number `{text}`"))?;
    Ok(match unit {
        "us" => value / 1e3,
        "ms" => value,
        "s" => value * 1e3,
        "m" => value * 6e4,
        other => bail!("unknown unit `{other}`"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGE: &str = "\
Running 5s test @ http://127.0.0.1:8080/
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     1.03ms  245.11us  12.50ms   91.03%
    Req/Sec    62.00k     2.10k   65.12k    80.00%
  Latency Distribution
     50%  812.00us
     75%    1.10ms
     90%    1.30ms
     99%    2.05ms
  308500 requests in 5.00s, 338.21MB read
Requests/sec:  61689.12
Transfer/sec:     67.63MB
";

    #[test]
    fn wrk_output_is_parsed_with_its_errors() {
        let (sample, count) = parse_sample(MESSAGE).unwrap();
        assert_eq!((sample.per_second, sample.p50_ms, sample.p99_ms), (61_689.12, 0.812, 2.05));
        assert_eq!((count, sample.errors), (308_500.0, 0.0));
        let ill = MESSAGE.replace(
            "Requests/sec",
            "  Socket errors: connect 0, read 5, write 1, timeout 2\n  Non-2xx or 3xx responses: 10\nRequests/sec",
        );
        assert_eq!(parse_sample(&ill).unwrap().0.errors, 18.0);
        assert!(parse_sample("unable to connect").is_err());
    }
}
