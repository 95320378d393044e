//! Reasons why a waiting replica was not placed, nearest miss first.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    backend_kind::is_server_machine,
    explain::{Refusal, Shortfall},
    plan::{
        gang::CandidatePool,
        inventory::split_offer,
        offers::{InstanceNeeds, Offer, compare, shortfalls},
        place::{InstanceCreation, REFUSALS_MAX, RefusalReport},
        placement_round::{PlacementQuery, PlacementRound, ShapeFit},
    },
};

/// A refusal before its message is built; most are counted and dropped.
enum Rejection {
    Refused(Refusal),
    Shape {
        class: usize,
        shape: usize,
    },
    /// It would fit if it were not in use; `count` instances are like it.
    Blocked {
        class: usize,
        instance: usize,
        count: u32,
    },
    /// `position` is the one in the inventory's offers.
    Offer {
        class: usize,
        fleet: usize,
        position: usize,
    },
}

/// Sort key, nearest first: temporary ones, then by the number of shortfalls.
type RankedRejection = (bool, u32, Rejection);

impl PlacementRound<'_> {
    /// Returns all reasons, and whether waiting may help.
    pub(super) fn refusal_report(&mut self, query: &PlacementQuery) -> (Arc<RefusalReport>, bool) {
        let mut misses = Vec::new();
        let several = query.classes.len() > 1;
        let mut kinds = query.classes.clone();
        kinds.sort_unstable();
        kinds.dedup();
        if several {
            self.gang_rejections(query, &mut misses);
        }
        let (together, passes_together) = (misses.len(), misses.iter().any(|(stays, ..)| !stays));
        for &class in &kinds {
            self.instance_rejections(query, class, &mut misses);
            self.offer_rejections(query, class, &mut misses);
        }
        self.fleet_rejections(query, several, &mut misses);
        // A busy instance does not help a gang that would not fit if all were free.
        let passes = if several { passes_together } else { misses.iter().any(|(stays, ..)| !stays) };
        // Shortfalls of all nodes together come first, then those of single locations.
        misses[..together].sort_by_key(|(stays, missing, _)| (*stays, *missing));
        misses[together..].sort_by_key(|(stays, missing, _)| (*stays, *missing));
        let left_out = misses.len().saturating_sub(REFUSALS_MAX);
        misses.truncate(REFUSALS_MAX);
        let refusals = deduplicate(misses.into_iter().map(|(_, _, miss)| self.to_refusal(miss)));
        let hopeless = |refusal: &Refusal| refusal.shortfalls.iter().any(Shortfall::is_permanent);
        let all_hopeless = !refusals.is_empty() && left_out == 0 && refusals.iter().all(hopeless);
        let for_good = !several && !passes && all_hopeless && !self.can_create_other(query);
        (Arc::new(RefusalReport { refusals, left_out, for_good }), passes)
    }

    /// Returns whether one of these fleets could create an instance that is not offered today. The local machine has a
    /// single offer, which does not change.
    fn can_create_other(&self, query: &PlacementQuery) -> bool {
        let is_local = |backends: &Vec<String>| backends.iter().all(|backend| is_server_machine(backend));
        let makes_others = |fleet: &usize| {
            let fleet = self.inventory.fleets[*fleet].fleet;
            fleet.can_create && !fleet.limits.backends.as_ref().is_some_and(is_local)
        };
        query.creation != InstanceCreation::Reuse && query.fleets.iter().any(makes_others)
    }

    fn gang_rejections(&mut self, query: &PlacementQuery, misses: &mut Vec<RankedRejection>) {
        let wanted = u32::try_from(query.classes.len()).unwrap_or(u32::MAX);
        for spot in self.gang_locations(query) {
            let fit = self.gang_at(query, spot, CandidatePool::Free).map_or_else(|fit| fit, |_| wanted);
            if fit >= wanted {
                // Only a quota prevents it.
                continue;
            }
            let (fleet, backend, region) = spot;
            if self.gang_on_one_instance(query, fleet, CandidatePool::Free).is_some() {
                // The nodes fit on the only instance of the fleet now: here, too, only a quota prevents it.
                continue;
            }
            let could = self.gang_at(query, spot, CandidatePool::Any).map_or_else(|could| could, |_| wanted);
            let could = if self.fits_on_one_instance(query, fleet) { wanted } else { could };
            let place = format!("fleet {}, {backend} {region}", self.inventory.fleets[fleet].fleet.name);
            misses.push(rank(place, 1, vec![Shortfall::TooFewNodes { wanted, fit, could }]));
        }
    }

    fn instance_rejections(&self, query: &PlacementQuery, class: usize, misses: &mut Vec<RankedRejection>) {
        let needs = &self.classes[class].needs;
        for (at, shape) in self.inventory.shapes.iter().enumerate() {
            if !query.fleets.contains(&shape.fleet) {
                continue;
            }
            let ShapeFit { blocks: wanted, shortfall_count: missing } = self.fit_shape(class, at);
            if wanted == 0 {
                let stays = missing > 1 || !is_host_temporarily_unsuitable(needs, shape.offer);
                misses.push((stays, missing, Rejection::Shape { class, shape: at }));
                continue;
            }
            // A free instance lacks nothing itself; its gang does.
            let usable =
                |at: &usize| self.inventory.can_take(*at, wanted) && self.inventory.is_eligible(*at, needs);
            // Identical instances with the same shortfall are one refusal, with the one nearest to being free.
            if let [instance] = shape.members[..] {
                if !usable(&instance) {
                    let stays = !self.inventory.blocking_shortfall(instance, wanted, needs).is_temporary();
                    misses.push((stays, 1, Rejection::Blocked { class, instance, count: 1 }));
                }
                continue;
            }
            let mut groups: BTreeMap<&'static str, (usize, u32)> = BTreeMap::new();
            for &instance in shape.members.iter().filter(|at| !usable(at)) {
                let kind = self.inventory.blocking_shortfall(instance, wanted, needs).kind();
                let group = groups.entry(kind).or_insert((instance, 0));
                group.1 += 1;
                if self.inventory.free_blocks[instance] > self.inventory.free_blocks[group.0] {
                    group.0 = instance;
                }
            }
            for (instance, count) in groups.into_values() {
                let stays = !self.inventory.blocking_shortfall(instance, wanted, needs).is_temporary();
                misses.push((stays, 1, Rejection::Blocked { class, instance, count }));
            }
        }
    }

    fn offer_rejections(&self, query: &PlacementQuery, class: usize, misses: &mut Vec<RankedRejection>) {
        let needs = &self.classes[class].needs;
        let wanted = u32::try_from(query.classes.len()).unwrap_or(u32::MAX);
        for &at in &query.fleets {
            let room = &self.inventory.fleets[at];
            if !room.fleet.can_create {
                continue;
            }
            let needs = needs.with_fleet_limits(&room.fleet.limits);
            let new = || format!("new instance in fleet {}", room.fleet.name);
            if query.creation == InstanceCreation::Reuse {
                misses.push(rank(new(), 1, vec![Shortfall::ReuseOnly]));
            } else if needs.instances.is_some() {
                misses.push(rank(new(), 1, vec![Shortfall::NotNamed]));
            } else if self.inventory.offers.is_empty() {
                misses.push(rank(new(), 1, vec![Shortfall::NoOffers]));
            } else {
                let full = room.free_slots() < wanted;
                let stays_full = room.slots_without(room.freeable_slots()) < wanted;
                // The offered local machine is the existing local instance, which has its own refusal.
                let has_local =
                    self.inventory.shapes.iter().any(|shape| is_server_machine(&shape.offer.backend));
                for (position, (_, offer)) in self.inventory.offers.iter().enumerate() {
                    if has_local && is_server_machine(&offer.backend) {
                        continue;
                    }
                    let mut missing = 0_u32;
                    let total = split_offer(room.fleet, offer);
                    compare(offer, *total.as_ref().unwrap_or(&1), &needs, &mut missing);
                    compare(offer, 1, &room.fleet.limits, &mut missing);
                    missing += u32::from(!offer.availability.is_worth_trying()) + u32::from(total.is_err());
                    if missing > 0 || full {
                        let stays = missing > 0 || stays_full;
                        misses.push((stays, missing, Rejection::Offer { class, fleet: at, position }));
                    }
                }
            }
        }
    }

    fn fleet_rejections(&self, query: &PlacementQuery, several: bool, misses: &mut Vec<RankedRejection>) {
        for name in &query.missing_fleets {
            let known = query.usable.iter().map(|at| self.inventory.fleets[*at].fleet.name.clone()).collect();
            // Before the fleets that it does not name.
            let shortfalls = vec![Shortfall::FleetMissing { known }];
            let refusal = Refusal { place: format!("fleet {name}"), count: 1, shortfalls };
            misses.push((true, 0, Rejection::Refused(refusal)));
        }
        for (at, room) in query.usable.iter().map(|at| (*at, &self.inventory.fleets[*at])) {
            let place = || format!("fleet {}", room.fleet.name);
            if !query.fleets.contains(&at) {
                let shortfall = if several && !room.fleet.is_cluster && !room.has_one_instance_at_most() {
                    Shortfall::NotCluster
                } else {
                    Shortfall::FleetNotNamed
                };
                misses.push(rank(place(), 1, vec![shortfall]));
            } else if !room.fleet.can_create && !self.inventory.shapes.iter().any(|shape| shape.fleet == at) {
                misses.push(rank(place(), 1, vec![Shortfall::FleetEmpty]));
            }
        }
        if query.usable.is_empty() {
            misses.push(rank("fleets".into(), 1, vec![Shortfall::NoFleets]));
        }
    }

    fn to_refusal(&self, miss: Rejection) -> Refusal {
        match miss {
            Rejection::Refused(refusal) => refusal,
            Rejection::Shape { class, shape } => {
                let shape = &self.inventory.shapes[shape];
                Refusal {
                    place: self.inventory.instances[shape.members[0]].name.clone(),
                    count: u32::try_from(shape.members.len()).unwrap_or(u32::MAX),
                    shortfalls: {
                        let limits = &self.inventory.fleets[shape.fleet].fleet.limits;
                        shortfalls(shape.offer, &self.classes[class].needs.with_fleet_limits(limits))
                    },
                }
            }
            Rejection::Blocked { class, instance, count } => {
                let wanted = self.fit_shape(class, self.inventory.shape_index(instance)).blocks;
                let shortfall =
                    self.inventory.blocking_shortfall(instance, wanted, &self.classes[class].needs);
                Refusal {
                    place: self.inventory.instances[instance].name.clone(),
                    count,
                    shortfalls: vec![shortfall],
                }
            }
            Rejection::Offer { class, fleet, position } => {
                let (room, offer) = (&self.inventory.fleets[fleet], self.inventory.offers[position].1);
                let needs = self.classes[class].needs.with_fleet_limits(&room.fleet.limits);
                let mut short = Vec::new();
                let total = split_offer(room.fleet, offer);
                compare(offer, *total.as_ref().unwrap_or(&1), &needs, &mut short);
                compare(offer, 1, &room.fleet.limits, &mut short);
                if !offer.availability.is_worth_trying() {
                    short.push(Shortfall::Unavailable { availability: offer.availability });
                }
                short.extend(total.err());
                if short.is_empty() {
                    let max = room.fleet.nodes_max.unwrap_or(u32::MAX);
                    short.push(Shortfall::FleetFull {
                        max,
                        wanted: 1,
                        frees: room.slots_without(room.freeable_slots()) > 0,
                    });
                }
                Refusal { place: describe_offer(&room.fleet.name, offer), count: 1, shortfalls: short }
            }
        }
    }
}

/// Merges refusals with the same reasons, with their count: a reason is listed once, with the nearest location.
fn deduplicate(all: impl Iterator<Item = Refusal>) -> Vec<Refusal> {
    let mut reported: Vec<Refusal> = Vec::new();
    for refusal in all {
        match reported.iter_mut().find(|known| known.shortfalls == refusal.shortfalls) {
            Some(known) => known.count += refusal.count,
            None => reported.push(refusal),
        }
    }
    reported
}

/// Returns whether the obstacle may pass: the container engine is unavailable, or the agent has not reported yet.
fn is_host_temporarily_unsuitable(needs: &InstanceNeeds, offer: &Offer) -> bool {
    let image = needs.image.as_ref();
    image
        .and_then(|image| image.resolve_on(offer.host.runtimes.as_ref()).err())
        .is_some_and(|short| short.is_temporary())
}

fn rank(place: String, count: u32, shortfalls: Vec<Shortfall>) -> RankedRejection {
    let refusal = Refusal { place, count, shortfalls };
    (
        !refusal.is_temporary(),
        u32::try_from(refusal.shortfalls.len()).unwrap_or(u32::MAX),
        Rejection::Refused(refusal),
    )
}

fn describe_offer(fleet: &str, offer: &Offer) -> String {
    format!("{} in fleet {fleet}", offer.location_name())
}
