//! Pages and counts of runs, and the columns of a run's row that are computed from its jobs.

use std::collections::HashMap;

use windlass_model::{
    id::{InstanceId, ProjectId, RunId},
    time::Timestamp,
};

use super::{
    Db, DbError, Dialect, Val,
    filter::{Filter, contains_pattern},
    record::{record, statements},
};
use crate::params;

/// Column by which a page is sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunSort {
    SubmittedAt,
    Name,
    Status,
    User,
    Cost,
    Duration,
}

/// Selection of runs; empty lists do not filter.
#[derive(Clone, Debug, Default)]
pub struct RunFilter {
    /// `None`: all projects.
    pub projects: Option<Vec<ProjectId>>,
    pub users: Vec<String>,
    pub statuses: Vec<String>,
    pub types: Vec<String>,
    pub fleets: Vec<String>,
    pub text: Option<String>,
    pub since: Option<Timestamp>,
    pub until: Option<Timestamp>,
}

record! {
    /// Columns of a run that its jobs determine.
    pub struct JobColumns {
        pub id: RunId,
        pub started_at: Option<Timestamp>,
        pub attempts: i64,
        /// Dollars.
        pub cost: f64,
        /// Dollars per hour now.
        pub price: f64,
        pub managed_job: Option<i64>,
    }
}

/// Share of an instance that a job `j` on the instance `i` occupies, times its price.
const SHARE: &str = "j.blocks * coalesce(i.price, 0.0) / coalesce(nullif(i.total_blocks, 0), 1)";

statements! {
    JOB_COLUMNS = "SELECT r.id, min(j.running_at), coalesce(max(j.submission_num) + 1, 0), \
        CAST(coalesce(sum(CASE WHEN j.provisioned_at IS NULL THEN 0.0 ELSE \
            (coalesce(j.finished_at, now_us()) - j.provisioned_at) / 3600000000.0 * {SHARE} END), 0) AS DOUBLE PRECISION), \
        CAST(coalesce(sum(CASE WHEN j.finished OR i.id IS NULL THEN 0.0 ELSE {SHARE} END), 0) AS DOUBLE PRECISION), \
        max(m.number) FROM runs r LEFT JOIN jobs j ON j.run_id = r.id LEFT JOIN instances i ON i.id = j.instance_id \
        LEFT JOIN managed_jobs m ON m.id = r.managed_job_id \
        WHERE r.id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) GROUP BY r.id";
    INSTANCE_NAMES = "SELECT i.id, i.name FROM instances i WHERE i.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
}

impl RunFilter {
    /// Conditions, except for that on the status.
    fn conditions(&self, dialect: Dialect) -> Filter {
        let mut filter = Filter::new();
        filter.and("NOT r.deleted");
        match self.projects.as_deref() {
            None => {}
            Some([one]) => filter.is("r.project_id = ?", *one),
            Some(many) => filter.and_in("r.project_id", many),
        }
        if !self.users.is_empty() {
            filter.and_in("u.name", &self.users);
        }
        if !self.types.is_empty() {
            let kind = match dialect {
                Dialect::Sqlite => "json_extract(r.spec, '$.configuration.type')",
                Dialect::Postgres => "(CAST(r.spec AS jsonb) -> 'configuration' ->> 'type')",
            };
            filter.and_in(kind, &self.types);
        }
        if !self.fleets.is_empty() {
            let list = Val::list(&self.fleets);
            filter.is(
                "EXISTS (SELECT 1 FROM fleets f WHERE f.id = r.fleet_id \
                 AND f.name IN (SELECT value FROM json_each(CAST(? AS TEXT))))",
                list,
            );
        }
        if let Some(since) = self.since {
            filter.is("r.submitted_at >= ?", since);
        }
        if let Some(until) = self.until {
            filter.is("r.submitted_at < ?", until);
        }
        if let Some(text) = &self.text {
            let (part, start) = (filter.bind(contains_pattern(text)), contains_pattern(text));
            let start = filter.bind(start.trim_start_matches('%'));
            filter.and(&format!(
                "(lower(r.name) LIKE {part} ESCAPE '!' OR lower(u.name) LIKE {part} ESCAPE '!' \
                 OR lower(coalesce(r.status_message, '')) LIKE {part} ESCAPE '!' \
                 OR lower(coalesce(r.termination_message, '')) LIKE {part} ESCAPE '!' \
                 OR r.id LIKE {start} ESCAPE '!' OR EXISTS (SELECT 1 FROM jobs j WHERE j.run_id = r.id \
                 AND (r.finished OR NOT j.finished) AND lower(coalesce(j.status_message, '') || ' ' \
                 || coalesce(j.termination_message, '')) LIKE {part} ESCAPE '!'))"
            ));
        }
        filter
    }

    fn joins(&self, sort: Option<RunSort>) -> &'static str {
        let needs_user = !self.users.is_empty() || self.text.is_some() || sort == Some(RunSort::User);
        if needs_user { " JOIN users u ON u.id = r.user_id" } else { "" }
    }
}

fn sort_expression(sort: RunSort) -> String {
    match sort {
        RunSort::SubmittedAt => "r.submitted_at".to_owned(),
        RunSort::Name => "r.name".to_owned(),
        RunSort::Status => "r.status".to_owned(),
        RunSort::User => "u.name".to_owned(),
        RunSort::Cost => format!(
            "coalesce((SELECT sum((coalesce(j.finished_at, now_us()) - j.provisioned_at) / 3600000000.0 * {SHARE}) \
             FROM jobs j JOIN instances i ON i.id = j.instance_id WHERE j.run_id = r.id \
             AND j.provisioned_at IS NOT NULL), 0)"
        ),
        RunSort::Duration => {
            "coalesce(coalesce(r.finished_at, now_us()) - (SELECT min(j.running_at) FROM jobs j \
                              WHERE j.run_id = r.id), 0)"
                .to_owned()
        }
    }
}

/// A page of runs, in the order of the column; ties by id.
pub async fn list(
    db: &Db,
    requested: &RunFilter,
    sort: RunSort,
    descending: bool,
    (offset, limit): (u32, u32),
) -> Result<Vec<RunId>, DbError> {
    let mut filter = requested.conditions(db.dialect());
    if !requested.statuses.is_empty() {
        filter.and_in("r.status", &requested.statuses);
    }
    let (found, params) = filter.done();
    let (joins, column) = (requested.joins(Some(sort)), sort_expression(sort));
    let direction = if descending { "DESC" } else { "ASC" };
    let sql = format!(
        "SELECT r.id FROM runs r{joins}{found} ORDER BY {column} {direction}, r.id LIMIT {limit} OFFSET {offset}"
    );
    db.query(sql, params).await?.iter().map(|row| row.id(0)).collect()
}

/// Place of a run in the order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunPlace {
    pub at: Timestamp,
    pub id: RunId,
}

/// Start of a page, relative to a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageStart {
    First,
    After(RunPlace),
    /// The page that ends before it.
    Before(RunPlace),
}

fn page_by_time_sql(
    dialect: Dialect,
    requested: &RunFilter,
    descending: bool,
    start: PageStart,
    limit: u32,
) -> (String, Vec<Val>) {
    let mut filter = requested.conditions(dialect);
    if !requested.statuses.is_empty() {
        filter.and_in("r.status", &requested.statuses);
    }
    // Ids ascend in both directions of time, as in the index; a page before a place is read backwards.
    let backwards = matches!(start, PageStart::Before(_));
    let (beyond_time, times) = if descending == backwards { ('>', "ASC") } else { ('<', "DESC") };
    let (beyond_id, ids) = if backwards { ('<', "DESC") } else { ('>', "ASC") };
    if let PageStart::After(place) | PageStart::Before(place) = start {
        let (at, id) = (filter.bind(place.at), filter.bind(place.id));
        filter.and(&format!(
            "r.submitted_at {beyond_time}= {at} AND (r.submitted_at {beyond_time} {at} OR r.id {beyond_id} {id})"
        ));
    }
    let (found, params) = filter.done();
    let joins = requested.joins(None);
    let sql = format!(
        "SELECT r.id, r.submitted_at FROM runs r{joins}{found} ORDER BY r.submitted_at {times}, r.id {ids} LIMIT {limit}"
    );
    (sql, params)
}

/// A page of runs in the order of their submission, ties by id. Runs that are submitted between two pages do not move
/// those of the second, and a page far from the start is read as fast as the first one.
pub async fn list_by_time(
    db: &Db,
    requested: &RunFilter,
    descending: bool,
    start: PageStart,
    limit: u32,
) -> Result<Vec<RunPlace>, DbError> {
    let (sql, params) = page_by_time_sql(db.dialect(), requested, descending, start, limit);
    let rows = db.query(sql, params).await?;
    let places = rows.iter().map(|row| Ok(RunPlace { id: row.id(0)?, at: row.time(1)? }));
    let mut places = places.collect::<Result<Vec<_>, DbError>>()?;
    if matches!(start, PageStart::Before(_)) {
        places.reverse();
    }
    Ok(places)
}

/// For tests: plan of the statement that reads a page.
pub async fn explain_by_time(db: &Db, requested: &RunFilter, start: PageStart) -> Result<String, DbError> {
    let (sql, params) = page_by_time_sql(db.dialect(), requested, true, start, 100);
    db.explain(&sql, params).await
}

/// Number of runs by status, regardless of the requested statuses. Finished and active runs are counted through
/// separate indexes.
pub async fn counts(db: &Db, requested: &RunFilter) -> Result<Vec<(String, i64)>, DbError> {
    let mut counts = Vec::new();
    for which in ["r.finished", "NOT r.finished"] {
        let mut filter = requested.conditions(db.dialect());
        filter.and(which);
        let (found, params) = filter.done();
        let joins = requested.joins(None);
        let sql = format!("SELECT r.status, count(*) FROM runs r{joins}{found} GROUP BY r.status");
        for row in db.query(sql, params).await? {
            counts.push((row.text(0)?, row.int(1)?));
        }
    }
    Ok(counts)
}

pub async fn job_columns(db: &Db, runs: &[RunId]) -> Result<HashMap<RunId, JobColumns>, DbError> {
    let rows = db.query(JOB_COLUMNS.as_str(), params![Val::list(runs)]).await?;
    rows.into_iter().map(|row| JobColumns::read(row).map(|columns| (columns.id, columns))).collect()
}

pub async fn instance_names(
    db: &Db,
    instances: &[InstanceId],
) -> Result<HashMap<InstanceId, String>, DbError> {
    let rows = db.query(INSTANCE_NAMES.as_str(), params![Val::list(instances)]).await?;
    rows.iter().map(|row| Ok((row.id(0)?, row.text(1)?))).collect()
}
