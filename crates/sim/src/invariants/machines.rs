//! Invariants of machines, fleets and volumes: no excess, no duplicates, no leftovers.

use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;

use super::{History, Violation, violation};
use crate::cloud::MachineEvent;

/// Reasons for which an instance with jobs may end: it is lost anyway.
const LOST_REASONS: [&str; 4] = ["unreachable", "error", "provisioning_timeout", "no_offers"];

pub(super) fn check_always(h: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    found.extend(g4_volumes_are_with_one_machine_and_never_torn_away(h));
    found.extend(g4_a_final_job_has_no_volume(h));
    found.extend(g5_a_fleet_stays_below_its_maximum(h));
    found.extend(g7_a_terminated_instance_has_no_machine(h));
    found.extend(g7_an_instance_has_one_machine(h));
    found.extend(g7_no_machine_is_given_back_under_a_job(h));
    found
}

/// Compares the observations of the cloud with the rows.
fn g4_volumes_are_with_one_machine_and_never_torn_away(h: &History) -> Vec<Violation> {
    let mut found: Vec<Violation> = h.outrages.iter().map(|what| violation("G4", what.as_str())).collect();
    for (volume, machines) in &h.disks {
        if machines.len() > 1 {
            found.push(violation("G4", format!("volume {volume} is attached to {}", machines.join(" and "))));
        }
    }
    let mut seen = BTreeSet::new();
    for (volume, instance) in &h.attachments {
        if !seen.insert(volume) {
            found.push(violation("G4", format!("volume {volume} has a second attachment, to {instance}")));
        }
    }
    for volume in h.volumes.iter().filter(|volume| volume.deleted) {
        if seen.contains(&volume.id) {
            found.push(violation("G4", format!("volume {} was deleted while it was attached", volume.id)));
        }
    }
    found
}

fn g4_a_final_job_has_no_volume(h: &History) -> Vec<Violation> {
    h.holders
        .iter()
        .map(|job| violation("G4", format!("job {job} is final, but still has a volume")))
        .collect()
}

fn g5_a_fleet_stays_below_its_maximum(h: &History) -> Vec<Violation> {
    let mut members: BTreeMap<Uuid, i64> = BTreeMap::new();
    for instance in h.instances.iter().filter(|instance| !instance.finished) {
        if let Some(fleet) = instance.fleet_id {
            *members.entry(fleet).or_default() += 1;
        }
    }
    let over = |fleet: &&super::FleetRow| {
        fleet.nodes_max_ever.is_some_and(|max| members.get(&fleet.id).is_some_and(|count| *count > max))
    };
    let fleets = h.fleets.iter().filter(over);
    fleets
        .map(|fleet| {
            let count = members.get(&fleet.id).copied().unwrap_or_default();
            violation(
                "G5",
                format!(
                    "fleet {} has {count} instances; the maximum is {:?}",
                    fleet.id, fleet.nodes_max_ever
                ),
            )
        })
        .collect()
}

fn g7_a_terminated_instance_has_no_machine(h: &History) -> Vec<Violation> {
    let over: BTreeSet<Uuid> = h.instances.iter().filter(|i| i.finished).map(|i| i.id).collect();
    let known: BTreeSet<Uuid> = h.instances.iter().map(|i| i.id).collect();
    h.machines
        .iter()
        .filter(|(instance, _)| over.contains(&instance.0) || !known.contains(&instance.0))
        .map(|(instance, machine)| {
            violation(
                "G7",
                format!("machine {machine} exists, but its instance {instance} has ended or is unknown"),
            )
        })
        .collect()
}

fn g7_an_instance_has_one_machine(h: &History) -> Vec<Violation> {
    let mut there: BTreeMap<Uuid, BTreeSet<&str>> = BTreeMap::new();
    let mut found = Vec::new();
    for entry in &h.machine_journal {
        let of_instance = there.entry(entry.instance.0).or_default();
        match entry.kind {
            MachineEvent::Created => {
                of_instance.insert(&entry.machine);
                if of_instance.len() > 1 {
                    found.push(violation("G7", format!("instance {} has two machines", entry.instance)));
                }
            }
            MachineEvent::Gone => {
                of_instance.remove(entry.machine.as_str());
            }
            MachineEvent::DeleteRequested { .. } => {}
        }
    }
    found
}

/// A usable instance is never deleted while it has a job.
fn g7_no_machine_is_given_back_under_a_job(h: &History) -> Vec<Violation> {
    let reasons: BTreeMap<Uuid, &str> =
        h.instances.iter().filter_map(|i| Some((i.id, i.reason.as_deref()?))).collect();
    h.machine_journal
        .iter()
        .filter(|entry| match entry.kind {
            MachineEvent::DeleteRequested { running } => running > 0,
            MachineEvent::Created | MachineEvent::Gone => false,
        })
        .filter(|entry| !reasons.get(&entry.instance.0).is_some_and(|reason| LOST_REASONS.contains(reason)))
        .map(|entry| {
            let reason = reasons.get(&entry.instance.0).copied().unwrap_or("no reason");
            let id = entry.instance;
            violation(
                "G7",
                format!("instance {id} was deleted ({reason}) while containers were running on it"),
            )
        })
        .collect()
}

/// Must hold after the faults have stopped and time has passed.
pub(super) fn check_after_faults(h: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    for (volume, instance) in &h.attachments {
        found.push(violation("G4", format!("volume {volume} is still attached to {instance}")));
    }
    for (volume, machines) in h.disks.iter().filter(|(_, machines)| !machines.is_empty()) {
        found.push(violation(
            "G4",
            format!("in the cloud, {volume} is still attached to {}", machines.join(", ")),
        ));
    }
    for volume in h.volumes.iter().filter(|volume| volume.delete_requested && !volume.deleted) {
        found.push(violation(
            "G6",
            format!("volume {} still exists after its deletion was requested", volume.id),
        ));
    }
    for fleet in h.fleets.iter().filter(|fleet| !fleet.finished) {
        let of_fleet = || h.instances.iter().filter(|i| !i.finished && i.fleet_id == Some(fleet.id));
        let up = of_fleet().filter(|i| i.status == "idle" || i.status == "busy").count() as i64;
        if fleet.status == "terminating" {
            found.push(violation("G6", format!("fleet {} is still terminating", fleet.id)));
        } else if fleet.nodes_min.is_some_and(|min| up < min) {
            let min = fleet.nodes_min.unwrap_or_default();
            found.push(violation("G5", format!("fleet {} has {up} of at least {min} nodes", fleet.id)));
        }
        if fleet.nodes_max.is_some_and(|max| of_fleet().count() as i64 > max) {
            let max = fleet.nodes_max.unwrap_or_default();
            found.push(violation("G5", format!("fleet {} still has more than {max} nodes", fleet.id)));
        }
    }
    found
}

pub(super) fn m8_no_ssh_host_failed(h: &History) -> Vec<Violation> {
    let is_ssh = |fleet: &&super::FleetRow| fleet.nodes_min.is_none() && fleet.nodes_max.is_none();
    let ssh: BTreeSet<Uuid> = h.fleets.iter().filter(is_ssh).map(|fleet| fleet.id).collect();
    let hosts = h.instances.iter().filter(|i| i.fleet_id.is_some_and(|fleet| ssh.contains(&fleet)));
    hosts
        .filter(|host| host.finished && host.reason.as_deref() == Some("error"))
        .map(|host| violation("M8", format!("host {} of an SSH fleet ended with an error", host.id)))
        .collect()
}

/// Must hold after every fleet and volume was deleted: nothing remains that costs money.
pub(super) fn check_after_deletion(h: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    for (instance, machine) in &h.machines {
        found.push(violation("G7", format!("machine {machine} of instance {instance} was left behind")));
    }
    for (volume, _) in &h.disks {
        found.push(violation("G7", format!("the disk of volume {volume} was left behind")));
    }
    for fleet in h.fleets.iter().filter(|fleet| !fleet.finished) {
        found.push(violation("G6", format!("fleet {} is still {}", fleet.id, fleet.status)));
    }
    for instance in h.instances.iter().filter(|instance| !instance.finished) {
        found.push(violation("G6", format!("instance {} is still {}", instance.id, instance.status)));
    }
    found
}
