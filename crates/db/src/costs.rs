//! Costs of instances, from the tables `jobs` and `instances`: price times the time within a period.

use std::collections::HashMap;

use uuid::Uuid;
use windlass_model::{
    id::{ManagedJobId, ProjectId},
    time::{Span, Timestamp},
};

use super::{
    Db, DbError, Row, Val,
    record::{record, statements},
};
use crate::params;

record! {
    /// Time during which a job or an instance cost something.
    pub struct CostInterval {
        pub name: String,
        pub user_name: String,
        pub from: Timestamp,
        pub to: Timestamp,
        /// Dollars per hour.
        pub price: f64,
        pub spot: bool,
        /// Market price and the type of the instance, for the price on demand.
        pub backend: Option<String>,
        pub region: Option<String>,
        pub instance_type: Option<String>,
        /// Share of the instance.
        pub share: f64,
    }
}

record! {
    /// One item of a cost report. Prices are dollars per hour times microseconds.
    pub struct CostLine {
        pub id: Uuid,
        pub name: String,
        pub user_name: Option<String>,
        pub count: i64,
        /// Time of whole instances, in microseconds.
        pub time: f64,
        pub price_by_time: f64,
    }
}

/// A period; its end is never after now.
#[derive(Clone, Copy, Debug)]
pub struct Period {
    pub since: Timestamp,
    pub until: Timestamp,
}

/// Times are clipped to the period `$2`..`$3`. A job on some blocks of an instance counts as that share of it. Finished
/// and unfinished jobs are read through separate indexes.
fn jobs() -> String {
    let those = |which: &str| {
        format!(
            "SELECT r.id AS run_id, r.name AS run_name, r.user_id, \
             (1.0 * ((CASE WHEN coalesce(j.finished_at, $3) < $3 THEN coalesce(j.finished_at, $3) ELSE $3 END) \
             - (CASE WHEN j.provisioned_at > $2 THEN j.provisioned_at ELSE $2 END))) \
             * j.blocks / coalesce(nullif(i.total_blocks, 0), 1) AS time, coalesce(i.price, 0.0) AS price \
             FROM jobs j JOIN runs r ON r.id = j.run_id JOIN instances i ON i.id = j.instance_id \
             WHERE j.project_id = $1 AND j.provisioned_at < $3 AND {which}"
        )
    };
    format!("({} UNION ALL {}) t", those("j.finished AND j.finished_at > $2"), those("NOT j.finished"))
}

/// Microseconds times dollars per hour, for each run of a managed job.
const OF_JOB: &str = "SELECT r.name, CAST(coalesce(sum(1.0 \
    * ((CASE WHEN coalesce(j.finished_at, $2) < $2 THEN coalesce(j.finished_at, $2) ELSE $2 END) - j.provisioned_at) \
    * j.blocks / coalesce(nullif(i.total_blocks, 0), 1) * coalesce(i.price, 0.0)), 0) AS DOUBLE PRECISION) \
    FROM runs r JOIN jobs j ON j.run_id = r.id JOIN instances i ON i.id = j.instance_id \
    WHERE r.managed_job_id = $1 AND j.provisioned_at < $2 GROUP BY r.name";
/// End of a job or an instance, at most `$3`.
const JOB_END: &str =
    "(CASE WHEN coalesce(j.finished_at, $3) < $3 THEN coalesce(j.finished_at, $3) ELSE $3 END)";
const JOB_START: &str = "(CASE WHEN j.provisioned_at > $2 THEN j.provisioned_at ELSE $2 END)";
const JOB_SHARE: &str = "CAST(j.blocks AS DOUBLE PRECISION) / coalesce(nullif(i.total_blocks, 0), 1)";
const INSTANCE_END: &str =
    "(CASE WHEN coalesce(i.finished_at, $3) < $3 THEN coalesce(i.finished_at, $3) ELSE $3 END)";
const INSTANCE_START: &str = "(CASE WHEN i.started_at > $2 THEN i.started_at ELSE $2 END)";
const OF_JOBS_BETWEEN: &str = "FROM jobs j JOIN runs r ON r.id = j.run_id JOIN users u ON u.id = r.user_id \
    JOIN instances i ON i.id = j.instance_id WHERE j.project_id = $1 AND j.provisioned_at < $3";
const MICROS_PER_HOUR: f64 = 3.6e9;
const INSTANCES: &str = "(SELECT i.fleet_id, \
    1.0 * ((CASE WHEN coalesce(i.finished_at, $3) < $3 THEN coalesce(i.finished_at, $3) ELSE $3 END) \
    - (CASE WHEN i.started_at > $2 THEN i.started_at ELSE $2 END)) AS time, coalesce(i.price, 0.0) AS price \
    FROM instances i WHERE i.project_id = $1 AND i.started_at < $3 \
    AND (i.finished_at IS NULL OR i.finished_at > $2)) t";
const SUMS: &str = "count(*), CAST(coalesce(sum(t.time), 0) AS DOUBLE PRECISION), \
                    CAST(coalesce(sum(t.time * t.price), 0) AS DOUBLE PRECISION)";
const ORDER: &str = "ORDER BY 6 DESC, 5 DESC, 2, 1 LIMIT $4";

statements! {
    BY_RUN = "SELECT t.run_id, t.run_name, u.name, {SUMS} FROM {} JOIN users u ON u.id = t.user_id \
              GROUP BY t.run_id, t.run_name, u.name {ORDER}", jobs();
    BY_USER = "SELECT u.id, u.name, NULL, {SUMS} FROM {} JOIN users u ON u.id = t.user_id \
               GROUP BY u.id, u.name {ORDER}", jobs();
    BY_FLEET = "SELECT f.id, f.name, NULL, {SUMS} FROM {INSTANCES} JOIN fleets f ON f.id = t.fleet_id \
                GROUP BY f.id, f.name {ORDER}";
    OF_JOBS = "SELECT r.managed_job_id, r.name, CAST(coalesce(sum(1.0 \
               * (coalesce(j.finished_at, now_us()) - j.provisioned_at) * j.blocks \
               / coalesce(nullif(i.total_blocks, 0), 1) * coalesce(i.price, 0.0)), 0) AS DOUBLE PRECISION) \
               FROM runs r JOIN jobs j ON j.run_id = r.id JOIN instances i ON i.id = j.instance_id \
               WHERE r.managed_job_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) \
               AND j.provisioned_at IS NOT NULL GROUP BY r.managed_job_id, r.name";
    ENDED_JOBS = "SELECT r.name, u.name, {JOB_START}, {JOB_END}, coalesce(i.price, 0.0), i.spot, i.backend, i.region, \
                  i.instance_type, {JOB_SHARE} {OF_JOBS_BETWEEN} AND j.finished AND j.finished_at > $2 LIMIT 100000";
    ACTIVE_JOBS = "SELECT r.name, u.name, {JOB_START}, {JOB_END}, coalesce(i.price, 0.0), i.spot, i.backend, i.region, \
                   i.instance_type, {JOB_SHARE} {OF_JOBS_BETWEEN} AND NOT j.finished LIMIT 100000";
    INSTANCE_TIMES = "SELECT f.name, '', {INSTANCE_START}, {INSTANCE_END}, coalesce(i.price, 0.0), i.spot, i.backend, \
                      i.region, i.instance_type, CAST(1 AS DOUBLE PRECISION) FROM instances i JOIN fleets f ON f.id = i.fleet_id \
                      WHERE i.project_id = $1 AND i.started_at < $3 \
                      AND (i.finished_at IS NULL OR i.finished_at > $2) LIMIT 100000";
    ATTEMPTS = "SELECT r.name, u.name, j.provisioned_at, coalesce(j.finished_at, now_us()), coalesce(i.price, 0.0), \
                i.spot, i.backend, i.region, i.instance_type, {JOB_SHARE} FROM jobs j JOIN runs r ON r.id = j.run_id \
                JOIN users u ON u.id = r.user_id JOIN instances i ON i.id = j.instance_id \
                WHERE r.managed_job_id = $1 AND j.provisioned_at IS NOT NULL ORDER BY j.provisioned_at LIMIT 20000";
    TOTAL_OF_JOBS = "SELECT {SUMS} FROM {}", jobs();
    TOTAL_OF_INSTANCES = "SELECT {SUMS} FROM {INSTANCES}";
}

/// Cost in dollars of each run of a managed job until now, by the name of the run.
pub async fn by_run_of_job(
    db: &Db,
    job: ManagedJobId,
    now: Timestamp,
) -> Result<HashMap<String, f64>, DbError> {
    let rows = db.query(OF_JOB, params![job, now]).await?;
    rows.iter().map(|row| Ok((row.text(0)?, row.real(1)? / MICROS_PER_HOUR))).collect()
}

/// Cost in dollars of each run of these managed jobs until now, by job and name of the run.
pub async fn by_run_of_jobs(
    db: &Db,
    jobs: &[ManagedJobId],
) -> Result<HashMap<(ManagedJobId, String), f64>, DbError> {
    let rows = db.query(OF_JOBS.as_str(), params![Val::list(jobs)]).await?;
    rows.iter().map(|row| Ok(((row.id(0)?, row.text(1)?), row.real(2)? / MICROS_PER_HOUR))).collect()
}

/// Grouping of costs.
#[derive(Clone, Copy, Debug)]
pub enum CostGroup {
    Run,
    User,
    Fleet,
}

/// Items with the highest cost.
pub async fn top_lines(
    db: &Db,
    project: ProjectId,
    by: CostGroup,
    period: Period,
    limit: i64,
) -> Result<Vec<CostLine>, DbError> {
    let sql = match by {
        CostGroup::Run => &BY_RUN,
        CostGroup::User => &BY_USER,
        CostGroup::Fleet => &BY_FLEET,
    };
    let params = params![project, period.since, period.until, limit];
    db.query(sql.as_str(), params).await?.into_iter().map(CostLine::read).collect()
}

/// Count, time and cost over all items.
pub async fn total(
    db: &Db,
    project: ProjectId,
    by: CostGroup,
    period: Period,
) -> Result<(i64, f64, f64), DbError> {
    let sql = match by {
        CostGroup::Run | CostGroup::User => &TOTAL_OF_JOBS,
        CostGroup::Fleet => &TOTAL_OF_INSTANCES,
    };
    let rows = db.query(sql.as_str(), params![project, period.since, period.until]).await?;
    let read = |row: &Row| Ok((row.int(0)?, row.real(1)?, row.real(2)?));
    rows.first().map_or(Ok((0, 0.0, 0.0)), read)
}

/// Times during which jobs, or the instances of fleets, cost something, clipped to the period.
pub async fn intervals(
    db: &Db,
    project: ProjectId,
    by: CostGroup,
    period: Period,
) -> Result<Vec<CostInterval>, DbError> {
    let statements: &[&std::sync::LazyLock<String>] = match by {
        CostGroup::Run | CostGroup::User => &[&ENDED_JOBS, &ACTIVE_JOBS],
        CostGroup::Fleet => &[&INSTANCE_TIMES],
    };
    let mut all = Vec::new();
    for sql in statements {
        let rows = db.query(sql.as_str(), params![project, period.since, period.until]).await?;
        for row in rows {
            all.push(CostInterval::read(row)?);
        }
    }
    Ok(all)
}

/// Times of the nodes of all attempts of a managed job.
pub async fn intervals_of_job(db: &Db, job: ManagedJobId) -> Result<Vec<CostInterval>, DbError> {
    db.query(ATTEMPTS.as_str(), params![job]).await?.into_iter().map(CostInterval::read).collect()
}

/// Converts a sum of microseconds to hours, and a sum of prices per hour times microseconds to dollars.
pub fn hours(microseconds: f64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a constant that fits")]
    let hour = Span::hours(1).0 as f64;
    microseconds / hour
}
