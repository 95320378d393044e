//! A run inside a fleet: what both allow. Nothing both allow means that the fleet makes no new instance for it.

use std::fmt;

use super::{
    fleet::Fleet,
    name::Tags,
    profile::{Provisioning, SpotPolicy},
    units::{Idle, Positive},
};
use crate::resources::{CpuSpec, DiskSpec, Gb, GpuSpec, Range, ResourcesSpec};

/// What a run and its fleet do not agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Clash {
    Backends,
    Regions,
    AvailabilityZones,
    InstanceTypes,
    Reservation,
    SpotPolicy,
    CpuArch,
    CpuCount,
    Memory,
    GpuVendor,
    GpuName,
    GpuCount,
    GpuMemory,
    GpuTotalMemory,
    Disk,
}

impl fmt::Display for Clash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Backends => "no backend is in both lists",
            Self::Regions => "no region is in both lists",
            Self::AvailabilityZones => "no availability zone is in both lists",
            Self::InstanceTypes => "no instance type is in both lists",
            Self::Reservation => "the reservations differ",
            Self::SpotPolicy => "one wants spot, the other on demand",
            Self::CpuArch => "the CPU architectures differ",
            Self::CpuCount => "no number of CPUs suits both",
            Self::Memory => "no amount of memory suits both",
            Self::GpuVendor => "the GPU vendors differ",
            Self::GpuName => "no GPU is in both lists",
            Self::GpuCount => "no number of GPUs suits both",
            Self::GpuMemory => "no amount of GPU memory suits both",
            Self::GpuTotalMemory => "no total of GPU memory suits both",
            Self::Disk => "no size of disk suits both",
        })
    }
}

/// What may be asked of backends for this run in this fleet.
#[derive(Clone, Debug, PartialEq)]
pub struct Within {
    pub provisioning: Provisioning,
    pub resources: ResourcesSpec,
}

/// What the run and the fleet both allow, or everything they do not agree on.
pub fn within(fleet: &Fleet, run: &Provisioning, resources: &ResourcesSpec) -> Result<Within, Vec<Clash>> {
    let mut clashes = Vec::new();
    let provisioning = provisioning(&fleet.provisioning, run, &mut clashes);
    let resources = match &fleet.resources {
        None => resources.clone(),
        Some(of_fleet) => both_resources(of_fleet, resources, &mut clashes),
    };
    if clashes.is_empty() { Ok(Within { provisioning, resources }) } else { Err(clashes) }
}

fn provisioning(fleet: &Provisioning, run: &Provisioning, clashes: &mut Vec<Clash>) -> Provisioning {
    let folded = |a: &String, b: &String| a.eq_ignore_ascii_case(b);
    let reservation = match (&fleet.reservation, &run.reservation) {
        (Some(a), Some(b)) if a != b => clash(Clash::Reservation, clashes),
        (a, b) => b.clone().or_else(|| a.clone()),
    };
    let spot_policy = match (fleet.spot_policy, run.spot_policy) {
        (None | Some(SpotPolicy::Auto), Some(policy)) | (Some(policy), None | Some(SpotPolicy::Auto)) => {
            Some(policy)
        }
        (None, None) => None,
        (Some(a), Some(b)) if a == b => Some(a),
        (Some(_), Some(_)) => clash(Clash::SpotPolicy, clashes),
    };
    Provisioning {
        backends: lists(&fleet.backends, &run.backends, PartialEq::eq, Clash::Backends, clashes),
        regions: lists(&fleet.regions, &run.regions, folded, Clash::Regions, clashes),
        availability_zones: lists(
            &fleet.availability_zones,
            &run.availability_zones,
            folded,
            Clash::AvailabilityZones,
            clashes,
        ),
        instance_types: lists(
            &fleet.instance_types,
            &run.instance_types,
            folded,
            Clash::InstanceTypes,
            clashes,
        ),
        reservation,
        spot_policy,
        retry: run.retry.clone(),
        max_price: lower(fleet.max_price, run.max_price),
        idle_duration: Idle(shorter(fleet.idle_duration.0, run.idle_duration.0)),
        tags: merged_tags(fleet.tags.as_ref(), run.tags.as_ref()),
        backend_options: run.backend_options.clone().or_else(|| fleet.backend_options.clone()),
    }
}

fn clash<T>(what: Clash, clashes: &mut Vec<Clash>) -> Option<T> {
    clashes.push(what);
    None
}

/// What is in both lists, as the run spells it. No list is every list.
fn lists<T: Clone>(
    fleet: &Option<Vec<T>>,
    run: &Option<Vec<T>>,
    same: impl Fn(&T, &T) -> bool,
    what: Clash,
    clashes: &mut Vec<Clash>,
) -> Option<Vec<T>> {
    let (Some(of_fleet), Some(of_run)) = (fleet, run) else { return run.clone().or_else(|| fleet.clone()) };
    let both: Vec<T> = of_run.iter().filter(|a| of_fleet.iter().any(|b| same(a, b))).cloned().collect();
    if both.is_empty() { clash(what, clashes) } else { Some(both) }
}

fn lower(a: Option<Positive>, b: Option<Positive>) -> Option<Positive> {
    match (a, b) {
        (Some(a), Some(b)) => Some(if a < b { a } else { b }),
        (a, b) => a.or(b),
    }
}

/// The shorter of two idle times; -1 is for ever.
fn shorter(a: Option<i64>, b: Option<i64>) -> Option<i64> {
    match (a, b) {
        (Some(-1), Some(other)) | (Some(other), Some(-1)) => Some(other),
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

fn merged_tags(fleet: Option<&Tags>, run: Option<&Tags>) -> Option<Tags> {
    let (Some(of_fleet), Some(of_run)) = (fleet, run) else { return run.or(fleet).cloned() };
    let mut tags = of_fleet.0.clone();
    tags.extend(of_run.0.clone());
    Some(Tags(tags))
}

fn both_ranges<T: PartialOrd + Copy>(
    a: &Range<T>,
    b: &Range<T>,
    what: Clash,
    clashes: &mut Vec<Clash>,
) -> Range<T> {
    a.intersect(b).unwrap_or_else(|| {
        clashes.push(what);
        *b
    })
}

/// Ranges that may be absent: an absent one allows everything.
fn maybe_ranges(
    a: Option<Range<Gb>>,
    b: Option<Range<Gb>>,
    what: Clash,
    clashes: &mut Vec<Clash>,
) -> Option<Range<Gb>> {
    match (a, b) {
        (Some(a), Some(b)) => Some(both_ranges(&a, &b, what, clashes)),
        (a, b) => a.or(b),
    }
}

/// Values that must be equal where both are set.
fn same<T: PartialEq + Copy>(a: Option<T>, b: Option<T>, what: Clash, clashes: &mut Vec<Clash>) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) if a != b => clash(what, clashes),
        (a, b) => b.or(a),
    }
}

fn both_resources(fleet: &ResourcesSpec, run: &ResourcesSpec, clashes: &mut Vec<Clash>) -> ResourcesSpec {
    let cpu = CpuSpec {
        arch: same(fleet.cpu.arch, run.cpu.arch, Clash::CpuArch, clashes),
        count: both_ranges(&fleet.cpu.count, &run.cpu.count, Clash::CpuCount, clashes),
    };
    let memory = both_ranges(&fleet.memory, &run.memory, Clash::Memory, clashes);
    let gpu = match (&fleet.gpu, &run.gpu) {
        (Some(a), Some(b)) => Some(both_gpus(a, b, clashes)),
        (a, b) => b.clone().or_else(|| a.clone()),
    };
    let sizes = (fleet.disk.as_ref().map(|disk| disk.size), run.disk.as_ref().map(|disk| disk.size));
    let disk = maybe_ranges(sizes.0, sizes.1, Clash::Disk, clashes).map(|size| DiskSpec { size });
    ResourcesSpec { cpu, memory, shm_size: run.shm_size.or(fleet.shm_size), gpu, disk }
}

fn both_gpus(fleet: &GpuSpec, run: &GpuSpec, clashes: &mut Vec<Clash>) -> GpuSpec {
    let folded = |a: &String, b: &String| a.eq_ignore_ascii_case(b);
    GpuSpec {
        vendor: same(fleet.vendor, run.vendor, Clash::GpuVendor, clashes),
        name: lists(&fleet.name, &run.name, folded, Clash::GpuName, clashes),
        count: both_ranges(&fleet.count, &run.count, Clash::GpuCount, clashes),
        memory: maybe_ranges(fleet.memory, run.memory, Clash::GpuMemory, clashes),
        total_memory: maybe_ranges(fleet.total_memory, run.total_memory, Clash::GpuTotalMemory, clashes),
        compute_capability: fleet.compute_capability.max(run.compute_capability),
    }
}
