//! Resources of hosts, needs of jobs, and every shortfall between the two.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::{
    backend_kind::BackendKind,
    explain::Shortfall,
    gpu,
    id::InstanceId,
    money::Price,
    plan::{
        blocks::{self, HostShare},
        execution_mode::{ImageChoice, Runtimes},
        pods::PodObstacle,
        slurm::SlurmObstacle,
    },
    resources::{CpuArch, GpuSpec, GpuVendor, Range, ResourcesSpec},
};

const MIB_PER_GB: f64 = 1024.0;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Gpu {
    pub vendor: GpuVendor,
    pub name: String,
    pub memory_mib: u64,
    /// NVIDIA only; `None` if unknown.
    pub compute_capability: Option<(u32, u32)>,
}

impl Gpu {
    /// Returns the GPU with this name, as used by a driver, a label or a cloud. `memory_mib` 0 means unknown. Reported
    /// values have precedence over the catalogue.
    pub fn from_name(
        vendor: Option<GpuVendor>,
        name: &str,
        memory_mib: u64,
        compute_capability: Option<(u32, u32)>,
    ) -> Self {
        let device = gpu::identify_device(name, Some(memory_mib).filter(|mib| *mib > 0));
        Self {
            vendor: vendor.or(device.vendor).unwrap_or(GpuVendor::Nvidia),
            name: device.name,
            memory_mib: device.memory_mib.unwrap_or(memory_mib),
            compute_capability: compute_capability.or(device.compute_capability),
        }
    }

    /// Returns a single-token name, with the memory if known: `A100-80GB`. `None` if it has no name.
    pub fn type_name(&self) -> Option<String> {
        let name = self.name.replace(' ', "-");
        match self.memory_mib / 1024 {
            _ if name.is_empty() => None,
            0 => Some(name),
            gb => Some(format!("{name}-{gb}GB")),
        }
    }
}

/// Resources of one host, or of a share of one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HostSpec {
    pub cpus: u32,
    /// `None` if unknown: then only jobs without an architecture fit.
    pub arch: Option<CpuArch>,
    pub memory_mib: u64,
    /// 0 means unknown, which fits every request.
    pub disk_mib: u64,
    pub gpus: Vec<Gpu>,
    pub spot: bool,
    /// `None` if unknown before an agent runs there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtimes: Option<Runtimes>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Availability {
    Unknown,
    Available,
    NotAvailable,
    NoQuota,
    NoBalance,
    Idle,
    Busy,
}

impl Availability {
    /// Returns whether a request to the backend can succeed.
    pub const fn is_worth_trying(self) -> bool {
        match self {
            Self::Unknown | Self::Available | Self::Idle => true,
            Self::NotAvailable | Self::NoQuota | Self::NoBalance | Self::Busy => false,
        }
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Available => "available",
            Self::NotAvailable => "not available",
            Self::NoQuota => "out of quota",
            Self::NoBalance => "out of balance",
            Self::Idle => "idle",
            Self::Busy => "busy",
        }
    }
}

/// A kind of instance at a location and price: one that exists, or one that a backend would create.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Offer {
    pub backend: String,
    pub region: String,
    /// Zones that it is in, or may be created in; empty means unknown, which only fits a request without zones.
    pub zones: Vec<String>,
    pub instance_type: String,
    pub price: Price,
    pub availability: Availability,
    pub reservation: Option<String>,
    pub host: HostSpec,
    /// Number of equal blocks in which jobs may share it; 1 means that one job uses all of it.
    pub total_blocks: u32,
}

/// Location of a volume. Without a zone it is usable in the whole region.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    pub backend: String,
    pub region: String,
    pub zone: Option<String>,
}

impl Location {
    /// Returns whether the offer is available in no other location.
    fn covers(&self, offer: &Offer) -> bool {
        let in_zone = |zone: &String| {
            !offer.zones.is_empty() && offer.zones.iter().all(|of_offer| eq_ignore_case(of_offer, zone))
        };
        eq_ignore_case(&self.backend, &offer.backend)
            && eq_ignore_case(&self.region, &offer.region)
            && self.zone.as_ref().is_none_or(in_zone)
    }

    fn admits(&self, offer: &Offer) -> bool {
        eq_ignore_case(&self.backend, &offer.backend)
            && eq_ignore_case(&self.region, &offer.region)
            && self.zone.as_ref().is_none_or(|zone| {
                offer.zones.is_empty() || offer.zones.iter().any(|of_offer| eq_ignore_case(of_offer, zone))
            })
    }
}

/// Prints `backend/region`, and the zone if there is one.
impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.backend, self.region)?;
        self.zone.as_ref().map_or(Ok(()), |zone| write!(f, "/{zone}"))
    }
}

/// One entry of `instances:`, which restricts a run to hosts by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstanceFilter {
    Name(String),
    Hostname(String),
    Number { fleet: String, instance_num: u32 },
}

/// Requirements of a job (or of a fleet, for new instances) on one instance. `None` means no requirement.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InstanceNeeds {
    /// `None`: any resources.
    pub resources: Option<ResourcesSpec>,
    pub max_price: Option<Price>,
    /// `Some(true)` spot only, `Some(false)` on-demand only.
    pub spot: Option<bool>,
    /// `spot` is not configured and only a default; the setting of the fleet has precedence.
    pub is_spot_default: bool,
    pub backends: Option<Vec<String>>,
    pub regions: Option<Vec<String>>,
    pub zones: Option<Vec<String>>,
    pub instance_types: Option<Vec<String>>,
    pub reservation: Option<String>,
    /// One entry per mount point: the locations of the volumes it may use.
    pub volumes: Vec<Vec<Location>>,
    pub instances: Option<Vec<InstanceFilter>>,
    /// Locations to avoid, and instances.
    pub avoid_locations: Vec<Location>,
    pub avoid_instances: Vec<InstanceId>,
    /// One of several nodes: uses whole instances, never a share.
    pub needs_whole_instance: bool,
    /// Image or plain process that it runs in.
    pub image: Option<ImageChoice>,
    /// Architectures of that image; empty: any.
    pub image_architectures: Vec<CpuArch>,
    /// Reasons why no Slurm cluster can run it.
    pub slurm_obstacles: Vec<SlurmObstacle>,
    /// Reasons why no pod can run it.
    pub pod_obstacles: Vec<PodObstacle>,
}

impl InstanceNeeds {
    /// Returns the needs of a job inside a fleet with these limits. Both must hold, and they are compared one after the
    /// other; only if one of them is a default, the other is used for both.
    pub fn with_fleet_limits<'a>(&'a self, limits: &Self) -> Cow<'a, Self> {
        if self.is_spot_default && !limits.is_spot_default {
            return Cow::Owned(Self { spot: limits.spot, ..self.clone() });
        }
        Cow::Borrowed(self)
    }
}

impl Offer {
    /// Returns `aws us-east-1 p4d.24xlarge`. The local instance has `local` in all parts, which is printed once.
    pub fn location_name(&self) -> String {
        let mut words = vec![self.backend.as_str(), self.region.as_str(), self.instance_type.as_str()];
        words.retain(|word| !word.is_empty());
        words.dedup();
        words.join(" ")
    }
}

/// Compares without case, as configurations spell regions, types and names.
fn eq_ignore_case(left: &str, right: &str) -> bool {
    left.eq_ignore_ascii_case(right)
}

fn is_listed(list: &[String], value: &str) -> bool {
    list.iter().any(|one| eq_ignore_case(one, value))
}

/// Returns all shortfalls of an offer. Empty means that it fits.
///
/// Ignores current use of the instance, which placement handles.
pub fn shortfalls(offer: &Offer, needs: &InstanceNeeds) -> Vec<Shortfall> {
    let mut short = Vec::new();
    compare(offer, offer.total_blocks, needs, &mut short);
    short
}

/// Returns the smallest number of blocks of `offer` that fits, or all shortfalls.
pub fn smallest_fit(offer: &Offer, needs: &InstanceNeeds) -> Result<u32, Vec<Shortfall>> {
    let mut short = Vec::new();
    let blocks = compare(offer, offer.total_blocks, needs, &mut short);
    if short.is_empty() { Ok(blocks) } else { Err(short) }
}

/// Receiver of shortfalls. Placement only counts them, to screen millions of pairs without building a message; the
/// rules below are shared by both uses.
pub(super) trait ShortfallSink {
    fn add(&mut self, make: impl FnOnce() -> Shortfall);
}

impl ShortfallSink for Vec<Shortfall> {
    fn add(&mut self, make: impl FnOnce() -> Shortfall) {
        self.push(make());
    }
}

impl ShortfallSink for u32 {
    fn add(&mut self, _: impl FnOnce() -> Shortfall) {
        *self += 1;
    }
}

/// Returns the number of blocks that was compared, which is the smallest that fits if any does. `total_blocks` is an
/// argument because a fleet, not the offer, determines the split of a new instance.
pub(super) fn compare(
    offer: &Offer,
    total_blocks: u32,
    needs: &InstanceNeeds,
    short: &mut impl ShortfallSink,
) -> u32 {
    compare_location(offer, needs, short);
    let requests = needs.resources.as_ref().map(|wanted| effective_resources(offer, wanted));
    let blocks =
        blocks::smallest_fitting(&offer.host, total_blocks, needs.needs_whole_instance, requests.as_deref());
    if let Some(resources) = requests.as_deref() {
        let share = blocks::host_share(&offer.host, blocks, total_blocks);
        compare_share(&share, resources, BackendKind::of(&offer.backend).can_be_larger(), short);
    }
    blocks
}

/// Returns the number of GPUs of its share that a job receives: no more than it requested.
pub fn granted_gpus(share: &HostShare<'_>, wanted: &ResourcesSpec) -> u32 {
    let most = wanted.gpu.as_ref().and_then(|gpu| gpu.count.max).unwrap_or(u32::MAX);
    u32::try_from(share.gpus.len()).unwrap_or(u32::MAX).min(most)
}

/// Returns the effective request, with defaults only where they apply.
fn effective_resources<'a>(offer: &Offer, wanted: &'a ResourcesSpec) -> Cow<'a, ResourcesSpec> {
    if BackendKind::of(&offer.backend).uses_default_resources() {
        return Cow::Borrowed(wanted);
    }
    Cow::Owned(without_defaults(wanted))
}

/// Returns the request without the properties that have their default value.
pub fn without_defaults(wanted: &ResourcesSpec) -> ResourcesSpec {
    let default = ResourcesSpec::default();
    let mut wanted = wanted.clone();
    if wanted.cpu.count == default.cpu.count {
        wanted.cpu.count = Range::default();
    }
    if wanted.memory == default.memory {
        wanted.memory = Range::default();
    }
    if wanted.disk == default.disk {
        wanted.disk = None;
    }
    wanted
}

fn compare_location(offer: &Offer, needs: &InstanceNeeds, short: &mut impl ShortfallSink) {
    let lists = [
        (&needs.backends, &offer.backend, "backend"),
        (&needs.regions, &offer.region, "region"),
        (&needs.instance_types, &offer.instance_type, "instance type"),
    ];
    for (list, has, what) in lists {
        if let Some(wanted) = list
            && !is_listed(wanted, has)
        {
            short.add(|| Shortfall::NotListed { what, wanted: wanted.clone(), has: has.clone() });
        }
    }
    if let Some(wanted) = &needs.zones
        && !offer.zones.iter().any(|zone| is_listed(wanted, zone))
    {
        let has = || offer.zones.join(", ");
        short.add(|| Shortfall::NotListed { what: "zone", wanted: wanted.clone(), has: has() });
    }
    if let Some(max) = needs.max_price
        && offer.price > max
    {
        short.add(|| Shortfall::Price { max, costs: offer.price });
    }
    if let Some(spot) = needs.spot
        && spot != offer.host.spot
    {
        short.add(|| Shortfall::Spot { wanted: spot });
    }
    if let Some(wanted) = &needs.reservation
        && offer.reservation.as_ref() != Some(wanted)
    {
        short.add(|| Shortfall::Reservation { wanted: wanted.clone(), has: offer.reservation.clone() });
    }
    let kind = BackendKind::of(&offer.backend);
    if kind == BackendKind::Queue {
        for &what in &needs.slurm_obstacles {
            short.add(|| Shortfall::NotOnSlurm { what });
        }
    }
    if kind == BackendKind::Pods {
        let allows_privileged = offer.host.runtimes.as_ref().is_some_and(Runtimes::allow_privileged_pods);
        for &what in &needs.pod_obstacles {
            if what != PodObstacle::Privileged || !allows_privileged {
                short.add(|| Shortfall::NotInPod { what });
            }
        }
    }
    if let Some(location) = needs.avoid_locations.iter().find(|location| location.covers(offer)) {
        short.add(|| Shortfall::Avoided { place: location.to_string() });
    }
    if let Some(image) = &needs.image
        && let Err(shortfall) = image.resolve_on(offer.host.runtimes.as_ref())
    {
        short.add(|| shortfall);
    }
    // An agent that has not reported its architecture rejects an image that it cannot run.
    if let (Some(ImageChoice::Image(image)), [first, ..]) =
        (&needs.image, needs.image_architectures.as_slice())
        && let Some(has) = offer.host.arch
        && !needs.image_architectures.contains(&has)
    {
        short.add(|| Shortfall::ImageArch { image: image.clone(), built_for: *first, has });
    }
    for volume in &needs.volumes {
        if !volume.iter().any(|location| location.admits(offer)) {
            short.add(|| Shortfall::Volume { at: volume.clone() });
        }
    }
}

/// Returns the shortfalls of a host. Ranges are inclusive, names ignore case, an unknown disk fits, and GPU filters are
/// skipped for a host without GPUs if none are required.
pub fn host_shortfalls(host: &HostSpec, wanted: &ResourcesSpec) -> Vec<Shortfall> {
    let mut short = Vec::new();
    compare_share(&blocks::host_share(host, 1, 1), wanted, false, &mut short);
    short
}

fn compare_share(
    host: &HostShare<'_>,
    wanted: &ResourcesSpec,
    may_be_larger: bool,
    short: &mut impl ShortfallSink,
) {
    if let Some(arch) = wanted.cpu.arch
        && host.arch != Some(arch)
    {
        short.add(|| Shortfall::CpuArch { wanted: arch, has: host.arch });
    }
    if !is_in_range(wanted.cpu.count, host.cpus, may_be_larger) {
        short.add(|| Shortfall::Cpus { wanted: wanted.cpu.count, has: host.cpus });
    }
    let memory = to_gb(host.memory_mib);
    if !is_in_range(wanted.memory, memory, may_be_larger) {
        short.add(|| Shortfall::Memory { wanted: wanted.memory, has: memory });
    }
    if let Some(disk) = &wanted.disk
        && host.disk_mib != 0
        && !is_in_range(disk.size, to_gb(host.disk_mib), may_be_larger)
    {
        short.add(|| Shortfall::Disk { wanted: disk.size, has: to_gb(host.disk_mib) });
    }
    if let Some(gpu) = &wanted.gpu {
        compare_gpus(host.gpus, gpu, may_be_larger, short);
    }
}

fn is_in_range<T: PartialOrd + Copy>(wanted: Range<T>, has: T, may_be_larger: bool) -> bool {
    if may_be_larger { wanted.min.is_none_or(|min| has >= min) } else { wanted.contains(has) }
}

fn compare_gpus(gpus: &[Gpu], wanted: &GpuSpec, may_be_larger: bool, short: &mut impl ShortfallSink) {
    let count = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
    if gpus.is_empty() && wanted.count.min.unwrap_or(0) == 0 {
        return;
    }
    if !is_in_range(wanted.count, count, may_be_larger) {
        short.add(|| Shortfall::GpuCount { wanted: wanted.count, has: count });
    }
    // Every GPU must match, because the agent assigns any of them.
    if let Some(vendor) = wanted.vendor
        && let Some(other) = gpus.iter().find(|gpu| gpu.vendor != vendor)
    {
        short.add(|| Shortfall::GpuVendor { wanted: vendor, has: other.vendor });
    }
    if let Some(names) = wanted.name.as_ref().filter(|names| !names.is_empty())
        && let Some(other) = distinct_gpus(gpus)
            .find(|gpu| !names.iter().any(|name| gpu::matches_request(name, &gpu.name, gpu.memory_mib)))
    {
        short.add(|| Shortfall::GpuName { wanted: names.clone(), has: other.name.clone() });
    }
    if let Some(memory) = wanted.memory
        && let Some(other) = gpus.iter().find(|gpu| !memory.contains(to_gb(gpu.memory_mib)))
    {
        short.add(|| Shortfall::GpuMemory { wanted: memory, has: to_gb(other.memory_mib) });
    }
    if let Some(total) = wanted.total_memory {
        let has = to_gb(gpus.iter().map(|gpu| gpu.memory_mib).sum());
        if !gpus.is_empty() && !is_in_range(total, has, may_be_larger) {
            short.add(|| Shortfall::GpuTotalMemory { wanted: total, has });
        }
    }
    if let Some(at_least) = wanted.compute_capability
        && let Some(other) = gpus.iter().find(|gpu| gpu.compute_capability.is_none_or(|has| has < at_least))
    {
        short.add(|| Shortfall::ComputeCapability { at_least, has: other.compute_capability });
    }
}

/// Returns one of each run of equal GPUs. Parsing names is the expensive part of matching, and a host's GPUs are mostly
/// identical.
fn distinct_gpus(gpus: &[Gpu]) -> impl Iterator<Item = &Gpu> {
    gpus.chunk_by(|one, next| one == next).filter_map(<[Gpu]>::first)
}

pub(super) fn to_gb(mib: u64) -> f64 {
    mib as f64 / MIB_PER_GB
}

/// Returns whether an entry of `instances:` names this instance.
pub fn is_instance_selected(
    wanted: &[InstanceFilter],
    name: &str,
    hostname: Option<&str>,
    fleet: &str,
    number: u32,
) -> bool {
    wanted.iter().any(|one| match one {
        InstanceFilter::Name(wanted) => wanted == name,
        InstanceFilter::Hostname(wanted) => hostname == Some(wanted.as_str()),
        InstanceFilter::Number { fleet: of, instance_num } => of == fleet && *instance_num == number,
    })
}
