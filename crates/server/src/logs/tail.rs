//! Readers that follow a log until its job is over.
//!
//! A reader reads from the store at its own pace and sleeps when it has caught up. What wakes it is an append in
//! this process, or the one look per process at all followed logs together: at the ends of their jobs, and at what
//! other replicas appended. So readers cost nothing while nothing happens, however many there are.

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
    archive::{JobResult, LogSubscription, NotifyingLogStore},
    mask::MaskCache,
};
use crate::db::{Db, jobs};

/// Readers of one process.
const READERS_MAX: usize = 10_000;
/// What a reader takes from the store at once, and so what a slow one costs.
const READ_BYTES_MAX: usize = 64 * 1024;
const READ_CHUNKS_MAX: usize = 256;
/// A reader without news says this often that it lives.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// Followed logs are looked at this often, or when a job ended.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The least time between two looks, so that many ends of jobs are one look.
const POLL_DEBOUNCE: Duration = Duration::from_millis(10);
/// A failing store is tried again this often while somebody waits.
const RETRY_DELAY: Duration = Duration::from_secs(1);
const RETRIES_MAX: usize = 5;
/// How long what may be the beginning of a secret is kept back.
const HOLD_TIMEOUT: Duration = Duration::from_secs(2);
/// What is hinted when a job has ended.
const JOB_ENDED_HINT: &str = "runs";

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

/// Where a reader begins, and whether it waits for more.
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

    /// `None`: there are too many readers already.
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

    /// Makes sure that somebody looks.
    fn ensure_polling(&self) {
        if self.0.is_looking.swap(true, Ordering::SeqCst) {
            return;
        }
        let tails = self.clone();
        tokio::spawn(async move {
            let hints = tails.0.hints.subscribe(JOB_ENDED_HINT);
            let (mut pause, mut looked) = (POLL_INTERVAL, None);
            loop {
                let _ = timeout(pause, hints.wait()).await;
                sleep(POLL_DEBOUNCE).await;
                let followed = tails.0.archive.followed();
                if followed.is_empty() {
                    tails.0.is_looking.store(false, Ordering::SeqCst);
                    // One who came in between found somebody looking.
                    if tails.0.archive.followed().is_empty()
                        || tails.0.is_looking.swap(true, Ordering::SeqCst)
                    {
                        return;
                    }
                    continue;
                }
                let began = Instant::now();
                let store_too = looked.is_none_or(|at: Instant| at.elapsed() >= tails.0.archive.look_every());
                tails.poll_logs(&followed, store_too).await;
                if store_too {
                    looked = Some(began);
                }
                // A slow store is not asked all the time.
                pause = POLL_INTERVAL.max(began.elapsed() * 4);
            }
        });
    }

    async fn poll_logs(&self, followed: &[Log], store_too: bool) {
        let ids: Vec<SubmissionId> = followed.iter().map(|log| log.submission).collect();
        let ended = match jobs::list_ended(&self.0.db, &ids).await {
            Ok(ended) => ended,
            Err(error) => {
                tracing::debug!(%error, "look which jobs ended");
                Vec::new()
            }
        };
        for log in followed {
            if let Some(job) = ended.iter().find(|job| job.id == log.submission) {
                self.0.archive.publish_job_result(log, over(job.clone()));
            } else if store_too && let Ok(end) = self.0.archive.end(log).await {
                self.0.archive.tell(log, end);
            }
        }
    }
}

fn over(job: jobs::SubmissionEnd) -> JobResult {
    JobResult {
        status: job.status.as_str(),
        exit_status: job.exit_status,
        termination_reason: job.termination_reason,
    }
}

/// One who reads a log from a place on.
pub struct LogReader {
    tails: LogReaders,
    log: Log,
    start: ReadStart,
    follow: LogSubscription,
    ready: VecDeque<LogChunk>,
    /// Whether the job was looked at.
    known: bool,
    /// What may be the beginning of a secret is kept back: not for ever.
    holds: bool,
    _place: OwnedSemaphorePermit,
}

/// What a reader comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadEvent {
    Piece(LogChunk),
    /// Nothing new for a while.
    Quiet,
    /// Nothing more will come: all was read.
    End(JobResult),
}

impl LogReader {
    /// The next byte that is wanted.
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
            // What is known before the read is all in it.
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
                // The next bytes say what it is. If none come, it is shown.
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

    /// Whether the job was over before anybody followed.
    async fn check_already_ended(&mut self) {
        if let Ok(ended) = jobs::list_ended(&self.tails.0.db, &[self.log.submission]).await {
            self.known = true;
            for job in ended {
                self.tails.0.archive.publish_job_result(&self.log, over(job));
            }
        }
    }

    /// How the job is, for one who does not wait for its end.
    async fn current_job_result(&self) -> JobResult {
        let job = jobs::find(&self.tails.0.db, self.log.submission).await.ok().flatten();
        let status = job.as_ref().map_or(Status::Running, |job| job.status).as_str();
        let (exit_status, termination_reason) =
            job.map_or((None, None), |job| (job.exit_status, job.termination_reason));
        JobResult { status, exit_status, termination_reason }
    }

    /// A store may fail for a moment. `None`: it went on failing; who reads comes back later.
    pub async fn next_with_retries(&mut self) -> Option<ReadEvent> {
        for _ in 0..RETRIES_MAX {
            match self.next().await {
                Ok(turn) => return Some(turn),
                Err(error) => {
                    tracing::warn!(submission = %self.log.submission, %error, "read a log for a stream");
                    sleep(RETRY_DELAY).await;
                }
            }
        }
        None
    }
}
