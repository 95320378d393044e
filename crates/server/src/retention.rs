//! Deletes expired data: events, finished runs with everything that belongs to them, and unreferenced uploads.
//!
//! Logs have a separate, shorter period ([`crate::logs::retention`]). Deletion is idempotent, so replicas need not
//! agree on which of them does it; after a crash a batch is repeated. Batches are small, with pauses between them, so
//! that they do not delay other users of the database.

use std::time::Duration;

use windlass_model::id::RunId;

use crate::{
    app::App,
    db::{
        Db, DbError,
        retention::{self as rows, OldRun, TimePlace},
        sessions,
    },
    limits::RetentionPeriods,
    logs::{LogStore as _, notifying_store::NotifyingLogStore},
};

const ROUND_INTERVAL: Duration = Duration::from_secs(600);
const UPLOADS_MAX: usize = 20;
/// Maximum number of batches of uploads per round: each of them reads many runs.
const UPLOAD_BATCHES_MAX: usize = 50;

/// Sizes of the batches of a round, which ends when nothing is left.
#[derive(Clone, Copy, Debug)]
pub struct RetentionBatches {
    /// Events that a batch looks at.
    pub events: usize,
    pub runs: usize,
    /// Time for other users of the database after each batch.
    pub pause: Duration,
}

impl Default for RetentionBatches {
    fn default() -> Self {
        Self { events: 2_000, runs: 100, pause: Duration::from_millis(100) }
    }
}

/// Number of deleted rows of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeletedCounts {
    pub events: usize,
    pub runs: usize,
    pub uploads: usize,
}

/// Runs until it is dropped.
pub async fn run(app: App) {
    loop {
        // Replicas that were started together must not delete in step.
        let jitter = u64::from(getrandom::u32().unwrap_or(0)) % ROUND_INTERVAL.as_secs();
        tokio::time::sleep(ROUND_INTERVAL / 2 + Duration::from_secs(jitter)).await;
        let limits = &app.settings().limits;
        if let Err(error) = sessions::delete_ended(app.db(), limits.web_sessions.idle).await {
            tracing::warn!(%error, "failed to delete ended sessions");
        }
        match run_round(app.db(), app.logs(), limits.keep, RetentionBatches::default()).await {
            Ok(deleted) => report_deleted(&app, deleted),
            Err(error) => tracing::warn!(%error, "failed to delete expired data"),
        }
    }
}

fn report_deleted(app: &App, deleted: DeletedCounts) {
    let DeletedCounts { events, runs, uploads } = deleted;
    if deleted != DeletedCounts::default() {
        tracing::info!(events, runs, uploads, "deleted expired data");
    }
    for (kind, number) in [("events", events), ("runs", runs), ("uploads", uploads)] {
        app.metrics().deleted(kind, number);
    }
}

/// Runs one round: deletes batches until nothing is left.
pub async fn run_round(
    db: &Db,
    logs: &NotifyingLogStore,
    keep: RetentionPeriods,
    batches: RetentionBatches,
) -> Result<DeletedCounts, DbError> {
    let mut deleted = DeletedCounts::default();
    if let Some(keep) = keep.events {
        let mut after = Some(TimePlace::START);
        while let Some(place) = after {
            let batch = rows::delete_events(db, keep, batches.events, place).await?;
            deleted.events += batch.deleted;
            after = batch.next;
            if after.is_some() {
                tokio::time::sleep(batches.pause).await;
            }
        }
    }
    if let Some(keep) = keep.runs {
        let mut after = TimePlace::START;
        loop {
            let old = rows::old_runs(db, keep, batches.runs, after).await?;
            let gone = remove_logs(logs, &old).await;
            if !gone.is_empty() {
                rows::delete_runs(db, &gone).await?;
                deleted.runs += gone.len();
            }
            let Some(last) = old.last().filter(|_| old.len() >= batches.runs) else { break };
            after = last.place();
            tokio::time::sleep(batches.pause).await;
        }
    }
    if let Some(unused) = keep.uploads {
        for _ in 0..UPLOAD_BATCHES_MAX {
            let some = rows::delete_uploads(db, unused, keep.runs, UPLOADS_MAX).await?;
            deleted.uploads += some;
            if some < UPLOADS_MAX {
                break;
            }
            tokio::time::sleep(batches.pause).await;
        }
    }
    Ok(deleted)
}

/// Removes the logs of runs, and returns the runs that can be deleted: one whose logs cannot be removed is kept, because
/// otherwise its logs would never be removed.
async fn remove_logs(logs: &NotifyingLogStore, runs: &[OldRun]) -> Vec<RunId> {
    let mut gone = Vec::with_capacity(runs.len());
    for run in runs {
        match logs.remove(run.project_id, run.id).await {
            Ok(()) => gone.push(run.id),
            Err(error) => tracing::warn!(run = %run.id, %error, "failed to remove the logs of an old run"),
        }
    }
    gone
}
