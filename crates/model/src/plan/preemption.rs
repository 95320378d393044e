//! Preemption: running replicas end so that a waiting one can start.
//!
//! Where    Only on instances of fleets with `preemption`, whose project decides about it.
//! Rules    A replica of a higher class may take from a lower one, of any project. A project that stays within its
//!          guaranteed share may take from a project that holds more than its own, in the same class or a lower one.
//!          Never within one class of a project, never between two projects that both borrow, and nothing by which a
//!          project would fall below its share in the class in question.
//! Which    Replicas as a whole, that may be preempted and have run for long enough. None, unless all nodes of the
//!          waiting replica then fit and nothing that ends by itself suffices. No member of the set can be left out.
//! Ends     For each class, from the highest: what is held within shares by replicas of at least this class, then the
//!          number of such replicas. Each preemption with its start increases this sequence, and so does each start
//!          without one, so without new jobs there is a last one. `tests/it/preemption.rs` tries that with random pools.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use windlass_planted_bugs::{Bug, is_planted};

use crate::{
    config::run::RunClass,
    id::{InstanceId, ProjectId, RunId, SubmissionId},
    plan::{
        gang::{CandidatePool, GangMember},
        place::{FleetSnapshot, WaitingReplica},
        placement_round::{PlacementQuery, PlacementRound},
        queue_order::is_within_share,
        quota::{HeldResources, QuotaResource},
        usage,
    },
    state_machine::words,
    time::{Span, Timestamp},
};

/// Maximum number of waiting replicas for which one round looks for victims.
const SEARCHES_MAX: usize = 32;
/// The minimum run time of a replica that was preempted before doubles each time, at most this often.
const DOUBLINGS_MAX: u32 = 6;

/// Rules of a fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreemptionRules {
    /// Time that a replica runs before it may be preempted.
    pub min_run: Span,
    /// Time that a replica waits before others are preempted for it.
    pub wait: Span,
    /// Time that preempted jobs have to exit.
    pub grace: Span,
    /// Number of replicas that may be preempted now.
    pub budget_left: u32,
}

words! {
    /// Extent to which a replica may be preempted.
    pub enum Preemptibility: "preemptibility" {
        /// not at all
        Never = "never",
        /// only what its project holds beyond its share
        Borrowed = "borrowed",
        /// also for a higher class
        Always = "always",
    }

    /// Rule by which a replica is preempted.
    pub enum PreemptionRule: "preemption rule" {
        /// the other replica is of a higher class
        Class = "class",
        /// the other project is within its share, and this one holds more than its own
        Share = "share",
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct RunningJob {
    pub job: SubmissionId,
    pub instance: InstanceId,
    pub blocks: u32,
    pub held: HeldResources,
}

/// A replica that holds instances, with all its nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct RunningReplica {
    pub project: ProjectId,
    pub run: RunId,
    pub replica_num: u32,
    pub class: RunClass,
    /// Time since which all its nodes run; `None` while it starts.
    pub running_since: Option<Timestamp>,
    pub preemptibility: Preemptibility,
    /// True for a service, which keeps one replica.
    pub is_service: bool,
    /// Number of times that it was preempted before.
    pub preempted_before: u32,
    /// True if it ends already, for whatever reason.
    pub is_ending: bool,
    /// True if it ends because it was preempted.
    pub is_preempted: bool,
    pub jobs: Vec<RunningJob>,
}

/// Resources that the jobs of a project hold in a class, wherever they are.
#[derive(Clone, Debug, PartialEq)]
pub struct HeldByClass {
    pub project: ProjectId,
    pub class: RunClass,
    /// Of one name of GPUs.
    pub held: HeldResources,
}

/// Blocks of an instance that are kept for a waiting job until it is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockPromise {
    /// First job of the waiting replica, and its project.
    pub job: SubmissionId,
    pub project: ProjectId,
    pub instance: InstanceId,
    pub blocks: u32,
}

/// A replica that is preempted.
#[derive(Clone, Debug, PartialEq)]
pub struct Victim {
    pub run: RunId,
    pub replica_num: u32,
    pub project: ProjectId,
    pub rule: PreemptionRule,
    pub jobs: Vec<SubmissionId>,
    /// Time that its jobs have to exit.
    pub grace: Span,
}

/// Replicas that end so that another can start, and the blocks that are kept for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Preemption {
    pub victims: Vec<Victim>,
    pub promises: Vec<BlockPromise>,
    /// Longest grace period of the victims.
    pub grace: Span,
}

/// Returns the next time at which a replica has waited long enough for preemption in one of these fleets.
pub fn next_wait_end(
    waiting: &WaitingReplica,
    fleets: &[FleetSnapshot],
    now: Timestamp,
) -> Option<Timestamp> {
    let is_usable = |fleet: &&FleetSnapshot| {
        waiting.usable_fleets.as_ref().is_none_or(|usable| usable.contains(&fleet.id))
    };
    let rules = fleets.iter().filter(is_usable).filter_map(|fleet| fleet.preemption);
    let left = rules.map(|rules| Span(rules.wait.0 - waiting.waited(now).0));
    left.filter(|left| left.0 > 0).min().map(|left| now + left)
}

/// State of one round that only preemption uses.
#[derive(Default)]
pub(super) struct PreemptionState {
    searches: usize,
    /// Searches without a result: what holds for one replica holds for the others like it.
    failed: BTreeSet<(PlacementQuery, ProjectId, RunClass)>,
    /// Replicas that were chosen in this round, by their position in the inventory.
    chosen: BTreeSet<usize>,
    /// Replicas chosen in each fleet.
    spent: BTreeMap<usize, u32>,
}

/// A replica that may be preempted for another one.
struct Candidate {
    at: usize,
    rule: PreemptionRule,
    /// By instance of the inventory, with the blocks that it holds there.
    seats: Vec<(usize, u32)>,
}

impl PlacementRound<'_> {
    /// Returns the replicas that end so that a replica which waits can start, and keeps their blocks for it in the rest
    /// of the round. `None` if it has to wait.
    pub(super) fn preempt(&mut self, waiting: &WaitingReplica, query: &PlacementQuery) -> Option<Preemption> {
        if self.stock.running.is_empty() || self.preemption.searches >= SEARCHES_MAX {
            return None;
        }
        let mut query = query.clone();
        query.fleets.retain(|fleet| {
            let rules = self.inventory.fleets[*fleet].fleet.preemption;
            rules.is_some_and(|rules| waiting.waited(self.now) >= rules.wait)
        });
        let key = (query.clone(), waiting.project, waiting.class);
        if query.fleets.is_empty() || self.preemption.failed.contains(&key) {
            return None;
        }
        self.preemption.searches += 1;
        let found = self.search(waiting, &query);
        if found.is_none() {
            self.preemption.failed.insert(key);
        }
        found
    }

    fn search(&mut self, waiting: &WaitingReplica, query: &PlacementQuery) -> Option<Preemption> {
        // Quotas count what was kept for others of its project before.
        let is_guaranteed = is_within_share(waiting, &self.quotas);
        let candidates = self.candidates_for(waiting, query, is_guaranteed);
        if candidates.is_empty() {
            return None;
        }
        let ending = self.ending_soon(query);
        self.release_all(&ending);
        let fits_without = self.seats_for(query).is_some();
        self.take_all(&ending);
        if fits_without {
            return None;
        }
        let chosen = self.smallest_set(query, &candidates)?;
        let seats = self.with_released(&chosen, |round| round.seats_for(query))?;
        let job = waiting.first_job()?;
        Some(self.commit(waiting, job, &chosen, &seats))
    }

    /// Returns the replicas that may be preempted for this one, those to prefer first.
    fn candidates_for(
        &self,
        waiting: &WaitingReplica,
        query: &PlacementQuery,
        is_guaranteed: bool,
    ) -> Vec<Candidate> {
        let mut over: BTreeMap<ProjectId, u64> = BTreeMap::new();
        let last_of = self.first_service_replicas();
        let mut found: Vec<(_, Candidate)> = Vec::new();
        for (at, replica) in self.stock.running.iter().enumerate() {
            let Some((rule, seats)) = self.candidate(waiting, query, is_guaranteed, at) else { continue };
            if last_of.get(&replica.run) == Some(&replica.replica_num) {
                continue;
            }
            let excess = *over.entry(replica.project).or_insert_with(|| self.over_share(replica.project));
            let key = (
                replica.class,
                std::cmp::Reverse(excess),
                std::cmp::Reverse(replica.running_since),
                replica.jobs.len(),
                (replica.run, replica.replica_num),
            );
            found.push((key, Candidate { at, rule, seats }));
        }
        found.sort_by_key(|(key, _)| *key);
        // A project keeps its share however many of its replicas end.
        let mut gone: Vec<&HeldByClass> = Vec::new();
        let released: Vec<HeldByClass> =
            found.iter().map(|(_, candidate)| held_by(&self.stock.running[candidate.at])).collect();
        let mut kept = Vec::new();
        for ((_, candidate), released) in found.into_iter().zip(&released) {
            if candidate.rule == PreemptionRule::Share && !self.stays_above_share(released, &gone) {
                continue;
            }
            gone.push(released);
            kept.push(candidate);
        }
        kept
    }

    fn candidate(
        &self,
        waiting: &WaitingReplica,
        query: &PlacementQuery,
        is_guaranteed: bool,
        at: usize,
    ) -> Option<(PreemptionRule, Vec<(usize, u32)>)> {
        let replica = &self.stock.running[at];
        let since = replica.running_since?;
        if replica.is_ending || replica.run == waiting.run || self.preemption.chosen.contains(&at) {
            return None;
        }
        let rule = match replica.preemptibility {
            Preemptibility::Never => return None,
            Preemptibility::Always if replica.class < waiting.class => PreemptionRule::Class,
            Preemptibility::Always | Preemptibility::Borrowed => PreemptionRule::Share,
        };
        let may_reclaim = is_planted(Bug::PreemptionWithoutRule)
            || (is_guaranteed && replica.project != waiting.project && replica.class <= waiting.class);
        if rule == PreemptionRule::Share && !may_reclaim {
            return None;
        }
        let mut seats = Vec::with_capacity(replica.jobs.len());
        for job in &replica.jobs {
            let instance = self.inventory.position(job.instance)?;
            let fleet = self.inventory.shape_of(instance).fleet;
            let rules = self.inventory.fleets[fleet].fleet.preemption?;
            let min_run = Span(rules.min_run.0 << replica.preempted_before.min(DOUBLINGS_MAX));
            let spent = self.preemption.spent.get(&fleet).copied().unwrap_or_default();
            let is_due = self.now.since(since) >= min_run && spent < rules.budget_left;
            if !is_due || !query.fleets.contains(&fleet) {
                return None;
            }
            seats.push((instance, job.blocks));
        }
        Some((rule, seats))
    }

    /// Returns the replica of each service that stays: the one that runs longest.
    fn first_service_replicas(&self) -> BTreeMap<RunId, u32> {
        let mut first: BTreeMap<RunId, (Timestamp, u32)> = BTreeMap::new();
        for (at, replica) in self.stock.running.iter().enumerate() {
            let Some(since) = replica.running_since.filter(|_| replica.is_service) else { continue };
            if !replica.is_ending && !self.preemption.chosen.contains(&at) {
                let this = (since, replica.replica_num);
                first.entry(replica.run).and_modify(|known| *known = this.min(*known)).or_insert(this);
            }
        }
        first.into_iter().map(|(run, (_, num))| (run, num)).collect()
    }

    /// Returns thousandths of units by which a project exceeds its share.
    fn over_share(&self, project: ProjectId) -> u64 {
        let over = |resource: QuotaResource| {
            let share = self.quotas.shares_of(project).find(|quota| quota.resource == resource);
            let share = share.and_then(|quota| quota.share).unwrap_or_default();
            self.held(project, &resource, RunClass::Idle).saturating_sub(share)
        };
        let [gpus, cpus, memory] =
            [QuotaResource::Gpus, QuotaResource::Cpus, QuotaResource::Memory].map(over);
        usage::milli_units(gpus, cpus, memory)
    }

    /// Amount that jobs of a project hold, of this class or a higher one, without those that were preempted.
    fn held(&self, project: ProjectId, resource: &QuotaResource, class: RunClass) -> u64 {
        let is_counted = |one: &HeldByClass| one.project == project && one.class >= class;
        let held = self.stock.held_by_class.iter().filter(|one| is_counted(one));
        let held: u64 = held.map(|one| one.held.amount(resource)).sum();
        let replicas = self.stock.running.iter().enumerate();
        let leaving = replicas.filter(|(at, one)| one.is_preempted || self.preemption.chosen.contains(at));
        let leaving = leaving.map(|(_, one)| held_by(one)).filter(is_counted);
        held.saturating_sub(leaving.map(|one| one.held.amount(resource)).sum())
    }

    /// Returns whether the project of a replica holds its share without it and without `gone`, in its class and higher
    /// ones.
    fn stays_above_share(&self, replica: &HeldByClass, gone: &[&HeldByClass]) -> bool {
        let class = replica.class;
        self.quotas.shares_of(replica.project).all(|quota| {
            let amount = replica.held.amount(&quota.resource);
            let others = gone.iter().filter(|one| one.project == replica.project && one.class >= class);
            let others: u64 = others.map(|one| one.held.amount(&quota.resource)).sum();
            let held = self.held(replica.project, &quota.resource, class);
            amount == 0 || held.saturating_sub(others + amount) >= quota.share.unwrap_or_default()
        })
    }

    /// Blocks that become free before preempted jobs would be gone.
    fn ending_soon(&self, query: &PlacementQuery) -> Vec<(usize, u32)> {
        let mut soon = Vec::new();
        for (at, instance) in self.inventory.instances.iter().enumerate() {
            let fleet = self.inventory.shape_of(at).fleet;
            let Some(rules) = self.inventory.fleets[fleet].fleet.preemption else { continue };
            if !query.fleets.contains(&fleet) {
                continue;
            }
            let ends = |until: Option<Timestamp>| until.is_some_and(|until| until <= self.now + rules.grace);
            let holds = instance.holds.iter().filter(|held| !held.is_preempted && ends(held.until));
            let blocks: u32 = holds.map(|held| held.blocks).sum::<u32>() + self.inventory.surplus_leaving(at);
            if blocks > 0 {
                soon.push((at, blocks));
            }
        }
        soon
    }

    /// Returns the first candidates that suffice, without those that are not needed.
    fn smallest_set<'a>(
        &mut self,
        query: &PlacementQuery,
        candidates: &'a [Candidate],
    ) -> Option<Vec<&'a Candidate>> {
        let all: Vec<&Candidate> = candidates.iter().collect();
        self.with_released(&all, |round| round.seats_for(query))?;
        let mut released = 0;
        let mut seats = None;
        for candidate in candidates {
            self.release_all(&candidate.seats);
            released += 1;
            seats = self.seats_for(query);
            if seats.is_some() {
                break;
            }
        }
        candidates[..released].iter().for_each(|candidate| self.take_all(&candidate.seats));
        let used: BTreeSet<usize> = seats?.into_iter().map(|(instance, _)| instance).collect();
        let helps = |candidate: &&Candidate| candidate.seats.iter().any(|(at, _)| used.contains(at));
        let mut chosen: Vec<&Candidate> = candidates[..released].iter().filter(helps).collect();
        for at in (0..chosen.len()).rev() {
            let left_out = chosen.remove(at);
            if self.with_released(&chosen, |round| round.seats_for(query)).is_none() {
                chosen.insert(at, left_out);
            }
        }
        Some(chosen)
    }

    /// Returns instances and blocks for all nodes, among those that are free.
    fn seats_for(&mut self, query: &PlacementQuery) -> Option<Vec<(usize, u32)>> {
        if let [class] = query.classes[..] {
            return self.tightest_open(query, class).map(|seat| vec![seat]);
        }
        let gang = self.best_gang(query, CandidatePool::Free)?;
        let held = gang.members.iter().map(|member| self.held_by(member)).collect::<Vec<_>>();
        if !self.is_within_quota(query, || held) {
            return None;
        }
        let seat = |member: &GangMember| match member {
            GangMember::Existing(instance) => {
                Some((*instance, self.inventory.shape_of(*instance).offer.total_blocks.max(1)))
            }
            GangMember::Part { instance, blocks } => Some((*instance, *blocks)),
            GangMember::New(_) => None,
        };
        gang.members.iter().map(seat).collect()
    }

    fn with_released<T>(&mut self, victims: &[&Candidate], look: impl FnOnce(&mut Self) -> T) -> T {
        victims.iter().for_each(|victim| self.release_all(&victim.seats));
        let found = look(self);
        victims.iter().for_each(|victim| self.take_all(&victim.seats));
        found
    }

    fn release_all(&mut self, seats: &[(usize, u32)]) {
        seats.iter().for_each(|(instance, blocks)| self.inventory.release(*instance, *blocks));
    }

    fn take_all(&mut self, seats: &[(usize, u32)]) {
        seats.iter().for_each(|(instance, blocks)| self.inventory.allocate(*instance, *blocks));
    }

    fn commit(
        &mut self,
        waiting: &WaitingReplica,
        job: SubmissionId,
        chosen: &[&Candidate],
        seats: &[(usize, u32)],
    ) -> Preemption {
        let mut victims = Vec::with_capacity(chosen.len());
        let mut leaving: BTreeMap<usize, u32> = BTreeMap::new();
        for Candidate { at, rule, seats } in chosen {
            let replica = &self.stock.running[*at];
            self.preemption.chosen.insert(*at);
            let mut grace = Span::ZERO;
            let fleets: BTreeSet<usize> =
                seats.iter().map(|(instance, _)| self.inventory.shape_of(*instance).fleet).collect();
            for fleet in fleets {
                *self.preemption.spent.entry(fleet).or_default() += 1;
                let rules = self.inventory.fleets[fleet].fleet.preemption;
                grace = grace.max(rules.map_or(Span::ZERO, |rules| rules.grace));
            }
            for (instance, blocks) in seats {
                *leaving.entry(*instance).or_default() += blocks;
            }
            victims.push(Victim {
                run: replica.run,
                replica_num: replica.replica_num,
                project: replica.project,
                rule: *rule,
                jobs: replica.jobs.iter().map(|job| job.job).collect(),
                grace,
            });
        }
        let mut promises = Vec::with_capacity(seats.len());
        for (at, blocks) in seats {
            let own = leaving.get(at).copied().unwrap_or_default().min(*blocks);
            leaving.entry(*at).and_modify(|blocks| *blocks -= own);
            self.inventory.promise(*at, *blocks, own);
            let kept = self.held_on(*at, *blocks);
            self.quotas.add(waiting.project, waiting.user, &[kept]);
            let instance = self.inventory.instances[*at].id;
            promises.push(BlockPromise { job, project: waiting.project, instance, blocks: *blocks });
        }
        // What its victims leave beyond that does not make up for blocks that were free.
        leaving.into_iter().for_each(|(at, blocks)| self.inventory.leave_spare(at, blocks));
        let grace = victims.iter().map(|victim| victim.grace).max().unwrap_or(Span::ZERO);
        Preemption { victims, promises, grace }
    }

    /// Promises of earlier rounds to a replica.
    pub(super) fn promises_of(&self, waiting: &WaitingReplica) -> impl Iterator<Item = BlockPromise> {
        let job = waiting.first_job();
        self.stock.promises.iter().copied().filter(move |promise| Some(promise.job) == job)
    }
}

fn held_by(replica: &RunningReplica) -> HeldByClass {
    let held = replica.jobs.iter().fold(HeldResources::default(), |sum, job| sum.plus(&job.held));
    HeldByClass { project: replica.project, class: replica.class, held }
}
