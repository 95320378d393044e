//! This machine as the scheduler: executors as processes of their own, known by files that outlive the dispatcher.
//!
//! Each attempt has a directory with who runs it: process id and start time, so that a number that was given to
//! another process is not mistaken for it. A directory that cannot be read is unknown, not empty.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::{Value, json};
use windlass_model::{
    dispatch::{
        Attempt, Job, Life, Lower, Needs,
        room::{Amount, Machine},
    },
    time::{Span, Timestamp},
};

use crate::scheduler::{Order, Pressure, Scheduler, SubmitError, Unknown};

#[derive(Clone, Debug)]
pub struct Settings {
    /// Where attempts are kept; one dispatcher per directory.
    pub dir: PathBuf,
    /// The program `windlass-agent`.
    pub executor: PathBuf,
    /// What may be used; found out when not given.
    pub size: Option<Amount>,
}

pub struct Local {
    settings: Settings,
    begun: Instant,
    ended: Mutex<BTreeMap<Attempt, Timestamp>>,
    /// Children of this process, so that they do not stay behind as zombies.
    children: Mutex<Vec<std::process::Child>>,
}

/// Who runs an attempt.
const FILE: &str = "executor.json";
/// What it was given.
const NEEDS: &str = "needs.json";
/// An attempt that is over is forgotten after this time.
const FORGET_AFTER: Span = Span::mins(5);

impl Local {
    pub fn new(settings: Settings, begun: Instant) -> Self {
        Self { settings, begun, ended: Mutex::default(), children: Mutex::default() }
    }

    fn now(&self) -> Timestamp {
        Timestamp(i64::try_from(self.begun.elapsed().as_micros()).unwrap_or(i64::MAX))
    }

    fn attempts(&self) -> io::Result<Vec<(Attempt, Kept)>> {
        let mut found = Vec::new();
        let entries = match fs::read_dir(&self.settings.dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let entry = entry?;
            let Some(Ok(attempt)) = entry.file_name().to_str().map(str::parse::<Attempt>) else { continue };
            match Kept::read(&entry.path()) {
                Ok(kept) => found.push((attempt, kept)),
                // The directory is made first: the dispatcher died before it started anything.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    fn start(&self, order: &Order) -> io::Result<u32> {
        let dir = self.settings.dir.join(order.attempt.to_string());
        fs::create_dir_all(&dir)?;
        fs::write(dir.join(NEEDS), needs(&order.needs).to_string())?;
        let log = fs::File::create(dir.join("log"))?;
        let mut command = Command::new(&self.settings.executor);
        command
            .args(["exec", &order.attempt.uuid, "--attempt", &order.attempt.number.to_string(), "--dir"])
            .arg(&dir)
            .env_clear()
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .envs(order.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            // A group of its own: a signal for the dispatcher is not meant for what it started.
            .process_group(0);
        let child = command.spawn()?;
        let id = child.id();
        // The executor writes the same; whoever is first, it is there before user code runs.
        write(&dir.join(FILE), &json!({ "pid": id, "started": started(id) }))?;
        self.children.lock().push(child);
        Ok(id)
    }
}

/// Who runs an attempt.
struct Kept {
    pid: u32,
    /// In ticks since the machine started.
    started: u64,
    needs: Needs,
}

/// Moved into place: it is there whole or not at all.
fn write(path: &Path, value: &Value) -> io::Result<()> {
    let aside = path.with_extension("new");
    fs::write(&aside, value.to_string())?;
    fs::rename(aside, path)
}

fn needs(needs: &Needs) -> Value {
    json!({ "cpus": needs.cpus, "memory": needs.memory, "gpus": needs.gpus })
}

impl Kept {
    fn read(dir: &Path) -> io::Result<Self> {
        let who: Value = serde_json::from_slice(&fs::read(dir.join(FILE))?)?;
        let given: Value = serde_json::from_slice(&fs::read(dir.join(NEEDS))?)?;
        let small = |value: &Value| u32::try_from(value.as_u64().unwrap_or(0)).unwrap_or(u32::MAX);
        let needs = Needs {
            cpus: small(&given["cpus"]),
            memory: given["memory"].as_u64().unwrap_or(0),
            gpus: small(&given["gpus"]),
            ..Needs::default()
        };
        Ok(Self { pid: small(&who["pid"]), started: who["started"].as_u64().unwrap_or(0), needs })
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
pub fn size() -> Amount {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let total = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo(&text)).unwrap_or(0);
    let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limit =
        limits.iter().filter_map(|path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok()).min();
    Amount {
        cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
        memory: limit.map_or(total, |limit| limit.min(total)),
        gpus: 0,
    }
}

fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

fn unknown(source: io::Error) -> Unknown {
    Unknown::Start { program: "windlass-agent", source }
}

impl Scheduler for Local {
    type Room = Machine;

    async fn look(&self) -> Result<Lower, Unknown> {
        self.children.lock().retain_mut(|child| !matches!(child.try_wait(), Ok(Some(_)) | Err(_)));
        let asked_at = self.now();
        let attempts = self.attempts().map_err(unknown)?;
        let mut ended = self.ended.lock();
        let jobs: Vec<Job> = attempts
            .into_iter()
            .map(|(attempt, kept)| {
                let life = if kept.is_alive() {
                    Life::Running
                } else {
                    Life::Ended(*ended.entry(attempt.clone()).or_insert(asked_at))
                };
                Job { attempt, id: kept.pid.to_string(), life, priority: None }
            })
            .collect();
        ended.retain(|attempt, since| {
            let is_old = asked_at.since(*since) > FORGET_AFTER;
            if is_old {
                // What cannot be removed now is tried again at the next look.
                let _ = fs::remove_dir_all(self.settings.dir.join(attempt.to_string()));
            }
            !is_old && jobs.iter().any(|job| job.attempt == *attempt)
        });
        Ok(Lower { jobs, asked_at, is_whole: true })
    }

    async fn room(&self, lower: &Lower) -> Result<Machine, Unknown> {
        let mut used = Amount::default();
        for (attempt, kept) in self.attempts().map_err(unknown)? {
            if lower.find(&attempt).is_some_and(|job| !job.life.is_over()) {
                used.cpus = used.cpus.saturating_add(kept.needs.cpus);
                used.memory = used.memory.saturating_add(kept.needs.memory);
                used.gpus = used.gpus.saturating_add(kept.needs.gpus);
            }
        }
        Ok(Machine::new(self.settings.size.unwrap_or_else(size), used))
    }

    async fn submit(&self, order: &Order) -> Result<String, SubmitError> {
        match self.start(order) {
            Ok(id) => Ok(id.to_string()),
            Err(error) => Err(SubmitError::Refused { why: format!("start the executor: {error}") }),
        }
    }

    async fn stop(&self, job: &str, pressure: Pressure) -> Result<(), Unknown> {
        let attempts = self.attempts().map_err(unknown)?;
        let ours = attempts.iter().find(|(_, kept)| kept.pid.to_string() == job && kept.is_alive());
        let Some(pid) = ours.and_then(|(_, kept)| Pid::from_raw(i32::try_from(kept.pid).ok()?)) else {
            return Ok(());
        };
        // One that is gone already needs no signal.
        let _ = match pressure {
            Pressure::Ask => kill_process(pid, Signal::TERM),
            Pressure::Force => kill_process_group(pid, Signal::KILL),
        };
        Ok(())
    }

    /// What runs here runs; only the order of those that wait has a meaning.
    async fn renice(&self, _job: &str, _priority: u64) -> Result<(), Unknown> {
        Ok(())
    }
}
