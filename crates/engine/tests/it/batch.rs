//! Pipelines that take all rows of a claim at once.

use std::{collections::BTreeSet, sync::Arc};

use parking_lot::Mutex;
use tokio::time::sleep;
use uuid::Uuid;
use windlass_engine::{Applied, BatchPipeline, Engine, Lease, Queue, Settings};

use crate::toy::{Fickle, Lab, Oops, QUEUE, done, id, millis, secs, standard};

struct Whole {
    store: Arc<Fickle>,
    seen: Arc<Mutex<Vec<Vec<Uuid>>>>,
    takes: std::time::Duration,
    /// Rows about which it says nothing.
    silent_on: BTreeSet<Uuid>,
    fails: bool,
}

impl Whole {
    fn new(store: &Arc<Fickle>) -> Self {
        Self {
            store: store.clone(),
            seen: Arc::default(),
            takes: millis(10),
            silent_on: BTreeSet::new(),
            fails: false,
        }
    }
}

impl BatchPipeline for Whole {
    type Error = Oops;

    fn queue(&self) -> Queue {
        QUEUE
    }

    async fn process(&self, leases: Vec<Lease>) -> Result<Vec<(Uuid, Applied)>, Oops> {
        self.seen.lock().push(leases.iter().map(|lease| lease.id).collect());
        sleep(self.takes).await;
        if self.fails {
            return Err(Oops("no"));
        }
        let speaks = |lease: &&Lease| !self.silent_on.contains(&lease.id);
        Ok(leases.iter().filter(speaks).map(|lease| (lease.id, done(&self.store.inner, lease))).collect())
    }
}

fn start(lab: &Lab, whole: Whole) -> Engine<Fickle> {
    let mut engine = Engine::new(whole.store.clone(), lab.hints.clone());
    engine.spawn_batch(whole, Settings { workers: 1, ..standard() });
    engine
}

#[tokio::test(start_paused = true)]
async fn a_batch_pipeline_sees_the_whole_claim_at_once() {
    let lab = Lab::new(100);
    let whole = Whole::new(&lab.way());
    let seen = whole.seen.clone();
    let engine = start(&lab, whole);
    lab.until(secs(5), "done", |lab| lab.done() == 100).await;
    assert_eq!(*seen.lock(), [(0..100).map(id).collect::<Vec<_>>()]);
    assert_eq!(engine.status()[0].totals.applied, 100);
}

#[tokio::test(start_paused = true)]
async fn what_arrives_while_a_batch_runs_is_the_next_batch() {
    let lab = Lab::new(3);
    let mut whole = Whole::new(&lab.way());
    whole.takes = secs(60);
    let seen = whole.seen.clone();
    let _engine = start(&lab, whole);
    sleep(secs(1)).await;
    for number in 3..9 {
        lab.put(number);
        lab.hints.hint(QUEUE.pipeline);
        sleep(secs(1)).await;
    }
    lab.until(secs(130), "done", |lab| lab.done() == 9).await;
    let sizes: Vec<_> = seen.lock().iter().map(Vec::len).collect();
    assert_eq!(sizes, [3, 6]);
    assert!((0..9).all(|number| lab.row(number).lock_epoch == 1), "the heartbeat kept them all");
}

#[tokio::test(start_paused = true)]
async fn a_row_the_batch_says_nothing_about_is_tried_again_later() {
    let lab = Lab::new(5);
    let mut whole = Whole::new(&lab.way());
    whole.silent_on.insert(id(2));
    let engine = start(&lab, whole);
    sleep(millis(500)).await;
    assert_eq!((lab.done(), lab.held()), (4, 0));
    assert_eq!(engine.status()[0].totals.errors, 1);
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_fails_backs_off_all_of_its_rows() {
    let lab = Lab::new(5);
    let mut whole = Whole::new(&lab.way());
    whole.fails = true;
    let seen = whole.seen.clone();
    let engine = start(&lab, whole);
    sleep(secs(9)).await;
    assert_eq!(seen.lock().len(), 4, "at 0, 1, 3 and 8 s");
    assert_eq!(engine.status()[0].totals.errors, 20);
    assert_eq!(lab.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn l9_a_batch_whose_heartbeat_fails_is_dropped_before_anybody_else_may_take_it() {
    let lab = Lab::new(5);
    let way = lab.way();
    let mut whole = Whole::new(&way);
    whole.takes = secs(3600);
    let engine = start(&lab, whole);
    sleep(secs(10)).await;
    way.fails.store(true, std::sync::atomic::Ordering::SeqCst);
    lab.until(secs(25), "dropped", |_| engine.status()[0].in_work == 0).await;
    assert_eq!(engine.status()[0].totals.lost, 5);
    let now = lab.store.now();
    assert!((0..5).all(|number| lab.row(number).lock_expires_at.is_some_and(|at| at > now)));
}
