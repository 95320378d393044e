//! Stored fleets and instances, as placement sees them.

use serde::Deserialize;
use windlass_model::{
    id::{FleetId, SubmissionId},
    instance,
    money::Price,
    plan::{
        blocks::{self, Blocks},
        offers::{Availability, Gpu, Host, Needs, Offer},
        place::{Fleet, Held, Instance, Inventory, Readiness},
    },
    resources::{CpuArch, GpuVendor},
    time::Timestamp,
};

use crate::{
    db::{self, passes::placing::Stock},
    pass_error::PassError,
};

/// An instance type as it travels on the wire.
#[derive(Deserialize)]
struct Kind {
    name: String,
    resources: Resources,
}

#[derive(Deserialize)]
struct Resources {
    cpus: u32,
    memory_mib: u64,
    #[serde(default)]
    spot: bool,
    cpu_arch: Option<String>,
    disk: Option<Disk>,
    #[serde(default)]
    gpus: Vec<GpuDocument>,
}

#[derive(Deserialize)]
struct Disk {
    size_mib: u64,
}

#[derive(Deserialize)]
struct GpuDocument {
    name: String,
    memory_mib: u64,
    vendor: Option<String>,
}

#[derive(Deserialize)]
struct FleetSpec {
    configuration: FleetConfiguration,
}

#[derive(Deserialize)]
struct FleetConfiguration {
    placement: Option<String>,
    ssh_config: Option<serde::de::IgnoredAny>,
    nodes: Option<Nodes>,
}

#[derive(Deserialize)]
struct Nodes {
    max: Option<u32>,
}

pub(crate) fn of(stock: &Stock) -> Result<Inventory, PassError> {
    let mut inventory = Inventory::default();
    for fleet in &stock.fleets {
        inventory.fleets.push(fleet_of(fleet, &stock.instances)?);
    }
    for row in &stock.instances {
        let Some(fleet) = row.fleet_id else { continue };
        inventory.instances.push(instance_of(row, fleet, stock)?);
    }
    Ok(inventory)
}

fn fleet_of(fleet: &db::fleets::Fleet, instances: &[db::instances::Instance]) -> Result<Fleet, PassError> {
    let spec: FleetSpec = serde_json::from_str(&fleet.spec).map_err(PassError::document)?;
    let configuration = spec.configuration;
    let of_fleet = instances.iter().filter(|i| i.fleet_id == Some(fleet.id));
    Ok(Fleet {
        id: fleet.id,
        name: fleet.name.clone(),
        cluster: configuration.placement.as_deref() == Some("cluster"),
        creates: configuration.ssh_config.is_none(),
        nodes_max: configuration.nodes.and_then(|n| n.max),
        instance_nums: of_fleet.map(|i| u32::try_from(i.instance_num).unwrap_or_default()).collect(),
        limits: Needs::default(),
        blocks: Blocks::Count(1),
    })
}

fn instance_of(row: &db::instances::Instance, fleet: FleetId, stock: &Stock) -> Result<Instance, PassError> {
    let held = stock.holds.iter().filter(|hold| hold.instance == row.id);
    Ok(Instance {
        id: row.id,
        fleet,
        name: row.name.clone(),
        instance_num: u32::try_from(row.instance_num).unwrap_or_default(),
        hostname: row.hostname.clone(),
        offer: offer(row)?,
        readiness: readiness(row),
        held: held
            .map(|hold| Held {
                job: SubmissionId(hold.job),
                blocks: u32::try_from(hold.blocks).unwrap_or_default(),
                until: hold.until.map(Timestamp),
            })
            .collect(),
    })
}

fn readiness(row: &db::instances::Instance) -> Readiness {
    match row.status {
        instance::Status::Pending | instance::Status::Provisioning => Readiness::Provisioning,
        instance::Status::Idle | instance::Status::Busy if row.unreachable => Readiness::Unreachable,
        instance::Status::Idle | instance::Status::Busy if row.health == "failure" => Readiness::Unhealthy,
        instance::Status::Idle | instance::Status::Busy => Readiness::Ready,
        instance::Status::Terminating | instance::Status::Terminated => Readiness::Draining,
    }
}

/// What the instance is, by its own document; one that nobody has looked at yet has nothing.
pub(crate) fn offer(row: &db::instances::Instance) -> Result<Offer, PassError> {
    let kind: Option<Kind> = match &row.instance_type {
        Some(text) => Some(serde_json::from_str(text).map_err(PassError::document)?),
        None => None,
    };
    let (instance_type, host) = match kind {
        Some(kind) => (kind.name, host(kind.resources)),
        None => (
            String::new(),
            Host { cpus: 0, arch: None, memory_mib: 0, disk_mib: 0, gpus: Vec::new(), spot: row.spot },
        ),
    };
    Ok(Offer {
        backend: row.backend.clone().unwrap_or_default(),
        region: row.region.clone().unwrap_or_default(),
        zones: row.availability_zone.clone().into_iter().collect(),
        instance_type,
        price: Price::dollars(row.price.unwrap_or_default()),
        availability: Availability::Idle,
        reservation: None,
        host,
        total_blocks: u32::try_from(row.total_blocks.unwrap_or(1)).unwrap_or(1).max(1),
    })
}

fn host(resources: Resources) -> Host {
    Host {
        cpus: resources.cpus,
        arch: match resources.cpu_arch.as_deref() {
            Some("x86") => Some(CpuArch::X86),
            Some("arm") => Some(CpuArch::Arm),
            _ => None,
        },
        memory_mib: resources.memory_mib,
        disk_mib: resources.disk.map_or(0, |disk| disk.size_mib),
        gpus: resources.gpus.into_iter().map(gpu).collect(),
        spot: resources.spot,
    }
}

fn gpu(gpu: GpuDocument) -> Gpu {
    Gpu {
        vendor: gpu.vendor.as_deref().and_then(GpuVendor::parse).unwrap_or(GpuVendor::Nvidia),
        name: gpu.name,
        memory_mib: gpu.memory_mib,
        compute_capability: None,
    }
}

/// How many GPUs so many of its blocks come with.
pub(crate) fn gpus_of(row: &db::instances::Instance, blocks: i64) -> Result<u32, PassError> {
    let offer = offer(row)?;
    let blocks = u32::try_from(blocks).unwrap_or_default();
    let gpus = blocks::share(&offer.host, blocks, offer.total_blocks).gpus.len();
    Ok(u32::try_from(gpus).unwrap_or(u32::MAX))
}
