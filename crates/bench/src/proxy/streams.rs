//! Many concurrent event streams: the cost of each for the proxy, and whether all of them receive their events.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
};

use super::{
    measure_idle_memory,
    programs::{EVENT_INTERVAL, PinnedProcess},
};
use crate::results::BenchResults;
use windlass_testenv::process;

/// Number of streams that are opened concurrently.
const OPENING_MAX: usize = 64;
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);
const EVENT: &[u8] = b"data: event\n\n";

pub(super) async fn measure_streams(
    proxy: &PinnedProcess,
    count: usize,
    sheet: &mut BenchResults,
) -> Result<()> {
    let before = measure_idle_memory(proxy).await?;
    let began = Instant::now();
    // Number of events of all streams.
    let events = Arc::new(AtomicUsize::new(0));
    let mut readers = JoinSet::new();
    let mut open = 0;
    while open < count {
        let mut opening = JoinSet::new();
        for _ in 0..OPENING_MAX.min(count - open) {
            opening.spawn(open_stream(proxy.address));
        }
        while let Some(stream) = opening.join_next().await {
            let stream = stream??;
            readers.spawn(count_events(stream, Arc::clone(&events)));
            open += 1;
        }
        ensure!(began.elapsed() < OPEN_TIMEOUT, "only {open} of {count} streams were open after a minute");
    }
    let took = began.elapsed();
    let (resident, busy) = (process::resident_mb(proxy.pid())?, process::cpu_secs(proxy.pid())?);
    let (counted, since) = (events.load(Ordering::Relaxed), Instant::now());
    // Each stream receives an event in this time.
    tokio::time::sleep(EVENT_INTERVAL + Duration::from_secs(2)).await;
    let came = events.load(Ordering::Relaxed) - counted;
    let busy = (process::cpu_secs(proxy.pid())? - busy) / since.elapsed().as_secs_f64();
    readers.abort_all();
    let lost = count.saturating_sub(came);

    sheet.say(&format!("{count} concurrent event streams"))?;
    sheet.put("streams", count as f64);
    sheet.put("streams_silent", lost as f64);
    sheet.figure("stream_kib", "memory per stream", (resident - before) * 1024.0 / count as f64, "KiB")?;
    sheet.figure("streams_open_s", "time to open all", took.as_secs_f64(), "s")?;
    sheet.figure("streams_mcore", "CPU, one event per stream every 10 s", busy * 1e3, "mcore")?;
    sheet.say(&format!("  {lost} streams without an event"))
}

/// Opens a stream and waits for its first event.
async fn open_stream(address: SocketAddr) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await.context("connect")?;
    stream.write_all(b"GET /sse HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").await?;
    let mut seen = Vec::with_capacity(512);
    while !seen.windows(EVENT.len()).any(|part| part == EVENT) {
        ensure!(stream.read_buf(&mut seen).await? > 0, "{}", String::from_utf8_lossy(&seen));
    }
    Ok(stream)
}

async fn count_events(mut stream: TcpStream, events: Arc<AtomicUsize>) -> Result<()> {
    let mut piece = [0; 256];
    loop {
        let count = stream.read(&mut piece).await?;
        ensure!(count > 0, "the stream ended");
        // An event is small and arrives alone.
        if piece[..count].windows(EVENT.len()).any(|part| part == EVENT) {
            events.fetch_add(1, Ordering::Relaxed);
        }
    }
}
