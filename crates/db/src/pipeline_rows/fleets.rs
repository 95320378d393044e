//! Reads and writes of the fleet pipeline.

use windlass_engine::{Lease, LeaseKey};
use windlass_model::{event::Event, id::InstanceId, instance};

use super::event_rows;
use crate::{
    Change, Db, DbError, Unit, Values, WriteOutcome,
    fleets::Fleet,
    instances::{self, Instance},
    params,
    record::statements,
};

statements! {
    LOAD = "SELECT {} FROM fleets f WHERE f.id = $1 AND f.lock_token = $2", Fleet::columns("f");
    MEMBERS = "SELECT {} FROM instances i WHERE i.fleet_id = $1 AND NOT i.finished ORDER BY i.instance_num",
              Instance::columns("i");
    /// Message of the last instance that failed to start.
    EXIT_RECORD = "SELECT i.termination_message FROM instances i WHERE i.fleet_id = $1 AND i.finished \
                 AND i.termination_message IS NOT NULL ORDER BY i.finished_at DESC LIMIT 1";
    /// Never while a job is there: an instance that was idle when the fleet was loaded may have one by now.
    REQUEST_SURPLUS_STOP = "UPDATE instances SET termination_asked_at = coalesce(termination_asked_at, now_us()), \
                   end_reason = $2, due_at = NULL WHERE id = $1 AND NOT finished AND busy_blocks = 0";
    REQUEST_END = "UPDATE instances SET termination_asked_at = coalesce(termination_asked_at, now_us()), due_at = NULL \
               WHERE id = $1 AND NOT finished";
}

pub struct FleetInputs {
    pub fleet: Fleet,
    /// Unfinished instances.
    pub members: Vec<Instance>,
    pub last_word: Option<String>,
}

pub async fn load(db: &Db, lease: &Lease) -> Result<Option<FleetInputs>, DbError> {
    let Some(row) = db.query_opt(LOAD.as_str(), params![lease.id, lease.token]).await? else {
        return Ok(None);
    };
    let fleet = Fleet::read(row)?;
    let members = db.query(MEMBERS.as_str(), params![fleet.id]).await?;
    let members = members.into_iter().map(Instance::read).collect::<Result<_, _>>()?;
    let last_word = match db.query_opt(EXIT_RECORD.as_str(), params![fleet.id]).await? {
        Some(row) => row.opt_text(0)?,
        None => None,
    };
    Ok(Some(FleetInputs { fleet, members, last_word }))
}

/// Result of one pass over a fleet.
#[derive(Default)]
pub struct FleetUpdate {
    pub set: Values,
    pub event: Option<Event>,
    pub end: Vec<(InstanceId, instance::TerminationReason)>,
    /// Rows of new instances and of their events.
    pub create: Vec<Change>,
}

pub async fn apply(
    db: &Db,
    held: LeaseKey,
    fleet: &Fleet,
    moved: FleetUpdate,
    due_in_us: Option<i64>,
) -> Result<WriteOutcome, DbError> {
    let mut unit = Unit::apply("fleets", held, due_in_us, moved.set);
    for (id, reason) in moved.end {
        unit = if reason == instance::TerminationReason::TerminatedByUser {
            unit.exec(REQUEST_END.as_str(), params![id])
        } else {
            unit.exec(REQUEST_SURPLUS_STOP.as_str(), params![id, reason.as_str()])
        };
    }
    if !moved.create.is_empty() {
        unit = unit.and([instances::hide_finished(fleet.id)]);
    }
    unit = unit.and(moved.create);
    if let Some(event) = &moved.event {
        unit = unit.and(event_rows(db, held, fleet.project_id, event, &fleet.name)?);
    }
    db.write(unit).await
}
