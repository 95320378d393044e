//! Upload of the program's output to the server: in order, byte for byte, each byte once.
//!
//! Output goes to a file first, so that an unreachable or slow server neither blocks the program nor fills memory.
//! Output that exceeds the limit is counted and reported, never dropped silently.

use std::{
    collections::BTreeMap, fs::File, io, os::unix::fs::FileExt as _, path::Path, sync::Arc, time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, oneshot},
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tokio_util::bytes::Bytes;
use windlass_api::queue_client::{QueueError, QueueHttpClient, STREAM_BYTES_MAX};

/// Maximum number of bytes per call.
const CHUNK_BYTES: u64 = 512 * 1024;
/// Time for which output is collected before it is sent: a program that writes line by line does not cause a call per
/// line.
const BATCH_DELAY: Duration = Duration::from_millis(200);
/// Interval at which the server is asked whether the attempt is still current, if there is nothing to send.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
const RETRY_DELAY_MIN: Duration = Duration::from_millis(200);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(10);
const STREAMS: [&str; 2] = ["stdout", "stderr"];

pub(super) struct OutputUpload {
    shared: Arc<Shared>,
    /// Sends while the program runs.
    sending: JoinHandle<()>,
}

struct Shared {
    client: QueueHttpClient,
    uuid: String,
    /// Maximum number of bytes kept of one stream.
    most: u64,
    streams: BTreeMap<&'static str, (File, Mutex<Progress>)>,
    news: Notify,
}

#[derive(Clone, Copy, Default)]
struct Progress {
    /// Bytes in the file.
    kept: u64,
    /// Bytes at the server.
    sent: u64,
    dropped: u64,
}

/// Resolves when the attempt is no longer current.
pub(super) type FencedReceiver = oneshot::Receiver<QueueError>;

impl OutputUpload {
    /// Creates its files in that directory.
    pub(super) fn start(
        client: QueueHttpClient,
        uuid: &str,
        dir: &Path,
    ) -> io::Result<(Self, FencedReceiver)> {
        Self::start_with_limit(client, uuid, dir, STREAM_BYTES_MAX)
    }

    fn start_with_limit(
        client: QueueHttpClient,
        uuid: &str,
        dir: &Path,
        most: u64,
    ) -> io::Result<(Self, FencedReceiver)> {
        let mut streams = BTreeMap::new();
        for name in STREAMS {
            let mut options = File::options();
            options.create(true).truncate(true).read(true).write(true);
            streams.insert(name, (options.open(dir.join(format!("{name}.spool")))?, Mutex::default()));
        }
        let shared = Shared { client, uuid: uuid.to_owned(), most, streams, news: Notify::new() };
        let shared = Arc::new(shared);
        let (fence, fenced) = oneshot::channel();
        let sending = tokio::spawn(run_sender(shared.clone(), fence));
        Ok((Self { shared, sending }, fenced))
    }

    pub(super) fn append(&self, stream: &str, bytes: &[u8]) {
        let Some((file, progress)) = self.shared.streams.get(stream) else { return };
        let mut progress = progress.lock();
        let room = usize::try_from(self.shared.most.saturating_sub(progress.kept)).unwrap_or(usize::MAX);
        let (fits, rest) = bytes.split_at(bytes.len().min(room));
        // Once a byte is missing, nothing after it is kept: the stored output has no gaps.
        let is_kept = progress.dropped == 0 && file.write_all_at(fits, progress.kept).is_ok();
        let (kept, dropped) = if is_kept { (fits.len(), rest.len()) } else { (0, bytes.len()) };
        progress.kept += kept as u64;
        progress.dropped += dropped as u64;
        drop(progress);
        self.shared.news.notify_one();
    }

    /// Sends the rest, until the server has it. Returns a message about output that exceeded the limit.
    pub(super) async fn finish(self) -> Result<Option<String>, QueueError> {
        // A chunk in flight is sent again from the same offset: the server stores each byte once.
        self.sending.abort();
        let mut pause = RETRY_DELAY_MIN;
        while let Err(error) = self.shared.send().await {
            if error.is_refusal() {
                return Err(error);
            }
            sleep(pause).await;
            pause = (pause * 2).min(RETRY_DELAY_MAX);
        }
        Ok(self.shared.dropped_message())
    }
}

impl Drop for OutputUpload {
    fn drop(&mut self) {
        self.sending.abort();
    }
}

impl Shared {
    /// Sends all pending output. A chunk that was not accepted is sent again, from the same offset.
    async fn send(&self) -> Result<bool, QueueError> {
        let mut any = false;
        for (name, (file, progress)) in &self.streams {
            loop {
                let Progress { kept, sent, .. } = *progress.lock();
                if sent >= kept {
                    break;
                }
                let length = (kept - sent).min(CHUNK_BYTES);
                let mut piece = vec![0; usize::try_from(length).unwrap_or(0)];
                if file.read_exact_at(&mut piece, sent).is_err() {
                    // The file cannot be read back: the rest of this stream is lost and reported as dropped.
                    let mut progress = progress.lock();
                    progress.dropped += kept - sent;
                    progress.kept = sent;
                    break;
                }
                let path = format!("containers/{}/output?stream={name}&offset={sent}", self.uuid);
                self.client.post_bytes(&path, Bytes::from(piece)).await?;
                progress.lock().sent = sent + length;
                any = true;
            }
        }
        Ok(any)
    }

    /// Checks that the attempt is still current.
    async fn check_attempt(&self) -> Result<(), QueueError> {
        self.client.get(&format!("containers/{}?select=uuid", self.uuid)).await.map(drop)
    }

    fn dropped_message(&self) -> Option<String> {
        let reported = self.streams.iter().filter_map(|(name, (_, progress))| {
            let Progress { kept, dropped, .. } = *progress.lock();
            (dropped > 0).then(|| format!("{name}: {dropped} bytes after the first {kept} were discarded"))
        });
        let reported: Vec<String> = reported.collect();
        (!reported.is_empty()).then(|| reported.join("; "))
    }
}

/// Sends until the server refuses the attempt. Retries if the server is unreachable.
async fn run_sender(shared: Arc<Shared>, fence: oneshot::Sender<QueueError>) {
    let (mut received, mut pause) = (Instant::now(), Duration::ZERO);
    loop {
        let idle = CHECK_INTERVAL.saturating_sub(received.elapsed());
        // Without new output, check the attempt.
        let is_news = timeout(idle, shared.news.notified()).await.is_ok();
        sleep(if is_news { pause.max(BATCH_DELAY) } else { pause }).await;
        let done = match shared.send().await {
            Ok(false) if received.elapsed() >= CHECK_INTERVAL => shared.check_attempt().await,
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        };
        match done {
            Ok(()) => {
                received = Instant::now();
                pause = Duration::ZERO;
            }
            Err(error) if error.is_refusal() => {
                let _ = fence.send(error);
                return;
            }
            Err(_) => {
                pause = (pause * 2).clamp(RETRY_DELAY_MIN, RETRY_DELAY_MAX);
                shared.news.notify_one();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use windlass_testkit::temp_dir;

    use super::*;

    #[tokio::test]
    async fn output_over_the_limit_is_counted_and_later_writes_leave_no_gap() {
        let dir = temp_dir("report").unwrap();
        // No server listens there: everything stays in the file.
        let client = QueueHttpClient::new("http://127.0.0.1:1", "t").unwrap();
        let (report, _fenced) = OutputUpload::start_with_limit(client, "u", dir.path(), 10).unwrap();
        report.append("stdout", b"01234567");
        report.append("stdout", b"89abc");
        report.append("stdout", b"d");
        report.append("stderr", b"fits");
        let reported = report.shared.dropped_message();
        assert_eq!(reported.as_deref(), Some("stdout: 4 bytes after the first 10 were discarded"));
        assert_eq!(std::fs::read(dir.path().join("stdout.spool")).unwrap(), b"0123456789");
        assert_eq!(std::fs::read(dir.path().join("stderr.spool")).unwrap(), b"fits");
    }
}
