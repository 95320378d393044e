//! Reads and writes of the pipelines of placed jobs.

use windlass_engine::{Lease, LeaseKey};
use windlass_model::{
    event::Event,
    id::{InstanceId, ManagedJobId},
    instance, job,
    time::{Span, Timestamp},
};

use super::event_rows;
use crate::{
    Change, Db, DbError, Unit, Val, Values, WriteOutcome, instances::Instance, jobs::Job, params,
    record::statements, runs::Run, usage,
};

statements! {
    /// Everything that a pass needs, with one statement: jobs spend most of their time waiting for the database. Added
    /// columns come after the records.
    LOAD = "SELECT {}, {}, {}, f.spec, p.name, p.ssh_public_key, \
            (SELECT count(*) FROM jobs o WHERE o.instance_id = j.instance_id AND o.id <> j.id AND NOT o.finished), \
            EXISTS (SELECT 1 FROM jobs s WHERE s.run_id = j.run_id AND s.replica_num = j.replica_num AND s.id <> j.id), \
            EXISTS (SELECT 1 FROM volume_holds h WHERE h.job_id = j.id) \
            OR EXISTS (SELECT 1 FROM volume_attachments a WHERE a.ends_for = j.id), \
            EXISTS (SELECT 1 FROM proxy_seats s JOIN proxies x ON x.id = s.proxy_id \
            WHERE s.job_id = j.id AND x.seen_at > now_us() - 15000000), \
            (coalesce(i.project_id = j.project_id, TRUE) OR (f.project_id = i.project_id AND EXISTS \
            (SELECT 1 FROM usable_fleets u WHERE u.fleet_id = f.id AND u.project_id = j.project_id))) \
            AND NOT EXISTS (SELECT 1 FROM volume_holds h JOIN volumes v ON v.id = h.volume_id WHERE h.job_id = j.id \
            AND v.project_id <> j.project_id AND NOT EXISTS (SELECT 1 FROM usable_volumes u WHERE u.volume_id = v.id \
            AND u.project_id = j.project_id)) \
            FROM jobs j JOIN runs r ON r.id = j.run_id JOIN projects p ON p.id = j.project_id \
            LEFT JOIN instances i ON i.id = j.instance_id \
            LEFT JOIN fleets f ON f.id = i.fleet_id WHERE j.id = $1 AND j.lock_token = $2",
           Job::columns("j"), Run::columns("r"), Instance::columns("i");
    /// A replica is resubmitted as a whole, so all jobs of a generation have one number; finished ones count too.
    SIBLINGS = "SELECT j.job_num, j.running_at, i.hostname, i.provisioning, j.gate FROM jobs j \
                LEFT JOIN instances i ON i.id = j.instance_id WHERE j.run_id = $1 \
                AND j.replica_num = $2 AND j.submission_num = $3 AND j.id <> $4 ORDER BY j.job_num";
    /// The blocks are released in the transaction that makes the job final, so they are counted once. The last blocks
    /// make the instance idle, which its pipeline records, unless another job follows within a moment.
    FREE_BLOCKS = "UPDATE instances SET busy_blocks = busy_blocks - $2, \
                   due_at = CASE WHEN busy_blocks <> $2 THEN due_at WHEN lock_token IS NOT NULL THEN NULL \
                   WHEN due_at > now_us() + {IDLE_DELAY_US} THEN now_us() + {IDLE_DELAY_US} ELSE due_at END, \
                   idle_since = CASE WHEN busy_blocks = $2 THEN now_us() ELSE idle_since END WHERE id = $1 \
                   RETURNING due_at IS NULL OR busy_blocks = 0";
    /// Nodes wait for each other: the progress of one makes the others due.
    MARK_SIBLINGS_DUE = "UPDATE jobs SET due_at = NULL WHERE run_id = $1 AND replica_num = $2 AND submission_num = $3 \
                     AND id <> $4 AND NOT finished AND status IN ('provisioning', 'pulling')";
    /// As `POKE_SIBLINGS`, for prepared nodes.
    MARK_PREPARED_DUE = "UPDATE jobs SET due_at = NULL WHERE run_id = $1 AND replica_num = $2 AND submission_num = $3 \
                     AND id <> $4 AND status = 'running' AND gate = 'reached'";
    /// Tasks of a group reach each other by name: one that runs on another instance now makes the others due, to update
    /// their addresses.
    MARK_GROUP_DUE = "UPDATE jobs SET due_at = NULL WHERE status = 'running' AND id <> $2 AND run_id IN \
                  (SELECT r.id FROM runs r WHERE r.managed_job_id = $1 AND NOT r.finished)";
    GROUP = "SELECT r.name, j.job_num, i.hostname, i.provisioning FROM runs r JOIN jobs j ON j.run_id = r.id \
             JOIN instances i ON i.id = j.instance_id WHERE r.managed_job_id = $1 AND NOT r.finished AND NOT j.finished \
             ORDER BY r.name, j.job_num";
    GROUP_PLAN = "SELECT plan FROM managed_jobs WHERE id = $1";
    CANCEL_GRACE = "SELECT cancel_graceful_us FROM managed_jobs WHERE id = $1 AND cancel_asked_at IS NOT NULL";
    /// Capacity was freed: the first jobs of the first classes of each project become due at once, the others at their
    /// due times. Placement decides between projects. One that is placed wakes the next of its class. The oldest job of
    /// each project is always among them: it may be overdue.
    MARK_WAITING_DUE = "UPDATE jobs SET due_at = NULL WHERE id IN (SELECT w.id FROM (SELECT j.id, \
                    row_number() OVER (PARTITION BY j.project_id ORDER BY j.priority DESC, coalesce(j.queued_at, j.submitted_at)) AS place, \
                    row_number() OVER (PARTITION BY j.project_id ORDER BY coalesce(j.queued_at, j.submitted_at)) AS by_age FROM jobs j \
                    WHERE j.project_id IN (SELECT u.project_id FROM instances i JOIN usable_fleets u \
                    ON u.fleet_id = i.fleet_id WHERE i.id = $1) AND NOT j.finished AND j.status = 'submitted' AND NOT j.parked \
                    AND j.instance_id IS NULL) w WHERE w.place <= $2 OR w.by_age = 1) RETURNING id";
}

/// Time after which an instance whose last job has ended is recorded as idle. In a full house the next job takes its place
/// before.
const IDLE_DELAY_US: i64 = 250_000;
/// Number of jobs made due in addition to the number of freed blocks: the first ones may be too large for them.
const EXTRA_DUE_JOBS: i64 = 3;

/// Another job of the same generation of the replica.
#[derive(Clone, Debug)]
pub struct Sibling {
    pub job_num: i64,
    /// Address of its instance, if known.
    pub hostname: Option<String>,
    pub machine: Option<String>,
    /// True if it runs, or did.
    pub ran: bool,
    /// True if it is prepared to start with the others.
    pub at_gate: bool,
}

/// Data of the project that a job needs.
#[derive(Clone, Debug)]
pub struct JobProject {
    pub name: String,
    pub ssh_public_key: Option<String>,
}

#[derive(Clone, Debug)]
pub struct JobInputs {
    pub job: Job,
    pub run: Run,
    pub project: JobProject,
    pub instance: Option<Instance>,
    /// Specification of the instance's fleet, JSON.
    pub fleet_spec: Option<String>,
    /// Number of other jobs on the instance that are not final.
    pub others_there: i64,
    pub siblings: Vec<Sibling>,
    pub has_volumes: bool,
    /// True if requests may still be in transit to it.
    pub in_use: bool,
    /// True if its project may use the instance and the volumes that the job holds.
    pub may_use_instance: bool,
}

pub async fn load(db: &Db, lease: &Lease) -> Result<Option<JobInputs>, DbError> {
    let Some(mut row) = db.query_opt(LOAD.as_str(), params![lease.id, lease.token]).await? else {
        return Ok(None);
    };
    let job = Job::read_from(&mut row, 0)?;
    let run = Run::read_from(&mut row, Job::WIDTH)?;
    let at = Job::WIDTH + Run::WIDTH;
    let instance = job.instance_id.map(|_| Instance::read_from(&mut row, at)).transpose()?;
    let at = at + Instance::WIDTH;
    let siblings = if row.bool(at + 4)? { siblings(db, &job).await? } else { Vec::new() };
    Ok(Some(JobInputs {
        fleet_spec: row.opt_text(at)?,
        project: JobProject { name: row.text(at + 1)?, ssh_public_key: row.opt_text(at + 2)? },
        others_there: row.int(at + 3)?,
        has_volumes: row.bool(at + 5)?,
        in_use: row.bool(at + 6)?,
        may_use_instance: row.bool(at + 7)?,
        siblings,
        job,
        run,
        instance,
    }))
}

async fn siblings(db: &Db, job: &Job) -> Result<Vec<Sibling>, DbError> {
    let generation = params![job.run_id, job.replica_num, job.submission_num, job.id];
    let rows = db.query(SIBLINGS.as_str(), generation).await?;
    let each = rows.iter().map(|row| {
        Ok(Sibling {
            job_num: row.int(0)?,
            ran: row.opt_int(1)?.is_some(),
            hostname: row.opt_text(2)?,
            machine: row.opt_text(3)?,
            at_gate: row.opt_text(4)?.is_some(),
        })
    });
    each.collect()
}

/// An unfinished node of a managed job.
pub struct ManagedNode {
    pub run: String,
    pub node: i64,
    pub hostname: Option<String>,
    pub machine: Option<String>,
}

/// Grace period of the commands of a managed job, if its cancellation set one.
pub async fn cancel_grace(db: &Db, job: ManagedJobId) -> Result<Option<Span>, DbError> {
    let found = db.query_opt(CANCEL_GRACE.as_str(), params![job]).await?;
    Ok(found.map(|row| row.opt_int(0)).transpose()?.flatten().map(Span))
}

/// Plan of a managed job, and all its nodes that have an instance.
pub async fn managed_group(
    db: &Db,
    job: ManagedJobId,
) -> Result<Option<(String, Vec<ManagedNode>)>, DbError> {
    let Some(row) = db.query_opt(GROUP_PLAN.as_str(), params![job]).await? else { return Ok(None) };
    let rows = db.query(GROUP.as_str(), params![job]).await?;
    let members = rows.iter().map(|row| {
        Ok(ManagedNode {
            run: row.text(0)?,
            node: row.int(1)?,
            hostname: row.opt_text(2)?,
            machine: row.opt_text(3)?,
        })
    });
    Ok(Some((row.text(0)?, members.collect::<Result<_, DbError>>()?)))
}

/// Result of one pass over a job that continues, or becomes terminating.
#[derive(Default)]
pub struct JobUpdate {
    pub set: Values,
    /// One for each status to which it moved, in order.
    pub events: Vec<Event>,
    pub due_in_us: Option<i64>,
    /// True if other nodes of its replica wait for the new status.
    pub marks_siblings_due: bool,
    /// Managed job whose other tasks need the address of this one.
    pub marks_group_due: Option<ManagedJobId>,
    /// Statements that wake jobs that waited behind this one.
    pub wakes: Vec<Change>,
}

/// When the run of a job has work after a pass over the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunDue {
    Unchanged,
    /// Within half a second, unless a further change makes it due before.
    Soon,
    AtOnce,
}

impl JobUpdate {
    /// The run's pipeline decides what follows for the run; it only has to become due. To a run a pulling job counts as
    /// provisioned. Other nodes need to see the end of a job.
    pub fn run_due(&self) -> RunDue {
        let Some(last) = self.events.last() else { return RunDue::Unchanged };
        let is = |status: job::Status| last.to == Some(status.as_str());
        if is(job::Status::Provisioning) || is(job::Status::Terminating) && !self.marks_siblings_due {
            RunDue::Soon
        } else if is(job::Status::Pulling) {
            RunDue::Unchanged
        } else {
            RunDue::AtOnce
        }
    }
}

pub async fn apply(db: &Db, held: LeaseKey, job: &Job, moved: JobUpdate) -> Result<WriteOutcome, DbError> {
    // The job became prepared to start with the other nodes in this pass.
    let reached_gate = job.gate.is_none() && moved.set.iter().any(|(column, _)| *column == "gate");
    let run_due = moved.run_due();
    let mut unit = Unit::apply("jobs", held, moved.due_in_us, moved.set);
    unit = unit.and(match run_due {
        RunDue::Unchanged => None,
        RunDue::Soon => Some(crate::runs::mark_due_soon(job.run_id)),
        RunDue::AtOnce => Some(crate::runs::mark_due(job.run_id)),
    });
    if moved.marks_siblings_due && !moved.events.is_empty() {
        let generation = params![job.run_id, job.replica_num, job.submission_num, job.id];
        unit = unit.exec(MARK_SIBLINGS_DUE.as_str(), generation);
    }
    unit = unit.and(moved.wakes);
    if let Some(group) = moved.marks_group_due {
        unit = unit.exec(MARK_GROUP_DUE.as_str(), params![group, job.id]);
    }
    if reached_gate {
        let generation = params![job.run_id, job.replica_num, job.submission_num, job.id];
        unit = unit.exec(MARK_PREPARED_DUE.as_str(), generation);
    }
    for event in &moved.events {
        unit = unit.and(event_rows(db, held, job.project_id, event, &job.job_name)?);
    }
    db.write(unit).await
}

/// Makes the first waiting jobs due that may use the instance, because it has free blocks; returns their ids.
pub fn mark_waiting_due(instance: InstanceId, count: i64) -> Change {
    Change::Query { sql: MARK_WAITING_DUE.as_str().into(), params: params![instance, count] }
}

/// Columns of an ending, for a job that becomes terminating.
pub fn ending_columns(ending: &job::Ending) -> Values {
    vec![
        ("status", job::Status::Terminating.into()),
        ("termination_reason", ending.reason().as_str().into()),
        ("termination_detail", ending.detail().map(|d| d.as_str()).into()),
        ("termination_message", ending.message().into()),
        ("exit_status", ending.exit_status().into()),
        ("terminating_at", Val::Now),
    ]
}

/// End of a job: the final status, the release of the blocks and the event, in one transaction.
pub struct JobEnd<'a> {
    pub status: job::Status,
    pub event: &'a Event,
    pub host_given_up: bool,
    pub frees: bool,
    /// As it was in the end: an abort may have replaced a stop.
    pub ending: &'a job::Ending,
    pub now: Timestamp,
}

/// Rows that have work after the end of a job, besides its run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MadeDue {
    pub instance: bool,
    pub waiting_jobs: bool,
}

/// Writes the end of a job, and returns what it made due.
pub async fn end(
    db: &Db,
    held: LeaseKey,
    job: &Job,
    end: JobEnd<'_>,
) -> Result<(WriteOutcome, MadeDue), DbError> {
    let set = vec![
        ("status", end.status.into()),
        ("finished", true.into()),
        ("finished_at", Val::Now),
        ("host_given_up", end.host_given_up.into()),
        ("termination_reason", end.ending.reason().as_str().into()),
        ("termination_message", end.ending.message().into()),
        ("exit_status", end.ending.exit_status().into()),
        ("status_message", Val::Null),
        // Not needed after the end.
        ("secrets_sealed", Val::Null),
    ];
    let mut unit = Unit::apply("jobs", held, None, set);
    if end.frees
        && let Some(instance) = job.instance_id
    {
        unit = unit.query(FREE_BLOCKS.as_str(), params![instance, job.blocks]);
        unit = unit.and([mark_waiting_due(instance, job.blocks + EXTRA_DUE_JOBS)]);
        unit = unit.and([super::managed_jobs::mark_backoff_due(instance)]);
    }
    unit = unit.and(job.preempted_for.map(super::preemption::mark_waiting_due));
    unit = unit.and(usage::add(job, end.now));
    unit = unit.and([crate::runs::mark_due(job.run_id)]);
    unit = unit.and(event_rows(db, held, job.project_id, end.event, &job.job_name)?);
    let written = db.write(unit).await?;
    let mut due = MadeDue { waiting_jobs: job.preempted_for.is_some(), ..MadeDue::default() };
    if let WriteOutcome::Done { rows, .. } = &written
        && let [freed, waiting, ..] = rows.as_slice()
    {
        due.instance = freed.first().is_some_and(|row| row.bool(0).unwrap_or(true));
        due.waiting_jobs |= !waiting.is_empty();
    }
    Ok((written, due))
}

impl JobInputs {
    /// Status of the job's instance.
    pub fn instance_status(&self) -> Option<instance::Status> {
        self.instance.as_ref().map(|i| i.status)
    }
}
