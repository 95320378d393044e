//! Stopping, killing and crashing.

use std::{future::pending, sync::atomic::Ordering::SeqCst};

use tokio::time::{Instant, sleep};
use windlass_engine::{Engine, Hints, Settings};

use crate::support::{PassEvent, QUEUE, TestEnv, millis, secs, standard_settings};

#[tokio::test(start_paused = true)]
async fn a_graceful_stop_releases_queued_rows_immediately() {
    let lab = TestEnv::new(30);
    let store = lab.new_store();
    let before: Vec<_> = (0..30).map(|number| lab.row(number).last_processed_at).collect();
    let toy = lab.pipeline(&store).with_act(|_| async {
        sleep(secs(3)).await;
        Ok(())
    });
    let engine = lab.start(&store, toy, Settings { workers: 2, ..standard_settings() });
    sleep(secs(1)).await;
    assert_eq!(lab.locked_count(), 30);
    let since = Instant::now();
    let stopping = tokio::spawn(engine.stop(secs(20)));
    sleep(millis(5)).await;
    assert_eq!(lab.locked_count(), 2, "only what is in work is still held");
    stopping.await.unwrap();
    assert!(since.elapsed() <= millis(2_010), "it waits for work, not for the grace: {:?}", since.elapsed());
    assert_eq!(lab.done_count(), 2, "what was in work was finished");
    assert_eq!(lab.locked_count(), 0);
    let unmoved = (0..30).filter(|n| lab.row(*n).last_processed_at == before[*n as usize]).count();
    assert_eq!(unmoved, 28, "they keep their turn");
}

#[tokio::test(start_paused = true)]
async fn work_beyond_the_grace_period_is_dropped_and_released() {
    let lab = TestEnv::new(3);
    let store = lab.new_store();
    let engine = lab.start(&store, lab.pipeline(&store).with_act(|_| pending()), standard_settings());
    sleep(secs(100)).await;
    let since = Instant::now();
    engine.stop(secs(4)).await;
    assert!(since.elapsed() >= secs(4) && since.elapsed() <= secs(4) + millis(10), "{:?}", since.elapsed());
    assert_eq!(lab.journal.count(PassEvent::Dropped), 3);
    assert_eq!((lab.locked_count(), lab.done_count()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_rolling_restart_delays_nothing() {
    let lab = TestEnv::new(40);
    let (one, two) = (lab.new_store(), lab.new_store());
    let (here, there) = (Hints::new(), Hints::new());
    // Simulates the database's notifications between two servers.
    let (mut outgoing, other) = (here.outgoing(), there.clone());
    let carrier = tokio::spawn(async move {
        loop {
            outgoing.next().await.into_iter().for_each(|name| other.hint_local(name));
        }
    });
    let mut first = Engine::new(one.clone(), here);
    first.spawn(lab.pipeline(&one).with_act(|_| pending()), standard_settings());
    sleep(secs(1)).await;
    let mut second = Engine::new(two.clone(), there);
    second.spawn(lab.pipeline(&two), standard_settings());
    sleep(secs(60)).await;
    assert_eq!((lab.locked_count(), lab.done_count()), (40, 0));
    first.stop(millis(500)).await;
    let took = lab.wait_until(secs(10), "done", |lab| lab.done_count() == 40).await;
    assert!(took <= millis(10), "{took:?}");
    carrier.abort();
}

#[tokio::test(start_paused = true)]
async fn a_stop_awaits_an_in_flight_claim_and_releases_its_rows() {
    let lab = TestEnv::new(5);
    let store = lab.new_store();
    let engine = lab.start(&store, lab.pipeline(&store), standard_settings());
    // Let the tasks start; the claim lasts a tenth of a millisecond, and no time passes here.
    tokio::task::yield_now().await;
    tokio::task::yield_now().await;
    assert_eq!(store.claimed_at.lock().len(), 1);
    engine.stop(secs(1)).await;
    assert_eq!((lab.locked_count(), lab.journal.count(PassEvent::Dropped)), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn rows_claimed_during_a_stop_are_released_immediately() {
    let lab = TestEnv::new(1);
    let store = lab.new_store();
    let toy = lab.pipeline(&store).with_act(|_| async {
        sleep(secs(10)).await;
        Ok(())
    });
    let engine = lab.start(&store, toy, standard_settings());
    sleep(secs(1)).await;
    (1..6).for_each(|number| lab.insert(number));
    *store.claim_takes.lock() = millis(300);
    lab.hints.hint(QUEUE.pipeline);
    sleep(millis(100)).await;
    let stopping = tokio::spawn(engine.stop(secs(30)));
    sleep(millis(300)).await;
    assert_eq!(lab.locked_count(), 1, "they were claimed, and given back while the other is still in work");
    assert!((1..6).all(|number| lab.row(number).lock_epoch == 1));
    stopping.await.unwrap();
    assert_eq!((lab.locked_count(), lab.done_count()), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn a_stop_does_not_wait_forever_for_a_hanging_store() {
    let lab = TestEnv::new(5);
    let store = lab.new_store();
    let engine = lab.start(&store, lab.pipeline(&store).with_act(|_| pending()), standard_settings());
    sleep(secs(10)).await;
    store.hangs.store(true, SeqCst);
    let since = Instant::now();
    engine.stop(secs(1)).await;
    assert!(since.elapsed() <= secs(20), "{:?}", since.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_dropped_engine_takes_no_further_step() {
    let lab = TestEnv::new(10);
    let store = lab.new_store();
    let toy = lab.pipeline(&store).with_act(|_| async {
        sleep(secs(1)).await;
        Ok(())
    });
    let engine = lab.start(&store, toy, standard_settings());
    sleep(millis(500)).await;
    assert_eq!(lab.locked_count(), 10);
    let calls = (store.claimed_at.lock().len(), store.extends.load(SeqCst), store.finishes.load(SeqCst));
    drop(engine);
    sleep(secs(100)).await;
    assert_eq!((lab.locked_count(), lab.done_count()), (10, 0), "nothing was written or handed back");
    assert_eq!(lab.journal.count(PassEvent::Dropped), 10, "every pass was dropped");
    assert_eq!(
        calls,
        (store.claimed_at.lock().len(), store.extends.load(SeqCst), store.finishes.load(SeqCst)),
        "the store was left alone"
    );
}

#[tokio::test(start_paused = true)]
async fn a_crashed_task_restarts_only_its_pipeline() {
    let lab = TestEnv::new(1);
    let store = lab.new_store();
    let mut engine = Engine::new(store.clone(), lab.hints.clone());
    engine.spawn(lab.pipeline(&store), standard_settings());
    sleep(secs(1)).await;
    assert_eq!(lab.done_count(), 1);
    store.panics_at_claim.store(true, SeqCst);
    lab.hints.hint(QUEUE.pipeline);
    sleep(millis(10)).await;
    lab.insert(2);
    let took = lab.wait_until(secs(5), "done", |lab| lab.done_count() == 2).await;
    assert!(took <= secs(1) + millis(10), "{took:?}");
    assert_eq!(engine.status()[0].totals.restarts, 1);
    engine.stop(secs(1)).await;
}

#[tokio::test(start_paused = true)]
async fn rows_held_by_a_crashed_task_are_released() {
    let lab = TestEnv::new(10);
    let store = lab.new_store();
    let toy = lab.pipeline(&store).with_act(|_| async {
        sleep(millis(200)).await;
        Ok(())
    });
    let settings = Settings { workers: 2, queue_len_max: 4, queue_len_min: 4, ..standard_settings() };
    let _engine = lab.start(&store, toy, settings);
    sleep(millis(100)).await;
    // The next claim comes as soon as a worker has started another row.
    store.panics_at_claim.store(true, SeqCst);
    lab.wait_until(secs(1), "crashed", |lab| lab.locked_count() == 0 && !store.panics_at_claim.load(SeqCst))
        .await;
    let took = lab.wait_until(secs(60), "done", |lab| lab.done_count() == 10).await;
    assert!(took <= secs(3), "nobody waited for a lock to expire: {took:?}");
}
