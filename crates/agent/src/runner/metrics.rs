//! Resource usage of the job: processor time, memory, GPUs.
//!
//! The task's control group is read if the task has its own. Otherwise (a plain process whose shim may not create
//! groups), the usage of the task's processes is added up.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use tokio::sync::Mutex;
use windlass_api::agent::runner::{GpuMetrics, Metrics};

use crate::{
    cgroup::{Group, Usage},
    clock,
    host::gpu::{self, GpuUsage},
    proc,
};

/// Minimum interval of GPU queries, each of which starts a program.
const GPU_INTERVAL: Duration = Duration::from_secs(5);
/// Clock ticks per second in `/proc`, the same on every architecture.
const TICKS_PER_SECOND: u64 = 100;

/// Reads the usage of this task. Cheap to call often, because GPUs are queried at most every few seconds.
#[derive(Debug)]
pub struct Meter {
    gpus: Vec<String>,
    source: UsageSource,
    last: Mutex<Option<(Instant, Vec<GpuMetrics>)>>,
}

#[derive(Debug)]
enum UsageSource {
    Group(Group),
    /// The process whose descendants are the task.
    Tree(i32),
}

impl Meter {
    /// `gpus` are the UUIDs of the GPUs that this task holds. Must be called before the job starts.
    pub fn new(gpus: Vec<String>) -> Self {
        let top = rustix::process::getppid().map_or(1, |pid| pid.as_raw_nonzero().get());
        let source = match Group::own() {
            Ok(group) if is_own_group(&group, top) => UsageSource::Group(group),
            Ok(_) | Err(_) => UsageSource::Tree(top),
        };
        Self { gpus, source, last: Mutex::new(None) }
    }

    /// Reads the current usage. Returns `None` if it cannot be read.
    pub async fn read(&self) -> Option<Metrics> {
        let usage = match &self.source {
            UsageSource::Group(group) => group.usage(),
            UsageSource::Tree(top) => tree_usage(*top),
        };
        let bytes = |value: Option<u64>| i64::try_from(value?).ok();
        Some(Metrics {
            timestamp_micro: clock::now_us(),
            cpu_usage_micro: bytes(usage.cpu_us)?,
            memory_usage_bytes: bytes(usage.memory)?,
            memory_working_set_bytes: bytes(usage.working_set)?,
            gpus: self.gpus().await,
        })
    }

    async fn gpus(&self) -> Vec<GpuMetrics> {
        if self.gpus.is_empty() {
            return Vec::new();
        }
        let mut last = self.last.lock().await;
        if let Some((_, metrics)) = last.as_ref().filter(|(at, _)| at.elapsed() < GPU_INTERVAL) {
            return metrics.clone();
        }
        let metrics = gpu_metrics(&self.gpus, &gpu::usage(Path::new("/")).await);
        *last = Some((Instant::now(), metrics.clone()));
        metrics
    }
}

/// Returns the metrics in the task's order. A GPU without data is left out.
fn gpu_metrics(held: &[String], used: &[GpuUsage]) -> Vec<GpuMetrics> {
    let find = |id: &String| used.iter().find(|gpu| gpu.id == *id);
    let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    held.iter()
        .filter_map(find)
        .map(|gpu| GpuMetrics {
            gpu_memory_usage_bytes: number(gpu.memory_mib.saturating_mul(1 << 20)),
            gpu_util_percent: number(gpu.percent),
        })
        .collect()
}

/// Returns whether the group contains this task only: all its processes descend from `top`. A group shared with others,
/// or that of the whole host, would include their usage.
fn is_own_group(group: &Group, top: i32) -> bool {
    let usage = group.usage();
    if usage.cpu_us.is_none() || usage.memory.is_none() {
        return false;
    }
    let dirs =
        [group.v1_of("memory"), group.v1_of("cpuacct"), group.v2.as_deref().filter(|_| group.v1.is_empty())];
    let Ok(ours) = proc::descendants(top) else { return false };
    let known = |pid: i32| pid == top || ours.iter().any(|stat| stat.name.pid == pid);
    let task = std::env::var("WINDLASS_TASK_ID").unwrap_or_default();
    dirs.into_iter().flatten().all(|dir| {
        // One process of a confined task is on the host: it has no pid in this namespace.
        let is_of_task = !task.is_empty() && dir.ends_with(&task);
        let known = |pid| known(pid) || (pid == 0 && is_of_task);
        fs::read_to_string(dir.join("cgroup.procs"))
            .is_ok_and(|text| text.lines().all(|line| line.parse().is_ok_and(known)))
    })
}

/// Adds up all processes of the task, and the children they have waited for.
fn tree_usage(top: i32) -> Usage {
    let Ok(stats) = proc::descendants(top) else { return Usage::default() };
    let pids = stats.iter().map(|stat| stat.name.pid).chain([top]);
    let (mut cpu, mut memory) = (0, 0);
    for pid in pids {
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        cpu += cpu_ticks(&read("stat")).unwrap_or(0);
        memory += resident_bytes(&read("status")).unwrap_or(0);
    }
    Usage {
        cpu_us: Some(cpu * (1_000_000 / TICKS_PER_SECOND)),
        memory: Some(memory),
        working_set: Some(memory),
    }
}

/// Returns user and system time of a process and of the children it has waited for. The name before may contain
/// anything.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    fields.get(11..15)?.iter().map(|field| field.parse::<u64>().ok()).sum()
}

fn resident_bytes(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_ticks_and_resident_memory_are_parsed_from_proc_files() {
        let stat = "42 (a) b (c) S 1 42 42 0 -1 4194560 900 0 0 0 7 3 20 10 20 0 1 0 5 6 7";
        assert_eq!(cpu_ticks(stat), Some(40));
        assert_eq!(cpu_ticks("42 (x) S 1"), None);
        assert_eq!(resident_bytes("Name:\tx\nVmRSS:\t    12 kB\n"), Some(12 * 1024));
        assert_eq!(resident_bytes("Name:\tkthreadd\n"), None);
    }

    #[test]
    fn gpu_metrics_follow_the_order_of_the_task_and_skip_other_gpus() {
        let used = |id: &str, memory_mib, percent| GpuUsage { id: id.into(), memory_mib, percent };
        let all = [used("GPU-a", 1, 10), used("GPU-b", 2, 20), used("GPU-c", 3, 30)];
        let reported = gpu_metrics(&["GPU-c".into(), "GPU-a".into(), "GPU-x".into()], &all);
        assert_eq!(reported.iter().map(|gpu| gpu.gpu_util_percent).collect::<Vec<_>>(), [30, 10]);
        assert_eq!(reported[0].gpu_memory_usage_bytes, 3 << 20);
    }

    #[test]
    fn usage_is_summed_over_the_process_tree() {
        let own = i32::try_from(std::process::id()).unwrap();
        let usage = tree_usage(own);
        assert!(usage.memory.unwrap() > 100 << 10, "{usage:?}");
        let until = Instant::now() + Duration::from_secs(30);
        let mut sum = 0u64;
        while tree_usage(own).cpu_us <= usage.cpu_us {
            assert!(Instant::now() < until, "no processor time is counted");
            sum = std::hint::black_box((0..1_000_000u64).fold(sum, u64::wrapping_add));
        }
    }

    #[tokio::test]
    async fn metrics_are_measured_on_any_host() {
        let metrics = Meter::new(Vec::new()).read().await.unwrap();
        assert!(metrics.timestamp_micro > 0 && metrics.memory_usage_bytes > 0, "{metrics:?}");
        assert!(metrics.memory_working_set_bytes <= metrics.memory_usage_bytes);
        assert_eq!(metrics.gpus, []);
    }
}
