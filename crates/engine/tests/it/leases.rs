//! Holding rows, and releasing them in time.

use std::{
    future::{Future, pending},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, advance, sleep},
};
use windlass_engine::{Lease, LeaseKey, LeaseStore, MemoryStore, memory::Row};
use windlass_testkit::rng::Rng;

use crate::support::{
    FaultyStore, PassEvent, QUEUE, TABLE, TestEnv, TestError, id, millis, secs, standard_settings,
};

async fn act_one_hour(_: Lease) -> Result<(), TestError> {
    sleep(secs(3600)).await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn l9_heartbeats_keep_the_leases_of_long_work() {
    let lab = TestEnv::new(3);
    let (one, two) = (lab.new_store(), lab.new_store());
    let engine = lab.start(&one, lab.pipeline(&one).with_act(act_one_hour), standard_settings());
    sleep(millis(10)).await;
    let _second = lab.start(&two, lab.pipeline(&two), standard_settings());
    lab.wait_until(secs(4000), "done", |lab| lab.done_count() == 3).await;
    assert_eq!(lab.journal.count(PassEvent::Started), 3, "nobody else got hold of them");
    assert!((0..3).all(|number| lab.row(number).lock_epoch == 1));
    let extends = one.extends.load(SeqCst);
    assert!((600..=760).contains(&extends), "all three in one call every 5 s or so: {extends}");
    assert_eq!(engine.status()[0].totals.lost, 0);
}

#[tokio::test(start_paused = true)]
async fn l9_heartbeats_also_renew_the_leases_of_queued_rows() {
    let lab = TestEnv::new(2);
    let (one, two) = (lab.new_store(), lab.new_store());
    let settings = windlass_engine::Settings { workers: 1, ..standard_settings() };
    let toy = lab.pipeline(&one).with_act(|_| async {
        sleep(secs(100)).await;
        Ok(())
    });
    let _engine = lab.start(&one, toy, settings);
    sleep(millis(10)).await;
    let _second = lab.start(&two, lab.pipeline(&two), standard_settings());
    lab.wait_until(secs(300), "done", |lab| lab.done_count() == 2).await;
    assert!((0..2).all(|number| lab.row(number).lock_epoch == 1));
}

#[tokio::test(start_paused = true)]
async fn short_work_needs_no_heartbeat() {
    let lab = TestEnv::new(50);
    let store = lab.new_store();
    let toy = lab.pipeline(&store).with_act(|_| async {
        sleep(secs(1)).await;
        Ok(())
    });
    let _engine = lab.start(&store, toy, standard_settings());
    lab.wait_until(secs(60), "done", |lab| lab.done_count() == 50).await;
    assert_eq!(store.extends.load(SeqCst), 0);
}

/// Breaks the first replica's heartbeat with `break_it`; the second must find its work dropped.
async fn measure_drop_time(break_it: impl FnOnce(&FaultyStore)) -> (TestEnv, Duration) {
    let lab = TestEnv::new(1);
    let (one, two) = (lab.new_store(), lab.new_store());
    let engine = lab.start(&one, lab.pipeline(&one).with_act(|_| pending()), standard_settings());
    lab.wait_until(secs(1), "started", |lab| lab.journal.count(PassEvent::Started) == 1).await;
    sleep(secs(2)).await;
    let since = Instant::now();
    break_it(&one);
    let _second = lab.start(&two, lab.pipeline(&two), standard_settings());
    lab.wait_until(secs(120), "done", |lab| lab.done_count() == 1).await;
    let dropped_at = lab.journal.times(PassEvent::Dropped, id(0))[0];
    let taken_at = lab.journal.times(PassEvent::Started, id(0))[1];
    assert!(dropped_at < taken_at, "two holders at once for {:?}", dropped_at - taken_at);
    assert_eq!(engine.status()[0].totals.lost, 1);
    assert_eq!(engine.status()[0].in_work, 0);
    (lab, dropped_at - since)
}

#[tokio::test(start_paused = true)]
async fn l9_a_refused_heartbeat_drops_the_work_at_once() {
    let (_, took) = measure_drop_time(|store| store.refuses_extend.store(true, SeqCst)).await;
    assert!(took <= secs(5), "the first heartbeat after it says so: {took:?}");
}

#[tokio::test(start_paused = true)]
async fn l9_a_failing_heartbeat_drops_the_work_before_the_lock_expires() {
    let (_, took) = measure_drop_time(|store| store.fails.store(true, SeqCst)).await;
    assert!(took <= secs(25) && took >= secs(20), "it tries to the end, and no longer: {took:?}");
}

#[tokio::test(start_paused = true)]
async fn l9_a_hanging_heartbeat_drops_the_work_before_the_lock_expires() {
    let (_, took) = measure_drop_time(|store| store.hangs.store(true, SeqCst)).await;
    assert!(took <= secs(25) && took >= secs(20), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn l9_a_frozen_process_takes_no_step_once_its_lease_is_over() {
    let lab = TestEnv::new(1);
    let store = lab.new_store();
    let thaw = Arc::new(Notify::new());
    let steps = Arc::new(AtomicUsize::new(0));
    let (news, stepping) = (thaw.clone(), steps.clone());
    let toy = lab.pipeline(&store).with_act(move |_| {
        let (news, steps) = (news.clone(), stepping.clone());
        async move {
            news.notified().await;
            steps.fetch_add(1, SeqCst);
            Ok(())
        }
    });
    let engine = lab.start(&store, toy, standard_settings());
    lab.wait_until(secs(1), "started", |lab| lab.journal.count(PassEvent::Started) == 1).await;
    // The event that the work waited for and the end of its lease coincide.
    thaw.notify_one();
    advance(secs(29)).await;
    assert_eq!(steps.load(SeqCst), 0);
    assert_eq!((lab.journal.count(PassEvent::Dropped), lab.journal.count(PassEvent::Ended)), (1, 0));
    assert_eq!(engine.status()[0].totals.lost, 1);
}

#[tokio::test(start_paused = true)]
async fn a_heartbeat_refused_during_a_write_does_not_count_as_a_lost_lease() {
    let lab = TestEnv::new(1);
    let store = lab.new_store();
    // The heartbeat comes during the write, and may or may not find the row unlocked by it.
    let mut toy = lab.pipeline(&store);
    toy.apply_takes = secs(8);
    store.refuses_extend.store(true, SeqCst);
    let engine = lab.start(&store, toy, standard_settings());
    lab.wait_until(secs(30), "done", |lab| lab.done_count() == 1).await;
    sleep(secs(2)).await;
    let totals = engine.status()[0].totals;
    assert_eq!((totals.applied, totals.lost), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn l4_rows_of_a_dead_replica_are_taken_over_soon_after_their_leases_expire() {
    let lab = TestEnv::new(20);
    let (one, two) = (lab.new_store(), lab.new_store());
    let first = lab.start(&one, lab.pipeline(&one).with_act(act_one_hour), standard_settings());
    let _second = lab.start(&two, lab.pipeline(&two), standard_settings());
    lab.wait_until(secs(1), "all taken", |lab| lab.done_count() + lab.locked_count() == 20).await;
    sleep(secs(200)).await;
    let orphans = lab.locked_count();
    assert!(orphans > 0);
    drop(first);
    let took = lab.wait_until(secs(60), "done", |lab| lab.done_count() == 20).await;
    assert!(took <= secs(30 + 5) + millis(20), "{took:?}");
    assert!(took >= secs(24), "a lock is honoured as long as it lasts: {took:?}");
}

#[tokio::test(start_paused = true)]
async fn l5_a_skewed_database_clock_is_harmless() {
    for skew_s in [-86_400 * 365, -3600, 3600, 86_400 * 365] {
        let lab = TestEnv::new(4);
        lab.store.skew(skew_s * 1_000_000);
        let (one, two) = (lab.new_store(), lab.new_store());
        let _first = lab.start(&one, lab.pipeline(&one).with_act(act_one_hour), standard_settings());
        let _second = lab.start(&two, lab.pipeline(&two).with_act(act_one_hour), standard_settings());
        lab.wait_until(secs(3700), "done", |lab| lab.done_count() == 4).await;
        assert_eq!(lab.journal.count(PassEvent::Started), 4);
        assert_eq!(lab.journal.count(PassEvent::Dropped), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_row_taken_by_another_holder_is_reported_stale() {
    let lab = TestEnv::new(1);
    let test_store = lab.new_store();
    let store = lab.store.clone();
    let toy = lab.pipeline(&test_store).with_act(move |lease| {
        let mut row = store.row(TABLE, lease.id).unwrap();
        row.lock_token = Some(id(99));
        store.put(TABLE, row);
        async { Ok(()) }
    });
    let engine = lab.start(&test_store, toy, standard_settings());
    sleep(secs(1)).await;
    assert_eq!(engine.status()[0].totals.stale, 1);
    assert_eq!(engine.status()[0].oldest_age, None);
    assert_eq!(lab.row(0).status, "new");
}

/// A lease from the view of its holder.
struct HolderView {
    held: LeaseKey,
    epoch: i64,
    until: Instant,
}

const TTL: Duration = Duration::from_secs(30);
const LEASE_VALIDITY: Duration = Duration::from_secs(25);

/// Performs one step of one holder, with a delay before the store is reached, as on a slow connection.
async fn step(store: &MemoryStore, rng: &mut Rng, beliefs: &mut Vec<HolderView>) {
    let requested_at = Instant::now();
    let slowness = millis(rng.below(3) * rng.below(2_000));
    match rng.below(5) {
        0 => {
            advance(slowness).await;
            let claim = store.claim(&QUEUE, 1 + rng.below(3) as usize, TTL).await.unwrap();
            beliefs.extend(claim.leases.iter().map(|lease| HolderView {
                held: lease.key(),
                epoch: lease.epoch,
                until: requested_at + LEASE_VALIDITY,
            }));
        }
        1 => {
            beliefs.retain(|belief| requested_at < belief.until);
            let held: Vec<_> = beliefs.iter().map(|belief| belief.held).collect();
            advance(slowness).await;
            let kept = store.extend(&QUEUE, &held, TTL).await.unwrap();
            beliefs.retain(|belief| kept.contains(&belief.held.id));
            beliefs.iter_mut().for_each(|belief| belief.until = requested_at + LEASE_VALIDITY);
        }
        choice if !beliefs.is_empty() => {
            let belief = beliefs.swap_remove(rng.below(beliefs.len() as u64) as usize);
            advance(slowness).await;
            let is_valid = Instant::now() < belief.until;
            let wrote = match choice {
                2 => !store.finish(&QUEUE, &[(belief.held, None)]).await.unwrap().is_empty(),
                3 => store.reset(&QUEUE, belief.held).await.unwrap(),
                // The holder stops responding and loses its state.
                _ => return,
            };
            assert!(wrote || !is_valid, "a valid holder was refused");
        }
        _ => advance(secs(rng.below(20))).await,
    }
}

#[tokio::test(start_paused = true)]
async fn l9_no_interleaving_gives_a_row_two_valid_holders() {
    for seed in 0..300 {
        let mut rng = Rng::new(seed);
        let store = Arc::new(MemoryStore::new());
        (0..4).for_each(|number| store.put(TABLE, Row::new(id(number), "new", store.now())));
        let mut holders: [Vec<HolderView>; 3] = Default::default();
        for _ in 0..200 {
            let who = rng.below(3) as usize;
            step(&store, &mut rng, &mut holders[who]).await;
            let now = Instant::now();
            for number in 0..4 {
                let row = store.row(TABLE, id(number)).unwrap();
                let valid: Vec<_> = holders
                    .iter()
                    .flatten()
                    .filter(|belief| belief.held.id == row.id && now < belief.until)
                    .collect();
                assert!(valid.len() <= 1, "seed {seed}: two holders of row {number}");
                for belief in valid {
                    assert_eq!(row.lock_token, Some(belief.held.token), "seed {seed}");
                    assert_eq!(row.lock_epoch, belief.epoch, "seed {seed}");
                }
            }
        }
    }
}

/// Not used here, but the type must guarantee it: passes run on any thread.
#[test]
fn engines_can_be_stopped_from_any_thread() {
    fn is_send<T: Send>(_: impl FnOnce(windlass_engine::Engine<FaultyStore>) -> T) {}
    fn stop(engine: windlass_engine::Engine<FaultyStore>) -> impl Future<Output = ()> + Send {
        engine.stop(Duration::ZERO)
    }
    is_send(stop);
}
