//! Addresses at which the other nodes of a run reach an instance.

use std::net::Ipv4Addr;

use serde::Deserialize;
use windlass_model::id::RunId;

use crate::db::{instances::Instance, pipeline_rows::job_nodes::JobNode};

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

/// Returns the loopback address of a node that shares its instance with the other nodes of its replica. Nodes of
/// different runs practically never have the same one.
pub fn on_shared_instance(run: RunId, replica: i64, node: i64) -> Ipv4Addr {
    let [.., high, low] = *run.0.as_bytes();
    let part = |number: i64| u8::try_from(number.rem_euclid(254)).unwrap_or_default();
    // The first network, 127.0.x.x, is used by programs of the host.
    Ipv4Addr::new(127, 1 + high % 254, low.wrapping_add(part(replica)), 1 + part(node))
}

/// Address at which the other nodes of a replica reach a node. A part of an instance belongs to several nodes only if
/// all of them are there.
pub fn for_node(node: &JobNode, run: RunId, replica: i64, several: bool) -> Option<String> {
    let instance = node.instance.as_ref()?;
    if several && node.blocks < instance.total_blocks.unwrap_or(1) {
        return Some(on_shared_instance(run, replica, node.num).to_string());
    }
    for_instance(instance)
}
