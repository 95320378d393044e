//! From a host's spool into the store.
//!
//! A copy begins where the store ends, so it may be broken off anywhere and made again by anybody. Hosts are not
//! believed: what a call reads, how long it takes and how much of a log is kept are bounded by us, and a host that
//! promises bytes and brings none ends the call.

use std::{sync::Arc, time::Duration};

use tokio::{sync::Semaphore, time::Instant};
use windlass_api::agent::client::LogPart;
use windlass_model::time::Timestamp;

use super::{Log, LogError, LogStore, archive::NotifyingLogStore};
use crate::{
    agents::{AgentApi, AgentError, CallContext},
    db::Db,
};

/// Bytes asked of a host at once, and so the longest piece of a log.
pub const CHUNK_BYTES_MAX: usize = 256 * 1024;
/// Bytes one call copies at most.
pub const CALL_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Time one call may take; a read that has begun is finished.
pub const CALL_TIME_MAX: Duration = Duration::from_secs(5);
/// Bytes that are kept of one log.
pub const LOG_BYTES_MAX: u64 = 8 * 1024 * 1024 * 1024;
/// Copies that are made at once because hosts told of more output.
const COPIES_MAX: usize = 256;
/// Looks after which a copy gives its place to others, though its host still has more.
const ROUNDS_MAX: usize = 64;
/// How often one call goes back because the store does not end where it did.
const GAPS_MAX: usize = 3;

/// What is written behind the last byte that is kept of a log that is too long.
pub const TRUNCATION_NOTICE: &[u8] = b"\nwindlass: this log is too long, the rest was not kept\n";

#[derive(Clone, Copy, Debug)]
pub struct CopyLimits {
    /// Of one call.
    pub bytes: u64,
    /// Of one call.
    pub time: Duration,
    /// Of one log.
    pub kept: u64,
}

impl Default for CopyLimits {
    fn default() -> Self {
        Self { bytes: CALL_BYTES_MAX, time: CALL_TIME_MAX, kept: LOG_BYTES_MAX }
    }
}

/// How far the store is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyProgress {
    /// Where the log ends in the store.
    pub end: u64,
    /// All there will ever be is in the store, and survives a power cut.
    pub complete: bool,
    /// The host has more at this moment: a bound of the call was reached, or the host did not bring what it has.
    pub more: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error("read the log from its host")]
    Agent(#[from] AgentError),
    #[error("keep the log")]
    Store(#[from] LogError),
}

/// Copies what the host has beyond the end of the store. A copy of the same log that is under way in this process
/// is waited for first. `now` stands beside the bytes for those who look by time.
pub async fn catch_up(
    archive: &NotifyingLogStore,
    agents: &dyn AgentApi,
    call: CallContext,
    log: &Log,
    now: Timestamp,
    limits: CopyLimits,
) -> Result<CopyProgress, CopyError> {
    let open = archive.open(log);
    let _alone = open.copying().await;
    // What is heard of before the first read is seen by it.
    open.clear_grown();
    let began = Instant::now();
    let first = archive.end(log).await?;
    let (mut end, mut gaps) = (first, 0);
    loop {
        if end > limits.kept {
            return finish_copy(archive, agents, call, log, end).await;
        }
        let room = usize::try_from(limits.kept - end).unwrap_or(usize::MAX);
        let part = agents.log(call, log.stream.name(), end, CHUNK_BYTES_MAX.min(room.max(1))).await?;
        if room == 0 {
            if part.end <= end {
                return finish_if_complete(archive, agents, call, log, &part, end).await;
            }
            end = archive.append(log, end, now.0, TRUNCATION_NOTICE).await?;
            continue;
        }
        let bytes = &part.bytes[..part.bytes.len().min(CHUNK_BYTES_MAX).min(room)];
        if bytes.is_empty() {
            if part.end > end {
                return Ok(CopyProgress { end, complete: false, more: true });
            }
            return finish_if_complete(archive, agents, call, log, &part, end).await;
        }
        match archive.append(log, end, now.0, bytes).await {
            Ok(grown) => end = grown,
            Err(LogError::Gap { end: theirs, .. }) if gaps < GAPS_MAX => {
                // Somebody removed the log meanwhile.
                (end, gaps) = (theirs, gaps + 1);
                continue;
            }
            Err(error) => return Err(error.into()),
        }
        if end >= part.end {
            // Whatever comes after this answer is told, or found by the next call.
            return finish_if_complete(archive, agents, call, log, &part, end).await;
        }
        if end.saturating_sub(first) >= limits.bytes || began.elapsed() >= limits.time {
            return Ok(CopyProgress { end, complete: false, more: end < part.end });
        }
    }
}

/// All that the host had is here.
async fn finish_if_complete(
    archive: &NotifyingLogStore,
    agents: &dyn AgentApi,
    call: CallContext,
    log: &Log,
    part: &LogPart,
    end: u64,
) -> Result<CopyProgress, CopyError> {
    if part.is_complete {
        return finish_copy(archive, agents, call, log, end).await;
    }
    Ok(CopyProgress { end, complete: false, more: false })
}

/// All is here. A runner that waits for that need wait no longer; one that does not hear it goes by itself.
async fn finish_copy(
    archive: &NotifyingLogStore,
    agents: &dyn AgentApi,
    call: CallContext,
    log: &Log,
    end: u64,
) -> Result<CopyProgress, CopyError> {
    archive.sync(log).await?;
    let _ = agents.log_was_read(call, log.stream.name(), end).await;
    Ok(CopyProgress { end, complete: true, more: false })
}

/// Copies because hosts told of more output: one copy per log at a time, and a bounded number in all.
#[derive(Clone)]
pub struct LogCopier {
    archive: Arc<NotifyingLogStore>,
    db: Db,
    places: Arc<Semaphore>,
}

impl LogCopier {
    pub fn new(archive: Arc<NotifyingLogStore>, db: Db) -> Self {
        Self { archive, db, places: Arc::new(Semaphore::new(COPIES_MAX)) }
    }

    /// A host told that a log grew. Returns at once; a copy that has not begun its look yet serves this one too.
    /// What fails here is made good by the passes over the job.
    pub fn heard(&self, agents: &Arc<dyn AgentApi>, call: CallContext, log: Log) {
        let open = self.archive.open(&log);
        if !open.mark_grown() {
            return;
        }
        let (copier, agents) = (self.clone(), Arc::clone(agents));
        tokio::spawn(async move {
            let Ok(_place) = copier.places.acquire().await else { return };
            if let Err(error) = copier.copy(&*agents, call, &log).await {
                tracing::debug!(submission = %log.submission, %error, "copy a log");
                // It may have failed before its look: later news must not rely on it.
                open.clear_grown();
            }
        });
    }

    async fn copy(&self, agents: &dyn AgentApi, call: CallContext, log: &Log) -> Result<(), CopyError> {
        let mut before = None;
        for _ in 0..ROUNDS_MAX {
            // A log whose times are a little off is better than one that is late.
            let now = self.db.now().await.unwrap_or_default();
            let progress = catch_up(&self.archive, agents, call, log, now, CopyLimits::default()).await?;
            if !progress.more || before == Some(progress.end) {
                break;
            }
            before = Some(progress.end);
        }
        Ok(())
    }
}
