//! Passes that fail, panic, or are blocked.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

use futures_util::FutureExt;
use tokio::time::sleep;
use uuid::Uuid;
use windlass_engine::{
    ApplyOutcome, Engine, Lease, LeaseStore, MemoryStore, Pipeline, Queue, RelatedLock, RelatedLockOutcome,
    Settings, memory::Row,
};

use crate::support::{
    PassEvent, QUEUE, TABLE, TestEnv, TestError, TestPipeline, id, mark_done, millis, secs, standard_settings,
};

#[tokio::test(start_paused = true)]
async fn a_failing_row_is_retried_with_growing_delays() {
    let lab = TestEnv::new(1);
    let store = lab.new_store();
    let toy = lab.pipeline(&store).with_act(|_| async { Err(TestError("no")) });
    let engine = lab.start(&store, toy, standard_settings());
    sleep(secs(120)).await;
    let starts = lab.journal.times(PassEvent::Started, id(0));
    let gaps: Vec<_> = starts.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
    assert_eq!(gaps, [1, 2, 5, 10, 30, 30, 30]);
    assert_eq!(engine.status()[0].totals.errors, 8);
    assert_eq!(lab.locked_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_success_resets_the_retry_delay() {
    let lab = TestEnv::new(1);
    let store = lab.new_store();
    let visits = Arc::new(AtomicUsize::new(0));
    let toy = lab
        .pipeline(&store)
        .with_act(move |_| {
            let fails = visits.fetch_add(1, SeqCst) != 2;
            async move { if fails { Err(TestError("no")) } else { Ok(()) } }
        })
        .with_apply(|_, _| ApplyOutcome::Unchanged { due_in: Some(secs(7)) });
    let _engine = lab.start(&store, toy, standard_settings());
    sleep(secs(14)).await;
    let starts = lab.journal.times(PassEvent::Started, id(0));
    let gaps: Vec<_> = starts.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
    assert_eq!(gaps, [1, 2, 7, 1, 2]);
}

#[tokio::test(start_paused = true)]
async fn a_poison_row_does_not_hold_up_the_others() {
    let lab = TestEnv::new(200);
    let store = lab.new_store();
    let toy = lab
        .pipeline(&store)
        .with_act(|lease| async move { if lease.id == id(0) { Err(TestError("poison")) } else { Ok(()) } });
    let settings = Settings { workers: 1, ..standard_settings() };
    let _engine = lab.start(&store, toy, settings);
    let took = lab.wait_until(secs(5), "the rest done", |lab| lab.done_count() == 199).await;
    assert!(took <= millis(500), "{took:?}");
    sleep(secs(60)).await;
    assert!(lab.journal.times(PassEvent::Started, id(0)).len() <= 6, "and does not spin");
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_a_pass_fails_only_that_row() {
    let lab = TestEnv::new(20);
    let store = lab.new_store();
    let toy = lab.pipeline(&store).with_act(|lease| async move {
        assert!(lease.id != id(3), "told to panic");
        Ok(())
    });
    let settings = Settings { workers: 1, ..standard_settings() };
    let engine = lab.start(&store, toy, settings);
    lab.wait_until(secs(5), "the rest done", |lab| lab.done_count() == 19).await;
    sleep(secs(4)).await;
    let totals = engine.status()[0].totals;
    assert_eq!((totals.errors, totals.restarts), (3, 0), "tried at 0, 1 and 3 s, by the same worker");
    assert_eq!(engine.status()[0].in_work, 0);
}

/// Claims rows and then does not find them: as if they had been deleted in between.
struct MissingRowPipeline(TestPipeline);
impl Pipeline for MissingRowPipeline {
    type Row = ();
    type Observation = ();
    type Plan = ();
    type Error = TestError;
    fn queue(&self) -> Queue {
        QUEUE
    }
    async fn load(&self, lease: &Lease) -> Result<Option<()>, TestError> {
        self.0.journal.start_pass(lease).end();
        Ok(None)
    }
    async fn observe(&self, _: &Lease, _: &()) -> Result<(), TestError> {
        Ok(())
    }
    fn decide(_: &(), _: (), _: i64) {}
    async fn act(&self, _: &Lease, _: &(), _: &mut ()) -> Result<(), TestError> {
        Ok(())
    }
    async fn apply(&self, _: &Lease, _: (), _: ()) -> Result<ApplyOutcome, TestError> {
        Err(TestError("never reached"))
    }
}

#[tokio::test(start_paused = true)]
async fn a_missing_row_is_released_without_an_error() {
    let lab = TestEnv::new(1);
    let store = lab.new_store();
    let mut engine = Engine::new(store.clone(), lab.hints.clone());
    engine.spawn(MissingRowPipeline(lab.pipeline(&store)), standard_settings());
    sleep(secs(1)).await;
    assert_eq!(engine.status()[0].totals.errors, 0);
    let visits = lab.journal.count(PassEvent::Ended);
    assert!((2..=30).contains(&visits), "it is looked at again, without haste: {visits}");
}

const SHARED: [Uuid; 1] = [Uuid::from_u128(1)];

fn lock(item: Uuid) -> RelatedLock<'static> {
    RelatedLock {
        table: "shared",
        ids: &SHARED,
        pipeline: QUEUE.pipeline,
        item,
        ttl: secs(30),
        reserve: false,
    }
}

/// Locks the shared row, if it is free, and writes; all at once, as a transaction would.
fn apply_with_shared_lock(store: &MemoryStore, lease: &Lease) -> ApplyOutcome {
    match store.lock_related(lock(lease.id)).now_or_never().unwrap().unwrap() {
        RelatedLockOutcome::Busy => ApplyOutcome::RelatedBusy,
        RelatedLockOutcome::Locked(leases) => {
            store.unlock_related("shared", &[leases[0].key()]).now_or_never().unwrap().unwrap();
            mark_done(store, lease)
        }
    }
}

#[tokio::test(start_paused = true)]
async fn l10_an_item_with_a_busy_related_row_is_reset_and_retried_soon() {
    let lab = TestEnv::new(1);
    let store = lab.new_store();
    lab.store.put("shared", Row::new(SHARED[0], "idle", lab.store.now()));
    let RelatedLockOutcome::Locked(others) = lab.store.lock_related(lock(id(77))).await.unwrap() else {
        panic!()
    };
    // A claim that is slower than the pass always finds the row already put back.
    *store.claim_takes.lock() = millis(5);
    let toy = lab.pipeline(&store).with_apply(apply_with_shared_lock);
    let engine = lab.start(&store, toy, standard_settings());
    sleep(secs(10)).await;
    let row = lab.row(0);
    assert_eq!(row.lock_owner.as_deref(), Some(QUEUE.pipeline), "the owner stays");
    assert_eq!((row.lock_token, row.lock_expires_at), (None, None));
    let resets = engine.status()[0].totals.reset;
    assert!((100..=250).contains(&resets), "soon, but not in a frenzy: {resets} in 10 s");

    lab.store.unlock_related("shared", &[others[0].key()]).await.unwrap();
    let took = lab.wait_until(secs(1), "done", |lab| lab.done_count() == 1).await;
    assert!(took <= millis(70), "{took:?}");
    assert_eq!(lab.store.row(TABLE, id(0)).unwrap().lock_owner, None);
}

#[tokio::test(start_paused = true)]
async fn rows_waiting_for_a_related_lock_do_not_delay_other_rows() {
    let lab = TestEnv::new(50);
    let test_store = lab.new_store();
    let toy = lab.pipeline(&test_store).with_apply(|store, lease| {
        if lease.id < id(10) { ApplyOutcome::RelatedBusy } else { mark_done(store, lease) }
    });
    let _engine = lab.start(&test_store, toy, standard_settings());
    sleep(secs(5)).await;
    assert_eq!(lab.done_count(), 40);
    for number in 100..110 {
        lab.insert(number);
        lab.hints.hint(QUEUE.pipeline);
        let took = lab.wait_until(secs(1), "done", |lab| lab.row(number).status == "done").await;
        assert!(took <= millis(5), "{took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn claims_back_off_while_the_store_fails_and_resume_afterwards() {
    let lab = TestEnv::new(5);
    let store = lab.new_store();
    store.fails.store(true, SeqCst);
    let engine = lab.start(&store, lab.pipeline(&store), standard_settings());
    // Hints do not repair a store: each one causes at most one claim after the pause.
    sleep(secs(30)).await;
    let requested = store.claimed_at.lock().len();
    assert!((5..=12).contains(&requested), "{requested}");
    store.fails.store(false, SeqCst);
    lab.wait_until(secs(6), "done", |lab| lab.done_count() == 5).await;
    assert_eq!(engine.status()[0].totals.store_errors, requested as u64);
}

#[tokio::test(start_paused = true)]
async fn a_failed_finish_is_retried() {
    let lab = TestEnv::new(5);
    let store = lab.new_store();
    let (shy, applied) = (store.clone(), AtomicUsize::new(0));
    let toy = lab.pipeline(&store).with_apply(move |_, _| {
        // The statement for the first of them is in progress when the last one arrives.
        shy.fails.store(applied.fetch_add(1, SeqCst) == 4, SeqCst);
        ApplyOutcome::Unchanged { due_in: Some(secs(1000)) }
    });
    let settings = Settings { workers: 5, ..standard_settings() };
    let engine = lab.start(&store, toy, settings);
    sleep(millis(300)).await;
    assert_eq!(lab.locked_count(), 5);
    store.fails.store(false, SeqCst);
    lab.wait_until(secs(2), "finished", |lab| lab.locked_count() == 0).await;
    assert_eq!(engine.status()[0].totals.applied, 5);
}

/// Each child is in progress two thirds of the time, so they are hardly ever idle all at once: the parent depends on
/// them releasing what it has reserved.
#[tokio::test(start_paused = true)]
async fn l6_a_parent_eventually_locks_all_of_its_busy_children() {
    const CHILDREN: Queue = Queue { pipeline: "children", table: "children", statuses: &["new"] };
    let ids: Vec<Uuid> = (1..=5).map(Uuid::from_u128).collect();
    let lab = TestEnv::new(1);
    let test_store = lab.new_store();
    ids.iter().for_each(|id| lab.store.put("children", Row::new(*id, "new", lab.store.now())));
    let mut engine = Engine::new(test_store.clone(), lab.hints.clone());
    let busy = |lease: Lease| async move {
        sleep(millis(20 + 7 * u64::from(lease.id.as_bytes()[15]))).await;
        Ok(())
    };
    let children = lab.pipeline(&test_store).with_queue(CHILDREN).with_act(busy);
    engine.spawn(
        children.with_apply(|_, _| ApplyOutcome::Unchanged { due_in: Some(millis(20)) }),
        standard_settings(),
    );
    sleep(secs(1)).await;
    let parent = lab.pipeline(&test_store).with_apply(move |store, lease| {
        let lock = RelatedLock { table: "children", ids: &ids, reserve: true, ..lock(lease.id) };
        match store.lock_related(lock).now_or_never().unwrap().unwrap() {
            RelatedLockOutcome::Busy => ApplyOutcome::RelatedBusy,
            RelatedLockOutcome::Locked(leases) => {
                let held: Vec<_> = leases.iter().map(Lease::key).collect();
                store.unlock_related("children", &held).now_or_never().unwrap().unwrap();
                mark_done(store, lease)
            }
        }
    });
    engine.spawn(parent, standard_settings());
    lab.wait_until(secs(2), "the parent done", |lab| lab.done_count() == 1).await;
    let visits = lab.journal.count(PassEvent::Ended);
    sleep(secs(1)).await;
    assert!(lab.journal.count(PassEvent::Ended) > visits + 30, "the children go on");
}
