//! This host as the scheduler: executors as separate processes, recorded in files that outlive the dispatcher.
//!
//! Each attempt has a directory that identifies its executor: process id and start time, so that a reused pid is not
//! mistaken for it. A directory that cannot be read means unknown, not empty.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fs,
    io::{self, Write as _},
    os::unix::{
        fs::{DirBuilderExt as _, OpenOptionsExt as _},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
};

use parking_lot::{Mutex, MutexGuard};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::{Value, json};
use tokio::{sync::Notify, time::Instant};
use windlass_model::{
    dispatch::{
        Attempt, ContainerNeeds, SchedulerJob, SchedulerJobState, SchedulerSnapshot,
        capacity::{HostCapacity, ResourceAmount},
    },
    time::{Span, Timestamp},
};

use crate::scheduler::{Scheduler, SchedulerError, StopMode, SubmitError, SubmitRequest};

#[derive(Clone, Debug)]
pub struct Settings {
    /// Directory of attempts; one dispatcher per directory.
    pub dir: PathBuf,
    /// Path of the program `windlass-agent`.
    pub executor: PathBuf,
    /// Resources that may be used; detected if not set.
    pub size: Option<ResourceAmount>,
    /// Number of GPUs; detected if not set.
    pub gpus: Option<u32>,
}

pub struct LocalScheduler {
    settings: Settings,
    begun: Instant,
    /// Records of all attempts: they do not change, and there may be thousands of them.
    known: Mutex<BTreeMap<Attempt, ExecutorRecord>>,
    /// Notified when an executor that this process started has exited.
    over: Arc<Notify>,
}

/// File that identifies the executor of an attempt.
const EXECUTOR_FILE: &str = "executor.json";
/// File with the resources of an attempt.
const NEEDS_FILE: &str = "needs.json";
/// Time after which the directory of a finished attempt is removed.
const FORGET_AFTER: Span = Span::mins(5);

impl LocalScheduler {
    pub fn new(settings: Settings, begun: Instant) -> Self {
        Self { settings, begun, known: Mutex::default(), over: Arc::default() }
    }

    fn now(&self) -> Timestamp {
        Timestamp(i64::try_from(self.begun.elapsed().as_micros()).unwrap_or(i64::MAX))
    }

    /// Reads the records of all attempts that have a directory now, and updates when each ended.
    fn refresh_records(&self) -> io::Result<MutexGuard<'_, BTreeMap<Attempt, ExecutorRecord>>> {
        let there = self.named()?;
        let mut known = self.known.lock();
        known.retain(|attempt, _| there.contains(attempt));
        for attempt in there {
            let Entry::Vacant(new) = known.entry(attempt) else { continue };
            match ExecutorRecord::read(&self.settings.dir.join(new.key().to_string())) {
                Ok(kept) => {
                    new.insert(kept);
                }
                // The directory is created first: the dispatcher died before it started anything.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        for kept in known.values_mut().filter(|kept| kept.ended.is_none()) {
            kept.ended = (!kept.is_alive()).then(|| self.now());
        }
        Ok(known)
    }

    fn named(&self) -> io::Result<BTreeSet<Attempt>> {
        let entries = match fs::read_dir(&self.settings.dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
            Err(error) => return Err(error),
        };
        let names = entries.map(|entry| Ok(entry?.file_name().to_str().and_then(|name| name.parse().ok())));
        names.filter_map(Result::transpose).collect()
    }

    fn detect_capacity(&self) -> ResourceAmount {
        let size = self.settings.size.unwrap_or_else(size);
        ResourceAmount { gpus: self.settings.gpus.unwrap_or(size.gpus), ..size }
    }

    /// Returns GPUs that no attempt uses.
    fn free_gpus(&self, count: u32) -> io::Result<Vec<u32>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let known = self.refresh_records()?;
        let alive = known.values().filter(|kept| kept.ended.is_none());
        let taken: Vec<u32> = alive.flat_map(|kept| &kept.gpus).copied().collect();
        let free = (0..self.detect_capacity().gpus).filter(|gpu| !taken.contains(gpu));
        let free: Vec<u32> = free.take(usize::try_from(count).unwrap_or(usize::MAX)).collect();
        if free.len() < usize::try_from(count).unwrap_or(usize::MAX) {
            return Err(io::Error::other("not enough GPUs are free"));
        }
        Ok(free)
    }

    fn start(&self, order: &SubmitRequest) -> io::Result<u32> {
        let dir = self.settings.dir.join(order.attempt.to_string());
        let gpus = self.free_gpus(order.needs.gpus)?;
        // No other user of the host may read its contents.
        fs::create_dir_all(&self.settings.dir)?;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        fs::write(dir.join(NEEDS_FILE), needs_json(&order.needs, &gpus).to_string())?;
        let named: Vec<String> = gpus.iter().map(u32::to_string).collect();
        let log =
            fs::File::options().create(true).truncate(true).write(true).mode(0o600).open(dir.join("log"))?;
        let mut command = Command::new(&self.settings.executor);
        command
            .args(["exec", &order.attempt.uuid, "--attempt", &order.attempt.number.to_string(), "--dir"])
            .arg(&dir)
            .env_clear()
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .envs(order.environment.iter().map(|(name, value)| (name, value)))
            .envs((!named.is_empty()).then(|| ("CUDA_VISIBLE_DEVICES", named.join(","))))
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log)
            // A separate process group: a signal for the dispatcher must not reach the executors.
            .process_group(0);
        let mut child = command.spawn()?;
        let id = child.id();
        // Not in its environment, which is visible in `/proc`. An executor that has already exited is detected by its
        // exit.
        if let Some(mut stdin) = child.stdin.take() {
            let _ = stdin.write_all(order.token.as_bytes());
        }
        // The executor writes the same; in either case the file exists before user code runs.
        write_atomically(&dir.join(EXECUTOR_FILE), &json!({ "pid": id, "started": process_start_time(id) }))?;
        // A thread waits for each executor: none stays behind as a zombie, and its resources are free at once. If the
        // thread cannot be started, the next snapshot detects the exit.
        let over = self.over.clone();
        let _ = std::thread::Builder::new().spawn(move || {
            let _ = child.wait();
            over.notify_one();
        });
        Ok(id)
    }
}

/// Executor of an attempt.
struct ExecutorRecord {
    pid: u32,
    /// Start time in ticks since the host booted.
    started: u64,
    needs: ContainerNeeds,
    /// Indexes of its GPUs.
    gpus: Vec<u32>,
    /// Time at which its exit was detected.
    ended: Option<Timestamp>,
}

/// Writes a file atomically.
fn write_atomically(path: &Path, value: &Value) -> io::Result<()> {
    let aside = path.with_extension("new");
    fs::write(&aside, value.to_string())?;
    fs::rename(aside, path)
}

fn needs_json(needs: &ContainerNeeds, gpus: &[u32]) -> Value {
    json!({ "cpus": needs.cpus, "memory": needs.memory, "gpus": needs.gpus, "devices": gpus })
}

impl ExecutorRecord {
    fn read(dir: &Path) -> io::Result<Self> {
        let who: Value = serde_json::from_slice(&fs::read(dir.join(EXECUTOR_FILE))?)?;
        let given: Value = serde_json::from_slice(&fs::read(dir.join(NEEDS_FILE))?)?;
        let small = |value: &Value| u32::try_from(value.as_u64().unwrap_or(0)).unwrap_or(u32::MAX);
        let needs = ContainerNeeds {
            cpus: small(&given["cpus"]),
            memory: given["memory"].as_u64().unwrap_or(0),
            gpus: small(&given["gpus"]),
            ..ContainerNeeds::default()
        };
        let gpus = given["devices"].as_array().into_iter().flatten().map(small).collect();
        let started = who["started"].as_u64().unwrap_or(0);
        Ok(Self { pid: small(&who["pid"]), started, needs, gpus, ended: None })
    }

    fn is_alive(&self) -> bool {
        process_start_time(self.pid) == Some(self.started)
    }
}

/// Returns the start time of a living process; `None` for a zombie.
fn process_start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses and may contain anything.
    let (_, rest) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    if matches!(fields.first(), Some(&"Z" | &"X")) {
        return None;
    }
    fields.get(19)?.parse().ok()
}

/// Returns the processors and memory of this host that this process may use.
pub fn size() -> ResourceAmount {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let total =
        fs::read_to_string("/proc/meminfo").ok().and_then(|text| parse_total_memory(&text)).unwrap_or(0);
    let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limit =
        limits.iter().filter_map(|path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok()).min();
    ResourceAmount {
        cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
        memory: limit.map_or(total, |limit| limit.min(total)),
        gpus: count_gpus(Path::new("/dev")),
    }
}

/// Counts the GPUs for which the kernel has a device: `nvidia0`, `nvidia1`, …
fn count_gpus(devices: &Path) -> u32 {
    let names = fs::read_dir(devices).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let is_gpu = |name: &std::ffi::OsString| {
        let number = name.to_str().and_then(|name| name.strip_prefix("nvidia"));
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    };
    u32::try_from(names.filter(is_gpu).count()).unwrap_or(u32::MAX)
}

fn parse_total_memory(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

fn scheduler_error(source: io::Error) -> SchedulerError {
    SchedulerError::Start { program: "windlass-agent", source }
}

impl Scheduler for LocalScheduler {
    type Room = HostCapacity;

    async fn snapshot(&self) -> Result<SchedulerSnapshot, SchedulerError> {
        let requested_at = self.now();
        let known = self.refresh_records().map_err(scheduler_error)?;
        let job = |(attempt, kept): (&Attempt, &ExecutorRecord)| {
            let life = kept.ended.map_or(SchedulerJobState::Running, SchedulerJobState::Ended);
            SchedulerJob {
                attempt: attempt.clone(),
                id: kept.pid.to_string(),
                state: life,
                priority: None,
                message: None,
            }
        };
        let jobs = known.iter().map(job).collect();
        let is_old =
            |kept: &ExecutorRecord| kept.ended.is_some_and(|since| requested_at.since(since) > FORGET_AFTER);
        for (attempt, _) in known.iter().filter(|(_, kept)| is_old(kept)) {
            // A directory that cannot be removed now is retried with the next snapshot.
            let _ = fs::remove_dir_all(self.settings.dir.join(attempt.to_string()));
        }
        Ok(SchedulerSnapshot { jobs, requested_at, is_complete: true })
    }

    async fn room(&self, lower: &SchedulerSnapshot) -> Result<HostCapacity, SchedulerError> {
        let mut used = ResourceAmount::default();
        let known = self.refresh_records().map_err(scheduler_error)?;
        let live = lower.jobs.iter().filter(|job| !job.state.is_ended());
        for kept in live.filter_map(|job| known.get(&job.attempt)) {
            used.cpus = used.cpus.saturating_add(kept.needs.cpus);
            used.memory = used.memory.saturating_add(kept.needs.memory);
            used.gpus = used.gpus.saturating_add(kept.needs.gpus);
        }
        Ok(HostCapacity::new(self.detect_capacity(), used))
    }

    async fn submit(&self, order: &SubmitRequest) -> Result<String, SubmitError> {
        match self.start(order) {
            Ok(id) => Ok(id.to_string()),
            Err(error) => Err(SubmitError::Refused { why: format!("failed to start the executor: {error}") }),
        }
    }

    async fn stop(&self, job: &str, pressure: StopMode) -> Result<(), SchedulerError> {
        let known = self.refresh_records().map_err(scheduler_error)?;
        let ours = known.values().find(|kept| kept.pid.to_string() == job && kept.is_alive());
        let Some(pid) = ours.and_then(|kept| Pid::from_raw(i32::try_from(kept.pid).ok()?)) else {
            return Ok(());
        };
        // A process that has already exited needs no signal.
        let _ = match pressure {
            StopMode::Request => kill_process(pid, Signal::TERM),
            StopMode::Force => kill_process_group(pid, Signal::KILL),
        };
        Ok(())
    }

    fn is_here(&self) -> bool {
        true
    }

    async fn changed(&self) {
        self.over.notified().await;
    }

    /// Does nothing: an executor on this host runs at once, and only waiting jobs have an order.
    async fn renice(&self, _job: &str, _priority: u64) -> Result<(), SchedulerError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbered_nvidia_devices_count_as_gpus() {
        let dir = windlass_testkit::temp_dir("devices").unwrap();
        let path = dir.path().to_owned();
        for name in ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"] {
            fs::write(path.join(name), "").unwrap();
        }
        assert_eq!(count_gpus(&path), 2);
        dir.close().unwrap();
        assert_eq!(count_gpus(&path), 0);
    }
}
