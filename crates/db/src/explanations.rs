//! The queue for instances, and times of jobs, for explanations.

use uuid::Uuid;
use windlass_model::{
    id::{ManagedJobId, ProjectId, RunId, SubmissionId, UserId},
    time::Timestamp,
};

use super::{
    Db, DbError, Val,
    record::{record, statements},
};
use crate::params;

record! {
    /// A job without an instance, in the order in which instances are assigned.
    pub struct WaitingJob {
        pub run_id: RunId,
        pub project_id: ProjectId,
        pub project: String,
        pub run: String,
        pub user_id: UserId,
        pub user_name: String,
        pub spec: String,
        pub job_spec: String,
        pub shortfalls: Option<String>,
        pub submitted_at: Timestamp,
    }
}

record! {
    /// A job with a time limit.
    pub struct EndingJob {
        pub project_id: ProjectId,
        pub project: String,
        pub run: String,
        pub place: String,
        pub ends_at: Timestamp,
    }
}

record! {
    /// A job on an instance.
    pub struct PlacedJob {
        pub project: String,
        pub run: String,
        pub instance: String,
        pub fleet: Option<String>,
        pub ends_at: Option<Timestamp>,
    }
}

record! {
    /// Times of a submission.
    pub struct JobTimes {
        pub id: SubmissionId,
        pub run_id: RunId,
        pub replica_num: i64,
        pub job_num: i64,
        pub submission_num: i64,
        pub submitted_at: Timestamp,
        pub provisioned_at: Option<Timestamp>,
        pub pulling_at: Option<Timestamp>,
        pub running_at: Option<Timestamp>,
        pub terminating_at: Option<Timestamp>,
        pub finished_at: Option<Timestamp>,
        pub termination_reason: Option<String>,
        pub termination_message: Option<String>,
        pub instance: Option<String>,
        pub spot: Option<bool>,
        pub run_name: String,
    }
}

record! {
    pub struct SimilarRun {
        pub id: RunId,
        pub submitted_at: Timestamp,
        pub status: String,
        pub name: String,
    }
}

const TIMES: &str = "j.id, j.run_id, j.replica_num, j.job_num, j.submission_num, j.submitted_at, j.provisioned_at, \
     j.pulling_at, j.running_at, j.terminating_at, j.finished_at, j.termination_reason, j.termination_message, \
     i.name, i.spot, r.name FROM jobs j JOIN runs r ON r.id = j.run_id LEFT JOIN instances i ON i.id = j.instance_id";

statements! {
    WAITING = "SELECT r.id, r.project_id, p.name, r.name, u.id, u.name, r.spec, j.job_spec, j.shortfalls, j.submitted_at \
        FROM jobs j JOIN runs r ON r.id = j.run_id JOIN projects p ON p.id = r.project_id JOIN users u ON u.id = r.user_id \
        WHERE j.project_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT j.finished \
        AND j.status = 'submitted' AND j.instance_id IS NULL ORDER BY j.priority DESC, j.submitted_at, j.id LIMIT $2";
    ENDING = "SELECT r.project_id, p.name, r.name, i.name, j.run_deadline_at FROM jobs j JOIN runs r ON r.id = j.run_id \
        JOIN projects p ON p.id = r.project_id JOIN instances i ON i.id = j.instance_id \
        WHERE j.project_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT j.finished \
        AND j.run_deadline_at IS NOT NULL ORDER BY j.run_deadline_at LIMIT $2";
    PLACED = "SELECT p.name, r.name, i.name, f.name, j.run_deadline_at FROM jobs j JOIN runs r ON r.id = j.run_id \
        JOIN projects p ON p.id = r.project_id JOIN instances i ON i.id = j.instance_id \
        LEFT JOIN fleets f ON f.id = i.fleet_id \
        WHERE j.project_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT j.finished \
        ORDER BY coalesce(j.run_deadline_at, 9223372036854775807), j.submitted_at LIMIT $2";
    TIMES_OF_RUNS = "SELECT {TIMES} WHERE j.run_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) \
        ORDER BY r.submitted_at, j.replica_num, j.job_num, j.submission_num LIMIT 5000";
    TIMES_OF_JOB = "SELECT {TIMES} WHERE r.managed_job_id = $1 \
        ORDER BY r.submitted_at, j.replica_num, j.job_num, j.submission_num LIMIT 5000";
    /// Runs before this one, deleted ones included, whose names begin with the text.
    SIMILAR = "SELECT r.id, r.submitted_at, r.status, r.name FROM runs r WHERE r.project_id = $1 AND r.id <> $2 \
        AND r.submitted_at < $3 AND r.finished AND r.name LIKE $4 ESCAPE '!' ORDER BY r.submitted_at DESC LIMIT 100";
}

/// Jobs that wait for an instance in these projects, first in line first.
pub async fn waiting_jobs(db: &Db, projects: &[ProjectId], limit: i64) -> Result<Vec<WaitingJob>, DbError> {
    let rows = db.query(WAITING.as_str(), params![Val::list(projects), limit]).await?;
    rows.into_iter().map(WaitingJob::read).collect()
}

/// Jobs with time limits, the first to end first.
pub async fn ending_jobs(db: &Db, projects: &[ProjectId], limit: i64) -> Result<Vec<EndingJob>, DbError> {
    let rows = db.query(ENDING.as_str(), params![Val::list(projects), limit]).await?;
    rows.into_iter().map(EndingJob::read).collect()
}

/// Jobs on instances, the first to end first; those without a time limit last.
pub async fn placed_jobs(db: &Db, projects: &[ProjectId], limit: i64) -> Result<Vec<PlacedJob>, DbError> {
    let rows = db.query(PLACED.as_str(), params![Val::list(projects), limit]).await?;
    rows.into_iter().map(PlacedJob::read).collect()
}

pub async fn times_of_runs(db: &Db, runs: &[RunId]) -> Result<Vec<JobTimes>, DbError> {
    db.query(TIMES_OF_RUNS.as_str(), params![Val::list(runs)])
        .await?
        .into_iter()
        .map(JobTimes::read)
        .collect()
}

/// Times of all attempts of a managed job.
pub async fn times_of_managed_job(db: &Db, job: ManagedJobId) -> Result<Vec<JobTimes>, DbError> {
    db.query(TIMES_OF_JOB.as_str(), params![job]).await?.into_iter().map(JobTimes::read).collect()
}

/// Finished runs of a project before a time whose names begin with this text.
pub async fn similar_runs(
    db: &Db,
    project: ProjectId,
    (run, before): (Uuid, Timestamp),
    name: &str,
) -> Result<Vec<SimilarRun>, DbError> {
    let pattern = super::filter::contains_pattern(name);
    let pattern = pattern.trim_start_matches('%').to_owned();
    let rows = db.query(SIMILAR.as_str(), params![project, run, before, pattern]).await?;
    rows.into_iter().map(SimilarRun::read).collect()
}
