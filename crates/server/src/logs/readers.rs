//! Readers that follow a log until its job ends.
//!
//! A reader reads from the store at its own pace and sleeps when it has caught up. It is woken by an append in this
//! process, or by the one poll per process that checks all followed logs together: for ended jobs, and for appends by
//! other replicas. So idle readers cost nothing, however many there are.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, timeout},
};
use windlass_engine::Hints;
use windlass_model::{id::SubmissionId, job::Status};

use super::{
    Log, LogChunk, LogError, LogRange, LogStore,
    mask::MaskCache,
    notifying_store::{JobResult, LogSubscription, NotifyingLogStore},
};
use crate::{
    db::{Db, jobs},
    hints::Hint,
};

/// Maximum number of readers per process.
const READERS_MAX: usize = 10_000;
/// Maximum size of one read from the store, and so the memory that a slow reader costs.
const READ_BYTES_MAX: usize = 64 * 1024;
const READ_CHUNKS_MAX: usize = 256;
/// Interval of keep-alive events while there is nothing new.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// Interval at which followed logs are polled, besides when a job ends.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Minimum time between two polls, so that many ends of jobs cause one poll.
const POLL_DEBOUNCE: Duration = Duration::from_millis(10);
/// Delay between retries of a failing store while a reader waits.
const RETRY_DELAY: Duration = Duration::from_secs(1);
const RETRIES_MAX: usize = 5;
/// Maximum time for which a possible beginning of a secret is held back.
const HOLD_TIMEOUT: Duration = Duration::from_secs(2);
/// Hint that is sent when a job has ended.
const JOB_ENDED_HINT: Hint = Hint::Runs;

/// Cheap to clone.
#[derive(Clone)]
pub struct LogReaders(Arc<Inner>);

struct Inner {
    db: Db,
    archive: Arc<NotifyingLogStore>,
    hints: Hints,
    masks: MaskCache,
    places: Arc<Semaphore>,
    is_looking: AtomicBool,
}

/// Position at which a reader begins, and whether it waits for more.
#[derive(Clone, Copy, Debug)]
pub struct ReadStart {
    pub offset: u64,
    /// Exclusive.
    pub after: Option<i64>,
    pub follow: bool,
}

impl LogReaders {
    pub fn new(db: Db, archive: Arc<NotifyingLogStore>, hints: Hints, masks: MaskCache) -> Self {
        let places = Arc::new(Semaphore::new(READERS_MAX));
        Self(Arc::new(Inner { db, archive, hints, masks, places, is_looking: AtomicBool::new(false) }))
    }

    /// Creates a reader; `None` if there are too many already.
    pub fn read(&self, log: Log, start: ReadStart) -> Option<LogReader> {
        let place = Arc::clone(&self.0.places).try_acquire_owned().ok()?;
        let follow = self.0.archive.follow(&log);
        self.ensure_polling();
        Some(LogReader {
            tails: self.clone(),
            log,
            start,
            follow,
            ready: VecDeque::new(),
            known: false,
            holds: true,
            _place: place,
        })
    }

    /// Starts the polling task if it is not running.
    fn ensure_polling(&self) {
        if self.0.is_looking.swap(true, Ordering::SeqCst) {
            return;
        }
        let tails = self.clone();
        tokio::spawn(async move {
            let hints = tails.0.hints.subscribe(JOB_ENDED_HINT.as_str());
            let (mut pause, mut inspected) = (POLL_INTERVAL, None);
            loop {
                let _ = timeout(pause, hints.wait()).await;
                sleep(POLL_DEBOUNCE).await;
                let followed = tails.0.archive.followed();
                if followed.is_empty() {
                    tails.0.is_looking.store(false, Ordering::SeqCst);
                    // A reader created in between saw the flag set and started no task.
                    if tails.0.archive.followed().is_empty()
                        || tails.0.is_looking.swap(true, Ordering::SeqCst)
                    {
                        return;
                    }
                    continue;
                }
                let began = Instant::now();
                let store_too =
                    inspected.is_none_or(|at: Instant| at.elapsed() >= tails.0.archive.poll_interval());
                tails.poll_logs(&followed, store_too).await;
                if store_too {
                    inspected = Some(began);
                }
                // A slow store is polled less often.
                pause = POLL_INTERVAL.max(began.elapsed() * 4);
            }
        });
    }

    async fn poll_logs(&self, followed: &[Log], store_too: bool) {
        let ids: Vec<SubmissionId> = followed.iter().map(|log| log.submission).collect();
        let ended = match jobs::list_ended(&self.0.db, &ids).await {
            Ok(ended) => ended,
            Err(error) => {
                tracing::debug!(%error, "failed to list ended jobs");
                Vec::new()
            }
        };
        for log in followed {
            if let Some(job) = ended.iter().find(|job| job.id == log.submission) {
                self.0.archive.publish_job_result(log, job_result(job.clone()));
            } else if store_too && let Ok(end) = self.0.archive.end(log).await {
                self.0.archive.notify(log, end);
            }
        }
    }
}

fn job_result(job: jobs::SubmissionEnd) -> JobResult {
    JobResult {
        status: job.status.as_str(),
        exit_status: job.exit_status,
        termination_reason: job.termination_reason,
    }
}

/// Reads a log from an offset on.
pub struct LogReader {
    tails: LogReaders,
    log: Log,
    start: ReadStart,
    follow: LogSubscription,
    ready: VecDeque<LogChunk>,
    /// True once the job was checked for having ended.
    known: bool,
    /// True if a possible beginning of a secret is to be held back; false for one read after `HOLD_TIMEOUT`.
    holds: bool,
    _place: OwnedSemaphorePermit,
}

/// Result of a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadEvent {
    Piece(LogChunk),
    /// Nothing new for a while.
    Quiet,
    /// Everything was read, and nothing more is appended.
    End(JobResult),
}

impl LogReader {
    /// Offset of the next byte to read.
    pub fn offset(&self) -> u64 {
        self.start.offset
    }

    pub async fn next(&mut self) -> Result<ReadEvent, LogError> {
        let archive = Arc::clone(&self.tails.0.archive);
        loop {
            if let Some(piece) = self.ready.pop_front() {
                self.start.offset = piece.offset + piece.bytes.len() as u64;
                return Ok(ReadEvent::Piece(piece));
            }
            if !self.known {
                self.check_already_ended().await;
            }
            // The read includes everything that was known before it.
            let news = self.follow.news();
            let range = LogRange {
                from: Some(self.start.offset),
                after: self.start.after,
                until: None,
                descending: false,
                pieces_max: READ_CHUNKS_MAX,
                bytes_max: READ_BYTES_MAX,
            };
            let mask = self.tails.0.masks.of(&self.log).await?;
            let holds = self.start.follow && news.over.is_none() && std::mem::replace(&mut self.holds, true);
            let (read, was_empty) = match &mask {
                Some(mask) => {
                    let mut masked = mask.read(&*archive, &self.log, range).await?;
                    let was_empty = masked.pieces.is_empty();
                    if holds {
                        masked.hold_back_partial();
                    }
                    (masked.pieces, was_empty)
                }
                None => {
                    let read = archive.read(&self.log, range).await?;
                    let was_empty = read.is_empty();
                    (read, was_empty)
                }
            };
            self.ready = read.into();
            if !self.ready.is_empty() {
                continue;
            }
            if !was_empty {
                // The next bytes show whether it is a secret. If none arrive, it is shown.
                self.holds = timeout(HOLD_TIMEOUT, self.follow.changed()).await.is_ok();
                continue;
            }
            if let Some(over) = news.over {
                return Ok(ReadEvent::End(over));
            }
            if !self.start.follow {
                return Ok(ReadEvent::End(self.current_job_result().await));
            }
            if timeout(KEEPALIVE_INTERVAL, self.follow.changed()).await.is_err() {
                return Ok(ReadEvent::Quiet);
            }
        }
    }

    /// Checks whether the job ended before this reader followed the log.
    async fn check_already_ended(&mut self) {
        if let Ok(ended) = jobs::list_ended(&self.tails.0.db, &[self.log.submission]).await {
            self.known = true;
            for job in ended {
                self.tails.0.archive.publish_job_result(&self.log, job_result(job));
            }
        }
    }

    /// The present state of the job, for a reader that does not wait for its end.
    async fn current_job_result(&self) -> JobResult {
        let job = jobs::find(&self.tails.0.db, self.log.submission).await.ok().flatten();
        let status = job.as_ref().map_or(Status::Running, |job| job.status).as_str();
        let (exit_status, termination_reason) =
            job.map_or((None, None), |job| (job.exit_status, job.termination_reason));
        JobResult { status, exit_status, termination_reason }
    }

    /// Retries a store that fails briefly. Returns `None` if it keeps failing; the client reconnects later.
    pub async fn next_with_retries(&mut self) -> Option<ReadEvent> {
        for _ in 0..RETRIES_MAX {
            match self.next().await {
                Ok(lock) => return Some(lock),
                Err(error) => {
                    tracing::warn!(submission = %self.log.submission, %error, "failed to read log for a stream");
                    sleep(RETRY_DELAY).await;
                }
            }
        }
        None
    }
}
