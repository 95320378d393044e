//! Timing and size of the fetcher's claims.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::pending,
    time::Duration,
};

use tokio::time::{Instant, sleep};
use windlass_engine::{ApplyOutcome, Engine, Hints, Settings};

use crate::support::{PassEvent, QUEUE, TABLE, TestEnv, id, millis, secs, standard_settings};

fn gaps(times: &[Instant]) -> Vec<Duration> {
    times.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

fn is_about(gap: Duration, delay: Duration) -> bool {
    gap >= delay * 4 / 5 && gap <= delay * 6 / 5 + millis(5)
}

#[tokio::test(start_paused = true)]
async fn a_hint_wakes_the_fetcher_at_once() {
    let lab = TestEnv::new(0);
    let store = lab.new_store();
    let _engine = lab.start(&store, lab.pipeline(&store), standard_settings());
    sleep(secs(100)).await;
    lab.insert(1);
    lab.hints.hint(QUEUE.pipeline);
    let took = lab.wait_until(secs(1), "done", |lab| lab.done_count() == 1).await;
    assert!(took <= millis(5), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn l7_a_lost_hint_costs_latency_only() {
    let lab = TestEnv::new(0);
    let store = lab.new_store();
    let _engine = lab.start(&store, lab.pipeline(&store), standard_settings());
    sleep(secs(100)).await;
    lab.insert(1);
    lab.wait_until(secs(5) + millis(10), "done", |lab| lab.done_count() == 1).await;
}

#[tokio::test(start_paused = true)]
async fn l7_repeated_hints_cause_no_extra_work() {
    let lab = TestEnv::new(0);
    let store = lab.new_store();
    let _engine = lab.start(&store, lab.pipeline(&store), standard_settings());
    sleep(secs(100)).await;
    let before = store.claimed_at.lock().len();
    lab.insert(1);
    for _ in 0..1000 {
        lab.hints.hint(QUEUE.pipeline);
    }
    lab.wait_until(secs(1), "done", |lab| lab.done_count() == 1).await;
    sleep(millis(100)).await;
    assert_eq!(lab.journal.count(PassEvent::Started), 1);
    assert!(store.claimed_at.lock().len() - before <= 3, "a thousand hints are one");
}

#[tokio::test(start_paused = true)]
async fn a_hint_during_a_claim_is_not_forgotten() {
    let lab = TestEnv::new(0);
    let store = lab.new_store();
    let _engine = lab.start(&store, lab.pipeline(&store), standard_settings());
    // The first claim is in progress: it has been sent, and will find nothing.
    sleep(Duration::from_micros(50)).await;
    let claims = store.claimed_at.lock().len();
    assert_eq!(claims, 1);
    lab.hints.hint(QUEUE.pipeline);
    lab.insert(1);
    let took = lab.wait_until(secs(1), "done", |lab| lab.done_count() == 1).await;
    assert!(took <= millis(5), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn empty_fetches_back_off_and_a_successful_one_resets_the_delay() {
    let lab = TestEnv::new(0);
    let store = lab.new_store();
    let engine = lab.start(&store, lab.pipeline(&store), standard_settings());
    sleep(secs(40)).await;
    let seen = gaps(&store.claimed_at.lock());
    for (step, gap) in seen.iter().enumerate() {
        let delay = [millis(500), secs(1), secs(2), secs(5)][step.min(3)];
        assert!(is_about(*gap, delay), "step {step}: {gap:?} is not about {delay:?}");
        assert!(*gap <= secs(5) + millis(5), "the longest delay is a promise");
    }
    let distinct: BTreeSet<_> = seen[3..].iter().collect();
    assert!(distinct.len() > 1, "there is jitter: {seen:?}");
    let totals = engine.status()[0].totals;
    assert_eq!(totals.fetches, totals.fetches_empty);

    lab.insert(1);
    lab.wait_until(secs(6), "done", |lab| lab.done_count() == 1).await;
    store.claimed_at.lock().clear();
    sleep(secs(5)).await;
    let seen = gaps(&store.claimed_at.lock());
    assert!(is_about(seen[0], secs(1)) || is_about(seen[0], millis(500)), "{seen:?}");
}

#[tokio::test(start_paused = true)]
async fn the_fetcher_wakes_when_a_row_is_due() {
    let lab = TestEnv::new(1);
    let test_store = lab.new_store();
    let due_in = millis(37_250);
    let toy = lab.pipeline(&test_store).with_apply(move |store, lease| {
        let due_in_us = i64::try_from(due_in.as_micros()).unwrap();
        assert!(store.apply(TABLE, lease.key(), |row, now| row.due_at = Some(now + due_in_us)));
        ApplyOutcome::Written { due_in_us: Some(due_in_us), wake: Vec::new() }
    });
    let _engine = lab.start(&test_store, toy, standard_settings());
    sleep(secs(200)).await;
    let visits = gaps(&lab.journal.times(PassEvent::Started, id(0)));
    assert_eq!(visits.len(), 5);
    for gap in visits {
        assert!(gap >= due_in && gap <= due_in + millis(5), "{gap:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_row_inserted_with_a_due_time_is_fetched_at_that_time() {
    let lab = TestEnv::new(1);
    let mut row = lab.row(0);
    row.due_at = Some(lab.store.now() + 3_210_000);
    lab.store.put(TABLE, row);
    let store = lab.new_store();
    let _engine = lab.start(&store, lab.pipeline(&store), standard_settings());
    let took = lab.wait_until(secs(10), "done", |lab| lab.done_count() == 1).await;
    assert!(took >= millis(3_209) && took <= millis(3_215), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_write_wakes_the_pipelines_it_lists() {
    let lab = TestEnv::new(1);
    let test_store = lab.new_store();
    let others = lab.hints.subscribe("others");
    let mut outgoing = lab.hints.outgoing();
    let toy = lab.pipeline(&test_store).with_apply(|store, lease| {
        crate::support::mark_done(store, lease);
        ApplyOutcome::Written { due_in_us: None, wake: vec!["others"] }
    });
    let _engine = lab.start(&test_store, toy, standard_settings());
    others.wait().await;
    assert_eq!(outgoing.next().await, ["others"]);
    assert_eq!(lab.done_count(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_queue_never_holds_more_than_its_bound() {
    let lab = TestEnv::new(500);
    let store = lab.new_store();
    let settings =
        Settings { workers: 3, queue_len_max: 10, queue_len_min: 4, claim_max: 8, ..standard_settings() };
    let toy = lab.pipeline(&store).with_act(|_| async {
        sleep(millis(100)).await;
        Ok(())
    });
    let engine = lab.start(&store, toy, settings);
    let mut queued_max = 0;
    while lab.done_count() < 500 {
        let status = &engine.status()[0];
        assert!(status.queued <= 10, "{status:?}");
        assert!(status.in_work <= 3, "{status:?}");
        queued_max = queued_max.max(status.queued);
        sleep(millis(7)).await;
    }
    assert!(queued_max >= 8, "it is filled before it runs dry: {queued_max}");
    // Three at a time, a tenth of a second each: the workers never waited for the fetcher.
    let entries = lab.journal.entries();
    let took = entries.last().unwrap().at - entries[0].at;
    assert!(took < millis(500 * 100 / 3 + 1500), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn rows_wait_in_the_database_while_the_queue_is_full() {
    let lab = TestEnv::new(100);
    let store = lab.new_store();
    let settings =
        Settings { workers: 2, queue_len_max: 10, queue_len_min: 99, claim_max: 50, ..standard_settings() };
    let toy = lab.pipeline(&store).with_act(|_| pending());
    let _engine = lab.start(&store, toy, settings);
    sleep(secs(60)).await;
    assert!(lab.locked_count() <= 12, "{}", lab.locked_count());
    assert!(lab.locked_count() >= 7);
}

#[tokio::test(start_paused = true)]
async fn two_replicas_process_each_of_ten_thousand_rows_once() {
    let lab = TestEnv::new(10_000);
    let (one, two) = (lab.new_store(), lab.new_store());
    let mut engines = Vec::new();
    for (store, seed) in [(&one, 1), (&two, 2)] {
        let mut engine = Engine::new(store.clone(), Hints::new());
        engine.spawn(lab.pipeline(store), Settings::standard(seed));
        engines.push(engine);
    }
    lab.wait_until(secs(60), "all done", |lab| lab.done_count() == 10_000).await;
    let mut visits = BTreeMap::new();
    for entry in lab.journal.entries() {
        assert_eq!(entry.epoch, 1);
        if entry.event == PassEvent::Ended {
            *visits.entry(entry.id).or_insert(0) += 1;
        }
    }
    assert_eq!(visits.len(), 10_000);
    assert!(visits.values().all(|count| *count == 1));
    let totals: Vec<_> = engines.iter().map(|engine| engine.status()[0].totals).collect();
    assert_eq!(totals.iter().map(|totals| totals.claimed).sum::<u64>(), 10_000);
    assert_eq!(totals.iter().map(|totals| totals.applied).sum::<u64>(), 10_000);
    assert!(totals.iter().all(|totals| totals.applied > 1000), "both took part: {totals:?}");
    assert_eq!(lab.locked_count(), 0);
}

/// Uses real threads and real time, for what virtual time on one thread cannot show.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn replicas_on_many_threads_process_each_row_once() {
    let lab = TestEnv::new(1_000);
    let ways = [lab.new_store(), lab.new_store(), lab.new_store()];
    let mut engines = Vec::new();
    for (test_store, seed) in ways.iter().zip(0..) {
        let mut engine = Engine::new(test_store.clone(), lab.hints.clone());
        let settings = Settings { queue_len_max: 32, queue_len_min: 16, ..Settings::standard(seed) };
        let toy = lab.pipeline(test_store).with_apply(|store, lease| {
            if lease.epoch == 1 {
                ApplyOutcome::Unchanged { due_in: None }
            } else {
                crate::support::mark_done(store, lease)
            }
        });
        engine.spawn(toy, settings);
        engines.push(engine);
    }
    lab.wait_until(secs(60), "all done", |lab| lab.done_count() == 1_000).await;
    assert_eq!(lab.journal.count(PassEvent::Ended), 2_000);
    for engine in engines {
        engine.stop(secs(5)).await;
    }
    assert!(lab.store.rows(TABLE).iter().all(|row| row.lock_epoch == 2 && row.lock_token.is_none()));
}

#[tokio::test(start_paused = true)]
async fn unchanged_rows_are_finished_in_batches() {
    let lab = TestEnv::new(2000);
    let store = lab.new_store();
    let toy = lab.pipeline(&store).with_apply(|_, _| ApplyOutcome::Unchanged { due_in: Some(secs(1000)) });
    let engine = lab.start(&store, toy, standard_settings());
    lab.wait_until(secs(60), "all seen", |_| engine.status()[0].totals.applied == 2000).await;
    let finishes = store.finishes.load(std::sync::atomic::Ordering::SeqCst);
    assert!(finishes <= 2000 / 15, "{finishes} statements for 2000 rows");
    assert_eq!(lab.locked_count(), 0);
    assert!(lab.store.rows(TABLE).iter().all(|row| row.due_at.is_some()));
    assert_eq!(engine.status()[0].applied_last_minute, 2000);
}
