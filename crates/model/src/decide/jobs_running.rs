//! Decision of the `jobs_running` pipeline: a job from its placement to its end.
//!
//! A job is provisioning until the shim accepts the task, pulling until the runner accepts the job, and running until
//! an agent reports the end. Each phase has a time limit with a named reason, so an agent that does not respond cannot
//! block a job without limit.

use crate::{
    decide::change::Change,
    job::{Ending, Event, Status, TerminationReason},
    time::{Span, Timestamp},
};

/// Default time for which agents that responded before may be unreachable.
pub const UNREACHABLE_GRACE: Span = Span::mins(2);
/// The shim allows 20 minutes for the image; the rest is for the container and its runner.
pub const PULLING_TIMEOUT: Span = Span::mins(25);
/// Time for which a job waits for the other nodes of its replica: long enough for each of them to reach its own limit
/// first.
pub const SIBLINGS_TIMEOUT: Span = Span::mins(90);
/// The runner enforces `max_duration`; the server enforces it this much later.
pub const MAX_DURATION_BACKSTOP: Span = Span::mins(2);
/// Poll intervals, as a fallback for the agents' event stream.
pub const POLL_STARTING: Span = Span::secs(5);
pub const POLL_RUNNING: Span = Span::secs(10);
/// Poll interval while that stream is connected. When it breaks, the job is polled.
pub const POLL_WITH_EVENTS: Span = Span::mins(2);
/// Poll interval while nodes wait for each other.
pub const POLL_SIBLINGS: Span = Span::secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartupOrder {
    Any,
    MasterFirst,
    WorkersFirst,
}

/// Stored state of the other nodes of the replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Siblings {
    pub all_have_ips: bool,
    pub is_master_running: bool,
    pub are_workers_running: bool,
    /// True if each of them has reached its gate, or is past it.
    pub all_at_gate: bool,
}

impl Siblings {
    /// Siblings of a job whose replica has one node.
    pub const NONE: Self =
        Self { all_have_ips: true, is_master_running: true, are_workers_running: true, all_at_gate: true };
}

/// Gate of jobs that are prepared before the nodes start together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// Prepared, and waiting for the other nodes.
    Reached,
    /// All nodes were prepared, and the job was released.
    Open,
}

impl Gate {
    /// Returns the stored value.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Reached => "reached",
            Self::Open => "open",
        }
    }

    pub fn from_stored(word: Option<&str>) -> Option<Self> {
        [Self::Reached, Self::Open].into_iter().find(|gate| Some(gate.as_str()) == word)
    }
}

/// Stored state of the submission.
#[derive(Clone, Debug, PartialEq)]
pub struct RunningJobView {
    pub status: Status,
    /// Time at which an instance was assigned.
    pub provisioning_since: Timestamp,
    pub provisioning_max: Span,
    pub pulling_since: Option<Timestamp>,
    pub running_since: Option<Timestamp>,
    /// Time since which agents that responded before are unreachable.
    pub disconnected_at: Option<Timestamp>,
    /// True if the instance was ready when the job was assigned; if it does not respond, it is lost and not still
    /// starting.
    pub instance_was_ready: bool,
    pub has_shim: bool,
    pub is_spot: bool,
    /// One of several nodes of its replica.
    pub has_siblings: bool,
    pub is_master: bool,
    pub gate: Option<Gate>,
    pub startup_order: StartupOrder,
    pub siblings: Siblings,
    pub max_duration: Option<Span>,
    pub inactivity_duration: Option<Span>,
    /// Time for which its agents may be unreachable.
    pub unreachable_timeout: Span,
    /// Time for which a host may pull the image and start its container.
    pub pulling_timeout: Span,
}

/// State of the host, from the instance's row and its backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostState {
    Fine,
    /// Reclaimed or terminated by the backend.
    Gone,
    /// Creation failed: no offer was available.
    CreateFailed,
    /// Created, but not ready in time.
    ProvisionTimeout,
    /// The fleet's export to this project was withdrawn.
    AccessRevoked,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShimState {
    NotRequested,
    Silent,
    /// The shim responds but does not have the task.
    NoTask,
    Task(TaskState),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TaskState {
    /// Queued by a scheduler that is shared with other users.
    Queued,
    Pending,
    Preparing,
    Pulling,
    Creating,
    /// Running; the server also waits for the ports.
    Running {
        ports_known: bool,
    },
    /// Its reason is one of our termination reasons, or empty.
    Terminated(ReportedEnd),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunnerState {
    NotRequested,
    Silent,
    /// The runner responds and waits for the job.
    Ready,
    Pulled(RunnerReport),
}

/// Result of one pull from the runner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunnerReport {
    pub end: Option<ReportedEnd>,
    /// Time without a connection.
    pub disconnected_for: Option<Span>,
    /// The job waits at its gate.
    pub is_at_gate: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedEnd {
    pub kind: EndKind,
    pub reason: String,
    pub message: String,
    /// One of the termination details, or nothing.
    pub detail: Option<String>,
    pub exit_status: Option<i32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndKind {
    Done,
    Failed,
    Terminated,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningJobObservation {
    pub host: HostState,
    pub shim: ShimState,
    pub runner: RunnerState,
    /// Result of the utilization policy, from `utilization::is_gpu_idle`.
    pub is_gpu_idle: bool,
    /// The host streams events about the job, so nothing has to be polled.
    pub has_event_stream: bool,
}

/// Agents to query before the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeTargets {
    pub shim: bool,
    pub runner: bool,
}

/// Returns the agents to query: the runner only if it can exist. The shim is also queried if the runner of a running
/// job does not respond.
pub fn probe_targets(job: &RunningJobView) -> ProbeTargets {
    match job.status {
        Status::Provisioning => ProbeTargets { shim: job.has_shim, runner: !job.has_shim },
        Status::Pulling => ProbeTargets { shim: job.has_shim, runner: true },
        Status::Running => ProbeTargets { shim: false, runner: true },
        Status::Submitted
        | Status::Terminating
        | Status::Terminated
        | Status::Aborted
        | Status::Failed
        | Status::Done => ProbeTargets { shim: false, runner: false },
    }
}

/// Returns the job after a change that continues in the same pass: a host that accepted the task may already run it.
/// Every other change ends the pass.
pub fn next_in_pass(job: &RunningJobView, change: &Change<Event>, now: Timestamp) -> Option<RunningJobView> {
    (job.status == Status::Provisioning && change.event == Event::TaskAccepted).then(|| RunningJobView {
        status: Status::Pulling,
        pulling_since: Some(now),
        ..job.clone()
    })
}

/// Returns whether the runner has reported the end of the job, and no other source knows the cause better.
pub fn has_ended(runner: &RunnerState) -> bool {
    match runner {
        RunnerState::Pulled(pulled) => pulled.end.as_ref().is_some_and(has_known_cause),
        RunnerState::NotRequested | RunnerState::Silent | RunnerState::Ready => false,
    }
}

/// Actions of the controller, in this order; each is safe to repeat and carries the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Submit the task to the shim.
    SubmitTask,
    /// Submit spec, files and code to the runner and start it.
    SubmitJob,
    /// Store the log output that the runner has and the server lacks.
    PullLogs,
    /// Release the job from its gate: all nodes are prepared.
    OpenGate,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub actions: Vec<Action>,
    /// Applied only if every action succeeded.
    pub change: Option<Change<Event>>,
    /// Set with a change that ends the job.
    pub ending: Option<Ending>,
    /// Value to store as it is.
    pub disconnected_at: Option<Timestamp>,
    /// Condition that the job waits for, for display.
    pub waits_for: Option<&'static str>,
    /// New gate state, if it changed.
    pub gate: Option<Gate>,
    pub due: Timestamp,
}

pub fn decide(job: &RunningJobView, seen: &RunningJobObservation, now: Timestamp) -> Plan {
    if let Some(plan) = end_for_host(job, seen, now) {
        return plan;
    }
    match job.status {
        Status::Provisioning => plan_provisioning(job, seen, now),
        Status::Pulling => plan_pulling(job, seen, now),
        Status::Running => plan_running(job, seen, now),
        // Not handled here; the row leaves this pipeline by its filter.
        Status::Submitted
        | Status::Terminating
        | Status::Terminated
        | Status::Aborted
        | Status::Failed
        | Status::Done => wait(None, "another pipeline", now + POLL_RUNNING),
    }
}

fn end_for_host(job: &RunningJobView, seen: &RunningJobObservation, now: Timestamp) -> Option<Plan> {
    match seen.host {
        HostState::Fine => None,
        HostState::Gone => Some(end_as_lost(unreachable_reason(job), "the instance no longer exists", now)),
        HostState::CreateFailed => {
            let reason = TerminationReason::FailedToStartDueToNoCapacity;
            Some(end_as_lost(reason, "instance creation failed: no offers available", now))
        }
        HostState::ProvisionTimeout => {
            let reason = TerminationReason::WaitingInstanceLimitExceeded;
            Some(end_as_lost(reason, "the instance was not ready in time", now))
        }
        HostState::AccessRevoked => {
            let reason = TerminationReason::InstanceAccessRevoked;
            Some(end_as_lost(reason, "the fleet is no longer shared with this project", now))
        }
    }
}

fn unreachable_reason(job: &RunningJobView) -> TerminationReason {
    if job.is_spot {
        TerminationReason::InterruptedByNoCapacity
    } else {
        TerminationReason::InstanceUnreachable
    }
}

fn plan_provisioning(job: &RunningJobView, seen: &RunningJobObservation, now: Timestamp) -> Plan {
    let since = job.provisioning_since;
    if !job.has_shim {
        return match &seen.runner {
            RunnerState::Ready => start_job(job, since, job.provisioning_max, seen, now),
            RunnerState::Pulled(_) => job_started(Vec::new(), seen, now),
            RunnerState::Silent | RunnerState::NotRequested => {
                let reason = TerminationReason::WaitingRunnerLimitExceeded;
                wait_with_timeout(since, job.provisioning_max, reason, "the runner", now)
            }
        };
    }
    match &seen.shim {
        ShimState::NotRequested | ShimState::Silent if job.instance_was_ready => wait_for_agents(job, now),
        ShimState::NotRequested | ShimState::Silent => {
            let reason = TerminationReason::WaitingInstanceLimitExceeded;
            wait_with_timeout(since, job.provisioning_max, reason, "the instance", now)
        }
        ShimState::NoTask => match startup_dependency(job) {
            Some(others) => wait_for_siblings(job, others, now),
            // The controller has submitted the task repeatedly, and the shim did not accept it.
            None if now >= since + time_limit(job, job.provisioning_max) => end_as_lost(
                TerminationReason::WaitingRunnerLimitExceeded,
                "the shim did not accept the task in time",
                now,
            ),
            None => accept_task(vec![Action::SubmitTask], now),
        },
        // A previous lease holder submitted the task and failed to record it.
        ShimState::Task(_) => accept_task(Vec::new(), now),
    }
}

fn accept_task(actions: Vec<Action>, now: Timestamp) -> Plan {
    advance(actions, Change::from_event(Event::TaskAccepted, "the shim accepted the task"), now)
}

/// Returns the condition that must hold before the task of this job is submitted.
fn startup_dependency(job: &RunningJobView) -> Option<&'static str> {
    // A runner waits for its job for a limited time, so it is started only when nothing else can delay it.
    if !job.siblings.all_have_ips {
        return Some("the addresses of the other nodes");
    }
    match job.startup_order {
        StartupOrder::MasterFirst if !job.is_master && !job.siblings.is_master_running => {
            Some("the master to start")
        }
        StartupOrder::WorkersFirst if job.is_master && !job.siblings.are_workers_running => {
            Some("the workers to start")
        }
        StartupOrder::Any | StartupOrder::MasterFirst | StartupOrder::WorkersFirst => None,
    }
}

fn plan_pulling(job: &RunningJobView, seen: &RunningJobObservation, now: Timestamp) -> Plan {
    let since = job.pulling_since.unwrap_or(job.provisioning_since);
    let bound = |waits_for| {
        let reason = TerminationReason::WaitingRunnerLimitExceeded;
        let limit = job.pulling_timeout;
        if now >= since + limit {
            let setting = "`image_pull_timeout` of the server";
            let message = format!("waited {} s for {waits_for} ({setting})", limit.as_secs());
            return end_as_lost(reason, &message, now);
        }
        wait_with_timeout(since, limit, reason, waits_for, now)
    };
    match &seen.shim {
        ShimState::NotRequested | ShimState::Silent if job.has_shim => wait_for_agents(job, now),
        // Never submitted twice: a task that the shim no longer has may have run.
        ShimState::NoTask => {
            end_as_lost(TerminationReason::ExecutorError, "the host no longer has the task", now)
        }
        // No time limit: the user may stop the run.
        ShimState::Task(TaskState::Queued) => wait(None, "its turn in the queue", now + POLL_RUNNING),
        ShimState::Task(TaskState::Pending | TaskState::Preparing) => bound("the host to prepare the task"),
        ShimState::Task(TaskState::Pulling) => bound("the image"),
        ShimState::Task(TaskState::Creating) => bound("the container"),
        ShimState::Task(TaskState::Running { ports_known: false }) => bound("the container's ports"),
        ShimState::Task(TaskState::Terminated(ended)) => end_as_exited(ending_from_report(ended), now),
        ShimState::NotRequested
        | ShimState::Silent
        | ShimState::Task(TaskState::Running { ports_known: true }) => match &seen.runner {
            RunnerState::NotRequested | RunnerState::Silent => bound("the runner"),
            RunnerState::Ready => start_job(job, since, job.pulling_timeout, seen, now),
            // A previous lease holder started it and failed to record it. It may have ended by now.
            RunnerState::Pulled(pulled) => {
                let plan = job_started(Vec::new(), seen, now);
                Plan { due: if pulled.end.is_some() { now } else { plan.due }, ..plan }
            }
        },
    }
}

fn start_job(
    job: &RunningJobView,
    since: Timestamp,
    limit: Span,
    seen: &RunningJobObservation,
    now: Timestamp,
) -> Plan {
    if !job.siblings.all_have_ips {
        return wait_for_siblings(job, "the addresses of the other nodes", now);
    }
    if now >= since + time_limit(job, limit) {
        let reason = TerminationReason::WaitingRunnerLimitExceeded;
        return end_as_lost(reason, "the runner did not accept the job in time", now);
    }
    job_started(vec![Action::SubmitJob], seen, now)
}

/// Returns the time limit of a node, which may have spent its own limit waiting for the others.
fn time_limit(job: &RunningJobView, limit: Span) -> Span {
    if job.has_siblings { limit.max(SIBLINGS_TIMEOUT) } else { limit }
}

fn job_started(actions: Vec<Action>, seen: &RunningJobObservation, now: Timestamp) -> Plan {
    advance(
        actions,
        Change::from_event(Event::Started, "the runner accepted the job"),
        now + running_poll_interval(seen),
    )
}

fn running_poll_interval(seen: &RunningJobObservation) -> Span {
    if seen.has_event_stream { POLL_WITH_EVENTS } else { POLL_RUNNING }
}

/// Plans the next phase; clears what the job waited for.
fn advance(actions: Vec<Action>, change: Change<Event>, due: Timestamp) -> Plan {
    Plan {
        actions,
        change: Some(change),
        ending: None,
        disconnected_at: None,
        waits_for: None,
        gate: None,
        due,
    }
}

fn plan_running(job: &RunningJobView, seen: &RunningJobObservation, now: Timestamp) -> Plan {
    let starting = RunnerReport::default();
    let pulled = match &seen.runner {
        RunnerState::Pulled(pulled) => pulled,
        RunnerState::NotRequested | RunnerState::Silent => return plan_unreachable_runner(job, seen, now),
        // The runner accepted the job and has no state yet: code is fetched before commands start. A runner is never
        // started twice, so it cannot have lost the job.
        RunnerState::Ready => &starting,
    };
    let nobody_else = !job.has_shim || seen.shim == ShimState::NoTask;
    if let Some(ended) = pulled.end.as_ref().filter(|ended| nobody_else || has_known_cause(ended)) {
        let mut plan = end_as_exited(ending_from_report(ended), now);
        plan.actions.insert(0, Action::PullLogs);
        return plan;
    }
    if let ShimState::Task(TaskState::Terminated(ended)) = &seen.shim {
        // The runner ended without a report: killed, or lost in a reboot.
        let mut plan = end_as_exited(ending_from_report(ended), now);
        plan.actions.insert(0, Action::PullLogs);
        return plan;
    }
    if pulled.end.is_some() {
        return wait(None, "the host to report why the task ended", now + POLL_STARTING);
    }
    if let Some(plan) = check_policies(job, seen, pulled, now) {
        return plan;
    }
    let mut due = now + running_poll_interval(seen);
    if let Some(deadline) = max_duration_deadline(job) {
        due = due.min(deadline);
    }
    if let (Some(limit), Some(idle)) = (job.inactivity_duration, pulled.disconnected_for) {
        due = due.min(now + Span(limit.0 - idle.0));
    }
    let mut plan = Plan {
        actions: vec![Action::PullLogs],
        change: None,
        ending: None,
        disconnected_at: None,
        waits_for: None,
        gate: None,
        due,
    };
    if pulled.is_at_gate && job.has_siblings && job.gate != Some(Gate::Open) {
        pass_gate(job, &mut plan, now);
    }
    plan
}

/// Starts the nodes together: each reports that it is prepared, and a node that finds all of them prepared opens its
/// own gate.
fn pass_gate(job: &RunningJobView, plan: &mut Plan, now: Timestamp) {
    if job.siblings.all_at_gate {
        plan.actions.push(Action::OpenGate);
        plan.gate = Some(Gate::Open);
    } else {
        plan.gate = Some(Gate::Reached).filter(|_| job.gate.is_none());
        plan.waits_for = Some("the other nodes to be prepared");
        plan.due = plan.due.min(now + POLL_SIBLINGS);
    }
}

/// Returns whether the reported end includes its cause. A runner that received a signal does not know who sent it: a
/// user's stop, or a container engine that shuts down. The shim knows a moment later.
fn has_known_cause(ended: &ReportedEnd) -> bool {
    ended.kind != EndKind::Terminated || !ended.reason.is_empty()
}

fn max_duration_deadline(job: &RunningJobView) -> Option<Timestamp> {
    Some(job.running_since? + job.max_duration? + MAX_DURATION_BACKSTOP)
}

fn plan_unreachable_runner(job: &RunningJobView, seen: &RunningJobObservation, now: Timestamp) -> Plan {
    if let ShimState::Task(TaskState::Terminated(ended)) = &seen.shim {
        // The runner ended with its container; the shim knows how.
        return end_as_exited(ending_from_report(ended), now);
    }
    if matches!(seen.shim, ShimState::NoTask) {
        return end_as_lost(TerminationReason::ExecutorError, "the host no longer has the task", now);
    }
    if max_duration_deadline(job).is_some_and(|deadline| now >= deadline) {
        let message = "`max_duration` exceeded, and the runner does not respond";
        return end_by_policy(TerminationReason::MaxDurationExceeded, message.to_owned(), now);
    }
    wait_for_agents(job, now)
}

fn check_policies(
    job: &RunningJobView,
    seen: &RunningJobObservation,
    pulled: &RunnerReport,
    now: Timestamp,
) -> Option<Plan> {
    if max_duration_deadline(job).is_some_and(|deadline| now >= deadline) {
        let message = "`max_duration` exceeded, and the runner did not end the job".to_owned();
        return Some(end_by_policy(TerminationReason::MaxDurationExceeded, message, now));
    }
    if let (Some(limit), Some(idle)) = (job.inactivity_duration, pulled.disconnected_for)
        && idle >= limit
    {
        let message = format!(
            "no connections for {} s, and `inactivity_duration` is {} s",
            idle.as_secs(),
            limit.as_secs()
        );
        return Some(end_by_policy(TerminationReason::InactivityDurationExceeded, message, now));
    }
    if seen.is_gpu_idle {
        let message = "a GPU was below `min_gpu_utilization` for the whole time window".to_owned();
        return Some(end_by_policy(TerminationReason::TerminatedDueToUtilizationPolicy, message, now));
    }
    None
}

fn ending_from_report(ended: &ReportedEnd) -> Ending {
    let reason = match ended.kind {
        EndKind::Done => TerminationReason::DoneByRunner,
        EndKind::Failed | EndKind::Terminated => {
            ended.reason.to_lowercase().parse().unwrap_or(TerminationReason::ContainerExitedWithError)
        }
    };
    let mut ending = Ending::new(reason);
    if let Some(code) = ended.exit_status {
        ending = ending.with_exit_status(code);
    }
    if let Some(detail) = ended.detail.as_deref().and_then(|word| word.parse().ok()) {
        ending = ending.with_detail(detail);
    }
    if ended.message.is_empty() { ending } else { ending.with_message(&ended.message) }
}

/// Ends a job that the agent refused: no further attempt can succeed.
pub fn end_as_refused(message: &str, now: Timestamp) -> Plan {
    end_as_exited(Ending::new(TerminationReason::ExecutorError).with_message(message), now)
}

/// Ends a job that cannot be started as it was submitted.
pub fn end_as_unstartable(message: &str, now: Timestamp) -> Plan {
    end(Event::StopRequested, Ending::new(TerminationReason::TerminatedByServer).with_message(message), now)
}

/// Ends a job whose volume cannot be attached.
pub fn end_without_volume(message: &str, now: Timestamp) -> Plan {
    end_as_lost(TerminationReason::VolumeError, message, now)
}

/// Plans another pass soon, without actions. Keeps the connection state.
pub fn postpone(job: &RunningJobView, waits_for: &'static str, now: Timestamp) -> Plan {
    wait(job.disconnected_at, waits_for, now + POLL_STARTING)
}

/// Waits for agents that responded before, and ends the job after the grace period.
fn wait_for_agents(job: &RunningJobView, now: Timestamp) -> Plan {
    let since = job.disconnected_at.unwrap_or(now);
    if now.since(since) >= job.unreachable_timeout {
        let message = format!("the agents did not respond for {} s", now.since(since).as_secs());
        return end_as_lost(unreachable_reason(job), &message, now);
    }
    wait(
        Some(since),
        "the agents to respond again",
        (now + POLL_STARTING).min(since + job.unreachable_timeout),
    )
}

fn wait_for_siblings(job: &RunningJobView, waits_for: &'static str, now: Timestamp) -> Plan {
    let since = job.provisioning_since;
    let reason = TerminationReason::WaitingRunnerLimitExceeded;
    let mut plan = wait_with_timeout(since, SIBLINGS_TIMEOUT, reason, waits_for, now);
    plan.due = plan.due.min(now + POLL_SIBLINGS);
    plan
}

/// Waits until `since + limit`, then ends with `reason`.
fn wait_with_timeout(
    since: Timestamp,
    limit: Span,
    reason: TerminationReason,
    waits_for: &'static str,
    now: Timestamp,
) -> Plan {
    let deadline = since + limit;
    if now >= deadline {
        return end_as_lost(reason, &format!("waited {} s for {waits_for}", limit.as_secs()), now);
    }
    wait(None, waits_for, (now + POLL_STARTING).min(deadline))
}

fn wait(disconnected_at: Option<Timestamp>, waits_for: &'static str, due: Timestamp) -> Plan {
    let waits_for = Some(waits_for);
    Plan { actions: Vec::new(), change: None, ending: None, disconnected_at, waits_for, gate: None, due }
}

fn end_as_lost(reason: TerminationReason, message: &str, now: Timestamp) -> Plan {
    end(Event::Lost, Ending::new(reason).with_message(message), now)
}

fn end_by_policy(reason: TerminationReason, message: String, now: Timestamp) -> Plan {
    end(Event::EndedByPolicy, Ending::new(reason).with_message(message), now)
}

fn end_as_exited(ending: Ending, now: Timestamp) -> Plan {
    end(Event::Exited, ending, now)
}

fn end(event: Event, ending: Ending, now: Timestamp) -> Plan {
    let message = ending.message().unwrap_or("the job ended").to_owned();
    let change = Change::new(event, ending.reason().as_str(), message);
    Plan {
        actions: Vec::new(),
        change: Some(change),
        ending: Some(ending),
        disconnected_at: None,
        waits_for: None,
        gate: None,
        due: now,
    }
}
