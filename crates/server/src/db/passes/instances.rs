//! What the instance pipeline reads and writes.

use uuid::Uuid;
use windlass_engine::{Lease, LeaseKey};
use windlass_model::{
    event::Event,
    id::{FleetId, SubmissionId},
};

use super::event_rows;
use crate::{
    db::{Db, DbError, Unit, Val, Values, WriteOutcome, instances::Instance, record::statements},
    params,
};

statements! {
    LOAD = "SELECT {} FROM instances i WHERE i.id = $1 AND i.lock_token = $2", Instance::columns("i");
    KNOWN = "SELECT j.id, j.lock_epoch, j.finished FROM jobs j WHERE j.id IN \
             (SELECT value FROM json_each(CAST($1 AS TEXT))) AND j.instance_id = $2";
    FLEET = "SELECT f.spec, (SELECT count(*) FROM instances i WHERE i.fleet_id = f.id AND NOT i.finished \
             AND i.status <> 'terminating' AND i.termination_asked_at IS NULL) FROM fleets f WHERE f.id = $1";
    /// Its end and the coming of a job exclude each other: both touch the row, and blocks are on it.
    STILL_IDLE = "UPDATE instances SET idle_since = idle_since WHERE id = $1 AND busy_blocks = 0";
    /// Two that are idle at once may not both go: held until the end of the unit, what is counted next is true.
    HOLD_FLEET = "UPDATE fleets SET due_at = NULL WHERE id = $1";
    ABOVE_MIN = "UPDATE fleets SET due_at = NULL WHERE id = $1 AND (SELECT count(*) FROM instances i \
                 WHERE i.fleet_id = $1 AND NOT i.finished AND i.status <> 'terminating' \
                 AND i.termination_asked_at IS NULL) >= $2";
    POKE_JOBS = "UPDATE jobs SET due_at = NULL WHERE instance_id = $1 AND NOT finished";
    POKE_FLEET = "UPDATE fleets SET due_at = NULL WHERE id = $1 AND NOT finished";
    /// Room was made: the first in line look again at once, the rest when their time comes.
    POKE_WAITING = "UPDATE jobs SET due_at = NULL WHERE id IN (SELECT j.id FROM jobs j \
                    WHERE j.project_id = $1 AND NOT j.finished AND j.status = 'submitted' \
                    ORDER BY j.priority DESC, j.submitted_at LIMIT 32)";
}

pub async fn load(db: &Db, lease: &Lease) -> Result<Option<Instance>, DbError> {
    db.query_opt(LOAD.as_str(), params![lease.id, lease.token]).await?.map(Instance::read).transpose()
}

/// A task on the host, and the highest epoch its submission can have been seen with.
#[derive(Clone, Copy, Debug)]
pub struct OrphanTask {
    pub submission: SubmissionId,
    pub epoch: i64,
}

/// Those of a host's tasks that belong to no living job there. Ask the host first and the database after:
/// a task is handed over only when its job's row says so, so one that is missing here is dead.
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
    let stray = |task: &SubmissionId| match known.iter().find(|(id, _, _)| id == task) {
        Some((_, _, false)) => None,
        Some((_, epoch, true)) => Some(OrphanTask { submission: *task, epoch: *epoch }),
        None => Some(OrphanTask { submission: *task, epoch: i64::MAX }),
    };
    Ok(tasks.iter().filter_map(stray).collect())
}

/// What an instance needs to know of its fleet.
pub struct FleetSummary {
    pub spec: String,
    /// Those that stay.
    pub members: i64,
}

pub async fn fleet_summary(db: &Db, fleet: FleetId) -> Result<Option<FleetSummary>, DbError> {
    let row = db.query_opt(FLEET.as_str(), params![fleet]).await?;
    row.map(|row| Ok(FleetSummary { spec: row.text(0)?, members: row.int(1)? })).transpose()
}

/// Writes which offer is asked for, before it is; the row stays locked.
pub async fn tries(
    db: &Db,
    held: LeaseKey,
    tries: &impl serde::Serialize,
    backend: &str,
) -> Result<WriteOutcome, DbError> {
    let set = vec![("offer", Val::json(tries)?), ("backend", backend.into())];
    db.write(Unit::guarded("instances", held, set)).await
}

/// Writes how far its making is; the row stays locked.
pub async fn set_progress(db: &Db, held: LeaseKey, said: Option<&str>) -> Result<WriteOutcome, DbError> {
    db.write(Unit::guarded("instances", held, vec![("status_message", said.into())])).await
}

/// One pass over an instance, and whom it concerns.
#[derive(Default)]
pub struct InstanceUpdate {
    pub set: Values,
    pub event: Option<Event>,
    /// Its container engine went away, or is back.
    pub engine: Option<Event>,
    /// It ends, unless a job came in the same moment.
    pub only_while_idle: bool,
    /// It ends, unless its fleet would then have fewer than these.
    pub leaves_at_least: Option<i64>,
    pub is_over: bool,
    pub pokes_jobs: bool,
    pub pokes_waiting: bool,
    pub pokes_fleet: bool,
}

impl InstanceUpdate {
    /// The pipelines that have something to look at.
    pub fn wakes(&self) -> Vec<&'static str> {
        let mut wake = Vec::new();
        if self.pokes_jobs {
            wake.extend(["jobs_running", "jobs_terminating"]);
        }
        if self.pokes_jobs || self.pokes_waiting {
            wake.push("jobs_submitted");
        }
        if self.pokes_fleet {
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
    if moved.pokes_jobs {
        unit = unit.exec(POKE_JOBS.as_str(), params![instance.id]);
    }
    if moved.pokes_waiting {
        unit = unit.exec(POKE_WAITING.as_str(), params![instance.project_id]);
    }
    if let Some(fleet) = instance.fleet_id.filter(|_| moved.pokes_fleet) {
        unit = unit.exec(POKE_FLEET.as_str(), params![fleet]);
    }
    for event in moved.event.iter().chain(&moved.engine) {
        unit = unit.and(event_rows(db, held, instance.project_id, event, &instance.name)?);
    }
    db.write(unit).await
}
