//! Three replicas in bad weather: killed, cut off, refused and woken at random. Each seed replays.

use std::{collections::BTreeMap, sync::Arc, sync::atomic::Ordering::SeqCst};

use tokio::time::sleep;
use uuid::Uuid;
use windlass_engine::{Applied, Engine, Hints, Settings};
use windlass_testkit::rng::Rng;

use crate::toy::{Entry, Fickle, Lab, Oops, QUEUE, What, done, id, millis, secs};

const ROWS: u64 = 12;
/// How often a row wants to be seen before it is done.
const VISITS: i64 = 6;

struct Replica {
    way: Arc<Fickle>,
    hints: Hints,
    engine: Engine<Fickle>,
}

fn start(lab: &Lab, seed: u64) -> Replica {
    let (way, hints) = (lab.way(), Hints::new());
    let toy = lab
        .toy(&way)
        .acting(move |lease| async move {
            let mut rng = Rng::new(seed ^ lease.token.as_u64_pair().1 << 20 ^ lease.id.as_u64_pair().0);
            sleep(millis(rng.below(4) * rng.below(20_000))).await;
            if rng.below(10) == 0 { Err(Oops("bad luck")) } else { Ok(()) }
        })
        .applying(|store, lease| match lease.epoch {
            ..VISITS => Applied::Unchanged { due_in: Some(secs(2)) },
            _ => done(store, lease),
        });
    let mut engine = Engine::new(way.clone(), hints.clone());
    let settings =
        Settings { workers: 3, queue_len_max: 4, queue_len_min: 2, claim_max: 3, ..Settings::standard(seed) };
    engine.spawn(toy, settings);
    Replica { way, hints, engine }
}

/// One stroke of bad luck, or good.
async fn strike(lab: &Lab, rng: &mut Rng, replicas: &mut [Replica]) {
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
        2 => replica.way.fails.store(is_bad, SeqCst),
        3 => replica.way.hangs.store(is_bad, SeqCst),
        4 => replica.way.refuses_extend.store(is_bad, SeqCst),
        5 => replica.way.panics_at_claim.store(is_bad, SeqCst),
        _ => replica.hints.hint(QUEUE.pipeline),
    }
}

/// Nobody starts on a row that another still works on, and every take has a higher epoch.
fn check(entries: &[Entry], seed: u64) {
    let mut open: BTreeMap<Uuid, i64> = BTreeMap::new();
    let mut epochs: BTreeMap<Uuid, i64> = BTreeMap::new();
    for entry in entries {
        if entry.what == What::Started {
            assert_eq!(open.insert(entry.id, entry.epoch), None, "seed {seed}: two at work: {entry:?}");
            let last = epochs.insert(entry.id, entry.epoch);
            assert!(last.is_none_or(|last| last < entry.epoch), "seed {seed}: an epoch came back: {entry:?}");
        } else {
            assert_eq!(open.remove(&entry.id), Some(entry.epoch), "seed {seed}: {entry:?}");
        }
    }
}

async fn weather(seed: u64) -> usize {
    let mut rng = Rng::new(seed);
    let lab = Lab::new(ROWS);
    let mut replicas: Vec<_> = (0..3).map(|number| start(&lab, seed * 3 + number)).collect();
    for _ in 0..60 {
        strike(&lab, &mut rng, &mut replicas).await;
        sleep(millis(rng.below(8_000))).await;
    }
    for replica in &replicas {
        for fault in [&replica.way.fails, &replica.way.hangs, &replica.way.refuses_extend] {
            fault.store(false, SeqCst);
        }
    }
    lab.until(secs(600), "all done after the storm", |lab| lab.done() == ROWS as usize).await;
    for replica in replicas {
        replica.engine.stop(secs(1)).await;
    }
    assert_eq!(lab.held(), 0, "seed {seed}");
    assert!((0..ROWS).all(|number| lab.store.row(QUEUE.table, id(number)).is_some()));
    check(&lab.journal.entries(), seed);
    lab.journal.count(What::Dropped)
}

#[tokio::test(start_paused = true)]
async fn l9_in_any_weather_no_row_is_worked_on_twice_at_once_and_all_get_done() {
    let mut dropped = 0;
    for seed in 0..16 {
        dropped += weather(seed).await;
    }
    assert!(dropped > 100, "the weather was bad: {dropped} passes were cut short");
}
