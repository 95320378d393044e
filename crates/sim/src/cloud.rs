//! A simulated cloud on virtual time: machines that become hosts, disks that are attached to them, and their failures.
//!
//! It keeps the promises of a backend (the instance's ID is the key of a machine, the volume's that of a disk) and no
//! others: responses are lost, capacity is short, boots are slow or never end, disks hang, spot machines are preempted,
//! machines vanish. A journal for the checkers records everything it did.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::{sync::oneshot, time::sleep};
use windlass_backend::{
    AgentEndpoint, Backend, BackendError, BackendFuture, BackendInstance, DeleteProgress, GpuInfo,
    HardwareInfo, InstanceRequest, InstanceSource, InstanceState,
    volumes::{Attachment, AttachmentState, BackendVolume, VolumeBackend, VolumeRequest},
};
use windlass_model::{
    id::{InstanceId, VolumeId},
    money::Price,
    plan::offers::{Availability, Gpu, HostSpec as Hardware, Offer},
    resources::{CpuArch, GpuVendor},
};

use crate::{
    host::SimHost,
    network::{ReplicaFreeze, SharedSimState, SimState},
};

/// Timeout of a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(9);
const SECOND: i64 = 1_000_000;
/// A machine that never boots.
const NEVER: i64 = i64::MAX;
pub const REGION: &str = "sim-1";
pub const GPUS: usize = 4;

/// Fault rates, in percent. All zero after the faults have stopped.
#[derive(Clone, Copy, Debug, Default)]
pub struct CloudFaultRates {
    pub lost: u64,
    pub unanswered: u64,
    pub slow: u64,
    pub no_capacity: u64,
    pub slow_boot: u64,
    pub never_boots: u64,
    pub listed_late: u64,
    pub attach_refused: u64,
    pub attach_hangs: u64,
    pub detach_hangs: u64,
}

/// An event of a machine, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloudEntry {
    pub at: i64,
    pub instance: InstanceId,
    pub machine: String,
    pub kind: MachineEvent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineEvent {
    Created,
    /// The server requested its deletion while this number of containers ran on it.
    DeleteRequested {
        running: usize,
    },
    /// The machine no longer exists.
    Gone,
}

#[derive(Debug)]
struct SimMachine {
    id: String,
    spot: bool,
    /// Before this time the cloud reports that there is no such machine.
    known_at: i64,
    boots_at: i64,
    /// Time at which it ends, once that is determined.
    goes_at: Option<i64>,
    gone: Option<&'static str>,
}

#[derive(Debug)]
struct SimDisk {
    volume: VolumeId,
    ready_at: i64,
    removed: bool,
    /// By machine.
    attached: BTreeMap<String, DiskAttachment>,
}

#[derive(Debug)]
struct DiskAttachment {
    ready_at: i64,
    /// Ignores soft requests.
    stuck: Option<bool>,
    ends_at: Option<i64>,
}

/// Machines and disks of the cloud; part of the world.
#[derive(Debug, Default)]
pub struct Cloud {
    vms: BTreeMap<InstanceId, Vec<SimMachine>>,
    disks: BTreeMap<String, SimDisk>,
    pub rates: CloudFaultRates,
    pub journal: Vec<CloudEntry>,
    /// Requests that no server may make.
    pub outrages: Vec<String>,
    count: u64,
}

impl Cloud {
    /// Existing machines, by the instance for which they were created.
    pub fn machines(&self) -> impl Iterator<Item = (InstanceId, &str)> {
        self.vms.iter().flat_map(|(id, vms)| {
            vms.iter().filter(|vm| vm.gone.is_none()).map(move |vm| (*id, vm.id.as_str()))
        })
    }

    /// Existing disks created by the server, with the machines to which they are attached.
    pub fn disks(&self) -> impl Iterator<Item = (VolumeId, BTreeSet<&str>)> {
        self.disks
            .values()
            .filter(|disk| !disk.removed)
            .map(|disk| (disk.volume, disk.attached.keys().map(String::as_str).collect()))
    }

    fn has_machine(&self, machine: &str) -> bool {
        self.vms.values().flatten().any(|vm| vm.id == machine && vm.gone.is_none())
    }

    fn machine(vm: &SimMachine) -> BackendInstance {
        BackendInstance {
            id: vm.id.clone(),
            reach: Some(AgentEndpoint::Socket { path: format!("/run/sim/{}.sock", vm.id).into() }),
            hostname: Some(format!("{}.sim", vm.id)),
            internal_ip: Some("10.0.0.1".into()),
            has: None,
            agent_version: Some("0.0.0".into()),
            memo: serde_json::Value::Null,
        }
    }
}

impl SimState {
    /// Applies all events of machines and disks that are due.
    pub(crate) fn advance_cloud(&mut self, now: i64) {
        let mut over = Vec::new();
        for (id, vms) in &mut self.cloud.vms {
            for vm in vms.iter_mut().filter(|vm| vm.gone.is_none()) {
                if let Some(at) = vm.goes_at.filter(|at| *at <= now) {
                    vm.gone = Some("deleted");
                    over.push((*id, vm.id.clone(), at));
                }
            }
        }
        for (id, machine, at) in over {
            self.end_machine(id, &machine, at);
        }
        for disk in self.cloud.disks.values_mut() {
            disk.attached.retain(|_, fastening| fastening.ends_at.is_none_or(|at| at > now));
        }
    }

    fn end_machine(&mut self, id: InstanceId, machine: &str, at: i64) {
        if let Some(host) = self.hosts.get_mut(&id) {
            host.power_off(at);
        }
        for disk in self.cloud.disks.values_mut() {
            disk.attached.remove(machine);
        }
        self.cloud.journal.push(CloudEntry {
            at,
            instance: id,
            machine: machine.to_owned(),
            kind: MachineEvent::Gone,
        });
    }

    /// Removes a machine: a preempted spot machine, or any lost one.
    pub fn lose_machine(&mut self, spot: bool) {
        let now = self.now();
        self.advance_cloud(now);
        let there: Vec<(InstanceId, usize)> = self
            .cloud
            .vms
            .iter()
            .flat_map(|(id, vms)| vms.iter().enumerate().map(move |(n, vm)| (*id, n, vm)))
            .filter(|(_, _, vm)| vm.gone.is_none() && (!spot || vm.spot))
            .map(|(id, n, _)| (id, n))
            .collect();
        if there.is_empty() {
            return;
        }
        let (id, n) = *self.rng.pick(&there);
        let Some(vm) = self.cloud.vms.get_mut(&id).and_then(|vms| vms.get_mut(n)) else { return };
        vm.gone = Some(if spot { "preempted" } else { "vanished" });
        let machine = vm.id.clone();
        self.end_machine(id, &machine, now);
        self.count(if spot { "preemption" } else { "machine vanished" });
    }

    fn create(&mut self, order: &InstanceRequest, now: i64) -> Result<BackendInstance, BackendError> {
        self.advance_cloud(now);
        let rates = self.cloud.rates;
        let known = self.cloud.vms.entry(order.instance).or_default();
        if let Some(vm) = known.iter().find(|vm| vm.gone.is_none()) {
            return Ok(Cloud::machine(vm));
        }
        let InstanceSource::Offer(offer) = &order.want else {
            return Err(BackendError::Refused {
                what: "create a machine",
                message: "it is not an offer".into(),
            });
        };
        let spot = offer.host.spot;
        if self.should_fail(rates.no_capacity, "no capacity") {
            return Err(BackendError::NoCapacity { message: format!("no {} left", offer.instance_type) });
        }
        let boots_at = if self.should_fail(rates.never_boots, "machine never boots") {
            NEVER
        } else if self.should_fail(rates.slow_boot, "slow boot") {
            now + self.rng.between(60, 540) as i64 * SECOND
        } else {
            now + self.rng.between(1, 30) as i64 * SECOND
        };
        let known_at = if self.should_fail(rates.listed_late, "machine listed late") {
            now + self.rng.between(1, 45) as i64 * SECOND
        } else {
            now
        };
        self.cloud.count += 1;
        let id = format!("vm-{}", self.cloud.count);
        let vm = SimMachine { id, spot, known_at, boots_at, goes_at: None, gone: None };
        let machine = Cloud::machine(&vm);
        let entry = CloudEntry {
            at: now,
            instance: order.instance,
            machine: vm.id.clone(),
            kind: MachineEvent::Created,
        };
        self.cloud.journal.push(entry);
        self.cloud.vms.entry(order.instance).or_default().push(vm);
        let tries = self.tries.clone();
        let host = self.hosts.entry(order.instance);
        host.or_insert_with(|| SimHost::new(order.instance, GPUS, tries)).boot(boots_at);
        Ok(machine)
    }

    fn find(&mut self, order: &InstanceRequest, machine: &BackendInstance, now: i64) -> InstanceState {
        self.advance_cloud(now);
        let vms = self.cloud.vms.get(&order.instance);
        match vms.and_then(|vms| vms.iter().find(|vm| vm.id == machine.id)) {
            None => InstanceState::Unknown,
            Some(vm) => match vm.gone {
                Some(how) => InstanceState::Gone { message: how.into() },
                None if now < vm.known_at => InstanceState::Unknown,
                None if now < vm.boots_at => InstanceState::Starting(Cloud::machine(vm)),
                None => InstanceState::Running(Cloud::machine(vm)),
            },
        }
    }

    fn delete(&mut self, order: &InstanceRequest, now: i64) -> DeleteProgress {
        self.advance_cloud(now);
        let id = order.instance;
        let running = self.hosts.get_mut(&id).map_or(0, |host| host.running(now));
        let takes = self.rng.between(0, 20) as i64 * SECOND;
        let mut requested = Vec::new();
        for vm in self.cloud.vms.entry(id).or_default().iter_mut().filter(|vm| vm.gone.is_none()) {
            if vm.goes_at.is_none() {
                vm.goes_at = Some(now + takes);
                requested.push(vm.id.clone());
            }
        }
        for machine in requested {
            let kind = MachineEvent::DeleteRequested { running };
            self.cloud.journal.push(CloudEntry { at: now, instance: id, machine, kind });
        }
        self.advance_cloud(now);
        let left = self.cloud.vms.get(&id).is_some_and(|vms| vms.iter().any(|vm| vm.gone.is_none()));
        if left { DeleteProgress::InProgress } else { DeleteProgress::Gone }
    }

    fn create_disk(&mut self, order: &VolumeRequest, now: i64) -> BackendVolume {
        let id = format!("disk-{}", order.volume);
        let takes = self.rng.between(0, 40) as i64 * SECOND;
        let fresh = || SimDisk {
            volume: order.volume,
            ready_at: now + takes,
            removed: false,
            attached: BTreeMap::new(),
        };
        let disk = self.cloud.disks.entry(id.clone()).or_insert_with(fresh);
        // Created again by a caller who only wants to ensure that it is deleted.
        disk.removed = false;
        BackendVolume {
            id,
            size_gb: order.size_gb,
            zone: None,
            price: Some(1.0),
            ready: disk.ready_at <= now,
        }
    }

    fn disk_state(&mut self, order: &VolumeRequest, id: &str, now: i64) -> Option<BackendVolume> {
        let disk = self.cloud.disks.get(id).filter(|disk| !disk.removed)?;
        let ready = disk.ready_at <= now;
        Some(BackendVolume { id: id.to_owned(), size_gb: order.size_gb, zone: None, price: Some(1.0), ready })
    }

    fn remove_disk(&mut self, id: &str, now: i64) -> Result<(), BackendError> {
        self.advance_cloud(now);
        let Some(disk) = self.cloud.disks.get_mut(id) else { return Ok(()) };
        if !disk.attached.is_empty() {
            self.cloud.outrages.push(format!("deletion of {id} requested while it is attached"));
            return Err(BackendError::Refused { what: "delete a disk", message: "it is attached".into() });
        }
        disk.removed = true;
        Ok(())
    }

    fn attach(
        &mut self,
        id: &str,
        machine: &BackendInstance,
        now: i64,
    ) -> Result<AttachmentState, BackendError> {
        self.advance_cloud(now);
        let refused =
            |message: &str| BackendError::Refused { what: "attach a disk", message: message.to_owned() };
        if !self.cloud.has_machine(&machine.id) {
            return Err(refused("the machine does not exist"));
        }
        let rates = self.cloud.rates;
        let Some(disk) = self.cloud.disks.get(id).filter(|disk| !disk.removed) else {
            return Err(refused("the disk does not exist"));
        };
        if let Some(other) = disk.attached.keys().find(|other| **other != machine.id) {
            let what =
                format!("attachment of {id} to {} requested while it is attached to {other}", machine.id);
            self.cloud.outrages.push(what);
            return Err(refused("it is attached to another machine"));
        }
        if !disk.attached.contains_key(&machine.id) {
            if self.should_fail(rates.attach_refused, "attach refused") {
                return Err(refused("it is not compatible with the machine"));
            }
            let ready_at = if self.should_fail(rates.attach_hangs, "attach hangs") {
                NEVER
            } else {
                now + self.rng.between(0, 20) as i64 * SECOND
            };
            let fastening = DiskAttachment { ready_at, stuck: None, ends_at: None };
            if let Some(disk) = self.cloud.disks.get_mut(id) {
                disk.attached.insert(machine.id.clone(), fastening);
            }
        }
        Ok(self.attached(id, machine, now))
    }

    fn attached(&mut self, id: &str, machine: &BackendInstance, now: i64) -> AttachmentState {
        self.advance_cloud(now);
        match self.cloud.disks.get(id).and_then(|disk| disk.attached.get(&machine.id)) {
            None => AttachmentState::No,
            Some(fastening) if now < fastening.ready_at => AttachmentState::Coming,
            Some(_) => AttachmentState::Yes(Attachment { device_name: Some("/dev/sim".into()) }),
        }
    }

    fn detach(&mut self, id: &str, machine: &BackendInstance, force: bool, now: i64) {
        self.advance_cloud(now);
        let percent = self.cloud.rates.detach_hangs;
        let takes = self.rng.between(0, 10) as i64 * SECOND;
        let fastening = |state: &mut Self| {
            let disk = state.cloud.disks.get_mut(id)?;
            disk.attached.get(&machine.id).map(|fastening| (fastening.stuck, fastening.ends_at))
        };
        let Some((stuck, ends_at)) = fastening(self) else { return };
        let stuck = stuck.unwrap_or_else(|| self.should_fail(percent, "detach hangs"));
        let ends_at = match (force, stuck, ends_at) {
            (true, _, _) => Some(now),
            (false, true, already) => already,
            (false, false, already) => already.or(Some(now + takes)),
        };
        let disk = self.cloud.disks.get_mut(id);
        if let Some(fastening) = disk.and_then(|disk| disk.attached.get_mut(&machine.id)) {
            (fastening.stuck, fastening.ends_at) = (Some(stuck), ends_at);
        }
    }
}

/// One replica's connection to the cloud.
pub struct SimBackend {
    pub state: SharedSimState,
    pub freeze: ReplicaFreeze,
}

/// The same connection, for the backend of SSH hosts.
pub struct SimRemoteBackend(pub SimBackend);

impl SimBackend {
    /// A request that was sent arrives, even if the sender dies meanwhile.
    fn call<'a, T: Send + 'static>(
        &'a self,
        what: &'static str,
        effect: impl FnOnce(&mut SimState, i64) -> Result<T, BackendError> + Send + 'static,
    ) -> BackendFuture<'a, T> {
        let silence = move || BackendError::Unavailable { what, message: "no response".into() };
        Box::pin(async move {
            self.freeze.wait().await;
            let (there, back, lost, unanswered) = {
                let mut w = self.state.lock();
                let rates = w.cloud.rates;
                let most = if w.should_fail(rates.slow, "slow cloud") { 8_000 } else { 400 };
                let (there, back) = (w.rng.millis(1, most), w.rng.millis(1, most / 8));
                (
                    there,
                    back,
                    w.should_fail(rates.lost, "lost cloud request"),
                    w.should_fail(rates.unanswered, "lost cloud response"),
                )
            };
            if lost {
                sleep(CALL_TIMEOUT).await;
                return Err(silence());
            }
            let (notify, reported) = oneshot::channel();
            let state = Arc::clone(&self.state);
            tokio::spawn(async move {
                sleep(there).await;
                let mut w = state.lock();
                let now = w.now();
                // The caller may be gone.
                let _ = notify.send(effect(&mut w, now));
            });
            let answer = reported.await;
            if unanswered {
                sleep(CALL_TIMEOUT).await;
                return Err(silence());
            }
            sleep(back).await;
            self.freeze.wait().await;
            answer.unwrap_or_else(|_| Err(silence()))
        })
    }
}

fn sim_offer(instance_type: &str, price: f64, spot: bool) -> Offer {
    let gpu =
        Gpu { vendor: GpuVendor::Nvidia, name: "A100".into(), memory_mib: 81_920, compute_capability: None };
    Offer {
        backend: "mock".into(),
        region: REGION.into(),
        zones: Vec::new(),
        instance_type: instance_type.into(),
        price: Price::from_dollars(price),
        availability: Availability::Available,
        reservation: None,
        host: Hardware {
            cpus: 32,
            arch: Some(CpuArch::X86),
            memory_mib: 262_144,
            disk_mib: 1_048_576,
            gpus: vec![gpu; GPUS],
            spot,
            runtimes: None,
        },
        total_blocks: 1,
    }
}

impl Backend for SimBackend {
    fn name(&self) -> &'static str {
        "mock"
    }

    fn offers(&self) -> BackendFuture<'_, Vec<Offer>> {
        self.call("list offers", |_, _| {
            Ok(vec![sim_offer("sim.spot", 1.0, true), sim_offer("sim.large", 2.0, false)])
        })
    }

    fn create<'a>(&'a self, order: &'a InstanceRequest) -> BackendFuture<'a, BackendInstance> {
        let order = order.clone();
        self.call("create a machine", move |state, now| state.create(&order, now))
    }

    fn find<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, InstanceState> {
        let (order, machine) = (order.clone(), machine.clone());
        self.call("find a machine", move |state, now| Ok(state.find(&order, &machine, now)))
    }

    fn delete<'a>(
        &'a self,
        order: &'a InstanceRequest,
        _machine: Option<&'a BackendInstance>,
    ) -> BackendFuture<'a, DeleteProgress> {
        let order = order.clone();
        self.call("delete a machine", move |state, now| Ok(state.delete(&order, now)))
    }

    fn volumes(&self) -> Option<&dyn VolumeBackend> {
        Some(self)
    }
}

impl VolumeBackend for SimBackend {
    fn make<'a>(&'a self, order: &'a VolumeRequest) -> BackendFuture<'a, BackendVolume> {
        let order = order.clone();
        self.call("create a disk", move |state, now| Ok(state.create_disk(&order, now)))
    }

    fn get<'a>(&'a self, order: &'a VolumeRequest, id: &'a str) -> BackendFuture<'a, Option<BackendVolume>> {
        let (order, id) = (order.clone(), id.to_owned());
        self.call("inspect a disk", move |state, now| Ok(state.disk_state(&order, &id, now)))
    }

    fn remove<'a>(&'a self, _order: &'a VolumeRequest, id: &'a str) -> BackendFuture<'a, ()> {
        let id = id.to_owned();
        self.call("delete a disk", move |state, now| state.remove_disk(&id, now))
    }

    fn attach<'a>(&'a self, id: &'a str, machine: &'a BackendInstance) -> BackendFuture<'a, AttachmentState> {
        let (id, machine) = (id.to_owned(), machine.clone());
        self.call("attach a disk", move |state, now| state.attach(&id, &machine, now))
    }

    fn detach<'a>(&'a self, id: &'a str, machine: &'a BackendInstance, force: bool) -> BackendFuture<'a, ()> {
        let (id, machine) = (id.to_owned(), machine.clone());
        self.call("detach a disk", move |state, now| {
            state.detach(&id, &machine, force, now);
            Ok(())
        })
    }

    fn attached<'a>(
        &'a self,
        id: &'a str,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, AttachmentState> {
        let (id, machine) = (id.to_owned(), machine.clone());
        self.call("inspect a disk", move |state, now| Ok(state.attached(&id, &machine, now)))
    }
}

impl SimRemoteBackend {
    fn machine(order: &InstanceRequest) -> BackendInstance {
        let gpu = GpuInfo {
            vendor: "nvidia".into(),
            name: "A100".into(),
            memory_mib: 81_920,
            compute_capability: None,
        };
        BackendInstance {
            id: order.instance.to_string(),
            reach: Some(AgentEndpoint::Ssh { socket: "/run/sim.sock".into() }),
            hostname: Some("host.sim".into()),
            internal_ip: Some("10.0.0.1".into()),
            has: Some(HardwareInfo {
                cpus: 32,
                arch: Some("x86".into()),
                memory_mib: 262_144,
                disk_mib: 1_048_576,
                gpus: vec![gpu; GPUS],
                runtime: "docker".into(),
                engine_away: None,
                processes: None,
                addresses: vec!["10.0.0.1/24".into()],
            }),
            agent_version: Some("0.0.0".into()),
            memo: serde_json::Value::Null,
        }
    }
}

impl Backend for SimRemoteBackend {
    fn name(&self) -> &'static str {
        "remote"
    }

    fn offers(&self) -> BackendFuture<'_, Vec<Offer>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn create<'a>(&'a self, order: &'a InstanceRequest) -> BackendFuture<'a, BackendInstance> {
        let order = order.clone();
        self.0.call("deploy to a host", move |state, now| {
            let cut = state.is_partitioned(order.instance);
            match state.hosts.get_mut(&order.instance) {
                Some(host) if !cut => {
                    host.deploy(now);
                    Ok(Self::machine(&order))
                }
                Some(_) | None => {
                    Err(BackendError::Unavailable { what: "deploy to a host", message: "no route".into() })
                }
            }
        })
    }

    fn find<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, InstanceState> {
        let (order, machine) = (order.clone(), machine.clone());
        self.0.call("inspect a host", move |state, _| match state.is_partitioned(order.instance) {
            true => Err(BackendError::Unavailable { what: "inspect a host", message: "no route".into() }),
            false => Ok(InstanceState::Running(machine)),
        })
    }

    fn delete<'a>(
        &'a self,
        order: &'a InstanceRequest,
        _machine: Option<&'a BackendInstance>,
    ) -> BackendFuture<'a, DeleteProgress> {
        let id = order.instance;
        self.0.call("clean a host", move |state, now| {
            if state.is_partitioned(id) {
                return Err(BackendError::Unavailable { what: "clean a host", message: "no route".into() });
            }
            if let Some(host) = state.hosts.get_mut(&id) {
                host.power_off(now);
            }
            Ok(DeleteProgress::Gone)
        })
    }
}
