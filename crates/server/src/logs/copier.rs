//! Copies logs from the spool of a host into the store.
//!
//! A copy begins where the store ends, so it may be interrupted at any point and repeated by any replica. Hosts are not
//! trusted: the server limits how much a call reads, how long it takes and how much of a log is stored, and a call ends
//! when the host announces bytes and does not deliver them.

use std::{sync::Arc, time::Duration};

use tokio::{sync::Semaphore, time::Instant};
use windlass_api::agent::client::LogPart;
use windlass_model::time::Timestamp;

use super::{Log, LogError, LogStore, notifying_store::NotifyingLogStore};
use crate::{
    agents::{AgentApi, AgentError, CallContext},
    db::Db,
};

/// Maximum number of bytes requested from a host at once, and so the maximum length of a piece.
pub const CHUNK_BYTES_MAX: usize = 256 * 1024;
/// Maximum number of bytes that one call copies.
pub const CALL_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Maximum duration of one call; a read in progress is finished.
pub const CALL_TIME_MAX: Duration = Duration::from_secs(5);
/// Default of the maximum number of bytes stored of one log.
pub const LOG_BYTES_MAX: u64 = 8 * 1024 * 1024 * 1024;
/// Maximum number of concurrent copies that hosts' reports of new output start.
const COPIES_MAX: usize = 256;
/// Number of calls after which a copy releases its permit, even if its host has more.
const ROUNDS_MAX: usize = 64;
/// Maximum number of times that one call restarts because the end of the log in the store changed.
const GAPS_MAX: usize = 3;

/// Appended to a log that was truncated.
pub const TRUNCATION_NOTICE: &[u8] =
    b"\nwindlass: the log exceeds its size limit (`log_max` of the server), the rest was discarded\n";

#[derive(Clone, Copy, Debug)]
pub struct CopyLimits {
    /// Per call.
    pub bytes: u64,
    /// Per call.
    pub time: Duration,
    /// Per log.
    pub kept: u64,
}

impl Default for CopyLimits {
    fn default() -> Self {
        Self { bytes: CALL_BYTES_MAX, time: CALL_TIME_MAX, kept: LOG_BYTES_MAX }
    }
}

impl CopyLimits {
    /// Limits of a server that stores at most `kept` bytes of one log.
    pub fn for_log_size(kept: u64) -> Self {
        Self { kept, ..Self::default() }
    }
}

/// Progress of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyProgress {
    /// End of the log in the store.
    pub end: u64,
    /// True if the log is complete in the store and survives a power cut.
    pub complete: bool,
    /// True if the host has more: the call reached a limit, or the host did not deliver what it announced.
    pub more: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error("failed to read the log from its host")]
    Agent(#[from] AgentError),
    #[error("failed to store the log")]
    Store(#[from] LogError),
}

/// Copies what the host has beyond the end of the store. Waits first for a copy of the same log by this process. `now`
/// is stored as the time of the bytes, for queries by time.
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
    // The first read covers all growth that was reported before it.
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
            end = archive.append_to_files(log, end, now.0, TRUNCATION_NOTICE).await?;
            continue;
        }
        let bytes = &part.bytes[..part.bytes.len().min(CHUNK_BYTES_MAX).min(room)];
        if bytes.is_empty() {
            if part.end > end {
                return Ok(CopyProgress { end, complete: false, more: true });
            }
            return finish_if_complete(archive, agents, call, log, &part, end).await;
        }
        match archive.append_to_files(log, end, now.0, bytes).await {
            Ok(grown) => end = grown,
            Err(LogError::Gap { end: theirs, .. }) if gaps < GAPS_MAX => {
                // Another process removed the log meanwhile.
                (end, gaps) = (theirs, gaps + 1);
                continue;
            }
            Err(error) => return Err(error.into()),
        }
        if end >= part.end {
            // Later output is reported by the host, or found by the next call.
            return finish_if_complete(archive, agents, call, log, &part, end).await;
        }
        if end.saturating_sub(first) >= limits.bytes || began.elapsed() >= limits.time {
            return Ok(CopyProgress { end, complete: false, more: end < part.end });
        }
    }
}

/// Finishes the copy if the host reports that the log is complete.
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

/// Finishes a complete copy. A runner that waits for the acknowledgement may exit; without one it exits by itself.
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

/// Copies logs when hosts report new output: one copy per log at a time, and a limited number in total.
#[derive(Clone)]
pub struct LogCopier {
    archive: Arc<NotifyingLogStore>,
    db: Db,
    limits: CopyLimits,
    places: Arc<Semaphore>,
}

impl LogCopier {
    pub fn new(archive: Arc<NotifyingLogStore>, db: Db, limits: CopyLimits) -> Self {
        Self { archive, db, limits, places: Arc::new(Semaphore::new(COPIES_MAX)) }
    }

    /// Starts a copy of a log that grew, and returns at once. A copy that has not begun to read yet covers this report
    /// too. The passes over the job repeat a copy that fails here.
    pub fn received(&self, agents: &Arc<dyn AgentApi>, call: CallContext, log: Log) {
        let open = self.archive.open(&log);
        if !open.mark_grown() {
            return;
        }
        let (copier, agents) = (self.clone(), Arc::clone(agents));
        tokio::spawn(async move {
            let Ok(_place) = copier.places.acquire().await else { return };
            if let Err(error) = copier.copy(&*agents, call, &log).await {
                tracing::debug!(submission = %log.submission, %error, "failed to copy log");
                // The copy may have failed before its first read, so later reports must not rely on it.
                open.clear_grown();
            }
        });
    }

    async fn copy(&self, agents: &dyn AgentApi, call: CallContext, log: &Log) -> Result<(), CopyError> {
        let mut before = None;
        for _ in 0..ROUNDS_MAX {
            // A log with slightly wrong times is better than a late one.
            let now = self.db.now().await.unwrap_or_default();
            let progress = catch_up(&self.archive, agents, call, log, now, self.limits).await?;
            if !progress.more || before == Some(progress.end) {
                break;
            }
            before = Some(progress.end);
        }
        Ok(())
    }
}
