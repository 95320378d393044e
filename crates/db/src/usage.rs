//! Table `usage_days`, and the usage of jobs that run.

use std::collections::BTreeMap;

use windlass_model::{
    id::{ProjectId, UserId},
    plan::{queue_order::ProjectUsage, usage},
    time::Timestamp,
};

use super::{
    Change, Db, DbError, Expect, Val,
    jobs::Job,
    record::{record, statements},
};
use crate::{params, queue_rank::QueueRank};

/// Older usage counts less than a thousandth.
const DAYS_READ: i64 = 70;
const DAY_US: i64 = 86_400_000_000;
const HOUR_US: i128 = 3_600_000_000;
const MS_US: i64 = 1_000;

/// Jobs of project `p` that hold instances. Those without `held_at` wait in the queue of containers, and use nothing yet.
const OPEN_JOBS: &str = "j.project_id = p.id AND NOT j.finished AND j.instance_id IS NOT NULL";

statements! {
    /// Ended jobs by day, jobs that run, and weights.
    OF_PROJECTS = "SELECT p.id, p.usage_weight, \
                   (SELECT coalesce(sum(d.weighted), 0.0) FROM usage_days d WHERE d.project_id = p.id AND d.day >= $2), \
                   (SELECT CAST(coalesce(sum(j.held_units), 0) AS BIGINT) FROM jobs j WHERE {OPEN_JOBS}), \
                   (SELECT CAST(coalesce(sum(j.held_units), 0) AS BIGINT) FROM jobs j WHERE {OPEN_JOBS} AND j.held_at IS NOT NULL), \
                   (SELECT coalesce(sum(j.held_weighted), 0.0) FROM jobs j WHERE {OPEN_JOBS} AND j.held_at IS NOT NULL) \
                   FROM projects p WHERE p.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    DAYS = "SELECT d.day, d.project_id, d.user_id, d.class, d.jobs, d.gpu_ms, d.cpu_ms, d.cost FROM usage_days d \
            WHERE d.project_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND d.day >= $2 AND d.day <= $3";
    OPEN = "SELECT j.project_id, r.user_id, j.priority, j.held_at, j.held_gpus, j.held_cpus, j.held_price FROM jobs j \
            JOIN runs r ON r.id = j.run_id WHERE j.project_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) \
            AND NOT j.finished AND j.instance_id IS NOT NULL AND j.held_at IS NOT NULL AND j.provisioned_at IS NOT NULL";
    NAMES = "SELECT u.id, u.name FROM users u WHERE u.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    ADD = "INSERT INTO usage_days (day, project_id, user_id, class, jobs, gpu_ms, cpu_ms, cost, weighted) \
           SELECT CAST($2 AS BIGINT), r.project_id, r.user_id, CAST($3 AS TEXT), CAST($4 AS BIGINT), CAST($5 AS BIGINT), \
           CAST($6 AS BIGINT), CAST($7 AS BIGINT), CAST($8 AS DOUBLE PRECISION) FROM runs r WHERE r.id = $1 \
           ON CONFLICT (project_id, day, user_id, class) DO UPDATE SET jobs = usage_days.jobs + excluded.jobs, \
           gpu_ms = usage_days.gpu_ms + excluded.gpu_ms, cpu_ms = usage_days.cpu_ms + excluded.cpu_ms, \
           cost = usage_days.cost + excluded.cost, weighted = usage_days.weighted + excluded.weighted";
}

/// Usage of projects, for the order of their queues.
pub async fn of_projects(
    db: &Db,
    projects: &[ProjectId],
    now: Timestamp,
) -> Result<Vec<ProjectUsage>, DbError> {
    let since = now.0 / DAY_US - DAYS_READ;
    let rows = db.query(OF_PROJECTS.as_str(), vec![Val::list(projects), since.into()]).await?;
    let each = rows.iter().map(|row| {
        let (ended, open) = (row.real(2)?, row.real(5)?);
        let held = u64::try_from(row.int(3)?).unwrap_or_default();
        let running = row.int(4)? as f64 * usage::weighted_secs_at(now) - open;
        Ok(ProjectUsage {
            project: row.id(0)?,
            used: usage::decayed_secs(ended + running.max(0.0), now),
            held,
            weight: u32::try_from(row.int(1)?).unwrap_or(1),
        })
    });
    each.collect()
}

record! {
    /// Usage of the jobs of a user in a project and a class on one day.
    pub struct UsageDay {
        /// Since 1970, in UTC.
        pub day: i64,
        pub project_id: ProjectId,
        pub user_id: UserId,
        pub class: String,
        /// Submissions that ended.
        pub jobs: i64,
        pub gpu_ms: i64,
        pub cpu_ms: i64,
        /// Millionths of a dollar.
        pub cost: i64,
    }
}

/// Usage of projects from the first to the last of these days: of jobs that ended, and of those that run until now.
pub async fn days(
    db: &Db,
    projects: &[ProjectId],
    (first, last): (i64, i64),
    now: Timestamp,
) -> Result<Vec<UsageDay>, DbError> {
    let rows = db.query(DAYS.as_str(), params![Val::list(projects), first, last]).await?;
    let mut found = rows.into_iter().map(UsageDay::read).collect::<Result<Vec<_>, _>>()?;
    for row in db.query(OPEN.as_str(), vec![Val::list(projects)]).await? {
        let class = QueueRank::from_stored(row.int(2)?).class.as_str();
        let held = HeldAmounts { gpus: row.int(4)?, cpus: row.int(5)?, price: row.int(6)? };
        for (day, from, to) in usage::split_by_day(row.time(3)?, now) {
            if (first..=last).contains(&day) {
                let (gpu_ms, cpu_ms, cost) = held.over(from, to);
                found.push(UsageDay {
                    day,
                    project_id: row.id(0)?,
                    user_id: row.id(1)?,
                    class: class.to_owned(),
                    jobs: 0,
                    gpu_ms,
                    cpu_ms,
                    cost,
                });
            }
        }
    }
    Ok(found)
}

/// Names of users.
pub async fn user_names(db: &Db, users: &[UserId]) -> Result<BTreeMap<UserId, String>, DbError> {
    let rows = db.query(NAMES.as_str(), vec![Val::list(users)]).await?;
    rows.iter().map(|row| Ok((row.id(0)?, row.text(1)?))).collect()
}

/// Part of an instance that a job holds.
#[derive(Clone, Copy)]
struct HeldAmounts {
    gpus: i64,
    cpus: i64,
    price: i64,
}

impl HeldAmounts {
    /// Milliseconds of GPUs and CPUs, and the cost, of a period.
    fn over(self, from: Timestamp, to: Timestamp) -> (i64, i64, i64) {
        let time = to.since(from).0;
        let cost = i128::from(self.price) * i128::from(time) / HOUR_US;
        (self.gpus * time / MS_US, self.cpus * time / MS_US, i64::try_from(cost).unwrap_or(i64::MAX))
    }
}

/// Counts what a job held, which ends now.
pub fn add(job: &Job, now: Timestamp) -> Vec<Change> {
    let (Some(from), Some(_)) = (job.held_at, job.provisioned_at) else { return Vec::new() };
    let class = QueueRank::from_stored(job.priority).class;
    let parts = usage::split_by_day(from, now);
    let last = parts.len().saturating_sub(1);
    let held = HeldAmounts { gpus: job.held_gpus, cpus: job.held_cpus, price: job.held_price };
    let part = |(at, (day, from, to)): (usize, (i64, Timestamp, Timestamp))| {
        let (gpu_ms, cpu_ms, cost) = held.over(from, to);
        let weighted = job.held_units as f64 * usage::weighted_secs(from, to);
        let params = vec![
            job.run_id.into(),
            day.into(),
            class.as_str().into(),
            i64::from(at == last).into(),
            gpu_ms.into(),
            cpu_ms.into(),
            cost.into(),
            Val::Real(weighted),
        ];
        Change::Exec { sql: ADD.as_str().into(), params, expect: Expect::Any }
    };
    parts.into_iter().enumerate().map(part).collect()
}
