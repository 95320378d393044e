//! What placement reads (the whole queue it claimed, the whole inventory) and how a seat is taken.

use std::collections::BTreeMap;

use uuid::Uuid;
use windlass_engine::{Held, Lease};
use windlass_model::{
    event::Event,
    id::{FleetId, InstanceId, ProjectId, RunId},
    job,
    plan::place::Seat,
};

use super::{also_guarded, told};
use crate::{
    db::{
        Db, DbError, Unit, Val, Values, Written, fleets::Fleet, instances::Instance, jobs::Job,
        record::statements, runs::Run,
    },
    params,
};

statements! {
    LEASED = "SELECT {}, j.lock_token FROM jobs j WHERE j.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))",
             Job::columns("j");
    RUNS = "SELECT {} FROM runs r WHERE r.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))", Run::columns("r");
    FLEETS = "SELECT {} FROM fleets f WHERE f.project_id = $1 AND NOT f.finished AND NOT f.deleted ORDER BY f.id",
             Fleet::columns("f");
    INSTANCES = "SELECT {} FROM instances i WHERE i.project_id = $1 AND NOT i.finished AND NOT i.deleted ORDER BY i.id",
                Instance::columns("i");
    HELD = "SELECT j.instance_id, j.id, j.blocks, j.run_deadline_at FROM jobs j WHERE j.project_id = $1 \
            AND j.instance_id IS NOT NULL AND NOT j.finished ORDER BY j.id";
    /// Takes blocks only while they are there: two replicas that place at once cannot take the same ones.
    TAKE_BLOCKS = "UPDATE instances SET busy_blocks = busy_blocks + $2, due_at = NULL \
                   WHERE id = $1 AND status IN ('idle', 'busy') AND NOT unreachable AND NOT finished \
                   AND busy_blocks + $2 <= total_blocks";
    CHOOSE_FLEET = "UPDATE runs SET fleet_id = $2, due_at = NULL WHERE id = $1 AND NOT finished";
    POKE_RUN = "UPDATE runs SET due_at = NULL WHERE id = $1 AND NOT finished";
}

/// The claimed jobs that are still ours, with their runs.
pub async fn leased(db: &Db, leases: &[Lease]) -> Result<(Vec<Job>, BTreeMap<RunId, Run>), DbError> {
    let rows = db.query(LEASED.as_str(), vec![Val::list(leases.iter().map(|l| l.id))]).await?;
    let mut jobs = Vec::with_capacity(rows.len());
    for row in &rows {
        let job = Job::read(row)?;
        let token: Option<Uuid> = row.opt_uuid(Job::WIDTH)?;
        if leases.iter().any(|l| l.id == job.id.0 && Some(l.token) == token) {
            jobs.push(job);
        }
    }
    let runs = db.query(RUNS.as_str(), vec![Val::list(jobs.iter().map(|j| j.run_id))]).await?;
    let runs = runs.iter().map(|row| Run::read(row).map(|run| (run.id, run)));
    Ok((jobs, runs.collect::<Result<_, _>>()?))
}

/// A job's hold on an instance.
#[derive(Clone, Copy, Debug)]
pub struct Hold {
    pub instance: InstanceId,
    pub job: Uuid,
    pub blocks: i64,
    pub until: Option<i64>,
}

pub struct Stock {
    pub fleets: Vec<Fleet>,
    pub instances: Vec<Instance>,
    pub holds: Vec<Hold>,
}

/// Everything a project has.
pub async fn stock(db: &Db, project: ProjectId) -> Result<Stock, DbError> {
    let fleets = db.query(FLEETS.as_str(), params![project]).await?;
    let instances = db.query(INSTANCES.as_str(), params![project]).await?;
    let holds = db.query(HELD.as_str(), params![project]).await?;
    let holds = holds.iter().map(|row| {
        Ok(Hold { instance: row.id(0)?, job: row.uuid(1)?, blocks: row.int(2)?, until: row.opt_int(3)? })
    });
    Ok(Stock {
        fleets: fleets.iter().map(Fleet::read).collect::<Result<_, _>>()?,
        instances: instances.iter().map(Instance::read).collect::<Result<_, _>>()?,
        holds: holds.collect::<Result<_, DbError>>()?,
    })
}

/// One node of a replica and the seat it takes.
pub struct Seated<'a> {
    pub held: Held,
    pub job: &'a Job,
    pub seat: &'a Seat,
    pub event: Event,
}

/// Seats all nodes of a replica, or none: each row under its own lease, each instance only while it has room.
pub async fn seat(db: &Db, fleet: FleetId, chooses: bool, seated: &[Seated<'_>]) -> Result<Written, DbError> {
    let Some(first) = seated.first() else { return Ok(Written::Stale { at: None }) };
    let mut unit = Unit::apply("jobs", first.held, None, columns(fleet, first.seat));
    for other in &seated[1..] {
        let mut set = Unit::unlocked(None);
        set.extend(columns(fleet, other.seat));
        unit = unit.and([also_guarded("jobs", other.held, set)]);
    }
    for one in seated {
        if let Seat::Existing { instance, blocks, .. } = one.seat {
            unit = unit.expect_one(TAKE_BLOCKS.as_str(), params![*instance, *blocks]);
        }
    }
    let note = if chooses { CHOOSE_FLEET.as_str() } else { POKE_RUN.as_str() };
    let params = if chooses { params![first.job.run_id, fleet] } else { params![first.job.run_id] };
    unit = unit.exec(note, params);
    for one in seated {
        unit = unit.and(told(db, one.held, one.job.project_id, &one.event, &one.job.job_name)?);
    }
    db.write(unit).await
}

fn columns(fleet: FleetId, seat: &Seat) -> Values {
    let mut set: Values = vec![
        ("status", job::Status::Provisioning.into()),
        ("fleet_id", fleet.into()),
        ("provisioned_at", Val::Now),
        ("shortfalls", Val::Null),
        ("status_message", Val::Null),
    ];
    if let Seat::Existing { instance, blocks, .. } = seat {
        set.extend([
            ("instance_id", Val::from(*instance)),
            ("instance_assigned", true.into()),
            ("blocks", (*blocks).into()),
        ]);
    }
    set
}
