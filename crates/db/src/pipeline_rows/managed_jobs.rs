//! Reads and writes of the pipeline of managed jobs, and the counting and granting of slots.

use std::collections::BTreeMap;

use uuid::Uuid;
use windlass_engine::Lease;
use windlass_model::{
    decide::managed_jobs::slots::{SlotLimits, SlotRequest, SlotUsage},
    event::{Entity, Event},
    id::{ManagedJobId, ProjectId, RunId, UserId},
    managed_job::{ScheduleState, Status},
};

use windlass_planted_bugs::{Bug, is_planted};

use crate::{
    Db, DbError, Unit, Val, Values, WriteOutcome,
    events::{self, EventContext, EventTarget},
    instances::Instance,
    jobs::{self, Job},
    managed_jobs::{self, ManagedJob, Task},
    params,
    record::statements,
    runs::Run,
};

statements! {
    LOAD = "SELECT {}, u.name, u.ssh_public_key, p.name, p.default_image FROM managed_jobs m JOIN users u ON u.id = m.user_id \
            JOIN projects p ON p.id = m.project_id JOIN managed_job_tasks t ON t.job_id = m.id \
            WHERE m.id = $1 AND m.lock_token = $2 ORDER BY t.task", managed_jobs::columns();
    /// Including deleted runs: the end of a hidden attempt still counts.
    ATTEMPTS = "SELECT {} FROM runs r WHERE r.managed_job_id = $1 AND r.name IN \
                (SELECT value FROM json_each(CAST($2 AS TEXT)))", Run::columns("r");
    MACHINES = "SELECT {} FROM instances i WHERE i.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))",
               Instance::columns("i");
    WRITE_TASK = "UPDATE managed_job_tasks SET status = $3, schedule = $4, record = $5, wants_slot = $6 \
                  WHERE job_id = $1 AND task = $2";
    TAKE_GRANT = "UPDATE managed_job_tasks SET granted = FALSE WHERE job_id = $1 AND task = $2 AND granted";
    /// A job that is alive counts once, and so does one that is about to be.
    IN_USE = "SELECT (SELECT count(*) FROM managed_job_tasks t WHERE t.schedule = 'LAUNCHING' OR t.granted), \
              (SELECT count(*) FROM managed_jobs m WHERE m.claimed AND NOT m.finished) \
              + (SELECT count(DISTINCT t.job_id) FROM managed_job_tasks t JOIN managed_jobs m ON m.id = t.job_id \
              WHERE t.granted AND NOT m.claimed)";
    WAITING = "SELECT m.number, t.task, m.priority, m.claimed, m.id, m.project_id, p.usage_weight FROM managed_job_tasks t \
               JOIN managed_jobs m ON m.id = t.job_id JOIN projects p ON p.id = m.project_id WHERE t.wants_slot AND NOT t.granted AND NOT m.finished \
               AND m.cancel_asked_at IS NULL ORDER BY m.priority DESC, m.number, t.task LIMIT $1";
    /// As above, but only tasks that need just a launch slot: a task at the head of the queue that waits for both slots
    /// never blocks them.
    WAITING_ALIVE = "SELECT m.number, t.task, m.priority, m.claimed, m.id, m.project_id, p.usage_weight FROM managed_job_tasks t \
                     JOIN managed_jobs m ON m.id = t.job_id JOIN projects p ON p.id = m.project_id WHERE t.wants_slot AND NOT t.granted AND NOT m.finished \
                     AND m.claimed AND m.cancel_asked_at IS NULL ORDER BY m.priority DESC, m.number, t.task LIMIT $1";
    /// As `WAITING`, the first of each project.
    WAITING_SHARED = "SELECT w.number, w.task, w.priority, w.claimed, w.id, w.project_id, p.usage_weight FROM \
                      (SELECT m.number, t.task, m.priority, m.claimed, m.id, m.project_id, row_number() OVER \
                      (PARTITION BY m.project_id ORDER BY m.priority DESC, m.number, t.task) AS place FROM managed_job_tasks t \
                      JOIN managed_jobs m ON m.id = t.job_id WHERE t.wants_slot AND NOT t.granted AND NOT m.finished \
                      AND m.cancel_asked_at IS NULL) w JOIN projects p ON p.id = w.project_id WHERE w.place <= $1 \
                      ORDER BY w.priority DESC, w.number, w.task";
    ANY_WAITING = "SELECT EXISTS (SELECT 1 FROM managed_job_tasks t JOIN managed_jobs m ON m.id = t.job_id \
                   WHERE t.wants_slot AND NOT t.granted AND NOT m.finished AND m.cancel_asked_at IS NULL)";
    HELD_BY_PROJECT = "SELECT m.project_id, count(*) FROM managed_job_tasks t JOIN managed_jobs m ON m.id = t.job_id \
                       WHERE t.schedule = 'LAUNCHING' OR t.granted GROUP BY m.project_id";
    SOME_PROJECTS = "SELECT count(*) FROM (SELECT 1 FROM projects p WHERE NOT p.deleted LIMIT 2) found";
    HOLD_SLOTS = "UPDATE managed_job_slots SET last_number = last_number WHERE id = 1";
    /// Counted again here, while holding the row that every count holds: a limit holds over all replicas.
    GRANT = "UPDATE managed_job_tasks SET granted = TRUE WHERE job_id = $1 AND task = $2 AND wants_slot \
             AND NOT granted AND (SELECT count(*) FROM managed_job_tasks t WHERE t.schedule = 'LAUNCHING' \
             OR t.granted) < $3 AND (EXISTS (SELECT 1 FROM managed_jobs m WHERE m.id = $1 AND m.claimed) \
             OR EXISTS (SELECT 1 FROM managed_job_tasks t WHERE t.job_id = $1 AND t.granted) \
             OR (SELECT count(*) FROM managed_jobs m WHERE m.claimed AND NOT m.finished) \
             + (SELECT count(DISTINCT t.job_id) FROM managed_job_tasks t JOIN managed_jobs m ON m.id = t.job_id \
             WHERE t.granted AND NOT m.claimed) < $4)";
    MARK_DUE = "UPDATE managed_jobs SET due_at = NULL WHERE id = $1 AND NOT finished";
    /// The nodes of a task are free: jobs that wait for nodes and may use the instance become due.
    MARK_DUE_AFTER_BACKOFF = "UPDATE managed_jobs SET due_at = NULL WHERE project_id IN (SELECT u.project_id \
                    FROM instances i JOIN usable_fleets u ON u.fleet_id = i.fleet_id WHERE i.id = $1) AND schedule = 'ALIVE_BACKOFF' \
                    AND NOT finished";
    NEWEST_IDLE = "SELECT max(i.idle_since) FROM instances i WHERE i.fleet_id IN (SELECT u.fleet_id \
                   FROM usable_fleets u WHERE u.project_id = $1) AND NOT i.finished AND i.status = 'idle' AND NOT i.unreachable";
}

/// The job with its tasks, user and project.
#[derive(Clone, Debug)]
pub struct ManagedJobInputs {
    pub job: ManagedJob,
    pub tasks: Vec<Task>,
    pub user: String,
    pub ssh_key: Option<String>,
    pub project: String,
    pub project_image: Option<String>,
}

pub async fn load(db: &Db, lease: &Lease) -> Result<Option<ManagedJobInputs>, DbError> {
    let rows = db.query(LOAD.as_str(), params![lease.id, lease.token]).await?;
    let at = managed_jobs::WIDTH;
    let mut found = managed_jobs::group_rows(rows, |row| {
        Ok((row.text(at)?, row.opt_text(at + 1)?, row.text(at + 2)?, row.opt_text(at + 3)?))
    })?;
    let loaded = found.pop().map(|(job, tasks, (user, ssh_key, project, project_image))| ManagedJobInputs {
        job,
        tasks,
        user,
        ssh_key,
        project,
        project_image,
    });
    Ok(loaded)
}

/// Run of an attempt, its newest submissions, and their instances.
#[derive(Clone, Debug)]
pub struct AttemptRun {
    pub run: Run,
    pub jobs: Vec<(Job, Option<Instance>)>,
}

/// Existing runs among these.
pub async fn attempts(db: &Db, job: ManagedJobId, names: &[String]) -> Result<Vec<AttemptRun>, DbError> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let rows = db.query(ATTEMPTS.as_str(), vec![job.into(), Val::list(names)]).await?;
    let runs: Vec<Run> = rows.into_iter().map(Run::read).collect::<Result<_, _>>()?;
    let ids: Vec<RunId> = runs.iter().map(|run| run.id).collect();
    let mut jobs = if ids.is_empty() { Vec::new() } else { jobs::list_by_runs(db, &ids, Some(1)).await? };
    jobs.sort_by_key(|job| (job.run_id, job.job_num));
    let places: Vec<_> = jobs.iter().filter_map(|job| job.instance_id).collect();
    let machines = if places.is_empty() {
        Vec::new()
    } else {
        db.query(MACHINES.as_str(), vec![Val::list(places)]).await?
    };
    let machines: Vec<Instance> = machines.into_iter().map(Instance::read).collect::<Result<_, _>>()?;
    let machine = |job: &Job| machines.iter().find(|one| Some(one.id) == job.instance_id).cloned();
    let each = runs.into_iter().map(|run| {
        let own = jobs.iter().filter(|job| job.run_id == run.id);
        let jobs = own.map(|job| (job.clone(), machine(job))).collect();
        AttemptRun { run, jobs }
    });
    Ok(each.collect())
}

/// Time when an instance of the project last became idle.
pub async fn newest_idle(db: &Db, job: &ManagedJob) -> Result<Option<i64>, DbError> {
    let row = db.query_opt(NEWEST_IDLE.as_str(), params![job.project_id]).await?;
    row.map_or(Ok(None), |row| row.opt_int(0))
}

/// New columns of a task.
pub struct TaskUpdate {
    pub task: i64,
    pub status: Status,
    pub schedule: ScheduleState,
    pub record: String,
    pub wants_slot: bool,
    /// True if the granted slot is used, or no longer needed.
    pub takes_grant: bool,
}

pub struct StopRun {
    pub run: RunId,
    pub abort: bool,
    pub by: UserId,
}

/// Everything that one pass writes.
pub struct ManagedJobUpdate {
    pub set: Values,
    pub due_in_us: Option<i64>,
    pub tasks: Vec<TaskUpdate>,
    pub stops: Vec<StopRun>,
    /// New runs with all their rows.
    pub runs: Vec<Unit>,
    pub events: Vec<Event>,
}

pub async fn apply(
    db: &Db,
    lease: &Lease,
    job: &ManagedJob,
    outcome: ManagedJobUpdate,
) -> Result<WriteOutcome, DbError> {
    let mut unit = Unit::apply("managed_jobs", lease.key(), outcome.due_in_us, outcome.set);
    for task in outcome.tasks {
        if task.takes_grant {
            unit = unit.exec(TAKE_GRANT.as_str(), params![job.id, task.task]);
        }
        let status: Val = task.status.into();
        let schedule: Val = task.schedule.into();
        unit = unit.expect_one(
            WRITE_TASK.as_str(),
            vec![
                job.id.into(),
                task.task.into(),
                status,
                schedule,
                task.record.into(),
                task.wants_slot.into(),
            ],
        );
    }
    for stop in outcome.stops {
        unit = unit.and([crate::runs::request_stop_if_active(stop.run, stop.abort, stop.by)]);
    }
    for run in outcome.runs {
        unit = unit.and(run.changes);
    }
    let target = EventTarget { entity: Entity::ManagedJob, id: job.id.0, name: &job.name };
    for event in &outcome.events {
        let place = EventContext {
            project: Some(job.project_id),
            user: None,
            lock_token: Some(lease.token),
            targets: &[target],
        };
        unit = unit.and(events::append(db, event, &place)?);
    }
    db.write(unit).await
}

/// Slots in use.
pub async fn slots_in_use(db: &Db) -> Result<SlotUsage, DbError> {
    let row = db.query_opt(IN_USE.as_str(), vec![]).await?;
    let row = row.ok_or(DbError::Shape { column: 0, want: "slots in use", have: "nothing" })?;
    let number = |n: i64| u32::try_from(n).unwrap_or(u32::MAX);
    Ok(SlotUsage { launching: number(row.int(0)?), alive: number(row.int(1)?) })
}

/// Returns whether tasks wait for a slot.
pub async fn has_waiting_tasks(db: &Db) -> Result<bool, DbError> {
    let row = db.query_opt(ANY_WAITING.as_str(), vec![]).await?;
    row.map_or(Ok(false), |row| row.bool(0))
}

/// Tasks that wait for a slot, and who holds slots.
pub struct SlotQueue {
    pub waiting: Vec<(SlotRequest, Uuid)>,
    pub in_use: SlotUsage,
    /// Launch slots of each project, if there are several projects.
    pub held: Option<BTreeMap<ProjectId, u32>>,
}

/// The queue for slots: as many tasks (of each project, if there are several) as could be granted at all, and the first
/// of those that need only a launch slot.
pub async fn slot_queue(db: &Db, limits: SlotLimits) -> Result<SlotQueue, DbError> {
    let number = |n: i64| u32::try_from(n).unwrap_or(u32::MAX);
    let in_use = slots_in_use(db).await?;
    let free = limits.max_launching.saturating_sub(in_use.launching);
    let mut queue = SlotQueue { waiting: Vec::new(), in_use, held: None };
    if free == 0 {
        return Ok(queue);
    }
    let projects = db.query_opt(SOME_PROJECTS.as_str(), vec![]).await?;
    let is_shared = projects.map(|row| row.int(0)).transpose()?.is_some_and(|count| count > 1);
    if is_shared {
        let rows = db.query(HELD_BY_PROJECT.as_str(), vec![]).await?;
        let held = rows.iter().map(|row| Ok((row.id(0)?, number(row.int(1)?))));
        queue.held = Some(held.collect::<Result<_, DbError>>()?);
    }
    let first = if is_shared { &*WAITING_SHARED } else { &*WAITING };
    for text in [first, &*WAITING_ALIVE] {
        for row in db.query(text.as_str(), params![free]).await? {
            let waiting = SlotRequest {
                job: u64::try_from(row.int(0)?).unwrap_or_default(),
                task: number(row.int(1)?),
                priority: i32::try_from(row.int(2)?).unwrap_or_default(),
                has_alive_slot: row.bool(3)?,
                project: row.id(5)?,
                weight: number(row.int(6)?),
            };
            let known =
                |(other, _): &(SlotRequest, Uuid)| (other.job, other.task) == (waiting.job, waiting.task);
            if !queue.waiting.iter().any(known) {
                queue.waiting.push((waiting, row.uuid(4)?));
            }
        }
    }
    Ok(queue)
}

/// Grants slots to these, as far as the limits still permit it, and makes their jobs due.
pub async fn grant(db: &Db, chosen: &[(SlotRequest, Uuid)], limits: SlotLimits) -> Result<(), DbError> {
    let mut unit = Unit::new().expect_one(HOLD_SLOTS.as_str(), vec![]);
    let limits = match is_planted(Bug::SlotGrantWithoutRecount) {
        true => SlotLimits { max_launching: u32::MAX, max_alive: u32::MAX },
        false => limits,
    };
    for (waiting, job) in chosen {
        let (launching, alive) = (i64::from(limits.max_launching), i64::from(limits.max_alive));
        unit = unit
            .exec(GRANT.as_str(), params![*job, i64::from(waiting.task), launching, alive])
            .exec(MARK_DUE.as_str(), params![*job]);
    }
    db.write(unit).await?.done().map(drop)
}

/// For the unit that changes a run: makes the managed job of which it is an attempt due at once.
pub(crate) fn mark_due(job: ManagedJobId) -> crate::Change {
    crate::Change::Exec { sql: MARK_DUE.as_str().into(), params: params![job], expect: crate::Expect::Any }
}

/// For the unit that frees nodes: makes the jobs due that wait for nodes.
pub(crate) fn mark_backoff_due(instance: windlass_model::id::InstanceId) -> crate::Change {
    crate::Change::Exec {
        sql: MARK_DUE_AFTER_BACKOFF.as_str().into(),
        params: params![instance],
        expect: crate::Expect::Any,
    }
}
