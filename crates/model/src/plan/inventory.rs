//! Inventory of one round of placement, indexed for fast queries.
//!
//! Identical instances (same fleet, offer and split) form a shape; the fit of a job is computed once per shape, and
//! each shape keeps its open instances ordered by free blocks. Everything is sorted by value first, so the order of the
//! caller's lists never matters.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    backend_kind::BackendKind,
    explain::Shortfall,
    id::{InstanceId, SubmissionId},
    plan::{
        blocks::{self, Blocks},
        offers::{InstanceNeeds, Offer, compare, is_instance_selected},
        place::{FleetSnapshot, InstanceSnapshot, Inventory, Readiness},
    },
    time::Timestamp,
};

/// Later than any known time.
pub(super) const FAR_FUTURE: Timestamp = Timestamp(i64::MAX);

#[derive(Clone, Copy)]
pub(super) struct Reservation {
    pub(super) by: SubmissionId,
    /// Time at which that job will need it.
    pub(super) from: Timestamp,
}

pub(super) struct InstanceShape<'a> {
    pub(super) fleet: usize,
    pub(super) offer: &'a Offer,
    pub(super) members: Vec<usize>,
    /// (free blocks, instance) of those that accept jobs.
    pub(super) open_instances: BTreeSet<(u32, usize)>,
}

/// A fleet and its remaining slots in this round.
pub(super) struct FleetSlots<'a> {
    pub(super) fleet: &'a FleetSnapshot,
    /// Number of instances that will be terminated anyway, and of those that may be if they are idle for long enough.
    ending_count: u32,
    removable_count: u32,
    instance_count: u32,
    used_nums: BTreeSet<u32>,
    /// Offers that its limits admit, with the number of blocks; by position in `IndexedInventory::offers`.
    pub(super) admitted_blocks: Vec<Option<u32>>,
}

impl FleetSlots<'_> {
    fn count_instance(&mut self, instance: &InstanceSnapshot) {
        self.instance_count += 1;
        match instance.readiness {
            Readiness::Ready | Readiness::Unhealthy if instance.is_kept => {}
            Readiness::Ready | Readiness::Unhealthy => self.removable_count += 1,
            // An instance that is not up may never be, and one that does not respond will be terminated.
            Readiness::Provisioning | Readiness::Unreachable | Readiness::Draining => self.ending_count += 1,
        }
    }

    pub(super) fn free_slots(&self) -> u32 {
        self.slots_without(0)
    }

    /// Returns the slots it has once this number of its instances has been terminated.
    pub(super) fn slots_without(&self, gone: u32) -> u32 {
        let held = self.used_slots().saturating_sub(gone);
        self.fleet.nodes_max.map_or(u32::MAX, |max| max.saturating_sub(held))
    }

    /// Returns whether the fleet has one instance and cannot get another, or will have only one.
    pub(super) fn has_one_instance_at_most(&self) -> bool {
        self.instance_count <= 1 && self.fleet.has_one_instance_at_most()
    }

    fn used_slots(&self) -> u32 {
        u32::try_from(self.used_nums.len()).unwrap_or(u32::MAX)
    }

    /// Returns the number of instances that free their slot in time: those being terminated, and those idle for long
    /// enough, but never so many that fewer than `nodes.min` are left.
    pub(super) fn freeable_slots(&self) -> u32 {
        let kept = self.used_slots().saturating_sub(self.ending_count);
        self.ending_count + self.removable_count.min(kept.saturating_sub(self.fleet.nodes_min))
    }

    /// Claims the lowest free number.
    pub(super) fn claim_slot(&mut self) -> u32 {
        let num = (0..).find(|num| !self.used_nums.contains(num)).unwrap_or_default();
        self.used_nums.insert(num);
        self.ending_count += 1;
        num
    }
}

/// Blocks of an instance in this round.
#[derive(Clone, Copy, Default)]
struct BlockCounts {
    /// Held by no job, promised or not.
    unheld: u32,
    /// Promised to jobs for which others were preempted.
    promised: u32,
    /// Held by preempted jobs: promises are kept from these first.
    leaving: u32,
    /// Held by preempted jobs beyond what their successors need; counted in this round only.
    spare: u32,
}

impl BlockCounts {
    const fn free(self) -> u32 {
        self.unheld.saturating_sub(self.promised.saturating_sub(self.leaving))
    }
}

pub(super) struct IndexedInventory<'a> {
    pub(super) instances: Vec<&'a InstanceSnapshot>,
    pub(super) shapes: Vec<InstanceShape<'a>>,
    pub(super) fleets: Vec<FleetSlots<'a>>,
    /// Cheapest first, with the caller's index.
    pub(super) offers: Vec<(usize, &'a Offer)>,
    /// Free blocks that are not promised to others.
    pub(super) free_blocks: Vec<u32>,
    blocks: Vec<BlockCounts>,
    pub(super) reserved: BTreeMap<usize, Reservation>,
    /// All instances that accept jobs, tightest first.
    pub(super) open_instances: BTreeSet<Tightness>,
    shape_of: Vec<usize>,
}

impl<'a> IndexedInventory<'a> {
    pub(super) fn new(inventory: &'a Inventory) -> Self {
        let mut offers: Vec<(usize, &Offer)> = inventory.offers.iter().enumerate().collect();
        offers.sort_by(|(_, left), (_, right)| (left.price, *left).cmp(&(right.price, *right)));
        let mut fleets: Vec<&FleetSnapshot> = inventory.fleets.iter().collect();
        fleets.sort_by(|left, right| (&left.name, left.id).cmp(&(&right.name, right.id)));
        let number: BTreeMap<_, _> = fleets.iter().enumerate().map(|(at, fleet)| (fleet.id, at)).collect();
        let mut instances: Vec<&InstanceSnapshot> =
            inventory.instances.iter().filter(|instance| number.contains_key(&instance.fleet)).collect();
        instances.sort_by_key(|instance| instance.id);

        let mut stock = Self {
            fleets: fleets.into_iter().map(|fleet| fleet_slots(fleet, &offers)).collect(),
            offers,
            shapes: Vec::new(),
            free_blocks: Vec::with_capacity(instances.len()),
            blocks: Vec::with_capacity(instances.len()),
            reserved: BTreeMap::new(),
            open_instances: BTreeSet::new(),
            shape_of: Vec::with_capacity(instances.len()),
            instances,
        };
        let mut shapes: BTreeMap<(usize, &Offer), usize> = BTreeMap::new();
        let mut promised: BTreeMap<InstanceId, u32> = BTreeMap::new();
        for promise in &inventory.promises {
            *promised.entry(promise.instance).or_default() += promise.blocks;
        }
        for at in 0..stock.instances.len() {
            let instance = stock.instances[at];
            let fleet = number[&instance.fleet];
            let shape = *shapes.entry((fleet, &instance.offer)).or_insert_with(|| {
                let (members, open) = (Vec::new(), BTreeSet::new());
                stock.shapes.push(InstanceShape {
                    fleet,
                    offer: &instance.offer,
                    members,
                    open_instances: open,
                });
                stock.shapes.len() - 1
            });
            let held: u32 = instance.holds.iter().map(|held| held.blocks).sum();
            let leaving =
                instance.holds.iter().filter(|held| held.is_preempted).map(|held| held.blocks).sum();
            let unheld = instance.offer.total_blocks.max(1).saturating_sub(held);
            let promised = promised.get(&instance.id).copied().unwrap_or_default();
            let counts = BlockCounts { unheld, promised, leaving, spare: 0 };
            let free = counts.free();
            stock.blocks.push(counts);
            stock.shapes[shape].members.push(at);
            stock.fleets[fleet].count_instance(instance);
            stock.free_blocks.push(free);
            stock.shape_of.push(shape);
            if instance.readiness == Readiness::Ready && instance.offer.host.cpus > 0 {
                stock.shapes[shape].open_instances.insert((free, at));
                stock.open_instances.insert(stock.tightness(at));
            }
        }
        stock
    }

    pub(super) fn shape_of(&self, instance: usize) -> &InstanceShape<'a> {
        &self.shapes[self.shape_of[instance]]
    }

    pub(super) fn position(&self, instance: InstanceId) -> Option<usize> {
        self.instances.binary_search_by_key(&instance, |known| known.id).ok()
    }

    pub(super) fn shape_index(&self, instance: usize) -> usize {
        self.shape_of[instance]
    }

    pub(super) fn allocate(&mut self, instance: usize, blocks: u32) {
        self.change(instance, |counts| counts.unheld = counts.unheld.saturating_sub(blocks));
    }

    /// Counts blocks as free that a job holds.
    pub(super) fn release(&mut self, instance: usize, blocks: u32) {
        self.change(instance, |counts| counts.unheld += blocks);
    }

    /// Keeps blocks for a job, preferably those that preempted jobs hold.
    pub(super) fn promise(&mut self, instance: usize, blocks: u32, leaving: u32) {
        self.change(instance, |counts| {
            counts.promised += blocks;
            counts.leaving += leaving;
        });
    }

    pub(super) fn withdraw_promise(&mut self, instance: usize, blocks: u32) {
        self.change(instance, |counts| counts.promised = counts.promised.saturating_sub(blocks));
    }

    /// Returns the blocks of preempted jobs that are promised to no other.
    pub(super) fn surplus_leaving(&self, instance: usize) -> u32 {
        let counts = self.blocks[instance];
        counts.leaving.saturating_sub(counts.promised) + counts.spare
    }

    pub(super) fn leave_spare(&mut self, instance: usize, blocks: u32) {
        self.blocks[instance].spare += blocks;
    }

    /// Returns whether blocks are kept free for other jobs.
    fn has_kept_blocks(&self, instance: usize) -> bool {
        self.blocks[instance].free() < self.blocks[instance].unheld
    }

    fn change(&mut self, instance: usize, change: impl FnOnce(&mut BlockCounts)) {
        let was_open = self.remove_open(instance);
        change(&mut self.blocks[instance]);
        self.free_blocks[instance] = self.blocks[instance].free();
        if was_open {
            self.shapes[self.shape_of[instance]]
                .open_instances
                .insert((self.free_blocks[instance], instance));
            self.open_instances.insert(self.tightness(instance));
        }
    }

    pub(super) fn reserve(&mut self, instance: usize, reserved: Reservation) {
        self.remove_open(instance);
        self.reserved.insert(instance, reserved);
    }

    fn remove_open(&mut self, instance: usize) -> bool {
        let tightness = self.tightness(instance);
        self.shapes[self.shape_of[instance]].open_instances.remove(&(self.free_blocks[instance], instance));
        self.open_instances.remove(&tightness)
    }

    /// Returns whether it is open and has that many blocks free.
    pub(super) fn can_take(&self, instance: usize, blocks: u32) -> bool {
        let free = self.free_blocks[instance];
        free >= blocks && self.shape_of(instance).open_instances.contains(&(free, instance))
    }

    /// Returns whether it is among the requested instances, and not one to avoid.
    pub(super) fn is_eligible(&self, instance: usize, needs: &InstanceNeeds) -> bool {
        if needs.avoid_instances.contains(&self.instances[instance].id) {
            return false;
        }
        let Some(named) = &needs.instances else { return true };
        let fleet = self.fleets[self.shape_of(instance).fleet].fleet;
        let instance = self.instances[instance];
        is_instance_selected(
            named,
            &instance.name,
            instance.hostname.as_deref(),
            &fleet.name,
            instance.instance_num,
        )
    }

    /// Returns the tightness, smaller is tighter: free resources, scarcest first, then the price.
    pub(super) fn tightness(&self, instance: usize) -> Tightness {
        let offer = self.shape_of(instance).offer;
        let left = blocks::host_share(&offer.host, self.free_blocks[instance], offer.total_blocks);
        (left.gpus.len(), left.cpus, left.memory_mib, offer.price.0, instance)
    }

    /// Returns when `blocks` of it are free if nothing new is placed on it, and how many must be freed until then.
    pub(super) fn free_at(&self, instance: usize, blocks: u32, now: Timestamp) -> (Timestamp, u32) {
        let mut missing = blocks.saturating_sub(self.free_blocks[instance]);
        let must_go = missing;
        let held = &self.instances[instance].holds;
        let mut ends: Vec<(Timestamp, u32)> =
            held.iter().map(|held| (held.until.unwrap_or(FAR_FUTURE), held.blocks)).collect();
        ends.sort();
        for (until, blocks) in ends {
            if missing == 0 {
                break;
            }
            missing = missing.saturating_sub(blocks);
            if missing == 0 {
                return (until.max(now), must_go);
            }
        }
        // Claimed in this round: its end is not known yet.
        (if missing == 0 { now } else { FAR_FUTURE }, must_go)
    }

    /// Returns why an instance that would fit is not used now.
    pub(super) fn blocking_shortfall(
        &self,
        instance: usize,
        wanted: u32,
        needs: &InstanceNeeds,
    ) -> Shortfall {
        if needs.avoid_instances.contains(&self.instances[instance].id) {
            return Shortfall::Avoided { place: self.instances[instance].name.clone() };
        }
        if !self.is_eligible(instance, needs) {
            return Shortfall::NotNamed;
        }
        match self.instances[instance].readiness {
            Readiness::Provisioning => Shortfall::NotReady,
            Readiness::Unreachable => Shortfall::Unreachable,
            Readiness::Unhealthy => Shortfall::Unhealthy,
            Readiness::Draining => Shortfall::Draining,
            Readiness::Ready if self.instances[instance].offer.host.cpus == 0 => Shortfall::NotReady,
            Readiness::Ready => match self.reserved.get(&instance) {
                Some(reserved) if self.free_blocks[instance] >= wanted => {
                    Shortfall::Reserved { by: reserved.by }
                }
                None if self.has_kept_blocks(instance) && self.blocks[instance].unheld >= wanted => {
                    Shortfall::Promised
                }
                Some(_) | None => Shortfall::Busy {
                    wanted,
                    free: self.free_blocks[instance],
                    total: self.instances[instance].offer.total_blocks.max(1),
                },
            },
        }
    }
}

/// Free GPUs, CPUs, memory, then price and a tie-break.
pub(super) type Tightness = (usize, u32, u64, u64, usize);

/// Returns the number of blocks that a new instance of this offer would have in the fleet.
pub(super) fn split_offer(fleet: &FleetSnapshot, offer: &Offer) -> Result<u32, Shortfall> {
    // A pod is made for one job, and as large as that needs.
    if BackendKind::of(&offer.backend) == BackendKind::Pods {
        return Ok(1);
    }
    let gpus = u32::try_from(offer.host.gpus.len()).unwrap_or(u32::MAX);
    blocks::split_count(fleet.blocks, offer.host.cpus, gpus).map_err(|_| match fleet.blocks {
        Blocks::Count(blocks) => Shortfall::UnevenBlocks { blocks },
        Blocks::Auto => Shortfall::UnevenBlocks { blocks: 1 },
    })
}

fn fleet_slots<'a>(fleet: &'a FleetSnapshot, offers: &[(usize, &Offer)]) -> FleetSlots<'a> {
    let admits = |(_, offer): &(usize, &Offer)| {
        let mut missing = 0_u32;
        compare(offer, 1, &fleet.limits, &mut missing);
        let wanted = missing == 0 && offer.availability.is_worth_trying();
        if wanted { split_offer(fleet, offer).ok() } else { None }
    };
    let admits = if fleet.can_create { offers.iter().map(admits).collect() } else { Vec::new() };
    FleetSlots {
        fleet,
        ending_count: 0,
        removable_count: 0,
        instance_count: 0,
        used_nums: fleet.instance_nums.clone(),
        admitted_blocks: admits,
    }
}
