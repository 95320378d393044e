//! Stored fleets and instances, in the form that placement uses.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, LazyLock},
};

use parking_lot::Mutex;
use serde::Deserialize;
use windlass_api::agent::shim::ProcessesInfo;
use windlass_backend::processes_from;
use windlass_model::{
    backend_kind::BackendKind,
    fleet,
    id::{FleetId, InstanceId, SubmissionId},
    instance,
    money::Price,
    plan::{
        blocks,
        execution_mode::{ContainerSupport, Runtimes},
        offers::{Availability, Gpu, HostSpec, Offer, granted_gpus},
        place::{BlockHold, FleetSnapshot, InstanceSnapshot, Inventory, Readiness},
    },
    resources::{CpuArch, GpuVendor, ResourcesSpec},
    time::Timestamp,
};

use crate::{
    db::{
        self, DbError,
        documents::{self, INSTANCE_TYPE},
        pipeline_rows::placement::PoolInventory,
    },
    instance_documents::OfferAttempts,
    parsed_fleet_spec::{self, ParsedFleetSpec},
    pass_error::PassError,
    plain_processes::ProcessRights,
};

/// An instance type as serialized.
#[derive(Deserialize)]
struct InstanceType {
    name: String,
    resources: Resources,
    /// Runtime of the agent; absent where no agent has reported.
    #[serde(default)]
    runtime: String,
    /// Treatment of plain processes on the host; absent where no agent has reported.
    processes: Option<ProcessesInfo>,
    /// Reason why its container engine does not answer.
    engine_away: Option<String>,
}

impl InstanceType {
    fn runtimes(&self) -> Option<Runtimes> {
        let reported = self.processes.as_ref();
        let processes = processes_from(reported, reported.map(|reported| reported.mode).unwrap_or_default());
        let runtimes = match reported {
            // The agent reported, and the backend did not inspect the host: whether it runs images is known only when a
            // job is submitted.
            Some(_) if self.runtime.is_empty() => Runtimes { containers: ContainerSupport::Run, processes },
            Some(_) | None => Runtimes::parse(&self.runtime, processes)?,
        };
        Some(match &self.engine_away {
            Some(why) => runtimes.without_engine(why),
            None => runtimes,
        })
    }
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
    #[serde(default)]
    compute_capability: Option<(u32, u32)>,
}

pub(crate) fn build_inventory(
    stock: &PoolInventory,
    offers: &[Offer],
    allowed: ProcessRights,
) -> Result<Inventory, PassError> {
    let is_granted = |offer: &&Offer| stock.granted.values().any(|granted| granted.contains(&offer.backend));
    let offers: Vec<Offer> =
        offers.iter().filter(is_granted).map(|offer| allowed.on(offer.clone())).collect();
    let offered: BTreeSet<String> = offers.iter().map(|offer| offer.backend.clone()).collect();
    let (quotas, usage) = (stock.quotas.clone(), stock.usage.clone());
    let mut inventory = Inventory {
        offers,
        quotas,
        budgets: stock.budgets.clone(),
        usage,
        promises: stock.promises.clone(),
        running: stock.running.clone(),
        held_by_class: stock.held_by_class.clone(),
        ..Inventory::default()
    };
    let mut nums: BTreeMap<FleetId, BTreeSet<u32>> = BTreeMap::new();
    let mut holds: BTreeMap<InstanceId, Vec<BlockHold>> = BTreeMap::new();
    for hold in &stock.holds {
        let blocks = u32::try_from(hold.blocks).unwrap_or_default();
        let held = BlockHold {
            job: SubmissionId(hold.job),
            blocks,
            until: hold.until.map(Timestamp),
            is_preempted: hold.is_preempted,
        };
        holds.entry(hold.instance).or_default().push(held);
    }
    // A fleet that is being deleted accepts no jobs: they would wait until it is gone.
    let mut shapes: BTreeMap<FleetId, Arc<ParsedFleetSpec>> = BTreeMap::new();
    for fleet in stock.fleets.iter().filter(|fleet| !is_ending(fleet)) {
        match parsed_fleet_spec::for_fleet(fleet) {
            Ok(shape) => drop(shapes.insert(fleet.id, shape)),
            Err(error) => documents::leave_out(&error),
        }
    }
    for row in &stock.instances {
        let Some(fleet) = row.fleet_id.filter(|fleet| shapes.contains_key(fleet)) else { continue };
        nums.entry(fleet).or_default().insert(u32::try_from(row.instance_num).unwrap_or_default());
        // A pod is for the job that it was made for, and for no other.
        if row.backend.as_deref().is_some_and(|name| BackendKind::of(name) == BackendKind::Pods) {
            continue;
        }
        let held = holds.remove(&row.id).unwrap_or_default();
        match to_instance(row, fleet, held, allowed) {
            Ok(instance) => inventory.instances.push(instance),
            Err(PassError::Db(error @ DbError::StoredDocument { .. })) => documents::leave_out(&error),
            Err(error) => return Err(error),
        }
    }
    for fleet in &stock.fleets {
        let Some(shape) = shapes.get(&fleet.id) else { continue };
        let mut snapshot = to_fleet(fleet, shape, nums.remove(&fleet.id).unwrap_or_default());
        let spent = stock.preempted.get(&fleet.id).copied().unwrap_or_default();
        if let Some(rules) = &mut snapshot.preemption {
            rules.budget_left = rules.budget_left.saturating_sub(u32::try_from(spent).unwrap_or(u32::MAX));
        }
        limit_backends(&mut snapshot, stock.granted.get(&fleet.project_id), &offered);
        inventory.fleets.push(snapshot);
    }
    Ok(inventory)
}

/// Leaves the fleet the backends that are granted to its project, if others are offered to other projects.
fn limit_backends(fleet: &mut FleetSnapshot, granted: Option<&BTreeSet<String>>, offered: &BTreeSet<String>) {
    let is_granted = |backend: &String| granted.is_some_and(|granted| granted.contains(backend));
    if !offered.iter().all(is_granted) {
        let named = fleet.limits.backends.take().unwrap_or_else(|| offered.iter().cloned().collect());
        fleet.limits.backends = Some(named.into_iter().filter(is_granted).collect());
    }
}

fn is_ending(fleet: &db::fleets::Fleet) -> bool {
    match fleet.status {
        fleet::Status::Active | fleet::Status::Submitted => fleet.termination_asked_at.is_some(),
        fleet::Status::Failed | fleet::Status::Terminating | fleet::Status::Terminated => true,
    }
}

fn to_fleet(
    fleet: &db::fleets::Fleet,
    shape: &ParsedFleetSpec,
    instance_nums: BTreeSet<u32>,
) -> FleetSnapshot {
    FleetSnapshot {
        id: fleet.id,
        name: fleet.name.clone(),
        is_cluster: shape.is_cluster(),
        can_create: shape.creates() && fleet.status == fleet::Status::Active,
        nodes_min: shape.nodes().map_or(0, |nodes| nodes.min),
        nodes_max: shape.nodes().and_then(|nodes| nodes.max),
        instance_nums,
        limits: shape.limits().clone(),
        blocks: shape.blocks(),
        preemption: shape.preemption(),
    }
}

fn to_instance(
    row: &db::instances::Instance,
    fleet: FleetId,
    held: Vec<BlockHold>,
    allowed: ProcessRights,
) -> Result<InstanceSnapshot, PassError> {
    Ok(InstanceSnapshot {
        id: row.id,
        fleet,
        name: row.name.clone(),
        instance_num: u32::try_from(row.instance_num).unwrap_or_default(),
        hostname: row.hostname.clone(),
        offer: allowed.on(offer(row)?),
        readiness: readiness(row),
        holds: held,
        is_kept: row.idle_seconds_max.is_none(),
    })
}

fn readiness(row: &db::instances::Instance) -> Readiness {
    if row.termination_asked_at.is_some() {
        return Readiness::Draining;
    }
    match row.status {
        instance::Status::Pending | instance::Status::Provisioning => Readiness::Provisioning,
        instance::Status::Idle | instance::Status::Busy if row.unreachable => Readiness::Unreachable,
        instance::Status::Idle | instance::Status::Busy if row.health == "failure" => Readiness::Unhealthy,
        instance::Status::Idle | instance::Status::Busy => Readiness::Ready,
        instance::Status::Terminating | instance::Status::Terminated => Readiness::Draining,
    }
}

/// Offer of the instance, from its document; empty if the hardware is not known yet. [`ProcessRights`] decides whether
/// its plain processes may run as the server's own user.
pub(crate) fn offer(row: &db::instances::Instance) -> Result<Offer, PassError> {
    let (instance_type, host) = match &row.instance_type {
        Some(text) => cached_type(row.id, text)?,
        None => (
            String::new(),
            HostSpec {
                cpus: 0,
                arch: None,
                memory_mib: 0,
                disk_mib: 0,
                gpus: Vec::new(),
                spot: row.spot,
                runtimes: None,
            },
        ),
    };
    Ok(Offer {
        backend: row.backend.clone().unwrap_or_default(),
        region: row.region.clone().unwrap_or_default(),
        zones: row.availability_zone.clone().into_iter().collect(),
        instance_type,
        price: Price::from_dollars(row.price.unwrap_or_default()),
        availability: Availability::Idle,
        reservation: OfferAttempts::of(row)?.and_then(|tries| tries.current()?.reservation.clone()),
        host,
        total_blocks: u32::try_from(row.total_blocks.unwrap_or(1)).unwrap_or(1).max(1),
    })
}

/// Cached instance types: there are many hosts and few types, and placement reads all of them each time.
fn cached_type(instance: InstanceId, text: &str) -> Result<(String, HostSpec), DbError> {
    static KNOWN: LazyLock<Mutex<HashMap<String, (String, HostSpec)>>> = LazyLock::new(Mutex::default);
    if let Some(known) = KNOWN.lock().get(text) {
        return Ok(known.clone());
    }
    let kind: InstanceType = INSTANCE_TYPE.decode(instance, text)?;
    let runtimes = kind.runtimes();
    let read = (kind.name, host(kind.resources, runtimes));
    let mut known = KNOWN.lock();
    if known.len() >= CACHED_TYPES_MAX {
        known.clear();
    }
    known.insert(text.to_owned(), read.clone());
    Ok(read)
}

/// Maximum number of entries; more types are rare, and then the cache is cleared.
const CACHED_TYPES_MAX: usize = 4_096;

fn host(resources: Resources, runtimes: Option<Runtimes>) -> HostSpec {
    HostSpec {
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
        runtimes,
    }
}

fn gpu(gpu: GpuDocument) -> Gpu {
    let vendor = gpu.vendor.as_deref().and_then(GpuVendor::parse);
    Gpu::from_name(vendor, &gpu.name, gpu.memory_mib, gpu.compute_capability)
}

/// Number of GPUs of a job with so many blocks.
pub(crate) fn gpu_count(
    row: &db::instances::Instance,
    blocks: i64,
    wanted: &ResourcesSpec,
) -> Result<u32, PassError> {
    let offer = offer(row)?;
    let blocks = u32::try_from(blocks).unwrap_or_default();
    Ok(granted_gpus(&blocks::host_share(&offer.host, blocks, offer.total_blocks), wanted))
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;
    use windlass_model::id::ProjectId;

    use super::*;

    fn row(
        number: u128,
        status: fleet::Status,
        termination_asked_at: Option<Timestamp>,
    ) -> db::fleets::Fleet {
        let spec = r#"{"configuration": {"type": "fleet", "nodes": {"min": 0}}}"#;
        db::fleets::Fleet {
            id: FleetId(Uuid::from_u128(number)),
            project_id: ProjectId(Uuid::nil()),
            user_id: None,
            name: format!("fleet-{number}"),
            spec: spec.to_owned(),
            status,
            finished: false,
            status_message: None,
            deleted: false,
            auto_created: false,
            consolidation_attempt: 0,
            last_consolidated_at: None,
            termination_asked_at,
            created_at: Timestamp(0),
            last_processed_at: Timestamp(0),
            tracking: None,
            lock_epoch: 0,
        }
    }

    #[test]
    fn a_fleet_being_deleted_is_not_used_for_placement() {
        let fleets = vec![
            row(1, fleet::Status::Active, None),
            row(2, fleet::Status::Active, Some(Timestamp(1))),
            row(3, fleet::Status::Terminating, Some(Timestamp(1))),
        ];
        let stock = PoolInventory { fleets, ..PoolInventory::default() };
        let inventory = build_inventory(&stock, &[], ProcessRights::Confined).unwrap();
        let names: Vec<&str> = inventory.fleets.iter().map(|fleet| fleet.name.as_str()).collect();
        assert_eq!(names, ["fleet-1"]);
    }
}
