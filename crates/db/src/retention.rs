//! Deletion of old rows over several tables: found by one statement and deleted by others, a few rows at a time.
//!
//! Finished objects never become active again, so nothing can change between the two.

use uuid::Uuid;
use windlass_model::{
    id::{ProjectId, RunId},
    time::{Span, Timestamp},
};

use super::{
    Db, DbError, Unit, Val,
    record::{record, statements},
};
use crate::params;

record! {
    /// A run that ended long ago.
    pub struct OldRun {
        pub id: RunId,
        pub project_id: ProjectId,
        pub finished_at: Option<Timestamp>,
    }
}

statements! {
    /// The events after a place, in the order of time, and whether each is to be deleted. An event is kept while its subject
    /// is active, except for instances and fleets, which may exist for years: of them the newest one is kept, and the
    /// newest one with a status. The newest of all is always kept: the clock of SQLite starts there. Every row is read
    /// once in a round, so that those which are kept do not slow down the batches after them.
    OLD_EVENTS = "SELECT e.id, e.recorded_at, e.seq < (SELECT max(n.seq) FROM events n) \
        AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.id = e.entity_id AND NOT r.finished) \
        AND NOT EXISTS (SELECT 1 FROM jobs j JOIN runs r ON r.id = j.run_id \
                        WHERE j.id = e.entity_id AND NOT r.finished) \
        AND NOT EXISTS (SELECT 1 FROM managed_jobs m WHERE m.id = e.entity_id AND NOT m.finished) \
        AND NOT ((NOT EXISTS (SELECT 1 FROM events n WHERE n.entity_id = e.entity_id AND n.seq > e.seq) \
                  OR e.to_status IS NOT NULL AND NOT EXISTS (SELECT 1 FROM events n WHERE n.entity_id = e.entity_id \
                                                             AND n.seq > e.seq AND n.to_status IS NOT NULL)) \
                 AND (EXISTS (SELECT 1 FROM instances i WHERE i.id = e.entity_id AND NOT i.finished) \
                      OR EXISTS (SELECT 1 FROM fleets f WHERE f.id = e.entity_id AND NOT f.deleted))) \
        AND NOT EXISTS (SELECT 1 FROM volumes v WHERE v.id = e.entity_id AND NOT v.deleted) \
        AND NOT EXISTS (SELECT 1 FROM gateways g WHERE g.id = e.entity_id AND NOT g.deleted) \
        FROM events e WHERE e.recorded_at < now_us() - $1 \
        AND (e.recorded_at, e.id) > (CAST($3 AS BIGINT), CAST($4 AS TEXT)) ORDER BY e.recorded_at, e.id LIMIT $2";
    DELETE_TARGETS = "DELETE FROM event_targets WHERE event_id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    DELETE_EVENTS = "DELETE FROM events WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    /// Attempts of a managed job are kept while it is active.
    OLD_RUNS = "SELECT {} FROM runs r WHERE r.finished AND r.finished_at < now_us() - $1 \
        AND (r.finished_at, r.id) > (CAST($3 AS BIGINT), CAST($4 AS TEXT)) \
        AND NOT EXISTS (SELECT 1 FROM jobs j WHERE j.run_id = r.id AND NOT j.finished) \
        AND NOT EXISTS (SELECT 1 FROM managed_jobs m WHERE m.id = r.managed_job_id AND NOT m.finished) \
        ORDER BY r.finished_at, r.id LIMIT $2", OldRun::columns("r");
    DELETE_METRICS = "DELETE FROM job_metrics WHERE job_id IN (SELECT id FROM jobs \
        WHERE run_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))))";
    DELETE_HOLDS = "DELETE FROM volume_holds WHERE job_id IN (SELECT id FROM jobs \
        WHERE run_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))))";
    DELETE_SEATS = "DELETE FROM proxy_seats WHERE job_id IN (SELECT id FROM jobs \
        WHERE run_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))))";
    DELETE_REQUESTS = "DELETE FROM service_requests WHERE run_id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    DELETE_MINUTES = "DELETE FROM service_minutes WHERE run_id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    DELETE_DEPLOYMENTS = "DELETE FROM deployments WHERE run_id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    DELETE_ANSWERS = "DELETE FROM service_answers WHERE run_id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    DELETE_DOMAINS = "DELETE FROM service_domains WHERE run_id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    DELETE_JOBS = "DELETE FROM jobs WHERE run_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND finished";
    DELETE_RUNS = "DELETE FROM runs WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND finished";
    /// Named by an active run, or by a stored one that was submitted while it was in use.
    OLD_CODES = "SELECT c.id FROM codes c JOIN repos p ON p.id = c.repo_id \
        WHERE coalesce(c.used_at, c.created_at) < now_us() - $1 \
        AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.project_id = p.project_id AND NOT r.deleted AND NOT r.finished \
                        AND (r.spec LIKE '%' || c.hash || '%' OR r.settled_spec LIKE '%' || c.hash || '%')) \
        AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.project_id = p.project_id AND NOT r.deleted \
                        AND r.submitted_at >= c.created_at \
                        AND r.submitted_at <= coalesce(c.used_at, now_us()) + {DAY_US} \
                        AND r.spec LIKE '%' || c.hash || '%') \
        ORDER BY coalesce(c.used_at, c.created_at) LIMIT $2";
    DELETE_CODES = "DELETE FROM codes WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    OLD_ARCHIVES = "SELECT a.id FROM archives a WHERE coalesce(a.used_at, a.created_at) < now_us() - $1 \
        AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.user_id = a.user_id AND NOT r.finished \
                        AND (r.spec LIKE '%' || a.id || '%' OR r.settled_spec LIKE '%' || a.id || '%')) \
        AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.user_id = a.user_id AND NOT r.deleted \
                        AND r.submitted_at >= a.created_at \
                        AND r.submitted_at <= coalesce(a.used_at, now_us()) + {DAY_US} \
                        AND r.spec LIKE '%' || a.id || '%') \
        AND NOT EXISTS (SELECT 1 FROM managed_jobs m WHERE m.user_id = a.user_id \
                        AND (NOT m.finished OR m.finished_at > now_us() - $3) AND m.files LIKE '%' || a.id || '%') \
        ORDER BY coalesce(a.used_at, a.created_at) LIMIT $2";
    /// Passwords of registries that no stored run refers to.
    OLD_PASSWORDS = "SELECT p.id FROM registry_passwords p WHERE p.created_at < now_us() - $1 \
        AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.project_id = p.project_id AND r.user_id = p.user_id \
                        AND (r.spec LIKE '%sealed:' || p.id || '%' \
                             OR r.settled_spec LIKE '%sealed:' || p.id || '%')) \
        ORDER BY p.created_at LIMIT $2";
    DELETE_PASSWORDS = "DELETE FROM registry_passwords \
        WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    DELETE_ARCHIVES = "DELETE FROM archives WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
}

/// A client uploads, and submits shortly afterwards; a slow one has a day.
const DAY_US: i64 = 86_400_000_000;
/// Longer than any row is kept.
const FOREVER: Span = Span(i64::MAX / 4);

async fn ids(db: &Db, sql: &'static str, params: Vec<Val>) -> Result<Vec<Uuid>, DbError> {
    db.query(sql, params).await?.iter().map(|row| row.uuid(0)).collect()
}

/// Place in the order of time of the rows that a round looks at.
#[derive(Clone, Copy, Debug)]
pub struct TimePlace {
    at: Timestamp,
    id: Uuid,
}

impl TimePlace {
    /// Before all rows.
    pub const START: Self = Self { at: Timestamp(i64::MIN), id: Uuid::nil() };
}

/// Result of one batch.
#[derive(Clone, Copy, Debug)]
pub struct EventBatch {
    pub deleted: usize,
    /// Start of the next batch; `None` if there are no more rows.
    pub next: Option<TimePlace>,
}

/// Looks at the next `most` events that were recorded longer ago than `keep`, and deletes those that are not kept.
pub async fn delete_events(
    db: &Db,
    keep: Span,
    most: usize,
    after: TimePlace,
) -> Result<EventBatch, DbError> {
    let rows = db.query(OLD_EVENTS.as_str(), params![keep.0, most, after.at, after.id]).await?;
    let mut old = Vec::new();
    let mut last = None;
    for row in &rows {
        let id = row.uuid(0)?;
        last = Some(TimePlace { at: row.time(1)?, id });
        old.extend(row.bool(2)?.then_some(id));
    }
    if !old.is_empty() {
        let unit = Unit::new()
            .exec(DELETE_TARGETS.as_str(), params![Val::list(&old)])
            .exec(DELETE_EVENTS.as_str(), params![Val::list(&old)]);
        db.write(unit).await?.done()?;
    }
    Ok(EventBatch { deleted: old.len(), next: last.filter(|_| rows.len() >= most) })
}

/// For tests: plan of the statement that finds old events.
pub async fn explain_old_events(db: &Db) -> Result<String, DbError> {
    let after = TimePlace::START;
    db.explain(OLD_EVENTS.as_str(), params![0_i64, 10_i64, after.at, after.id]).await
}

/// Runs after a place that ended longer ago than `keep`, oldest first.
pub async fn old_runs(db: &Db, keep: Span, most: usize, after: TimePlace) -> Result<Vec<OldRun>, DbError> {
    let rows = db.query(OLD_RUNS.as_str(), params![keep.0, most, after.at, after.id]).await?;
    rows.into_iter().map(OldRun::read).collect()
}

impl OldRun {
    pub fn place(&self) -> TimePlace {
        TimePlace { at: self.finished_at.unwrap_or(Timestamp(i64::MIN)), id: self.id.0 }
    }
}

/// Deletes finished runs and all rows that are only about them. A missing run is not an error.
pub async fn delete_runs(db: &Db, runs: &[RunId]) -> Result<(), DbError> {
    let mut unit = Unit::new();
    for sql in [
        &DELETE_METRICS,
        &DELETE_HOLDS,
        &DELETE_SEATS,
        &DELETE_REQUESTS,
        &DELETE_ANSWERS,
        &DELETE_MINUTES,
        &DELETE_DEPLOYMENTS,
        &DELETE_DOMAINS,
        &DELETE_JOBS,
        &DELETE_RUNS,
    ] {
        unit = unit.exec(sql.as_str(), params![Val::list(runs)]);
    }
    db.write(unit).await?.done().map(drop)
}

/// Deletes at most `most` diffs, archives and passwords of registries each, that were not used for longer than `keep`
/// and that no stored object names.
/// Ended managed jobs are kept for `keep_jobs`.
pub async fn delete_uploads(
    db: &Db,
    keep: Span,
    keep_jobs: Option<Span>,
    most: usize,
) -> Result<usize, DbError> {
    let codes = ids(db, OLD_CODES.as_str(), params![keep.0, most]).await?;
    let jobs = keep_jobs.unwrap_or(FOREVER);
    let archives = ids(db, OLD_ARCHIVES.as_str(), params![keep.0, most, jobs.0]).await?;
    let passwords = ids(db, OLD_PASSWORDS.as_str(), params![keep.0, most]).await?;
    for (sql, old) in
        [(&DELETE_CODES, &codes), (&DELETE_ARCHIVES, &archives), (&DELETE_PASSWORDS, &passwords)]
    {
        if !old.is_empty() {
            db.write(Unit::new().exec(sql.as_str(), params![Val::list(old)])).await?.done()?;
        }
    }
    Ok(codes.len() + archives.len() + passwords.len())
}
