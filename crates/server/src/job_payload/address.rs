//! Addresses at which the other nodes of a run reach an instance.

use std::{fmt::Display, net::Ipv4Addr};

use serde::Deserialize;
use windlass_model::id::RunId;

use crate::db::{
    DbError, documents::INSTANCE_PROVISIONING, instances::Instance, pipeline_rows::job_nodes::JobNode,
};

/// Required part of the stored `MachineAddresses`; the rest belongs to its backend.
#[derive(Default, Deserialize)]
struct MachineAddresses {
    internal_ip: Option<String>,
    hostname: Option<String>,
}

/// Private address, else the public one. `None` until the instance has one.
pub fn from_machine(
    row: impl Display,
    machine: Option<&str>,
    hostname: Option<&str>,
) -> Result<Option<String>, DbError> {
    let machine: MachineAddresses = INSTANCE_PROVISIONING.decode_opt(row, machine)?.unwrap_or_default();
    let known = machine.internal_ip.or(machine.hostname).or_else(|| hostname.map(str::to_owned));
    Ok(known.filter(|address| !address.is_empty()))
}

pub fn for_instance(instance: &Instance) -> Result<Option<String>, DbError> {
    from_machine(instance.id, instance.provisioning.as_deref(), instance.hostname.as_deref())
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
pub fn for_node(node: &JobNode, run: RunId, replica: i64, several: bool) -> Result<Option<String>, DbError> {
    let Some(instance) = &node.instance else { return Ok(None) };
    if several && node.blocks < instance.total_blocks.unwrap_or(1) {
        return Ok(Some(on_shared_instance(run, replica, node.num).to_string()));
    }
    for_instance(instance)
}
