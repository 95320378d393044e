//! The queue for instances in the order of placement: the one source of positions for lists, runs, plans and the queue.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use windlass_model::{
    config::job_spec::JobSpec,
    id::{FleetId, ProjectId, RunId, SubmissionId},
    plan::{
        offers::InstanceNeeds,
        place::{FleetChoice, InstanceCreation, WaitingNode, WaitingReplica},
        queue_order::{OrderRule, ProjectUsage, list_before, list_order},
        quota::Quota,
    },
    time::Timestamp,
};

use crate::{
    db::{
        Db, DbError,
        documents::{JOB_SPEC, leave_out, of_run},
        instance_queue::{self as rows, QueuedJob},
        quotas::{self, NamedQuota},
        usage,
    },
    queue_rank::QueueRank,
};

/// Maximum number of jobs that are read; later ones have no position.
const JOBS_MAX: i64 = 20_000;

/// The waiting runs of all projects.
#[derive(Default)]
pub(crate) struct InstanceQueue {
    /// The first job of each run.
    pub(super) jobs: BTreeMap<RunId, QueuedJob>,
    /// Runs of all queues in order, each with the rule that puts it after the one before in its own queue.
    pub(super) order: Vec<(RunId, Option<OrderRule>)>,
    pub(super) replicas: Vec<WaitingReplica>,
    pub(super) usage: Vec<ProjectUsage>,
    pub(super) quotas: Vec<NamedQuota>,
    /// Time at which it was read.
    now: Timestamp,
    /// Position of the first replica of each run.
    first_replicas: BTreeMap<RunId, usize>,
    /// Projects that share fleets, with others in between or not, have the same number.
    pools: BTreeMap<ProjectId, usize>,
}

impl InstanceQueue {
    pub(crate) async fn load(db: &Db) -> Result<Self, DbError> {
        Self::load_with(db, None).await
    }

    /// Position of each run, as [`Self::positions`]. If only one project waits, its queue alone decides: usage, quotas and
    /// fleets are not read.
    pub(crate) async fn load_positions(db: &Db) -> Result<HashMap<RunId, i64>, DbError> {
        let queued = rows::queue(db, JOBS_MAX).await?;
        let mut projects = queued.chunk_by(|one, next| one.project_id == next.project_id);
        if projects.nth(1).is_some() {
            return Ok(Self::from_queued(db, queued, None).await?.positions());
        }
        let order = list_order(&replicas(&queued, false), &[], Vec::new(), db.now().await?);
        Ok(order.into_iter().map(|(run, _)| run).zip(0..).collect())
    }

    /// The queue with a replica that has not been submitted.
    pub(crate) async fn load_with(db: &Db, planned: Option<&WaitingReplica>) -> Result<Self, DbError> {
        let queued = rows::queue(db, JOBS_MAX).await?;
        Self::from_queued(db, queued, planned).await
    }

    async fn from_queued(
        db: &Db,
        queued: Vec<QueuedJob>,
        planned: Option<&WaitingReplica>,
    ) -> Result<Self, DbError> {
        let mut projects: BTreeSet<ProjectId> = queued.iter().map(|job| job.project_id).collect();
        projects.extend(planned.map(|planned| planned.project));
        // Within one project, resources do not matter.
        let mut replicas = replicas(&queued, projects.len() > 1);
        replicas.extend(planned.cloned());
        let projects: Vec<ProjectId> = projects.into_iter().collect();
        if projects.is_empty() {
            return Ok(Self::default());
        }
        let now = db.now().await?;
        let usage = usage::of_projects(db, &projects, now).await?;
        let quotas = quotas::list(db, &projects).await?;
        let pools = connect(&projects, &rows::usable_fleets(db, &projects).await?);
        let limits: Vec<Quota> = quotas.iter().map(|named| named.quota.clone()).collect();
        let mut order = list_order(&replicas, &usage, limits.clone(), now);
        let numbers: BTreeSet<usize> = pools.values().copied().collect();
        if numbers.len() > 1 {
            let mut rules = BTreeMap::new();
            for number in numbers {
                let own = replicas.iter().filter(|one| pools.get(&one.project) == Some(&number));
                let own: Vec<WaitingReplica> = own.cloned().collect();
                rules.extend(list_order(&own, &usage, limits.clone(), now));
            }
            order.iter_mut().for_each(|(run, rule)| *rule = rules.get(&*run).copied().flatten());
        }
        let mut jobs = BTreeMap::new();
        for job in queued {
            jobs.entry(job.run_id).or_insert(job);
        }
        let mut first_replicas = BTreeMap::new();
        for (at, replica) in replicas.iter().enumerate() {
            first_replicas.entry(replica.run).or_insert(at);
        }
        Ok(Self { jobs, order, replicas, usage, quotas, now, first_replicas, pools })
    }

    /// Number of runs before each run, among those of projects that share fleets with its project.
    pub(crate) fn positions(&self) -> HashMap<RunId, i64> {
        let mut before: BTreeMap<usize, i64> = BTreeMap::new();
        let position = |(run, _): &(RunId, Option<OrderRule>)| {
            let count = before.entry(self.pool_of(*run)?).or_default();
            *count += 1;
            Some((*run, *count - 1))
        };
        self.order.iter().filter_map(position).collect()
    }

    /// Runs that wait in the same queue, in order.
    pub(super) fn competing(&self, run: RunId) -> Vec<RunId> {
        let pool = self.pool_of(run);
        self.order.iter().map(|(run, _)| *run).filter(|other| self.pool_of(*other) == pool).collect()
    }

    /// Runs before one, in order, with the rules.
    pub(super) fn before(&self, run: RunId) -> Vec<(RunId, OrderRule)> {
        let pool = self.pool_of(run);
        let competing = self.replicas.iter().filter(|one| self.pools.get(&one.project).copied() == pool);
        let competing: Vec<WaitingReplica> = competing.cloned().collect();
        let quotas = self.quotas.iter().map(|named| named.quota.clone()).collect();
        list_before(&competing, &self.usage, quotas, run, self.now)
    }

    pub(super) fn replica(&self, run: RunId) -> Option<&WaitingReplica> {
        self.replicas.get(*self.first_replicas.get(&run)?)
    }

    pub(super) fn pool(&self, project: ProjectId) -> Option<usize> {
        self.pools.get(&project).copied()
    }

    pub(super) fn pool_of(&self, run: RunId) -> Option<usize> {
        self.pool(self.replica(run)?.project)
    }
}

/// Replicas as far as the order needs them.
fn replicas(queued: &[QueuedJob], with_resources: bool) -> Vec<WaitingReplica> {
    let mut found: BTreeMap<(RunId, i64), WaitingReplica> = BTreeMap::new();
    for (number, job) in (0_u128..).zip(queued) {
        let spec: Result<Option<JobSpec>, DbError> =
            with_resources.then(|| JOB_SPEC.decode(of_run(job.run_id), &job.job_spec)).transpose();
        let resources = match spec {
            Ok(spec) => spec.map(|spec| spec.requirements.resources),
            // The queue of everyone else has an order without it.
            Err(error) => {
                leave_out(&error);
                continue;
            }
        };
        let node = WaitingNode {
            job: SubmissionId(uuid::Uuid::from_u128(number)),
            needs: Arc::new(InstanceNeeds { resources, ..InstanceNeeds::default() }),
        };
        let since = job.queued_at.unwrap_or(job.submitted_at);
        let rank = QueueRank::from_stored(job.priority);
        let new = || WaitingReplica {
            project: job.project_id,
            user: job.user_id,
            run: job.run_id,
            replica_num: u32::try_from(job.replica_num).unwrap_or_default(),
            class: rank.class,
            priority: rank.priority,
            since,
            nodes: Vec::new(),
            fleet_choice: FleetChoice::Choose,
            usable_fleets: None,
            fleets: None,
            missing_fleets: Vec::new(),
            creation: InstanceCreation::Reuse,
            max_duration: None,
            resubmitted_at: None,
        };
        let replica = found.entry((job.run_id, job.replica_num)).or_insert_with(new);
        replica.since = replica.since.min(since);
        replica.nodes.push(node);
    }
    found.into_values().collect()
}

/// Numbers projects so that those have the same number which share a fleet, directly or through others.
fn connect(projects: &[ProjectId], usable: &[(ProjectId, FleetId)]) -> BTreeMap<ProjectId, usize> {
    let mut pools: BTreeMap<ProjectId, usize> = projects.iter().copied().zip(0..).collect();
    let mut of_fleet: BTreeMap<FleetId, usize> = BTreeMap::new();
    for (project, fleet) in usable {
        let Some(pool) = pools.get(project).copied() else { continue };
        let joined = *of_fleet.entry(*fleet).or_insert(pool);
        if joined != pool {
            let all = pools.values_mut().chain(of_fleet.values_mut());
            all.filter(|other| **other == pool).for_each(|other| *other = joined);
        }
    }
    pools
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn projects_that_share_fleets_through_others_are_in_one_pool() {
        let project = |number| ProjectId(Uuid::from_u128(number));
        let fleet = |number| FleetId(Uuid::from_u128(number));
        let projects: Vec<ProjectId> = (1..=5).map(project).collect();
        let usable = [(1, 1), (2, 2), (3, 1), (3, 2), (4, 3)];
        let usable: Vec<_> = usable.iter().map(|(one, other)| (project(*one), fleet(*other))).collect();
        let pools = connect(&projects, &usable);
        let of = |number| pools[&project(number)];
        assert!(of(1) == of(2) && of(2) == of(3), "{pools:?}");
        let others: BTreeSet<usize> = [of(1), of(4), of(5)].into();
        assert_eq!(others.len(), 3, "{pools:?}");
    }
}
