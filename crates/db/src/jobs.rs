//! Table `jobs`: one row per submission. A retry of a job is a new row with a new id.

use windlass_model::{
    id::{FleetId, InstanceId, ProjectId, RunId, SubmissionId},
    job::{Ending, Status},
    time::Timestamp,
};

use super::{
    Change, Db, DbError, Expect, Val,
    documents::JOB_PREEMPTION,
    pipeline_rows::{preemption::PreemptionNote, wait_classes},
    record::{record, statements},
    runs::DUE_SOON,
};
use crate::params;

record! {
    pub struct Job {
        pub id: SubmissionId,
        pub run_id: RunId,
        pub project_id: ProjectId,
        pub job_name: String,
        pub replica_num: i64,
        pub job_num: i64,
        pub submission_num: i64,
        pub deployment_num: i64,
        pub replica_group: Option<String>,
        pub status: Status,
        pub finished: bool,
        pub status_message: Option<String>,
        pub termination_reason: Option<String>,
        pub termination_message: Option<String>,
        pub termination_detail: Option<String>,
        pub exit_status: Option<i64>,
        pub end_asked: Option<String>,
        pub end_message: Option<String>,
        pub host_given_up: bool,
        /// JSON documents from here.
        pub job_spec: String,
        pub provisioning: Option<String>,
        pub runtime: Option<String>,
        pub connection_info: Option<String>,
        pub probes: Option<String>,
        pub pull_progress: Option<String>,
        pub shortfalls: Option<String>,
        pub instance_id: Option<InstanceId>,
        pub fleet_id: Option<FleetId>,
        pub instance_assigned: bool,
        pub blocks: i64,
        /// Time since which it holds its part of the instance, and that part.
        pub held_at: Option<Timestamp>,
        pub held_units: i64,
        pub held_gpus: i64,
        pub held_cpus: i64,
        pub held_price: i64,
        /// See `QueueRank`.
        pub priority: i64,
        /// Number of times that it was preempted before, and its place in the queue from then.
        pub preempted_before: i64,
        pub queued_at: Option<Timestamp>,
        /// Request of the scheduler to end it, the job for which it ends, and a `PreemptionNote`.
        pub preempted_at: Option<Timestamp>,
        pub preempted_for: Option<SubmissionId>,
        pub preemption: Option<String>,
        /// Time until which blocks are kept for it while it waits.
        pub promised_until: Option<Timestamp>,
        /// Class of waiting jobs that placement cannot tell apart, while it waits in one.
        pub wait_class: Option<String>,
        /// True if it waits behind another job of its class, which is evaluated for all of them.
        pub parked: bool,
        pub replica_registered: bool,
        pub volumes_detached_at: Option<Timestamp>,
        pub submitted_at: Timestamp,
        pub last_processed_at: Timestamp,
        pub provisioned_at: Option<Timestamp>,
        pub pulling_at: Option<Timestamp>,
        pub running_at: Option<Timestamp>,
        pub terminating_at: Option<Timestamp>,
        pub inactive_since: Option<Timestamp>,
        pub disconnected_at: Option<Timestamp>,
        pub seen_at: Option<Timestamp>,
        pub start_deadline_at: Option<Timestamp>,
        pub run_deadline_at: Option<Timestamp>,
        pub stop_deadline_at: Option<Timestamp>,
        pub remove_at: Option<Timestamp>,
        pub finished_at: Option<Timestamp>,
        pub logs_offset: i64,
        pub runner_offset: i64,
        pub tracking: Option<String>,
        pub gate: Option<String>,
        pub lock_epoch: i64,
    }
}

impl Job {
    /// Reason and message of its end, once known.
    pub fn ending(&self) -> Option<Ending> {
        let mut ending = Ending::new(self.termination_reason.as_deref()?.parse().ok()?);
        if let Some(code) = self.exit_status.and_then(|code| i32::try_from(code).ok()) {
            ending = ending.with_exit_status(code);
        }
        if let Some(detail) = self.termination_detail.as_deref().and_then(|word| word.parse().ok()) {
            ending = ending.with_detail(detail);
        }
        Some(match &self.termination_message {
            Some(message) => ending.with_message(message),
            None => ending,
        })
    }

    /// Rule, grace period and message of its preemption.
    pub fn preemption_note(&self) -> Result<Option<PreemptionNote>, DbError> {
        JOB_PREEMPTION.decode_opt(self.id, self.preemption.as_deref())
    }

    /// End that the run's pipeline or the scheduler requested.
    pub fn requested_end(&self) -> Result<Option<Ending>, DbError> {
        if let Some(ending) = self.end_asked() {
            return Ok(Some(ending));
        }
        if self.preempted_at.is_none() {
            return Ok(None);
        }
        let message = self.preemption_note()?.map_or_else(String::new, |note| note.message);
        Ok(Some(Ending::preempted().with_message(message)))
    }

    /// End that the run's pipeline requested.
    pub fn end_asked(&self) -> Option<Ending> {
        let ending = Ending::new(self.end_asked.as_deref()?.parse().ok()?);
        Some(match &self.end_message {
            Some(message) => ending.with_message(message),
            None => ending,
        })
    }
}

record! {
    pub struct NewJob {
        pub id: SubmissionId,
        pub run_id: RunId,
        pub project_id: ProjectId,
        pub job_name: String,
        pub replica_num: i64,
        pub job_num: i64,
        pub submission_num: i64,
        pub deployment_num: i64,
        pub replica_group: Option<String>,
        pub status: Status,
        pub job_spec: String,
        pub secrets_sealed: Option<Vec<u8>>,
        pub priority: i64,
        pub preemptible: String,
        pub preempted_before: i64,
        pub queued_at: Option<Timestamp>,
    }
}

statements! {
    FIND = "SELECT {} FROM jobs j WHERE j.id = $1", Job::columns("j");
    /// Submission numbers have no gaps (R6), so the newest `$2` of a job are those above its maximum less `$2`; the
    /// maximum is one lookup in the unique index.
    OF_RUNS = "SELECT {} FROM jobs j WHERE j.run_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) \
               AND j.submission_num > (SELECT max(m.submission_num) FROM jobs m WHERE m.run_id = j.run_id \
               AND m.replica_num = j.replica_num AND m.job_num = j.job_num) - $2 \
               ORDER BY j.run_id, j.replica_num, j.job_num, j.submission_num", Job::columns("j");
    OF_INSTANCE = "SELECT {} FROM jobs j WHERE j.instance_id = $1 AND NOT j.finished ORDER BY j.submitted_at, j.id",
                  Job::columns("j");
    /// A job has the priority of its run; it becomes due because other parts of the run's specification may affect it
    /// too.
    SET_PRIORITY = "UPDATE jobs SET priority = $2, due_at = NULL WHERE run_id = $1 AND NOT finished";
    ENDED = "SELECT id, status, exit_status, termination_reason FROM jobs WHERE finished \
             AND id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    /// For each waiting job of a run, the number of jobs of other runs before it. Limited: beyond that the exact number
    /// does not matter.
    SECRETS = "SELECT secrets_sealed FROM jobs WHERE id = $1";
    EPOCH = "SELECT lock_epoch FROM jobs WHERE id = $1";
    ON_INSTANCE = "SELECT id FROM jobs WHERE instance_id = $1 AND NOT finished ORDER BY id";
    /// The job's container changed. A job that is already due is left unchanged.
    MARK_DUE = "UPDATE jobs SET due_at = NULL WHERE id = $1 AND NOT finished AND due_at IS NOT NULL";
    /// The job's container wrote output; more may follow shortly.
    MARK_SOON_DUE = "UPDATE jobs SET due_at = {DUE_SOON} WHERE id = $1 AND NOT finished AND due_at > now_us() + 500000";
}

/// Makes the job due at once.
pub fn mark_due(id: SubmissionId) -> Change {
    Change::Exec { sql: MARK_DUE.as_str().into(), params: params![id], expect: Expect::Any }
}

/// Makes the job due shortly, so that further changes are handled in the same pass.
pub fn mark_due_soon(id: SubmissionId) -> Change {
    Change::Exec { sql: MARK_SOON_DUE.as_str().into(), params: params![id], expect: Expect::Any }
}

/// Epoch of the last claim of its lock.
pub async fn epoch(db: &Db, id: SubmissionId) -> Result<Option<i64>, DbError> {
    db.query_opt(EPOCH.as_str(), params![id]).await?.map(|row| row.int(0)).transpose()
}

/// Unfinished jobs that are placed on the instance.
pub async fn ids_on_instance(db: &Db, instance: InstanceId) -> Result<Vec<SubmissionId>, DbError> {
    let rows = db.query(ON_INSTANCE.as_str(), params![instance]).await?;
    rows.iter().map(|row| row.id(0)).collect()
}

/// Inserts a submission. A second active one of the same job is a conflict on `jobs_active_key`.
pub fn insert(job: NewJob) -> Change {
    let mut values = job.into_values();
    values.extend([("submitted_at", Val::Now), ("last_processed_at", Val::Now)]);
    Change::Insert { table: "jobs", values }
}

/// Updates the unfinished jobs of a run whose specification changed.
pub fn set_priority(run: RunId, priority: i64) -> Change {
    Change::Exec { sql: SET_PRIORITY.as_str().into(), params: params![run, priority], expect: Expect::Any }
}

pub async fn find(db: &Db, id: SubmissionId) -> Result<Option<Job>, DbError> {
    db.query_opt(FIND.as_str(), params![id]).await?.map(Job::read).transpose()
}

/// The newest `limit` submissions of each job of these runs (`None`: all), ordered by run, replica, job and submission.
/// Parked jobs have the reason of the job that is evaluated for their class.
pub async fn list_by_runs(db: &Db, runs: &[RunId], limit: Option<i64>) -> Result<Vec<Job>, DbError> {
    // Half the range is more submissions than will ever exist, and cannot overflow the subtraction.
    let limit = limit.unwrap_or(i64::MAX / 2);
    let rows = db.query(OF_RUNS.as_str(), vec![Val::list(runs), limit.into()]).await?;
    let mut jobs = rows.into_iter().map(Job::read).collect::<Result<Vec<_>, _>>()?;
    wait_classes::add_reasons(db, &mut jobs).await?;
    Ok(jobs)
}

/// Unfinished jobs on the instance.
pub async fn list_by_instance(db: &Db, instance: InstanceId) -> Result<Vec<Job>, DbError> {
    db.query(OF_INSTANCE.as_str(), params![instance]).await?.into_iter().map(Job::read).collect()
}

record! {
    /// End of a submission.
    pub struct SubmissionEnd {
        pub id: SubmissionId,
        pub status: Status,
        pub exit_status: Option<i64>,
        pub termination_reason: Option<String>,
    }
}

/// Finished submissions among these.
pub async fn list_ended(db: &Db, ids: &[SubmissionId]) -> Result<Vec<SubmissionEnd>, DbError> {
    db.query(ENDED.as_str(), params![Val::list(ids)]).await?.into_iter().map(SubmissionEnd::read).collect()
}

/// Sealed; never part of `Job`, so that no list or log contains it.
pub async fn secrets(db: &Db, id: SubmissionId) -> Result<Option<Vec<u8>>, DbError> {
    Ok(db.query_opt(SECRETS.as_str(), params![id]).await?.map(|row| row.opt_bytes(0)).transpose()?.flatten())
}
