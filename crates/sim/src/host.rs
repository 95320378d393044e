//! A simulated host: a shim and its runners as the server sees them, on virtual time.
//!
//! It keeps the promises of a real agent (epochs only grow, a submission starts at most one container ever, devices
//! have one owner) and records every effect in a journal that the checkers read. It uses the same device ledger as the
//! real agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use parking_lot::Mutex;

use windlass_api::agent::{
    client::LogPart,
    runner::{JobRecord, JobState, Metrics},
    shim::{HostInfo, InstanceHealth, TaskInfo, TaskSpec, TaskStatus},
};
use windlass_model::{
    device_allocator::{DeviceAllocator, DeviceCount},
    id::{InstanceId, SubmissionId},
};
use windlass_server::agents::{AgentError, CallContext, HostReport, JobProgress};

/// One effect on one host, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostEntry {
    pub at: i64,
    pub host: InstanceId,
    pub submission: SubmissionId,
    pub epoch: i64,
    pub kind: HostEffect,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostEffect {
    ContainerStarted,
    ContainerExited,
    GpuAcquired(String),
    GpuReleased(String),
    RefusedEpoch,
    Removed,
}

/// Behaviour of a job's commands, read from its environment.
#[derive(Clone, Debug)]
pub struct JobScript {
    pub run_us: i64,
    /// Number of first submissions that fail; later ones exit with 0.
    pub fails: usize,
    /// Exit code of a failure.
    pub exit: i32,
    /// Key that all attempts of a managed task share, although each is a separate run.
    pub work: Option<String>,
    /// Log output in bytes per second.
    pub log_rate: u64,
    /// Time after which the runner ends it.
    pub max_us: Option<i64>,
}

/// Length of a log line, which contains the submission's ID and the line number.
const LOG_LINE: u64 = 36 + 1 + 8 + 1;
/// Maximum size of a log response.
const LOG_PART_MAX: usize = 16 * 1024;

/// Returns a part of a job's log. The content is deterministic, so that the stored log can be compared with it.
pub fn log_bytes(submission: SubmissionId, range: std::ops::Range<u64>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let line = format!("{submission} {:08}\n", at / LOG_LINE);
        let from = usize::try_from(at % LOG_LINE).unwrap_or_default();
        let to =
            usize::try_from((range.end - at).saturating_add(at % LOG_LINE).min(LOG_LINE)).unwrap_or_default();
        bytes.extend_from_slice(&line.as_bytes()[from..to]);
        at = (at / LOG_LINE + 1) * LOG_LINE;
    }
    bytes
}

/// Submissions of each job that reached any host.
pub type SubmissionsByJob = Arc<Mutex<BTreeMap<String, BTreeSet<SubmissionId>>>>;

#[derive(Debug)]
struct SimTask {
    /// Number of earlier submissions of its job that reached any host.
    earlier: usize,
    /// Exit code of its commands.
    exit: i32,
    epoch: i64,
    /// Time at which the container starts or started.
    starts_at: i64,
    started: bool,
    /// Time at which the commands were submitted.
    job_at: Option<i64>,
    log_rate: u64,
    /// It ends because its time limit has passed.
    overruns: bool,
    /// Time at which the container ends, once known.
    ends_at: Option<i64>,
    ended: Option<TaskEnd>,
}

#[derive(Clone, Debug)]
struct TaskEnd {
    at: i64,
    reason: String,
    exit: Option<i32>,
}

impl SimTask {
    /// Length of its log; the last output coincides with its end.
    fn log_end(&self, now: i64) -> u64 {
        let Some(from) = self.job_at else { return 0 };
        let until = self.ended.as_ref().map_or(now, |ended| ended.at);
        let millis = u64::try_from((until - from).max(0)).unwrap_or_default() / 1_000;
        let last = if self.ended.is_some() { 7 } else { 0 };
        millis * self.log_rate / 1_000 + last
    }
}

#[derive(Debug)]
pub struct SimHost {
    pub id: InstanceId,
    tasks: BTreeMap<SubmissionId, SimTask>,
    /// Epochs of removed submissions, so that a late call cannot restart them.
    gone: BTreeMap<SubmissionId, i64>,
    ledger: DeviceAllocator<String, SubmissionId>,
    tries: SubmissionsByJob,
    /// Time from which its agent responds.
    up_at: i64,
    pub journal: Vec<HostEntry>,
    /// Length of the logs of ended jobs; those of a deleted machine are lost with it.
    pub logs: BTreeMap<SubmissionId, u64>,
}

/// The host never responds.
const NEVER_UP: i64 = i64::MAX;

impl SimHost {
    pub fn new(id: InstanceId, gpus: usize, tries: SubmissionsByJob) -> Self {
        let ledger = DeviceAllocator::new((0..gpus).map(|n| format!("GPU-{n}")));
        Self {
            id,
            tasks: BTreeMap::new(),
            gone: BTreeMap::new(),
            ledger,
            tries,
            up_at: NEVER_UP,
            journal: Vec::new(),
            logs: BTreeMap::new(),
        }
    }

    /// Boots a new machine for this instance, whose agent responds from `up_at` on.
    pub fn boot(&mut self, up_at: i64) {
        self.up_at = up_at;
    }

    /// Deploys an agent to an existing host.
    pub fn deploy(&mut self, now: i64) {
        self.up_at = self.up_at.min(now);
    }

    pub fn answers(&self, now: i64) -> bool {
        now >= self.up_at
    }

    /// Deletes the machine with everything on it.
    pub fn power_off(&mut self, at: i64) {
        self.reboot(at);
        for (id, task) in std::mem::take(&mut self.tasks) {
            self.gone.insert(id, task.epoch);
            self.logs.remove(&id);
        }
        self.up_at = NEVER_UP;
    }

    pub fn running(&mut self, now: i64) -> usize {
        self.advance(now);
        self.alive().count()
    }

    /// Submissions with a running container.
    pub fn alive(&self) -> impl Iterator<Item = SubmissionId> {
        self.tasks.iter().filter(|(_, t)| t.started && t.ended.is_none()).map(|(id, _)| *id)
    }

    /// Applies everything that is due by `now`, in order of time.
    pub fn advance(&mut self, now: i64) {
        loop {
            let next = self
                .tasks
                .iter()
                .filter(|(_, t)| t.ended.is_none())
                .filter_map(|(id, t)| {
                    let at = if t.started { t.ends_at? } else { t.starts_at };
                    (at <= now).then_some((at, *id))
                })
                .min();
            let Some((at, id)) = next else { return };
            let Some(task) = self.tasks.get_mut(&id) else { return };
            if task.started {
                let exit = task.exit;
                let reason = match exit {
                    _ if task.overruns => "max_duration_exceeded",
                    0 => "done_by_runner",
                    _ => "container_exited_with_error",
                };
                self.end(id, at, reason, (!is_max_duration_exceeded(reason)).then_some(exit));
            } else {
                task.started = true;
                let epoch = task.epoch;
                self.write(at, id, epoch, HostEffect::ContainerStarted);
            }
        }
    }

    /// Simulates a power loss: every container dies, and the agent rebuilds its ledger from what is alive.
    pub fn reboot(&mut self, now: i64) {
        self.advance(now);
        let open: Vec<_> = self.tasks.iter().filter(|(_, t)| t.ended.is_none()).map(|(id, _)| *id).collect();
        for id in open {
            self.end(id, now, "executor_error", None);
        }
    }

    pub fn submit_task(&mut self, call: CallContext, task: &TaskSpec, now: i64) -> Result<(), AgentError> {
        if self.gone.contains_key(&call.submission) {
            return Err(AgentError::Gone { submission: call.submission });
        }
        self.check_epoch(call, now)?;
        if self.tasks.contains_key(&call.submission) {
            return Ok(());
        }
        let earlier = count_earlier(&self.tries, &task.name, call.submission);
        self.tasks.insert(
            call.submission,
            SimTask {
                earlier,
                exit: 0,
                epoch: call.epoch,
                starts_at: now + pull_us(&task.image_name),
                started: false,
                job_at: None,
                log_rate: 0,
                overruns: false,
                ends_at: None,
                ended: None,
            },
        );
        // A task is accepted before it is prepared: one that cannot get its devices ends by itself.
        let want = DeviceCount::Count(usize::try_from(task.gpu).unwrap_or_default());
        match self.ledger.acquire(&call.submission, want) {
            Ok(gpus) => {
                for gpu in gpus {
                    self.write(now, call.submission, call.epoch, HostEffect::GpuAcquired(gpu));
                }
            }
            Err(_) => self.end(call.submission, now, "executor_error", None),
        }
        Ok(())
    }

    pub fn task(&mut self, call: CallContext, now: i64) -> Result<TaskInfo, AgentError> {
        self.check_epoch(call, now)?;
        let task = self.find_task(call)?;
        let status = match (&task.ended, task.started) {
            (Some(_), _) => TaskStatus::Terminated,
            (None, true) => TaskStatus::Running,
            (None, false) => TaskStatus::Pulling,
        };
        Ok(TaskInfo {
            id: call.submission,
            status,
            termination_reason: task.ended.as_ref().map(|e| e.reason.clone()).unwrap_or_default(),
            termination_message: String::new(),
            ports: task.started.then(Vec::new),
            image_pull_progress: None,
            container_name: String::new(),
            container_id: String::new(),
            gpus_ids: Vec::new(),
            exit_status: task.ended.as_ref().and_then(|e| e.exit),
            detail: None,
            epoch: task.epoch,
        })
    }

    pub fn start_job(&mut self, call: CallContext, script: &JobScript, now: i64) -> Result<(), AgentError> {
        self.check_epoch(call, now)?;
        let tries = self.tries.clone();
        let task = self.find_task(call)?;
        if task.ended.is_some() || !task.started {
            return Err(AgentError::silent(call.instance));
        }
        if task.job_at.is_none() {
            task.job_at = Some(now);
            task.log_rate = script.log_rate;
            if let Some(work) = &script.work {
                task.earlier = count_earlier(&tries, work, call.submission);
            }
            task.exit = if task.earlier < script.fails { script.exit } else { 0 };
            task.overruns = script.max_us.is_some_and(|max| max < script.run_us);
            task.ends_at = Some(now + script.max_us.map_or(script.run_us, |max| max.min(script.run_us)));
        }
        Ok(())
    }

    pub fn pull(&mut self, call: CallContext, now: i64) -> Result<JobProgress, AgentError> {
        self.check_epoch(call, now)?;
        let task = self.find_task(call)?;
        if !task.started {
            return Err(AgentError::silent(call.instance));
        }
        let state = |state: &str, reason: &str, exit_status| JobState {
            state: state.into(),
            timestamp: now / 1_000,
            termination_reason: reason.into(),
            termination_message: String::new(),
            detail: None,
            exit_status,
        };
        let states = match (&task.ended, task.job_at) {
            (Some(ended), _) if is_max_duration_exceeded(&ended.reason) => {
                vec![state("terminated", &ended.reason, None)]
            }
            (Some(ended), _) if ended.exit == Some(0) => vec![state("done", "", ended.exit)],
            (Some(ended), _) => vec![state("failed", &ended.reason, ended.exit)],
            (None, Some(_)) => vec![state("running", "", None)],
            (None, None) => vec![],
        };
        let log_end = task.log_end(now);
        let record = JobRecord { states, log_end, log_complete: task.ended.is_some() };
        Ok(JobProgress { record, no_connections_secs: None })
    }

    /// Reads a log. Runners write nothing; jobs write deterministic content.
    pub fn log(
        &mut self,
        call: CallContext,
        stream: &str,
        offset: u64,
        limit: usize,
        now: i64,
    ) -> Result<LogPart, AgentError> {
        self.check_epoch(call, now)?;
        let task = self.find_task(call)?;
        let is_complete = task.ended.is_some();
        let end = if stream == "job" { task.log_end(now) } else { 0 };
        let until = end.min(offset.saturating_add(limit.min(LOG_PART_MAX) as u64));
        let bytes = log_bytes(call.submission, offset..until);
        Ok(LogPart { bytes: bytes.into(), end, is_complete })
    }

    pub fn metrics(&mut self, call: CallContext, now: i64) -> Result<Metrics, AgentError> {
        self.check_epoch(call, now)?;
        self.find_task(call)?;
        Ok(Metrics {
            timestamp_micro: now,
            cpu_usage_micro: 0,
            memory_usage_bytes: 0,
            memory_working_set_bytes: 0,
            gpus: Vec::new(),
        })
    }

    pub fn news(&mut self, now: i64) -> HostReport {
        self.advance(now);
        HostReport {
            version: "0.0.0".into(),
            info: HostInfo {
                gpu_vendor: "nvidia".into(),
                gpu_name: "A100".into(),
                gpu_memory: 81_920,
                gpu_count: 4,
                gpu_compute_capability: Some((8, 0)),
                addresses: vec!["10.0.0.1/24".into()],
                disk_size: 1 << 40,
                cpus: 32,
                memory: 256 << 30,
                processes: None,
            },
            health: InstanceHealth::default(),
        }
    }

    /// Stops the commands, which end a second later.
    pub fn stop_job(&mut self, call: CallContext, now: i64) -> Result<(), AgentError> {
        self.check_epoch(call, now)?;
        let task = self.find_task(call)?;
        if task.ended.is_none() && task.started {
            task.exit = 130;
            task.overruns = false;
            task.ends_at = Some(task.ends_at.map_or(now + 1_000_000, |at| at.min(now + 1_000_000)));
        }
        Ok(())
    }

    pub fn terminate_task(&mut self, call: CallContext, reason: &str, now: i64) -> Result<(), AgentError> {
        self.check_epoch(call, now)?;
        let task = self.find_task(call)?;
        if task.ended.is_none() {
            self.end(call.submission, now, reason, None);
        } else {
            // A repeated call. The devices were released when the container ended; a second release must not affect
            // their new owner.
            self.release_gpus(call.submission, call.epoch, now);
        }
        Ok(())
    }

    pub fn remove_task(&mut self, call: CallContext, now: i64) -> Result<(), AgentError> {
        self.check_epoch(call, now)?;
        match self.tasks.get(&call.submission) {
            None => self.record_removed(call, now),
            Some(task) if task.ended.is_none() => {
                Err(AgentError::Conflict { reason: "task is not terminated".into() })
            }
            Some(task) => {
                self.gone.insert(call.submission, task.epoch);
                self.tasks.remove(&call.submission);
                self.write(now, call.submission, call.epoch, HostEffect::Removed);
                Ok(())
            }
        }
    }

    /// Records the removal of an unknown task too: a late copy of it must not start.
    fn record_removed(&mut self, call: CallContext, now: i64) -> Result<(), AgentError> {
        let seen = *self.gone.entry(call.submission).or_insert(call.epoch);
        if call.epoch < seen {
            self.write(now, call.submission, call.epoch, HostEffect::RefusedEpoch);
            return Err(AgentError::Fenced { epoch: call.epoch, seen });
        }
        Ok(())
    }

    /// Every task that the host stores, including ended ones.
    pub fn tasks(&mut self, now: i64) -> Vec<SubmissionId> {
        self.advance(now);
        self.tasks.keys().copied().collect()
    }

    fn find_task(&mut self, call: CallContext) -> Result<&mut SimTask, AgentError> {
        self.tasks.get_mut(&call.submission).ok_or(AgentError::UnknownTask { submission: call.submission })
    }

    /// Checks that epochs of one submission only grow.
    fn check_epoch(&mut self, call: CallContext, now: i64) -> Result<(), AgentError> {
        self.advance(now);
        if let Some(task) = self.tasks.get_mut(&call.submission) {
            let seen = task.epoch;
            if call.epoch < seen {
                self.write(now, call.submission, call.epoch, HostEffect::RefusedEpoch);
                return Err(AgentError::Fenced { epoch: call.epoch, seen });
            }
            task.epoch = call.epoch;
        }
        Ok(())
    }

    fn end(&mut self, id: SubmissionId, at: i64, reason: &str, exit: Option<i32>) {
        let Some(task) = self.tasks.get_mut(&id) else { return };
        task.ended = Some(TaskEnd { at, reason: reason.into(), exit });
        let (started, epoch, log_end) = (task.started, task.epoch, task.log_end(at));
        self.logs.insert(id, log_end);
        if started {
            self.write(at, id, epoch, HostEffect::ContainerExited);
        }
        self.release_gpus(id, epoch, at);
    }

    fn release_gpus(&mut self, id: SubmissionId, epoch: i64, at: i64) {
        for gpu in self.ledger.release(&id) {
            self.write(at, id, epoch, HostEffect::GpuReleased(gpu));
        }
    }

    fn write(&mut self, at: i64, submission: SubmissionId, epoch: i64, kind: HostEffect) {
        self.journal.push(HostEntry { at, host: self.id, submission, epoch, kind });
    }
}

/// Records a submission of a job, and returns how many of them reached any host before.
fn count_earlier(tries: &SubmissionsByJob, job: &str, submission: SubmissionId) -> usize {
    let mut tries = tries.lock();
    let of_job = tries.entry(job.to_owned()).or_default();
    of_job.insert(submission);
    of_job.len() - 1
}

fn is_max_duration_exceeded(reason: &str) -> bool {
    reason == "max_duration_exceeded"
}

/// Reads the pull duration from the image tag: `sim:pull-MS`.
fn pull_us(image: &str) -> i64 {
    image.rsplit_once("pull-").and_then(|(_, ms)| ms.parse::<i64>().ok()).unwrap_or_default() * 1_000
}
