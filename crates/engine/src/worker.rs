//! Workers: each takes a row from the queue, runs its pass for as long as the lease holds, and reports.

use std::{any::Any, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::FutureExt;
use tokio::{sync::mpsc, time::Instant};

use crate::{
    batch::BatchPipeline,
    crank::{Crank, chain},
    finish::Finish,
    lease::{Tracked, while_held},
    line::Line,
    pipeline::{Applied, Pipeline},
    store::LeaseStore,
};

/// What a worker works with.
pub(crate) struct Bench<S> {
    pub(crate) crank: Arc<Crank<S>>,
    pub(crate) line: Arc<Line>,
    pub(crate) out: mpsc::Sender<Finish>,
}

/// One row after another, until the line is closed.
pub(crate) async fn run<S: LeaseStore, P: Pipeline>(bench: Bench<S>, pipeline: Arc<P>) {
    while let Some(row) = bench.line.next().await {
        let _in_work = bench.crank.meter.in_work(1);
        process(&bench, &*pipeline, row).await;
    }
}

async fn process<S: LeaseStore, P: Pipeline>(bench: &Bench<S>, pipeline: &P, row: Arc<Tracked>) {
    let Bench { crank, out, .. } = bench;
    let work = AssertUnwindSafe(pass(pipeline, &row)).catch_unwind();
    match while_held(std::slice::from_ref(&row), work).await {
        Err(_) => crank.settle_lost(&row),
        Ok(Ok(Ok(Some(applied)))) => crank.settle(row, applied, out).await,
        Ok(Ok(Ok(None))) => crank.settle_gone(row, out).await,
        Ok(Ok(Err(error))) => {
            crank.say_failed(&row, &chain(&error));
            crank.settle_failed(row, out).await;
        }
        Ok(Err(panic)) => {
            crank.say_failed(&row, &said(&*panic));
            crank.settle_failed(row, out).await;
        }
    }
}

/// The one order there is. `None`: there was no row to work on.
async fn pass<P: Pipeline>(pipeline: &P, row: &Tracked) -> Result<Option<Applied>, P::Error> {
    let lease = &row.lease;
    let Some(loaded) = pipeline.load(lease).await? else { return Ok(None) };
    let seen = pipeline.observe(lease, &loaded).await?;
    let mut plan = P::decide(&loaded, seen, lease.now());
    pipeline.act(lease, &loaded, &mut plan).await?;
    row.start_applying();
    pipeline.apply(lease, loaded, plan).await.map(Some)
}

/// How much longer than a batch took the rest after it is, and the longest rest.
const BATCH_REST: u32 = 3;
const BATCH_REST_MAX: Duration = Duration::from_millis(200);

/// One batch after another, until the line is closed.
pub(crate) async fn run_batches<S: LeaseStore, P: BatchPipeline>(bench: Bench<S>, pipeline: Arc<P>) {
    let rows_max = bench.crank.settings.claim_max;
    while let Some(rows) = bench.line.next_many(rows_max).await {
        let began = Instant::now();
        let in_work = bench.crank.meter.in_work(rows.len());
        process_batch(&bench, &*pipeline, rows).await;
        drop(in_work);
        // What a batch costs depends little on how many rows it has. Resting for longer than it took leaves most of
        // the time to everybody else, and the rows that come meanwhile share the next one.
        tokio::time::sleep((began.elapsed() * BATCH_REST).min(BATCH_REST_MAX)).await;
    }
}

async fn process_batch<S: LeaseStore, P: BatchPipeline>(
    bench: &Bench<S>,
    pipeline: &P,
    mut rows: Vec<Arc<Tracked>>,
) {
    let Bench { crank, out, .. } = bench;
    // One that ended in the queue must not take the others with it.
    let now = Instant::now();
    for row in rows.extract_if(.., |row| row.is_over(now)) {
        crank.settle_lost(&row);
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
            // The batch is dropped already, so those of its rows that are still ours can go to somebody
            // else at once.
            let now = Instant::now();
            for row in rows.extract_if(.., |row| row.is_over(now)) {
                crank.settle_lost(&row);
            }
            return crank.hand_back(rows).await;
        }
        Ok(Ok(Ok(mut outcomes))) => {
            for row in rows {
                match outcomes.iter().position(|(id, _)| *id == row.lease.id) {
                    Some(at) => crank.settle(row, outcomes.swap_remove(at).1, out).await,
                    None => {
                        crank.say_failed(&row, "the batch said nothing about the row");
                        crank.settle_failed(row, out).await;
                    }
                }
            }
            return;
        }
        Ok(Ok(Err(error))) => chain(&error),
        Ok(Err(panic)) => said(&*panic),
    };
    // One failure, said once, for whichever row comes first.
    crank.say_failed(&rows[0], &format!("{failed} (a batch of {})", rows.len()));
    for row in rows {
        crank.settle_failed(row, out).await;
    }
}

fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    format!("panicked: {text}")
}
