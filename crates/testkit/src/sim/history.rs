//! Reads what the checkers need, straight from the database and the hosts.

use anyhow::Result;
use uuid::Uuid;
use windlass_server::{
    db::{Db, checks},
    params,
};

use super::cast::Cast;
use crate::{
    invariants::{Event, History, InstanceRow, JobRow, RunRow},
    net::SharedWorld,
};

/// Brings the history up to date: what is new in the append-only part, and the rows as they are now.
pub(super) async fn read(history: &mut History, db: &Db, world: &SharedWorld, cast: &Cast) -> Result<()> {
    let seen = history.events.last().map_or(0, |event| event.seq);
    for row in db.query(checks::EVENTS, params![seen]).await? {
        history.events.push(Event {
            seq: row.int(0)?,
            entity: row.text(1)?,
            entity_id: row.uuid(2)?,
            kind: row.text(3)?,
            from: row.opt_text(4)?,
            to: row.opt_text(5)?,
            is_final: row.bool(6)?,
            actor: row.text(7)?,
            epoch: row.opt_int(8)?,
            at: row.int(9)?,
        });
    }
    history.jobs.clear();
    history.runs.clear();
    history.instances.clear();
    history.journal.clear();
    history.containers.clear();
    for row in db.query(checks::JOBS, Vec::new()).await? {
        history.jobs.push(JobRow {
            id: row.uuid(0)?,
            run_id: row.uuid(1)?,
            replica_num: row.int(2)?,
            job_num: row.int(3)?,
            submission_num: row.int(4)?,
            status: row.text(5)?,
            finished: row.bool(6)?,
            instance_id: row.opt_uuid(7)?,
            blocks: row.int(8)?,
            submitted_at: row.int(9)?,
            host_lost: row.bool(10)?,
        });
    }
    for row in db.query(checks::RUNS, Vec::new()).await? {
        let id: Uuid = row.uuid(0)?;
        history.runs.push(RunRow { id, status: row.text(1)?, stopped_at: cast.stopped_at(id) });
    }
    for row in db.query(checks::INSTANCES, Vec::new()).await? {
        history.instances.push(InstanceRow {
            id: row.uuid(0)?,
            busy_blocks: row.int(1)?,
            total_blocks: row.int(2)?,
        });
    }
    let mut world = world.lock();
    for host in world.hosts() {
        history.journal.extend(host.journal.iter().cloned());
        history.containers.extend(host.alive());
    }
    Ok(())
}
