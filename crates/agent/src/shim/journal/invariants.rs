//! Checkers: invariants of every journal, whatever happened to its host.
//!
//! Each returns the violations that it found; an empty list means none. They read journals, never logs.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use windlass_model::id::SubmissionId;

use super::{JournalEvent, Record};

/// Runs all checks.
pub fn violations(records: &[Record]) -> Vec<String> {
    [started_once(records), epochs_grow(records), gpus_have_one_owner(records), ends_once(records)].concat()
}

/// R7: at most one container is ever started per submission.
fn started_once(records: &[Record]) -> Vec<String> {
    let mut started = HashSet::new();
    let starts = records.iter().filter(|record| matches!(record.kind, JournalEvent::ContainerStarted { .. }));
    starts
        .filter(|record| !started.insert(record.submission))
        .map(|record| format!("R7: {} was started again in record {}", record.submission, record.seq))
        .collect()
}

/// L2: no effect of an older epoch follows one of a newer epoch.
fn epochs_grow(records: &[Record]) -> Vec<String> {
    let mut seen: HashMap<SubmissionId, i64> = HashMap::new();
    let mut wrong = Vec::new();
    for record in records {
        if matches!(
            record.kind,
            JournalEvent::RefusedEpoch { .. } | JournalEvent::RefusedSpec { .. } | JournalEvent::Withdrawn
        ) {
            continue;
        }
        let highest = seen.entry(record.submission).or_insert(record.epoch);
        if record.epoch < *highest {
            wrong.push(format!(
                "L2: {} did {:?} with epoch {} after {highest}",
                record.submission, record.kind, record.epoch
            ));
        }
        *highest = record.epoch.max(*highest);
    }
    wrong
}

/// G1: a device is acquired again only after its owner released it.
fn gpus_have_one_owner(records: &[Record]) -> Vec<String> {
    let mut owners: BTreeMap<&str, SubmissionId> = BTreeMap::new();
    let mut wrong = Vec::new();
    for record in records {
        let id = record.submission;
        if let JournalEvent::GpuAcquired { gpus } = &record.kind {
            for gpu in gpus {
                if let Some(owner) = owners.insert(gpu, id).filter(|owner| *owner != id) {
                    wrong.push(format!("G1: {id} acquired {gpu}, held by {owner}, in record {}", record.seq));
                }
            }
        }
        if let JournalEvent::GpuReleased { gpus } = &record.kind {
            for gpu in gpus {
                if owners.remove(gpu.as_str()) != Some(id) {
                    wrong.push(format!("G1: {id} released {gpu}, not held by it, in record {}", record.seq));
                }
            }
        }
    }
    wrong
}

type KindPredicate = fn(&JournalEvent) -> bool;

/// Resources that a task can hold, with the records that acquire and release them.
const HELD_RESOURCES: [(&str, KindPredicate, KindPredicate); 3] = [
    (
        "gpus",
        |kind| matches!(kind, JournalEvent::GpuAcquired { .. }),
        |kind| matches!(kind, JournalEvent::GpuReleased { .. }),
    ),
    ("keys", |kind| *kind == JournalEvent::KeyAdded, |kind| *kind == JournalEvent::KeyRemoved),
    ("mounts", |kind| *kind == JournalEvent::Mounted, |kind| *kind == JournalEvent::Unmounted),
];

/// R3, G6: a task ends once, and holds nothing afterwards.
fn ends_once(records: &[Record]) -> Vec<String> {
    let mut held: HashMap<SubmissionId, BTreeSet<&str>> = HashMap::new();
    let mut ended = HashSet::new();
    let mut wrong = Vec::new();
    for record in records {
        let id = record.submission;
        let holds = held.entry(id).or_default();
        for (what, begins, ends) in HELD_RESOURCES {
            if begins(&record.kind) {
                holds.insert(what);
            } else if ends(&record.kind) {
                holds.remove(what);
            }
        }
        if matches!(record.kind, JournalEvent::Terminated { .. }) {
            if !ended.insert(id) {
                wrong.push(format!("R3: {id} ended again in record {}", record.seq));
            }
            wrong.extend(holds.iter().map(|what| format!("G6: {id} ended but still holds its {what}")));
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::{super::super::tasks::TaskEnd, *};

    #[track_caller]
    fn check(history: &[(u128, i64, JournalEvent)], expected: &[&str]) {
        let records: Vec<_> = (1..)
            .zip(history)
            .map(|(seq, (id, epoch, kind))| Record {
                seq,
                at: 0,
                submission: SubmissionId(uuid::Uuid::from_u128(*id)),
                epoch: *epoch,
                kind: kind.clone(),
            })
            .collect();
        let found = violations(&records);
        let ids: Vec<_> = found.iter().map(|message| &message[..2]).collect();
        assert_eq!(ids, expected, "{found:?}");
    }

    fn gpus() -> Vec<String> {
        vec!["GPU-1".to_owned()]
    }

    fn terminated() -> JournalEvent {
        let end = TaskEnd { reason: "x".to_owned(), message: String::new(), exit_status: None, detail: None };
        JournalEvent::Terminated { end }
    }

    #[test]
    fn r7_l2_g1_the_journal_checkers_find_each_violation() {
        let started = JournalEvent::ContainerStarted { ports: Vec::new() };
        check(&[(1, 1, started.clone()), (2, 1, started.clone())], &[]);
        check(&[(1, 1, started.clone()), (1, 2, started)], &["R7"]);
        check(&[(1, 2, JournalEvent::Submitted), (1, 1, JournalEvent::RefusedEpoch { seen: 2 })], &[]);
        check(&[(1, 2, JournalEvent::Submitted), (1, 1, JournalEvent::Admitted)], &["L2"]);
        let (take, give) =
            (JournalEvent::GpuAcquired { gpus: gpus() }, JournalEvent::GpuReleased { gpus: gpus() });
        check(&[(1, 1, take.clone()), (1, 1, give.clone()), (2, 1, take.clone())], &[]);
        check(&[(1, 1, take.clone()), (2, 1, take.clone())], &["G1"]);
        check(&[(1, 1, take.clone()), (2, 1, give)], &["G1"]);
        check(&[(1, 1, take), (1, 1, terminated())], &["G6"]);
        check(&[(1, 1, terminated()), (1, 1, terminated())], &["R3"]);
    }
}
