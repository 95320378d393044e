//! Finishes of many workers in one statement.
//!
//! While one statement is on its way the next batch gathers behind it, so a quiet pipeline finishes at once
//! and a busy one in batches, with no timer to tune. Workers do not wait for the answer: the row stays
//! tracked, and extended, until it is there.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};
use uuid::Uuid;

use crate::{crank::Crank, lease::Tracked, store::LeaseStore};

/// A statement that fails is tried so often; then its rows are left to expire.
const TRIES: usize = 3;
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// A row to unlock and when it is due again.
pub(crate) struct Finish {
    row: Arc<Tracked>,
    due_in: Option<Duration>,
    why: Why,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Why {
    Done,
    Gone,
    Failed,
}

impl Finish {
    pub(crate) fn done(row: Arc<Tracked>, due_in: Option<Duration>) -> Self {
        Self { row, due_in, why: Why::Done }
    }

    pub(crate) fn gone(row: Arc<Tracked>) -> Self {
        Self { row, due_in: None, why: Why::Gone }
    }

    pub(crate) fn failed(row: Arc<Tracked>, retry_in: Duration) -> Self {
        Self { row, due_in: Some(retry_in), why: Why::Failed }
    }

    /// Waits only when the store is far behind.
    pub(crate) async fn send(self, out: &mpsc::Sender<Self>) {
        self.row.start_applying();
        // The receiver is gone only when the whole pipeline is about to be; the row is handed back then.
        let _ = out.send(self).await;
    }
}

/// Runs until every sender is gone and everything sent is finished.
pub(crate) async fn run<S: LeaseStore>(crank: Arc<Crank<S>>, mut inbox: mpsc::Receiver<Finish>) {
    let mut batch = Vec::new();
    while inbox.recv_many(&mut batch, crank.settings.finish_max.max(1)).await > 0 {
        flush(&crank, std::mem::take(&mut batch)).await;
    }
}

async fn flush<S: LeaseStore>(crank: &Crank<S>, mut batch: Vec<Finish>) {
    for attempt in 0..TRIES {
        if attempt > 0 {
            sleep(RETRY_DELAY).await;
        }
        let now = Instant::now();
        batch.retain(|finish| {
            let is_over = finish.row.is_over(now);
            if is_over {
                crank.settle_lost(&finish.row);
            }
            !is_over
        });
        if batch.is_empty() {
            return;
        }
        let done: Vec<_> = batch.iter().map(|finish| (finish.row.held(), finish.due_in)).collect();
        if let Some(finished) = crank.in_time(crank.store.finish(&crank.queue, &done)).await {
            return settle(crank, &batch, &finished.into_iter().collect());
        }
    }
    for finish in &batch {
        crank.meter.leases.release(&finish.row);
    }
}

fn settle<S: LeaseStore>(crank: &Crank<S>, batch: &[Finish], finished: &BTreeSet<Uuid>) {
    let now = Instant::now();
    let mut applied = 0;
    let mut stale = 0;
    let mut due_at: Option<Instant> = None;
    for finish in batch {
        crank.meter.leases.release(&finish.row);
        if !finished.contains(&finish.row.lease.id) {
            // A row that is gone cannot be finished, which is as it should be.
            stale += usize::from(finish.why != Why::Gone);
            continue;
        }
        applied += usize::from(finish.why == Why::Done);
        if finish.why == Why::Gone {
            // Nobody waits for it: it is not to wake the fetcher.
            continue;
        }
        let at = now + finish.due_in.unwrap_or_default();
        due_at = Some(due_at.map_or(at, |earliest| earliest.min(at)));
    }
    if applied > 0 {
        crank.meter.applied(applied);
    }
    crank.meter.stale.add(stale);
    if let Some(due_at) = due_at {
        crank.agenda.tell(due_at);
    }
}
