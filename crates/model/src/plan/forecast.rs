//! Forecast of a queue: when each waiting run starts if every job lasts until its time limit.
//!
//! Rounds of placement are played forward in time by the code that places jobs. Time moves to the next limit of a job,
//! whose blocks become free, or to the next period of a budget. Nothing is assumed about jobs without a limit, about jobs that end before theirs, and about
//! runs that are submitted later; no job is preempted.

use std::collections::BTreeMap;

use crate::{
    id::{InstanceId, ProjectId, RunId, SubmissionId, UserId},
    plan::{
        place::{
            BlockHold, FleetChoice, Inventory, NodePlacement, PlacementOutcome, WaitingReplica,
            place_replicas,
        },
        quota::HeldResources,
    },
    time::{Span, Timestamp},
};

/// Maximum number of rounds.
const ROUNDS_MAX: usize = 64;
/// Time that a job past its limit, or one that was preempted, is assumed to need for its end.
const END_TIME: Span = Span::mins(1);

/// Owner of a job on an instance, and what it holds: its quotas are free when it ends.
#[derive(Clone, Debug, PartialEq)]
pub struct HoldOwner {
    pub project: ProjectId,
    pub user: UserId,
    pub held: HeldResources,
}

/// Returns when the first replica of each run starts. Runs are missing whose start depends on a job without a limit.
pub fn forecast_starts(
    queue: &[WaitingReplica],
    inventory: &Inventory,
    owners: &BTreeMap<SubmissionId, HoldOwner>,
    now: Timestamp,
) -> BTreeMap<RunId, Timestamp> {
    let mut forecast = Forecast::new(queue, inventory, owners, now);
    let mut at = now;
    for _ in 0..ROUNDS_MAX {
        forecast.place(at);
        if forecast.queue.is_empty() {
            break;
        }
        let Some(next) = forecast.next_end() else { break };
        at = next.max(at);
        forecast.end_until(at);
    }
    forecast.starts
}

struct Forecast {
    inventory: Inventory,
    queue: Vec<WaitingReplica>,
    owners: BTreeMap<SubmissionId, HoldOwner>,
    /// Position of each instance in the inventory.
    positions: BTreeMap<InstanceId, usize>,
    starts: BTreeMap<RunId, Timestamp>,
}

impl Forecast {
    fn new(
        queue: &[WaitingReplica],
        inventory: &Inventory,
        owners: &BTreeMap<SubmissionId, HoldOwner>,
        now: Timestamp,
    ) -> Self {
        let mut inventory = Inventory { running: Vec::new(), held_by_class: Vec::new(), ..inventory.clone() };
        for hold in inventory.instances.iter_mut().flat_map(|instance| &mut instance.holds) {
            if hold.is_preempted || hold.until.is_some_and(|until| until <= now) {
                hold.until = Some(now + END_TIME);
            }
        }
        let positions = inventory.instances.iter().enumerate().map(|(at, one)| (one.id, at)).collect();
        Self { inventory, queue: queue.to_vec(), owners: owners.clone(), positions, starts: BTreeMap::new() }
    }

    /// Performs one round: what is placed holds its blocks until its own limit.
    fn place(&mut self, at: Timestamp) {
        for placement in place_replicas(&self.queue, &self.inventory, at) {
            let PlacementOutcome::Placed { fleet, seats } = placement.outcome else { continue };
            let first = placement.jobs.first().copied();
            let Some(position) = self.queue.iter().position(|waiting| waiting.first_job() == first) else {
                continue;
            };
            let waiting = self.queue.remove(position);
            self.starts.entry(waiting.run).or_insert(at);
            self.end_promises(&waiting);
            for other in self.queue.iter_mut().filter(|other| other.run == waiting.run) {
                other.fleet_choice = FleetChoice::Chosen(fleet);
            }
            for seat in &seats {
                self.occupy(&waiting, seat, at);
            }
            if let Some(room) = self.inventory.fleets.iter_mut().find(|room| room.id == fleet) {
                room.instance_nums.extend(seats.iter().filter_map(|seat| match seat {
                    NodePlacement::New { instance_num, .. } => Some(*instance_num),
                    NodePlacement::Existing { .. } => None,
                }));
            }
        }
    }

    /// Removes what is kept for a replica, which no longer counts once it is placed.
    fn end_promises(&mut self, waiting: &WaitingReplica) {
        let first = waiting.first_job();
        let (ended, left): (Vec<_>, Vec<_>) =
            self.inventory.promises.drain(..).partition(|promise| Some(promise.job) == first);
        self.inventory.promises = left;
        for promise in ended {
            let Some(position) = self.positions.get(&promise.instance) else { continue };
            let offer = &self.inventory.instances[*position].offer;
            let kept = HeldResources::of(offer, promise.blocks, offer.total_blocks);
            for quota in &mut self.inventory.quotas {
                if quota.applies_to(waiting.project, waiting.user) {
                    quota.used = quota.used.saturating_sub(kept.amount(&quota.resource));
                }
            }
        }
    }

    fn occupy(&mut self, waiting: &WaitingReplica, seat: &NodePlacement, at: Timestamp) {
        let (job, held) = match seat {
            NodePlacement::Existing { job, instance, blocks } => {
                let Some(position) = self.positions.get(instance) else { return };
                let instance = &mut self.inventory.instances[*position];
                let until = waiting.max_duration.map(|lasts| at + lasts);
                instance.holds.push(BlockHold { job: *job, blocks: *blocks, until, is_preempted: false });
                (*job, HeldResources::of(&instance.offer, *blocks, instance.offer.total_blocks))
            }
            NodePlacement::New { job, offers, .. } => {
                let known = offers.iter().filter_map(|new| {
                    let offer = self.inventory.offers.get(new.offer)?;
                    Some(HeldResources::of(offer, new.blocks, new.total_blocks))
                });
                (*job, HeldResources::largest(known))
            }
        };
        let owner = HoldOwner { project: waiting.project, user: waiting.user, held };
        self.count(&owner, |used, amount| used + amount);
        self.owners.insert(job, owner);
    }

    /// Counts what a job holds, or no longer holds, for the quotas and the usage of its project.
    fn count(&mut self, owner: &HoldOwner, change: impl Fn(u64, u64) -> u64) {
        for quota in &mut self.inventory.quotas {
            if quota.applies_to(owner.project, owner.user) {
                quota.used = change(quota.used, owner.held.amount(&quota.resource));
            }
        }
        for usage in self.inventory.usage.iter_mut().filter(|usage| usage.project == owner.project) {
            usage.held = change(usage.held, owner.held.milli_units());
        }
    }

    fn next_end(&self) -> Option<Timestamp> {
        let holds = self.inventory.instances.iter().flat_map(|instance| &instance.holds);
        let budgets = self.inventory.budgets.iter().filter(|budget| budget.excess().is_some());
        holds.filter_map(|hold| hold.until).chain(budgets.map(|budget| budget.ends_at)).min()
    }

    fn end_until(&mut self, at: Timestamp) {
        // The next period begins with a full budget.
        self.inventory.budgets.retain(|budget| budget.ends_at > at);
        let mut ended = Vec::new();
        for instance in &mut self.inventory.instances {
            instance.holds.retain(|hold| {
                let stays = hold.until.is_none_or(|until| until > at);
                if !stays {
                    ended.push(hold.job);
                }
                stays
            });
        }
        for job in ended {
            if let Some(owner) = self.owners.remove(&job) {
                self.count(&owner, u64::saturating_sub);
            }
        }
    }
}
