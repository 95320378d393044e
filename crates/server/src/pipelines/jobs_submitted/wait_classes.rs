//! Waiting replicas by class: which of a batch are evaluated, which wait behind another job, and which are woken.
//!
//! Why not  evaluate all? The queue would be claimed, read and written again with each instance that becomes free, so
//!          each start would cost as much as the queue is long.
//! Why not  keep the queue in memory? Another replica may place its jobs; rows carry it over a restart for free.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use sha2::{Digest, Sha256};
use uuid::Uuid;
use windlass_engine::{ApplyOutcome, LeaseKey};
use windlass_model::{
    config::name::ResourceReference,
    id::SubmissionId,
    plan::{
        offers::Location,
        place::{Inventory, PlacementOutcome, ReplicaPlacement, WaitingReplica, place_replicas, spare_seats},
        wait_class,
    },
    time::Timestamp,
};

use super::{JobsSubmittedPipeline, LeasedReplica, Outcomes, QUEUE};
use crate::{
    attachments::mounts::VolumeCatalog,
    db::{
        jobs::Job,
        pipeline_rows::{
            placement::PoolInventory,
            wait_classes::{self as rows, OtherMembers, QueuePlace},
        },
        runs::Run,
    },
    parsed_run_spec::ParsedRunSpec,
    pass_error::PassError,
    waiting_replica::waiting_replica,
};

/// Maximum number of parked jobs that one round considers for the capacity that is left.
const LOOK_AHEAD_MAX: usize = 64;
/// Delay of a job that could not be parked, because the job before it left at the same time.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// A replica in the queue, as placement sees it.
pub(super) struct QueuedReplica<'a> {
    pub(super) replica: &'a LeasedReplica,
    pub(super) run: &'a Run,
    pub(super) waiting: WaitingReplica,
    fleet_names: Option<Vec<ResourceReference>>,
    /// `None` if it waits by itself.
    pub(super) class: Option<String>,
}

impl<'a> QueuedReplica<'a> {
    pub(super) fn new(
        replica: &'a LeasedReplica,
        run: &'a Run,
        shape: &ParsedRunSpec,
        volumes: &VolumeCatalog,
        full: &[Location],
    ) -> Result<Self, PassError> {
        let mut waiting = waiting_replica(run, &replica.nodes, &replica.specs, shape, volumes)?;
        for node in waiting.nodes.iter_mut().filter(|_| !full.is_empty()) {
            Arc::make_mut(&mut node.needs).avoid_locations.extend(full.iter().cloned());
        }
        let fleet_names = shape.fleet_names().map(<[_]>::to_vec);
        let class = wait_class::class_text(&waiting, fleet_names.as_deref()).map(|text| hash(&text));
        // While blocks are kept for it, it can be told apart from others.
        let class = class.filter(|_| replica.nodes.iter().all(|node| node.promised_until.is_none()));
        Ok(Self { replica, run, waiting, fleet_names, class })
    }

    /// Adds the fleets that the project may use and those that the run names, which are known only with the inventory.
    pub(super) fn select_fleets(&mut self, stock: &PoolInventory) {
        let project = self.waiting.project;
        self.waiting.usable_fleets = Some(stock.usable_fleets(project));
        self.waiting.fleets = self.fleet_names.as_ref().map(|names| stock.select(project, names));
        self.waiting.missing_fleets = stock.missing(project, self.fleet_names.as_deref().unwrap_or_default());
    }

    /// Its first node; replicas of a class have no other.
    pub(super) fn job(&self) -> &Job {
        &self.replica.nodes[0]
    }

    fn place(&self) -> QueuePlace {
        let job = self.job();
        QueuePlace { submitted_at: job.submitted_at, run: job.run_id, replica_num: job.replica_num }
    }

    fn key(&self) -> Option<LeaseKey> {
        self.replica.lease(self.job()).map(windlass_engine::Lease::key)
    }

    /// Returns whether it is stored as the evaluated job of its class.
    fn is_stored_head(&self) -> bool {
        self.class.is_some() && self.job().wait_class == self.class && !self.job().parked
    }
}

/// Half of the hash: enough that no two classes share it.
fn hash(text: &str) -> String {
    hex::encode(&Sha256::digest(text.as_bytes())[..16])
}

/// Divides the replicas of a class, in the order of the queue, into those to evaluate and those that wait behind
/// another job: one that is evaluated, or, except for the first, one that is parked.
fn split_class<'a>(
    mut members: Vec<QueuedReplica<'a>>,
    others: OtherMembers,
) -> (Vec<QueuedReplica<'a>>, Vec<QueuedReplica<'a>>) {
    members.sort_by_key(QueuedReplica::place);
    let is_behind =
        |other: Option<QueuePlace>, one: &QueuedReplica<'_>| other.is_some_and(|other| other < one.place());
    let first = members
        .iter()
        .enumerate()
        .position(|(at, one)| is_behind(others.evaluated, one) || (at > 0 && is_behind(others.parked, one)));
    let behind = members.split_off(first.unwrap_or(members.len()));
    (members, behind)
}

impl JobsSubmittedPipeline {
    /// Parks replicas that wait behind a job of their class which is not in this batch, and returns the others.
    pub(super) async fn park_followers<'a>(
        &self,
        queue: Vec<QueuedReplica<'a>>,
        outcomes: &mut BTreeMap<Uuid, ApplyOutcome>,
    ) -> Result<Vec<QueuedReplica<'a>>, PassError> {
        let classes: BTreeSet<&str> = queue.iter().filter_map(|one| one.class.as_deref()).collect();
        if classes.is_empty() {
            return Ok(queue);
        }
        let batch: Vec<SubmissionId> = queue.iter().map(|one| one.job().id).collect();
        let others = rows::others(&self.context.db, &classes, &batch).await?;
        let mut by_class: BTreeMap<String, Vec<QueuedReplica<'a>>> = BTreeMap::new();
        let mut evaluated = Vec::new();
        for one in queue {
            match one.class.clone() {
                Some(class) => by_class.entry(class).or_default().push(one),
                None => evaluated.push(one),
            }
        }
        for (class, members) in by_class {
            let known = others.get(&class).copied().unwrap_or_default();
            let (first, behind) = split_class(members, known);
            evaluated.extend(first);
            outcomes.extend(self.park(&class, &behind.iter().collect::<Vec<_>>()).await?);
        }
        Ok(evaluated)
    }

    /// Parks replicas of a class, in the order of the queue.
    pub(super) async fn park(
        &self,
        class: &str,
        members: &[&QueuedReplica<'_>],
    ) -> Result<Outcomes, PassError> {
        let Some(first) = members.first() else { return Ok(Vec::new()) };
        let held: Vec<LeaseKey> = members.iter().filter_map(|one| one.key()).collect();
        let stored = members.iter().filter_map(|one| one.job().wait_class.as_deref());
        let left: BTreeSet<&str> = stored.filter(|stored| *stored != class).collect();
        let parked = rows::park(&self.context.db, class, &first.place(), &held, &left).await?;
        let wake = if parked.woke { vec![QUEUE.pipeline] } else { Vec::new() };
        let outcome = |id: Uuid| match parked.ids.contains(&id) {
            true => ApplyOutcome::Written { due_in_us: None, wake: wake.clone() },
            false => ApplyOutcome::Unchanged { due_in: Some(RETRY_DELAY) },
        };
        Ok(held.iter().map(|held| (held.id, outcome(held.id))).collect())
    }

    /// Number of parked jobs that each class wakes once its evaluated job is placed: the next one, and as many as the
    /// remaining capacity could take. The queue is placed again together with these jobs, so that a later job of
    /// another class does not get ahead of them. `others` are those that this round does not place.
    pub(super) async fn wake_counts(
        &self,
        (queue, others): (&[QueuedReplica<'_>], &[WaitingReplica]),
        inventory: &Inventory,
        now: Timestamp,
        placements: &mut Vec<ReplicaPlacement>,
    ) -> Result<BTreeMap<String, i64>, PassError> {
        let mut counts: BTreeMap<String, i64> = BTreeMap::new();
        let mut ahead: Vec<WaitingReplica> = Vec::new();
        let mut class_of: BTreeMap<SubmissionId, &str> = BTreeMap::new();
        let placed = placements.iter().filter(|one| matches!(one.outcome, PlacementOutcome::Placed { .. }));
        // Its parked jobs may come before jobs of other classes that were placed, and use their capacity.
        let limit = spare_seats(inventory, placements)
            .saturating_add(placed.count().saturating_sub(1))
            .min(LOOK_AHEAD_MAX);
        for (class, first) in fully_placed(queue, placements) {
            counts.insert(class.to_owned(), 1);
            if limit == 0 {
                continue;
            }
            for parked in rows::next_parked(&self.context.db, class, limit).await? {
                let mut other = first.waiting.clone();
                (other.run, other.since) = (parked.place.run, parked.place.submitted_at);
                other.replica_num = u32::try_from(parked.place.replica_num).unwrap_or_default();
                other.nodes.iter_mut().for_each(|node| node.job = parked.id);
                class_of.insert(parked.id, class);
                ahead.push(other);
            }
        }
        if ahead.is_empty() {
            return Ok(counts);
        }
        ahead.extend(queue.iter().map(|one| one.waiting.clone()).chain(others.iter().cloned()));
        *placements = place_replicas(&ahead, inventory, now);
        placements.retain(|placement| {
            let Some(class) = placement.jobs.first().and_then(|job| class_of.get(job)) else { return true };
            if matches!(placement.outcome, PlacementOutcome::Placed { .. }) {
                *counts.entry((*class).to_owned()).or_default() += 1;
            }
            false
        });
        Ok(counts)
    }
}

/// Outcome of each replica, by its first job.
pub(super) fn outcomes_by_job(placements: &[ReplicaPlacement]) -> BTreeMap<SubmissionId, &PlacementOutcome> {
    placements.iter().filter_map(|one| Some((*one.jobs.first()?, &one.outcome))).collect()
}

/// Classes whose evaluated job is in the queue and all of whose jobs there are placed, each with one of them.
fn fully_placed<'a, 'b>(
    queue: &'b [QueuedReplica<'a>],
    placements: &[ReplicaPlacement],
) -> BTreeMap<&'b str, &'b QueuedReplica<'a>> {
    let outcomes = outcomes_by_job(placements);
    let is_placed = |one: &QueuedReplica<'_>| {
        matches!(outcomes.get(&one.job().id), Some(PlacementOutcome::Placed { .. }))
    };
    let waiting: BTreeSet<&str> =
        queue.iter().filter(|one| !is_placed(one)).filter_map(|one| one.class.as_deref()).collect();
    let heads = queue.iter().filter(|one| one.is_stored_head());
    let heads = heads.filter_map(|one| Some((one.class.as_deref()?, one)));
    heads.filter(|(class, _)| !waiting.contains(class)).collect()
}
