//! Reads of placement (the claimed queue and the inventory), and the assignment of jobs to instances.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use uuid::Uuid;
use windlass_engine::{Lease, LeaseKey};
use windlass_model::{
    config::name::ResourceReference,
    event::Event,
    id::{FleetId, InstanceId, ProjectId, RunId, SubmissionId},
    job,
    plan::{
        budget::Budget,
        place::NodePlacement,
        preemption::{BlockPromise, HeldByClass, RunningReplica},
        queue_order::ProjectUsage,
        quota::{HeldResources, Quota},
    },
    time::{Span, Timestamp},
};

use super::{event_rows, guarded_update, preemption};
use crate::{
    Change, Db, DbError, Row, Unit, Val, Values, WriteOutcome, backends, budgets,
    fleets::Fleet,
    instances::{self, Instance, NewInstance},
    jobs::Job,
    params, quotas,
    record::statements,
    runs::{DUE_SOON, Run},
    usage,
};

statements! {
    LEASED = "SELECT {}, j.lock_token FROM jobs j WHERE j.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))",
             Job::columns("j");
    RUNS = "SELECT {} FROM runs r WHERE r.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))", Run::columns("r");
    /// A fleet that several of the projects may use is returned for each of them.
    FLEETS = "SELECT {}, u.project_id, p.name, \
              EXISTS (SELECT 1 FROM quotas q WHERE q.project_id = u.project_id), \
              EXISTS (SELECT 1 FROM budgets b WHERE b.project_id = u.project_id) FROM usable_fleets u JOIN fleets f ON f.id = u.fleet_id \
              JOIN projects p ON p.id = f.project_id WHERE u.project_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) \
              AND NOT f.finished AND NOT f.deleted ORDER BY f.id",
             Fleet::columns("f");
    INSTANCES = "SELECT {} FROM instances i WHERE i.fleet_id IN (SELECT u.fleet_id FROM usable_fleets u \
                 WHERE u.project_id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))) \
                 AND NOT i.finished AND NOT i.deleted ORDER BY i.id",
                Instance::columns("i");
    FREE_INSTANCES = "SELECT {} FROM instances i WHERE i.fleet_id IN (SELECT u.fleet_id FROM usable_fleets u \
                      WHERE u.project_id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))) \
                      AND {FREE_CONDITION} ORDER BY i.id",
                     Instance::columns("i");
    /// Replicas that may reserve instances which these projects may use: the first ones of each project, and its oldest.
    LONG_WAITING = "SELECT {} FROM jobs j JOIN (SELECT w.run_id, w.replica_num FROM (SELECT j.run_id, j.replica_num, \
                    row_number() OVER (PARTITION BY j.project_id ORDER BY j.priority DESC, coalesce(j.queued_at, j.submitted_at), j.id) AS place, \
                    row_number() OVER (PARTITION BY j.project_id ORDER BY coalesce(j.queued_at, j.submitted_at), j.id) AS by_age FROM jobs j \
                    WHERE j.status = 'submitted' AND NOT j.finished AND NOT j.parked AND j.instance_id IS NULL \
                    AND j.job_num = 0 AND j.submitted_at <= $2 AND j.project_id IN (SELECT o.project_id FROM usable_fleets u \
                    JOIN usable_fleets o ON o.fleet_id = u.fleet_id \
                    WHERE u.project_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))))) w \
                    WHERE w.place <= 2 OR w.by_age = 1) f ON f.run_id = j.run_id AND f.replica_num = j.replica_num \
                    WHERE j.status = 'submitted' AND NOT j.finished AND j.instance_id IS NULL",
                   Job::columns("j");
    /// Jobs that others left room for.
    MARK_DUE = "UPDATE jobs SET due_at = NULL WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT finished \
                AND status = 'submitted'";
    HELD_ON = "SELECT j.instance_id, j.id, j.blocks, j.run_deadline_at, j.preempted_at IS NOT NULL FROM jobs j \
               WHERE j.instance_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT j.finished \
               ORDER BY j.instance_id, j.id";
    /// Allocates blocks only if they are free: two replicas that place at the same time cannot allocate the same ones.
    /// The first blocks make the instance busy, which its pipeline records, unless it was not recorded as idle yet: a pass in
    /// progress may be about to. A promise of blocks that was made after the
    /// instance was read may be for these. So may a job that waits before this one, and that was woken after this round
    /// had claimed its jobs: the next round has both. A quota that was added since the round read them is read by the next.
    TAKE_BLOCKS = "UPDATE instances SET busy_blocks = busy_blocks + $2, \
                   due_at = CASE WHEN busy_blocks = 0 AND (status = 'idle' OR lock_token IS NOT NULL) THEN NULL ELSE due_at END \
                   WHERE id = $1 AND status IN ('idle', 'busy') AND NOT unreachable AND NOT finished \
                   AND termination_asked_at IS NULL AND busy_blocks + $2 <= total_blocks AND promise_num = $3 \
                   AND NOT EXISTS (SELECT 1 FROM jobs w WHERE w.project_id = $4 AND w.status = 'submitted' \
                   AND w.due_at IS NULL AND w.lock_token IS NULL AND w.shortfalls IS NOT NULL AND NOT w.parked \
                   AND NOT w.finished AND (w.priority > $5 OR (w.priority = $5 AND coalesce(w.queued_at, w.submitted_at) < $6))) \
                   AND ($7 OR NOT EXISTS (SELECT 1 FROM quotas q WHERE q.project_id = $4))";
    /// A unit that adds an instance to a fleet holds the fleet's row until its end, so that the next count is correct.
    HOLD_FLEET = "UPDATE fleets SET due_at = NULL WHERE id = $1 AND NOT deleted AND status = 'active' \
                  AND termination_asked_at IS NULL AND ($3 OR NOT EXISTS (SELECT 1 FROM quotas q WHERE q.project_id = $2))";
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

/// Condition of the index `instances_free`: a job may be placed on the instance `i`, which has free blocks.
pub(super) const FREE_CONDITION: &str = "NOT i.finished AND NOT i.deleted \
    AND i.busy_blocks < coalesce(i.total_blocks, 1) AND i.status IN ('idle', 'busy') \
    AND NOT i.unreachable AND i.termination_asked_at IS NULL";

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

/// Nodes of replicas that have waited since then or for longer and may reserve instances, with their runs.
pub async fn long_waiting(
    db: &Db,
    projects: &[ProjectId],
    since: Timestamp,
) -> Result<(Vec<Job>, BTreeMap<RunId, Run>), DbError> {
    let rows = db.query(LONG_WAITING.as_str(), params![Val::list(projects), since]).await?;
    let jobs = rows.into_iter().map(Job::read).collect::<Result<Vec<_>, _>>()?;
    if jobs.is_empty() {
        return Ok((jobs, BTreeMap::new()));
    }
    let runs = db.query(RUNS.as_str(), vec![Val::list(jobs.iter().map(|job| job.run_id))]).await?;
    let runs = runs.into_iter().map(|row| Run::read(row).map(|run| (run.id, run)));
    Ok((jobs, runs.collect::<Result<_, _>>()?))
}

/// Makes waiting jobs due.
pub async fn mark_due(db: &Db, jobs: &[SubmissionId]) -> Result<(), DbError> {
    let unit = Unit::new().exec(MARK_DUE.as_str(), vec![Val::list(jobs)]);
    db.write(unit).await.map(|_| ())
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
    pub is_preempted: bool,
}

/// Fleets that some projects may use, with their instances.
#[derive(Default)]
pub struct PoolInventory {
    pub fleets: Vec<Fleet>,
    /// Fleets that each project may use.
    pub usable: BTreeMap<ProjectId, Arc<BTreeSet<FleetId>>>,
    /// Projects that have quotas.
    pub limited: BTreeSet<ProjectId>,
    pub quotas: Vec<Quota>,
    pub budgets: Vec<Budget>,
    /// Usage of the projects, if there are several to order.
    pub usage: Vec<ProjectUsage>,
    /// Names of the projects to which the fleets belong.
    pub owners: BTreeMap<ProjectId, String>,
    pub instances: Vec<Instance>,
    pub holds: Vec<BlockHold>,
    /// Backends that each owner of a fleet may use.
    pub granted: BTreeMap<ProjectId, BTreeSet<String>>,
    /// Blocks that are kept for waiting jobs.
    pub promises: Vec<BlockPromise>,
    /// For preemption: replicas on the instances, what all their projects hold, and how many were preempted lately.
    pub running: Vec<RunningReplica>,
    pub held_by_class: Vec<HeldByClass>,
    pub preempted: BTreeMap<FleetId, i64>,
}

impl PoolInventory {
    /// Fleets that jobs of the project may use.
    pub fn usable_fleets(&self, project: ProjectId) -> Arc<BTreeSet<FleetId>> {
        self.usable.get(&project).cloned().unwrap_or_default()
    }

    /// Fleets that a run of the project names: `project/name`, or `name` of a fleet of this project or, if that has
    /// none of this name, of others.
    pub fn select(&self, project: ProjectId, named: &[ResourceReference]) -> Vec<FleetId> {
        let usable = self.usable_fleets(project);
        let fleets: Vec<&Fleet> = self.fleets.iter().filter(|fleet| usable.contains(&fleet.id)).collect();
        let is_own = |name: &str| fleets.iter().any(|own| own.project_id == project && own.name == name);
        let is_selected = |fleet: &Fleet, named: &ResourceReference| {
            self.has_name(fleet, named)
                && (named.project.is_some() || fleet.project_id == project || !is_own(&named.name))
        };
        let selected = fleets.iter().filter(|fleet| named.iter().any(|named| is_selected(fleet, named)));
        selected.map(|fleet| fleet.id).collect()
    }

    /// Those of the named fleets that do not exist, or that jobs of the project may not use.
    pub fn missing(&self, project: ProjectId, named: &[ResourceReference]) -> Vec<String> {
        let usable = self.usable_fleets(project);
        let fleets: Vec<&Fleet> = self.fleets.iter().filter(|fleet| usable.contains(&fleet.id)).collect();
        let missing = named.iter().filter(|named| !fleets.iter().any(|fleet| self.has_name(fleet, named)));
        missing.map(ToString::to_string).collect()
    }

    fn has_name(&self, fleet: &Fleet, named: &ResourceReference) -> bool {
        let is_owner = |owner: &String| self.owners.get(&fleet.project_id) == Some(owner);
        fleet.name == named.name && named.project.as_ref().is_none_or(is_owner)
    }
}

/// Everything that jobs of the projects may use.
pub async fn load_inventory(
    db: &Db,
    projects: &[ProjectId],
    now: Timestamp,
) -> Result<PoolInventory, DbError> {
    let mut found = load_fleets(db, projects, now).await?;
    let instances = db.query(INSTANCES.as_str(), vec![Val::list(projects)]).await?;
    found.instances = instances.into_iter().map(Instance::read).collect::<Result<_, _>>()?;
    found.holds = load_holds(db, &found.instances).await?;
    found.promises = preemption::promises(db, now).await?;
    let owners: BTreeSet<ProjectId> = found.fleets.iter().map(|fleet| fleet.project_id).collect();
    let owners: Vec<ProjectId> = owners.into_iter().collect();
    for (owner, kind) in backends::list_kinds(db, &owners).await? {
        found.granted.entry(owner).or_default().insert(kind);
    }
    Ok(found)
}

/// As `load_inventory`, with only those instances that have free blocks.
pub async fn load_free_inventory(
    db: &Db,
    projects: &[ProjectId],
    now: Timestamp,
) -> Result<PoolInventory, DbError> {
    let instances = db.query(FREE_INSTANCES.as_str(), vec![Val::list(projects)]).await?;
    let instances = instances.into_iter().map(Instance::read).collect::<Result<Vec<_>, _>>()?;
    if instances.is_empty() {
        return Ok(PoolInventory::default());
    }
    let mut found = load_fleets(db, projects, now).await?;
    found.holds = load_holds(db, &instances).await?;
    found.promises = preemption::promises(db, now).await?;
    found.instances = instances;
    Ok(found)
}

/// For tests: plan of the statement that reads the instances with free blocks.
pub async fn explain_free_instances(db: &Db, projects: &[ProjectId]) -> Result<String, DbError> {
    db.explain(FREE_INSTANCES.as_str(), vec![Val::list(projects)]).await
}

/// Adds what decides about preemption on these fleets: who runs there, and the quotas of their projects.
pub async fn load_running(
    db: &Db,
    found: &mut PoolInventory,
    fleets: &BTreeSet<FleetId>,
    now: Timestamp,
) -> Result<(), DbError> {
    let used = found.instances.iter().filter(|instance| instance.busy_blocks > 0);
    let used = used.filter(|instance| instance.fleet_id.is_some_and(|fleet| fleets.contains(&fleet)));
    let used: Vec<InstanceId> = used.map(|instance| instance.id).collect();
    if used.is_empty() {
        return Ok(());
    }
    found.running = preemption::running(db, &used).await?;
    found.preempted = preemption::spent(db, now).await?;
    let projects: BTreeSet<ProjectId> = found.running.iter().map(|one| one.project).collect();
    let projects: Vec<ProjectId> = projects.into_iter().collect();
    found.held_by_class = preemption::held_by_class(db, &projects).await?;
    let known: BTreeSet<ProjectId> = found.quotas.iter().map(|quota| quota.project).collect();
    let others: Vec<ProjectId> = projects.into_iter().filter(|project| !known.contains(project)).collect();
    let more = quotas::list(db, &others).await?.into_iter().map(|named| named.quota);
    found.quotas.extend(more);
    Ok(())
}

async fn load_fleets(db: &Db, projects: &[ProjectId], now: Timestamp) -> Result<PoolInventory, DbError> {
    let mut found = PoolInventory::default();
    let mut budgeted = BTreeSet::new();
    for mut row in db.query(FLEETS.as_str(), vec![Val::list(projects)]).await? {
        let (user, owner): (ProjectId, String) = (row.id(Fleet::WIDTH)?, row.text(Fleet::WIDTH + 1)?);
        let is_limited = row.bool(Fleet::WIDTH + 2)?;
        budgeted.extend(row.bool(Fleet::WIDTH + 3)?.then_some(user));
        let fleet = Fleet::read_from(&mut row, 0)?;
        Arc::make_mut(found.usable.entry(user).or_default()).insert(fleet.id);
        found.owners.entry(fleet.project_id).or_insert(owner);
        if is_limited {
            found.limited.insert(user);
        }
        if found.fleets.last().is_none_or(|last| last.id != fleet.id) {
            found.fleets.push(fleet);
        }
    }
    if !found.limited.is_empty() {
        let limited: Vec<ProjectId> = found.limited.iter().copied().collect();
        found.quotas = quotas::list(db, &limited).await?.into_iter().map(|named| named.quota).collect();
    }
    if !budgeted.is_empty() {
        let budgeted: Vec<ProjectId> = budgeted.into_iter().collect();
        found.budgets =
            budgets::list(db, &budgeted, now).await?.into_iter().map(|named| named.budget).collect();
    }
    if projects.len() > 1 {
        found.usage = usage::of_projects(db, projects, now).await?;
    }
    Ok(found)
}

/// Blocks that jobs of any project occupy on the instances.
async fn load_holds(db: &Db, instances: &[Instance]) -> Result<Vec<BlockHold>, DbError> {
    let used = instances.iter().filter(|instance| instance.busy_blocks > 0).map(|instance| instance.id);
    let used: Vec<InstanceId> = used.collect();
    if used.is_empty() {
        return Ok(Vec::new());
    }
    read_holds(&db.query(HELD_ON.as_str(), vec![Val::list(used)]).await?)
}

fn read_holds(rows: &[Row]) -> Result<Vec<BlockHold>, DbError> {
    let holds = rows.iter().map(|row| {
        Ok(BlockHold {
            instance: row.id(0)?,
            job: row.uuid(1)?,
            blocks: row.int(2)?,
            until: row.opt_int(3)?,
            is_preempted: row.bool(4)?,
        })
    });
    holds.collect()
}

/// One node of a replica and its assignment.
pub struct NodeAssignment<'a> {
    pub held: LeaseKey,
    pub job: &'a Job,
    pub seat: SeatTarget<'a>,
    pub resources: HeldResources,
    /// Of the instance, as it was read.
    pub promise_num: i64,
    pub now: Timestamp,
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
    /// True if the project of the replica has quotas.
    pub has_quotas: bool,
}

/// Assigns all nodes of a replica, or none: each row under its own lease, each instance only if it has free blocks,
/// each new one only if the fleet's limit permits it, all only within the quotas of the project. `wakes` wake the jobs that waited behind the replica; their results
/// are the rows of the outcome.
pub async fn place_replica(
    db: &Db,
    into: &TargetFleet,
    seated: Vec<NodeAssignment<'_>>,
    wakes: Vec<Change>,
) -> Result<WriteOutcome, DbError> {
    let Some(first) = seated.first() else { return Ok(WriteOutcome::Stale { at: None }) };
    let (run, fleet) = (first.job.run_id, into.fleet);
    let mut unit = Unit::apply("jobs", first.held, first.seat.due_in_us(), columns(fleet, first));
    for other in &seated[1..] {
        let mut set = Unit::unlocked(other.seat.due_in_us());
        set.extend(columns(fleet, other));
        unit = unit.and([guarded_update("jobs", other.held, set)]);
    }
    let makes = seated.iter().any(|one| matches!(one.seat, SeatTarget::New { .. }));
    let project = first.job.project_id;
    if makes {
        unit = unit.expect_one(HOLD_FLEET.as_str(), params![fleet, project, into.has_quotas]);
    }
    let held: Vec<HeldResources> = seated.iter().map(|one| one.resources.clone()).collect();
    let mut reported_last = Vec::new();
    for NodeAssignment { held, job, seat, promise_num, .. } in seated {
        match seat {
            SeatTarget::There { seat, event } => {
                if let NodePlacement::Existing { instance, blocks, .. } = seat {
                    let since = job.queued_at.unwrap_or(job.submitted_at);
                    let place = params![project, job.priority, since, into.has_quotas];
                    let taken = [params![*instance, *blocks, promise_num], place].concat();
                    unit = unit.expect_one(TAKE_BLOCKS.as_str(), taken);
                }
                reported_last.extend(event_rows(db, held, job.project_id, &event, &job.job_name)?);
            }
            SeatTarget::New { instance, created, blocks, .. } => {
                reported_last.extend(event_rows(db, held, instance.project_id, &created, &instance.name)?);
                let on = instance.id;
                unit = unit.and([instances::insert_for_job(*instance, job.id, blocks)]);
                unit = unit.expect_one(SIT_ON_NEW.as_str(), params![job.id, on]);
            }
        }
    }
    if let (true, Some(max)) = (makes, into.nodes_max) {
        unit = unit.expect_one(WITHIN_MAX.as_str(), params![fleet, i64::from(max)]);
    }
    if into.has_quotas {
        unit = quotas::require_within(unit, project, run, &held);
    }
    unit = if into.chooses {
        unit.exec(CHOOSE_FLEET.as_str(), params![run, fleet])
    } else {
        unit.and([crate::runs::mark_due_soon(run)])
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

fn columns(fleet: FleetId, assigned: &NodeAssignment<'_>) -> Values {
    let mut set = quotas::held_columns(&assigned.resources, assigned.now);
    set.extend([
        ("fleet_id", fleet.into()),
        ("shortfalls", Val::Null),
        ("wait_class", Val::Null),
        ("parked", false.into()),
    ]);
    set.extend(preemption::placed_columns());
    match &assigned.seat {
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
