//! Removes expired logs: of runs that ended long ago, of deleted runs, and of containers of the queue.
//!
//! Removal is idempotent, so replicas need not agree on which of them does it. A run is marked as done only after its
//! logs are removed; after a crash the removal is repeated.

use std::{sync::Arc, time::Duration};

use windlass_model::time::{Span, Timestamp};

use super::{LogStore, notifying_store::NotifyingLogStore};
use crate::db::{Db, DbError, Unit, containers, runs};

/// Default retention of logs after the end of their run.
pub const DEFAULT_RETENTION: Span = Span::days(30);
/// Retention of the logs of a deleted run after its end: its last lines may still be being copied.
const DELETED_RUN_RETENTION: Span = Span::hours(1);
const ROUND_INTERVAL: Duration = Duration::from_secs(600);
/// Maximum number of runs whose logs are removed in one round.
const RUNS_MAX: usize = 200;

/// Runs until it is dropped. If `keep` is `None`, only logs of deleted runs are removed.
pub async fn run(db: Db, archive: Arc<NotifyingLogStore>, keep: Option<Span>) {
    loop {
        // Replicas that were started together must not remove in step.
        let jitter = u64::from(getrandom::u32().unwrap_or(0)) % ROUND_INTERVAL.as_secs();
        tokio::time::sleep(ROUND_INTERVAL / 2 + Duration::from_secs(jitter)).await;
        if let Err(error) = run_round(&db, &archive, keep).await {
            tracing::warn!(%error, "failed to list expired logs");
        }
        if let Some(keep) = keep
            && let Err(error) = delete_container_logs(&db, keep).await
        {
            tracing::warn!(%error, "failed to delete the output of old containers");
        }
    }
}

/// Removes old log entries of the container queue and the output of finished containers. Records stay.
pub async fn delete_container_logs(db: &Db, keep: Span) -> Result<(), DbError> {
    let before = Timestamp(db.now().await?.0.saturating_sub(keep.0));
    db.write(Unit::new().and(containers::expire(before))).await?;
    Ok(())
}

/// Runs one round, and returns the number of runs whose logs were removed.
pub async fn run_round(db: &Db, archive: &NotifyingLogStore, keep: Option<Span>) -> Result<usize, DbError> {
    let old =
        runs::list_with_old_logs(db, keep.unwrap_or(Span(i64::MAX / 4)), DELETED_RUN_RETENTION, RUNS_MAX)
            .await?;
    let mut removed = 0;
    for run in old {
        match archive.remove(run.project_id, run.id).await {
            Ok(()) => {
                runs::mark_logs_removed(db, run.id).await?;
                removed += 1;
            }
            Err(error) => tracing::warn!(run = %run.id, %error, "failed to remove the logs of a run"),
        }
    }
    Ok(removed)
}
