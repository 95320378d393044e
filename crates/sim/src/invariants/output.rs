//! Invariants of logs: the stored log equals the written one.

use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;

use super::{History, Violation, status_events, violation};

/// Time limit for the end of a log; after that it is lost if the host does not respond.
const DRAIN_TIMEOUT_US: i64 = 30_000_000;

/// Every stored byte was written at its offset, and all bytes are stored when the job is final, unless the drain
/// timeout passed, its host was abandoned, its user aborted it, or it never ran.
pub(super) fn o1_a_stored_log_is_what_was_written(h: &History) -> Vec<Violation> {
    let mut turned: BTreeMap<Uuid, i64> = BTreeMap::new();
    let mut ran: BTreeSet<Uuid> = BTreeSet::new();
    let mut drained: BTreeMap<Uuid, bool> = BTreeMap::new();
    for e in status_events(&h.events).filter(|e| e.entity == "job") {
        if e.to.as_deref() == Some("running") {
            ran.insert(e.entity_id);
        } else if e.to.as_deref() == Some("terminating") {
            turned.insert(e.entity_id, e.at);
        } else if e.is_final {
            let in_time = turned.get(&e.entity_id).is_some_and(|at| e.at - at < DRAIN_TIMEOUT_US);
            let in_time = in_time && ran.contains(&e.entity_id);
            drained.insert(e.entity_id, in_time && e.to.as_deref() != Some("aborted"));
        }
    }
    let lost = |id: Uuid| h.jobs.iter().any(|job| job.id == id && job.host_lost);
    let mut found = Vec::new();
    for log in &h.logs {
        if !log.is_true {
            found.push(violation(
                "O1",
                format!("the log of {} has bytes that were never written", log.submission),
            ));
        }
        let Some(written) = log.written else { continue };
        if log.stored > written {
            found.push(violation(
                "O1",
                format!("the log of {} is longer than what was written", log.submission),
            ));
        }
        let due = drained.get(&log.submission).copied().unwrap_or_default() && !lost(log.submission);
        if due && log.stored < written {
            found.push(violation(
                "O1",
                format!("only {} of {written} bytes of the log of {} are stored", log.stored, log.submission),
            ));
        }
    }
    found
}
