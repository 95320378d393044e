//! Deletes expired data: events, finished runs with everything that belongs to them, and unreferenced uploads.
//!
//! Logs have a separate, shorter period ([`crate::logs::retention`]). Deletion is idempotent, so replicas need not
//! agree on which of them does it; after a crash a batch is repeated. Batches are small, with pauses between them, so
//! that they do not delay other users of the database.

use std::time::Duration;

use crate::{
    app::App,
    db::{Db, DbError, retention as rows, sessions},
    limits::RetentionPeriods,
    logs::{LogStore as _, notifying_store::NotifyingLogStore},
};

const ROUND_INTERVAL: Duration = Duration::from_secs(600);
const BATCH_PAUSE: Duration = Duration::from_millis(100);
const EVENTS_MAX: usize = 500;
const RUNS_MAX: usize = 20;
const UPLOADS_MAX: usize = 20;
/// Maximum number of batches of one kind per round.
const BATCHES_MAX: usize = 50;

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
        match run_round(app.db(), app.logs(), limits.keep).await {
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

/// Runs one round: deletes batches until nothing is left or the maximum is reached.
pub async fn run_round(
    db: &Db,
    logs: &NotifyingLogStore,
    keep: RetentionPeriods,
) -> Result<DeletedCounts, DbError> {
    let mut deleted = DeletedCounts::default();
    if let Some(keep) = keep.events {
        for _ in 0..BATCHES_MAX {
            let some = rows::delete_events(db, keep, EVENTS_MAX).await?;
            deleted.events += some;
            if some < EVENTS_MAX {
                break;
            }
            tokio::time::sleep(BATCH_PAUSE).await;
        }
    }
    if let Some(keep) = keep.runs {
        for _ in 0..BATCHES_MAX {
            let old = rows::old_runs(db, keep, RUNS_MAX).await?;
            let mut gone = 0;
            for run in &old {
                // A run whose logs cannot be removed is kept, because otherwise its logs would never be removed.
                if let Err(error) = logs.remove(run.project_id, run.id).await {
                    tracing::warn!(run = %run.id, %error, "failed to remove the logs of an old run");
                    continue;
                }
                rows::delete_run(db, run.id).await?;
                gone += 1;
            }
            deleted.runs += gone;
            if gone < RUNS_MAX {
                break;
            }
            tokio::time::sleep(BATCH_PAUSE).await;
        }
    }
    if let Some(unused) = keep.uploads {
        for _ in 0..BATCHES_MAX {
            let some = rows::delete_uploads(db, unused, keep.runs, UPLOADS_MAX).await?;
            deleted.uploads += some;
            if some < UPLOADS_MAX {
                break;
            }
            tokio::time::sleep(BATCH_PAUSE).await;
        }
    }
    Ok(deleted)
}
