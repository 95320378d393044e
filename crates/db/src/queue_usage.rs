//! Table `queue_usage`, and what containers of the queue hold: the usage of users, for the order of the queue.

use std::collections::{BTreeMap, BTreeSet};

use windlass_model::{
    id::{ProjectId, SubmissionId},
    plan::{quota::HeldResources, usage},
    time::Timestamp,
};

use super::{Change, Db, DbError, Expect, Val, queue_rank::QueueRank, record::statements};
use crate::params;

statements! {
    /// Containers that wait and are jobs of runs.
    JOBS = "SELECT c.uuid, j.project_id, j.priority, j.held_gpus, j.held_gpu_name, j.held_cpus, j.held_memory_mib, \
            j.held_price, j.held_units FROM containers c JOIN jobs j ON j.id = c.job_id WHERE c.state = 'Queued' AND NOT j.finished";
    ENDED = "SELECT u.owner_uuid, u.weighted FROM queue_usage u \
             WHERE u.owner_uuid IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    /// Resources that containers of users hold: in all, and those that run.
    HELD = "SELECT c.owner_uuid, CAST(sum(c.held_units) AS BIGINT), \
            CAST(sum(CASE WHEN c.held_weighted IS NULL THEN 0 ELSE c.held_units END) AS BIGINT), \
            coalesce(sum(c.held_weighted), 0.0) FROM containers c WHERE c.held_units > 0 AND c.job_id IS NULL \
            AND c.owner_uuid IN (SELECT value FROM json_each(CAST($1 AS TEXT))) GROUP BY c.owner_uuid";
    /// The resources of a job count as used from the start of its container on.
    JOB_WAITS = "UPDATE jobs SET held_at = NULL WHERE id = $1 AND NOT finished";
    JOB_STARTS = "UPDATE jobs SET held_at = $2, held_weighted = held_units * CAST($3 AS DOUBLE PRECISION) \
                  WHERE id = (SELECT c.job_id FROM containers c WHERE c.uuid = $1) AND NOT finished";
    HOLD = "UPDATE containers SET held_units = $2, held_weighted = CAST($3 AS DOUBLE PRECISION) WHERE uuid = $1";
    /// Counts what a container held that ran; once, because it holds nothing afterwards.
    ADD = "INSERT INTO queue_usage (owner_uuid, weighted) \
           SELECT c.owner_uuid, c.held_units * CAST($2 AS DOUBLE PRECISION) - c.held_weighted FROM containers c \
           WHERE c.uuid = $1 AND c.job_id IS NULL AND c.held_weighted IS NOT NULL \
           ON CONFLICT (owner_uuid) DO UPDATE SET weighted = queue_usage.weighted + excluded.weighted";
}

/// A queued container that is the job of a run.
#[derive(Clone, Debug)]
pub struct QueuedJob {
    pub uuid: String,
    pub project: ProjectId,
    pub rank: QueueRank,
    /// Resources that the job counts for the quotas of its project, although it waits.
    pub held: HeldResources,
    pub held_units: u64,
}

pub async fn queued_jobs(db: &Db) -> Result<Vec<QueuedJob>, DbError> {
    let amount = |amount: i64| u64::try_from(amount).unwrap_or_default();
    let rows = db.query(JOBS.as_str(), params![]).await?;
    let each = rows.iter().map(|row| {
        Ok(QueuedJob {
            uuid: row.text(0)?,
            project: row.id(1)?,
            rank: QueueRank::from_stored(row.int(2)?),
            held: HeldResources {
                gpus: amount(row.int(3)?),
                gpu_name: row.opt_text(4)?,
                cpus: amount(row.int(5)?),
                memory_mib: amount(row.int(6)?),
                price: amount(row.int(7)?),
            },
            held_units: amount(row.int(8)?),
        })
    });
    each.collect()
}

/// Usage of a user's containers.
#[derive(Clone, Copy, Debug, Default)]
pub struct UserUsage {
    /// Seconds of thousandths of units, decayed.
    pub used: f64,
    /// Thousandths of units that are held now.
    pub held: u64,
}

/// Usage of users, by uuid, without the jobs of their runs.
pub async fn of_users(
    db: &Db,
    users: &BTreeSet<String>,
    now: Timestamp,
) -> Result<BTreeMap<String, UserUsage>, DbError> {
    let mut found: BTreeMap<String, UserUsage> = BTreeMap::new();
    for row in db.query(ENDED.as_str(), params![Val::list(users)]).await? {
        found.entry(row.text(0)?).or_default().used += row.real(1)?;
    }
    for row in db.query(HELD.as_str(), params![Val::list(users)]).await? {
        let running = row.int(2)? as f64 * usage::weighted_secs_at(now) - row.real(3)?;
        let user = found.entry(row.text(0)?).or_default();
        user.held = u64::try_from(row.int(1)?).unwrap_or_default();
        user.used += running.max(0.0);
    }
    for user in found.values_mut() {
        user.used = usage::decayed_secs(user.used, now);
    }
    Ok(found)
}

/// Records that a job waits in the queue of containers, and uses nothing until its container starts.
pub fn job_waits(job: SubmissionId) -> Change {
    exec(JOB_WAITS.as_str(), params![job])
}

/// Records what a locked container holds. It uses nothing until it starts.
pub fn lock(uuid: &str, milli_units: u64) -> Change {
    hold(uuid, milli_units, None)
}

/// Records that a container starts, and the job that it is.
pub fn start(uuid: &str, milli_units: u64, now: Timestamp) -> [Change; 2] {
    let weighted = usage::weighted_secs_at(now);
    let held = hold(uuid, milli_units, Some(milli_units as f64 * weighted));
    [held, exec(JOB_STARTS.as_str(), params![uuid, now, weighted])]
}

fn hold(uuid: &str, milli_units: u64, weighted: Option<f64>) -> Change {
    let units = i64::try_from(milli_units).unwrap_or(i64::MAX);
    exec(HOLD.as_str(), params![uuid, units, weighted])
}

/// Counts what a container used, which holds nothing any more.
pub fn release(uuid: &str, now: Timestamp) -> [Change; 2] {
    [exec(ADD.as_str(), params![uuid, usage::weighted_secs_at(now)]), hold(uuid, 0, None)]
}

fn exec(sql: &'static str, params: Vec<Val>) -> Change {
    Change::Exec { sql: sql.into(), params, expect: Expect::Any }
}
