//! Workers: each runs the pass of one row after another while its lease is valid, and reports the outcome.

use std::{any::Any, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::FutureExt;
use tokio::{sync::mpsc, time::Instant};

use crate::{
    batch::BatchPipeline,
    finish::FinishRequest,
    lease::{TrackedLease, while_held},
    pipeline::{ApplyOutcome, Pipeline},
    runtime::{PipelineRuntime, error_chain},
    store::LeaseStore,
    work_queue::WorkQueue,
};

/// State that a worker uses.
pub(crate) struct WorkerContext<S> {
    pub(crate) runtime: Arc<PipelineRuntime<S>>,
    pub(crate) queue: Arc<WorkQueue>,
    pub(crate) finishes: mpsc::Sender<FinishRequest>,
}

/// Processes one row after another, until the queue is closed.
pub(crate) async fn run<S: LeaseStore, P: Pipeline>(context: WorkerContext<S>, pipeline: Arc<P>) {
    while let Some(row) = context.queue.next().await {
        let _in_work = context.runtime.meter.in_work(1);
        process(&context, &*pipeline, row).await;
    }
}

async fn process<S: LeaseStore, P: Pipeline>(
    context: &WorkerContext<S>,
    pipeline: &P,
    row: Arc<TrackedLease>,
) {
    let WorkerContext { runtime, finishes: out, .. } = context;
    let work = AssertUnwindSafe(run_pass(pipeline, &row)).catch_unwind();
    match while_held(std::slice::from_ref(&row), work).await {
        Err(_) => runtime.handle_lost_lease(&row),
        Ok(Ok(Ok(Some(applied)))) => runtime.handle_outcome(row, applied, out).await,
        Ok(Ok(Ok(None))) => runtime.handle_missing_row(row, out).await,
        Ok(Ok(Err(error))) => {
            runtime.log_failure(&row, &error_chain(&error));
            runtime.handle_failure(row, out).await;
        }
        Ok(Err(panic)) => {
            runtime.log_failure(&row, &panic_message(&*panic));
            runtime.handle_failure(row, out).await;
        }
    }
}

/// Runs one pass in the fixed order. `None`: there was no row to process.
async fn run_pass<P: Pipeline>(pipeline: &P, row: &TrackedLease) -> Result<Option<ApplyOutcome>, P::Error> {
    let lease = &row.lease;
    let Some(loaded) = pipeline.load(lease).await? else { return Ok(None) };
    let seen = pipeline.observe(lease, &loaded).await?;
    let mut plan = P::decide(&loaded, seen, lease.now());
    pipeline.act(lease, &loaded, &mut plan).await?;
    row.start_applying();
    pipeline.apply(lease, loaded, plan).await.map(Some)
}

/// Ratio of the pause after a batch to the duration of the batch, and the maximum pause.
const BATCH_PAUSE_FACTOR: u32 = 3;
const BATCH_PAUSE_MAX: Duration = Duration::from_millis(20);

/// Processes one batch after another, until the queue is closed.
pub(crate) async fn run_batches<S: LeaseStore, P: BatchPipeline>(
    context: WorkerContext<S>,
    pipeline: Arc<P>,
) {
    let rows_max = context.runtime.settings.claim_max;
    while let Some(rows) = context.queue.next_many(rows_max).await {
        let began = Instant::now();
        let in_work = context.runtime.meter.in_work(rows.len());
        process_batch(&context, &*pipeline, rows).await;
        drop(in_work);
        // The cost of a batch depends little on its number of rows, so those that arrive during the pause share the next
        // one. A short batch is followed by a pause longer than itself; rows never wait long for a long one.
        tokio::time::sleep((began.elapsed() * BATCH_PAUSE_FACTOR).min(BATCH_PAUSE_MAX)).await;
    }
}

async fn process_batch<S: LeaseStore, P: BatchPipeline>(
    context: &WorkerContext<S>,
    pipeline: &P,
    mut rows: Vec<Arc<TrackedLease>>,
) {
    let WorkerContext { runtime, finishes: out, .. } = context;
    // A lease that ended in the queue must not end the others.
    let now = Instant::now();
    for row in rows.extract_if(.., |row| row.has_ended(now)) {
        runtime.handle_lost_lease(&row);
    }
    if rows.is_empty() {
        return;
    }
    for row in &rows {
        row.start_applying();
    }
    let leases = rows.iter().map(|row| row.lease.clone()).collect();
    let work = AssertUnwindSafe(pipeline.process(leases)).catch_unwind();
    let failed = match while_held(&rows, work).await {
        Err(_) => {
            // The batch is dropped already, so its rows that are still held can be claimed by others at once.
            let now = Instant::now();
            for row in rows.extract_if(.., |row| row.has_ended(now)) {
                runtime.handle_lost_lease(&row);
            }
            return runtime.hand_back(rows).await;
        }
        Ok(Ok(Ok(mut outcomes))) => {
            for row in rows {
                match outcomes.iter().position(|(id, _)| *id == row.lease.id) {
                    Some(at) => runtime.handle_outcome(row, outcomes.swap_remove(at).1, out).await,
                    None => {
                        runtime.log_failure(&row, "the batch returned no outcome for the row");
                        runtime.handle_failure(row, out).await;
                    }
                }
            }
            return;
        }
        Ok(Ok(Err(error))) => error_chain(&error),
        Ok(Err(panic)) => panic_message(&*panic),
    };
    // One failure, logged once, with the first row.
    runtime.log_failure(&rows[0], &format!("{failed} (batch of {} rows)", rows.len()));
    for row in rows {
        runtime.handle_failure(row, out).await;
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    format!("panicked: {text}")
}
