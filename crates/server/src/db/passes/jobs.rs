//! What the pipelines of placed jobs read and write.

use windlass_engine::{Held, Lease};
use windlass_model::{event::Event, instance, job};

use super::told;
use crate::{
    db::{
        Db, DbError, Unit, Val, Values, Written, instances::Instance, jobs::Job, record::statements,
        runs::Run,
    },
    params,
};

statements! {
    LOAD = "SELECT {} FROM jobs j WHERE j.id = $1 AND j.lock_token = $2", Job::columns("j");
    INSTANCE = "SELECT {} FROM instances i WHERE i.id = $1", Instance::columns("i");
    RUN = "SELECT {} FROM runs r WHERE r.id = $1", Run::columns("r");
    /// A replica is resubmitted as a whole, so its generation has one number; one that is over already counts.
    SIBLINGS = "SELECT j.job_num, j.running_at, i.hostname, i.provisioning FROM jobs j \
                LEFT JOIN instances i ON i.id = j.instance_id WHERE j.run_id = $1 \
                AND j.replica_num = $2 AND j.submission_num = $3 AND j.id <> $4 ORDER BY j.job_num";
    OTHER_JOBS = "SELECT count(*) FROM jobs WHERE instance_id = $1 AND id <> $2 AND NOT finished";
    /// The blocks go back in the transaction that makes the job final, so they are counted once.
    FREE_BLOCKS = "UPDATE instances SET busy_blocks = busy_blocks - $2, due_at = NULL, \
                   idle_since = CASE WHEN busy_blocks = $2 THEN now_us() ELSE idle_since END WHERE id = $1";
    /// Nodes wait for each other: one that came further makes the others look.
    POKE_SIBLINGS = "UPDATE jobs SET due_at = NULL WHERE run_id = $1 AND replica_num = $2 AND submission_num = $3 \
                     AND id <> $4 AND NOT finished AND status IN ('provisioning', 'pulling')";
    POKE_RUN = "UPDATE runs SET due_at = NULL WHERE id = $1 AND NOT finished";
    /// Room was made: the first in line look again at once, the rest when their time comes.
    POKE_WAITING = "UPDATE jobs SET due_at = NULL WHERE id IN (SELECT j.id FROM jobs j \
                    WHERE j.project_id = $1 AND NOT j.finished AND j.status = 'submitted' \
                    ORDER BY j.priority DESC, j.submitted_at LIMIT 32)";
}

/// Another job of the same generation of the replica.
#[derive(Clone, Debug)]
pub struct Sibling {
    pub job_num: i64,
    /// Of its instance, where that has come so far.
    pub hostname: Option<String>,
    pub machine: Option<String>,
    /// It runs, or did.
    pub ran: bool,
}

#[derive(Clone, Debug)]
pub struct Loaded {
    pub job: Job,
    pub run: Run,
    pub instance: Option<Instance>,
    pub siblings: Vec<Sibling>,
}

pub async fn load(db: &Db, lease: &Lease) -> Result<Option<Loaded>, DbError> {
    let Some(row) = db.query_opt(LOAD.as_str(), params![lease.id, lease.token]).await? else {
        return Ok(None);
    };
    let job = Job::read(&row)?;
    let Some(run) = db.query_opt(RUN.as_str(), params![job.run_id]).await? else { return Ok(None) };
    let run = Run::read(&run)?;
    let instance = match job.instance_id {
        Some(id) => {
            db.query_opt(INSTANCE.as_str(), params![id]).await?.as_ref().map(Instance::read).transpose()?
        }
        None => None,
    };
    let siblings =
        db.query(SIBLINGS.as_str(), params![job.run_id, job.replica_num, job.submission_num, job.id]).await?;
    let siblings = siblings.iter().map(|row| {
        Ok(Sibling {
            job_num: row.int(0)?,
            ran: row.opt_int(1)?.is_some(),
            hostname: row.opt_text(2)?,
            machine: row.opt_text(3)?,
        })
    });
    Ok(Some(Loaded { siblings: siblings.collect::<Result<_, DbError>>()?, job, run, instance }))
}

/// Other jobs on the instance that are not final.
pub async fn others_on(db: &Db, job: &Job) -> Result<i64, DbError> {
    let Some(instance) = job.instance_id else { return Ok(0) };
    db.query(OTHER_JOBS.as_str(), params![instance, job.id]).await?.first().map_or(Ok(0), |row| row.int(0))
}

/// One pass over a job that goes on, or turns terminating.
pub struct Moved {
    pub set: Values,
    pub event: Option<Event>,
    pub due_in_us: Option<i64>,
    /// Other nodes of its replica wait for what it becomes.
    pub pokes_siblings: bool,
}

pub async fn apply(db: &Db, held: Held, job: &Job, moved: Moved) -> Result<Written, DbError> {
    let mut unit = Unit::apply("jobs", held, moved.due_in_us, moved.set);
    if let Some(event) = &moved.event {
        // What the run makes of it is decided by the run's pipeline; it only has to look.
        unit = unit.exec(POKE_RUN.as_str(), params![job.run_id]);
        if moved.pokes_siblings {
            let generation = params![job.run_id, job.replica_num, job.submission_num, job.id];
            unit = unit.exec(POKE_SIBLINGS.as_str(), generation);
        }
        unit = unit.and(told(db, held, job.project_id, event, &job.job_name)?);
    }
    db.write(unit).await
}

/// The columns of an ending, for a job that turns terminating.
pub fn ending(ending: &job::Ending) -> Values {
    vec![
        ("status", job::Status::Terminating.into()),
        ("termination_reason", ending.reason().as_str().into()),
        ("termination_detail", ending.detail().map(|d| d.as_str()).into()),
        ("termination_message", ending.said().into()),
        ("exit_status", ending.exit_status().into()),
        ("terminating_at", Val::Now),
    ]
}

/// The end: the final status, the blocks given back and the event, in one transaction.
pub struct End<'a> {
    pub status: job::Status,
    pub event: &'a Event,
    pub host_given_up: bool,
    pub frees: bool,
    /// As it was in the end: an abort may have hurried a stop.
    pub ending: &'a job::Ending,
}

pub async fn end(db: &Db, held: Held, job: &Job, end: End<'_>) -> Result<Written, DbError> {
    let set = vec![
        ("status", end.status.into()),
        ("finished", true.into()),
        ("finished_at", Val::Now),
        ("host_given_up", end.host_given_up.into()),
        ("termination_reason", end.ending.reason().as_str().into()),
        ("status_message", Val::Null),
        // Nobody needs them after the end.
        ("secrets_sealed", Val::Null),
    ];
    let mut unit = Unit::apply("jobs", held, None, set);
    if end.frees
        && let Some(instance) = job.instance_id
    {
        unit = unit.exec(FREE_BLOCKS.as_str(), params![instance, job.blocks]);
        unit = unit.exec(POKE_WAITING.as_str(), params![job.project_id]);
    }
    unit = unit.exec(POKE_RUN.as_str(), params![job.run_id]);
    unit = unit.and(told(db, held, job.project_id, end.event, &job.job_name)?);
    db.write(unit).await
}

impl Loaded {
    /// Whether a host takes jobs at all.
    pub fn instance_status(&self) -> Option<instance::Status> {
        self.instance.as_ref().map(|i| i.status)
    }
}
