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
    Log, LogError, Piece, Range, Store,
    archive::{Archive, Follow, Over},
    mask::Masks,
};
use crate::db::{Db, jobs};

/// Readers of one process.
const READERS_MAX: usize = 10_000;
/// What a reader takes from the store at once, and so what a slow one costs.
const READ_BYTES_MAX: usize = 64 * 1024;
const READ_PIECES_MAX: usize = 256;
/// A reader without news says this often that it lives.
const ALIVE_EVERY: Duration = Duration::from_secs(15);
/// Followed logs are looked at this often, or when a job ended.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The least time between two looks, so that many ends of jobs are one look.
const LOOK_PAUSE: Duration = Duration::from_millis(10);
/// A failing store is tried again this often while somebody waits.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
const RETRIES_MAX: usize = 5;
/// How long what may be the beginning of a secret is kept back.
const HOLD_WITHIN: Duration = Duration::from_secs(2);
/// What is hinted when a job has ended.
const HINT: &str = "runs";

/// Cheap to clone.
#[derive(Clone)]
pub struct Tails(Arc<Inner>);

struct Inner {
    db: Db,
    archive: Arc<Archive>,
    hints: Hints,
    masks: Masks,
    places: Arc<Semaphore>,
    is_looking: AtomicBool,
}

/// Where a reader begins, and whether it waits for more.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    pub offset: u64,
    /// Exclusive.
    pub after: Option<i64>,
    pub follow: bool,
}

impl Tails {
    pub fn new(db: Db, archive: Arc<Archive>, hints: Hints, masks: Masks) -> Self {
        let places = Arc::new(Semaphore::new(READERS_MAX));
        Self(Arc::new(Inner { db, archive, hints, masks, places, is_looking: AtomicBool::new(false) }))
    }

    /// `None`: there are too many readers already.
    pub fn read(&self, log: Log, start: Start) -> Option<Reader> {
        let place = Arc::clone(&self.0.places).try_acquire_owned().ok()?;
        let follow = self.0.archive.follow(&log);
        self.look();
        Some(Reader {
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
    fn look(&self) {
        if self.0.is_looking.swap(true, Ordering::SeqCst) {
            return;
        }
        let tails = self.clone();
        tokio::spawn(async move {
            let hints = tails.0.hints.subscribe(HINT);
            let (mut pause, mut looked) = (LOOK_EVERY, None);
            loop {
                let _ = timeout(pause, hints.wait()).await;
                sleep(LOOK_PAUSE).await;
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
                tails.look_at(&followed, store_too).await;
                if store_too {
                    looked = Some(began);
                }
                // A slow store is not asked all the time.
                pause = LOOK_EVERY.max(began.elapsed() * 4);
            }
        });
    }

    async fn look_at(&self, followed: &[Log], store_too: bool) {
        let ids: Vec<SubmissionId> = followed.iter().map(|log| log.submission).collect();
        let ended = match jobs::ended(&self.0.db, &ids).await {
            Ok(ended) => ended,
            Err(error) => {
                tracing::debug!(%error, "look which jobs ended");
                Vec::new()
            }
        };
        for log in followed {
            if let Some(job) = ended.iter().find(|job| job.id == log.submission) {
                self.0.archive.tell_over(log, over(job.clone()));
            } else if store_too && let Ok(end) = self.0.archive.end(log).await {
                self.0.archive.tell(log, end);
            }
        }
    }
}

fn over(job: jobs::Ended) -> Over {
    Over {
        status: job.status.as_str(),
        exit_status: job.exit_status,
        termination_reason: job.termination_reason,
    }
}

/// One who reads a log from a place on.
pub struct Reader {
    tails: Tails,
    log: Log,
    start: Start,
    follow: Follow,
    ready: VecDeque<Piece>,
    /// Whether the job was looked at.
    known: bool,
    /// What may be the beginning of a secret is kept back: not for ever.
    holds: bool,
    _place: OwnedSemaphorePermit,
}

/// What a reader comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turn {
    Piece(Piece),
    /// Nothing new for a while.
    Quiet,
    /// Nothing more will come: all was read.
    End(Over),
}

impl Reader {
    /// The next byte that is wanted.
    pub fn offset(&self) -> u64 {
        self.start.offset
    }

    pub async fn next(&mut self) -> Result<Turn, LogError> {
        let archive = Arc::clone(&self.tails.0.archive);
        loop {
            if let Some(piece) = self.ready.pop_front() {
                self.start.offset = piece.offset + piece.bytes.len() as u64;
                return Ok(Turn::Piece(piece));
            }
            if !self.known {
                self.know().await;
            }
            // What is known before the read is all in it.
            let news = self.follow.news();
            let range = Range {
                from: Some(self.start.offset),
                after: self.start.after,
                until: None,
                descending: false,
                pieces_max: READ_PIECES_MAX,
                bytes_max: READ_BYTES_MAX,
            };
            let mask = self.tails.0.masks.of(&self.log).await?;
            let holds = self.start.follow && news.over.is_none() && std::mem::replace(&mut self.holds, true);
            let (read, was_empty) = match &mask {
                Some(mask) => {
                    let mut masked = mask.read(&*archive, &self.log, range).await?;
                    let was_empty = masked.pieces.is_empty();
                    if holds {
                        masked.hold_back();
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
                self.holds = timeout(HOLD_WITHIN, self.follow.changed()).await.is_ok();
                continue;
            }
            if let Some(over) = news.over {
                return Ok(Turn::End(over));
            }
            if !self.start.follow {
                return Ok(Turn::End(self.now().await));
            }
            if timeout(ALIVE_EVERY, self.follow.changed()).await.is_err() {
                return Ok(Turn::Quiet);
            }
        }
    }

    /// Whether the job was over before anybody followed.
    async fn know(&mut self) {
        if let Ok(ended) = jobs::ended(&self.tails.0.db, &[self.log.submission]).await {
            self.known = true;
            for job in ended {
                self.tails.0.archive.tell_over(&self.log, over(job));
            }
        }
    }

    /// How the job is, for one who does not wait for its end.
    async fn now(&self) -> Over {
        let job = jobs::find(&self.tails.0.db, self.log.submission).await.ok().flatten();
        let status = job.as_ref().map_or(Status::Running, |job| job.status).as_str();
        let (exit_status, termination_reason) =
            job.map_or((None, None), |job| (job.exit_status, job.termination_reason));
        Over { status, exit_status, termination_reason }
    }

    /// A store may fail for a moment. `None`: it went on failing; who reads comes back later.
    pub async fn next_in_time(&mut self) -> Option<Turn> {
        for _ in 0..RETRIES_MAX {
            match self.next().await {
                Ok(turn) => return Some(turn),
                Err(error) => {
                    tracing::warn!(submission = %self.log.submission, %error, "read a log for a stream");
                    sleep(RETRY_PAUSE).await;
                }
            }
        }
        None
    }
}
