//! One round of placement: each waiting replica in order, over an inventory that only shrinks.

use std::{
    cell::{Cell, OnceCell},
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    explain::Shortfall,
    id::{InstanceId, ProjectId, SubmissionId, UserId},
    plan::{
        budget::Budget,
        gang::{CandidatePool, Gang, GangMember},
        inventory::{IndexedInventory, InstanceShape, Reservation, Tightness},
        offers::{InstanceNeeds, Offer, compare},
        place::{
            FleetChoice, InstanceCreation, Inventory, NewOffer, NodePlacement, OFFERS_MAX, PlacementOutcome,
            RESERVE_AFTER, RefusalReport, WaitingNode, WaitingReplica,
        },
        preemption::{Preemption, PreemptionState},
        quota::{HeldResources, QuotaBook, QuotaExcess},
    },
    time::Timestamp,
};

/// Offers by position in the inventory's offers.
type PositionedOffers = Vec<(usize, NewOffer)>;
/// Offers from which a fleet could create instances, cheapest first.
pub(super) type NewOffers = Arc<PositionedOffers>;

/// Fit of one class of needs to one shape.
#[derive(Clone, Copy)]
pub(super) struct ShapeFit {
    /// 0 means that it does not fit.
    pub(super) blocks: u32,
    /// Number of shortfalls.
    pub(super) shortfall_count: u32,
}

/// Jobs with the same needs are evaluated once, and only for the shapes that are relevant.
pub(super) struct NeedsClass {
    pub(super) needs: Arc<InstanceNeeds>,
    shapes: Vec<OnceCell<ShapeFit>>,
    /// By fleet.
    offers: BTreeMap<usize, NewOffers>,
}

/// Everything that determines a refusal except the replica: within one round the result stays the same, because the
/// inventory only shrinks.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PlacementQuery {
    pub(super) classes: Vec<usize>,
    pub(super) fleets: Vec<usize>,
    /// Fleets that the project may use, whether the run names them or not.
    pub(super) usable: Vec<usize>,
    pub(super) missing_fleets: Vec<String>,
    pub(super) creation: InstanceCreation,
    /// Project and user, if a quota applies to them.
    quota_of: Option<(ProjectId, UserId)>,
}

pub(super) struct PlacementRound<'a> {
    pub(super) inventory: IndexedInventory<'a>,
    /// As given, by the index in `NewOffer`.
    offers: &'a [Offer],
    pub(super) now: Timestamp,
    pub(super) classes: Vec<NeedsClass>,
    refusals: BTreeMap<PlacementQuery, (Arc<RefusalReport>, bool)>,
    reserving_projects: BTreeSet<ProjectId>,
    pub(super) quotas: QuotaBook,
    /// As given.
    pub(super) stock: &'a Inventory,
    pub(super) preemption: PreemptionState,
    /// Quota because of which the replica in question does not use something that fits.
    excess: Cell<Option<QuotaExcess>>,
}

impl<'a> PlacementRound<'a> {
    pub(super) fn new(inventory: &'a Inventory, now: Timestamp) -> Self {
        let indexed = IndexedInventory::new(inventory);
        Self {
            inventory: indexed,
            stock: inventory,
            preemption: PreemptionState::default(),
            offers: &inventory.offers,
            now,
            classes: Vec::new(),
            refusals: BTreeMap::new(),
            reserving_projects: BTreeSet::new(),
            quotas: QuotaBook::new(inventory.quotas.clone()),
            excess: Cell::new(None),
        }
    }

    pub(super) fn place_replica(
        &mut self,
        waiting: &WaitingReplica,
        choice: FleetChoice,
    ) -> (PlacementOutcome, Option<Preemption>) {
        let promised: Vec<(usize, u32)> = self
            .promises_of(waiting)
            .filter_map(|promise| Some((self.inventory.position(promise.instance)?, promise.blocks)))
            .collect();
        promised.iter().for_each(|(at, blocks)| self.inventory.withdraw_promise(*at, *blocks));
        // Quotas count what is kept for it.
        let kept: Vec<HeldResources> =
            promised.iter().map(|(at, blocks)| self.held_on(*at, *blocks)).collect();
        self.quotas.remove(waiting.project, waiting.user, &kept);
        let (mut outcome, preemption) = self.place_unpromised(waiting, choice, !promised.is_empty());
        if let PlacementOutcome::Waits { reserved, why } = &mut outcome {
            self.quotas.add(waiting.project, waiting.user, &kept);
            // Blocks that it may not use now are not kept from others.
            let is_usable =
                |(at, _): &(usize, u32)| self.may_use(waiting, self.inventory.shape_of(*at).fleet);
            let promised: Vec<(usize, u32)> = match why.is_over_bound() {
                true => Vec::new(),
                false => promised.into_iter().filter(is_usable).collect(),
            };
            promised.iter().for_each(|(at, blocks)| self.inventory.promise(*at, *blocks, 0));
            reserved.extend(promised.iter().map(|(at, _)| self.inventory.instances[*at].id));
        }
        (outcome, preemption)
    }

    fn query(&mut self, waiting: &WaitingReplica, choice: FleetChoice) -> PlacementQuery {
        let several = waiting.nodes.len() > 1;
        PlacementQuery {
            classes: waiting.nodes.iter().map(|node| self.class_index(node, several)).collect(),
            fleets: self.allowed_fleets(waiting, choice, several),
            usable: (0..self.inventory.fleets.len()).filter(|at| self.may_use(waiting, *at)).collect(),
            missing_fleets: waiting.missing_fleets.clone(),
            creation: waiting.creation,
            quota_of: Some((waiting.project, waiting.user))
                .filter(|(project, user)| self.quotas.applies_to(*project, *user)),
        }
    }

    fn place_unpromised(
        &mut self,
        waiting: &WaitingReplica,
        choice: FleetChoice,
        has_promises: bool,
    ) -> (PlacementOutcome, Option<Preemption>) {
        let several = waiting.nodes.len() > 1;
        // Nothing is kept for it: others go on.
        let budgets = self.stock.budgets.iter().filter(|one| one.applies_to(waiting.project, waiting.user));
        if let Some(excess) = budgets.into_iter().find_map(Budget::excess) {
            let why = Arc::new(RefusalReport::single("budget", Shortfall::OverBudget(excess)));
            return (PlacementOutcome::Waits { why, reserved: Vec::new() }, None);
        }
        let query = self.query(waiting, choice);
        self.excess.set(None);
        // A job with a known end may use reserved instances, so an earlier refusal does not apply to it.
        let may_backfill = waiting.max_duration.is_some() && !self.reserving_projects.is_empty();
        let known = if may_backfill || has_promises { None } else { self.refusals.get(&query).cloned() };
        let (why, passes) = match known {
            Some(refused) => refused,
            None => {
                let placed = if several {
                    self.place_gang(waiting, &query)
                } else {
                    self.place_single(waiting, &query)
                };
                if let Some(placed) = placed {
                    return (placed, None);
                }
                let excess = self.excess.take().or_else(|| self.excess_of_occupied(&query));
                let (mut why, mut passes) = self.refusal_report(&query);
                if let Some(excess) = excess {
                    passes |= excess.passes();
                    let mut report = RefusalReport::single("quota", Shortfall::OverQuota(excess));
                    report.refusals.extend(why.refusals.iter().cloned());
                    report.left_out = why.left_out;
                    why = Arc::new(report);
                }
                self.refusals.insert(query.clone(), (Arc::clone(&why), passes));
                (why, passes)
            }
        };
        if !passes {
            return (PlacementOutcome::Never { why }, None);
        }
        if has_promises {
            return (PlacementOutcome::Waits { why, reserved: Vec::new() }, None);
        }
        let preemption = self.preempt(waiting, &query);
        let reserved = match preemption.is_some() {
            true => Vec::new(),
            false => self.reserve_instances(waiting, &query),
        };
        (PlacementOutcome::Waits { why, reserved }, preemption)
    }

    /// Returns whether the project of the replica may use the fleet.
    fn may_use(&self, waiting: &WaitingReplica, fleet: usize) -> bool {
        let id = self.inventory.fleets[fleet].fleet.id;
        waiting.usable_fleets.as_ref().is_none_or(|usable| usable.contains(&id))
    }

    fn allowed_fleets(&self, waiting: &WaitingReplica, choice: FleetChoice, several: bool) -> Vec<usize> {
        let fleets = self.inventory.fleets.iter().enumerate().filter(|(at, room)| {
            let id = room.fleet.id;
            let chosen = match choice {
                FleetChoice::Chosen(fleet) => fleet == id,
                FleetChoice::Choose | FleetChoice::Follow => true,
            };
            chosen
                && self.may_use(waiting, *at)
                && waiting.fleets.as_ref().is_none_or(|fleets| fleets.contains(&id))
                && (!several || room.fleet.is_cluster || room.has_one_instance_at_most())
        });
        fleets.map(|(at, _)| at).collect()
    }

    fn class_index(&mut self, node: &WaitingNode, several: bool) -> usize {
        let alike = |class: &NeedsClass| {
            Arc::ptr_eq(&class.needs, &node.needs)
                || (class.needs.needs_whole_instance == (several || node.needs.needs_whole_instance)
                    && equal_except_whole(&class.needs, &node.needs))
        };
        if let Some(at) = self.classes.iter().position(alike) {
            return at;
        }
        let needs = if several && !node.needs.needs_whole_instance {
            Arc::new(InstanceNeeds { needs_whole_instance: true, ..InstanceNeeds::clone(&node.needs) })
        } else {
            Arc::clone(&node.needs)
        };
        let shapes = vec![OnceCell::new(); self.inventory.shapes.len()];
        self.classes.push(NeedsClass { needs, shapes, offers: BTreeMap::new() });
        self.classes.len() - 1
    }

    pub(super) fn fit_shape(&self, class: usize, shape: usize) -> ShapeFit {
        let class = &self.classes[class];
        *class.shapes[shape].get_or_init(|| {
            let shape = &self.inventory.shapes[shape];
            shape_fit(shape, &class.needs.with_fleet_limits(&self.inventory.fleets[shape.fleet].fleet.limits))
        })
    }

    fn place_single(&mut self, waiting: &WaitingReplica, query: &PlacementQuery) -> Option<PlacementOutcome> {
        let (job, class) = (waiting.first_job()?, query.classes[0]);
        if let Some((instance, blocks)) = self.tightest_instance(waiting, query, class) {
            let fleet = self.inventory.instances[instance].fleet;
            let id = self.inventory.instances[instance].id;
            self.count_held(query, &[self.held_on(instance, blocks)]);
            self.inventory.allocate(instance, blocks);
            return Some(PlacementOutcome::Placed {
                fleet,
                seats: vec![NodePlacement::Existing { job, instance: id, blocks }],
            });
        }
        let mut best: Option<(u64, usize, PositionedOffers)> = None;
        for &fleet in &query.fleets {
            if self.inventory.fleets[fleet].free_slots() == 0 {
                continue;
            }
            let offers = self.new_offers(query, class, fleet);
            let affordable = offers
                .iter()
                .filter(|(at, new)| self.is_within_quota(query, || vec![self.held_on_new(*at, new)]));
            let mut offers: PositionedOffers = affordable.take(OFFERS_MAX).cloned().collect();
            offers.retain(self.counted_alike(query, &offers));
            let Some((cheapest, _)) = offers.first() else { continue };
            let price = self.inventory.offers[*cheapest].1.price.0;
            if best.as_ref().is_none_or(|(least, ..)| price < *least) {
                best = Some((price, fleet, offers));
            }
        }
        let (_, fleet, offers) = best?;
        let instance_num = self.inventory.fleets[fleet].claim_slot();
        let held = HeldResources::largest(offers.iter().map(|(at, new)| self.held_on_new(*at, new)));
        self.count_held(query, &[held]);
        let offers = offers.into_iter().map(|(_, offer)| offer).collect();
        let seats = vec![NodePlacement::New { job, instance_num, offers }];
        Some(PlacementOutcome::Placed { fleet: self.inventory.fleets[fleet].fleet.id, seats })
    }

    /// Returns the open instance with the least free blocks that still fits, and the number of its blocks.
    fn tightest_instance(
        &self,
        waiting: &WaitingReplica,
        query: &PlacementQuery,
        class: usize,
    ) -> Option<(usize, u32)> {
        let open = self.tightest_open(query, class);
        let over = waiting.max_duration.map(|lasts| self.now + lasts);
        let backfill = self.inventory.reserved.iter().filter_map(|(&instance, reserved)| {
            if over? <= reserved.from { self.fit_instance(query, class, instance) } else { None }
        });
        open.into_iter().chain(backfill).min_by_key(|(instance, _)| self.inventory.tightness(*instance))
    }

    /// Returns the tightest of the instances that are not reserved.
    pub(super) fn tightest_open(&self, query: &PlacementQuery, class: usize) -> Option<(usize, u32)> {
        // Ordered by free GPUs first, so those with too few are skipped.
        let needs = &self.classes[class].needs;
        let gpus = needs.resources.as_ref().and_then(|wanted| wanted.gpu.as_ref()?.count.min).unwrap_or(0);
        let from: Tightness = (gpus as usize, 0, 0, 0, 0);
        let mut open = self.inventory.open_instances.range(from..);
        open.find_map(|tightness| self.fit_instance(query, class, tightness.4))
    }

    /// Returns the blocks that a node needs there, if they are free.
    fn fit_instance(&self, query: &PlacementQuery, class: usize, instance: usize) -> Option<(usize, u32)> {
        let needs = &self.classes[class].needs;
        if self.inventory.free_blocks[instance] == 0 {
            return None;
        }
        let blocks = self.fit_shape(class, self.inventory.shape_index(instance)).blocks;
        let usable = blocks > 0
            && self.inventory.free_blocks[instance] >= blocks
            && query.fleets.contains(&self.inventory.shape_of(instance).fleet)
            && self.inventory.is_eligible(instance, needs)
            && self.is_within_quota(query, || vec![self.held_on(instance, blocks)]);
        usable.then_some((instance, blocks))
    }

    /// Returns the offers from which a fleet would create an instance for these needs, cheapest first.
    pub(super) fn new_offers(&mut self, query: &PlacementQuery, class: usize, fleet: usize) -> NewOffers {
        let room = &self.inventory.fleets[fleet];
        let class = &mut self.classes[class];
        if !room.fleet.can_create
            || query.creation == InstanceCreation::Reuse
            || class.needs.instances.is_some()
        {
            return Arc::default();
        }
        let offers = class.offers.entry(fleet).or_insert_with(|| {
            let needs = class.needs.with_fleet_limits(&room.fleet.limits);
            let admitted = self.inventory.offers.iter().zip(&room.admitted_blocks).enumerate();
            let offers = admitted.filter_map(|(at, ((index, offer), admits))| {
                let total_blocks = (*admits)?;
                let mut missing = 0_u32;
                let blocks = compare(offer, total_blocks, &needs, &mut missing);
                (missing == 0).then_some((at, NewOffer { offer: *index, blocks, total_blocks }))
            });
            Arc::new(offers.collect())
        });
        Arc::clone(offers)
    }

    /// Selects offers that count for the same quotas as the first one, because any of them may be granted: all have GPUs of
    /// one name if quotas apply.
    pub(super) fn counted_alike<'s, O: std::borrow::Borrow<(usize, NewOffer)>>(
        &'s self,
        query: &PlacementQuery,
        offers: &[O],
    ) -> impl Fn(&O) -> bool + use<'s, 'a, O> {
        let gpu = |at: usize| self.inventory.offers[at].1.host.gpus.first().map(|gpu| gpu.name.as_str());
        let first = offers.first().filter(|_| query.quota_of.is_some()).map(|first| gpu(first.borrow().0));
        move |offer: &O| first.is_none_or(|first| gpu(offer.borrow().0) == first)
    }

    fn place_gang(&mut self, waiting: &WaitingReplica, query: &PlacementQuery) -> Option<PlacementOutcome> {
        let gang = self.best_gang(query, CandidatePool::Free)?;
        let held: Vec<HeldResources> = gang.members.iter().map(|member| self.held_by(member)).collect();
        if !self.is_within_quota(query, || held.clone()) {
            return None;
        }
        self.count_held(query, &held);
        let fleet = self.inventory.fleets[gang.fleet].fleet.id;
        let mut seats = Vec::with_capacity(waiting.nodes.len());
        for (node, member) in waiting.nodes.iter().zip(gang.members) {
            seats.push(self.allocate_member(node.job, gang.fleet, member));
        }
        Some(PlacementOutcome::Placed { fleet, seats })
    }

    /// Returns whether all quotas admit replicas that hold this; remembers the first that does not.
    pub(super) fn is_within_quota(
        &self,
        query: &PlacementQuery,
        held: impl FnOnce() -> Vec<HeldResources>,
    ) -> bool {
        let Some((project, user)) = query.quota_of else { return true };
        let excess = self.quotas.excess(project, user, &held());
        let is_within = excess.is_none();
        if !is_within {
            self.excess.set(excess);
        }
        is_within
    }

    fn count_held(&mut self, query: &PlacementQuery, held: &[HeldResources]) {
        if let Some((project, user)) = query.quota_of {
            self.quotas.add(project, user, held);
        }
    }

    pub(super) fn held_on(&self, instance: usize, blocks: u32) -> HeldResources {
        let offer = self.inventory.shape_of(instance).offer;
        HeldResources::of(offer, blocks, offer.total_blocks)
    }

    fn held_on_new(&self, position: usize, new: &NewOffer) -> HeldResources {
        HeldResources::of(self.inventory.offers[position].1, new.blocks, new.total_blocks)
    }

    pub(super) fn held_by(&self, member: &GangMember) -> HeldResources {
        match member {
            GangMember::Existing(instance) => {
                self.held_on(*instance, self.inventory.shape_of(*instance).offer.total_blocks.max(1))
            }
            GangMember::Part { instance, blocks } => self.held_on(*instance, *blocks),
            GangMember::New(offers) => HeldResources::largest(
                offers
                    .iter()
                    .map(|new| HeldResources::of(&self.offers[new.offer], new.blocks, new.total_blocks)),
            ),
        }
    }

    fn allocate_member(&mut self, job: SubmissionId, fleet: usize, member: GangMember) -> NodePlacement {
        match member {
            GangMember::Existing(instance) => {
                let blocks = self.inventory.shape_of(instance).offer.total_blocks.max(1);
                self.inventory.allocate(instance, blocks);
                NodePlacement::Existing { job, instance: self.inventory.instances[instance].id, blocks }
            }
            GangMember::Part { instance, blocks } => {
                self.inventory.allocate(instance, blocks);
                NodePlacement::Existing { job, instance: self.inventory.instances[instance].id, blocks }
            }
            GangMember::New(offers) => {
                NodePlacement::New { job, instance_num: self.inventory.fleets[fleet].claim_slot(), offers }
            }
        }
    }

    /// Reserves the soonest instances for a job that has waited long enough; one job per project.
    fn reserve_instances(&mut self, waiting: &WaitingReplica, query: &PlacementQuery) -> Vec<InstanceId> {
        let Some(by) = waiting.first_job() else { return Vec::new() };
        if waiting.waited(self.now) < RESERVE_AFTER || self.reserving_projects.contains(&waiting.project) {
            return Vec::new();
        }
        let chosen =
            if waiting.nodes.len() > 1 { self.soonest_gang(query) } else { self.soonest_single(query) };
        if chosen.is_empty() {
            return Vec::new();
        }
        self.reserving_projects.insert(waiting.project);
        let from = chosen.iter().map(|(_, from)| *from).max().unwrap_or(self.now);
        for (instance, _) in &chosen {
            self.inventory.reserve(*instance, Reservation { by, from });
        }
        chosen.iter().map(|(instance, _)| self.inventory.instances[*instance].id).collect()
    }

    /// Returns the quota because of which the replica could not even use occupied instances that fit, once they are
    /// free.
    fn excess_of_occupied(&mut self, query: &PlacementQuery) -> Option<QuotaExcess> {
        query.quota_of?;
        let is_admitted = match query.classes[..] {
            [class] => self.fitting_shapes(query, class).any(|(shape, blocks)| {
                self.is_within_quota(query, || {
                    vec![HeldResources::of(shape.offer, blocks, shape.offer.total_blocks)]
                })
            }),
            _ => self.best_gang(query, CandidatePool::Draining).is_some_and(|gang| {
                self.is_within_quota(query, || {
                    gang.members.iter().map(|member| self.held_by(member)).collect()
                })
            }),
        };
        self.excess.take().filter(|_| !is_admitted)
    }

    /// Shapes of instances that fit, with the blocks that a node needs there.
    fn fitting_shapes<'s>(
        &'s self,
        query: &'s PlacementQuery,
        class: usize,
    ) -> impl Iterator<Item = (&'s InstanceShape<'a>, u32)> {
        let shapes = self.inventory.shapes.iter().enumerate();
        let shapes = shapes.filter(|(_, shape)| query.fleets.contains(&shape.fleet));
        let fitting = shapes.map(move |(at, shape)| (shape, self.fit_shape(class, at).blocks));
        fitting.filter(|(_, blocks)| *blocks > 0)
    }

    fn soonest_single(&self, query: &PlacementQuery) -> Vec<(usize, Timestamp)> {
        let class = query.classes[0];
        let needs = &self.classes[class].needs;
        // A job that waits for its quota leaves instances to others.
        let fitting = self.fitting_shapes(query, class).filter(|(shape, blocks)| {
            self.is_within_quota(query, || {
                vec![HeldResources::of(shape.offer, *blocks, shape.offer.total_blocks)]
            })
        });
        let open =
            fitting.flat_map(|(shape, blocks)| shape.open_instances.iter().map(move |(_, at)| (*at, blocks)));
        let named = open.filter(|(instance, _)| self.inventory.is_eligible(*instance, needs));
        let soonest = named.min_by_key(|&(instance, blocks)| {
            let (from, must_go) = self.inventory.free_at(instance, blocks, self.now);
            (from, must_go, instance)
        });
        let reserved = soonest
            .map(|(instance, blocks)| (instance, self.inventory.free_at(instance, blocks, self.now).0));
        reserved.into_iter().collect()
    }

    fn soonest_gang(&mut self, query: &PlacementQuery) -> Vec<(usize, Timestamp)> {
        let Some(Gang { members, .. }) = self.best_gang(query, CandidatePool::Draining) else {
            return Vec::new();
        };
        if !self.is_within_quota(query, || members.iter().map(|member| self.held_by(member)).collect()) {
            return Vec::new();
        }
        // Nodes may share an instance.
        let existing: BTreeSet<usize> = members.iter().filter_map(GangMember::instance).collect();
        existing
            .into_iter()
            .map(|instance| {
                let total = self.inventory.shape_of(instance).offer.total_blocks.max(1);
                (instance, self.inventory.free_at(instance, total, self.now).0)
            })
            .collect()
    }
}

fn equal_except_whole(left: &InstanceNeeds, right: &InstanceNeeds) -> bool {
    // Every field by name, so that one that is added later cannot be forgotten.
    let InstanceNeeds {
        resources,
        max_price,
        spot,
        is_spot_default: spot_by_default,
        backends,
        regions,
        zones,
        instance_types,
        reservation,
        volumes,
        instances,
        avoid_locations: avoid,
        avoid_instances,
        needs_whole_instance: _,
        image,
        image_architectures,
        slurm_obstacles,
        pod_obstacles,
    } = left;
    *resources == right.resources
        && *max_price == right.max_price
        && *spot == right.spot
        && *spot_by_default == right.is_spot_default
        && *backends == right.backends
        && *regions == right.regions
        && *zones == right.zones
        && *instance_types == right.instance_types
        && *reservation == right.reservation
        && *volumes == right.volumes
        && *instances == right.instances
        && *avoid == right.avoid_locations
        && *avoid_instances == right.avoid_instances
        && *image == right.image
        && *image_architectures == right.image_architectures
        && *slurm_obstacles == right.slurm_obstacles
        && *pod_obstacles == right.pod_obstacles
}

fn shape_fit(shape: &InstanceShape<'_>, needs: &InstanceNeeds) -> ShapeFit {
    let total = shape.offer.total_blocks.max(1);
    if shape.offer.host.cpus == 0 {
        // It has not been inspected yet and may turn out to fit, so it is worth waiting for.
        return ShapeFit { blocks: total, shortfall_count: 0 };
    }
    let mut missing = 0_u32;
    let blocks = compare(shape.offer, total, needs, &mut missing);
    ShapeFit { blocks: if missing == 0 { blocks } else { 0 }, shortfall_count: missing }
}
