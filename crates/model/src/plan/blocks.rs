//! Shares of an instance: equal blocks of CPUs, memory and GPUs.
//!
//! The disk is not split: all jobs share it, and a requested size applies to the whole instance.

use crate::{
    plan::offers::{Gpu, HostSpec, to_gb},
    resources::{CpuArch, ResourcesSpec},
};

/// `blocks:` of a fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    Count(u32),
    /// The largest number that divides both CPUs and GPUs.
    Auto,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot split {cpus} CPUs and {gpus} GPUs evenly into {blocks} blocks")]
pub struct UnevenBlocks {
    pub blocks: u32,
    pub cpus: u32,
    pub gpus: u32,
}

/// Returns the number of blocks that a host is split into.
pub fn split_count(blocks: Blocks, cpus: u32, gpus: u32) -> Result<u32, UnevenBlocks> {
    match blocks {
        Blocks::Auto => Ok(greatest_common_divisor(cpus, gpus).max(1)),
        Blocks::Count(blocks) if blocks > 0 && cpus.is_multiple_of(blocks) && gpus.is_multiple_of(blocks) => {
            Ok(blocks)
        }
        Blocks::Count(blocks) => Err(UnevenBlocks { blocks, cpus, gpus }),
    }
}

fn greatest_common_divisor(left: u32, right: u32) -> u32 {
    if right == 0 { left } else { greatest_common_divisor(right, left % right) }
}

/// A part of a host, or all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostShare<'a> {
    pub cpus: u32,
    pub arch: Option<CpuArch>,
    pub memory_mib: u64,
    pub disk_mib: u64,
    pub gpus: &'a [Gpu],
}

/// Returns the share that `blocks` of `total` amount to.
pub fn host_share(host: &HostSpec, blocks: u32, total: u32) -> HostShare<'_> {
    let (blocks, total) = (u64::from(blocks), u64::from(total.max(1)));
    let gpus = host.gpus.len() as u64 * blocks / total;
    HostShare {
        cpus: u32::try_from(u64::from(host.cpus) * blocks / total).unwrap_or(u32::MAX),
        arch: host.arch,
        memory_mib: host.memory_mib * blocks / total,
        disk_mib: host.disk_mib,
        gpus: &host.gpus[..usize::try_from(gpus).unwrap_or(usize::MAX).min(host.gpus.len())],
    }
}

/// Returns the smallest number of blocks that reaches every lower bound, at most all of them. More blocks can only
/// exceed upper bounds, so if this number does not fit, none does.
pub fn smallest_fitting(host: &HostSpec, total: u32, whole: bool, wanted: Option<&ResourcesSpec>) -> u32 {
    let total = total.max(1);
    if whole || total == 1 {
        return total;
    }
    let Some(wanted) = wanted else { return 1 };
    let mut blocks = 1;
    let mut reach = |wanted: f64, has: f64| {
        if wanted > 0.0 && has > 0.0 {
            let least = (wanted * f64::from(total) / has).ceil();
            blocks = blocks.max(if least >= f64::from(total) { total } else { least as u32 });
        }
    };
    reach(f64::from(wanted.cpu.count.min.unwrap_or(0)), f64::from(host.cpus));
    reach(wanted.memory.min.unwrap_or(0.0), to_gb(host.memory_mib));
    if let Some(gpu) = &wanted.gpu {
        reach(f64::from(gpu.count.min.unwrap_or(0)), host.gpus.len() as f64);
        if let Some(least) = gpu.total_memory.and_then(|memory| memory.min) {
            reach(least, to_gb(total_memory(&host.gpus)));
        }
    }
    // Rounding down in `share` may leave the last unit short.
    while blocks < total && falls_short(&host_share(host, blocks, total), wanted) {
        blocks += 1;
    }
    blocks
}

fn falls_short(share: &HostShare<'_>, wanted: &ResourcesSpec) -> bool {
    let gpu = wanted.gpu.as_ref();
    let least = gpu.and_then(|gpu| gpu.total_memory).and_then(|memory| memory.min);
    share.cpus < wanted.cpu.count.min.unwrap_or(0)
        || to_gb(share.memory_mib) < wanted.memory.min.unwrap_or(0.0)
        || share.gpus.len() < gpu.and_then(|gpu| gpu.count.min).unwrap_or(0) as usize
        || (!share.gpus.is_empty() && least.is_some_and(|least| to_gb(total_memory(share.gpus)) < least))
}

fn total_memory(gpus: &[Gpu]) -> u64 {
    gpus.iter().map(|gpu| gpu.memory_mib).sum()
}
