//! Addresses at which the other nodes of a run reach an instance.

use serde::Deserialize;

use crate::db::instances::Instance;

/// Required part of the stored `MachineAddresses`; the rest belongs to its backend.
#[derive(Default, Deserialize)]
struct MachineAddresses {
    internal_ip: Option<String>,
    hostname: Option<String>,
}

/// Private address, else the public one. `None` until the instance has one.
pub fn from_machine(machine: Option<&str>, hostname: Option<&str>) -> Option<String> {
    let machine: MachineAddresses =
        machine.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let known = machine.internal_ip.or(machine.hostname).or_else(|| hostname.map(str::to_owned));
    known.filter(|address| !address.is_empty())
}

pub fn for_instance(instance: &Instance) -> Option<String> {
    from_machine(instance.provisioning.as_deref(), instance.hostname.as_deref())
}
