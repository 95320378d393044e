//! The queue for instances as a whole: what its order, its forecast and its explanations need.

use std::collections::BTreeMap;

use windlass_model::{
    id::{FleetId, InstanceId, ProjectId, RunId, SubmissionId, UserId},
    plan::forecast::HoldOwner,
    time::Timestamp,
};

use super::{
    Db, DbError, Val,
    documents::{JOB_PREEMPTION, of_run},
    jobs::Job,
    pipeline_rows::preemption::{PreemptionNote, read_held},
    record::{record, statements},
};
use crate::params;

record! {
    /// A job without an instance, as far as the order of the queue needs it.
    pub struct QueuedJob {
        pub run_id: RunId,
        pub project_id: ProjectId,
        pub project: String,
        pub run: String,
        pub user_id: UserId,
        pub replica_num: i64,
        pub job_spec: String,
        pub submitted_at: Timestamp,
        pub queued_at: Option<Timestamp>,
        /// See `QueueRank`.
        pub priority: i64,
    }
}

/// The last preemption of a run that has not run again since.
#[derive(Clone, Debug)]
pub struct PreemptedJob {
    pub at: Timestamp,
    pub note: Option<PreemptionNote>,
    /// False while it ends.
    pub is_finished: bool,
    /// True if it was submitted again.
    pub is_resubmitted: bool,
    /// Project and run for which it ended.
    pub successor: Option<(ProjectId, String, String)>,
    /// Number of the managed job of which the run is an attempt.
    pub managed_job: Option<i64>,
}

const WAITS: &str = "NOT j.finished AND j.status = 'submitted' AND j.instance_id IS NULL";

statements! {
    QUEUE = "SELECT j.run_id, j.project_id, p.name, r.name, r.user_id, j.replica_num, j.job_spec, j.submitted_at, j.queued_at, \
             j.priority FROM jobs j JOIN runs r ON r.id = j.run_id JOIN projects p ON p.id = j.project_id WHERE {WAITS} \
             ORDER BY j.priority DESC, j.submitted_at, j.id LIMIT $1";
    JOBS = "SELECT {} FROM jobs j WHERE j.run_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND {WAITS} \
            ORDER BY j.run_id, j.replica_num, j.job_num", Job::columns("j");
    FLEETS = "SELECT u.project_id, u.fleet_id FROM usable_fleets u JOIN fleets f ON f.id = u.fleet_id \
              WHERE u.project_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT f.finished AND NOT f.deleted";
    OWNERS = "SELECT j.id, j.project_id, r.user_id, j.held_gpus, j.held_gpu_name, j.held_cpus, j.held_memory_mib, j.held_price \
              FROM jobs j JOIN runs r ON r.id = j.run_id \
              WHERE j.instance_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT j.finished";
    PREEMPTED = "SELECT j.preempted_at, j.preemption, j.finished, EXISTS (SELECT 1 FROM jobs n WHERE n.run_id = j.run_id \
                 AND n.replica_num = j.replica_num AND n.job_num = j.job_num AND n.submission_num > j.submission_num), \
                 s.project_id, p.name, s.name, m.number FROM jobs j JOIN runs r ON r.id = j.run_id \
                 LEFT JOIN jobs w ON w.id = j.preempted_for LEFT JOIN runs s ON s.id = w.run_id \
                 LEFT JOIN projects p ON p.id = s.project_id LEFT JOIN managed_jobs m ON m.id = r.managed_job_id \
                 WHERE j.run_id = $1 AND j.preempted_at IS NOT NULL AND NOT EXISTS (SELECT 1 FROM jobs n WHERE n.run_id = j.run_id \
                 AND n.replica_num = j.replica_num AND n.job_num = j.job_num AND n.submission_num > j.submission_num \
                 AND n.running_at IS NOT NULL) ORDER BY j.preempted_at DESC LIMIT 1";
}

/// Jobs of all projects that wait for an instance.
pub async fn queue(db: &Db, limit: i64) -> Result<Vec<QueuedJob>, DbError> {
    db.query(QUEUE.as_str(), params![limit]).await?.into_iter().map(QueuedJob::read).collect()
}

/// Jobs of these runs that wait for an instance, the nodes of a replica together.
pub async fn jobs(db: &Db, runs: &[RunId]) -> Result<Vec<Job>, DbError> {
    db.query(JOBS.as_str(), params![Val::list(runs)]).await?.into_iter().map(Job::read).collect()
}

/// Fleets that these projects may use.
pub async fn usable_fleets(db: &Db, projects: &[ProjectId]) -> Result<Vec<(ProjectId, FleetId)>, DbError> {
    let rows = db.query(FLEETS.as_str(), params![Val::list(projects)]).await?;
    rows.iter().map(|row| Ok((row.id(0)?, row.id(1)?))).collect()
}

/// Owners of the jobs on these instances.
pub async fn hold_owners(
    db: &Db,
    instances: &[InstanceId],
) -> Result<BTreeMap<SubmissionId, HoldOwner>, DbError> {
    let rows = db.query(OWNERS.as_str(), params![Val::list(instances)]).await?;
    let owner = |row: &super::Row| {
        let held = read_held(row, 3)?;
        Ok((row.id(0)?, HoldOwner { project: row.id(1)?, user: row.id(2)?, held }))
    };
    rows.iter().map(owner).collect()
}

pub async fn preempted_job(db: &Db, run: RunId) -> Result<Option<PreemptedJob>, DbError> {
    let Some(row) = db.query_opt(PREEMPTED.as_str(), params![run]).await? else { return Ok(None) };
    let note = JOB_PREEMPTION.decode_opt(of_run(run), row.opt_text(1)?.as_deref())?;
    let successor = match (row.opt_id(4)?, row.opt_text(5)?, row.opt_text(6)?) {
        (Some(project), Some(name), Some(run)) => Some((project, name, run)),
        (..) => None,
    };
    Ok(Some(PreemptedJob {
        at: row.time(0)?,
        note,
        is_finished: row.bool(2)?,
        is_resubmitted: row.bool(3)?,
        successor,
        managed_job: row.opt_int(7)?,
    }))
}
