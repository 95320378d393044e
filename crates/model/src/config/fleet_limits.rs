//! Intersection of the constraints of a run and its fleet. If it is empty, the fleet creates no instance for the run.

use std::fmt;

use super::{
    fleet::Fleet,
    name::Tags,
    profile::{Provisioning, SpotPolicy},
    quantities::{IdleDuration, PositiveNumber},
};
use crate::resources::{CpuSpec, DiskSpec, Gb, GpuSpec, Range, ResourcesSpec};

/// A constraint on which a run and its fleet conflict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LimitConflict {
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

impl fmt::Display for LimitConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Backends => "no backend is in both lists",
            Self::Regions => "no region is in both lists",
            Self::AvailabilityZones => "no availability zone is in both lists",
            Self::InstanceTypes => "no instance type is in both lists",
            Self::Reservation => "the reservations differ",
            Self::SpotPolicy => "one requires spot instances, the other on-demand instances",
            Self::CpuArch => "the CPU architectures differ",
            Self::CpuCount => "the numbers of CPUs do not overlap",
            Self::Memory => "the memory ranges do not overlap",
            Self::GpuVendor => "the GPU vendors differ",
            Self::GpuName => "no GPU is in both lists",
            Self::GpuCount => "the numbers of GPUs do not overlap",
            Self::GpuMemory => "the GPU memory ranges do not overlap",
            Self::GpuTotalMemory => "the ranges of total GPU memory do not overlap",
            Self::Disk => "the disk sizes do not overlap",
        })
    }
}

/// Constraints for requests to backends for this run in this fleet.
#[derive(Clone, Debug, PartialEq)]
pub struct AllowedProvisioning {
    pub provisioning: Provisioning,
    pub resources: ResourcesSpec,
}

/// Returns the constraints that satisfy both the run and the fleet, or all conflicts.
pub fn intersect(
    fleet: &Fleet,
    run: &Provisioning,
    resources: &ResourcesSpec,
) -> Result<AllowedProvisioning, Vec<LimitConflict>> {
    let mut clashes = Vec::new();
    let provisioning = intersect_provisioning(&fleet.provisioning, run, &mut clashes);
    let resources = match &fleet.resources {
        None => resources.clone(),
        Some(of_fleet) => intersect_resources(of_fleet, resources, &mut clashes),
    };
    if clashes.is_empty() { Ok(AllowedProvisioning { provisioning, resources }) } else { Err(clashes) }
}

fn intersect_provisioning(
    fleet: &Provisioning,
    run: &Provisioning,
    clashes: &mut Vec<LimitConflict>,
) -> Provisioning {
    let folded = |a: &String, b: &String| a.eq_ignore_ascii_case(b);
    let reservation = match (&fleet.reservation, &run.reservation) {
        (Some(a), Some(b)) if a != b => push_conflict(LimitConflict::Reservation, clashes),
        (a, b) => b.clone().or_else(|| a.clone()),
    };
    let spot_policy = match (fleet.spot_policy, run.spot_policy) {
        (None | Some(SpotPolicy::Auto), Some(policy)) | (Some(policy), None | Some(SpotPolicy::Auto)) => {
            Some(policy)
        }
        (None, None) => None,
        (Some(a), Some(b)) if a == b => Some(a),
        (Some(_), Some(_)) => push_conflict(LimitConflict::SpotPolicy, clashes),
    };
    Provisioning {
        backends: intersect_lists(
            &fleet.backends,
            &run.backends,
            PartialEq::eq,
            LimitConflict::Backends,
            clashes,
        ),
        regions: intersect_lists(&fleet.regions, &run.regions, folded, LimitConflict::Regions, clashes),
        availability_zones: intersect_lists(
            &fleet.availability_zones,
            &run.availability_zones,
            folded,
            LimitConflict::AvailabilityZones,
            clashes,
        ),
        instance_types: intersect_lists(
            &fleet.instance_types,
            &run.instance_types,
            folded,
            LimitConflict::InstanceTypes,
            clashes,
        ),
        reservation,
        spot_policy,
        retry: run.retry.clone(),
        max_price: lower_price(fleet.max_price, run.max_price),
        idle_duration: IdleDuration(shorter_idle(fleet.idle_duration.0, run.idle_duration.0)),
        tags: merged_tags(fleet.tags.as_ref(), run.tags.as_ref()),
        backend_options: run.backend_options.clone().or_else(|| fleet.backend_options.clone()),
    }
}

fn push_conflict<T>(what: LimitConflict, clashes: &mut Vec<LimitConflict>) -> Option<T> {
    clashes.push(what);
    None
}

/// Returns the values in both lists, as the run spells them. An absent list allows everything.
fn intersect_lists<T: Clone>(
    fleet: &Option<Vec<T>>,
    run: &Option<Vec<T>>,
    same: impl Fn(&T, &T) -> bool,
    what: LimitConflict,
    clashes: &mut Vec<LimitConflict>,
) -> Option<Vec<T>> {
    let (Some(of_fleet), Some(of_run)) = (fleet, run) else { return run.clone().or_else(|| fleet.clone()) };
    let both: Vec<T> = of_run.iter().filter(|a| of_fleet.iter().any(|b| same(a, b))).cloned().collect();
    if both.is_empty() { push_conflict(what, clashes) } else { Some(both) }
}

fn lower_price(a: Option<PositiveNumber>, b: Option<PositiveNumber>) -> Option<PositiveNumber> {
    match (a, b) {
        (Some(a), Some(b)) => Some(if a < b { a } else { b }),
        (a, b) => a.or(b),
    }
}

/// Returns the shorter of two idle times; -1 means no limit.
fn shorter_idle(a: Option<i64>, b: Option<i64>) -> Option<i64> {
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

fn intersect_ranges<T: PartialOrd + Copy>(
    a: &Range<T>,
    b: &Range<T>,
    what: LimitConflict,
    clashes: &mut Vec<LimitConflict>,
) -> Range<T> {
    a.intersect(b).unwrap_or_else(|| {
        clashes.push(what);
        *b
    })
}

/// Intersects two ranges; an absent range allows everything.
fn intersect_optional_ranges(
    a: Option<Range<Gb>>,
    b: Option<Range<Gb>>,
    what: LimitConflict,
    clashes: &mut Vec<LimitConflict>,
) -> Option<Range<Gb>> {
    match (a, b) {
        (Some(a), Some(b)) => Some(intersect_ranges(&a, &b, what, clashes)),
        (a, b) => a.or(b),
    }
}

/// Requires values to be equal if both are set.
fn require_equal<T: PartialEq + Copy>(
    a: Option<T>,
    b: Option<T>,
    what: LimitConflict,
    clashes: &mut Vec<LimitConflict>,
) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) if a != b => push_conflict(what, clashes),
        (a, b) => b.or(a),
    }
}

fn intersect_resources(
    fleet: &ResourcesSpec,
    run: &ResourcesSpec,
    clashes: &mut Vec<LimitConflict>,
) -> ResourcesSpec {
    let cpu = CpuSpec {
        arch: require_equal(fleet.cpu.arch, run.cpu.arch, LimitConflict::CpuArch, clashes),
        count: intersect_ranges(&fleet.cpu.count, &run.cpu.count, LimitConflict::CpuCount, clashes),
    };
    let memory = intersect_ranges(&fleet.memory, &run.memory, LimitConflict::Memory, clashes);
    let gpu = match (&fleet.gpu, &run.gpu) {
        (Some(a), Some(b)) => Some(intersect_gpus(a, b, clashes)),
        (a, b) => b.clone().or_else(|| a.clone()),
    };
    let sizes = (fleet.disk.as_ref().map(|disk| disk.size), run.disk.as_ref().map(|disk| disk.size));
    let disk = intersect_optional_ranges(sizes.0, sizes.1, LimitConflict::Disk, clashes)
        .map(|size| DiskSpec { size });
    ResourcesSpec { cpu, memory, shm_size: run.shm_size.or(fleet.shm_size), gpu, disk }
}

fn intersect_gpus(fleet: &GpuSpec, run: &GpuSpec, clashes: &mut Vec<LimitConflict>) -> GpuSpec {
    let folded = |a: &String, b: &String| a.eq_ignore_ascii_case(b);
    GpuSpec {
        vendor: require_equal(fleet.vendor, run.vendor, LimitConflict::GpuVendor, clashes),
        name: intersect_lists(&fleet.name, &run.name, folded, LimitConflict::GpuName, clashes),
        count: intersect_ranges(&fleet.count, &run.count, LimitConflict::GpuCount, clashes),
        memory: intersect_optional_ranges(fleet.memory, run.memory, LimitConflict::GpuMemory, clashes),
        total_memory: intersect_optional_ranges(
            fleet.total_memory,
            run.total_memory,
            LimitConflict::GpuTotalMemory,
            clashes,
        ),
        compute_capability: fleet.compute_capability.max(run.compute_capability),
    }
}
