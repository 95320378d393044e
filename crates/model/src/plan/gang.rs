//! Placement of several nodes: all of them in one fleet, backend and region, on whole instances, or none.
//!
//! A fleet that has one instance and cannot get another would never run several nodes. There they share the instance:
//! together they hold all of its blocks.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    plan::{
        inventory::Tightness,
        offers::{InstanceNeeds, Offer, compare},
        place::{NewOffer, OFFERS_MAX},
        placement_round::{PlacementQuery, PlacementRound},
    },
    time::Timestamp,
};

/// Instances to consider.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CandidatePool {
    /// Free now.
    Free,
    /// Free now or once the jobs on them end.
    Draining,
    /// Every instance that could ever fit, in any state; including the fleet's slots.
    Any,
}

pub(super) enum GangMember {
    Existing(usize),
    New(Vec<NewOffer>),
    /// A part of an instance whose other parts belong to other nodes of the gang.
    Part {
        instance: usize,
        blocks: u32,
    },
}

impl GangMember {
    pub(super) fn instance(&self) -> Option<usize> {
        match self {
            Self::Existing(instance) | Self::Part { instance, .. } => Some(*instance),
            Self::New(_) => None,
        }
    }
}

/// Location of a gang: fleet, backend, region.
pub(super) type GangLocation<'a> = (usize, &'a str, &'a str);

pub(super) struct Gang {
    pub(super) fleet: usize,
    /// One per node, in the order of the nodes.
    pub(super) members: Vec<GangMember>,
    cost: GangCost,
}

/// Cost of a gang, smaller is better: time until all are free, blocks to drain, new instances, price.
type GangCost = (Timestamp, u32, usize, u64);

/// An instance as a candidate: when it is free, the blocks to drain, its tightness.
type GangCandidate = (Timestamp, u32, Tightness);

impl<'a> PlacementRound<'a> {
    pub(super) fn best_gang(&mut self, query: &PlacementQuery, pool: CandidatePool) -> Option<Gang> {
        let mut best: Option<Gang> = None;
        for spot in self.gang_locations(query) {
            let Ok(gang) = self.gang_at(query, spot, pool) else { continue };
            if best.as_ref().is_none_or(|best| gang.cost < best.cost) {
                best = Some(gang);
            }
        }
        best.or_else(|| {
            query.fleets.iter().filter_map(|fleet| self.gang_on_one_instance(query, *fleet, pool)).next()
        })
    }

    /// Returns a gang whose nodes share the only instance that the fleet can have, if all of it is free, or once it is.
    pub(super) fn gang_on_one_instance(
        &self,
        query: &PlacementQuery,
        fleet: usize,
        pool: CandidatePool,
    ) -> Option<Gang> {
        let shape = self.inventory.shapes.iter().find(|shape| shape.fleet == fleet)?;
        let &[instance] = &shape.members[..] else { return None };
        let (total, free) = (shape.offer.total_blocks.max(1), self.inventory.free_blocks[instance]);
        let (from, must_go) = match pool {
            CandidatePool::Free if free == total => (self.now, 0),
            CandidatePool::Draining => self.inventory.free_at(instance, total, self.now),
            CandidatePool::Free | CandidatePool::Any => return None,
        };
        let is_open = self.inventory.can_take(instance, free);
        let is_eligible = |class: &usize| self.inventory.is_eligible(instance, &self.classes[*class].needs);
        if !is_open || !query.classes.iter().all(is_eligible) {
            return None;
        }
        let parts = self.parts_of_one_instance(query, fleet, shape.offer, total)?;
        let members = parts.into_iter().map(|blocks| GangMember::Part { instance, blocks }).collect();
        Some(Gang { fleet, members, cost: (from, must_go, 0, 0) })
    }

    /// Returns whether the nodes fit together on the only instance of the fleet, whatever is on it now. If it does not
    /// exist, only the fleet itself creates it, to have its minimum of instances.
    pub(super) fn fits_on_one_instance(&self, query: &PlacementQuery, fleet: usize) -> bool {
        let slots = &self.inventory.fleets[fleet];
        let is_shared =
            |offer: &Offer, total: u32| self.parts_of_one_instance(query, fleet, offer, total).is_some();
        let mut shapes = self.inventory.shapes.iter().filter(|shape| shape.fleet == fleet).peekable();
        if shapes.peek().is_some() {
            let is_eligible = |instance: &usize| {
                query
                    .classes
                    .iter()
                    .all(|class| self.inventory.is_eligible(*instance, &self.classes[*class].needs))
            };
            return slots.has_one_instance_at_most()
                && shapes.any(|shape| {
                    // One that has not been inspected yet may turn out to fit.
                    let fits =
                        shape.offer.host.cpus == 0 || is_shared(shape.offer, shape.offer.total_blocks.max(1));
                    fits && shape.members.iter().any(is_eligible)
                });
        }
        let offers = self.inventory.offers.iter().zip(&slots.admitted_blocks);
        let mut admitted = offers.filter_map(|((_, offer), total)| Some((*offer, (*total)?)));
        let is_created = slots.fleet.can_create && slots.fleet.nodes_min > 0;
        is_created && admitted.any(|(offer, total)| is_shared(offer, total))
    }

    /// Returns the blocks of each node on an instance of a fleet that cannot have two.
    fn parts_of_one_instance(
        &self,
        query: &PlacementQuery,
        fleet: usize,
        offer: &Offer,
        total: u32,
    ) -> Option<Vec<u32>> {
        let slots = &self.inventory.fleets[fleet];
        if !slots.has_one_instance_at_most() {
            return None;
        }
        let needed = query.classes.iter().map(|class| {
            let needs = InstanceNeeds {
                needs_whole_instance: false,
                ..self.classes[*class].needs.with_fleet_limits(&slots.fleet.limits).into_owned()
            };
            let mut missing = 0_u32;
            let blocks = compare(offer, total, &needs, &mut missing);
            (missing == 0).then_some(blocks)
        });
        split_between(total, &needed.collect::<Option<Vec<u32>>>()?)
    }

    pub(super) fn gang_locations(&self, query: &PlacementQuery) -> BTreeSet<GangLocation<'a>> {
        let shapes = self.inventory.shapes.iter().filter(|shape| query.fleets.contains(&shape.fleet));
        let mut spots: BTreeSet<GangLocation<'a>> =
            shapes.map(|shape| (shape.fleet, &*shape.offer.backend, &*shape.offer.region)).collect();
        for &fleet in query.fleets.iter().filter(|fleet| self.inventory.fleets[**fleet].fleet.can_create) {
            spots.extend(
                self.inventory.offers.iter().map(|(_, offer)| (fleet, &*offer.backend, &*offer.region)),
            );
        }
        spots
    }

    /// Returns a gang at a location, or the number of its nodes that fit there.
    ///
    /// The nodes with the fewest candidates choose first. That finds an assignment whenever the needs are nested (the
    /// usual case: equal nodes, or a bigger head node); it may miss one that only a full matching would find.
    pub(super) fn gang_at(
        &mut self,
        query: &PlacementQuery,
        spot: GangLocation<'a>,
        pool: CandidatePool,
    ) -> Result<Gang, u32> {
        let (fleet, backend, region) = spot;
        let candidates = self.candidates(spot, pool);
        let mut slots = match pool {
            CandidatePool::Free | CandidatePool::Draining => self.inventory.fleets[fleet].free_slots(),
            CandidatePool::Any => self.slots_eventually(query, fleet),
        };
        let mut order: Vec<usize> = (0..query.classes.len()).collect();
        let mut choices: BTreeMap<usize, usize> = BTreeMap::new();
        for &class in &query.classes {
            choices
                .entry(class)
                .or_insert_with(|| candidates.iter().filter(|at| self.can_serve(class, at.2.4)).count());
        }
        order.sort_by_key(|node| (choices[&query.classes[*node]], *node));

        let mut cursors: BTreeMap<(usize, bool), usize> = BTreeMap::new();
        let mut used = BTreeSet::new();
        let mut members: Vec<Option<GangMember>> = query.classes.iter().map(|_| None).collect();
        let mut cost: GangCost = (self.now, 0, 0, 0);
        for node in order {
            let class = query.classes[node];
            // Free ones first, then new ones, then those that must drain.
            let mut member = self.next_candidate(class, &candidates, &mut used, &mut cursors, true);
            if member.is_none() && slots > 0 {
                let offers = self.new_offers(query, class, fleet);
                let here = offers.iter().filter(|(at, _)| {
                    let offer = self.inventory.offers[*at].1;
                    offer.backend == backend && offer.region == region
                });
                let mut here: Vec<&(usize, NewOffer)> = here.take(OFFERS_MAX).collect();
                here.retain(self.counted_alike(query, &here));
                if let Some((cheapest, _)) = here.first() {
                    slots -= 1;
                    cost.2 += 1;
                    cost.3 += self.inventory.offers[*cheapest].1.price.0;
                    members[node] =
                        Some(GangMember::New(here.into_iter().map(|(_, offer)| offer.clone()).collect()));
                    continue;
                }
            }
            if member.is_none() {
                member = self.next_candidate(class, &candidates, &mut used, &mut cursors, false);
            }
            if let Some((from, must_go, tightness)) = member {
                cost = (cost.0.max(from), cost.1 + must_go, cost.2, cost.3 + tightness.3);
                members[node] = Some(GangMember::Existing(tightness.4));
            }
        }
        let seated = members.iter().flatten().count();
        let members: Option<Vec<GangMember>> = members.into_iter().collect();
        members.map(|members| Gang { fleet, members, cost }).ok_or(u32::try_from(seated).unwrap_or(u32::MAX))
    }

    /// Returns the slots for new instances, now or once instances that do not fit have been terminated.
    fn slots_eventually(&self, query: &PlacementQuery, fleet: usize) -> u32 {
        let room = &self.inventory.fleets[fleet];
        let members = self.inventory.shapes.iter().filter(|shape| shape.fleet == fleet);
        let idle = members.flat_map(|shape| &shape.members);
        let useless =
            idle.filter(|at| !query.classes.iter().any(|class| self.can_serve(*class, **at))).count();
        let useless = u32::try_from(useless).unwrap_or(u32::MAX);
        room.slots_without(room.freeable_slots().min(useless))
    }

    /// Returns the instances to consider at a location, soonest and tightest first.
    fn candidates(
        &self,
        (fleet, backend, region): GangLocation<'_>,
        pool: CandidatePool,
    ) -> Vec<GangCandidate> {
        let mut candidates = Vec::new();
        for shape in &self.inventory.shapes {
            if shape.fleet != fleet || shape.offer.backend != backend || shape.offer.region != region {
                continue;
            }
            let total = shape.offer.total_blocks.max(1);
            match pool {
                CandidatePool::Free => {
                    let free = shape.open_instances.range((total, 0)..);
                    candidates.extend(free.map(|(_, at)| (self.now, 0, self.inventory.tightness(*at))));
                }
                CandidatePool::Draining => candidates.extend(shape.open_instances.iter().map(|(_, at)| {
                    let (from, must_go) = self.inventory.free_at(*at, total, self.now);
                    (from, must_go, self.inventory.tightness(*at))
                })),
                CandidatePool::Any => candidates
                    .extend(shape.members.iter().map(|at| (self.now, 0, self.inventory.tightness(*at)))),
            }
        }
        candidates.sort();
        candidates
    }

    fn can_serve(&self, class: usize, instance: usize) -> bool {
        self.fit_shape(class, self.inventory.shape_index(instance)).blocks > 0
            && self.inventory.is_eligible(instance, &self.classes[class].needs)
    }

    /// Returns the next candidate that the gang does not use yet. One cursor per class: what it passed is used or does
    /// not fit, and stays so.
    fn next_candidate(
        &self,
        class: usize,
        candidates: &[GangCandidate],
        used: &mut BTreeSet<usize>,
        cursors: &mut BTreeMap<(usize, bool), usize>,
        free: bool,
    ) -> Option<GangCandidate> {
        let cursor = cursors.entry((class, free)).or_default();
        while let Some(candidate) = candidates.get(*cursor) {
            *cursor += 1;
            let (_, must_go, tightness) = candidate;
            let suits = (*must_go == 0) == free && !used.contains(&tightness.4);
            if suits && self.can_serve(class, tightness.4) {
                used.insert(tightness.4);
                return Some(*candidate);
            }
        }
        None
    }
}

/// Splits all blocks of an instance between nodes that need these numbers of blocks: evenly if that suffices. The first
/// node gets what remains.
fn split_between(total: u32, needed: &[u32]) -> Option<Vec<u32>> {
    let nodes = u32::try_from(needed.len()).ok().filter(|nodes| *nodes > 0)?;
    let even = total / nodes;
    let mut parts: Vec<u32> = match needed.iter().all(|blocks| *blocks <= even) {
        true => vec![even; needed.len()],
        false => needed.to_vec(),
    };
    let used: u32 = parts.iter().sum();
    if used > total || parts.contains(&0) {
        return None;
    }
    parts[0] += total - used;
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::split_between;

    #[test]
    fn nodes_on_one_instance_hold_all_of_its_blocks() {
        assert_eq!(split_between(8, &[1, 1]), Some(vec![4, 4]));
        assert_eq!(split_between(7, &[1, 1, 1]), Some(vec![3, 2, 2]));
        assert_eq!(split_between(8, &[5, 1]), Some(vec![7, 1]), "more than an even part");
        assert_eq!(split_between(8, &[5, 4]), None);
        assert_eq!(split_between(1, &[1, 1]), None, "an instance that is not split");
    }
}
