//! Samples of jobs over a period, requests of services, and the present use of instances, for plots.

use uuid::Uuid;
use windlass_model::{
    id::{FleetId, InstanceId, ProjectId, RunId, SubmissionId, UserId},
    time::{Span, Timestamp},
};

use super::{
    Db, DbError, Val,
    job_metrics::GpuUses,
    record::{record, statements},
};
use crate::params;

record! {
    /// A job whose samples are read.
    pub struct SampledJob {
        pub id: SubmissionId,
        pub project_id: ProjectId,
        pub instance_id: Option<InstanceId>,
        pub fleet_id: Option<FleetId>,
        pub provisioning: Option<String>,
        pub runtime: Option<String>,
    }
}

record! {
    pub struct JobSample {
        pub job_id: SubmissionId,
        pub at: Timestamp,
        pub host_at: Timestamp,
        pub cpu_us: i64,
        pub working_set_bytes: i64,
        pub gpus: GpuUses,
    }
}

record! {
    /// A job that holds a part of an instance, with its last two samples.
    pub struct JobOnInstance {
        pub instance_id: InstanceId,
        pub project_id: ProjectId,
        pub project: String,
        pub run: String,
        pub job_num: i64,
        pub blocks: i64,
        pub host_at: Option<Timestamp>,
        pub cpu_us: Option<i64>,
        pub working_set_bytes: Option<i64>,
        pub gpus: Option<GpuUses>,
        pub host_at_before: Option<Timestamp>,
        pub cpu_us_before: Option<i64>,
    }
}

record! {
    pub struct RequestCount {
        pub at: Timestamp,
        pub requests: i64,
        pub in_flight_us: i64,
        pub waiting_us: i64,
    }
}

record! {
    pub struct AnswerCount {
        pub at: Timestamp,
        pub answers: String,
    }
}

record! {
    /// A job that ran or runs on an instance.
    pub struct PastJob {
        pub run: String,
        pub run_id: RunId,
        pub job: String,
        pub user: String,
        pub from: Timestamp,
        pub to: Option<Timestamp>,
        pub status: String,
        pub reason: Option<String>,
    }
}

record! {
    /// A saved view, with the names of its project and its user.
    pub struct SavedView {
        pub id: Uuid,
        pub name: String,
        pub page: String,
        pub query: String,
        pub project: Option<String>,
        pub user: String,
        pub user_id: UserId,
    }
}

const JOB: &str = "SELECT j.id, j.project_id, j.instance_id, i.fleet_id, j.provisioning, j.runtime \
     FROM jobs j LEFT JOIN instances i ON i.id = j.instance_id";
const PAST: &str = "SELECT r.name, r.id, j.job_name, u.name, j.provisioned_at, j.finished_at, j.status, \
     coalesce(j.termination_message, j.termination_reason) FROM jobs j JOIN runs r ON r.id = j.run_id \
     JOIN users u ON u.id = r.user_id \
     WHERE j.instance_id = $1 AND j.project_id = $2 AND j.provisioned_at IS NOT NULL";
const VIEW: &str = "SELECT v.id, v.name, v.page, v.query, p.name, u.name, v.user_id FROM saved_views v \
     JOIN users u ON u.id = v.user_id LEFT JOIN projects p ON p.id = v.project_id";

statements! {
    JOBS = "{JOB} WHERE j.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    RUNNING_ON = "{JOB} WHERE j.instance_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT j.finished \
        AND j.provisioned_at < $2 LIMIT 1000";
    ENDED_ON = "{JOB} WHERE j.instance_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND j.finished \
        AND j.finished_at > $2 AND j.provisioned_at < $3 ORDER BY j.finished_at DESC LIMIT 1000";
    INSTANCES_OF_FLEETS = "SELECT i.id, i.fleet_id FROM instances i \
        WHERE i.fleet_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) \
        AND (NOT i.finished OR i.finished_at > $2) ORDER BY i.created_at DESC LIMIT 5000";
    SAMPLES = "SELECT m.job_id, m.at, m.host_at, m.cpu_us, m.working_set_bytes, m.gpus FROM job_metrics m \
        WHERE m.job_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND m.at > $2 AND m.at <= $3 \
        ORDER BY m.job_id, m.at LIMIT $4";
    PRESENT = "SELECT j.instance_id, j.project_id, p.name, r.name, j.job_num, j.blocks, m.host_at, m.cpu_us, \
        m.working_set_bytes, m.gpus, b.host_at, b.cpu_us \
        FROM jobs j JOIN runs r ON r.id = j.run_id JOIN projects p ON p.id = j.project_id \
        LEFT JOIN job_metrics m ON m.job_id = j.id AND m.at > now_us() - 60000000 \
        AND m.at = (SELECT max(n.at) FROM job_metrics n WHERE n.job_id = j.id) \
        LEFT JOIN job_metrics b ON b.job_id = j.id \
        AND b.at = (SELECT max(n.at) FROM job_metrics n WHERE n.job_id = j.id AND n.at < m.at) \
        WHERE j.instance_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT j.finished \
        ORDER BY j.submitted_at, j.id";
    REQUESTS = "SELECT q.window_at, CAST(sum(q.requests) AS BIGINT), CAST(sum(q.in_flight_us) AS BIGINT), \
        CAST(sum(q.waiting_us) AS BIGINT) FROM service_requests q \
        WHERE q.run_id = $1 AND q.window_at > $2 AND q.window_at <= $3 GROUP BY q.window_at ORDER BY q.window_at";
    MINUTES = "SELECT m.at, m.requests, m.in_flight_us, m.waiting_us FROM service_minutes m \
        WHERE m.run_id = $1 AND m.at > $2 AND m.at <= $3 ORDER BY m.at LIMIT 50000";
    ANSWERS = "SELECT a.told_at, a.answers FROM service_answers a \
        WHERE a.run_id = $1 AND a.told_at > $2 AND a.told_at <= $3 ORDER BY a.told_at LIMIT 5000";
    HELD_BY = "{PAST} AND NOT j.finished ORDER BY j.provisioned_at DESC LIMIT 100";
    HELD_BEFORE = "{PAST} AND j.finished ORDER BY j.finished_at DESC LIMIT 100";
    VIEWS = "{VIEW} WHERE (v.user_id = $1 AND v.project_id IS NULL) \
        OR v.project_id IN (SELECT value FROM json_each(CAST($2 AS TEXT))) ORDER BY v.page, v.name, v.id LIMIT 1000";
    SET_VIEW = "INSERT INTO saved_views (id, user_id, project_id, page, name, query, created_at) \
        VALUES ($1, $2, $3, $4, $5, $6, now_us()) \
        ON CONFLICT (user_id, page, name, coalesce(project_id, '')) DO UPDATE SET query = excluded.query";
    DELETE_VIEW = "DELETE FROM saved_views WHERE id = $1 AND user_id = $2";
}

pub async fn jobs(db: &Db, ids: &[SubmissionId]) -> Result<Vec<SampledJob>, DbError> {
    read(db, JOBS.as_str(), params![Val::list(ids)], SampledJob::read).await
}

/// Jobs that were on these instances in a period.
pub async fn jobs_on(
    db: &Db,
    instances: &[InstanceId],
    from: Timestamp,
    to: Timestamp,
) -> Result<Vec<SampledJob>, DbError> {
    let list = Val::list(instances);
    let mut jobs = read(db, RUNNING_ON.as_str(), params![list.clone(), to], SampledJob::read).await?;
    jobs.extend(read(db, ENDED_ON.as_str(), params![list, from, to], SampledJob::read).await?);
    Ok(jobs)
}

/// Instances of fleets that existed after a time, with their fleets.
pub async fn instances_of(
    db: &Db,
    fleets: &[FleetId],
    from: Timestamp,
) -> Result<Vec<(InstanceId, FleetId)>, DbError> {
    let rows = db.query(INSTANCES_OF_FLEETS.as_str(), params![Val::list(fleets), from]).await?;
    rows.iter().map(|row| Ok((row.id(0)?, row.id(1)?))).collect()
}

/// Samples by job and time.
pub async fn samples(
    db: &Db,
    jobs: &[SubmissionId],
    from: Timestamp,
    to: Timestamp,
    limit: i64,
) -> Result<Vec<JobSample>, DbError> {
    read(db, SAMPLES.as_str(), params![Val::list(jobs), from, to, limit], JobSample::read).await
}

/// Jobs on these instances now.
pub async fn present_jobs(db: &Db, instances: &[InstanceId]) -> Result<Vec<JobOnInstance>, DbError> {
    read(db, PRESENT.as_str(), params![Val::list(instances)], JobOnInstance::read).await
}

/// Requests of a service: in steps of a minute, and of five seconds for the last minutes.
pub async fn requests(
    db: &Db,
    run: RunId,
    from: Timestamp,
    to: Timestamp,
) -> Result<(Vec<RequestCount>, Vec<RequestCount>), DbError> {
    let minutes = read(db, MINUTES.as_str(), params![run, from, to], RequestCount::read).await?;
    let recent = read(db, REQUESTS.as_str(), params![run, from, to], RequestCount::read).await?;
    Ok((minutes, recent))
}

/// Responses of a service, of the last minutes only.
pub async fn answers(
    db: &Db,
    run: RunId,
    from: Timestamp,
    to: Timestamp,
) -> Result<Vec<AnswerCount>, DbError> {
    read(db, ANSWERS.as_str(), params![run, from, to], AnswerCount::read).await
}

/// Jobs of a project that were on an instance: present ones first, then newest first.
pub async fn past_jobs(db: &Db, instance: InstanceId, project: ProjectId) -> Result<Vec<PastJob>, DbError> {
    let mut jobs = read(db, HELD_BY.as_str(), params![instance, project], PastJob::read).await?;
    jobs.extend(read(db, HELD_BEFORE.as_str(), params![instance, project], PastJob::read).await?);
    jobs.truncate(100);
    Ok(jobs)
}

/// Views of a user, and those of projects.
pub async fn views(db: &Db, user: UserId, projects: &[ProjectId]) -> Result<Vec<SavedView>, DbError> {
    read(db, VIEWS.as_str(), params![user, Val::list(projects)], SavedView::read).await
}

/// A view to save.
#[derive(Clone, Copy, Debug)]
pub struct NewView<'a> {
    pub id: Uuid,
    pub user: UserId,
    pub project: Option<ProjectId>,
    pub page: &'a str,
    pub name: &'a str,
    pub query: &'a str,
}

pub async fn set_view(db: &Db, view: NewView<'_>) -> Result<(), DbError> {
    let NewView { id, user, project, page, name, query } = view;
    let values = params![id, user, project, page, name, query];
    db.write(super::Unit::new().exec(SET_VIEW.as_str(), values)).await?.done().map(drop)
}

pub async fn delete_view(db: &Db, id: Uuid, user: UserId) -> Result<(), DbError> {
    db.write(super::Unit::new().exec(DELETE_VIEW.as_str(), params![id, user])).await?.done().map(drop)
}

async fn read<T>(
    db: &Db,
    sql: &'static str,
    values: Vec<Val>,
    read: fn(super::Row) -> Result<T, DbError>,
) -> Result<Vec<T>, DbError> {
    db.query(sql, values).await?.into_iter().map(read).collect()
}

/// Time for which the minutes of a service are kept.
pub const KEEP_MINUTES: Span = Span::days(7);
