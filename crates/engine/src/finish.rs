//! Batching of finishes: those of many workers in one statement.
//!
//! While one statement is in progress the next batch accumulates, so a quiet pipeline finishes at once and a busy one
//! in batches, without a timer to tune. Workers do not wait for the result: the row stays tracked, and its lease
//! extended, until then.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};
use uuid::Uuid;

use crate::{lease::TrackedLease, runtime::PipelineRuntime, store::LeaseStore};

/// Number of attempts of a failed statement; then the leases of its rows expire.
const ATTEMPTS_MAX: usize = 3;
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// A row to unlock and its next due time.
pub(crate) struct FinishRequest {
    row: Arc<TrackedLease>,
    due_in: Option<Duration>,
    reason: FinishReason,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FinishReason {
    Done,
    RowMissing,
    Failed,
}

impl FinishRequest {
    pub(crate) fn done(row: Arc<TrackedLease>, due_in: Option<Duration>) -> Self {
        Self { row, due_in, reason: FinishReason::Done }
    }

    pub(crate) fn row_missing(row: Arc<TrackedLease>) -> Self {
        Self { row, due_in: None, reason: FinishReason::RowMissing }
    }

    pub(crate) fn failed(row: Arc<TrackedLease>, retry_in: Duration) -> Self {
        Self { row, due_in: Some(retry_in), reason: FinishReason::Failed }
    }

    /// Sends the request. Waits only if the store is far behind.
    pub(crate) async fn send(self, out: &mpsc::Sender<Self>) {
        self.row.start_applying();
        // The receiver is gone only if the whole pipeline is about to stop; the row is handed back then.
        let _ = out.send(self).await;
    }
}

/// Runs until every sender is gone and everything sent is finished.
pub(crate) async fn run<S: LeaseStore>(
    runtime: Arc<PipelineRuntime<S>>,
    mut inbox: mpsc::Receiver<FinishRequest>,
) {
    let mut batch = Vec::new();
    while inbox.recv_many(&mut batch, runtime.settings.finish_max.max(1)).await > 0 {
        flush(&runtime, std::mem::take(&mut batch)).await;
    }
}

async fn flush<S: LeaseStore>(runtime: &PipelineRuntime<S>, mut batch: Vec<FinishRequest>) {
    for attempt in 0..ATTEMPTS_MAX {
        if attempt > 0 {
            sleep(RETRY_DELAY).await;
        }
        let now = Instant::now();
        batch.retain(|finish| {
            let is_over = finish.row.has_ended(now);
            if is_over {
                runtime.handle_lost_lease(&finish.row);
            }
            !is_over
        });
        if batch.is_empty() {
            return;
        }
        let done: Vec<_> = batch.iter().map(|finish| (finish.row.key(), finish.due_in)).collect();
        if let Some(finished) = runtime.with_timeout(runtime.store.finish(&runtime.queue, &done)).await {
            return record_finished(runtime, &batch, &finished.into_iter().collect());
        }
    }
    for finish in &batch {
        runtime.meter.leases.release(&finish.row);
    }
}

fn record_finished<S: LeaseStore>(
    runtime: &PipelineRuntime<S>,
    batch: &[FinishRequest],
    finished: &BTreeSet<Uuid>,
) {
    let now = Instant::now();
    let mut applied = 0;
    let mut stale = 0;
    let mut due_at: Option<Instant> = None;
    for finish in batch {
        runtime.meter.leases.release(&finish.row);
        if !finished.contains(&finish.row.lease.id) {
            // A deleted row cannot be finished, as expected.
            stale += usize::from(finish.reason != FinishReason::RowMissing);
            continue;
        }
        applied += usize::from(finish.reason == FinishReason::Done);
        if finish.reason == FinishReason::RowMissing {
            // It is not due, so it does not wake the fetcher.
            continue;
        }
        let at = now + finish.due_in.unwrap_or_default();
        due_at = Some(due_at.map_or(at, |earliest| earliest.min(at)));
    }
    if applied > 0 {
        runtime.meter.applied(applied);
    }
    runtime.meter.stale.add(stale);
    if let Some(due_at) = due_at {
        runtime.due_timer.schedule(due_at);
    }
}
