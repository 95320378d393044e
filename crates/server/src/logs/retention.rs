//! Forgets logs nobody can want any more: of runs that ended long ago, of runs that were deleted, and of containers of
//! the queue.
//!
//! Removing twice is removing once, so replicas need not agree who does it. A run counts as done only after its logs
//! are gone; a crash in between repeats the removal.

use std::{sync::Arc, time::Duration};

use windlass_model::time::{Span, Timestamp};

use super::{LogStore, archive::NotifyingLogStore};
use crate::db::{Db, DbError, Unit, containers, runs};

/// How long logs are kept after the end of their run, unless told otherwise.
pub const DEFAULT_RETENTION: Span = Span::days(30);
/// Logs of a deleted run stay this long after its end: somebody may still be copying its last lines.
const DELETED_RUN_RETENTION: Span = Span::hours(1);
const ROUND_INTERVAL: Duration = Duration::from_secs(600);
/// Runs whose logs are removed in one round.
const RUNS_MAX: usize = 200;

/// Removes for ever; ends when it is dropped. `keep` of `None`: only logs of deleted runs are removed.
pub async fn run(db: Db, archive: Arc<NotifyingLogStore>, keep: Option<Span>) {
    loop {
        // Replicas that were started together must not remove in step.
        let jitter = u64::from(getrandom::u32().unwrap_or(0)) % ROUND_INTERVAL.as_secs();
        tokio::time::sleep(ROUND_INTERVAL / 2 + Duration::from_secs(jitter)).await;
        if let Err(error) = run_round(&db, &archive, keep).await {
            tracing::warn!(%error, "look which logs are old");
        }
        if let Some(keep) = keep
            && let Err(error) = delete_container_logs(&db, keep).await
        {
            tracing::warn!(%error, "forget what old containers wrote");
        }
    }
}

/// One round over the container queue: its log, and what containers that are over wrote. Records stay.
pub async fn delete_container_logs(db: &Db, keep: Span) -> Result<(), DbError> {
    let before = Timestamp(db.now().await?.0.saturating_sub(keep.0));
    db.write(Unit::new().and(containers::expire(before))).await?;
    Ok(())
}

/// One round; says of how many runs the logs were removed.
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
            Err(error) => tracing::warn!(run = %run.id, %error, "remove the logs of a run"),
        }
    }
    Ok(removed)
}
