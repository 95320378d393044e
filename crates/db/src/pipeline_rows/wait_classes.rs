//! Classes of waiting jobs: those that placement evaluates, and those that are parked behind them.
//!
//! A job is in a class while `wait_class` is set. As long as a class has members, one of them is not parked: it is due
//! every few seconds and woken when capacity becomes free. A member that leaves wakes the next one in the same commit.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use serde::Deserialize;
use uuid::Uuid;
use windlass_engine::LeaseKey;
use windlass_model::{
    decide::jobs_submitted::POLL_INTERVAL,
    id::{RunId, SubmissionId},
    time::Timestamp,
};
use windlass_planted_bugs::{Bug, is_planted};

use crate::{
    Change, Db, DbError, Dialect, Unit, Val, documents::JOB_SPEC, jobs::Job, params, record::statements,
};

statements! {
    /// Place in the queue of the first evaluated and of the first parked job of each class, without some jobs.
    OTHERS = "SELECT c.value, \
              (SELECT j.submitted_at || ' ' || j.run_id || ' ' || j.replica_num FROM jobs j \
              WHERE j.wait_class = c.value AND j.parked = FALSE \
              AND j.id NOT IN (SELECT value FROM json_each(CAST($2 AS TEXT))) \
              ORDER BY j.submitted_at, j.run_id, j.replica_num LIMIT 1), \
              (SELECT j.submitted_at || ' ' || j.run_id || ' ' || j.replica_num FROM jobs j \
              WHERE j.wait_class = c.value AND j.parked = TRUE \
              AND j.id NOT IN (SELECT value FROM json_each(CAST($2 AS TEXT))) \
              ORDER BY j.submitted_at, j.run_id, j.replica_num LIMIT 1) \
              FROM json_each(CAST($1 AS TEXT)) c";
    NEXT_PARKED = "SELECT j.id, j.run_id, j.replica_num, j.submitted_at FROM jobs j \
                   WHERE j.wait_class = $1 AND j.parked = TRUE \
                   ORDER BY j.submitted_at, j.run_id, j.replica_num LIMIT $2";
    /// Each class is found in the index after the previous one, so that their members are not read.
    HEADLESS = "WITH RECURSIVE classes (class) AS (SELECT min(j.wait_class) FROM jobs j WHERE j.wait_class IS NOT NULL \
                UNION ALL SELECT (SELECT min(j.wait_class) FROM jobs j WHERE j.wait_class > c.class) FROM classes c \
                WHERE c.class IS NOT NULL) \
                SELECT c.class FROM classes c WHERE c.class IS NOT NULL \
                AND NOT EXISTS (SELECT 1 FROM jobs j WHERE j.wait_class = c.class AND j.parked = FALSE)";
    /// The evaluated job of each class whose reason is known.
    HEADS = "SELECT c.value, (SELECT j.id FROM jobs j WHERE j.wait_class = c.value AND j.parked = FALSE \
             ORDER BY j.status_message IS NULL, j.submitted_at, j.run_id, j.replica_num LIMIT 1) \
             FROM json_each(CAST($1 AS TEXT)) c";
    REASONS = "SELECT j.id, j.status_message, j.shortfalls, j.job_spec FROM jobs j \
               WHERE j.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
}

/// One statement in the two dialects, which differ in how rows are locked.
struct DialectSql {
    sqlite: String,
    postgres: String,
}

impl DialectSql {
    fn of(&self, db: &Db) -> &str {
        match db.dialect() {
            Dialect::Sqlite => &self.sqlite,
            Dialect::Postgres => &self.postgres,
        }
    }
}

/// Parks held jobs behind an evaluated job of their class, if there still is one before them. On Postgres that job is
/// locked: if it leaves at the same time, either it sees the parked jobs or they see that it left.
static PARK: LazyLock<DialectSql> = LazyLock::new(|| {
    let text = |share: &str, locks: &str| {
        format!(
            "WITH head AS MATERIALIZED (SELECT h.id FROM jobs h WHERE h.wait_class = $1 AND h.parked = FALSE \
             AND (h.submitted_at, h.run_id, h.replica_num) \
             < (CAST($2 AS BIGINT), CAST($3 AS TEXT), CAST($4 AS BIGINT)) \
             ORDER BY h.submitted_at, h.run_id, h.replica_num LIMIT 1{share}), \
             held AS MATERIALIZED (SELECT j.id FROM jobs j \
             WHERE j.id IN (SELECT value FROM json_each(CAST($5 AS TEXT))) \
             AND j.id || ':' || j.lock_token IN (SELECT value FROM json_each(CAST($6 AS TEXT))){locks}) \
             UPDATE jobs SET wait_class = $1, parked = TRUE, lock_token = NULL, lock_expires_at = NULL, \
             lock_owner = NULL, last_processed_at = now_us(), \
             due_at = CASE WHEN due_at IS NULL THEN NULL ELSE now_us() + CAST($7 AS BIGINT) END \
             WHERE id IN (SELECT id FROM held) AND EXISTS (SELECT 1 FROM head) RETURNING id"
        )
    };
    DialectSql { sqlite: text("", ""), postgres: text(" FOR SHARE", " ORDER BY j.id FOR NO KEY UPDATE") }
});

fn wake_sql(condition: &str, set: &str) -> DialectSql {
    let text = |skip: &str| {
        format!(
            "WITH next AS MATERIALIZED (SELECT j.id FROM jobs j WHERE j.wait_class = $1 AND j.parked = TRUE{condition} \
             ORDER BY j.submitted_at, j.run_id, j.replica_num LIMIT $2{skip}) \
             UPDATE jobs SET parked = FALSE, {set} WHERE id IN (SELECT id FROM next) RETURNING id, due_at IS NULL"
        )
    };
    // A locked job is being processed, so waiting for it could become a deadlock; the one after it does as well.
    DialectSql { sqlite: text(""), postgres: text(" FOR NO KEY UPDATE SKIP LOCKED") }
}

/// With the reason of the job that leaves, which holds until they are evaluated themselves. They are due at once if
/// placement could find something for them, else at their next evaluation: blocks that are released make them due.
static WAKE: LazyLock<DialectSql> = LazyLock::new(|| {
    let free = super::placement::FREE_CONDITION;
    let set = format!(
        "due_at = CASE WHEN $5 OR EXISTS (SELECT 1 FROM usable_fleets u JOIN instances i ON i.fleet_id = u.fleet_id \
         WHERE u.project_id = jobs.project_id AND {free}) THEN NULL ELSE now_us() + CAST($6 AS BIGINT) END, \
         status_message = CAST($3 AS TEXT), shortfalls = CAST($4 AS TEXT)"
    );
    wake_sql("", &set)
});
static WAKE_IF_HEADLESS: LazyLock<DialectSql> = LazyLock::new(|| {
    let is_headless = " AND NOT EXISTS (SELECT 1 FROM jobs h WHERE h.wait_class = $1 AND h.parked = FALSE)";
    wake_sql(is_headless, "due_at = NULL")
});

/// Time after which a parked job is evaluated even if nothing woke it.
const PARKED_MAX_US: i64 = 3_600_000_000;

/// Place of a job in the queue of its class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueuePlace {
    pub submitted_at: Timestamp,
    pub run: RunId,
    pub replica_num: i64,
}

impl QueuePlace {
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let (at, run, num) = (words.next()?, words.next()?, words.next()?);
        let run: Uuid = run.parse().ok()?;
        Some(Self {
            submitted_at: Timestamp(at.parse().ok()?),
            run: RunId(run),
            replica_num: num.parse().ok()?,
        })
    }
}

/// The first jobs of a class that are not in a batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct OtherMembers {
    pub evaluated: Option<QueuePlace>,
    pub parked: Option<QueuePlace>,
}

/// The first other members of each of these classes.
pub async fn others(
    db: &Db,
    classes: &BTreeSet<&str>,
    batch: &[SubmissionId],
) -> Result<BTreeMap<String, OtherMembers>, DbError> {
    let rows = db.query(OTHERS.as_str(), vec![Val::list(classes), Val::list(batch)]).await?;
    let place = |text: Option<String>| text.as_deref().and_then(QueuePlace::parse);
    let each = rows.iter().map(|row| {
        let others = OtherMembers { evaluated: place(row.opt_text(1)?), parked: place(row.opt_text(2)?) };
        Ok((row.text(0)?, others))
    });
    each.collect()
}

/// A parked job.
#[derive(Clone, Copy, Debug)]
pub struct ParkedJob {
    pub id: SubmissionId,
    pub place: QueuePlace,
}

/// The first parked jobs of a class.
pub async fn next_parked(db: &Db, class: &str, limit: usize) -> Result<Vec<ParkedJob>, DbError> {
    let rows = db.query(NEXT_PARKED.as_str(), params![class, limit]).await?;
    let each = rows.iter().map(|row| {
        let place = QueuePlace { submitted_at: row.time(3)?, run: row.id(1)?, replica_num: row.int(2)? };
        Ok(ParkedJob { id: row.id(0)?, place })
    });
    each.collect()
}

/// Result of parking.
#[derive(Clone, Debug, Default)]
pub struct Parked {
    pub ids: BTreeSet<Uuid>,
    /// True if jobs of the classes that they left were woken.
    pub woke: bool,
}

/// Parks held jobs behind an evaluated job before `first`, the place of the first of them. Those that are not returned
/// are still held, or their lease is lost. `left` are their former classes.
pub async fn park(
    db: &Db,
    class: &str,
    first: &QueuePlace,
    held: &[LeaseKey],
    left: &BTreeSet<&str>,
) -> Result<Parked, DbError> {
    let ids = Val::list(held.iter().map(|held| held.id));
    let pairs = Val::list(held.iter().map(|held| format!("{}:{}", held.id, held.token)));
    let (at, run, num) = (first.submitted_at, first.run, first.replica_num);
    let mut unit =
        Unit::new().query(PARK.of(db).to_owned(), params![class, at, run, num, ids, pairs, PARKED_MAX_US]);
    for left in left {
        unit = unit.and([wake_if_headless(db, left)]);
    }
    let (_, rows) = db.write(unit).await?.done()?;
    let mut rows = rows.into_iter();
    let parked = rows.next().unwrap_or_default();
    let ids = parked.iter().map(|row| row.uuid(0)).collect::<Result<_, _>>()?;
    Ok(Parked { ids, woke: rows.any(|woken| !woken.is_empty()) })
}

/// When woken jobs are evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WokenDue {
    AtOnce,
    /// At once if an instance that they may use has free blocks, else after the interval of waiting jobs.
    IfFree,
}

/// Wakes the parked jobs after `leaving`, which was evaluated for its class; returns their ids, and whether they are due.
pub fn wake_next(db: &Db, class: &str, count: i64, leaving: &Job, due: WokenDue) -> Change {
    let count = if is_planted(Bug::FollowerNotWoken) { 0 } else { count };
    // A reason that names an image names that of the leaving job.
    let reason = leaving.shortfalls.as_deref().filter(|text| !text.contains("\"image\""));
    let message = reason.and(leaving.status_message.as_deref());
    let is_due = due == WokenDue::AtOnce;
    let params = params![class, count, message, reason, is_due, POLL_INTERVAL.0];
    Change::Query { sql: WAKE.of(db).to_owned().into(), params }
}

/// Wakes the next parked job of a class if no other member is evaluated; returns its id, and that it is due.
pub fn wake_if_headless(db: &Db, class: &str) -> Change {
    let count = i64::from(!is_planted(Bug::FollowerNotWoken));
    Change::Query { sql: WAKE_IF_HEADLESS.of(db).to_owned().into(), params: params![class, count] }
}

/// Wakes a job of each class in which all are parked. There is none unless a wake-up was lost: two replicas may change
/// a class at the same moment. Returns whether there was one.
pub async fn wake_headless(db: &Db) -> Result<bool, DbError> {
    let found = db.query(HEADLESS.as_str(), Vec::new()).await?;
    if found.is_empty() {
        return Ok(false);
    }
    let mut unit = Unit::new();
    for row in &found {
        unit = unit.and([wake_if_headless(db, &row.text(0)?)]);
    }
    let (_, rows) = db.write(unit).await?.done()?;
    Ok(rows.iter().any(|woken| !woken.is_empty()))
}

/// Reason why the evaluated job of a class waits, which holds for the parked ones too.
#[derive(Clone, Debug, Default)]
pub struct WaitReason {
    pub message: Option<String>,
    /// JSON.
    pub shortfalls: Option<String>,
    /// Image of the evaluated job, which its reason may name.
    image: String,
}

impl WaitReason {
    /// The reason for a job with this specification: an image that it names is replaced with that of the job.
    pub fn for_spec(&self, job: impl std::fmt::Display, job_spec: &str) -> Result<Self, DbError> {
        Ok(self.for_image(image_name(job, job_spec)?))
    }

    fn for_image(&self, own: String) -> Self {
        if own == self.image || self.image.is_empty() {
            return self.clone();
        }
        let replace = |text: &String| {
            let named = |prefix: &str, end: &str, image: &str| format!("{prefix}{image}{end}");
            text.replace(&named("image ", "", &self.image), &named("image ", "", &own))
                .replace(&named("\"image\":\"", "\"", &self.image), &named("\"image\":\"", "\"", &own))
        };
        Self {
            message: self.message.as_ref().map(replace),
            shortfalls: self.shortfalls.as_ref().map(replace),
            image: own,
        }
    }
}

fn image_name(job: impl std::fmt::Display, job_spec: &str) -> Result<String, DbError> {
    #[derive(Deserialize)]
    struct Spec {
        #[serde(default)]
        image_name: String,
    }
    JOB_SPEC.decode(job, job_spec).map(|Spec { image_name }| image_name)
}

/// Reasons of these classes.
pub async fn reasons(db: &Db, classes: &BTreeSet<&str>) -> Result<BTreeMap<String, WaitReason>, DbError> {
    if classes.is_empty() {
        return Ok(BTreeMap::new());
    }
    let rows = db.query(HEADS.as_str(), vec![Val::list(classes)]).await?;
    let mut class_of: BTreeMap<Uuid, String> = BTreeMap::new();
    for row in &rows {
        if let Some(head) = row.opt_uuid(1)? {
            class_of.insert(head, row.text(0)?);
        }
    }
    let rows = db.query(REASONS.as_str(), vec![Val::list(class_of.keys())]).await?;
    let mut found = BTreeMap::new();
    for row in &rows {
        let Some(class) = class_of.remove(&row.uuid(0)?) else { continue };
        let (message, shortfalls) = (row.opt_text(1)?, row.opt_text(2)?);
        found
            .insert(class, WaitReason { message, shortfalls, image: image_name(row.uuid(0)?, row.str(3)?)? });
    }
    Ok(found)
}

/// Sets the reasons of parked jobs, which are not stored with them.
pub async fn add_reasons(db: &Db, jobs: &mut [Job]) -> Result<(), DbError> {
    let parked = |job: &Job| job.parked && !job.finished;
    let classes = jobs.iter().filter(|job| parked(job)).filter_map(|job| job.wait_class.as_deref());
    let found = reasons(db, &classes.collect()).await?;
    for job in jobs.iter_mut().filter(|job| parked(job)) {
        let reason = job.wait_class.as_ref().and_then(|class| found.get(class));
        let reason = match reason {
            Some(reason) => reason.for_spec(job.id, &job.job_spec)?,
            None => WaitReason::default(),
        };
        (job.status_message, job.shortfalls) = (reason.message, reason.shortfalls);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_the_evaluated_job_is_shown_with_the_image_of_the_parked_one() {
        let reason = WaitReason {
            message: Some("host-1: needs image debian:12, and only plain processes run there".to_owned()),
            shortfalls: Some(r#"{"refusals":[{"image":"debian:12"}]}"#.to_owned()),
            image: "debian:12".to_owned(),
        };
        let own = reason.for_image("ubuntu".to_owned());
        assert_eq!(
            own.message.as_deref(),
            Some("host-1: needs image ubuntu, and only plain processes run there")
        );
        assert_eq!(own.shortfalls.as_deref(), Some(r#"{"refusals":[{"image":"ubuntu"}]}"#));
    }

    #[test]
    fn places_sort_by_time_then_run_then_replica() {
        let run = RunId(Uuid::from_u128(7));
        let place = |at: i64, num: i64| QueuePlace { submitted_at: Timestamp(at), run, replica_num: num };
        assert!(place(1, 5) < place(2, 0));
        assert!(place(1, 0) < place(1, 1));
        assert_eq!(QueuePlace::parse(&format!("12 {} 3", run.0)), Some(place(12, 3)));
        assert_eq!(QueuePlace::parse("12"), None);
    }
}
