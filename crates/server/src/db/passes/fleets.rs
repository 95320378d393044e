//! What the fleet pipeline reads and writes.

use windlass_engine::{Lease, LeaseKey};
use windlass_model::{event::Event, id::InstanceId, instance};

use super::event_rows;
use crate::{
    db::{
        Change, Db, DbError, Unit, Values, WriteOutcome,
        fleets::Fleet,
        instances::{self, Instance},
        record::statements,
    },
    params,
};

statements! {
    LOAD = "SELECT {} FROM fleets f WHERE f.id = $1 AND f.lock_token = $2", Fleet::columns("f");
    MEMBERS = "SELECT {} FROM instances i WHERE i.fleet_id = $1 AND NOT i.finished ORDER BY i.instance_num",
              Instance::columns("i");
    /// Of those that never came to be, what the last one said.
    EXIT_RECORD = "SELECT i.termination_message FROM instances i WHERE i.fleet_id = $1 AND i.finished \
                 AND i.termination_message IS NOT NULL ORDER BY i.finished_at DESC LIMIT 1";
    /// Never under a job: what was idle when the fleet looked may have one by now.
    ASK_SURPLUS = "UPDATE instances SET termination_asked_at = coalesce(termination_asked_at, now_us()), \
                   end_reason = $2, due_at = NULL WHERE id = $1 AND NOT finished AND busy_blocks = 0";
    ASK_END = "UPDATE instances SET termination_asked_at = coalesce(termination_asked_at, now_us()), due_at = NULL \
               WHERE id = $1 AND NOT finished";
}

pub struct FleetInputs {
    pub fleet: Fleet,
    /// Those that are not over.
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

/// One pass over a fleet.
#[derive(Default)]
pub struct FleetUpdate {
    pub set: Values,
    pub event: Option<Event>,
    pub end: Vec<(InstanceId, instance::TerminationReason)>,
    /// The rows of new instances and of their events.
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
            unit.exec(ASK_END.as_str(), params![id])
        } else {
            unit.exec(ASK_SURPLUS.as_str(), params![id, reason.as_str()])
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
