//! This machine as the scheduler: executors as processes of their own, known by files that outlive the dispatcher.
//!
//! Each attempt has a directory with who runs it: process id and start time, so that a number that was given to
//! another process is not mistaken for it. A directory that cannot be read is unknown, not empty.

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
        room::{HostCapacity, ResourceAmount},
    },
    time::{Span, Timestamp},
};

use crate::scheduler::{Scheduler, SchedulerError, StopMode, SubmitError, SubmitRequest};

#[derive(Clone, Debug)]
pub struct Settings {
    /// Where attempts are kept; one dispatcher per directory.
    pub dir: PathBuf,
    /// The program `windlass-agent`.
    pub executor: PathBuf,
    /// What may be used; found out when not given.
    pub size: Option<ResourceAmount>,
    /// How many GPUs there are; found out when not given.
    pub gpus: Option<u32>,
}

pub struct LocalScheduler {
    settings: Settings,
    begun: Instant,
    /// What was read of each attempt: it does not change, and there may be thousands of them.
    known: Mutex<BTreeMap<Attempt, ExecutorRecord>>,
    /// An executor that this process started is over.
    over: Arc<Notify>,
}

/// Who runs an attempt.
const EXECUTOR_FILE: &str = "executor.json";
/// What it was given.
const NEEDS_FILE: &str = "needs.json";
/// An attempt that is over is forgotten after this time.
const FORGET_AFTER: Span = Span::mins(5);

impl LocalScheduler {
    pub fn new(settings: Settings, begun: Instant) -> Self {
        Self { settings, begun, known: Mutex::default(), over: Arc::default() }
    }

    fn now(&self) -> Timestamp {
        Timestamp(i64::try_from(self.begun.elapsed().as_micros()).unwrap_or(i64::MAX))
    }

    /// All that have a directory now, and since when each is over.
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
                // The directory is made first: the dispatcher died before it started anything.
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

    fn size(&self) -> ResourceAmount {
        let size = self.settings.size.unwrap_or_else(size);
        ResourceAmount { gpus: self.settings.gpus.unwrap_or(size.gpus), ..size }
    }

    /// GPUs that nobody has.
    fn free_gpus(&self, count: u32) -> io::Result<Vec<u32>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let known = self.refresh_records()?;
        let alive = known.values().filter(|kept| kept.ended.is_none());
        let taken: Vec<u32> = alive.flat_map(|kept| &kept.gpus).copied().collect();
        let free = (0..self.size().gpus).filter(|gpu| !taken.contains(gpu));
        let free: Vec<u32> = free.take(usize::try_from(count).unwrap_or(usize::MAX)).collect();
        if free.len() < usize::try_from(count).unwrap_or(usize::MAX) {
            return Err(io::Error::other("not so many GPUs are free"));
        }
        Ok(free)
    }

    fn start(&self, order: &SubmitRequest) -> io::Result<u32> {
        let dir = self.settings.dir.join(order.attempt.to_string());
        let gpus = self.free_gpus(order.needs.gpus)?;
        // What is in it is for nobody else on the machine.
        fs::create_dir_all(&self.settings.dir)?;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        fs::write(dir.join(NEEDS_FILE), needs(&order.needs, &gpus).to_string())?;
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
            // A group of its own: a signal for the dispatcher is not meant for what it started.
            .process_group(0);
        let mut child = command.spawn()?;
        let id = child.id();
        // Not in its environment, which is in `/proc`. One that is gone already says so by its end.
        if let Some(mut stdin) = child.stdin.take() {
            let _ = stdin.write_all(order.token.as_bytes());
        }
        // The executor writes the same; whoever is first, it is there before user code runs.
        write_atomically(&dir.join(EXECUTOR_FILE), &json!({ "pid": id, "started": started(id) }))?;
        // Somebody waits for each: none stays behind as a zombie, and its room is given away at once. Without a thread
        // for that the next look finds it.
        let over = self.over.clone();
        let _ = std::thread::Builder::new().spawn(move || {
            let _ = child.wait();
            over.notify_one();
        });
        Ok(id)
    }
}

/// Who runs an attempt.
struct ExecutorRecord {
    pid: u32,
    /// In ticks since the machine started.
    started: u64,
    needs: ContainerNeeds,
    /// By their numbers.
    gpus: Vec<u32>,
    /// Since when it is known to be over.
    ended: Option<Timestamp>,
}

/// Moved into place: it is there whole or not at all.
fn write_atomically(path: &Path, value: &Value) -> io::Result<()> {
    let aside = path.with_extension("new");
    fs::write(&aside, value.to_string())?;
    fs::rename(aside, path)
}

fn needs(needs: &ContainerNeeds, gpus: &[u32]) -> Value {
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
        started(self.pid) == Some(self.started)
    }
}

/// When a process that lives was started; a zombie does not live.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in brackets and may hold anything.
    let (_, rest) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    if matches!(fields.first(), Some(&"Z" | &"X")) {
        return None;
    }
    fields.get(19)?.parse().ok()
}

/// Processors and memory of this machine, as far as this process may use them.
pub fn size() -> ResourceAmount {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let total = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo(&text)).unwrap_or(0);
    let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limit =
        limits.iter().filter_map(|path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok()).min();
    ResourceAmount {
        cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
        memory: limit.map_or(total, |limit| limit.min(total)),
        gpus: gpus(Path::new("/dev")),
    }
}

/// GPUs of which the kernel has a device: `nvidia0`, `nvidia1`, …
fn gpus(devices: &Path) -> u32 {
    let names = fs::read_dir(devices).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let is_gpu = |name: &std::ffi::OsString| {
        let number = name.to_str().and_then(|name| name.strip_prefix("nvidia"));
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    };
    u32::try_from(names.filter(is_gpu).count()).unwrap_or(u32::MAX)
}

fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

fn unknown(source: io::Error) -> SchedulerError {
    SchedulerError::Start { program: "windlass-agent", source }
}

impl Scheduler for LocalScheduler {
    type Room = HostCapacity;

    async fn look(&self) -> Result<SchedulerSnapshot, SchedulerError> {
        let asked_at = self.now();
        let known = self.refresh_records().map_err(unknown)?;
        let job = |(attempt, kept): (&Attempt, &ExecutorRecord)| {
            let life = kept.ended.map_or(SchedulerJobState::Running, SchedulerJobState::Ended);
            SchedulerJob {
                attempt: attempt.clone(),
                id: kept.pid.to_string(),
                life,
                priority: None,
                said: None,
            }
        };
        let jobs = known.iter().map(job).collect();
        let is_old =
            |kept: &ExecutorRecord| kept.ended.is_some_and(|since| asked_at.since(since) > FORGET_AFTER);
        for (attempt, _) in known.iter().filter(|(_, kept)| is_old(kept)) {
            // What cannot be removed now is tried again at the next look.
            let _ = fs::remove_dir_all(self.settings.dir.join(attempt.to_string()));
        }
        Ok(SchedulerSnapshot { jobs, asked_at, is_whole: true })
    }

    async fn room(&self, lower: &SchedulerSnapshot) -> Result<HostCapacity, SchedulerError> {
        let mut used = ResourceAmount::default();
        let known = self.refresh_records().map_err(unknown)?;
        let live = lower.jobs.iter().filter(|job| !job.life.is_over());
        for kept in live.filter_map(|job| known.get(&job.attempt)) {
            used.cpus = used.cpus.saturating_add(kept.needs.cpus);
            used.memory = used.memory.saturating_add(kept.needs.memory);
            used.gpus = used.gpus.saturating_add(kept.needs.gpus);
        }
        Ok(HostCapacity::new(self.size(), used))
    }

    async fn submit(&self, order: &SubmitRequest) -> Result<String, SubmitError> {
        match self.start(order) {
            Ok(id) => Ok(id.to_string()),
            Err(error) => Err(SubmitError::Refused { why: format!("start the executor: {error}") }),
        }
    }

    async fn stop(&self, job: &str, pressure: StopMode) -> Result<(), SchedulerError> {
        let known = self.refresh_records().map_err(unknown)?;
        let ours = known.values().find(|kept| kept.pid.to_string() == job && kept.is_alive());
        let Some(pid) = ours.and_then(|kept| Pid::from_raw(i32::try_from(kept.pid).ok()?)) else {
            return Ok(());
        };
        // One that is gone already needs no signal.
        let _ = match pressure {
            StopMode::Ask => kill_process(pid, Signal::TERM),
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

    /// What runs here runs; only the order of those that wait has a meaning.
    async fn renice(&self, _job: &str, _priority: u64) -> Result<(), SchedulerError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_the_numbered_devices_alone() {
        let dir = windlass_testkit::temp_dir("devices").unwrap();
        let path = dir.path().to_owned();
        for name in ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"] {
            fs::write(path.join(name), "").unwrap();
        }
        assert_eq!(gpus(&path), 2);
        dir.close().unwrap();
        assert_eq!(gpus(&path), 0);
    }
}
