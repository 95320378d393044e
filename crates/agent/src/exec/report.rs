//! What the program writes, on its way to the server: in order, byte for byte, each byte once.
//!
//! It goes to a file first, so that neither a server that is away nor a slow one holds the program up or fills
//! memory. What does not fit is counted and told, never dropped in silence.

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
use windlass_api::queue::{QueueError, QueueHttpClient, STREAM_BYTES_MAX};

/// In one call.
const CHUNK_BYTES: u64 = 512 * 1024;
/// Output is gathered for this long: a program that writes line by line is not sent line by line.
const BATCH_DELAY: Duration = Duration::from_millis(200);
/// With nothing to send, the server is asked this often whether the attempt still counts.
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
    /// Most that is kept of one stream.
    most: u64,
    streams: BTreeMap<&'static str, (File, Mutex<Progress>)>,
    news: Notify,
}

#[derive(Clone, Copy, Default)]
struct Progress {
    /// In the file.
    kept: u64,
    /// At the server.
    sent: u64,
    dropped: u64,
}

/// Comes when the attempt does not count any more.
pub(super) type FencedReceiver = oneshot::Receiver<QueueError>;

impl OutputUpload {
    /// Files of its own in that directory.
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
        // Once something is missing, nothing after it is kept: what is read back has no holes.
        let is_kept = progress.dropped == 0 && file.write_all_at(fits, progress.kept).is_ok();
        let (kept, dropped) = if is_kept { (fits.len(), rest.len()) } else { (0, bytes.len()) };
        progress.kept += kept as u64;
        progress.dropped += dropped as u64;
        drop(progress);
        self.shared.news.notify_one();
    }

    /// Sends what is left, until the server has it. What was too much is answered.
    pub(super) async fn finish(self) -> Result<Option<String>, QueueError> {
        // A piece that is on its way comes again from where it was: the server keeps each byte once.
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
    /// Sends all there is. What was not taken is sent again, from the same place on.
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
                    // A file of ours that cannot be read back: the rest of this stream is lost, and that is told.
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

    /// Whether the attempt still counts.
    async fn check_attempt(&self) -> Result<(), QueueError> {
        self.client.get(&format!("containers/{}?select=uuid", self.uuid)).await.map(drop)
    }

    fn dropped_message(&self) -> Option<String> {
        let told = self.streams.iter().filter_map(|(name, (_, progress))| {
            let Progress { kept, dropped, .. } = *progress.lock();
            (dropped > 0).then(|| format!("{name}: {dropped} bytes after the first {kept} were not kept"))
        });
        let told: Vec<String> = told.collect();
        (!told.is_empty()).then(|| told.join("; "))
    }
}

/// A server that is away is tried again; one that says no ends it.
async fn run_sender(shared: Arc<Shared>, fence: oneshot::Sender<QueueError>) {
    let (mut heard, mut pause) = (Instant::now(), Duration::ZERO);
    loop {
        let idle = CHECK_INTERVAL.saturating_sub(heard.elapsed());
        // Without news it is time to ask.
        let is_news = timeout(idle, shared.news.notified()).await.is_ok();
        sleep(if is_news { pause.max(BATCH_DELAY) } else { pause }).await;
        let done = match shared.send().await {
            Ok(false) if heard.elapsed() >= CHECK_INTERVAL => shared.check_attempt().await,
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        };
        match done {
            Ok(()) => {
                heard = Instant::now();
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
    async fn what_does_not_fit_is_counted_and_what_comes_after_it_leaves_no_hole() {
        let dir = temp_dir("report").unwrap();
        // Nobody listens there: everything stays in the file.
        let client = QueueHttpClient::new("http://127.0.0.1:1", "t").unwrap();
        let (report, _fenced) = OutputUpload::start_with_limit(client, "u", dir.path(), 10).unwrap();
        report.append("stdout", b"01234567");
        report.append("stdout", b"89abc");
        report.append("stdout", b"d");
        report.append("stderr", b"fits");
        let told = report.shared.dropped_message();
        assert_eq!(told.as_deref(), Some("stdout: 4 bytes after the first 10 were not kept"));
        assert_eq!(std::fs::read(dir.path().join("stdout.spool")).unwrap(), b"0123456789");
        assert_eq!(std::fs::read(dir.path().join("stderr.spool")).unwrap(), b"fits");
    }
}
