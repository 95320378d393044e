//! Preemption: replicas that run, blocks that are kept for those that wait, and the request that ends jobs.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use windlass_engine::LeaseKey;
use windlass_model::{
    id::{FleetId, InstanceId, ProjectId, RunId, SubmissionId},
    plan::{
        preemption::{BlockPromise, HeldByClass, Preemptibility, PreemptionRule, RunningJob, RunningReplica},
        quota::{HeldResources, QuotaResource},
    },
    time::{Span, Timestamp},
};
use windlass_planted_bugs::{Bug, is_planted};

use crate::{
    Change, Db, DbError, Expect, Row, Unit, Val, Values, WriteOutcome,
    documents::{JOB_PROMISED, leave_out},
    instances::Instance,
    params,
    queue_rank::QueueRank,
    quotas::{self, held_amount},
    record::statements,
};

/// Number of the class of a job; higher classes have higher numbers.
fn class(job: &str) -> String {
    format!("CASE WHEN {job}.priority < 0 THEN -1 WHEN {job}.priority < 1000 THEN 0 ELSE 1000 END")
}

statements! {
    RUNNING = "SELECT j.id, j.run_id, j.replica_num, j.project_id, j.priority, j.running_at, j.instance_id, j.blocks, \
               j.preemptible, j.preempted_before, r.service IS NOT NULL, j.status <> 'running' OR j.end_asked IS NOT NULL, \
               j.preempted_at IS NOT NULL, j.held_gpus, j.held_gpu_name, j.held_cpus, j.held_memory_mib, j.held_price \
               FROM jobs j JOIN runs r ON r.id = j.run_id \
               WHERE j.instance_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT j.finished \
               ORDER BY j.run_id, j.replica_num, j.job_num";
    HELD = "SELECT h.project_id, h.class, h.gpu_name, CAST(sum(h.held_gpus) AS BIGINT), CAST(sum(h.held_cpus) AS BIGINT), \
            CAST(sum(h.held_memory_mib) AS BIGINT), CAST(sum(h.held_price) AS BIGINT) FROM \
            (SELECT j.project_id, CAST({} AS BIGINT) AS class, \
            lower(coalesce(j.held_gpu_name, '')) AS gpu_name, j.held_gpus, j.held_cpus, j.held_memory_mib, j.held_price \
            FROM jobs j WHERE j.project_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT j.finished \
            AND j.instance_id IS NOT NULL) h GROUP BY h.project_id, h.class, h.gpu_name \
            ORDER BY h.project_id, h.class, h.gpu_name", class("j");
    /// After the instances were read: a promise and the number of its instance are written together.
    PROMISES = "SELECT j.promised, j.id FROM jobs j WHERE j.promised_until > $1 AND NOT j.finished AND j.status = 'submitted' \
                AND j.instance_id IS NULL";
    SPENT = "SELECT j.fleet_id, CAST(count(DISTINCT j.run_id || ' ' || j.replica_num) AS BIGINT) FROM jobs j \
             WHERE j.preempted_at > $1 AND j.fleet_id IS NOT NULL GROUP BY j.fleet_id";
    /// A unit that preempts holds the row of the fleet until its end, so that the next count is correct.
    HOLD_FLEET = "UPDATE fleets SET name = name WHERE id = $1";
    WITHIN_BUDGET = "UPDATE fleets SET name = name WHERE id = $1 AND (SELECT count(DISTINCT j.run_id || ' ' || j.replica_num) \
                     FROM jobs j WHERE j.preempted_at > $2 AND j.fleet_id = $1) <= $3";
    /// Only an instance on which nothing was placed or promised since it was read.
    PROMISE = "UPDATE instances SET promise_num = promise_num + 1 WHERE id = $1 AND promise_num = $2 AND busy_blocks <= $3 \
               AND status IN ('idle', 'busy') AND NOT unreachable AND NOT finished AND termination_asked_at IS NULL";
    REQUEST = "UPDATE jobs SET preempted_at = now_us(), preempted_for = $2, preemption = $3, due_at = NULL WHERE id = $1 \
               AND NOT finished AND status = 'running' AND end_asked IS NULL AND preempted_at IS NULL";
    /// Only if the project of the victim still holds its share without it, in its class and higher ones: other jobs of it
    /// may have ended since they were read.
    SHARE_KEPT = "UPDATE jobs SET preempted_at = preempted_at WHERE id = $1 AND NOT EXISTS (SELECT 1 FROM quotas q \
                  WHERE q.project_id = jobs.project_id AND q.user_id IS NULL AND q.share_amount IS NOT NULL AND {} > 0 \
                  AND (SELECT coalesce(sum({}), 0) FROM jobs j WHERE j.project_id = q.project_id AND NOT j.finished \
                  AND j.instance_id IS NOT NULL AND j.preempted_at IS NULL AND {} >= {}) < q.share_amount)",
                 held_amount("jobs"), held_amount("j"), class("j"), class("jobs");
    /// A preempted job is gone: the one that waits for its blocks becomes due.
    MARK_WAITING_DUE = "UPDATE jobs SET due_at = NULL WHERE id = $1 AND NOT finished AND status = 'submitted'";
}

/// Period of the budget of a fleet.
pub const BUDGET_PERIOD: Span = Span::mins(10);

/// Reason for a preemption, and its grace period, as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreemptionNote {
    pub rule: PreemptionRule,
    pub grace_us: i64,
    pub message: String,
}

/// Replicas with jobs on these instances.
pub async fn running(db: &Db, instances: &[InstanceId]) -> Result<Vec<RunningReplica>, DbError> {
    let mut replicas: Vec<RunningReplica> = Vec::new();
    for row in db.query(RUNNING.as_str(), vec![Val::list(instances)]).await? {
        let one = read_replica(&row)?;
        match replicas.last_mut().filter(|last| last.run == one.run && last.replica_num == one.replica_num) {
            Some(replica) => {
                replica.jobs.extend(one.jobs);
                replica.running_since = replica.running_since.zip(one.running_since).map(|(a, b)| a.max(b));
                replica.is_ending |= one.is_ending;
                replica.is_preempted |= one.is_preempted;
            }
            None => replicas.push(one),
        }
    }
    Ok(replicas)
}

fn read_replica(row: &Row) -> Result<RunningReplica, DbError> {
    let is_preempted = row.bool(12)?;
    let job = RunningJob {
        job: row.id(0)?,
        instance: row.id(6)?,
        blocks: u32::try_from(row.int(7)?).unwrap_or_default(),
        held: read_held(row, 13)?,
    };
    Ok(RunningReplica {
        project: row.id(3)?,
        run: row.id(1)?,
        replica_num: u32::try_from(row.int(2)?).unwrap_or_default(),
        class: QueueRank::from_stored(row.int(4)?).class,
        running_since: row.opt_time(5)?,
        // A value of a later version.
        preemptibility: row.str(8)?.parse().unwrap_or(Preemptibility::Never),
        is_service: row.bool(10)?,
        preempted_before: u32::try_from(row.int(9)?).unwrap_or_default(),
        is_ending: row.bool(11)? || is_preempted,
        is_preempted,
        jobs: vec![job],
    })
}

/// Reads what a job holds: GPUs and their name, CPUs, memory and price.
pub(crate) fn read_held(row: &Row, at: usize) -> Result<HeldResources, DbError> {
    let amount = |amount: i64| u64::try_from(amount).unwrap_or_default();
    Ok(HeldResources {
        gpus: amount(row.int(at)?),
        gpu_name: row.opt_text(at + 1)?,
        cpus: amount(row.int(at + 2)?),
        memory_mib: amount(row.int(at + 3)?),
        price: amount(row.int(at + 4)?),
    })
}

/// Resources that jobs of these projects hold, by class and name of GPUs.
pub async fn held_by_class(db: &Db, projects: &[ProjectId]) -> Result<Vec<HeldByClass>, DbError> {
    let rows = db.query(HELD.as_str(), vec![Val::list(projects)]).await?;
    let amount = |amount: i64| u64::try_from(amount).unwrap_or_default();
    let each = rows.iter().map(|row| {
        let held = HeldResources {
            gpus: amount(row.int(3)?),
            gpu_name: Some(row.text(2)?).filter(|name| !name.is_empty()),
            cpus: amount(row.int(4)?),
            memory_mib: amount(row.int(5)?),
            price: amount(row.int(6)?),
        };
        Ok(HeldByClass { project: row.id(0)?, class: QueueRank::from_stored(row.int(1)?).class, held })
    });
    each.collect()
}

/// Blocks that are kept for waiting jobs.
pub async fn promises(db: &Db, now: Timestamp) -> Result<Vec<BlockPromise>, DbError> {
    if is_planted(Bug::PromisesForgotten) {
        return Ok(Vec::new());
    }
    let rows = db.query(PROMISES.as_str(), params![now]).await?;
    let mut found = Vec::new();
    for row in &rows {
        let promises: Result<Vec<BlockPromise>, _> = JOB_PROMISED.decode(row.uuid(1)?, row.str(0)?);
        match promises {
            Ok(promises) => found.extend(promises),
            // An error would stop the placement of all jobs until the promise is over.
            Err(error) => leave_out(&error),
        }
    }
    Ok(found)
}

/// Number of replicas that were preempted in the period of the budget, by fleet.
pub async fn spent(db: &Db, now: Timestamp) -> Result<BTreeMap<FleetId, i64>, DbError> {
    let rows = db.query(SPENT.as_str(), params![now - BUDGET_PERIOD]).await?;
    rows.iter().map(|row| Ok((row.id(0)?, row.int(1)?))).collect()
}

/// Jobs that end, and the blocks that are kept for the job that waits for their end.
pub struct PreemptionUpdate<'a> {
    pub waiting: SubmissionId,
    pub held: LeaseKey,
    pub due_in_us: Option<i64>,
    /// Further columns of the waiting job.
    pub set: Values,
    pub promises: &'a [BlockPromise],
    pub promised_until: Timestamp,
    pub victims: Vec<(SubmissionId, PreemptionNote)>,
    /// Fleets of the victims with their budgets.
    pub budgets: BTreeMap<FleetId, u32>,
    /// Instances on which blocks are kept, as they were read.
    pub instances: Vec<&'a Instance>,
    pub now: Timestamp,
    pub wakes: Vec<Change>,
    /// The project and run of the waiting job.
    pub project: ProjectId,
    pub run: RunId,
    /// Resources of the blocks that are kept: they count for the quotas.
    pub kept: HeldResources,
    /// Projects whose quotas decide, that of the waiting job and those of the victims.
    pub quotas_of: BTreeSet<ProjectId>,
    /// Resources of which the project has a share and the replica requests some: the requested amount without what is
    /// kept.
    pub shares: Vec<(QuotaResource, i64)>,
}

/// Requests the end of all jobs and keeps the blocks, or does nothing.
pub async fn apply(db: &Db, update: PreemptionUpdate<'_>) -> Result<WriteOutcome, DbError> {
    let promised = serde_json::to_string(update.promises).unwrap_or_default();
    let mut set = update.set;
    set.extend([("promised", promised.into()), ("promised_until", update.promised_until.into())]);
    set.extend(quotas::held_columns(&update.kept, update.now));
    let mut unit = Unit::apply("jobs", update.held, update.due_in_us, set);
    for fleet in update.budgets.keys() {
        unit = unit.expect_one(HOLD_FLEET.as_str(), params![*fleet]);
    }
    for instance in update.instances {
        let params = params![instance.id, instance.promise_num, instance.busy_blocks];
        unit = unit.expect_one(PROMISE.as_str(), params);
    }
    let reclaimed: Vec<SubmissionId> = update
        .victims
        .iter()
        .filter(|(_, note)| note.rule == PreemptionRule::Share)
        .map(|(victim, _)| *victim)
        .collect();
    unit = quotas::hold(unit, &update.quotas_of);
    for (victim, note) in update.victims {
        let note = serde_json::to_string(&note).unwrap_or_default();
        unit = unit.expect_one(REQUEST.as_str(), params![victim, update.waiting, note]);
    }
    // Other jobs of its project may have been placed since the quotas were read.
    unit = quotas::require_within(unit, update.project, update.run, &[update.kept]);
    for (resource, more) in update.shares.iter().filter(|_| !reclaimed.is_empty()) {
        unit = quotas::require_within_share(unit, update.project, resource, *more);
    }
    for victim in reclaimed {
        unit = unit.expect_one(SHARE_KEPT.as_str(), params![victim]);
    }
    for (fleet, budget) in update.budgets {
        let params = params![fleet, update.now - BUDGET_PERIOD, i64::from(budget)];
        unit = unit.expect_one(WITHIN_BUDGET.as_str(), params);
    }
    db.write(unit.and(update.wakes)).await
}

/// Columns of a job that is placed: nothing is kept for it any more.
pub fn placed_columns() -> Values {
    vec![("promised", Val::Null), ("promised_until", Val::Null)]
}

/// Makes the job due for which a job was preempted that ends now.
pub fn mark_waiting_due(waiting: SubmissionId) -> Change {
    Change::Exec { sql: MARK_WAITING_DUE.as_str().into(), params: params![waiting], expect: Expect::Any }
}
