//! Checks of a queue history.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use tokio::time::Instant;
use windlass_api::queue_client::QueueHttpClient;
use windlass_model::{dispatch::ContainerNeeds, time::Timestamp};

use super::{EPOCH_US, LockRecord, QueueState, SharedQueueState};
use crate::invariants::containers;

/// One change of a container.
struct ContainerChange<'a> {
    uuid: &'a str,
    /// Microseconds since the start.
    at: i64,
    state: &'a str,
    priority: u64,
}

/// Checks that tokens of finished attempts are rejected.
pub(super) async fn check_tokens_revoked(state: &SharedQueueState, users: &QueueHttpClient) {
    let tokens = state.lock().tokens.clone();
    for (uuid, attempt, token) in tokens {
        let answer = users.with_token(&token).get(&format!("containers/{uuid}")).await;
        if !answer.is_err_and(|error| error.status() == Some(401)) {
            state.lock().record_violation(
                "X1",
                format!("the token of {uuid}.{attempt} is still valid after the attempt"),
            );
        }
    }
}

pub(super) fn check_history(
    state: &SharedQueueState,
    rows: &[Value],
    needs: &BTreeMap<String, ContainerNeeds>,
    began: Instant,
) {
    let mut state = state.lock();
    let records = final_records(rows);
    for what in containers::find_violations(rows, &records) {
        state.record_violation("C2", what);
    }
    check_single_start(&mut state, &records);
    let theirs: BTreeMap<&str, &ContainerNeeds> = rows
        .iter()
        .filter_map(|row| {
            let new = &row["properties"]["new_attributes"];
            Some((new["container_uuid"].as_str()?, needs.get(row["object_uuid"].as_str()?)?))
        })
        .collect();
    let order = QueueOrder { changes: parse_changes(rows), needs: theirs, began };
    let overtaken: Vec<String> = state
        .locks
        .iter()
        .filter_map(|lock| {
            let passed = order.overtaken(&state, lock)?;
            Some(format!("{} was taken by dispatcher {} before {passed}", lock.uuid, lock.dispatcher))
        })
        .collect();
    for what in overtaken {
        state.record_violation("C8", what);
    }
}

/// Last logged state of each container: the log must replay to the current states.
fn final_records(rows: &[Value]) -> BTreeMap<String, Value> {
    let mut records = BTreeMap::new();
    for row in rows {
        let new = &row["properties"]["new_attributes"];
        let uuid = row["object_uuid"].as_str().unwrap_or_default();
        if uuid.contains("-dz642-") && new["state"].is_string() {
            records.insert(uuid.to_owned(), new.clone());
        }
    }
    records
}

fn check_single_start(state: &mut QueueState, records: &BTreeMap<String, Value>) {
    let mut starts: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for one in &state.started {
        starts.entry(one.uuid.clone()).or_default().push(one.attempt);
    }
    for (uuid, attempts) in &starts {
        if attempts.len() > 1 {
            state.record_violation(
                "R7",
                format!("the program of {uuid} was started in several attempts: {attempts:?}"),
            );
        }
    }
    for (uuid, record) in records.iter().filter(|(_, record)| record["state"] == "Complete") {
        let started = starts.get(uuid).and_then(|attempts| attempts.first().copied());
        if started.is_none() || started != record["attempt"].as_u64() {
            state.record_violation(
                "C3",
                format!("{uuid} is complete, but its program was started in attempt {started:?}"),
            );
        }
    }
}

fn parse_changes(rows: &[Value]) -> Vec<ContainerChange<'_>> {
    let changes = rows.iter().filter_map(|row| {
        let new = &row["properties"]["new_attributes"];
        let at = Timestamp::parse(row["event_at"].as_str()?).ok()?;
        let uuid = row["object_uuid"].as_str().filter(|uuid| uuid.contains("-dz642-"))?;
        Some(ContainerChange {
            uuid,
            at: at.0 - EPOCH_US,
            state: new["state"].as_str()?,
            priority: new["priority"].as_u64()?,
        })
    });
    changes.collect()
}

/// Queue contents over time.
struct QueueOrder<'a> {
    changes: Vec<ContainerChange<'a>>,
    needs: BTreeMap<&'a str, &'a ContainerNeeds>,
    began: Instant,
}

impl QueueOrder<'_> {
    fn elapsed_micros(&self, at: Instant) -> i64 {
        i64::try_from((at - self.began).as_micros()).unwrap_or(i64::MAX)
    }

    /// Returns a container that waited during the whole round, had a higher priority, needed no more, and was skipped.
    fn overtaken(&self, sim_state: &QueueState, lock: &LockRecord) -> Option<String> {
        let rounds = &sim_state.rounds[lock.dispatcher];
        let round = rounds[..rounds.partition_point(|begun| *begun <= lock.at)].last()?;
        let (from, to) = (self.elapsed_micros(*round), self.elapsed_micros(lock.at));
        let taken = self.needs.get(lock.uuid.as_str())?;
        let mut before: BTreeMap<&str, (&str, u64)> = BTreeMap::new();
        let mut touched: BTreeSet<&str> = BTreeSet::new();
        for change in self.changes.iter().take_while(|change| change.at <= to) {
            if change.at < from {
                before.insert(change.uuid, (change.state, change.priority));
            } else {
                touched.insert(change.uuid);
            }
        }
        let (_, priority) = before.get(lock.uuid.as_str())?;
        let window = self.changes.iter().filter(|change| (from..=to).contains(&change.at));
        if window.into_iter().any(|change| change.uuid == lock.uuid && change.priority != *priority) {
            return None;
        }
        // A container that was returned by this dispatcher pauses for a while.
        let had = |uuid: &str| {
            let earlier = sim_state.locks.iter().filter(|one| one.dispatcher == lock.dispatcher);
            earlier.into_iter().any(|one| one.uuid == uuid && one.at < lock.at)
        };
        let missed = |uuid: &str| {
            sim_state
                .missed
                .iter()
                .any(|(at, one, when)| *at == lock.dispatcher && one == uuid && *when >= *round)
        };
        let passed = before.iter().find(|(uuid, (state, theirs))| {
            let is_smaller = self
                .needs
                .get(**uuid)
                .is_some_and(|one| one.cpus <= taken.cpus && one.memory <= taken.memory);
            *state == "Queued"
                && theirs > priority
                && is_smaller
                && !touched.contains(**uuid)
                && !lock.alive.iter().any(|one| one == **uuid)
                && !missed(uuid)
                && !had(uuid)
        });
        passed.map(|(uuid, _)| (*uuid).to_owned())
    }
}
