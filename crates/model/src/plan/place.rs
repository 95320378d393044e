//! Placement: a queue of waiting jobs and an inventory in, a seat or all the reasons out.
//!
//! Order    priority first, then age. Each in turn takes the tightest free blocks that exist, else asks
//!          for a new instance from the cheapest offers. One that cannot start holds up nobody.
//! Turn     A job that has waited `RESERVE_AFTER` and is stopped only by others' use reserves the
//!          instances that free soonest; what comes after it may not take them unless it is sure to be
//!          gone in time. Reserved instances only get emptier, so its turn comes.
//! Nodes    All nodes of a replica or none, whole instances, one backend and region, cluster fleets.
//! Why not  preempt? Nobody asked to be killed; a bounded wait is the kinder contract.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    explain::{Refusal, Shortfall},
    id::{FleetId, InstanceId, ProjectId, RunId, SubmissionId},
    plan::{
        blocks::Blocks,
        offers::{InstanceNeeds, Offer},
        queue::PlacementRound,
    },
    time::{Span, Timestamp},
};

/// After this long in the queue a job may reserve instances.
pub const RESERVE_AFTER: Span = Span::mins(5);
/// How many offers are handed on, to be tried one after another.
pub const OFFERS_MAX: usize = 25;
/// How many different refusals a job carries; the nearest misses are kept and the rest counted.
pub const REFUSALS_MAX: usize = 64;

/// Who picks the fleet of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FleetChoice {
    /// The run has one already.
    Chosen(FleetId),
    /// Job 0 of replica 0 of a run without one.
    Choose,
    /// Any other job of a run without one: waits.
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

/// One replica that waits for a place: one node, or all of its nodes together.
#[derive(Clone, Debug, PartialEq)]
pub struct WaitingReplica {
    pub project: ProjectId,
    pub run: RunId,
    pub replica_num: u32,
    /// 0..=100, more goes first.
    pub priority: u32,
    pub since: Timestamp,
    pub nodes: Vec<WaitingNode>,
    pub choice: FleetChoice,
    /// `fleets:` of the run; `None` = any.
    pub fleets: Option<Vec<FleetId>>,
    pub creation: InstanceCreation,
    /// `max_duration`: lets a short job use reserved instances in the meantime.
    pub lasts: Option<Span>,
}

impl WaitingReplica {
    /// Its first node, which speaks for it.
    pub fn job(&self) -> Option<SubmissionId> {
        self.nodes.first().map(|node| node.job)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct FleetSnapshot {
    pub id: FleetId,
    pub name: String,
    /// `placement: cluster`.
    pub cluster: bool,
    /// Whether it may create instances (not for SSH fleets).
    pub creates: bool,
    /// So many of its instances it keeps, however idle they are.
    pub nodes_min: u32,
    pub nodes_max: Option<u32>,
    /// Of every instance that is not terminated, placeholders too: each holds a slot.
    pub instance_nums: BTreeSet<u32>,
    /// What the fleet asks of new instances; both this and the job's needs must hold.
    pub limits: InstanceNeeds,
    pub blocks: Blocks,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Readiness {
    Ready,
    Provisioning,
    Unreachable,
    Unhealthy,
    Draining,
}

/// A job's hold on an instance.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockHold {
    pub job: SubmissionId,
    pub blocks: u32,
    /// When it is sure to be over, if that is known.
    pub until: Option<Timestamp>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct InstanceSnapshot {
    pub id: InstanceId,
    pub fleet: FleetId,
    pub name: String,
    pub instance_num: u32,
    pub hostname: Option<String>,
    /// What it is. A host with 0 CPUs is one nobody has looked at yet.
    pub offer: Offer,
    pub readiness: Readiness,
    pub held: Vec<BlockHold>,
    /// It is kept however long it is idle.
    pub stays: bool,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory {
    pub fleets: Vec<FleetSnapshot>,
    pub instances: Vec<InstanceSnapshot>,
    /// What backends would create.
    pub offers: Vec<Offer>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct NewOffer {
    /// Index into `Inventory::offers`.
    pub offer: usize,
    pub blocks: u32,
    pub total_blocks: u32,
}

/// Where a node goes.
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
    /// Others are in the way; it will be tried again.
    Waits {
        why: Arc<RefusalReport>,
        /// What is kept free for it.
        reserved: Vec<InstanceId>,
    },
    /// No waiting would help.
    Never {
        why: Arc<RefusalReport>,
    },
}

/// All the reasons, nearest miss first.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct RefusalReport {
    pub refusals: Vec<Refusal>,
    /// How many more there were than `REFUSALS_MAX`.
    pub left_out: usize,
    /// Nothing that exists has what is asked for, and no fleet could make anything else.
    #[serde(skip)]
    pub for_good: bool,
}

impl RefusalReport {
    pub fn one(place: impl Into<String>, shortfall: Shortfall) -> Self {
        let refusal = Refusal { place: place.into(), count: 1, shortfalls: vec![shortfall] };
        Self { refusals: vec![refusal], left_out: 0, for_good: false }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaPlacement {
    pub run: RunId,
    pub replica_num: u32,
    /// The nodes it is about, as in `Waiting`.
    pub jobs: Vec<SubmissionId>,
    pub outcome: PlacementOutcome,
}

/// Places what can be placed. The answer has one entry per waiting replica, in the order they were
/// considered, and does not depend on the order of the arguments.
pub fn place(queue: &[WaitingReplica], inventory: &Inventory, now: Timestamp) -> Vec<ReplicaPlacement> {
    let mut order: Vec<&WaitingReplica> = queue.iter().filter(|waiting| !waiting.nodes.is_empty()).collect();
    order.sort_by_key(|waiting| {
        (std::cmp::Reverse(waiting.priority), waiting.since, waiting.run, waiting.replica_num, waiting.job())
    });
    let mut round = PlacementRound::new(inventory, now);
    let mut chosen: BTreeMap<RunId, FleetId> = BTreeMap::new();
    let mut placements = Vec::with_capacity(order.len());
    for waiting in order {
        let choice = match waiting.choice {
            FleetChoice::Follow => chosen.get(&waiting.run).copied().map(FleetChoice::Chosen),
            FleetChoice::Choose | FleetChoice::Chosen(_) => Some(waiting.choice),
        };
        let outcome = match choice {
            Some(choice) => round.place_replica(waiting, choice),
            None => PlacementOutcome::Waits {
                why: Arc::new(RefusalReport::one("every fleet", Shortfall::FleetNotChosen)),
                reserved: Vec::new(),
            },
        };
        if let PlacementOutcome::Placed { fleet, .. } = &outcome {
            chosen.entry(waiting.run).or_insert(*fleet);
        }
        placements.push(ReplicaPlacement {
            run: waiting.run,
            replica_num: waiting.replica_num,
            jobs: waiting.nodes.iter().map(|node| node.job).collect(),
            outcome,
        });
    }
    placements
}
