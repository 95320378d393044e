//! Deletes what is no longer kept: events, finished runs with all that is theirs, and uploads that nothing names.
//!
//! Logs go earlier and by a setting of their own ([`crate::logs::retention`]). Deleting twice is deleting once, so
//! replicas need not agree who does it; a crash in between repeats a batch. Batches are small and rest in between, so
//! that nobody waits for the database because of them.

use std::time::Duration;

use crate::{
    app::App,
    db::{Db, DbError, retention as rows},
    limits::RetentionPeriods,
    logs::{LogStore as _, archive::NotifyingLogStore},
};

const ROUND_INTERVAL: Duration = Duration::from_secs(600);
const BATCH_PAUSE: Duration = Duration::from_millis(100);
const EVENTS_MAX: usize = 500;
const RUNS_MAX: usize = 20;
const UPLOADS_MAX: usize = 20;
/// Batches of one kind in one round.
const BATCHES_MAX: usize = 50;

/// How many of each kind a round deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeletedCounts {
    pub events: usize,
    pub runs: usize,
    pub uploads: usize,
}

/// Deletes for ever; ends when it is dropped.
pub async fn run(app: App) {
    loop {
        // Replicas that were started together must not delete in step.
        let jitter = u64::from(getrandom::u32().unwrap_or(0)) % ROUND_INTERVAL.as_secs();
        tokio::time::sleep(ROUND_INTERVAL / 2 + Duration::from_secs(jitter)).await;
        match run_round(app.db(), app.logs(), app.settings().limits.keep).await {
            Ok(deleted) => report_deleted(&app, deleted),
            Err(error) => tracing::warn!(%error, "failed to delete what is no longer kept"),
        }
    }
}

fn report_deleted(app: &App, deleted: DeletedCounts) {
    let DeletedCounts { events, runs, uploads } = deleted;
    if deleted != DeletedCounts::default() {
        tracing::info!(events, runs, uploads, "deleted what is no longer kept");
    }
    for (kind, number) in [("events", events), ("runs", runs), ("uploads", uploads)] {
        app.metrics().deleted(kind, number);
    }
}

/// One round: batch after batch until nothing is left, or until the next round.
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
                // A run whose logs cannot be removed stays, or nobody would remove them later.
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
