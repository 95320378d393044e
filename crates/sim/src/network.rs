//! The network between server replicas and simulated hosts: slow, lossy, partitioned, with duplicated calls.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::{Instant, sleep, sleep_until};
use windlass_api::agent::{
    client::LogPart,
    runner::{JobStarted, Metrics},
    shim::{TaskInfo, TaskSpec},
};
use windlass_model::id::{InstanceId, SubmissionId};
use windlass_server::agents::{
    AgentApi, AgentError, AgentFuture, CallContext, HostReport, JobProgress, JobStart,
};

use crate::{
    cloud::Cloud,
    host::{JobScript, SimHost, SubmissionsByJob},
    rng::Rng,
};

/// Timeout of a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(9);

/// Fault rates of calls, in percent. All zero after the faults have stopped.
#[derive(Clone, Copy, Debug, Default)]
pub struct NetworkFaultRates {
    /// The request never arrives.
    pub lost: u64,
    /// It arrives and takes effect; the response is lost.
    pub unanswered: u64,
    /// It arrives again, later.
    pub doubled: u64,
    /// It takes seconds instead of milliseconds.
    pub slow: u64,
}

/// The hosts, and the network between them and the servers.
pub struct SimState {
    started: Instant,
    epoch_us: i64,
    pub(crate) hosts: BTreeMap<InstanceId, SimHost>,
    pub cloud: Cloud,
    pub(crate) tries: SubmissionsByJob,
    pub(crate) rng: Rng,
    rates: NetworkFaultRates,
    /// End of the partition of each unreachable host.
    cut_until: BTreeMap<InstanceId, Instant>,
    /// Number of faults of each kind that occurred: a fault that never occurs proves nothing.
    pub fired: BTreeMap<&'static str, u64>,
}

pub type SharedSimState = Arc<Mutex<SimState>>;

impl SimState {
    pub fn new(epoch_us: i64, rng: Rng) -> SharedSimState {
        Arc::new(Mutex::new(Self {
            started: Instant::now(),
            epoch_us,
            hosts: BTreeMap::new(),
            cloud: Cloud::default(),
            tries: SubmissionsByJob::default(),
            rng,
            rates: NetworkFaultRates::default(),
            cut_until: BTreeMap::new(),
            fired: BTreeMap::new(),
        }))
    }

    /// True time of the simulation, in microseconds since 1970.
    pub fn now(&self) -> i64 {
        self.epoch_us + i64::try_from(self.started.elapsed().as_micros()).unwrap_or(i64::MAX)
    }

    /// Adds a host without an agent.
    pub fn add_host(&mut self, id: InstanceId, gpus: usize) {
        let host = SimHost::new(id, gpus, self.tries.clone());
        self.hosts.insert(id, host);
    }

    /// Hosts whose agents respond now.
    pub fn up(&self) -> Vec<InstanceId> {
        let now = self.now();
        self.hosts.values().filter(|host| host.answers(now)).map(|host| host.id).collect()
    }

    pub fn set_rates(&mut self, rates: NetworkFaultRates) {
        self.rates = rates;
    }

    pub fn cut(&mut self, host: InstanceId, lasts: Duration) {
        self.cut_until.insert(host, Instant::now() + lasts);
        self.count("partition");
    }

    pub fn heal(&mut self) {
        self.cut_until.clear();
    }

    pub fn reboot(&mut self, host: InstanceId) {
        let now = self.now();
        if let Some(host) = self.hosts.get_mut(&host) {
            host.reboot(now);
        }
        self.count("reboot");
    }

    pub fn hosts(&mut self) -> impl Iterator<Item = &SimHost> {
        let now = self.now();
        self.advance_cloud(now);
        self.hosts.values_mut().map(move |h| {
            h.advance(now);
            &*h
        })
    }

    pub(crate) fn count(&mut self, fault: &'static str) {
        *self.fired.entry(fault).or_default() += 1;
    }

    pub(crate) fn should_fail(&mut self, percent: u64, fault: &'static str) -> bool {
        let hit = percent > 0 && self.rng.chance(percent);
        if hit {
            self.count(fault);
        }
        hit
    }

    pub(crate) fn is_partitioned(&self, host: InstanceId) -> bool {
        self.cut_until.get(&host).is_some_and(|until| Instant::now() < *until)
    }
}

/// A replica that is frozen until a certain time; all its calls wait.
#[derive(Clone, Default)]
pub struct ReplicaFreeze(Arc<Mutex<Option<Instant>>>);

impl ReplicaFreeze {
    pub fn until(&self, moment: Instant) {
        *self.0.lock() = Some(moment);
    }

    /// Returns whether the replica is frozen, or was until recently and may still be in the same call.
    pub fn was_frozen(&self) -> bool {
        self.0.lock().is_some_and(|until| Instant::now() < until + CALL_TIMEOUT)
    }

    pub async fn wait(&self) {
        let until = *self.0.lock();
        if let Some(until) = until {
            sleep_until(until).await;
        }
    }
}

/// One replica's connection to the hosts.
pub struct SimNetwork {
    pub state: SharedSimState,
    pub freeze: ReplicaFreeze,
}

type HostCall<T> = Arc<dyn Fn(&mut SimHost, i64) -> Result<T, AgentError> + Send + Sync>;

impl SimNetwork {
    fn call<T: Send + 'static>(&self, instance: InstanceId, effect: HostCall<T>) -> AgentFuture<'_, T> {
        let unreachable = move || AgentError::silent(instance);
        Box::pin(async move {
            self.freeze.wait().await;
            let (there, back, lost, unanswered, doubled) = {
                let mut w = self.state.lock();
                let rates = w.rates;
                let slow = w.should_fail(rates.slow, "slow call");
                let most = if slow { 8_000 } else { 40 };
                let (there, back) = (w.rng.millis(1, most), w.rng.millis(1, most));
                let lost = w.should_fail(rates.lost, "lost request") || w.is_partitioned(instance);
                let unanswered = w.should_fail(rates.unanswered, "lost response");
                let doubled =
                    w.should_fail(rates.doubled, "duplicated call").then(|| w.rng.millis(50, 30_000));
                (there, back, lost, unanswered, doubled)
            };
            if lost {
                sleep(CALL_TIMEOUT).await;
                return Err(unreachable());
            }
            if let Some(later) = doubled {
                let (state, effect) = (self.state.clone(), effect.clone());
                tokio::spawn(async move {
                    sleep(later).await;
                    // The response of a late duplicate is discarded.
                    let _ = deliver(&state, instance, &effect);
                });
            }
            sleep(there).await;
            let answer = deliver(&self.state, instance, &effect);
            if unanswered {
                sleep(CALL_TIMEOUT).await;
                return Err(unreachable());
            }
            sleep(back).await;
            self.freeze.wait().await;
            answer
        })
    }
}

fn deliver<T>(state: &SharedSimState, instance: InstanceId, effect: &HostCall<T>) -> Result<T, AgentError> {
    let mut w = state.lock();
    let now = w.now();
    // A machine whose end is due is deleted before it can respond.
    w.advance_cloud(now);
    match w.hosts.get_mut(&instance) {
        Some(host) if host.answers(now) => effect(host, now),
        // Not yet or no longer there: nothing happens, and there is no response.
        Some(_) | None => Err(AgentError::silent(instance)),
    }
}

/// Reads the behaviour of the simulated commands from the job's environment.
fn parse_script(env: &BTreeMap<String, String>, job_num: i64, max_secs: Option<i64>) -> JobScript {
    let given = |key: &str| env.get(key).and_then(|v| v.parse::<i64>().ok());
    let number = |key: &str| given(key).unwrap_or_default();
    JobScript {
        exit: given("SIM_EXIT").and_then(|code| i32::try_from(code).ok()).unwrap_or(1),
        work: env.get("SKYPILOT_TASK_ID").map(|id| format!("{id}/{job_num}")),
        run_us: number("SIM_RUN_MS") * 1_000,
        fails: usize::try_from(number("SIM_FAILS")).unwrap_or_default(),
        max_us: max_secs.map(|secs| secs * 1_000_000),
        log_rate: u64::try_from(number("SIM_LOG_RATE")).unwrap_or_default(),
    }
}

impl AgentApi for SimNetwork {
    fn tasks(&self, instance: InstanceId) -> AgentFuture<'_, Vec<SubmissionId>> {
        self.call(instance, Arc::new(|host, now| Ok(host.tasks(now))))
    }

    fn host(&self, instance: InstanceId) -> AgentFuture<'_, HostReport> {
        self.call(instance, Arc::new(|host, now| Ok(host.news(now))))
    }

    fn submit_task<'a>(&'a self, call: CallContext, task: &'a TaskSpec) -> AgentFuture<'a, ()> {
        let task = task.clone();
        self.call(call.instance, Arc::new(move |host, now| host.submit_task(call, &task, now)))
    }

    fn task(&self, call: CallContext) -> AgentFuture<'_, TaskInfo> {
        self.call(call.instance, Arc::new(move |host, now| host.task(call, now)))
    }

    fn terminate_task<'a>(
        &'a self,
        call: CallContext,
        reason: &'a str,
        _timeout_secs: i64,
    ) -> AgentFuture<'a, ()> {
        let reason = reason.to_owned();
        self.call(call.instance, Arc::new(move |host, now| host.terminate_task(call, &reason, now)))
    }

    fn remove_task(&self, call: CallContext) -> AgentFuture<'_, ()> {
        self.call(call.instance, Arc::new(move |host, now| host.remove_task(call, now)))
    }

    fn start_job<'a>(&'a self, call: CallContext, job: &'a JobStart) -> AgentFuture<'a, Option<JobStarted>> {
        let spec = &job.submit.job_spec;
        let script = parse_script(&spec.env, spec.job_num, spec.max_duration);
        let start = move |host: &mut SimHost, now| host.start_job(call, &script, now).map(|()| None);
        self.call(call.instance, Arc::new(start))
    }

    fn pull(&self, call: CallContext) -> AgentFuture<'_, JobProgress> {
        self.call(call.instance, Arc::new(move |host, now| host.pull(call, now)))
    }

    fn log<'a>(
        &'a self,
        call: CallContext,
        stream: &'a str,
        offset: u64,
        limit: usize,
    ) -> AgentFuture<'a, LogPart> {
        let stream = stream.to_owned();
        let read = move |host: &mut SimHost, now| host.log(call, &stream, offset, limit, now);
        self.call(call.instance, Arc::new(read))
    }

    fn metrics(&self, call: CallContext) -> AgentFuture<'_, Metrics> {
        self.call(call.instance, Arc::new(move |host, now| host.metrics(call, now)))
    }

    fn stop_job(&self, call: CallContext, _grace_secs: u64, _is_preempted: bool) -> AgentFuture<'_, ()> {
        self.call(call.instance, Arc::new(move |host, now| host.stop_job(call, now)))
    }

    fn forget(&self, _instance: InstanceId) {}
}
