//! Reads and writes of the instance pipeline.

use uuid::Uuid;
use windlass_engine::{Lease, LeaseKey};
use windlass_model::{
    event::Event,
    id::{FleetId, SubmissionId},
};

use super::event_rows;
use crate::{Db, DbError, Unit, Val, Values, WriteOutcome, instances::Instance, params, record::statements};

statements! {
    LOAD = "SELECT {} FROM instances i WHERE i.id = $1 AND i.lock_token = $2", Instance::columns("i");
    KNOWN = "SELECT j.id, j.lock_epoch, j.finished FROM jobs j WHERE j.id IN \
             (SELECT value FROM json_each(CAST($1 AS TEXT))) AND j.instance_id = $2";
    FLEET = "SELECT f.spec, (SELECT count(*) FROM instances i WHERE i.fleet_id = f.id AND NOT i.finished \
             AND i.status <> 'terminating' AND i.termination_asked_at IS NULL) FROM fleets f WHERE f.id = $1";
    /// The end of an instance and the placement of a job exclude each other: both update the row, which counts the
    /// blocks.
    STILL_IDLE = "UPDATE instances SET idle_since = idle_since WHERE id = $1 AND busy_blocks = 0";
    /// Two idle instances must not both end: the row is held until the end of the unit, so that the next count is
    /// correct.
    HOLD_FLEET = "UPDATE fleets SET due_at = NULL WHERE id = $1";
    ABOVE_MIN = "UPDATE fleets SET due_at = NULL WHERE id = $1 AND (SELECT count(*) FROM instances i \
                 WHERE i.fleet_id = $1 AND NOT i.finished AND i.status <> 'terminating' \
                 AND i.termination_asked_at IS NULL) >= $2";
    MARK_JOBS_DUE = "UPDATE jobs SET due_at = NULL WHERE instance_id = $1 AND NOT finished";
    MARK_FLEET_DUE = "UPDATE fleets SET due_at = NULL WHERE id = $1 AND NOT finished";
}

/// Number of waiting jobs that an instance makes due when it becomes usable.
const WAITING_MAX: i64 = 32;

pub async fn load(db: &Db, lease: &Lease) -> Result<Option<Instance>, DbError> {
    db.query_opt(LOAD.as_str(), params![lease.id, lease.token]).await?.map(Instance::read).transpose()
}

/// A task on the host, with the highest epoch with which its submission can have been seen.
#[derive(Clone, Copy, Debug)]
pub struct OrphanTask {
    pub submission: SubmissionId,
    pub epoch: i64,
}

/// Tasks of a host that belong to no active job there. Query the host first and the database afterwards: a task is
/// submitted only after its job's row records it, so one that is missing here is orphaned.
pub async fn orphan_tasks(
    db: &Db,
    instance: Uuid,
    tasks: &[SubmissionId],
) -> Result<Vec<OrphanTask>, DbError> {
    if tasks.is_empty() {
        return Ok(Vec::new());
    }
    let rows = db.query(KNOWN.as_str(), vec![Val::list(tasks), instance.into()]).await?;
    let mut known = Vec::with_capacity(rows.len());
    for row in &rows {
        known.push((SubmissionId(row.uuid(0)?), row.int(1)?, row.bool(2)?));
    }
    let orphan = |task: &SubmissionId| match known.iter().find(|(id, _, _)| id == task) {
        Some((_, _, false)) => None,
        Some((_, epoch, true)) => Some(OrphanTask { submission: *task, epoch: *epoch }),
        None => Some(OrphanTask { submission: *task, epoch: i64::MAX }),
    };
    Ok(tasks.iter().filter_map(orphan).collect())
}

/// Data of the fleet that its instances need.
pub struct FleetSummary {
    pub spec: String,
    /// Number of instances that stay.
    pub members: i64,
}

pub async fn fleet_summary(db: &Db, fleet: FleetId) -> Result<Option<FleetSummary>, DbError> {
    let row = db.query_opt(FLEET.as_str(), params![fleet]).await?;
    row.map(|row| Ok(FleetSummary { spec: row.text(0)?, members: row.int(1)? })).transpose()
}

/// Records which offer is requested, before the request; the row stays locked.
pub async fn set_offer_attempts(
    db: &Db,
    held: LeaseKey,
    tries: &impl serde::Serialize,
    backend: &str,
) -> Result<WriteOutcome, DbError> {
    let set = vec![("offer", Val::json(tries)?), ("backend", backend.into())];
    db.write(Unit::guarded("instances", held, set)).await
}

/// Records the progress of its creation; the row stays locked.
pub async fn set_progress(db: &Db, held: LeaseKey, message: Option<&str>) -> Result<WriteOutcome, DbError> {
    db.write(Unit::guarded("instances", held, vec![("status_message", message.into())])).await
}

/// Result of one pass over an instance, and the rows that it affects.
#[derive(Default)]
pub struct InstanceUpdate {
    pub set: Values,
    pub event: Option<Event>,
    /// Event: its container engine stopped or resumed responding.
    pub engine: Option<Event>,
    /// It ends, unless a job was placed at the same time.
    pub only_while_idle: bool,
    /// It ends, unless its fleet would then have fewer instances than this.
    pub leaves_at_least: Option<i64>,
    pub is_over: bool,
    pub marks_jobs_due: bool,
    pub marks_waiting_due: bool,
    pub marks_fleet_due: bool,
}

impl InstanceUpdate {
    /// Pipelines that have work after this pass.
    pub fn wakes(&self) -> Vec<&'static str> {
        let mut wake = Vec::new();
        if self.marks_jobs_due {
            wake.extend(["jobs_running", "jobs_terminating"]);
        }
        if self.marks_jobs_due || self.marks_waiting_due {
            wake.push("jobs_submitted");
        }
        if self.marks_fleet_due {
            wake.push("fleets");
        }
        wake
    }
}

pub async fn apply(
    db: &Db,
    held: LeaseKey,
    instance: &Instance,
    moved: InstanceUpdate,
    due_in_us: Option<i64>,
) -> Result<WriteOutcome, DbError> {
    let mut unit = Unit::apply("instances", held, due_in_us, moved.set);
    if moved.only_while_idle {
        unit = unit.expect_one(STILL_IDLE.as_str(), params![instance.id]);
    }
    if let (Some(fleet), Some(least)) = (instance.fleet_id, moved.leaves_at_least) {
        unit = unit.exec(HOLD_FLEET.as_str(), params![fleet]);
        unit = unit.expect_one(ABOVE_MIN.as_str(), params![fleet, least]);
    }
    if moved.marks_jobs_due {
        unit = unit.exec(MARK_JOBS_DUE.as_str(), params![instance.id]);
    }
    if moved.marks_waiting_due {
        unit = unit.and([super::jobs::mark_waiting_due(instance.id, WAITING_MAX)]);
    }
    if let Some(fleet) = instance.fleet_id.filter(|_| moved.marks_fleet_due) {
        unit = unit.exec(MARK_FLEET_DUE.as_str(), params![fleet]);
    }
    for event in moved.event.iter().chain(&moved.engine) {
        unit = unit.and(event_rows(db, held, instance.project_id, event, &instance.name)?);
    }
    db.write(unit).await
}
