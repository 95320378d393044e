//! A closed-loop HTTP load generator: raw keep-alive connections with prepared bytes, so that no client library
//! distorts the measurement.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
};

/// A request as bytes, the number of connections that repeat it, and the duration.
#[derive(Clone)]
pub struct RequestLoad {
    pub address: String,
    pub request: Vec<u8>,
    pub connections: usize,
    pub lasts: Duration,
}

#[derive(Clone, Copy, Debug)]
pub struct LoadFigures {
    pub per_second: f64,
    pub p50: Duration,
    pub p99: Duration,
    pub count: usize,
}

/// `POST path` with a bearer token and a JSON body.
pub fn build_post(path: &str, token: &str, body: &str) -> Vec<u8> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {token}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Repeats one request; `make` may change it for each repetition (for example to a new name).
pub async fn run_load(
    load: &RequestLoad,
    make: impl Fn(usize, usize) -> Option<Vec<u8>> + Copy + Send + 'static,
) -> Result<LoadFigures> {
    let started = Instant::now();
    let mut connections = JoinSet::new();
    for n in 0..load.connections {
        let load = load.clone();
        connections.spawn(async move {
            let mut stream = TcpStream::connect(&load.address).await.context("connect")?;
            stream.set_nodelay(true)?;
            let mut buffer = Vec::with_capacity(1 << 20);
            let mut taken = Vec::new();
            for repeat in 0.. {
                let start = Instant::now();
                if start.duration_since(started) >= load.lasts {
                    break;
                }
                let bytes = make(n, repeat);
                stream.write_all(bytes.as_deref().unwrap_or(&load.request)).await?;
                read_response(&mut stream, &mut buffer).await?;
                taken.push(start.elapsed());
            }
            anyhow::Ok(taken)
        });
    }
    let mut all = Vec::new();
    while let Some(taken) = connections.join_next().await {
        all.extend(taken??);
    }
    let elapsed = started.elapsed();
    ensure!(!all.is_empty(), "no request was answered");
    all.sort();
    let at = |part: f64| all[((all.len() - 1) as f64 * part) as usize];
    Ok(LoadFigures {
        per_second: all.len() as f64 / elapsed.as_secs_f64(),
        p50: at(0.50),
        p99: at(0.99),
        count: all.len(),
    })
}

/// Reads one response with a content length; any status but 200 is an error with the body.
pub async fn read_response(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Result<()> {
    buffer.clear();
    let (head, length) = loop {
        let read = stream.read_buf(buffer).await?;
        ensure!(read > 0, "the server closed the connection");
        if let Some(head) = buffer.windows(4).position(|w| w == b"\r\n\r\n") {
            let text = std::str::from_utf8(&buffer[..head])?;
            let length = text
                .lines()
                .find_map(|l| l.split_once(':').filter(|(k, _)| k.eq_ignore_ascii_case("content-length")))
                .context("an answer without a content length")?;
            break (head + 4, length.1.trim().parse::<usize>()?);
        }
    };
    while buffer.len() < head + length {
        let read = stream.read_buf(buffer).await?;
        ensure!(read > 0, "the server closed the connection");
    }
    ensure!(
        buffer.starts_with(b"HTTP/1.1 200"),
        "{}",
        String::from_utf8_lossy(&buffer[..buffer.len().min(600)])
    );
    Ok(())
}
