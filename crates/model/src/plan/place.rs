//! Placement: assigns instances to a queue of waiting jobs, or returns all reasons why not.
//!
//! Order    As in `queue_order`. Each replica in turn uses the tightest free blocks that exist, or else requests
//!          a new instance from the cheapest offers. A replica that cannot start does not block the others.
//! Turn     A job that has waited `RESERVE_AFTER` and is blocked only by the use of others reserves the instances that
//!          become free soonest; later jobs may use them only if they are certain to end in time. Reserved
//!          instances only become emptier, so the job starts eventually. A round must therefore know every job that may
//!          reserve instances, also those that it does not place.
//! Nodes    All nodes of a replica or none, whole instances, one backend and region, cluster fleets. In a fleet with a
//!          single instance they share it, so that a cluster can be tried out on one machine.
//! Others   Running jobs are ended for a waiting one only in fleets with `preemption`: see `preemption`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    config::run::RunClass,
    explain::{Refusal, Shortfall},
    id::{FleetId, InstanceId, ProjectId, RunId, SubmissionId, UserId},
    plan::{
        blocks::Blocks,
        budget::Budget,
        offers::{InstanceNeeds, Offer},
        placement_round::PlacementRound,
        preemption::{BlockPromise, HeldByClass, Preemption, PreemptionRules, RunningReplica},
        queue_order::{ProjectUsage, QueueOrder},
        quota::Quota,
    },
    time::{Span, Timestamp},
};

/// Time in the queue after which a job may reserve instances.
pub const RESERVE_AFTER: Span = Span::mins(5);
/// Maximum number of offers that are passed on, to be tried one after another.
pub const OFFERS_MAX: usize = 25;
/// Maximum number of distinct refusals of a job; the nearest misses are kept and the rest counted.
pub const REFUSALS_MAX: usize = 64;

/// Selection of the fleet of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FleetChoice {
    /// The run already has a fleet.
    Chosen(FleetId),
    /// Job 0 of replica 0 of a run without a fleet: selects it.
    Choose,
    /// Any other job of a run without a fleet: waits.
    Follow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstanceCreation {
    Reuse,
    ReuseOrCreate,
}

#[derive(Clone, Debug, PartialEq)]
pub struct WaitingNode {
    pub job: SubmissionId,
    pub needs: Arc<InstanceNeeds>,
}

/// One replica that waits for placement: one node, or all of its nodes together.
#[derive(Clone, Debug, PartialEq)]
pub struct WaitingReplica {
    pub project: ProjectId,
    /// User who submitted the run.
    pub user: UserId,
    pub run: RunId,
    pub replica_num: u32,
    pub class: RunClass,
    /// From 0 to 100; higher is placed first.
    pub priority: u32,
    pub since: Timestamp,
    pub nodes: Vec<WaitingNode>,
    pub fleet_choice: FleetChoice,
    /// Fleets that its project may use; `None` means all.
    pub usable_fleets: Option<Arc<BTreeSet<FleetId>>>,
    /// `fleets:` of the run; `None` means any.
    pub fleets: Option<Vec<FleetId>>,
    /// Those of `fleets:` that do not exist, or that its project may not use.
    pub missing_fleets: Vec<String>,
    pub creation: InstanceCreation,
    /// `max_duration`: lets a short job use reserved instances in the meantime.
    pub max_duration: Option<Span>,
    /// Time at which it was submitted again, if it keeps its place from before it was preempted.
    pub resubmitted_at: Option<Timestamp>,
}

impl WaitingReplica {
    /// Returns its first node, which represents it.
    pub fn first_job(&self) -> Option<SubmissionId> {
        self.nodes.first().map(|node| node.job)
    }

    /// Returns for how long it has waited since it was submitted.
    pub fn waited(&self, now: Timestamp) -> Span {
        now.since(self.resubmitted_at.unwrap_or(self.since))
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct FleetSnapshot {
    pub id: FleetId,
    pub name: String,
    /// `placement: cluster`.
    pub is_cluster: bool,
    /// True if it may create instances (not for SSH fleets).
    pub can_create: bool,
    /// Number of instances that it keeps even if idle.
    pub nodes_min: u32,
    pub nodes_max: Option<u32>,
    /// Numbers of all instances that are not terminated, including placeholders: each occupies a slot.
    pub instance_nums: BTreeSet<u32>,
    /// Requirements of the fleet on new instances; both these and the job's needs must hold.
    pub limits: InstanceNeeds,
    pub blocks: Blocks,
    /// Rules by which its jobs may be preempted; `None`: they are not.
    pub preemption: Option<PreemptionRules>,
}

impl FleetSnapshot {
    /// Returns whether the fleet has one instance and cannot get another, or will have only one.
    pub fn has_one_instance_at_most(&self) -> bool {
        self.instance_nums.len() <= 1 && (!self.can_create || self.nodes_max == Some(1))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Readiness {
    Ready,
    Provisioning,
    Unreachable,
    Unhealthy,
    Draining,
}

/// Blocks of an instance that a job occupies.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockHold {
    pub job: SubmissionId,
    pub blocks: u32,
    /// Time by which it is certain to end, if known.
    pub until: Option<Timestamp>,
    /// True if the job ends because the scheduler preempted it: its blocks are promised to another job.
    pub is_preempted: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct InstanceSnapshot {
    pub id: InstanceId,
    pub fleet: FleetId,
    pub name: String,
    pub instance_num: u32,
    pub hostname: Option<String>,
    /// Its resources. A host with 0 CPUs has not been inspected yet.
    pub offer: Offer,
    pub readiness: Readiness,
    pub holds: Vec<BlockHold>,
    /// True if it is kept however long it is idle.
    pub is_kept: bool,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory {
    pub fleets: Vec<FleetSnapshot>,
    pub instances: Vec<InstanceSnapshot>,
    /// Instances that backends would create.
    pub offers: Vec<Offer>,
    /// Quotas of the projects whose replicas are placed, with what they hold now.
    pub quotas: Vec<Quota>,
    /// Budgets of these projects, with what they have spent.
    pub budgets: Vec<Budget>,
    /// Usage of these projects. One that is not listed has used nothing.
    pub usage: Vec<ProjectUsage>,
    /// Blocks that are kept for jobs for which others were preempted.
    pub promises: Vec<BlockPromise>,
    /// Replicas that run on the instances, if some may be preempted, and what all projects hold by class.
    pub running: Vec<RunningReplica>,
    pub held_by_class: Vec<HeldByClass>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct NewOffer {
    /// Index into `Inventory::offers`.
    pub offer: usize,
    pub blocks: u32,
    pub total_blocks: u32,
}

/// Assignment of a node.
#[derive(Clone, Debug, PartialEq)]
pub enum NodePlacement {
    Existing {
        job: SubmissionId,
        instance: InstanceId,
        blocks: u32,
    },
    /// A placeholder now, an instance when one of the offers (best first) is granted.
    New {
        job: SubmissionId,
        instance_num: u32,
        offers: Vec<NewOffer>,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub enum PlacementOutcome {
    Placed {
        fleet: FleetId,
        seats: Vec<NodePlacement>,
    },
    /// Blocked by other jobs; it is tried again.
    Waits {
        why: Arc<RefusalReport>,
        /// Instances reserved for it.
        reserved: Vec<InstanceId>,
    },
    /// Waiting cannot help.
    Never {
        why: Arc<RefusalReport>,
    },
}

/// All reasons, nearest miss first.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct RefusalReport {
    pub refusals: Vec<Refusal>,
    /// Number of refusals beyond `REFUSALS_MAX`.
    pub left_out: usize,
    /// Nothing that exists fits the request, and no fleet could create anything else.
    #[serde(skip)]
    pub for_good: bool,
}

impl RefusalReport {
    pub fn single(place: impl Into<String>, shortfall: Shortfall) -> Self {
        let refusal = Refusal { place: place.into(), count: 1, shortfalls: vec![shortfall] };
        Self { refusals: vec![refusal], left_out: 0, for_good: false }
    }

    /// Returns whether a quota or a budget prevents the start.
    pub fn is_over_bound(&self) -> bool {
        self.refusals.iter().any(Refusal::is_over_bound)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaPlacement {
    pub run: RunId,
    pub replica_num: u32,
    /// Nodes of the replica, as in `Waiting`.
    pub jobs: Vec<SubmissionId>,
    pub outcome: PlacementOutcome,
    /// Replicas that end so that this one, which waits, can start.
    pub preemption: Option<Preemption>,
}

/// Assigns instances to the waiting replicas. The result has one entry per waiting replica, in the order in which they
/// were considered, and does not depend on the order of the arguments.
pub fn place_replicas(
    queue: &[WaitingReplica],
    inventory: &Inventory,
    now: Timestamp,
) -> Vec<ReplicaPlacement> {
    let mut round = PlacementRound::new(inventory, now);
    let mut order = QueueOrder::new(queue, &inventory.usage, &round.quotas, now);
    let mut chosen: BTreeMap<RunId, FleetId> = BTreeMap::new();
    let mut placements = Vec::with_capacity(queue.len());
    while let Some(waiting) = order.pop() {
        let choice = match waiting.fleet_choice {
            FleetChoice::Follow => chosen.get(&waiting.run).copied().map(FleetChoice::Chosen),
            FleetChoice::Choose | FleetChoice::Chosen(_) => Some(waiting.fleet_choice),
        };
        let (outcome, preemption) = match choice {
            Some(choice) => round.place_replica(waiting, choice),
            None => {
                let why = Arc::new(RefusalReport::single("every fleet", Shortfall::FleetNotChosen));
                (PlacementOutcome::Waits { why, reserved: Vec::new() }, None)
            }
        };
        if let PlacementOutcome::Placed { fleet, .. } = &outcome {
            chosen.entry(waiting.run).or_insert(*fleet);
        }
        let is_placed = matches!(outcome, PlacementOutcome::Placed { .. });
        order.record(waiting, is_placed, &round.quotas);
        placements.push(ReplicaPlacement {
            run: waiting.run,
            replica_num: waiting.replica_num,
            jobs: waiting.nodes.iter().map(|node| node.job).collect(),
            outcome,
            preemption,
        });
    }
    placements
}

/// Returns a bound for the number of further replicas that could be placed after these: free blocks, and more if a fleet
/// could create instances.
pub fn spare_seats(inventory: &Inventory, placements: &[ReplicaPlacement]) -> usize {
    let has_slot = |fleet: &FleetSnapshot| {
        fleet
            .nodes_max
            .is_none_or(|max| fleet.instance_nums.len() < usize::try_from(max).unwrap_or(usize::MAX))
    };
    if !inventory.offers.is_empty()
        && inventory.fleets.iter().any(|fleet| fleet.can_create && has_slot(fleet))
    {
        return usize::MAX;
    }
    let ready = inventory.instances.iter().filter(|instance| instance.readiness == Readiness::Ready);
    let free = ready.map(|instance| {
        let held: u32 = instance.holds.iter().map(|held| held.blocks).sum();
        instance.offer.total_blocks.max(1).saturating_sub(held)
    });
    let seats = placements.iter().filter_map(|placement| match &placement.outcome {
        PlacementOutcome::Placed { seats, .. } => Some(seats),
        PlacementOutcome::Waits { .. } | PlacementOutcome::Never { .. } => None,
    });
    let taken = seats.flatten().map(|seat| match seat {
        NodePlacement::Existing { blocks, .. } => *blocks,
        NodePlacement::New { .. } => 0,
    });
    let (free, taken): (u64, u64) = (free.map(u64::from).sum(), taken.map(u64::from).sum());
    usize::try_from(free.saturating_sub(taken)).unwrap_or(usize::MAX)
}
