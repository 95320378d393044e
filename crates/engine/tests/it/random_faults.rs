//! Three replicas under random faults: killed, disconnected, refused and woken. Each seed is reproducible.

use std::{collections::BTreeMap, sync::Arc, sync::atomic::Ordering::SeqCst};

use tokio::time::sleep;
use uuid::Uuid;
use windlass_engine::{ApplyOutcome, Engine, Hints, Settings};
use windlass_testkit::rng::Rng;

use crate::support::{
    FaultyStore, JournalEntry, PassEvent, QUEUE, TestEnv, TestError, id, mark_done, millis, secs,
};

const ROWS: u64 = 12;
/// Number of passes of a row until it is done.
const PASSES: i64 = 6;

struct Replica {
    store: Arc<FaultyStore>,
    hints: Hints,
    engine: Engine<FaultyStore>,
}

fn start(lab: &TestEnv, seed: u64) -> Replica {
    let (test_store, hints) = (lab.new_store(), Hints::new());
    let toy = lab
        .pipeline(&test_store)
        .with_act(move |lease| async move {
            let mut rng = Rng::new(seed ^ lease.token.as_u64_pair().1 << 20 ^ lease.id.as_u64_pair().0);
            sleep(millis(rng.below(4) * rng.below(20_000))).await;
            if rng.below(10) == 0 { Err(TestError("bad luck")) } else { Ok(()) }
        })
        .with_apply(|store, lease| match lease.epoch {
            ..PASSES => ApplyOutcome::Unchanged { due_in: Some(secs(2)) },
            _ => mark_done(store, lease),
        });
    let mut engine = Engine::new(test_store.clone(), hints.clone());
    let settings =
        Settings { workers: 3, queue_len_max: 4, queue_len_min: 2, claim_max: 3, ..Settings::standard(seed) };
    engine.spawn(toy, settings);
    Replica { store: test_store, hints, engine }
}

/// Injects or clears one random fault.
async fn inject_random_fault(lab: &TestEnv, rng: &mut Rng, replicas: &mut [Replica]) {
    let number = rng.below(3) as usize;
    let is_bad = rng.below(2) == 0;
    let seed = rng.below(1 << 30);
    let Some(replica) = replicas.get_mut(number) else { return };
    match rng.below(7) {
        0 => *replica = start(lab, seed), // The old one is dropped: killed.
        1 => {
            let old = std::mem::replace(replica, start(lab, seed));
            old.engine.stop(secs(rng.below(5))).await;
        }
        2 => replica.store.fails.store(is_bad, SeqCst),
        3 => replica.store.hangs.store(is_bad, SeqCst),
        4 => replica.store.refuses_extend.store(is_bad, SeqCst),
        5 => replica.store.panics_at_claim.store(is_bad, SeqCst),
        _ => replica.hints.hint(QUEUE.pipeline),
    }
}

/// Checks that no pass starts on a row while another is in progress, and that every claim has a higher epoch.
fn check_journal(entries: &[JournalEntry], seed: u64) {
    let mut open: BTreeMap<Uuid, i64> = BTreeMap::new();
    let mut epochs: BTreeMap<Uuid, i64> = BTreeMap::new();
    for entry in entries {
        if entry.event == PassEvent::Started {
            assert_eq!(open.insert(entry.id, entry.epoch), None, "seed {seed}: two at work: {entry:?}");
            let last = epochs.insert(entry.id, entry.epoch);
            assert!(last.is_none_or(|last| last < entry.epoch), "seed {seed}: an epoch came back: {entry:?}");
        } else {
            assert_eq!(open.remove(&entry.id), Some(entry.epoch), "seed {seed}: {entry:?}");
        }
    }
}

async fn run_seed(seed: u64) -> usize {
    let mut rng = Rng::new(seed);
    let lab = TestEnv::new(ROWS);
    let mut replicas: Vec<_> = (0..3).map(|number| start(&lab, seed * 3 + number)).collect();
    for _ in 0..60 {
        inject_random_fault(&lab, &mut rng, &mut replicas).await;
        sleep(millis(rng.below(8_000))).await;
    }
    for replica in &replicas {
        for fault in [&replica.store.fails, &replica.store.hangs, &replica.store.refuses_extend] {
            fault.store(false, SeqCst);
        }
    }
    lab.wait_until(secs(600), "all done after the storm", |lab| lab.done_count() == ROWS as usize).await;
    for replica in replicas {
        replica.engine.stop(secs(1)).await;
    }
    assert_eq!(lab.locked_count(), 0, "seed {seed}");
    assert!((0..ROWS).all(|number| lab.store.row(QUEUE.table, id(number)).is_some()));
    check_journal(&lab.journal.entries(), seed);
    lab.journal.count(PassEvent::Dropped)
}

#[tokio::test(start_paused = true)]
async fn l9_random_faults_never_cause_concurrent_passes_on_a_row_and_all_rows_finish() {
    let mut dropped = 0;
    for seed in 0..16 {
        dropped += run_seed(seed).await;
    }
    assert!(dropped > 100, "the weather was bad: {dropped} passes were cut short");
}
