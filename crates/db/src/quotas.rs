//! Table `quotas`, and what jobs hold of them.

use std::collections::BTreeSet;

use uuid::Uuid;
use windlass_model::{
    id::{ProjectId, RunId, UserId},
    plan::{
        quota::{HeldResources, Quota, QuotaResource},
        usage,
    },
    time::Timestamp,
};
use windlass_planted_bugs::{Bug, is_planted};

use super::{Change, Db, DbError, Expect, Row, Unit, Val, Values, record::statements};
use crate::params;

/// Amount of the resource of quota `q` that a job holds.
pub(crate) fn held_amount(job: &str) -> String {
    format!(
        "CASE q.resource WHEN 'gpu' THEN {job}.held_gpus WHEN 'cpu' THEN {job}.held_cpus \
         WHEN 'memory' THEN {job}.held_memory_mib WHEN 'price' THEN {job}.held_price \
         ELSE CASE WHEN q.resource = 'gpu:' || lower({job}.held_gpu_name) THEN {job}.held_gpus ELSE 0 END END"
    )
}

/// Jobs that count for quota `q`, with their runs: those that hold instances, and those for which blocks are kept.
const COUNTED: &str = "jobs j JOIN runs r ON r.id = j.run_id WHERE j.project_id = q.project_id AND NOT j.finished \
                       AND (j.instance_id IS NOT NULL OR j.promised_until > now_us()) \
                       AND (q.user_id IS NULL OR r.user_id = q.user_id)";

/// Amount of the resource of quota `q` that its jobs hold.
fn used() -> String {
    format!("(SELECT CAST(coalesce(sum({}), 0) AS BIGINT) FROM {COUNTED})", held_amount("j"))
}

/// Time by which the first job ends that holds some of the resource of quota `q`.
fn first_end() -> String {
    format!(
        "(SELECT min(j.run_deadline_at) FROM {COUNTED} AND q.max_amount IS NOT NULL AND {} > 0)",
        held_amount("j")
    )
}

statements! {
    LIST = "SELECT q.project_id, q.user_id, q.resource, q.max_amount, q.share_amount, {}, u.name, {} FROM quotas q \
            LEFT JOIN users u ON u.id = q.user_id \
            WHERE q.project_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) ORDER BY u.name IS NOT NULL, u.name, q.resource, q.id", used(), first_end();
    SET = "INSERT INTO quotas (id, project_id, user_id, resource, max_amount, share_amount, created_at) \
           VALUES ($1, $2, $3, $4, $5, $6, now_us()) ON CONFLICT (project_id, coalesce(user_id, ''), resource) \
           DO UPDATE SET max_amount = excluded.max_amount, share_amount = excluded.share_amount";
    DELETE = "DELETE FROM quotas WHERE project_id = $1 AND coalesce(user_id, '') = coalesce(CAST($2 AS TEXT), '') AND resource = $3";
    /// Jobs of a project wait for its quotas.
    MARK_WAITING_DUE = "UPDATE jobs SET due_at = NULL WHERE project_id = $1 AND NOT finished AND status = 'submitted' \
                        AND NOT parked AND instance_id IS NULL";
    /// A unit that assigns jobs holds the quotas of their project until its end, so that the next sum is correct.
    HOLD = "UPDATE quotas SET max_amount = max_amount WHERE project_id = $1";
    /// Quotas of other members do not matter: they may hold more than a quota that was lowered.
    WITHIN = "UPDATE projects SET name = name WHERE id = $1 AND NOT EXISTS (SELECT 1 FROM quotas q WHERE q.project_id = $1 \
              AND q.resource IN (SELECT value FROM json_each(CAST($2 AS TEXT))) \
              AND (q.user_id IS NULL OR q.user_id = (SELECT r.user_id FROM runs r WHERE r.id = $3)) \
              AND {} > q.max_amount)", used();
    WITHIN_SHARE = "UPDATE projects SET name = name WHERE id = $1 AND NOT EXISTS (SELECT 1 FROM quotas q \
                    WHERE q.project_id = $1 AND q.resource = $2 AND q.user_id IS NULL AND {} + $3 > q.share_amount)", used();
}

/// A quota with the name of its member.
#[derive(Clone, Debug)]
pub struct NamedQuota {
    pub quota: Quota,
    pub member_name: Option<String>,
}

/// Quotas of these projects with their use.
pub async fn list(db: &Db, projects: &[ProjectId]) -> Result<Vec<NamedQuota>, DbError> {
    let rows = db.query(LIST.as_str(), vec![Val::list(projects)]).await?;
    // A resource that this version does not know limits nothing.
    Ok(rows.iter().map(read).collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
}

fn read(row: &Row) -> Result<Option<NamedQuota>, DbError> {
    let Some(resource) = QuotaResource::parse(row.str(2)?) else { return Ok(None) };
    let amount = |amount: i64| u64::try_from(amount).unwrap_or_default();
    let quota = Quota {
        project: row.id(0)?,
        member: row.opt_uuid(1)?.map(UserId),
        resource,
        max: row.opt_int(3)?.map(amount),
        share: row.opt_int(4)?.map(amount),
        used: amount(row.int(5)?),
        first_end: row.opt_time(7)?,
    };
    Ok(Some(NamedQuota { quota, member_name: row.opt_text(6)? }))
}

/// Adds or replaces a quota.
pub fn set(id: Uuid, quota: &Quota) -> Change {
    let amount = |amount: u64| i64::try_from(amount).unwrap_or(i64::MAX);
    let (max, share) = (quota.max.map(amount), quota.share.map(amount));
    let params = params![id, quota.project, quota.member, quota.resource.to_string(), max, share];
    Change::Exec { sql: SET.as_str().into(), params, expect: Expect::Any }
}

/// Stale if there is no such quota.
pub fn delete(project: ProjectId, member: Option<UserId>, resource: &QuotaResource) -> Change {
    let params = params![project, member, resource.to_string()];
    Change::Exec { sql: DELETE.as_str().into(), params, expect: Expect::One }
}

/// Makes the jobs due that wait in the project.
pub fn mark_waiting_due(project: ProjectId) -> Change {
    let sql = MARK_WAITING_DUE.as_str().into();
    Change::Exec { sql, params: params![project], expect: Expect::Any }
}

/// Requires that the jobs of a run which the unit assigns exceed no quota of their project and of the run's user.
pub fn require_within(unit: Unit, project: ProjectId, run: RunId, held: &[HeldResources]) -> Unit {
    if is_planted(Bug::QuotaWithoutRecount) {
        return unit;
    }
    let mut resources: Vec<String> = Vec::new();
    for held in held {
        let amounts =
            [("gpu", held.gpus), ("cpu", held.cpus), ("memory", held.memory_mib), ("price", held.price)];
        resources
            .extend(amounts.into_iter().filter(|(_, amount)| *amount > 0).map(|(name, _)| name.to_owned()));
        let named = held.gpu_name.as_ref().filter(|_| held.gpus > 0);
        resources.extend(named.map(|name| format!("gpu:{}", name.to_lowercase())));
    }
    let unit = unit.exec(HOLD.as_str(), params![project]);
    unit.expect_one(WITHIN.as_str(), vec![project.into(), Val::list(resources), run.into()])
}

/// Requires that what is kept for a replica of the project leaves it within its share of a resource. `more` is the
/// requested amount without the amount that is kept.
pub fn require_within_share(unit: Unit, project: ProjectId, resource: &QuotaResource, more: i64) -> Unit {
    unit.expect_one(WITHIN_SHARE.as_str(), params![project, resource.to_string(), more])
}

/// Holds the quotas of projects until the end of the unit, so that the next sums are correct.
pub fn hold(unit: Unit, projects: &BTreeSet<ProjectId>) -> Unit {
    projects.iter().fold(unit, |unit, project| unit.exec(HOLD.as_str(), params![*project]))
}

/// Columns of a job that is assigned to an instance, or for which blocks are kept.
pub fn held_columns(held: &HeldResources, now: Timestamp) -> Values {
    let amount = |amount: u64| Val::from(i64::try_from(amount).unwrap_or(i64::MAX));
    let units = held.milli_units();
    vec![
        ("held_gpus", amount(held.gpus)),
        ("held_gpu_name", held.gpu_name.as_deref().into()),
        ("held_cpus", amount(held.cpus)),
        ("held_memory_mib", amount(held.memory_mib)),
        ("held_price", amount(held.price)),
        ("held_at", now.into()),
        ("held_units", amount(units)),
        ("held_weighted", Val::Real(units as f64 * usage::weighted_secs_at(now))),
    ]
}
