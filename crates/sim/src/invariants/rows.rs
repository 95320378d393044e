//! Reads the input of the checkers directly from a database, of a simulation or of a real server.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::Value;
use uuid::Uuid;
use windlass_server::{
    db::{Db, invariant_queries},
    params,
};

use super::{
    Event, FleetRow, History, InstanceRow, JobRow, RunRow, VolumeRow,
    managed::{self, RunAttempt, TaskRow},
};

/// Updates the history: appends new events, and replaces the rows with the current ones.
pub async fn read_history(history: &mut History, db: &Db) -> Result<()> {
    let seen = history.events.last().map_or(0, |event| event.seq);
    for row in db.query(invariant_queries::EVENTS, params![seen]).await? {
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
            reason: row.text(10)?,
        });
    }
    history.jobs.clear();
    history.runs.clear();
    for row in db.query(invariant_queries::JOBS, Vec::new()).await? {
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
    history.headless_classes.clear();
    history.left_in_class.clear();
    for row in db.query(invariant_queries::HEADLESS_CLASSES, Vec::new()).await? {
        history.headless_classes.push(row.text(0)?);
    }
    for row in db.query(invariant_queries::LEFT_IN_CLASS, Vec::new()).await? {
        history.left_in_class.push(row.uuid(0)?);
    }
    for row in db.query(invariant_queries::RUNS, Vec::new()).await? {
        let id: Uuid = row.uuid(0)?;
        let attempt = match row.opt_uuid(2)? {
            Some(job) => Some(RunAttempt::read(job, &row.text(3)?, row.int(4)?)?),
            None => None,
        };
        history.runs.push(RunRow { id, status: row.text(1)?, stopped_at: None, attempt });
    }
    read_managed(history, db).await?;
    read_resources(history, db).await
}

async fn read_managed(history: &mut History, db: &Db) -> Result<()> {
    let mut tasks: BTreeMap<Uuid, Vec<TaskRow>> = BTreeMap::new();
    for row in db.query(invariant_queries::MANAGED_TASKS, Vec::new()).await? {
        tasks.entry(row.uuid(1)?).or_default().push(TaskRow {
            id: row.uuid(0)?,
            status: row.text(2)?,
            schedule: row.text(3)?,
            record: serde_json::from_str(&row.text(4)?)?,
        });
    }
    history.managed.clear();
    for row in db.query(invariant_queries::MANAGED_JOBS, Vec::new()).await? {
        let id: Uuid = row.uuid(0)?;
        history.managed.push(managed::ManagedJobRow {
            id,
            number: row.int(1)?,
            plan: serde_json::from_str(&row.text(2)?)?,
            status: row.text(3)?,
            schedule: row.text(4)?,
            claimed: row.bool(5)?,
            finished: row.bool(6)?,
            cancel_asked_at: row.opt_int(7)?,
            tasks: tasks.remove(&id).unwrap_or_default(),
        });
    }
    Ok(())
}

/// Reads instances, fleets and volumes.
async fn read_resources(history: &mut History, db: &Db) -> Result<()> {
    history.instances.clear();
    history.fleets.clear();
    history.volumes.clear();
    history.attachments.clear();
    history.holders.clear();
    for row in db.query(invariant_queries::INSTANCES, Vec::new()).await? {
        history.instances.push(InstanceRow {
            id: row.uuid(0)?,
            busy_blocks: row.int(1)?,
            total_blocks: row.int(2)?,
            status: row.text(3)?,
            finished: row.bool(4)?,
            fleet_id: row.opt_uuid(5)?,
            reason: row.opt_text(6)?,
        });
    }
    for row in db.query(invariant_queries::FLEETS, Vec::new()).await? {
        let (id, spec): (Uuid, Value) = (row.uuid(0)?, row.json(3)?);
        let nodes = &spec["configuration"]["nodes"];
        history.fleets.push(FleetRow {
            id,
            status: row.text(1)?,
            finished: row.bool(2)?,
            nodes_min: nodes["min"].as_i64(),
            nodes_max: nodes["max"].as_i64(),
            nodes_max_ever: nodes["max"].as_i64(),
        });
    }
    for row in db.query(invariant_queries::VOLUMES, Vec::new()).await? {
        let delete_requested = row.opt_int(2)?.is_some();
        history.volumes.push(VolumeRow { id: row.uuid(0)?, deleted: row.bool(1)?, delete_requested });
    }
    for row in db.query(invariant_queries::ATTACHMENTS, Vec::new()).await? {
        history.attachments.push((row.uuid(0)?, row.uuid(1)?));
    }
    for row in db.query(invariant_queries::HELD_BY_FINISHED, Vec::new()).await? {
        history.holders.push(row.uuid(0)?);
    }
    Ok(())
}
