//! Reads of placement (the claimed queue and the inventory), and the assignment of jobs to instances.

use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;
use windlass_engine::{Lease, LeaseKey};
use windlass_model::{
    event::Event,
    id::{FleetId, InstanceId, ProjectId, RunId},
    job,
    plan::place::NodePlacement,
    time::Span,
};

use super::{event_rows, guarded_update};
use crate::{
    db::{
        Change, Db, DbError, Row, Unit, Val, Values, WriteOutcome, backends,
        fleets::Fleet,
        instances::{self, Instance, NewInstance},
        jobs::Job,
        record::statements,
        runs::{DUE_SOON, Run},
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
    FREE_INSTANCES = "SELECT {} FROM instances i WHERE i.project_id = $1 AND NOT i.finished AND NOT i.deleted \
                      AND i.busy_blocks < coalesce(i.total_blocks, 1) AND i.status IN ('idle', 'busy') \
                      AND NOT i.unreachable AND i.termination_asked_at IS NULL ORDER BY i.id",
                     Instance::columns("i");
    HELD_ON = "SELECT j.instance_id, j.id, j.blocks, j.run_deadline_at FROM jobs j \
               WHERE j.instance_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT j.finished \
               ORDER BY j.instance_id, j.id";
    HELD = "SELECT j.instance_id, j.id, j.blocks, j.run_deadline_at FROM jobs j WHERE j.project_id = $1 \
            AND NOT j.finished AND j.instance_id IS NOT NULL ORDER BY j.instance_id, j.id";
    /// Allocates blocks only if they are free: two replicas that place at the same time cannot allocate the same ones.
    /// The first blocks make the instance busy, which its pipeline records.
    TAKE_BLOCKS = "UPDATE instances SET busy_blocks = busy_blocks + $2, \
                   due_at = CASE WHEN busy_blocks = 0 THEN NULL ELSE due_at END \
                   WHERE id = $1 AND status IN ('idle', 'busy') AND NOT unreachable AND NOT finished \
                   AND termination_asked_at IS NULL AND busy_blocks + $2 <= total_blocks";
    /// A unit that adds an instance to a fleet holds the fleet's row until its end, so that the next count is correct.
    HOLD_FLEET = "UPDATE fleets SET due_at = NULL WHERE id = $1 AND NOT deleted AND status = 'active' \
                  AND termination_asked_at IS NULL";
    WITHIN_MAX = "UPDATE fleets SET due_at = NULL WHERE id = $1 \
                  AND (SELECT count(*) FROM instances i WHERE i.fleet_id = $1 AND NOT i.finished) <= $2";
    /// After the insert of the instance, to which the row refers.
    SIT_ON_NEW = "UPDATE jobs SET instance_id = $2 WHERE id = $1";
    TASK_DIRS_ROOT = "SELECT {} FROM instances i WHERE i.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))",
             Instance::columns("i");
    /// Offers for which nodes of these runs recently found no capacity.
    FULL = "SELECT j.run_id, j.replica_num, i.offer FROM jobs j JOIN instances i ON i.id = j.instance_id \
            WHERE j.run_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND j.termination_detail = $2 \
            AND j.terminating_at > now_us() - $3";
    CHOOSE_FLEET = "UPDATE runs SET fleet_id = $2, due_at = {DUE_SOON} WHERE id = $1 AND NOT finished";
}

/// Claimed jobs whose leases are still valid, with their runs.
pub async fn leased_jobs(db: &Db, leases: &[Lease]) -> Result<(Vec<Job>, BTreeMap<RunId, Run>), DbError> {
    let rows = db.query(LEASED.as_str(), vec![Val::list(leases.iter().map(|l| l.id))]).await?;
    let mut jobs = Vec::with_capacity(rows.len());
    for mut row in rows {
        let job = Job::read_from(&mut row, 0)?;
        let token: Option<Uuid> = row.opt_uuid(Job::WIDTH)?;
        if leases.iter().any(|l| l.id == job.id.0 && Some(l.token) == token) {
            jobs.push(job);
        }
    }
    let runs = db.query(RUNS.as_str(), vec![Val::list(jobs.iter().map(|j| j.run_id))]).await?;
    let runs = runs.into_iter().map(|row| Run::read(row).map(|run| (run.id, run)));
    Ok((jobs, runs.collect::<Result<_, _>>()?))
}

/// Time for which a region that was reported as full is avoided.
const FULL_REGION_TTL: Span = Span::mins(2);

/// For replicas with several nodes: the offers that recently failed. JSON, see `OfferAttempts`.
pub async fn failed_offers(db: &Db, runs: &[RunId]) -> Result<Vec<((RunId, i64), String)>, DbError> {
    if runs.is_empty() {
        return Ok(Vec::new());
    }
    let detail = job::TerminationDetail::RegionFull.as_str();
    let requested = vec![Val::list(runs.iter().copied()), detail.into(), FULL_REGION_TTL.0.into()];
    let rows = db.query(FULL.as_str(), requested).await?;
    let found = rows.into_iter().filter_map(|row| {
        let offer = row.opt_text(2).transpose()?;
        Some(offer.and_then(|offer| Ok(((row.id(0)?, row.int(1)?), offer))))
    });
    found.collect()
}

/// Instances that claimed jobs already have.
pub async fn assigned_instances(db: &Db, jobs: &[Job]) -> Result<BTreeMap<InstanceId, Instance>, DbError> {
    let ids: Vec<InstanceId> = jobs.iter().filter_map(|job| job.instance_id).collect();
    if ids.is_empty() {
        return Ok(BTreeMap::new());
    }
    let rows = db.query(TASK_DIRS_ROOT.as_str(), vec![Val::list(ids)]).await?;
    rows.into_iter().map(|row| Instance::read(row).map(|instance| (instance.id, instance))).collect()
}

/// Blocks of an instance that a job occupies.
#[derive(Clone, Copy, Debug)]
pub struct BlockHold {
    pub instance: InstanceId,
    pub job: Uuid,
    pub blocks: i64,
    pub until: Option<i64>,
}

pub struct ProjectInventory {
    pub fleets: Vec<Fleet>,
    pub instances: Vec<Instance>,
    pub holds: Vec<BlockHold>,
    /// Backends that the project may use.
    pub granted: BTreeSet<String>,
}

/// Fleets, instances and occupied blocks of a project.
pub async fn load_inventory(db: &Db, project: ProjectId) -> Result<ProjectInventory, DbError> {
    let fleets = db.query(FLEETS.as_str(), params![project]).await?;
    let instances = db.query(INSTANCES.as_str(), params![project]).await?;
    let holds = db.query(HELD.as_str(), params![project]).await?;
    Ok(ProjectInventory {
        fleets: fleets.into_iter().map(Fleet::read).collect::<Result<_, _>>()?,
        instances: instances.into_iter().map(Instance::read).collect::<Result<_, _>>()?,
        holds: read_holds(&holds)?,
        granted: backends::list_granted(db, project).await?,
    })
}

/// Fleets of a project, and only those of its instances that have free blocks.
pub async fn load_free_inventory(db: &Db, project: ProjectId) -> Result<ProjectInventory, DbError> {
    let instances = db.query(FREE_INSTANCES.as_str(), params![project]).await?;
    let instances = instances.into_iter().map(Instance::read).collect::<Result<Vec<_>, _>>()?;
    if instances.is_empty() {
        return Ok(ProjectInventory {
            fleets: Vec::new(),
            instances,
            holds: Vec::new(),
            granted: BTreeSet::new(),
        });
    }
    let fleets = db.query(FLEETS.as_str(), params![project]).await?;
    let used = instances.iter().filter(|instance| instance.busy_blocks > 0).map(|instance| instance.id);
    let used: Vec<InstanceId> = used.collect();
    let holds = match used.is_empty() {
        true => Vec::new(),
        false => db.query(HELD_ON.as_str(), vec![Val::list(used)]).await?,
    };
    Ok(ProjectInventory {
        fleets: fleets.into_iter().map(Fleet::read).collect::<Result<_, _>>()?,
        instances,
        holds: read_holds(&holds)?,
        granted: BTreeSet::new(),
    })
}

fn read_holds(rows: &[Row]) -> Result<Vec<BlockHold>, DbError> {
    let holds = rows.iter().map(|row| {
        Ok(BlockHold { instance: row.id(0)?, job: row.uuid(1)?, blocks: row.int(2)?, until: row.opt_int(3)? })
    });
    holds.collect()
}

/// One node of a replica and its assignment.
pub struct NodeAssignment<'a> {
    pub held: LeaseKey,
    pub job: &'a Job,
    pub seat: SeatTarget<'a>,
}

pub enum SeatTarget<'a> {
    /// On an existing instance: the job is provisioning.
    There { seat: &'a NodePlacement, event: Event },
    /// On an instance that is to be created: the job waits for it.
    New { instance: Box<NewInstance>, created: Event, blocks: i64, message: String },
}

/// Fleet to which a replica is assigned.
pub struct TargetFleet {
    pub fleet: FleetId,
    /// True if the run has no fleet yet.
    pub chooses: bool,
    pub nodes_max: Option<u32>,
}

/// Assigns all nodes of a replica, or none: each row under its own lease, each instance only if it has free blocks,
/// each new one only if the fleet's limit permits it. `wakes` wake the jobs that waited behind the replica; their results
/// are the rows of the outcome.
pub async fn place_replica(
    db: &Db,
    into: &TargetFleet,
    seated: Vec<NodeAssignment<'_>>,
    wakes: Vec<Change>,
) -> Result<WriteOutcome, DbError> {
    let Some(first) = seated.first() else { return Ok(WriteOutcome::Stale { at: None }) };
    let (run, fleet) = (first.job.run_id, into.fleet);
    let mut unit = Unit::apply("jobs", first.held, first.seat.due_in_us(), columns(fleet, &first.seat));
    for other in &seated[1..] {
        let mut set = Unit::unlocked(other.seat.due_in_us());
        set.extend(columns(fleet, &other.seat));
        unit = unit.and([guarded_update("jobs", other.held, set)]);
    }
    let makes = seated.iter().any(|one| matches!(one.seat, SeatTarget::New { .. }));
    if makes {
        unit = unit.expect_one(HOLD_FLEET.as_str(), params![fleet]);
    }
    let mut reported_last = Vec::new();
    for NodeAssignment { held, job, seat } in seated {
        match seat {
            SeatTarget::There { seat, event } => {
                if let NodePlacement::Existing { instance, blocks, .. } = seat {
                    unit = unit.expect_one(TAKE_BLOCKS.as_str(), params![*instance, *blocks]);
                }
                reported_last.extend(event_rows(db, held, job.project_id, &event, &job.job_name)?);
            }
            SeatTarget::New { instance, created, blocks, .. } => {
                reported_last.extend(event_rows(db, held, job.project_id, &created, &instance.name)?);
                let on = instance.id;
                unit = unit.and([instances::insert_for_job(*instance, job.id, blocks)]);
                unit = unit.expect_one(SIT_ON_NEW.as_str(), params![job.id, on]);
            }
        }
    }
    if let (true, Some(max)) = (makes, into.nodes_max) {
        unit = unit.expect_one(WITHIN_MAX.as_str(), params![fleet, i64::from(max)]);
    }
    unit = if into.chooses {
        unit.exec(CHOOSE_FLEET.as_str(), params![run, fleet])
    } else {
        unit.and([crate::db::runs::mark_due_soon(run)])
    };
    db.write(unit.and(wakes).and(reported_last)).await
}

/// Interval at which a job checks the instance that is created for it; the instance's pipeline makes the job due when
/// it is ready.
const NEW_INSTANCE_POLL_US: i64 = 30_000_000;

impl SeatTarget<'_> {
    fn due_in_us(&self) -> Option<i64> {
        match self {
            Self::There { .. } => None,
            Self::New { .. } => Some(NEW_INSTANCE_POLL_US),
        }
    }
}

fn columns(fleet: FleetId, seat: &SeatTarget<'_>) -> Values {
    let mut set: Values = vec![
        ("fleet_id", fleet.into()),
        ("shortfalls", Val::Null),
        ("wait_class", Val::Null),
        ("parked", false.into()),
    ];
    match seat {
        SeatTarget::There { seat, .. } => {
            set.extend([
                ("status", job::Status::Provisioning.into()),
                ("provisioned_at", Val::Now),
                ("status_message", Val::Null),
            ]);
            if let NodePlacement::Existing { instance, blocks, .. } = seat {
                set.extend([
                    ("instance_id", Val::from(*instance)),
                    ("instance_assigned", true.into()),
                    ("blocks", (*blocks).into()),
                ]);
            }
        }
        SeatTarget::New { blocks, message, .. } => set.extend([
            ("instance_assigned", true.into()),
            ("blocks", (*blocks).into()),
            ("status_message", message.as_str().into()),
        ]),
    }
    set
}
