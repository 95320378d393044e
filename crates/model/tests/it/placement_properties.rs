//! Properties of placement for any queue and inventory.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use proptest::prelude::*;
use windlass_model::{
    id::{InstanceId, SubmissionId},
    plan::{
        blocks::host_share,
        offers::{InstanceNeeds, smallest_fit},
        place::{
            FleetChoice, FleetSnapshot, Inventory, NodePlacement, PlacementOutcome, RESERVE_AFTER, Readiness,
            ReplicaPlacement, WaitingReplica, place_replicas,
        },
    },
    time::{Span, Timestamp},
};

use super::placement::{NOW, fleet, held, host, instance, needs, offer, uuid, waiting, words};

fn inventories() -> impl Strategy<Value = Inventory> {
    let machine = (
        0_u32..3,
        prop::sample::select(vec![(4_u32, 0_usize, 1_u32), (8, 0, 4), (16, 4, 4), (32, 8, 8)]),
        0_u32..5,
        prop::sample::select(vec![
            Readiness::Ready,
            Readiness::Ready,
            Readiness::Ready,
            Readiness::Unreachable,
            Readiness::Provisioning,
        ]),
        prop::option::of(1_000_000_i64..1_010_000),
    );
    let machines = prop::collection::vec(machine, 0..12);
    let offers = prop::collection::vec((2_u32..40, 0_usize..3, 0_u32..5), 0..4);
    (machines, offers, 0_u32..6).prop_map(|(machines, offers, room)| {
        let mut fleets = [
            fleet(1, "plain"),
            FleetSnapshot { is_cluster: true, ..fleet(2, "cluster") },
            FleetSnapshot { is_cluster: true, can_create: true, ..fleet(3, "cloud") },
        ];
        let mut instances = Vec::new();
        for (n, (of, (cpus, gpus, total), busy, readiness, until)) in machines.into_iter().enumerate() {
            let of = &mut fleets[of as usize];
            let n = n as u128 + 1;
            of.instance_nums.insert(n as u32);
            let mut instance = instance(n, of, offer(host(cpus, gpus), total, 0.0));
            instance.readiness = readiness;
            instance.holds = vec![held(n + 500, busy.min(total), until)];
            instances.push(instance);
        }
        fleets[2].nodes_max = Some(fleets[2].instance_nums.len() as u32 + room);
        let offers =
            offers.into_iter().map(|(cpus, gpus, price)| offer(host(cpus, gpus), 1, f64::from(price)));
        Inventory { fleets: fleets.to_vec(), instances, offers: offers.collect(), ..Inventory::default() }
    })
}

/// Returns the instance and the number of its blocks, if all nodes are on one.
fn parts_of_one_instance(seats: &[NodePlacement]) -> Option<(InstanceId, u32)> {
    let mut found: Option<(InstanceId, u32)> = None;
    for seat in seats {
        let NodePlacement::Existing { instance, blocks, .. } = seat else { return None };
        match &mut found {
            Some((known, sum)) if known == instance => *sum += blocks,
            Some(_) => return None,
            None => found = Some((*instance, *blocks)),
        }
    }
    found
}

fn queues() -> impl Strategy<Value = Vec<WaitingReplica>> {
    let one =
        (0_u32..3, 999_000_i64..1_000_000, 1_usize..4, 1_u32..40, 0_u32..9, prop::option::of(1_i64..20_000));
    prop::collection::vec(one, 0..14).prop_map(|queue| {
        let mut runs = Vec::new();
        for (n, (priority, since, nodes, cpus, gpus, lasts)) in queue.into_iter().enumerate() {
            // The last node of several is a small one without GPUs.
            let mut requests = vec![needs(cpus, gpus); nodes];
            if nodes > 1 {
                requests[nodes - 1] = needs(cpus.min(4), 0);
            }
            let mut run = waiting(n as u128 + 1, since, requests);
            run.priority = priority;
            run.max_duration = lasts.map(Span::secs);
            runs.push(run);
        }
        runs
    })
}

/// Returns the blocks assigned on each instance in this round.
fn given(placements: &[ReplicaPlacement]) -> BTreeMap<InstanceId, u32> {
    let mut given = BTreeMap::new();
    for placement in placements {
        if let PlacementOutcome::Placed { seats, .. } = &placement.outcome {
            for seat in seats {
                if let NodePlacement::Existing { instance, blocks, .. } = seat {
                    *given.entry(*instance).or_default() += blocks;
                }
            }
        }
    }
    given
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn r8_g3_no_block_is_given_twice(queue in queues(), inventory in inventories()) {
        let given = given(&place_replicas(&queue, &inventory, NOW));
        for instance in &inventory.instances {
            let held: u32 = instance.holds.iter().map(|held| held.blocks).sum();
            let more = given.get(&instance.id).copied().unwrap_or(0);
            prop_assert!(more == 0 || instance.readiness == Readiness::Ready);
            prop_assert!(more == 0 || held + more <= instance.offer.total_blocks, "{}", instance.name);
        }
    }

    #[test]
    fn g5_r23_new_instances_stay_within_the_fleet_maximum_with_unique_numbers(queue in queues(), inventory in inventories()) {
        let cloud = &inventory.fleets[2];
        let mut nums = cloud.instance_nums.clone();
        for placement in place_replicas(&queue, &inventory, NOW) {
            if let PlacementOutcome::Placed { fleet, seats } = placement.outcome {
                for seat in seats {
                    if let NodePlacement::New { instance_num, offers, .. } = seat {
                        prop_assert_eq!(fleet, cloud.id);
                        prop_assert!(nums.insert(instance_num), "number {} was given twice", instance_num);
                        prop_assert!(!offers.is_empty());
                    }
                }
            }
        }
        prop_assert!(nums.len() as u32 <= cloud.nodes_max.unwrap());
    }

    #[test]
    fn every_placement_has_enough_cpus_and_gpus(queue in queues(), inventory in inventories()) {
        let needs_of: BTreeMap<SubmissionId, Arc<InstanceNeeds>> =
            queue.iter().flat_map(|run| &run.nodes).map(|node| (node.job, Arc::clone(&node.needs))).collect();
        for placement in place_replicas(&queue, &inventory, NOW) {
            let PlacementOutcome::Placed { seats, .. } = placement.outcome else { continue };
            for seat in seats {
                let (job, offer, blocks, total) = match seat {
                    NodePlacement::Existing { job, instance, blocks } => {
                        let of = inventory.instances.iter().find(|of| of.id == instance).unwrap();
                        (job, of.offer.clone(), blocks, of.offer.total_blocks)
                    }
                    NodePlacement::New { job, offers, .. } => {
                        let new = &offers[0];
                        (job, inventory.offers[new.offer].clone(), new.blocks, new.total_blocks)
                    }
                };
                let wanted = needs_of[&job].resources.clone().unwrap();
                let has = host_share(&offer.host, blocks, total);
                prop_assert!(has.cpus >= wanted.cpu.count.min.unwrap());
                prop_assert!(has.gpus.len() as u32 >= wanted.gpu.and_then(|gpu| gpu.count.min).unwrap_or(0));
            }
        }
    }

    #[test]
    fn r9_a_multi_node_job_gets_whole_instances_of_one_cluster_fleet_or_none(queue in queues(), inventory in inventories()) {
        for placement in place_replicas(&queue, &inventory, NOW) {
            let nodes = queue.iter().find(|run| run.run == placement.run).unwrap().nodes.len();
            let PlacementOutcome::Placed { fleet, seats } = placement.outcome else { continue };
            prop_assert_eq!(seats.len(), nodes);
            if nodes == 1 {
                continue;
            }
            let chosen = inventory.fleets.iter().find(|of| of.id == fleet).unwrap();
            let shared = parts_of_one_instance(&seats);
            if let Some((instance, blocks)) = shared {
                let of = inventory.instances.iter().find(|of| of.id == instance).unwrap();
                prop_assert!(chosen.has_one_instance_at_most());
                prop_assert_eq!((of.fleet, blocks), (fleet, of.offer.total_blocks));
                continue;
            }
            prop_assert!(chosen.is_cluster);
            let mut used = BTreeSet::new();
            for seat in seats {
                match seat {
                    NodePlacement::Existing { instance, blocks, .. } => {
                        let of = inventory.instances.iter().find(|of| of.id == instance).unwrap();
                        prop_assert!(used.insert(instance) && blocks == of.offer.total_blocks);
                        prop_assert_eq!(of.fleet, fleet);
                    }
                    NodePlacement::New { offers, .. } => {
                        prop_assert!(offers.iter().all(|new| new.blocks == new.total_blocks));
                    }
                }
            }
        }
    }

    #[test]
    fn every_unplaced_job_has_a_reason_and_a_remedy(queue in queues(), inventory in inventories()) {
        for placement in place_replicas(&queue, &inventory, NOW) {
            match placement.outcome {
                PlacementOutcome::Placed { .. } => {}
                PlacementOutcome::Waits { why, .. } | PlacementOutcome::Never { why } => {
                    prop_assert!(!why.refusals.is_empty());
                    prop_assert!(why.refusals.iter().all(|refusal| !refusal.shortfalls.is_empty()));
                    for shortfall in why.refusals.iter().flat_map(|refusal| &refusal.shortfalls) {
                        prop_assert!(!shortfall.to_string().is_empty() && !shortfall.cure().is_empty());
                    }
                }
            }
        }
    }

    #[test]
    fn the_order_of_the_arguments_does_not_matter(queue in queues(), inventory in inventories(), round in 0_usize..12) {
        let expect: Vec<_> = place_replicas(&queue, &inventory, NOW).iter().map(words).collect();
        let (mut queue, mut turned) = (queue, inventory.clone());
        queue.reverse();
        turned.fleets.reverse();
        let by = round.checked_rem(turned.instances.len()).unwrap_or(0);
        turned.instances.rotate_left(by);
        prop_assert_eq!(place_replicas(&queue, &turned, NOW).iter().map(words).collect::<Vec<_>>(), expect);
    }

    #[test]
    fn a_job_that_can_never_start_does_not_delay_others(queue in queues(), inventory in inventories()) {
        let mut impossible = waiting(900, 0, vec![needs(4_000, 0)]);
        impossible.priority = 100;
        let expect: Vec<_> = place_replicas(&queue, &inventory, NOW).iter().map(words).collect();
        let with: Vec<_> = place_replicas(&[queue, vec![impossible]].concat(), &inventory, NOW).iter().map(words).collect();
        prop_assert!(with[0].starts_with("900: never"));
        prop_assert_eq!(&with[1..], &expect[..]);
    }

    /// C8: removing the lower priorities changes nothing for the higher ones.
    #[test]
    fn c8_lower_priority_jobs_never_change_the_placement_of_higher_ones(queue in queues(), inventory in inventories()) {
        let all: Vec<_> = place_replicas(&queue, &inventory, NOW).iter().map(words).collect();
        let high: Vec<WaitingReplica> = queue.into_iter().filter(|run| run.priority > 0).collect();
        let alone: Vec<_> = place_replicas(&high, &inventory, NOW).iter().map(words).collect();
        prop_assert_eq!(&all[..alone.len()], &alone[..]);
    }

    #[test]
    fn a_job_that_fits_a_free_unreserved_instance_is_placed(queue in queues(), inventory in inventories()) {
        let placements = place_replicas(&queue, &inventory, NOW);
        let given = given(&placements);
        let mut reserved = BTreeSet::new();
        for placement in &placements {
            if let PlacementOutcome::Waits { reserved: these, .. } = &placement.outcome {
                reserved.extend(these.iter().copied());
            }
        }
        for placement in &placements {
            let run = queue.iter().find(|run| run.run == placement.run).unwrap();
            if run.nodes.len() > 1 || matches!(placement.outcome, PlacementOutcome::Placed { .. }) {
                continue;
            }
            for instance in inventory.instances.iter().filter(|of| of.readiness == Readiness::Ready) {
                let held: u32 = instance.holds.iter().map(|held| held.blocks).sum();
                let taken = held + given.get(&instance.id).copied().unwrap_or(0);
                let free = instance.offer.total_blocks.saturating_sub(taken);
                let fits = smallest_fit(&instance.offer, &run.nodes[0].needs).is_ok_and(|blocks| blocks <= free);
                prop_assert!(!fits || reserved.contains(&instance.id), "{} is left free", instance.name);
            }
        }
    }
}

/// Simulates rounds of one minute: small jobs arrive faster than they end, and one that needs everything waits among
/// them. Returns the round in which it started.
fn rounds_until_the_big_one_starts(big: WaitingReplica, seed: u64) -> Option<i64> {
    const LONGEST: i64 = 10;
    const LIMIT: i64 = 60;
    let f = FleetSnapshot { is_cluster: true, ..fleet(1, "f") };
    let mut instances: Vec<_> = (1..=3).map(|n| instance(n, &f, offer(host(8, 0), 4, 0.0))).collect();
    let mut ends: BTreeMap<SubmissionId, i64> = BTreeMap::new();
    let mut queue = vec![big.clone()];
    let mut random = seed | 1;
    let mut next = 10;
    for round in 0..LIMIT {
        let now = Timestamp::from_secs(round * 60);
        for instance in &mut instances {
            instance.holds.retain(|held| ends[&held.job] > round);
        }
        // The first of them fill everything before the big one is submitted.
        for _ in 0..if round == 0 { 12 } else { 6 } {
            next += 1;
            queue.push(waiting(next, round * 60 + 1, vec![needs(2, 0)]));
        }
        let inventory = Inventory {
            fleets: vec![f.clone()],
            instances: instances.clone(),
            offers: Vec::new(),
            ..Inventory::default()
        };
        for placement in place_replicas(&queue, &inventory, now) {
            let PlacementOutcome::Placed { seats, .. } = placement.outcome else { continue };
            if placement.run == big.run {
                return Some(round);
            }
            queue.retain(|run| run.run != placement.run);
            for seat in seats {
                let NodePlacement::Existing { job, instance, blocks } = seat else {
                    unreachable!("the fleet creates none")
                };
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ends.insert(job, round + 1 + (random >> 33) as i64 % LONGEST);
                let at = instances.iter_mut().find(|of| of.id == instance).unwrap();
                at.holds.push(held(job.0.as_u128(), blocks, None));
            }
        }
    }
    None
}

#[test]
fn a_large_job_is_not_starved_by_a_stream_of_small_jobs() {
    for seed in 0..20 {
        let whole = waiting(1, 120, vec![needs(8, 0)]);
        let gang = waiting(1, 120, vec![needs(8, 0), needs(8, 0), needs(8, 0)]);
        for big in [whole, gang] {
            let bound = 2 + RESERVE_AFTER.as_secs() / 60 + 10 + 2;
            let started = rounds_until_the_big_one_starts(big, seed);
            assert!(started.is_some_and(|round| round <= bound), "seed {seed}: started {started:?}");
        }
    }
}

#[test]
fn a_follower_replica_waits_until_the_fleet_is_chosen_even_if_older() {
    let f = fleet(1, "f");
    let only = instance(1, &f, offer(host(8, 0), 1, 0.0));
    let follower = WaitingReplica { fleet_choice: FleetChoice::Follow, ..waiting(1, 0, vec![needs(1, 0)]) };
    let inventory =
        Inventory { fleets: vec![f], instances: vec![only], offers: Vec::new(), ..Inventory::default() };
    let placements = place_replicas(&[follower], &inventory, NOW);
    assert!(matches!(placements[0].outcome, PlacementOutcome::Waits { .. }), "{placements:?}");
    assert_eq!(uuid(1), placements[0].run.0);
}
