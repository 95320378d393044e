//! Reads the input of the checkers from the database, the hosts and the cloud.

use std::collections::BTreeMap;

use anyhow::Result;
use uuid::Uuid;
use windlass_server::db::{Db, invariant_queries};

use super::{memory_logs::MemoryLogs, workload::Workload};
use crate::{
    host::log_bytes,
    invariants::{History, LogRow, pool, rows},
    network::SharedSimState,
};

/// Updates the history: appends new events, and replaces the rows with the current ones.
pub(super) async fn read_history(
    history: &mut History,
    db: &Db,
    state: &SharedSimState,
    workload: &Workload,
    logs: &MemoryLogs,
) -> Result<()> {
    rows::read_history(history, db).await?;
    history.watched.clear();
    for row in db.query(invariant_queries::slot_watch::VIOLATIONS, Vec::new()).await? {
        let found = row.text(0)?;
        let id = ["M5", "M6", "Q1", "P1", "P4"].into_iter().find(|id| *id == found).unwrap_or("unknown");
        history.watched.push((id, row.text(1)?));
    }
    if workload.has_pool() {
        let crashes = std::mem::take(&mut history.pool.crashes);
        history.pool = pool::PoolRecords { crashes, ..pool::read_records(db).await? };
    }
    for run in &mut history.runs {
        run.stopped_at = workload.stopped_at(run.id);
    }
    for fleet in &mut history.fleets {
        fleet.nodes_max_ever = workload.nodes_max_ever(fleet.id);
    }
    let mut written = BTreeMap::new();
    history.journal.clear();
    history.containers.clear();
    let mut state = state.lock();
    for host in state.hosts() {
        history.journal.extend(host.journal.iter().cloned());
        history.containers.extend(host.alive());
        written.extend(host.logs.iter().map(|(id, end)| (id.0, *end)));
    }
    history.machines = state.cloud.machines().map(|(id, machine)| (id, machine.to_owned())).collect();
    history.machine_journal = state.cloud.journal.clone();
    history.outrages = state.cloud.outrages.clone();
    let names =
        |machines: std::collections::BTreeSet<&str>| machines.into_iter().map(str::to_owned).collect();
    history.disks = state.cloud.disks().map(|(id, machines)| (id, names(machines))).collect();
    history.logs.clear();
    logs.all_logs(|submission, bytes| {
        let stored = bytes.len() as u64;
        let is_true = bytes == log_bytes(submission, 0..stored);
        let written = written.remove(&submission.0);
        history.logs.push(LogRow { submission: submission.0, is_true, stored, written });
    });
    // Nothing was stored of these logs.
    let missing =
        |(submission, end): (Uuid, u64)| LogRow { submission, is_true: true, stored: 0, written: Some(end) };
    history.logs.extend(written.into_iter().map(missing));
    Ok(())
}
