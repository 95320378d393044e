//! Events in the order of the feed of changes, and what the rows of their objects depend on.

use std::collections::BTreeSet;

use uuid::Uuid;
use windlass_model::{
    id::{InstanceId, ManagedJobId, ProjectId, RunId},
    time::Timestamp,
};

use super::{
    Db, DbError, Val,
    record::{record, statements},
};
use crate::params;

record! {
    /// An event, with the name of its subject.
    pub struct FeedEvent {
        pub seq: i64,
        pub entity: String,
        pub entity_id: Uuid,
        pub project_id: Option<ProjectId>,
        pub from_status: Option<String>,
        pub to_status: Option<String>,
        pub reason: Option<String>,
        pub message: String,
        pub recorded_at: Timestamp,
        pub name: Option<String>,
    }
}

record! {
    pub struct JobLinks {
        pub id: Uuid,
        pub run_id: RunId,
        pub instance_id: Option<InstanceId>,
    }
}

const COLUMNS: &str = "e.seq, e.entity, e.entity_id, e.project_id, e.from_status, e.to_status, e.reason, e.message, \
     e.recorded_at, (SELECT t.name FROM event_targets t WHERE t.event_id = e.id AND t.target_id = e.entity_id)";

statements! {
    NEWEST = "SELECT CAST(coalesce(max(e.seq), 0) AS BIGINT) FROM events e";
    AFTER = "SELECT {COLUMNS} FROM events e WHERE e.seq > $1 ORDER BY e.seq LIMIT $2";
    NUMBERS = "SELECT e.seq FROM events e WHERE e.seq > $1 AND e.seq <= $2 ORDER BY e.seq";
    AMONG = "SELECT {COLUMNS} FROM events e WHERE CAST(e.seq AS TEXT) IN \
             (SELECT value FROM json_each(CAST($1 AS TEXT))) AND e.seq >= $2 ORDER BY e.seq";
    NEWEST_LOG = "SELECT CAST(coalesce(max(l.id), 0) AS BIGINT) FROM queue_logs l";
    LOGS = "SELECT l.id, l.object_uuid FROM queue_logs l WHERE l.id > $1 ORDER BY l.id LIMIT $2";
    JOB_LINKS = "SELECT j.id, j.run_id, j.instance_id FROM jobs j \
                 WHERE j.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    JOB_NUMBERS = "SELECT m.id, m.number FROM managed_jobs m \
                   WHERE m.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    DELETED_RUNS = "SELECT r.id FROM runs r WHERE r.id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND r.deleted";
}

/// Highest number of an event; 0 if there is none.
pub async fn newest(db: &Db) -> Result<i64, DbError> {
    db.query_opt(NEWEST.as_str(), params![]).await?.map_or(Ok(0), |row| row.int(0))
}

/// Events with higher numbers, in their order. On Postgres a transaction may still add one below the last of them.
pub async fn list_after(db: &Db, seq: i64, limit: i64) -> Result<Vec<FeedEvent>, DbError> {
    db.query(AFTER.as_str(), params![seq, limit]).await?.into_iter().map(FeedEvent::read).collect()
}

/// Numbers of events in a range, whose start is excluded.
pub async fn list_numbers(db: &Db, after: i64, until: i64) -> Result<Vec<i64>, DbError> {
    db.query(NUMBERS.as_str(), params![after, until]).await?.iter().map(|row| row.int(0)).collect()
}

/// Events with these numbers, which are ascending.
pub async fn list_among(db: &Db, seqs: &[i64]) -> Result<Vec<FeedEvent>, DbError> {
    let Some(first) = seqs.first() else { return Ok(Vec::new()) };
    let rows = db.query(AMONG.as_str(), params![Val::list(seqs), *first]).await?;
    rows.into_iter().map(FeedEvent::read).collect()
}

pub async fn job_links(db: &Db, jobs: &[Uuid]) -> Result<Vec<JobLinks>, DbError> {
    db.query(JOB_LINKS.as_str(), params![Val::list(jobs)]).await?.into_iter().map(JobLinks::read).collect()
}

/// Numbers of managed jobs.
pub async fn job_numbers(db: &Db, jobs: &[Uuid]) -> Result<Vec<(ManagedJobId, i64)>, DbError> {
    let rows = db.query(JOB_NUMBERS.as_str(), params![Val::list(jobs)]).await?;
    rows.iter().map(|row| Ok((row.id(0)?, row.int(1)?))).collect()
}

/// Deleted runs among these.
pub async fn deleted_runs(db: &Db, runs: &[RunId]) -> Result<Vec<RunId>, DbError> {
    let rows = db.query(DELETED_RUNS.as_str(), params![Val::list(runs)]).await?;
    rows.iter().map(|row| row.id(0)).collect()
}

/// Highest number of a log record of the container queue.
pub async fn newest_log(db: &Db) -> Result<i64, DbError> {
    db.query_opt(NEWEST_LOG.as_str(), params![]).await?.map_or(Ok(0), |row| row.int(0))
}

/// Containers of the log records after this one, and the number of the last record.
pub async fn changed_containers(db: &Db, after: i64, limit: i64) -> Result<(Vec<String>, i64), DbError> {
    let (mut uuids, mut newest) = (BTreeSet::new(), after);
    for row in db.query(LOGS.as_str(), params![after, limit]).await? {
        newest = newest.max(row.int(0)?);
        let uuid = row.text(1)?;
        if uuid.contains("-dz642-") {
            uuids.insert(uuid);
        }
    }
    Ok((uuids.into_iter().collect(), newest))
}
