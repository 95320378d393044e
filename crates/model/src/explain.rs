//! Shortfalls: every reason why a job does not start on an instance or offer, as data and as text.
//!
//! `why`, the plan table and the UI render these; such messages are not written elsewhere.

mod patch;
mod refusal;

use std::fmt::{self, Display};

use serde::{Serialize, Serializer};

pub use self::{
    patch::Patch,
    refusal::{Refusal, refusal_summary},
};
use crate::{
    id::SubmissionId,
    money::Price,
    plan::{
        budget::BudgetExcess,
        offers::{Availability, Location},
        pods::PodObstacle,
        quota::QuotaExcess,
        slurm::SlurmObstacle,
    },
    resources::{CpuArch, Gb, GpuVendor, Range},
};

/// One reason. Numbers show what was requested and what is available.
#[derive(Clone, Debug, PartialEq)]
pub enum Shortfall {
    CpuArch {
        wanted: CpuArch,
        has: Option<CpuArch>,
    },
    Cpus {
        wanted: Range<u32>,
        has: u32,
    },
    Memory {
        wanted: Range<Gb>,
        has: Gb,
    },
    Disk {
        wanted: Range<Gb>,
        has: Gb,
    },
    GpuCount {
        wanted: Range<u32>,
        has: u32,
    },
    GpuVendor {
        wanted: GpuVendor,
        has: GpuVendor,
    },
    GpuName {
        wanted: Vec<String>,
        has: String,
    },
    GpuMemory {
        wanted: Range<Gb>,
        has: Gb,
    },
    GpuTotalMemory {
        wanted: Range<Gb>,
        has: Gb,
    },
    ComputeCapability {
        at_least: (u32, u32),
        has: Option<(u32, u32)>,
    },
    /// A list of the configuration (backends, regions, zones, instance types) excludes it.
    NotListed {
        what: &'static str,
        wanted: Vec<String>,
        has: String,
    },
    Price {
        max: Price,
        costs: Price,
    },
    Spot {
        wanted: bool,
    },
    Reservation {
        wanted: String,
        has: Option<String>,
    },
    Volume {
        at: Vec<Location>,
    },
    /// `instances:` names others.
    NotNamed,
    /// The job names an image, and the host has no container engine.
    NoContainers {
        image: String,
    },
    /// The job names an image, and the host's container engine does not respond now.
    EngineUnavailable {
        image: String,
        why: String,
    },
    /// The job names an image that has no build for the CPUs of the host.
    ImageArch {
        image: String,
        built_for: CpuArch,
        has: CpuArch,
    },
    /// The job is a plain process, and the host only allows containers.
    NoProcesses,
    /// The job names no image, the host only allows containers, and no default image is set.
    NoDefaultImage,
    /// The job is a plain process, and the host's owner refuses them.
    ProcessesRefused,
    /// The job is a plain process, and the host's agent has not reported its support for those yet.
    ProcessesUnknown,
    /// The job is a plain process, and the host cannot isolate it from other tasks and from the agent.
    NotConfined {
        why: String,
    },
    /// A managed job was lost there, and tries other locations first.
    Avoided {
        place: String,
    },
    /// `fleets:` names it, and the project can use no fleet of that name; `known`: those that it can use.
    FleetMissing {
        known: Vec<String>,
    },
    /// `fleets:` names others, or the run already uses another.
    FleetNotNamed,
    /// Several nodes need `placement: cluster`.
    NotCluster,
    /// A Slurm cluster runs it, and cannot run such jobs.
    NotOnSlurm {
        what: SlurmObstacle,
    },
    /// It would run in a pod, which cannot run such jobs.
    NotInPod {
        what: PodObstacle,
    },
    /// The node of a cluster takes no pods now.
    NodeClosed {
        why: String,
    },
    /// `creation_policy: reuse` forbids a new instance.
    ReuseOnly,
    /// The backend reports no capacity.
    Unavailable {
        availability: Availability,
    },
    /// Other jobs use it.
    Busy {
        wanted: u32,
        free: u32,
        total: u32,
    },
    /// Blocks that became free are kept for a job for which others were preempted.
    Promised,
    /// Reserved for an older job.
    Reserved {
        by: SubmissionId,
    },
    Unreachable,
    Unhealthy,
    NotReady,
    Draining,
    /// `nodes.max` of the fleet is reached. `frees`: some of its instances are terminated when they are idle.
    FleetFull {
        max: u32,
        wanted: u32,
        frees: bool,
    },
    /// Not that many whole instances in one backend and region.
    TooFewNodes {
        wanted: u32,
        fit: u32,
        could: u32,
    },
    /// Another job of the run selects the fleet first.
    FleetNotChosen,
    /// A quota of the project or of the member.
    OverQuota(QuotaExcess),
    /// A budget of the project or of the member is used up.
    OverBudget(BudgetExcess),
    NoFleets,
    /// The fleet has no instances and creates none.
    FleetEmpty,
    /// No backend offers anything to create.
    NoOffers,
    /// `blocks:` of the fleet does not divide its CPUs and GPUs.
    UnevenBlocks {
        blocks: u32,
    },
}

impl Shortfall {
    /// Returns whether waiting alone may resolve it; the others need a change of the request or of the capacity.
    pub const fn is_temporary(&self) -> bool {
        match self {
            Self::Busy { .. }
            | Self::Reserved { .. }
            | Self::Promised
            | Self::Unreachable
            | Self::Unhealthy
            | Self::EngineUnavailable { .. }
            | Self::ProcessesUnknown
            | Self::NotReady
            | Self::Draining
            | Self::FleetNotChosen
            | Self::OverBudget(_) => true,
            Self::FleetFull { frees, .. } => *frees,
            Self::OverQuota(excess) => excess.passes(),
            Self::TooFewNodes { wanted, could, .. } => *could >= *wanted,
            Self::CpuArch { .. }
            | Self::Cpus { .. }
            | Self::Memory { .. }
            | Self::Disk { .. }
            | Self::GpuCount { .. }
            | Self::GpuVendor { .. }
            | Self::GpuName { .. }
            | Self::GpuMemory { .. }
            | Self::GpuTotalMemory { .. }
            | Self::ComputeCapability { .. }
            | Self::NotListed { .. }
            | Self::Price { .. }
            | Self::Spot { .. }
            | Self::Reservation { .. }
            | Self::Volume { .. }
            | Self::NotNamed
            | Self::NoContainers { .. }
            | Self::ImageArch { .. }
            | Self::NoProcesses
            | Self::NoDefaultImage
            | Self::ProcessesRefused
            | Self::NotConfined { .. }
            | Self::Avoided { .. }
            | Self::FleetMissing { .. }
            | Self::FleetNotNamed
            | Self::NotCluster
            | Self::NotOnSlurm { .. }
            | Self::NotInPod { .. }
            | Self::NodeClosed { .. }
            | Self::ReuseOnly
            | Self::Unavailable { .. }
            | Self::NoFleets
            | Self::FleetEmpty
            | Self::NoOffers
            | Self::UnevenBlocks { .. } => false,
        }
    }

    /// Returns whether time never resolves it: the existing instances do not match the request. The others may pass, or
    /// another host, offer or volume may appear.
    pub const fn is_permanent(&self) -> bool {
        match self {
            Self::CpuArch { .. }
            | Self::Cpus { .. }
            | Self::Memory { .. }
            | Self::Disk { .. }
            | Self::GpuCount { .. }
            | Self::GpuVendor { .. }
            | Self::GpuName { .. }
            | Self::GpuMemory { .. }
            | Self::GpuTotalMemory { .. }
            | Self::ComputeCapability { .. }
            | Self::NotListed { .. }
            | Self::Spot { .. }
            | Self::NoContainers { .. }
            | Self::ImageArch { .. }
            | Self::NoProcesses
            | Self::NoDefaultImage
            | Self::ProcessesRefused
            | Self::FleetMissing { .. }
            | Self::FleetNotNamed
            | Self::NotCluster
            | Self::NotOnSlurm { .. }
            | Self::NotInPod { .. } => true,
            Self::EngineUnavailable { .. }
            | Self::NodeClosed { .. }
            | Self::ProcessesUnknown
            | Self::NotConfined { .. }
            | Self::Price { .. }
            | Self::Reservation { .. }
            | Self::Volume { .. }
            | Self::NotNamed
            | Self::Avoided { .. }
            | Self::ReuseOnly
            | Self::Unavailable { .. }
            | Self::Busy { .. }
            | Self::Reserved { .. }
            | Self::Promised
            | Self::Unreachable
            | Self::Unhealthy
            | Self::NotReady
            | Self::Draining
            | Self::FleetFull { .. }
            | Self::TooFewNodes { .. }
            | Self::FleetNotChosen
            | Self::OverQuota(_)
            | Self::OverBudget(_)
            | Self::NoFleets
            | Self::FleetEmpty
            | Self::NoOffers
            | Self::UnevenBlocks { .. } => false,
        }
    }

    /// Returns a stable name for programs.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::CpuArch { .. } => "cpu_arch",
            Self::Cpus { .. } => "cpus",
            Self::Memory { .. } => "memory",
            Self::Disk { .. } => "disk",
            Self::GpuCount { .. } => "gpu_count",
            Self::GpuVendor { .. } => "gpu_vendor",
            Self::GpuName { .. } => "gpu_name",
            Self::GpuMemory { .. } => "gpu_memory",
            Self::GpuTotalMemory { .. } => "gpu_total_memory",
            Self::ComputeCapability { .. } => "compute_capability",
            Self::NotListed { .. } => "not_listed",
            Self::Price { .. } => "price",
            Self::Spot { .. } => "spot",
            Self::Reservation { .. } => "reservation",
            Self::Volume { .. } => "volume",
            Self::NotNamed => "not_named",
            Self::NoContainers { .. } => "no_containers",
            Self::EngineUnavailable { .. } => "engine_away",
            Self::ImageArch { .. } => "image_arch",
            Self::NoProcesses => "no_processes",
            Self::NoDefaultImage => "no_default_image",
            Self::ProcessesRefused => "processes_refused",
            Self::ProcessesUnknown => "processes_unknown",
            Self::NotConfined { .. } => "not_confined",
            Self::Avoided { .. } => "avoided",
            Self::FleetMissing { .. } => "fleet_missing",
            Self::FleetNotNamed => "fleet_not_named",
            Self::NotCluster => "not_cluster",
            Self::NotOnSlurm { .. } => "not_on_slurm",
            Self::NotInPod { .. } => "not_in_pod",
            Self::NodeClosed { .. } => "node_closed",
            Self::ReuseOnly => "reuse_only",
            Self::Unavailable { .. } => "unavailable",
            Self::Busy { .. } => "busy",
            Self::Reserved { .. } => "reserved",
            Self::Promised => "promised",
            Self::Unreachable => "unreachable",
            Self::Unhealthy => "unhealthy",
            Self::NotReady => "not_ready",
            Self::Draining => "draining",
            Self::FleetFull { .. } => "fleet_full",
            Self::TooFewNodes { .. } => "too_few_nodes",
            Self::FleetNotChosen => "fleet_not_chosen",
            Self::OverQuota(_) => "over_quota",
            Self::OverBudget(_) => "over_budget",
            Self::NoFleets => "no_fleets",
            Self::FleetEmpty => "fleet_empty",
            Self::NoOffers => "no_offers",
            Self::UnevenBlocks { .. } => "uneven",
        }
    }

    /// Returns what would make it fit; a clause, no full stop.
    pub fn cure(&self) -> String {
        match self {
            Self::CpuArch { has: Some(has), .. } => format!("set `cpu: {}`", format_arch(*has)),
            Self::CpuArch { has: None, .. } => "remove the architecture from `cpu`".into(),
            Self::Cpus { wanted, has } => format_lower("cpu", wanted.min, *has, |n| n.to_string()),
            Self::Memory { wanted, has } => format_lower("memory", wanted.min, *has, format_gb),
            Self::Disk { wanted, has } => format_lower("disk", wanted.min, *has, format_gb),
            Self::GpuCount { has: 0, .. } => "use a fleet or backend with GPUs, or set `gpu: 0`".into(),
            Self::GpuCount { wanted, has } => {
                format_lower("the GPU count", wanted.min, *has, |n| n.to_string())
            }
            Self::GpuVendor { has, .. } => format!("set `gpu: {}`", has.as_str()),
            Self::GpuName { has, .. } if has.is_empty() => "remove the GPU names".into(),
            Self::GpuName { has, .. } => format!("add `{has}` to the GPU names"),
            Self::GpuMemory { has, .. } | Self::GpuTotalMemory { has, .. } if *has == 0.0 => {
                "request the GPU by name".into()
            }
            Self::GpuMemory { wanted, has } => format_lower("GPU memory", wanted.min, *has, format_gb),
            Self::GpuTotalMemory { wanted, has } => {
                format_lower("total GPU memory", wanted.min, *has, format_gb)
            }
            Self::ComputeCapability { has: Some((major, minor)), .. } => {
                format!("lower `compute_capability` to {major}.{minor}")
            }
            Self::ComputeCapability { has: None, .. } => "remove `compute_capability`".into(),
            Self::NotListed { what, has, .. } if has.is_empty() => format!("remove the {what} list"),
            Self::NotListed { what, has, .. } => {
                format!("add `{has}` to the {what} list, or remove the list")
            }
            Self::Price { costs, .. } => match costs.known_dollars() {
                Some(dollars) => format!("raise `max_price` to {dollars}"),
                None => "remove `max_price`, because the price is not known".into(),
            },
            Self::Spot { .. } => "set `spot_policy: auto`".into(),
            Self::Reservation { has: None, .. } => "remove `reservation`".into(),
            Self::Reservation { has: Some(has), .. } => format!("set `reservation: {has}`"),
            Self::Volume { .. } => "use a volume in the same location".into(),
            Self::NotNamed => "add it to `instances`".into(),
            Self::NoContainers { .. } => {
                "install Docker or Podman on it, or set `image: none` to run as a plain process".into()
            }
            Self::ImageArch { built_for, has, .. } => format!(
                "use an image for {} CPUs, or an instance with {} CPUs",
                format_arch(*has),
                format_arch(*built_for)
            ),
            Self::EngineUnavailable { .. } => "restart the container engine on it".into(),
            Self::NoProcesses => "set `image` to a container image".into(),
            Self::NoDefaultImage => {
                "set `image`, or a default image (`windlass project update --default-image`, `windlass server --default-image`)".into()
            }
            Self::ProcessesRefused => "set `image` to a container image, or use another fleet".into(),
            Self::ProcessesUnknown => "wait until the server has updated the agent there".into(),
            Self::NotConfined { .. } => {
                "set `image` to a container image, run the agent as root, or allow user namespaces there".into()
            }
            Self::Avoided { .. } => "it is used again if nothing else fits".into(),
            Self::FleetMissing { known } if known.is_empty() => "create it".into(),
            Self::FleetMissing { known } => {
                format!("create it, or use one of `{}`", known.join("`, `"))
            }
            Self::FleetNotNamed => "add the fleet to `fleets`".into(),
            Self::NotCluster => "use a fleet with `placement: cluster`".into(),
            Self::NotOnSlurm { what } => what.cure().into(),
            Self::NotInPod { what } => what.cure().into(),
            Self::NodeClosed { .. } => "ask the cluster's administrator, or use another node".into(),
            Self::ReuseOnly => "set `creation_policy: reuse-or-create`".into(),
            Self::Unavailable { availability } => match availability {
                Availability::Busy => "another fleet has this machine: wait until it is free, or use that fleet".into(),
                Availability::NoQuota => "raise your quota there, or try another region or instance type".into(),
                Availability::NoBalance => "add credit to your account there, or use another backend".into(),
                Availability::Unknown
                | Availability::Available
                | Availability::NotAvailable
                | Availability::Idle => "try another region or instance type, or set `retry`".into(),
            },
            Self::Busy { .. } => "wait until jobs on it end".into(),
            Self::Reserved { .. } => "wait until that job has started".to_owned(),
            Self::Promised => "wait until the job has started for which others were preempted".to_owned(),
            Self::Unreachable => "check its network and agent".into(),
            Self::Unhealthy => "check its devices".into(),
            Self::NotReady => "wait until it is ready".into(),
            Self::Draining => "wait for another instance".into(),
            Self::FleetFull { frees: true, .. } => {
                "raise `nodes.max` of the fleet, or wait until an instance ends".into()
            }
            Self::FleetFull { frees: false, .. } => {
                "raise `nodes.max` of the fleet, or delete one of its instances: none is terminated automatically".into()
            }
            Self::TooFewNodes { wanted, could, .. } if could >= wanted => {
                "wait until jobs on the others end".into()
            }
            Self::TooFewNodes { could, .. } => {
                format!("set `nodes` to at most {could}, or add instances to the fleet")
            }
            Self::FleetNotChosen => "wait for job 0 of replica 0".into(),
            Self::OverQuota(excess) if excess.passes() => {
                "wait until others of your jobs end; `windlass quota` shows the quotas".into()
            }
            Self::OverQuota(_) => "request less, or have an admin raise it with `windlass quota set`".into(),
            Self::OverBudget(excess) => {
                format!("wait for the next {}, or have an admin raise it with `windlass budget set`", excess.period)
            }
            Self::NoFleets => "create a fleet".into(),
            Self::FleetEmpty => "add hosts to the fleet".into(),
            Self::NoOffers => "add a backend to the project".into(),
            Self::UnevenBlocks { .. } => "set `blocks: auto` in the fleet".into(),
        }
    }
}

fn format_arch(arch: CpuArch) -> &'static str {
    match arch {
        CpuArch::X86 => "x86",
        CpuArch::Arm => "arm",
    }
}

fn format_gb(size: Gb) -> String {
    format!("{}GB", (size * 100.0).round() / 100.0)
}

fn format_lower<T: PartialOrd + Copy>(
    what: &str,
    min: Option<T>,
    has: T,
    show: impl Fn(T) -> String,
) -> String {
    if min.is_some_and(|min| has < min) {
        format!("lower {what} to {}", show(has))
    } else {
        format!("raise the upper limit of {what} to {}", show(has))
    }
}

fn format_range<T: PartialOrd + Copy>(range: &Range<T>, show: impl Fn(T) -> String) -> String {
    match (range.min, range.max) {
        (Some(min), Some(max)) if min == max => format!("exactly {}", show(min)),
        (Some(min), Some(max)) => format!("{} to {}", show(min), show(max)),
        (Some(min), None) => format!("at least {}", show(min)),
        (None, Some(max)) => format!("at most {}", show(max)),
        (None, None) => "any".into(),
    }
}

/// Formats a count, such as `exactly 1 GPU` or `2 to 4 GPUs`.
fn format_count(wanted: &Range<u32>, noun: &str) -> String {
    let last = wanted.max.or(wanted.min);
    format!(
        "{} {noun}{}",
        format_range(wanted, |n: u32| n.to_string()),
        if last == Some(1) { "" } else { "s" }
    )
}

/// Prints a clause with numbers, lower case and without a full stop: "needs at least 8 CPUs, has 2".
impl Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CpuArch { wanted, has } => {
                write!(
                    f,
                    "needs {} CPUs, has {}",
                    format_arch(*wanted),
                    has.map_or("an unknown architecture", format_arch)
                )
            }
            Self::Cpus { wanted, has } => write!(f, "needs {}, has {has}", format_count(wanted, "CPU")),
            Self::Memory { wanted, has } => {
                write!(f, "needs {} of memory, has {}", format_range(wanted, format_gb), format_gb(*has))
            }
            Self::Disk { wanted, has } => {
                write!(f, "needs {} of disk, has {}", format_range(wanted, format_gb), format_gb(*has))
            }
            Self::GpuCount { wanted, has } => write!(f, "needs {}, has {has}", format_count(wanted, "GPU")),
            Self::GpuVendor { wanted, has } => {
                write!(f, "needs {} GPUs, has {}", wanted.as_str(), has.as_str())
            }
            Self::GpuName { wanted, has } => {
                let has = if has.is_empty() { "an unknown model" } else { has };
                write!(f, "needs GPU {}, has {has}", wanted.join(" or "))
            }
            Self::GpuMemory { wanted, has } if *has == 0.0 => {
                write!(
                    f,
                    "needs {} of memory per GPU, but the memory of the GPU is unknown",
                    format_range(wanted, format_gb)
                )
            }
            Self::GpuMemory { wanted, has } => {
                write!(
                    f,
                    "needs {} of memory per GPU, has {}",
                    format_range(wanted, format_gb),
                    format_gb(*has)
                )
            }
            Self::GpuTotalMemory { wanted, has } => {
                write!(
                    f,
                    "needs {} of GPU memory in total, has {}",
                    format_range(wanted, format_gb),
                    format_gb(*has)
                )
            }
            Self::ComputeCapability { at_least: (major, minor), has } => {
                write!(f, "needs compute capability {major}.{minor}, has ")?;
                match has {
                    Some((major, minor)) => write!(f, "{major}.{minor}"),
                    None => f.write_str("an unknown one"),
                }
            }
            Self::NotListed { what, wanted, has } if has.is_empty() => {
                write!(f, "needs {what} {}, has an unknown one", wanted.join(" or "))
            }
            Self::NotListed { what, wanted, has } => {
                write!(f, "needs {what} {}, is {has}", wanted.join(" or "))
            }
            Self::Price { max, costs } => write!(f, "costs {costs}, at most {max} is allowed"),
            Self::Spot { wanted: true } => f.write_str("needs spot, is on-demand"),
            Self::Spot { wanted: false } => f.write_str("needs on-demand, is spot"),
            Self::Reservation { wanted, has } => {
                write!(f, "needs reservation {wanted}, has {}", has.as_deref().unwrap_or("none"))
            }
            Self::Volume { at } => write!(f, "its volumes are in {}", format_locations(at)),
            Self::NotNamed => f.write_str("is not one of the named instances"),
            Self::NoContainers { image } => {
                write!(f, "needs image {image}, and only plain processes run there")
            }
            Self::EngineUnavailable { image, why } => {
                write!(f, "needs image {image}, but the container engine there is not available: {why}")
            }
            Self::ImageArch { image, built_for, has } => write!(
                f,
                "needs {} CPUs for image {image}, has {}",
                format_arch(*built_for),
                format_arch(*has)
            ),
            Self::NoProcesses => f.write_str("has `image: none`, but only containers run there"),
            Self::NoDefaultImage => f.write_str("has no image, but only containers run there"),
            Self::ProcessesRefused => {
                f.write_str("is a plain process, but the instance refuses plain processes")
            }
            Self::ProcessesUnknown => f.write_str(
                "is a plain process, but the agent there has not reported yet how it confines them",
            ),
            Self::NotConfined { why } => {
                write!(f, "is a plain process, and cannot be confined there: {why}")
            }
            Self::Avoided { place } => write!(f, "is avoided for now: the last attempt at {place} failed"),
            Self::FleetMissing { .. } => f.write_str("does not exist, or the project may not use it"),
            Self::FleetNotNamed => f.write_str("belongs to a fleet that this run does not use"),
            Self::NotCluster => f.write_str("belongs to a fleet without `placement: cluster`"),
            Self::NotOnSlurm { what } => write!(f, "is a Slurm cluster, which cannot run {}", what.as_str()),
            Self::NotInPod { what } => write!(f, "is a pod, which cannot run {}", what.as_str()),
            Self::NodeClosed { why } => write!(f, "is a node that takes no pods now: {why}"),
            Self::ReuseOnly => f.write_str("would be a new instance, but only existing ones may be used"),
            Self::Unavailable { availability } => write!(f, "is {}", availability.as_str()),
            Self::Busy { wanted, free, total: 1 } if *wanted == 1 && *free == 0 => f.write_str("is busy"),
            Self::Busy { wanted, free, total } => {
                write!(f, "needs {wanted} of {total} blocks, {free} free")
            }
            Self::Reserved { .. } => f.write_str("is reserved for an older job"),
            Self::Promised => f.write_str("is kept for a job for which others were preempted"),
            Self::Unreachable => f.write_str("is unreachable"),
            Self::Unhealthy => f.write_str("is unhealthy"),
            Self::NotReady => f.write_str("is still being provisioned"),
            Self::Draining => f.write_str("takes no new jobs"),
            Self::FleetFull { max, wanted, .. } => {
                write!(f, "the fleet is limited to {max} instances, and {wanted} more would exceed that")
            }
            Self::TooFewNodes { wanted, fit, could } => write!(
                f,
                "needs {wanted} whole instances in one location: {fit} free now, at most {could} possible"
            ),
            Self::FleetNotChosen => f.write_str("waits until job 0 of replica 0 has chosen the fleet"),
            Self::OverQuota(excess) => excess.fmt(f),
            Self::OverBudget(excess) => excess.fmt(f),
            Self::NoFleets => f.write_str("no fleet exists that this run may use"),
            Self::FleetEmpty => f.write_str("has no instances and creates none"),
            Self::NoOffers => f.write_str("no backend offers any instance"),
            Self::UnevenBlocks { blocks } => write!(f, "cannot be split evenly into {blocks} blocks"),
        }
    }
}

fn format_locations(at: &[Location]) -> String {
    let place = |place: &Location| match &place.zone {
        Some(zone) => format!("{} {} {zone}", place.backend, place.region),
        None => format!("{} {}", place.backend, place.region),
    };
    at.iter().map(place).collect::<Vec<_>>().join(" or ")
}

/// Serialises `{kind, message, cure, passes}`, which the API and the UI show, and `patch` if there is one.
impl Serialize for Shortfall {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct;
        let patch = self.patch();
        let mut fields = serializer.serialize_struct("Shortfall", 4 + usize::from(patch.is_some()))?;
        fields.serialize_field("kind", self.kind())?;
        fields.serialize_field("message", &self.to_string())?;
        fields.serialize_field("cure", &self.cure())?;
        fields.serialize_field("passes", &self.is_temporary())?;
        if let Some(patch) = patch {
            fields.serialize_field("patch", &patch)?;
        }
        fields.end()
    }
}
