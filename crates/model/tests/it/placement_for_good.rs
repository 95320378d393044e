//! Jobs that fit nowhere: whether they could ever fit.

use windlass_model::{
    explain::Shortfall,
    id::FleetId,
    plan::{
        offers::{InstanceNeeds, Offer},
        place::{FleetSnapshot, Inventory, PlacementOutcome, Readiness, WaitingReplica, place_replicas},
    },
};

use crate::placement::{NOW, fleet, host, instance, needs, offer, waiting};

/// Returns whether placement reports that nothing can ever fit a job with this number of CPUs.
#[track_caller]
fn is_for_good(cpus: u32, inventory: &Inventory) -> bool {
    let placed = place_replicas(&[waiting(1, 0, vec![needs(cpus, 0)])], inventory, NOW).pop().unwrap();
    match placed.outcome {
        PlacementOutcome::Placed { .. } => panic!("it fits"),
        PlacementOutcome::Waits { why, .. } => {
            assert!(!why.for_good, "what passes is not for good");
            false
        }
        PlacementOutcome::Never { why } => why.for_good,
    }
}

fn local() -> Inventory {
    let limits = InstanceNeeds { backends: Some(vec!["local".to_owned()]), ..InstanceNeeds::default() };
    let fleet = FleetSnapshot {
        can_create: true,
        nodes_max: Some(1),
        instance_nums: [1].into(),
        limits,
        ..fleet(1, "local")
    };
    let local = Offer { backend: "local".to_owned(), ..offer(host(2, 0), 1, 0.0) };
    Inventory {
        instances: vec![instance(1, &fleet, local.clone())],
        fleets: vec![fleet],
        offers: vec![local],
        ..Inventory::default()
    }
}

#[test]
fn a_request_larger_than_every_existing_host_is_refused_permanently() {
    assert!(is_for_good(64, &local()));
    let ssh = fleet(1, "hosts");
    let hosts = Inventory {
        instances: vec![instance(1, &ssh, offer(host(2, 0), 1, 0.0))],
        fleets: vec![ssh],
        offers: Vec::new(),
        ..Inventory::default()
    };
    assert!(is_for_good(64, &hosts), "a fleet of hosts makes none");
}

#[test]
fn a_refusal_is_not_permanent_if_the_fleet_may_grow_or_a_host_is_unknown() {
    let mut rents = local();
    rents.fleets.push(FleetSnapshot { can_create: true, ..fleet(2, "cloud") });
    assert!(!is_for_good(64, &rents), "a cloud may offer more tomorrow");
    let mut unknown = local();
    let mut new = instance(2, &unknown.fleets[0], offer(host(0, 0), 1, 0.0));
    new.readiness = Readiness::Provisioning;
    unknown.instances.push(new);
    assert!(!is_for_good(64, &unknown));
    assert!(!is_for_good(1, &Inventory { fleets: vec![fleet(1, "empty")], ..Inventory::default() }));
}

#[test]
fn unmet_requirements_are_permanent_and_missing_availability_is_not() {
    assert!(Shortfall::FleetNotNamed.is_permanent() && Shortfall::Spot { wanted: true }.is_permanent());
    let pass = [Shortfall::Unreachable, Shortfall::NotReady, Shortfall::FleetEmpty, Shortfall::NoOffers];
    assert!(pass.iter().all(|short| !short.is_permanent()));
}

#[test]
fn offers_refused_for_the_same_reason_are_reported_once() {
    let fleet = FleetSnapshot { can_create: true, ..fleet(1, "cloud") };
    let (cheap, dear) = (offer(host(2, 0), 1, 1.0), offer(host(2, 0), 1, 2.0));
    let inventory = Inventory { fleets: vec![fleet], offers: vec![cheap, dear], ..Inventory::default() };
    let placed = place_replicas(&[waiting(1, 0, vec![needs(64, 0)])], &inventory, NOW).pop().unwrap();
    let PlacementOutcome::Never { why } = &placed.outcome else { panic!("{placed:?}") };
    let reported: Vec<String> = why.refusals.iter().map(ToString::to_string).collect();
    assert_eq!(
        reported,
        ["ssh here c2g0 in fleet cloud and 1 more: needs at least 64 CPUs, has 2 (lower cpu to 2)"]
    );
}

#[test]
fn offer_location_omits_repeated_parts() {
    let local =
        Offer { region: "local".to_owned(), instance_type: "local".to_owned(), ..local().offers.remove(0) };
    assert_eq!(local.location_name(), "local");
    assert_eq!(offer(host(8, 1), 1, 1.0).location_name(), "ssh here c8g1");
}

#[test]
fn a_fleet_that_does_not_exist_is_the_first_reason_and_others_are_suggested() {
    let inventory = Inventory { fleets: vec![fleet(1, "gpu"), fleet(2, "local")], ..Inventory::default() };
    let named = |fleets: Vec<FleetId>| WaitingReplica {
        fleets: Some(fleets),
        missing_fleets: vec!["nope".to_owned()],
        ..waiting(1, 0, vec![needs(1, 0)])
    };
    let report =
        |replica: WaitingReplica| match place_replicas(&[replica], &inventory, NOW).pop().unwrap().outcome {
            PlacementOutcome::Never { why } => {
                why.refusals.iter().map(ToString::to_string).collect::<Vec<_>>()
            }
            other @ (PlacementOutcome::Placed { .. } | PlacementOutcome::Waits { .. }) => panic!("{other:?}"),
        };
    let missing =
        "fleet nope: does not exist, or the project may not use it (create it, or use one of `gpu`, `local`)";
    assert_eq!(report(named(vec![]))[0], missing);
    let of_two = report(named(vec![inventory.fleets[0].id]));
    assert!(of_two.contains(&missing.to_owned()), "the existing one has its own reason: {of_two:?}");
    assert!(of_two.iter().any(|reason| reason.starts_with("fleet gpu: ")), "{of_two:?}");
}
