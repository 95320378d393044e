//! Placement, case by case.

use std::{collections::BTreeSet, sync::Arc};

use uuid::Uuid;
use windlass_model::{
    config::run::RunClass,
    explain::{Shortfall, refusal_summary},
    id::{FleetId, InstanceId, ProjectId, RunId, SubmissionId, UserId},
    money::Price,
    plan::{
        blocks::Blocks,
        budget::{Budget, BudgetPeriod, BudgetUnit},
        offers::{Availability, Gpu, HostSpec, InstanceNeeds, Offer},
        place::{
            BlockHold, FleetChoice, FleetSnapshot, InstanceCreation, InstanceSnapshot, Inventory,
            NodePlacement, PlacementOutcome, RESERVE_AFTER, Readiness, ReplicaPlacement, WaitingNode,
            WaitingReplica, place_replicas,
        },
        preemption::BlockPromise,
        quota::{Quota, QuotaResource},
    },
    resources::{CpuSpec, GpuSpec, GpuVendor, Range, ResourcesSpec},
    time::{Span, Timestamp},
};

pub(super) fn uuid(n: u128) -> Uuid {
    Uuid::from_u128(n)
}

pub(super) fn host(cpus: u32, gpus: usize) -> HostSpec {
    let gpu = Gpu {
        vendor: GpuVendor::Nvidia,
        name: "H100".into(),
        memory_mib: 80 * 1024,
        compute_capability: None,
    };
    HostSpec {
        cpus,
        arch: None,
        memory_mib: u64::from(cpus) * 4 * 1024,
        disk_mib: 0,
        gpus: vec![gpu; gpus],
        spot: false,
        runtimes: None,
    }
}

pub(super) fn offer(host: HostSpec, total_blocks: u32, dollars: f64) -> Offer {
    Offer {
        backend: "ssh".into(),
        region: "here".into(),
        zones: Vec::new(),
        instance_type: format!("c{}g{}", host.cpus, host.gpus.len()),
        price: Price::from_dollars(dollars),
        availability: Availability::Available,
        reservation: None,
        host,
        total_blocks,
    }
}

pub(super) fn needs(cpus: u32, gpus: u32) -> InstanceNeeds {
    let gpu = (gpus > 0).then(|| GpuSpec {
        vendor: None,
        name: None,
        count: Range::at_least(gpus),
        memory: None,
        total_memory: None,
        compute_capability: None,
    });
    let cpu = CpuSpec { arch: None, count: Range::at_least(cpus) };
    let resources =
        ResourcesSpec { cpu, memory: Range::at_least(0.0), gpu, disk: None, ..ResourcesSpec::default() };
    InstanceNeeds { resources: Some(resources), ..InstanceNeeds::default() }
}

pub(super) fn fleet(n: u128, name: &str) -> FleetSnapshot {
    FleetSnapshot {
        id: FleetId(uuid(n)),
        name: name.into(),
        is_cluster: false,
        can_create: false,
        nodes_min: 0,
        nodes_max: None,
        instance_nums: BTreeSet::new(),
        limits: InstanceNeeds::default(),
        blocks: Blocks::Count(1),
        preemption: None,
    }
}

pub(super) fn instance(n: u128, fleet: &FleetSnapshot, offer: Offer) -> InstanceSnapshot {
    InstanceSnapshot {
        id: InstanceId(uuid(n)),
        fleet: fleet.id,
        name: format!("{}-{n}", fleet.name),
        instance_num: u32::try_from(n).unwrap(),
        hostname: None,
        offer,
        readiness: Readiness::Ready,
        holds: Vec::new(),
        is_kept: true,
    }
}

pub(super) fn held(n: u128, blocks: u32, until: Option<i64>) -> BlockHold {
    BlockHold {
        job: SubmissionId(uuid(n)),
        blocks,
        until: until.map(Timestamp::from_secs),
        is_preempted: false,
    }
}

/// Returns a run of one replica, named by its number, waiting since that second.
pub(super) fn waiting(n: u128, since: i64, nodes: Vec<InstanceNeeds>) -> WaitingReplica {
    let node = |(at, needs): (usize, InstanceNeeds)| WaitingNode {
        job: SubmissionId(uuid(n * 1000 + at as u128)),
        needs: Arc::new(needs),
    };
    WaitingReplica {
        user: UserId(uuid(1)),
        project: ProjectId(uuid(1)),
        run: RunId(uuid(n)),
        replica_num: 0,
        class: RunClass::Normal,
        priority: 0,
        since: Timestamp::from_secs(since),
        nodes: nodes.into_iter().enumerate().map(node).collect(),
        fleet_choice: FleetChoice::Choose,
        usable_fleets: None,
        fleets: None,
        missing_fleets: Vec::new(),
        creation: InstanceCreation::ReuseOrCreate,
        max_duration: None,
        resubmitted_at: None,
    }
}

pub(super) const NOW: Timestamp = Timestamp::from_secs(1_000_000);

fn seat_words(seat: &NodePlacement) -> String {
    match seat {
        NodePlacement::Existing { instance, blocks, .. } => format!("i{}x{blocks}", instance.0.as_u128()),
        NodePlacement::New { instance_num, offers, .. } => {
            let offers: Vec<_> = offers.iter().map(|new| format!("o{}x{}", new.offer, new.blocks)).collect();
            format!("new{instance_num}({})", offers.join(" "))
        }
    }
}

pub(super) fn words(placement: &ReplicaPlacement) -> String {
    let run = placement.run.0.as_u128();
    match &placement.outcome {
        PlacementOutcome::Placed { fleet, seats } => {
            let seats: Vec<_> = seats.iter().map(seat_words).collect();
            format!("{run}: f{} {}", fleet.0.as_u128(), seats.join(" "))
        }
        PlacementOutcome::Waits { why, reserved } if reserved.is_empty() => {
            format!("{run}: waits, {}", refusal_summary(&why.refusals).unwrap())
        }
        PlacementOutcome::Waits { why, reserved } => {
            let reserved: Vec<_> = reserved.iter().map(|id| format!("i{}", id.0.as_u128())).collect();
            format!("{run}: waits for {}, {}", reserved.join(" "), refusal_summary(&why.refusals).unwrap())
        }
        PlacementOutcome::Never { why } => {
            format!("{run}: never, {}", refusal_summary(&why.refusals).unwrap())
        }
    }
}

#[track_caller]
fn check(queue: &[WaitingReplica], inventory: &Inventory, expect: &[&str]) {
    let message: Vec<_> = place_replicas(queue, inventory, NOW).iter().map(words).collect();
    assert_eq!(message, expect);
}

pub(super) fn stock(fleet: FleetSnapshot, instances: Vec<InstanceSnapshot>) -> Inventory {
    Inventory { fleets: vec![fleet], instances, offers: Vec::new(), ..Inventory::default() }
}

#[test]
fn a_job_takes_the_tightest_instance_that_fits() {
    let f = fleet(1, "f");
    let instances = vec![
        instance(1, &f, offer(host(32, 8), 1, 0.0)),
        instance(2, &f, offer(host(16, 0), 1, 0.0)),
        instance(3, &f, offer(host(4, 0), 1, 0.0)),
    ];
    let queue = [waiting(1, 0, vec![needs(8, 0)])];
    check(&queue, &stock(f, instances), &["1: f1 i2x1"]);
}

#[test]
fn a_job_takes_the_fewest_blocks_that_fit() {
    let f = fleet(1, "f");
    let mut shared = instance(1, &f, offer(host(32, 8), 8, 0.0));
    shared.holds = vec![held(9, 5, None)];
    let queue = [waiting(1, 0, vec![needs(1, 2)]), waiting(2, 999_990, vec![needs(1, 2)])];
    let first = "1: f1 i1x2";
    let second = "2: waits, f-1: needs 2 of 8 blocks, 1 free (wait until jobs on it end)";
    check(&queue, &stock(f, vec![shared]), &[first, second]);
}

#[test]
fn priority_outranks_age_in_placement() {
    let f = fleet(1, "f");
    let only = instance(1, &f, offer(host(4, 0), 1, 0.0));
    let older = waiting(1, 900_000, vec![needs(1, 0)]);
    let urgent = WaitingReplica { priority: 5, ..waiting(2, 999_990, vec![needs(1, 0)]) };
    let inventory = stock(f, vec![only]);
    check(
        &[older, urgent],
        &inventory,
        &["2: f1 i1x1", "1: waits for i1, f-1: is busy (wait until jobs on it end)"],
    );
}

#[test]
fn a_job_that_can_never_fit_lists_every_shortfall_with_its_remedy() {
    let f = fleet(1, "f");
    let inventory = stock(f.clone(), vec![instance(1, &f, offer(host(4, 0), 1, 2.5))]);
    let mut instance_needs = needs(8, 2);
    instance_needs.max_price = Some(Price::from_dollars(1.0));
    instance_needs.spot = Some(true);
    check(
        &[waiting(1, 0, vec![instance_needs])],
        &inventory,
        &["1: never, f-1: costs $2.5/h, at most $1/h is allowed (raise `max_price` to 2.5); \
         needs spot, is on-demand (set `spot_policy: auto`); needs at least 8 CPUs, has 4 (lower cpu to 4); \
         needs at least 2 GPUs, has 0 (use a fleet or backend with GPUs, or set `gpu: 0`)"],
    );
}

#[test]
fn the_local_instance_is_refused_once_though_it_is_also_an_offer() {
    let f = FleetSnapshot {
        can_create: true,
        nodes_max: Some(1),
        instance_nums: BTreeSet::from([1]),
        ..fleet(1, "f")
    };
    let local = Offer { backend: "local".into(), ..offer(host(4, 0), 1, 0.0) };
    let there = instance(1, &f, local.clone());
    let inventory =
        Inventory { fleets: vec![f], instances: vec![there], offers: vec![local], ..Inventory::default() };
    let placements = place_replicas(&[waiting(1, 0, vec![needs(8, 0)])], &inventory, NOW);
    let PlacementOutcome::Never { why } = &placements[0].outcome else { panic!("{placements:?}") };
    let message: Vec<_> = why.refusals.iter().map(ToString::to_string).collect();
    assert_eq!(message, ["f-1: needs at least 8 CPUs, has 4 (lower cpu to 4)"]);
}

#[test]
fn a_job_without_any_fleet_is_refused_for_that_reason() {
    let expect = ["1: never, fleets: no fleet exists that this run may use (create a fleet)"];
    check(&[waiting(1, 0, vec![needs(1, 0)])], &Inventory::default(), &expect);
}

#[test]
fn unreachable_unhealthy_and_draining_instances_get_no_jobs() {
    let f = fleet(1, "f");
    let mut instances = Vec::new();
    for (n, readiness) in [
        (1, Readiness::Unreachable),
        (2, Readiness::Unhealthy),
        (3, Readiness::Draining),
        (4, Readiness::Provisioning),
    ] {
        instances.push(InstanceSnapshot { readiness, ..instance(n, &f, offer(host(4, 0), 1, 0.0)) });
    }
    let placements = place_replicas(&[waiting(1, 0, vec![needs(1, 0)])], &stock(f, instances), NOW);
    let PlacementOutcome::Waits { why, .. } = &placements[0].outcome else { panic!("{placements:?}") };
    let kinds: BTreeSet<_> = why.refusals.iter().map(|refusal| refusal.shortfalls[0].kind()).collect();
    assert_eq!(kinds, BTreeSet::from(["draining", "not_ready", "unhealthy", "unreachable"]));
}

#[test]
fn idle_instances_are_preferred_to_new_ones_and_cheap_offers_to_expensive_ones() {
    let f = FleetSnapshot { can_create: true, instance_nums: BTreeSet::from([0, 1]), ..fleet(1, "f") };
    let idle = instance(1, &f, offer(host(4, 0), 1, 9.0));
    let offers = vec![offer(host(8, 0), 1, 3.0), offer(host(4, 0), 1, 1.0)];
    let inventory = Inventory { fleets: vec![f], instances: vec![idle], offers, ..Inventory::default() };
    let queue = [waiting(1, 0, vec![needs(2, 0)]), waiting(2, 1, vec![needs(2, 0)])];
    check(&queue, &inventory, &["1: f1 i1x1", "2: f1 new2(o1x1 o0x1)"]);
}

#[test]
fn r23_a_placeholder_takes_an_instance_number_and_counts_toward_the_maximum() {
    let f = FleetSnapshot {
        can_create: true,
        nodes_max: Some(3),
        instance_nums: BTreeSet::from([1]),
        ..fleet(1, "f")
    };
    let inventory = Inventory {
        fleets: vec![f],
        instances: Vec::new(),
        offers: vec![offer(host(4, 0), 1, 1.0)],
        ..Inventory::default()
    };
    let queue: Vec<_> = (1..=3).map(|n| waiting(n, n as i64, vec![needs(2, 0)])).collect();
    check(
        &queue,
        &inventory,
        &[
            "1: f1 new0(o0x1)",
            "2: f1 new2(o0x1)",
            "3: waits, ssh here c4g0 in fleet f: the fleet is limited to 3 instances, and 1 more would exceed that \
         (raise `nodes.max` of the fleet, or wait until an instance ends)",
        ],
    );
}

/// Returns the outcome for a full fleet of one instance that does not fit: the job waits only if that instance will be
/// terminated.
fn behind_a_misfit(nodes_min: u32, stays: bool, readiness: Readiness) -> String {
    let f = FleetSnapshot {
        can_create: true,
        nodes_min,
        nodes_max: Some(1),
        instance_nums: BTreeSet::from([1]),
        ..fleet(1, "f")
    };
    let misfit = InstanceSnapshot { is_kept: stays, readiness, ..instance(1, &f, offer(host(2, 0), 1, 0.0)) };
    let inventory = Inventory {
        fleets: vec![f],
        instances: vec![misfit],
        offers: vec![offer(host(8, 0), 1, 1.0)],
        ..Inventory::default()
    };
    let placements = place_replicas(&[waiting(1, 0, vec![needs(8, 0)])], &inventory, NOW);
    match &placements[0].outcome {
        PlacementOutcome::Waits { .. } => "waits".to_owned(),
        PlacementOutcome::Never { why } => refusal_summary(&why.refusals).unwrap(),
        PlacementOutcome::Placed { .. } => "placed".to_owned(),
    }
}

#[test]
fn r2_a_job_waits_for_a_full_fleet_only_if_room_may_become_free() {
    for (nodes_min, stays, readiness, waits) in [
        (0, false, Readiness::Ready, true),
        (0, true, Readiness::Ready, false),
        (1, false, Readiness::Ready, false),
        (1, true, Readiness::Draining, true),
        (1, true, Readiness::Unreachable, true),
        (1, false, Readiness::Provisioning, true),
    ] {
        let message = behind_a_misfit(nodes_min, stays, readiness);
        assert_eq!(message == "waits", waits, "{nodes_min} {stays} {readiness:?}: {message}");
        assert!(waits || message.contains("delete one of its instances"), "{message}");
    }
}

#[test]
fn r2_a_multi_node_job_waits_for_a_full_fleet_only_if_room_may_become_free() {
    for (stays, waits) in [(false, true), (true, false)] {
        let f = FleetSnapshot {
            is_cluster: true,
            can_create: true,
            nodes_max: Some(2),
            instance_nums: BTreeSet::from([1, 2]),
            ..fleet(1, "f")
        };
        let misfit = InstanceSnapshot { is_kept: stays, ..instance(1, &f, offer(host(2, 0), 1, 0.0)) };
        let fits = instance(2, &f, offer(host(8, 0), 1, 0.0));
        let offers = vec![offer(host(8, 0), 1, 1.0)];
        let inventory =
            Inventory { fleets: vec![f], instances: vec![misfit, fits], offers, ..Inventory::default() };
        let placements = place_replicas(&[waiting(1, 0, vec![needs(8, 0), needs(8, 0)])], &inventory, NOW);
        let outcome = &placements[0].outcome;
        assert_eq!(matches!(outcome, PlacementOutcome::Waits { .. }), waits, "{outcome:?}");
        assert_eq!(matches!(outcome, PlacementOutcome::Never { .. }), !waits, "{outcome:?}");
    }
}

#[test]
fn creation_policy_reuse_never_creates_an_instance() {
    let f = FleetSnapshot { can_create: true, ..fleet(1, "f") };
    let inventory = Inventory {
        fleets: vec![f],
        instances: Vec::new(),
        offers: vec![offer(host(4, 0), 1, 1.0)],
        ..Inventory::default()
    };
    let reuse = WaitingReplica { creation: InstanceCreation::Reuse, ..waiting(1, 0, vec![needs(2, 0)]) };
    check(
        &[reuse],
        &inventory,
        &["1: never, new instance in fleet f: would be a new instance, but only existing ones may be used \
         (set `creation_policy: reuse-or-create`)"],
    );
}

#[test]
fn a_fleets_own_limits_hold_for_new_instances() {
    let limits = InstanceNeeds { max_price: Some(Price::from_dollars(2.0)), ..InstanceNeeds::default() };
    let f = FleetSnapshot { can_create: true, limits, ..fleet(1, "f") };
    let offers = vec![offer(host(4, 0), 1, 3.0), offer(host(16, 0), 1, 1.5)];
    let inventory = Inventory { fleets: vec![f], instances: Vec::new(), offers, ..Inventory::default() };
    check(&[waiting(1, 0, vec![needs(2, 0)])], &inventory, &["1: f1 new0(o1x1)"]);
}

#[test]
fn new_instances_are_split_into_blocks_as_the_fleet_configures() {
    let f = FleetSnapshot { can_create: true, blocks: Blocks::Auto, ..fleet(1, "f") };
    let inventory = Inventory {
        fleets: vec![f],
        instances: Vec::new(),
        offers: vec![offer(host(32, 8), 1, 1.0)],
        ..Inventory::default()
    };
    let placements = place_replicas(&[waiting(1, 0, vec![needs(2, 2)])], &inventory, NOW);
    let PlacementOutcome::Placed { seats, .. } = &placements[0].outcome else { panic!("{placements:?}") };
    let NodePlacement::New { offers, .. } = &seats[0] else { panic!("{seats:?}") };
    assert_eq!((offers[0].blocks, offers[0].total_blocks), (2, 8));
}

#[test]
fn followers_take_the_fleet_that_replica_0_chose() {
    let (f, g) = (fleet(1, "f"), fleet(2, "g"));
    let instances = vec![
        instance(1, &f, offer(host(16, 0), 1, 0.0)),
        instance(2, &f, offer(host(16, 0), 1, 0.0)),
        instance(3, &g, offer(host(4, 0), 1, 0.0)),
    ];
    let first = waiting(1, 0, vec![needs(8, 0)]);
    let mut second = WaitingReplica {
        replica_num: 1,
        fleet_choice: FleetChoice::Follow,
        ..waiting(1, 0, vec![needs(1, 0)])
    };
    second.nodes[0].job = SubmissionId(uuid(77));
    let inventory = Inventory { fleets: vec![f, g], instances, offers: Vec::new(), ..Inventory::default() };
    check(&[second.clone(), first], &inventory, &["1: f1 i1x1", "1: f1 i2x1"]);
    let alone = ["1: waits, every fleet: waits until job 0 of replica 0 has chosen the fleet \
                  (wait for job 0 of replica 0)"];
    check(&[second], &inventory, &alone);
}

#[test]
fn r9_several_nodes_go_to_one_region_or_nowhere() {
    let f = FleetSnapshot { is_cluster: true, ..fleet(1, "f") };
    let there = |n| {
        let mut instance = instance(n, &f, offer(host(4, 0), 2, 0.0));
        instance.offer.region = "there".into();
        instance
    };
    let here = |n| instance(n, &f, offer(host(4, 0), 2, 0.0));
    let nodes = || vec![needs(1, 0), needs(1, 0)];
    check(
        &[waiting(1, 0, nodes())],
        &stock(f.clone(), vec![here(1), there(2), there(3)]),
        &["1: f1 i2x2 i3x2"],
    );
    check(
        &[waiting(1, 0, nodes())],
        &stock(f.clone(), vec![here(1), there(2)]),
        &[
            "1: never, fleet f, ssh here and 1 more: needs 2 whole instances in one location: 1 free now, at most 1 \
         possible (set `nodes` to at most 1, or add instances to the fleet)",
        ],
    );
}

#[test]
fn several_nodes_need_a_cluster_fleet() {
    let f = fleet(1, "f");
    let instances =
        vec![instance(1, &f, offer(host(4, 0), 1, 0.0)), instance(2, &f, offer(host(4, 0), 1, 0.0))];
    let queue = [waiting(1, 0, vec![needs(1, 0), needs(1, 0)])];
    check(
        &queue,
        &stock(f, instances),
        &["1: never, fleet f: belongs to a fleet without `placement: cluster` \
                                          (use a fleet with `placement: cluster`)"],
    );
}

#[test]
fn several_nodes_share_the_only_instance_of_a_fleet() {
    let f = FleetSnapshot { instance_nums: BTreeSet::from([0]), ..fleet(1, "f") };
    let here = |blocks, holds| InstanceSnapshot { holds, ..instance(1, &f, offer(host(8, 0), blocks, 0.0)) };
    let nodes = |cpus| [waiting(1, 0, vec![needs(cpus, 0), needs(1, 0)])];
    check(&nodes(1), &stock(f.clone(), vec![here(8, vec![])]), &["1: f1 i1x4 i1x4"]);
    check(&nodes(6), &stock(f.clone(), vec![here(8, vec![])]), &["1: f1 i1x7 i1x1"]);
    let busy = vec![held(9, 1, None)];
    let wait = "1: waits for i1, fleet f, ssh here: needs 2 whole instances in one location: 0 free now, at most 2 possible \
                (wait until jobs on the others end); and 1 other place does not fit";
    check(&nodes(1), &stock(f.clone(), vec![here(8, busy)]), &[wait]);
    let whole = stock(f.clone(), vec![here(1, vec![])]);
    check(
        &nodes(1),
        &whole,
        &[
            "1: never, fleet f, ssh here: needs 2 whole instances in one location: 1 free now, at most 1 possible \
           (set `nodes` to at most 1, or add instances to the fleet)",
        ],
    );
    // A fleet that may have more instances keeps nodes apart.
    let more = FleetSnapshot { can_create: true, nodes_max: Some(2), ..f.clone() };
    let apart = place_replicas(&nodes(1), &stock(more, vec![here(8, vec![])]), NOW);
    assert!(!matches!(apart[0].outcome, PlacementOutcome::Placed { .. }), "{apart:?}");
}

#[test]
fn several_nodes_wait_for_the_only_instance_only_if_the_fleet_creates_it() {
    let blocks = Blocks::Count(8);
    let none = FleetSnapshot { can_create: true, nodes_max: Some(1), blocks, ..fleet(1, "f") };
    let nodes = [waiting(1, 0, vec![needs(1, 0), needs(1, 0)])];
    let outcome = |f: &FleetSnapshot| {
        let offers = vec![offer(host(8, 0), 8, 0.0)];
        let inventory =
            Inventory { fleets: vec![f.clone()], instances: Vec::new(), offers, ..Inventory::default() };
        place_replicas(&nodes, &inventory, NOW).remove(0).outcome
    };
    assert!(matches!(outcome(&none), PlacementOutcome::Never { .. }), "{:?}", outcome(&none));
    let one = FleetSnapshot { nodes_min: 1, ..none };
    assert!(matches!(outcome(&one), PlacementOutcome::Waits { .. }), "{:?}", outcome(&one));
}

#[test]
fn several_nodes_do_not_wait_for_the_only_instance_if_they_may_not_use_it() {
    let f = FleetSnapshot { instance_nums: BTreeSet::from([0]), ..fleet(1, "f") };
    let here = instance(1, &f, offer(host(8, 0), 8, 0.0));
    let avoiding = InstanceNeeds { avoid_instances: vec![here.id], ..needs(1, 0) };
    let nodes = [waiting(1, 0, vec![avoiding.clone(), avoiding])];
    let placed = place_replicas(&nodes, &stock(f, vec![here]), NOW);
    assert!(matches!(placed[0].outcome, PlacementOutcome::Never { .. }), "{placed:?}");
}

#[test]
fn several_nodes_that_may_share_the_only_instance_do_not_wait_for_a_quota_that_they_can_never_meet() {
    let f = FleetSnapshot { instance_nums: BTreeSet::from([0]), ..fleet(1, "f") };
    let nodes = [waiting(1, 0, vec![needs(1, 0), needs(1, 0)])];
    let outcome = |max| {
        let cpus = Quota {
            project: ProjectId(uuid(1)),
            member: None,
            resource: QuotaResource::Cpus,
            max: Some(max),
            share: None,
            used: 0,
            first_end: None,
        };
        let here = instance(1, &f, offer(host(8, 0), 8, 0.0));
        let inventory = Inventory { quotas: vec![cpus], ..stock(f.clone(), vec![here]) };
        place_replicas(&nodes, &inventory, NOW).remove(0).outcome
    };
    // Together they hold all of the instance.
    assert!(matches!(outcome(7), PlacementOutcome::Never { .. }), "{:?}", outcome(7));
    assert!(matches!(outcome(8), PlacementOutcome::Placed { .. }), "{:?}", outcome(8));
}

#[test]
fn a_job_over_a_quota_waits_and_leaves_the_instance_to_others() {
    let f = fleet(1, "f");
    let here = |n, held| InstanceSnapshot { holds: held, ..instance(n, &f, offer(host(8, 0), 4, 0.0)) };
    let other = WaitingReplica { project: ProjectId(uuid(2)), ..waiting(3, 900_002, vec![needs(2, 0)]) };
    let queue = [waiting(1, 900_000, vec![needs(2, 0)]), waiting(2, 900_001, vec![needs(2, 0)]), other];
    let cpus = |max, used| Quota {
        project: ProjectId(uuid(1)),
        member: None,
        resource: QuotaResource::Cpus,
        max: Some(max),
        share: None,
        used,
        first_end: None,
    };
    let stock = |quotas| Inventory { quotas, ..stock(f.clone(), vec![here(1, vec![])]) };
    let waits = "2: waits, quota: needs 2 of `cpu`, of which the project holds 6 and may hold 6; none of its jobs has a time limit \
                 (wait until others of your jobs end; `windlass quota` shows the quotas)";
    check(&queue, &stock(vec![cpus(6, 4)]), &["1: f1 i1x1", "3: f1 i1x1", waits]);
    check(&queue, &stock(vec![cpus(8, 4)]), &["1: f1 i1x1", "3: f1 i1x1", "2: f1 i1x1"]);
    let never = "1: never, quota: needs 2 of `cpu`, of which the project holds 0 and may hold 1 (request less, or have an \
                 admin raise it with `windlass quota set`)";
    check(&queue[..1], &stock(vec![cpus(1, 0)]), &[never]);
}

#[test]
fn a_job_reserves_no_instance_that_its_quota_does_not_admit() {
    let f = FleetSnapshot { is_cluster: true, ..fleet(1, "f") };
    // Another project holds three of four blocks.
    let here = |n| InstanceSnapshot {
        holds: vec![held(9, 3, Some(1_000_100))],
        ..instance(n, &f, offer(host(8, 0), 4, 0.0))
    };
    let old = |nodes| WaitingReplica { since: NOW - RESERVE_AFTER, ..waiting(1, 0, nodes) };
    let other = WaitingReplica { project: ProjectId(uuid(2)), ..waiting(3, 999_999, vec![needs(2, 0)]) };
    let cpus = |used| Quota {
        project: ProjectId(uuid(1)),
        member: None,
        resource: QuotaResource::Cpus,
        max: Some(16),
        share: None,
        used,
        first_end: Some(Timestamp::from_secs(1_000_060)),
    };
    let words_of = |first: WaitingReplica, used| {
        let inventory = Inventory { quotas: vec![cpus(used)], ..stock(f.clone(), vec![here(1), here(2)]) };
        let placed = place_replicas(&[first, other.clone()], &inventory, NOW);
        placed.iter().map(words).collect::<Vec<_>>()
    };
    let single = words_of(old(vec![needs(4, 0)]), 16);
    assert_eq!(
        single[0],
        "1: waits, quota: needs 4 of `cpu`, of which the project holds 16 and may hold 16; the first of its jobs ends by \
         1970-01-12T13:47:40Z (wait until others of your jobs end; `windlass quota` shows the quotas); and 2 other places \
         do not fit"
    );
    assert_eq!(single[1], "3: f1 i1x1");
    let gang = words_of(old(vec![needs(1, 0), needs(1, 0)]), 8);
    assert!(
        gang[0].starts_with("1: waits, quota: needs 16 of `cpu`, of which the project holds 8"),
        "{gang:?}"
    );
    assert_eq!(gang[1], "3: f1 i1x1");
    // Within the quota it reserves, as before.
    let within = words_of(old(vec![needs(4, 0)]), 12);
    assert!(within[0].starts_with("1: waits for i1, "), "{within:?}");
    assert_eq!(within[1], "3: f1 i2x1");
}

#[test]
fn a_job_reserves_no_instance_of_a_fleet_that_its_project_may_not_use() {
    let (own, foreign) = (fleet(1, "own"), fleet(2, "foreign"));
    let here = |n, f: &FleetSnapshot, until| InstanceSnapshot {
        holds: vec![held(n, 3, Some(until))],
        ..instance(n, f, offer(host(8, 0), 4, 0.0))
    };
    let instances = vec![here(1, &own, 1_000_900), here(2, &foreign, 1_000_100)];
    let inventory = Inventory { fleets: vec![own.clone(), foreign], instances, ..Inventory::default() };
    let old = WaitingReplica {
        since: NOW - RESERVE_AFTER,
        usable_fleets: Some(Arc::new(BTreeSet::from([own.id]))),
        ..waiting(1, 0, vec![needs(4, 0)])
    };
    let other = WaitingReplica { project: ProjectId(uuid(2)), ..waiting(3, 999_999, vec![needs(2, 0)]) };
    let placed = place_replicas(&[old, other], &inventory, NOW);
    let PlacementOutcome::Waits { reserved, .. } = &placed[0].outcome else { panic!("{placed:?}") };
    assert_eq!(reserved, &[InstanceId(uuid(1))]);
    assert_eq!(words(&placed[1]), "3: f2 i2x1");
}

#[test]
fn blocks_are_not_kept_for_a_job_that_may_not_start_there() {
    let f = fleet(1, "f");
    let here =
        || InstanceSnapshot { holds: vec![held(9, 1, None)], ..instance(1, &f, offer(host(8, 0), 4, 0.0)) };
    let first = waiting(1, 0, vec![needs(8, 0)]);
    let promise =
        BlockPromise { job: first.nodes[0].job, project: first.project, instance: here().id, blocks: 4 };
    let other = WaitingReplica { project: ProjectId(uuid(2)), ..waiting(3, 1, vec![needs(2, 0)]) };
    let inventory = Inventory { promises: vec![promise], ..stock(f.clone(), vec![here()]) };
    let second = |first: &WaitingReplica, inventory: &Inventory| {
        let placed = place_replicas(&[first.clone(), other.clone()], inventory, NOW);
        words(placed.iter().find(|one| one.run == other.run).unwrap())
    };
    assert!(second(&first, &inventory).starts_with("3: waits"), "{}", second(&first, &inventory));
    let spent = Budget {
        project: first.project,
        member: None,
        unit: BudgetUnit::Cost,
        period: BudgetPeriod::Day,
        warn: None,
        cap: Some(1),
        spent: 1,
        ends_at: NOW + Span::mins(60),
    };
    let over_budget = Inventory { budgets: vec![spent], ..inventory.clone() };
    assert_eq!(second(&first, &over_budget), "3: f1 i1x1");
    let no_longer_shared = WaitingReplica { usable_fleets: Some(Arc::default()), ..first.clone() };
    assert_eq!(second(&no_longer_shared, &inventory), "3: f1 i1x1");
}

#[test]
fn a_job_with_a_quota_requests_instances_with_gpus_of_one_name() {
    let f = FleetSnapshot { can_create: true, blocks: Blocks::Count(1), ..fleet(1, "f") };
    let mut other = host(8, 1);
    other.gpus[0].name = "A100".into();
    let offers = vec![offer(host(8, 1), 1, 2.0), offer(other, 1, 3.0), offer(host(16, 1), 1, 4.0)];
    let quota = Quota {
        project: ProjectId(uuid(1)),
        member: None,
        resource: QuotaResource::GpusNamed("a100".to_owned()),
        max: Some(1),
        share: None,
        used: 0,
        first_end: None,
    };
    let queue = [waiting(1, 0, vec![needs(1, 1)])];
    let inventory = |quotas| Inventory { quotas, offers: offers.clone(), ..stock(f.clone(), vec![]) };
    check(&queue, &inventory(vec![]), &["1: f1 new0(o0x1 o1x1 o2x1)"]);
    check(&queue, &inventory(vec![quota]), &["1: f1 new0(o0x1 o2x1)"]);
}

#[test]
fn nodes_of_a_gang_count_together_for_a_quota() {
    let f = FleetSnapshot { is_cluster: true, ..fleet(1, "f") };
    let instances = (1..=2).map(|n| instance(n, &f, offer(host(8, 2), 1, 0.0))).collect();
    let gpus = |max| Quota {
        project: ProjectId(uuid(1)),
        member: Some(UserId(uuid(1))),
        resource: QuotaResource::Gpus,
        max: Some(max),
        share: None,
        used: 0,
        first_end: None,
    };
    let queue = [waiting(1, 0, vec![needs(1, 1), needs(1, 1)])];
    let inventory = |max| Inventory { quotas: vec![gpus(max)], ..stock(f.clone(), Vec::clone(&instances)) };
    check(&queue, &inventory(4), &["1: f1 i1x1 i2x1"]);
    let outcome = place_replicas(&queue, &inventory(3), NOW).remove(0).outcome;
    assert!(matches!(outcome, PlacementOutcome::Never { .. }), "{outcome:?}");
}

#[test]
fn idle_and_new_instances_make_up_a_gang_together() {
    let f = FleetSnapshot {
        is_cluster: true,
        can_create: true,
        nodes_max: Some(3),
        instance_nums: BTreeSet::from([0]),
        ..fleet(1, "f")
    };
    let idle = instance(1, &f, offer(host(4, 0), 1, 0.0));
    let mut elsewhere = offer(host(4, 0), 1, 0.5);
    elsewhere.region = "there".into();
    let offers = vec![elsewhere, offer(host(4, 0), 1, 1.0)];
    let inventory = Inventory { fleets: vec![f], instances: vec![idle], offers, ..Inventory::default() };
    let nodes = vec![needs(1, 0), needs(1, 0), needs(1, 0)];
    check(&[waiting(1, 0, nodes)], &inventory, &["1: f1 i1x1 new1(o1x1) new2(o1x1)"]);
}

#[test]
fn nodes_of_different_sizes_each_get_an_instance_that_fits() {
    let f = FleetSnapshot { is_cluster: true, ..fleet(1, "f") };
    let instances = vec![
        instance(1, &f, offer(host(32, 0), 1, 0.0)),
        instance(2, &f, offer(host(4, 0), 1, 0.0)),
        instance(3, &f, offer(host(32, 0), 1, 0.0)),
    ];
    let nodes = vec![needs(2, 0), needs(16, 0), needs(16, 0)];
    check(&[waiting(1, 0, nodes)], &stock(f, instances), &["1: f1 i2x1 i1x1 i3x1"]);
}

#[test]
fn an_old_big_job_reserves_what_frees_soonest() {
    let f = fleet(1, "f");
    let mut slow = instance(1, &f, offer(host(8, 0), 2, 0.0));
    slow.holds = vec![held(8, 1, Some(1_009_000))];
    let mut soon = instance(2, &f, offer(host(8, 0), 2, 0.0));
    soon.holds = vec![held(9, 1, Some(1_000_600))];
    let big = waiting(1, 0, vec![needs(8, 0)]);
    let small = |n| waiting(n, 999_999, vec![needs(1, 0)]);
    let short = |lasts| WaitingReplica { max_duration: Some(Span::secs(lasts)), ..small(4) };
    let inventory = stock(f, vec![slow, soon]);
    let waits = "1: waits for i2, f-1 and 1 more: needs 2 of 2 blocks, 1 free (wait until jobs on it end)";
    let busy =
        "waits, f-1: needs 1 of 2 blocks, 0 free (wait until jobs on it end); and 1 other place does not fit";
    let refused = format!("3: {busy}");
    check(&[big.clone(), small(2), small(3)], &inventory, &[waits, "2: f1 i1x1", &refused]);
    let placements = place_replicas(&[big.clone(), small(2), small(3)], &inventory, NOW);
    let PlacementOutcome::Waits { why, .. } = &placements[2].outcome else { panic!("{placements:?}") };
    let by = big.nodes[0].job;
    assert_eq!(why.refusals[1].shortfalls, [Shortfall::Reserved { by }]);
    // A job that is certain to end in time may use it meanwhile.
    check(&[big.clone(), small(2), short(600)], &inventory, &[waits, "2: f1 i1x1", "4: f1 i2x1"]);
    check(&[big, small(2), short(601)], &inventory, &[waits, "2: f1 i1x1", &refused.replace("3: ", "4: ")]);
}

#[test]
fn a_young_job_reserves_nothing() {
    let f = fleet(1, "f");
    let mut shared = instance(1, &f, offer(host(8, 0), 2, 0.0));
    shared.holds = vec![held(9, 1, None)];
    let since = NOW - RESERVE_AFTER + Span::secs(1);
    let big = waiting(1, since.0 / 1_000_000, vec![needs(8, 0)]);
    let small = waiting(2, 999_999, vec![needs(1, 0)]);
    check(
        &[big, small],
        &stock(f, vec![shared]),
        &["1: waits, f-1: needs 2 of 2 blocks, 1 free (wait until jobs on it end)", "2: f1 i1x1"],
    );
}

#[test]
fn a_job_waits_for_a_provisioning_host_of_unknown_size() {
    let f = fleet(1, "f");
    let unknown =
        InstanceSnapshot { readiness: Readiness::Provisioning, ..instance(1, &f, offer(host(0, 0), 1, 0.0)) };
    check(
        &[waiting(1, 999_999, vec![needs(8, 2)])],
        &stock(f, vec![unknown]),
        &["1: waits, f-1: is still being provisioned (wait until it is ready)"],
    );
}
