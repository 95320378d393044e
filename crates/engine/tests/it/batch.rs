//! Pipelines that process all rows of a claim at once.

use std::{collections::BTreeSet, sync::Arc};

use parking_lot::Mutex;
use tokio::time::sleep;
use uuid::Uuid;
use windlass_engine::{ApplyOutcome, BatchPipeline, Engine, Lease, LeaseStore, Queue, Settings};

use crate::support::{
    FaultyStore, QUEUE, TestEnv, TestError, id, mark_done, millis, secs, standard_settings,
};

struct TestBatchPipeline {
    store: Arc<FaultyStore>,
    batches: Arc<Mutex<Vec<Vec<Uuid>>>>,
    process_time: std::time::Duration,
    /// Rows that it omits from its result.
    omitted_rows: BTreeSet<Uuid>,
    fails: bool,
    /// Rows stay in the queue.
    keeps_rows: bool,
}

impl TestBatchPipeline {
    fn new(store: &Arc<FaultyStore>) -> Self {
        Self {
            store: store.clone(),
            batches: Arc::default(),
            process_time: millis(10),
            omitted_rows: BTreeSet::new(),
            fails: false,
            keeps_rows: false,
        }
    }
}

impl BatchPipeline for TestBatchPipeline {
    type Error = TestError;

    fn queue(&self) -> Queue {
        QUEUE
    }

    async fn process(&self, leases: Vec<Lease>) -> Result<Vec<(Uuid, ApplyOutcome)>, TestError> {
        self.batches.lock().push(leases.iter().map(|lease| lease.id).collect());
        sleep(self.process_time).await;
        if self.fails {
            return Err(TestError("no"));
        }
        if self.keeps_rows {
            let later = ApplyOutcome::Unchanged { due_in: Some(secs(60)) };
            return Ok(leases.iter().map(|lease| (lease.id, later.clone())).collect());
        }
        let speaks = |lease: &&Lease| !self.omitted_rows.contains(&lease.id);
        Ok(leases
            .iter()
            .filter(speaks)
            .map(|lease| (lease.id, mark_done(&self.store.inner, lease)))
            .collect())
    }
}

fn start(lab: &TestEnv, whole: TestBatchPipeline) -> Engine<FaultyStore> {
    let mut engine = Engine::new(whole.store.clone(), lab.hints.clone());
    engine.spawn_batch(whole, Settings { workers: 1, ..standard_settings() });
    engine
}

#[tokio::test(start_paused = true)]
async fn a_batch_pipeline_sees_the_whole_claim_at_once() {
    let lab = TestEnv::new(100);
    let whole = TestBatchPipeline::new(&lab.new_store());
    let seen = whole.batches.clone();
    let engine = start(&lab, whole);
    lab.wait_until(secs(5), "done", |lab| lab.done_count() == 100).await;
    assert_eq!(*seen.lock(), [(0..100).map(id).collect::<Vec<_>>()]);
    assert_eq!(engine.status()[0].totals.applied, 100);
}

#[tokio::test(start_paused = true)]
async fn rows_claimed_during_a_batch_form_the_next_batch() {
    let lab = TestEnv::new(3);
    let mut whole = TestBatchPipeline::new(&lab.new_store());
    whole.process_time = secs(60);
    let seen = whole.batches.clone();
    let _engine = start(&lab, whole);
    sleep(secs(1)).await;
    for number in 3..9 {
        lab.insert(number);
        lab.hints.hint(QUEUE.pipeline);
        sleep(secs(1)).await;
    }
    lab.wait_until(secs(130), "done", |lab| lab.done_count() == 9).await;
    let sizes: Vec<_> = seen.lock().iter().map(Vec::len).collect();
    assert_eq!(sizes, [3, 6]);
    assert!((0..9).all(|number| lab.row(number).lock_epoch == 1), "the heartbeat kept them all");
}

#[tokio::test(start_paused = true)]
async fn rows_do_not_wait_long_after_a_long_batch() {
    let lab = TestEnv::new(1);
    let mut whole = TestBatchPipeline::new(&lab.new_store());
    whole.process_time = secs(2);
    let _engine = start(&lab, whole);
    sleep(secs(1)).await;
    lab.insert(1);
    lab.hints.hint(QUEUE.pipeline);
    // Two batches of two seconds, the first of which began a second ago.
    lab.wait_until(millis(3_100), "done", |lab| lab.done_count() == 2).await;
}

#[tokio::test(start_paused = true)]
async fn rows_that_became_due_again_during_their_batch_are_in_the_next_one_with_new_rows() {
    let lab = TestEnv::new(1);
    let mut whole = TestBatchPipeline::new(&lab.new_store());
    (whole.process_time, whole.keeps_rows) = (secs(2), true);
    let (seen, store) = (whole.batches.clone(), whole.store.clone());
    let _engine = start(&lab, whole);
    sleep(secs(1)).await;
    // Capacity becomes free for the row in progress while another row arrives.
    store.inner.mark_due(QUEUE.table, &[id(0)]).await.unwrap();
    lab.insert(1);
    lab.hints.hint(QUEUE.pipeline);
    lab.wait_until(secs(20), "two batches", |_| seen.lock().len() == 2).await;
    let second: BTreeSet<Uuid> = seen.lock()[1].iter().copied().collect();
    assert_eq!(second, BTreeSet::from([id(0), id(1)]));
}

#[tokio::test(start_paused = true)]
async fn a_row_missing_from_the_batch_result_is_retried_later() {
    let lab = TestEnv::new(5);
    let mut whole = TestBatchPipeline::new(&lab.new_store());
    whole.omitted_rows.insert(id(2));
    let engine = start(&lab, whole);
    sleep(millis(500)).await;
    assert_eq!((lab.done_count(), lab.locked_count()), (4, 0));
    assert_eq!(engine.status()[0].totals.errors, 1);
}

#[tokio::test(start_paused = true)]
async fn a_failed_batch_backs_off_all_of_its_rows() {
    let lab = TestEnv::new(5);
    let mut whole = TestBatchPipeline::new(&lab.new_store());
    whole.fails = true;
    let seen = whole.batches.clone();
    let engine = start(&lab, whole);
    sleep(secs(9)).await;
    assert_eq!(seen.lock().len(), 4, "at 0, 1, 3 and 8 s");
    assert_eq!(engine.status()[0].totals.errors, 20);
    assert_eq!(lab.locked_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn l9_a_batch_is_dropped_before_its_leases_expire_when_heartbeats_fail() {
    let lab = TestEnv::new(5);
    let store = lab.new_store();
    let mut whole = TestBatchPipeline::new(&store);
    whole.process_time = secs(3600);
    let engine = start(&lab, whole);
    sleep(secs(10)).await;
    store.fails.store(true, std::sync::atomic::Ordering::SeqCst);
    lab.wait_until(secs(25), "dropped", |_| engine.status()[0].in_work == 0).await;
    assert_eq!(engine.status()[0].totals.lost, 5);
    let now = lab.store.now();
    assert!((0..5).all(|number| lab.row(number).lock_expires_at.is_some_and(|at| at > now)));
}
