//! Counts and sums over all tables, and the search for names, limited to some projects.

use uuid::Uuid;
use windlass_model::{id::ProjectId, time::Timestamp};

use super::{
    Db, DbError, Val,
    filter::contains_pattern,
    record::{record, statements},
};
use crate::params;

/// Projects of `$1`.
const IN_PROJECTS: &str = "project_id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
const DAY: &str = "now_us() - 86400000000";

record! {
    pub struct KindCount {
        pub kind: String,
        pub status: String,
        pub count: i64,
    }
}

record! {
    /// Number of runs that changed from one status to another within a step of time.
    pub struct RunChanges {
        pub step: i64,
        /// `None`: they were submitted.
        pub from: Option<String>,
        pub to: String,
        pub count: i64,
    }
}

record! {
    /// A run that needs attention.
    pub struct NotableRun {
        pub id: Uuid,
        pub project: String,
        pub name: String,
        pub message: Option<String>,
        pub since: Timestamp,
    }
}

record! {
    /// An object whose name or id matches a search.
    pub struct Hit {
        pub kind: String,
        pub id: String,
        pub project: Option<String>,
        pub name: String,
        pub status: Option<String>,
        pub hint: Option<String>,
    }
}

statements! {
    /// Final statuses count for a day.
    COUNTS = "SELECT 'runs', status, count(*) FROM runs WHERE {IN_PROJECTS} AND NOT deleted AND NOT finished GROUP BY status \
        UNION ALL SELECT 'runs', status, count(*) FROM runs WHERE {IN_PROJECTS} AND NOT deleted AND finished \
            AND finished_at > {DAY} GROUP BY status \
        UNION ALL SELECT 'managed_jobs', t.status, count(*) FROM managed_jobs m JOIN managed_job_tasks t ON t.job_id = m.id \
            WHERE m.{IN_PROJECTS} AND (NOT m.finished OR m.finished_at > {DAY}) GROUP BY t.status \
        UNION ALL SELECT 'instances', status, count(*) FROM instances WHERE {IN_PROJECTS} AND NOT deleted \
            AND (NOT finished OR finished_at > {DAY}) GROUP BY status \
        UNION ALL SELECT 'fleets', status, count(*) FROM fleets WHERE {IN_PROJECTS} AND NOT deleted GROUP BY status \
        UNION ALL SELECT 'volumes', status, count(*) FROM volumes WHERE {IN_PROJECTS} AND NOT deleted GROUP BY status \
        UNION ALL SELECT 'gateways', status, count(*) FROM gateways WHERE {IN_PROJECTS} AND NOT deleted GROUP BY status";
    CONTAINER_COUNTS = "SELECT 'containers', c.state, count(*) FROM containers c WHERE (c.owner_uuid = $1 OR $1 = '') \
        AND (c.state NOT IN ('Complete', 'Cancelled') OR c.modified_at > {DAY}) GROUP BY c.state";
    QUEUE = "SELECT count(DISTINCT j.run_id), min(j.submitted_at) FROM jobs j WHERE j.{IN_PROJECTS} AND NOT j.finished \
        AND j.status = 'submitted' AND j.instance_id IS NULL";
    FAILURES = "SELECT coalesce(r.termination_reason, 'unknown'), count(*) FROM runs r WHERE r.{IN_PROJECTS} AND r.finished \
        AND NOT r.deleted AND r.status = 'failed' AND r.finished_at > {DAY} \
        GROUP BY coalesce(r.termination_reason, 'unknown') ORDER BY 2 DESC, 1 LIMIT 6";
    FAILED = "SELECT r.id, p.name, r.name, coalesce(r.termination_message, (SELECT max(j.termination_message) FROM jobs j \
            WHERE j.run_id = r.id), r.termination_reason), r.finished_at FROM runs r JOIN projects p ON p.id = r.project_id \
        WHERE r.{IN_PROJECTS} AND r.finished AND NOT r.deleted AND r.status = 'failed' AND r.finished_at > {DAY} \
        ORDER BY r.finished_at DESC LIMIT 5";
    WAITING = "SELECT r.id, p.name, r.name, max(j.status_message), min(j.submitted_at) FROM jobs j \
        JOIN runs r ON r.id = j.run_id JOIN projects p ON p.id = r.project_id WHERE j.{IN_PROJECTS} AND NOT j.finished \
        AND j.status = 'submitted' AND j.instance_id IS NULL AND j.submitted_at < now_us() - 600000000 \
        GROUP BY r.id, p.name, r.name ORDER BY 5 LIMIT 5";
    /// Steps of `$3` microseconds, counted from `$2`.
    RUN_CHANGES = "SELECT CAST((e.recorded_at - $2) / $3 AS BIGINT), e.from_status, e.to_status, count(*) FROM events e \
        WHERE e.{IN_PROJECTS} AND e.recorded_at >= $2 AND e.entity = 'run' AND e.to_status IS NOT NULL GROUP BY 1, 2, 3";
    /// Dollars since `$2`, for finished and unfinished jobs.
    COST = "SELECT CAST(coalesce(sum((coalesce(j.finished_at, now_us()) \
        - (CASE WHEN j.provisioned_at > $2 THEN j.provisioned_at ELSE $2 END)) / 3600000000.0 \
        * j.blocks * coalesce(i.price, 0.0) / coalesce(nullif(i.total_blocks, 0), 1)), 0) AS DOUBLE PRECISION) \
        FROM jobs j JOIN instances i ON i.id = j.instance_id WHERE j.{IN_PROJECTS} AND j.provisioned_at IS NOT NULL \
        AND (NOT j.finished OR j.finished_at > $2)";
    SEARCH = "SELECT * FROM ( \
        SELECT 'run' AS kind, r.id AS id, p.name AS project, r.name AS name, r.status AS status, u.name AS hint, \
            r.submitted_at AS at FROM runs r JOIN projects p ON p.id = r.project_id JOIN users u ON u.id = r.user_id \
            WHERE r.{IN_PROJECTS} AND NOT r.deleted AND (lower(r.name) LIKE $2 ESCAPE '!' OR r.id LIKE $3 ESCAPE '!') \
        UNION ALL SELECT 'managed-job', CAST(m.number AS TEXT), p.name, m.name, m.status, u.name, m.submitted_at \
            FROM managed_jobs m JOIN projects p ON p.id = m.project_id JOIN users u ON u.id = m.user_id \
            WHERE m.{IN_PROJECTS} AND (lower(m.name) LIKE $2 ESCAPE '!' OR CAST(m.number AS TEXT) LIKE $3 ESCAPE '!') \
        UNION ALL SELECT 'instance', i.id, p.name, i.name, i.status, i.backend, i.created_at FROM instances i \
            JOIN projects p ON p.id = i.project_id WHERE i.{IN_PROJECTS} AND NOT i.deleted AND NOT i.finished \
            AND (lower(i.name) LIKE $2 ESCAPE '!' OR i.id LIKE $3 ESCAPE '!') \
        UNION ALL SELECT 'fleet', f.id, p.name, f.name, f.status, NULL, f.created_at FROM fleets f \
            JOIN projects p ON p.id = f.project_id WHERE f.{IN_PROJECTS} AND NOT f.deleted AND lower(f.name) LIKE $2 ESCAPE '!' \
        UNION ALL SELECT 'volume', v.id, p.name, v.name, v.status, NULL, v.created_at FROM volumes v \
            JOIN projects p ON p.id = v.project_id WHERE v.{IN_PROJECTS} AND NOT v.deleted AND lower(v.name) LIKE $2 ESCAPE '!' \
        UNION ALL SELECT 'gateway', g.id, p.name, g.name, g.status, NULL, g.created_at FROM gateways g \
            JOIN projects p ON p.id = g.project_id WHERE g.{IN_PROJECTS} AND NOT g.deleted AND lower(g.name) LIKE $2 ESCAPE '!' \
        UNION ALL SELECT 'project', p.id, p.name, p.name, NULL, NULL, p.created_at FROM projects p \
            WHERE p.id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND lower(p.name) LIKE $2 ESCAPE '!' \
        ) found ORDER BY CASE WHEN lower(found.name) LIKE $3 ESCAPE '!' THEN 0 ELSE 1 END, found.at DESC LIMIT $4";
}

pub async fn counts(db: &Db, projects: &[ProjectId]) -> Result<Vec<KindCount>, DbError> {
    db.query(COUNTS.as_str(), params![Val::list(projects)]).await?.into_iter().map(KindCount::read).collect()
}

/// Counts of containers; of one owner unless it is empty.
pub async fn container_counts(db: &Db, owner: &str) -> Result<Vec<KindCount>, DbError> {
    db.query(CONTAINER_COUNTS.as_str(), params![owner]).await?.into_iter().map(KindCount::read).collect()
}

/// Number of runs that wait for an instance, and the time since when the oldest of them does.
pub async fn queue(db: &Db, projects: &[ProjectId]) -> Result<(i64, Option<Timestamp>), DbError> {
    let row = db.query_opt(QUEUE.as_str(), params![Val::list(projects)]).await?;
    row.map_or(Ok((0, None)), |row| Ok((row.int(0)?, row.opt_time(1)?)))
}

/// Reasons of the runs that failed within a day, most frequent first.
pub async fn failures(db: &Db, projects: &[ProjectId]) -> Result<Vec<(String, i64)>, DbError> {
    let rows = db.query(FAILURES.as_str(), params![Val::list(projects)]).await?;
    rows.iter().map(|row| Ok((row.text(0)?, row.int(1)?))).collect()
}

/// Runs that failed within a day, newest first.
pub async fn failed_runs(db: &Db, projects: &[ProjectId]) -> Result<Vec<NotableRun>, DbError> {
    db.query(FAILED.as_str(), params![Val::list(projects)]).await?.into_iter().map(NotableRun::read).collect()
}

/// Runs that wait for an instance for longer than ten minutes, oldest first.
pub async fn waiting_runs(db: &Db, projects: &[ProjectId]) -> Result<Vec<NotableRun>, DbError> {
    db.query(WAITING.as_str(), params![Val::list(projects)])
        .await?
        .into_iter()
        .map(NotableRun::read)
        .collect()
}

/// Changes of the status of runs since a time, counted by step.
pub async fn run_changes(
    db: &Db,
    projects: &[ProjectId],
    since: Timestamp,
    step_us: i64,
) -> Result<Vec<RunChanges>, DbError> {
    let rows = db.query(RUN_CHANGES.as_str(), params![Val::list(projects), since, step_us]).await?;
    rows.into_iter().map(RunChanges::read).collect()
}

/// Cost of jobs since a time, in dollars.
pub async fn cost(db: &Db, projects: &[ProjectId], since: Timestamp) -> Result<f64, DbError> {
    let row = db.query_opt(COST.as_str(), params![Val::list(projects), since]).await?;
    row.map_or(Ok(0.0), |row| row.real(0))
}

/// Objects whose name contains the text or whose id begins with it. Names that begin with it come first.
pub async fn search(db: &Db, projects: &[ProjectId], text: &str, limit: i64) -> Result<Vec<Hit>, DbError> {
    let part = contains_pattern(text);
    let start = part.trim_start_matches('%').to_owned();
    let rows = db.query(SEARCH.as_str(), params![Val::list(projects), part, start, limit]).await?;
    rows.into_iter().map(Hit::read).collect()
}
