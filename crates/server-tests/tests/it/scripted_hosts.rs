//! The only simulated agent of these tests: hosts that follow a script and record the calls to them.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use parking_lot::Mutex;
use windlass_api::agent::{
    client::LogPart,
    runner::{JobRecord, JobStarted, JobState, Metrics},
    shim::{HostInfo, InstanceHealth, Port, ProcessesInfo, TaskInfo, TaskSpec, TaskStatus},
};
use windlass_model::id::{InstanceId, SubmissionId};
use windlass_server::agents::{
    AgentApi, AgentError, AgentFuture, CallContext, HostReport, JobProgress, JobStart,
};

/// Behaviour of all tasks and jobs on the hosts.
#[derive(Clone, Default)]
pub(crate) struct HostScript {
    pub(crate) silent: bool,
    /// The host answers, except calls about a job.
    pub(crate) deaf: bool,
    /// The host refuses every task with this message.
    pub(crate) refuses: Option<&'static str>,
    /// Tasks stay in this status.
    pub(crate) stuck: Option<TaskStatus>,
    /// Tasks end with this reason and message before their runner starts.
    pub(crate) task_ends: Option<(&'static str, &'static str)>,
    /// Commands end in this state as soon as they are started.
    pub(crate) job_ends: Option<JobState>,
    /// Commands go on after a stop request.
    pub(crate) ignores_stop: bool,
    pub(crate) no_connections_secs: Option<i64>,
    pub(crate) log: Vec<u8>,
    /// Plain processes that the hosts report.
    pub(crate) processes: Option<ProcessesInfo>,
    /// Error of the container engines, which do not answer.
    pub(crate) engine: Option<&'static str>,
}

struct ScriptedTask {
    on: InstanceId,
    start: Option<JobStart>,
    ended: Option<JobState>,
    stopped: bool,
    terminated: Option<String>,
}

type LogReadFn = Box<dyn Fn(u64, usize) -> Result<LogPart, AgentError> + Send + Sync>;
type MetricsFn = Box<dyn Fn() -> Metrics + Send + Sync>;

/// The hosts, and all calls to them.
#[derive(Default)]
pub(crate) struct ScriptedHosts {
    pub(crate) script: Mutex<HostScript>,
    tasks: Mutex<BTreeMap<SubmissionId, ScriptedTask>>,
    pub(crate) specs: Mutex<Vec<TaskSpec>>,
    pub(crate) starts: Mutex<Vec<JobStart>>,
    /// `stop`, `terminate REASON` and `remove`, in order.
    pub(crate) calls: Mutex<Vec<String>>,
    /// Hosts that do not answer, while the others do.
    pub(crate) silent: Mutex<BTreeSet<InstanceId>>,
    pub(crate) forgotten: Mutex<BTreeSet<InstanceId>>,
    /// Answers reads of any log instead of the script.
    log_source: Option<LogReadFn>,
    /// Delay of each read of a log.
    pub(crate) log_pause: Duration,
    /// Offsets and limits of the reads of logs.
    pub(crate) log_reads: Mutex<Vec<(u64, usize)>>,
    metrics_source: Option<MetricsFn>,
}

pub(crate) fn end_state(state: &str, reason: &str, exit_status: Option<i32>) -> JobState {
    JobState {
        state: state.into(),
        timestamp: 2,
        termination_reason: reason.into(),
        termination_message: String::new(),
        detail: None,
        exit_status,
    }
}

impl ScriptedHosts {
    /// Hosts whose logs are read from `source`.
    pub(crate) fn with_log(
        source: impl Fn(u64, usize) -> Result<LogPart, AgentError> + Send + Sync + 'static,
    ) -> Self {
        Self { log_source: Some(Box::new(source)), ..Self::default() }
    }

    /// Hosts that report metrics of their jobs.
    pub(crate) fn with_metrics(source: impl Fn() -> Metrics + Send + Sync + 'static) -> Self {
        Self { metrics_source: Some(Box::new(source)), ..Self::default() }
    }

    /// Ends all present jobs successfully.
    pub(crate) fn finish_all(&self) {
        for task in self.tasks.lock().values_mut() {
            task.ended.get_or_insert_with(|| end_state("done", "", Some(0)));
        }
    }

    pub(crate) fn tasks_on(&self, instance: InstanceId) -> usize {
        self.tasks.lock().values().filter(|task| task.on == instance).count()
    }

    fn is_silent(&self, instance: InstanceId) -> bool {
        self.script.lock().silent || self.silent.lock().contains(&instance)
    }

    fn script(&self, call: CallContext) -> Result<HostScript, AgentError> {
        let script = self.script.lock().clone();
        let answers = !self.is_silent(call.instance) && !script.deaf;
        if answers { Ok(script) } else { Err(AgentError::silent(call.instance)) }
    }

    fn on<T>(
        &self,
        call: CallContext,
        act: impl FnOnce(&HostScript, &mut ScriptedTask) -> Result<T, AgentError>,
    ) -> Result<T, AgentError> {
        let script = self.script(call)?;
        let mut tasks = self.tasks.lock();
        let task = tasks.get_mut(&call.submission);
        act(&script, task.ok_or(AgentError::UnknownTask { submission: call.submission })?)
    }

    fn info(script: &HostScript, call: CallContext, task: &ScriptedTask) -> TaskInfo {
        let (reason, message) = script.task_ends.unwrap_or_default();
        let status = match (&task.terminated, script.task_ends, script.stuck) {
            (Some(_), _, _) | (None, Some(_), _) => TaskStatus::Terminated,
            (None, None, Some(stuck)) => stuck,
            (None, None, None) => TaskStatus::Running,
        };
        TaskInfo {
            id: call.submission,
            status,
            termination_reason: task.terminated.clone().unwrap_or_else(|| reason.into()),
            termination_message: message.into(),
            ports: Some(vec![Port { host: 32_768, container: 10_022 }]),
            image_pull_progress: None,
            container_name: "box".into(),
            container_id: "c0".into(),
            gpus_ids: vec!["GPU-0".into()],
            exit_status: None,
            detail: None,
            epoch: call.epoch,
        }
    }
}

fn ready_answer<'a, T: Send + 'a>(answer: Result<T, AgentError>) -> AgentFuture<'a, T> {
    Box::pin(std::future::ready(answer))
}

impl AgentApi for ScriptedHosts {
    fn tasks(&self, instance: InstanceId) -> AgentFuture<'_, Vec<SubmissionId>> {
        ready_answer(if self.is_silent(instance) {
            Err(AgentError::silent(instance))
        } else {
            Ok(self.tasks.lock().iter().filter(|(_, task)| task.on == instance).map(|(id, _)| *id).collect())
        })
    }
    fn host(&self, instance: InstanceId) -> AgentFuture<'_, HostReport> {
        let info = HostInfo {
            gpu_vendor: "nvidia".into(),
            gpu_name: "A100".into(),
            gpu_memory: 81_920,
            gpu_count: 4,
            gpu_compute_capability: None,
            addresses: vec![],
            disk_size: 1 << 40,
            cpus: 32,
            memory: 64 << 30,
            processes: self.script.lock().processes.clone(),
        };
        let engine = self.script.lock().engine.map(str::to_owned);
        let health = InstanceHealth { engine, ..InstanceHealth::default() };
        let news = HostReport { version: "1.2.3".into(), info, health };
        ready_answer(if self.is_silent(instance) { Err(AgentError::silent(instance)) } else { Ok(news) })
    }
    fn submit_task<'a>(&'a self, call: CallContext, task: &'a TaskSpec) -> AgentFuture<'a, ()> {
        ready_answer(self.script(call).and_then(|script| match script.refuses {
            Some(reason) => Err(AgentError::Refused { reason: reason.into() }),
            None => {
                self.specs.lock().push(task.clone());
                let fresh = ScriptedTask {
                    on: call.instance,
                    start: None,
                    ended: None,
                    stopped: false,
                    terminated: None,
                };
                self.tasks.lock().entry(call.submission).or_insert(fresh);
                Ok(())
            }
        }))
    }
    fn task(&self, call: CallContext) -> AgentFuture<'_, TaskInfo> {
        ready_answer(self.on(call, |script, task| Ok(Self::info(script, call, task))))
    }
    fn terminate_task<'a>(
        &'a self,
        call: CallContext,
        reason: &'a str,
        _timeout_secs: i64,
    ) -> AgentFuture<'a, ()> {
        self.calls.lock().push(format!("terminate {reason}"));
        ready_answer(self.on(call, |_, task| {
            task.terminated.get_or_insert_with(|| reason.to_owned());
            Ok(())
        }))
    }
    fn remove_task(&self, call: CallContext) -> AgentFuture<'_, ()> {
        self.calls.lock().push("remove".into());
        ready_answer(self.script(call).map(|_| drop(self.tasks.lock().remove(&call.submission))))
    }
    fn start_job<'a>(&'a self, call: CallContext, job: &'a JobStart) -> AgentFuture<'a, Option<JobStarted>> {
        ready_answer(self.on(call, |_, task| {
            self.starts.lock().push(job.clone());
            task.start = Some(job.clone());
            Ok(Some(JobStarted { working_dir: "/workflow".into(), username: "root".into() }))
        }))
    }
    fn pull(&self, call: CallContext) -> AgentFuture<'_, JobProgress> {
        ready_answer(self.on(call, |script, task| {
            if task.terminated.is_some() || script.task_ends.is_some() {
                return Err(AgentError::silent(call.instance));
            }
            let ended = task.ended.clone().or_else(|| script.job_ends.clone());
            let ended = ended.filter(|_| task.start.is_some());
            let running = task.start.as_ref().map(|_| end_state("running", "", None));
            let log_complete = ended.is_some();
            let states: Vec<_> = running.into_iter().chain(ended).collect();
            let record = JobRecord { states, log_end: script.log.len() as u64, log_complete };
            Ok(JobProgress { record, no_connections_secs: script.no_connections_secs })
        }))
    }
    fn log<'a>(
        &'a self,
        call: CallContext,
        stream: &'a str,
        offset: u64,
        limit: usize,
    ) -> AgentFuture<'a, LogPart> {
        self.log_reads.lock().push((offset, limit));
        Box::pin(async move {
            tokio::time::sleep(self.log_pause).await;
            if let Some(source) = &self.log_source {
                return source(offset, limit);
            }
            self.on(call, |script, task| {
                let log: &[u8] = if stream == "job" { &script.log } else { b"" };
                let from = usize::try_from(offset).unwrap().min(log.len());
                let bytes = log[from..log.len().min(from + limit)].to_vec().into();
                let over = task.ended.is_some()
                    || script.job_ends.is_some()
                    || (task.stopped && !script.ignores_stop);
                Ok(LogPart { bytes, end: log.len() as u64, is_complete: over })
            })
        })
    }
    fn metrics(&self, call: CallContext) -> AgentFuture<'_, Metrics> {
        ready_answer(match &self.metrics_source {
            Some(source) => Ok(source()),
            None => Err(AgentError::silent(call.instance)),
        })
    }
    fn stop_job(&self, call: CallContext, grace_secs: u64, is_preempted: bool) -> AgentFuture<'_, ()> {
        self.calls.lock().push(match is_preempted {
            true => format!("stop within {grace_secs} s, preempted"),
            false => "stop".into(),
        });
        ready_answer(self.on(call, |script, task| {
            task.stopped = true;
            if !script.ignores_stop {
                task.ended.get_or_insert_with(|| end_state("terminated", "", Some(130)));
            }
            Ok(())
        }))
    }
    fn forget(&self, instance: InstanceId) {
        self.forgotten.lock().insert(instance);
    }
}
