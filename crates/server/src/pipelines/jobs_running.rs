//! Pipeline `jobs_running`: a placed job until it ends.
//!
//! Claims   jobs in Provisioning, Pulling, Running.
//! Owns     jobs.status (from there), jobs.pulling_at, jobs.running_at, jobs.disconnected_at,
//!          jobs.status_message, jobs.runtime, jobs.provisioning, jobs.connection_info,
//!          jobs.pull_progress, jobs.inactive_since, jobs.seen_at, jobs.run_deadline_at, jobs.gate.
//! Wakes    on hint, else every 5 to 10 s, every 2 min while the host's events arrive; a silent agent has
//!          2 min, or `lost_after`.
//! Why not  push from the agent alone? The server must survive the loss of its memory; polling is the one path
//!          that is exercised every day. Events of agents only make the row due.

mod inputs;
mod record;

use std::sync::Arc;

use windlass_engine::{ApplyOutcome, DbTime, Lease, Pipeline, Queue};
use windlass_model::{
    decide::{
        change::Change,
        jobs_running::{self as brain, Action, Plan, RunningJobObservation},
    },
    event,
    id::InstanceId,
    job,
    time::{Span, Timestamp},
};

use self::record::JobFindings;
use windlass_planted_bugs::{Bug, is_planted};

use super::{PipelineContext, apply_outcome, due_in, pipeline_cause};
use crate::{
    agents::{AgentError, CallContext},
    db::{
        Val, Values,
        instances::Instance,
        jobs::Job,
        pipeline_rows::jobs::{self as rows, JobInputs, JobUpdate, RunDue},
    },
    hints::Hint,
    job_metrics,
    job_payload::{self, PayloadError, UnstartableReason, peer_hosts},
    job_spec_view::{JobSpecView, Utilization},
    logs::{
        Log, LogSource,
        copier::{self, CopyLimits},
    },
    parsed_run_spec::ParsedRunSpec,
    pass_error::PassError,
    queue_backend,
};

pub(super) struct JobsRunningPipeline(pub(super) PipelineContext);

pub(crate) const QUEUE: Queue = Queue {
    pipeline: Hint::JobsRunning.as_str(),
    table: "jobs",
    statuses: &["provisioning", "pulling", "running"],
};

pub(crate) struct Row {
    loaded: JobInputs,
    utilization: Option<Utilization>,
    shape: Arc<ParsedRunSpec>,
    job: brain::RunningJobView,
}

/// The observation, or the requested end: then there is nothing to observe.
pub(crate) enum JobReport {
    Requested(job::Ending),
    Seen(Box<RunningJobObservation>, Box<JobFindings>),
}

pub(crate) enum JobPassPlan {
    End(job::Ending),
    Continue(Box<JobPassState>),
}

/// The changes of a job in one pass.
pub(crate) struct JobPassState {
    /// Changes earlier in this pass, each of them completed.
    before: Vec<Change<job::Event>>,
    plan: Plan,
    findings: JobFindings,
}

impl Pipeline for JobsRunningPipeline {
    type Row = Row;
    type Observation = JobReport;
    type Plan = JobPassPlan;
    type Error = PassError;

    fn queue(&self) -> Queue {
        QUEUE
    }

    async fn load(&self, lease: &Lease) -> Result<Option<Row>, PassError> {
        let Some(loaded) = rows::load(&self.0.db, lease).await? else { return Ok(None) };
        let facts = JobSpecView::of(&loaded.job)?;
        let shape = self.0.shapes.of(&loaded.run)?;
        let is_new = loaded.job.status == job::Status::Provisioning;
        let known = !is_new || job_payload::are_addresses_known(&self.0, &loaded).await?;
        let job = brain::RunningJobView {
            unreachable_timeout: self.0.lost_after,
            pulling_timeout: self.0.limits.image_pull_timeout,
            ..inputs::view(&loaded, &facts, &shape, known)?
        };
        Ok(Some(Row { loaded, utilization: facts.utilization, shape, job }))
    }

    async fn observe(&self, lease: &Lease, row: &Row) -> Result<JobReport, PassError> {
        if let Some(ending) = row.loaded.job.requested_end()? {
            return Ok(JobReport::Requested(ending));
        }
        let mut findings = JobFindings::default();
        let seen = self.report(lease, row, &row.job, &mut findings).await?;
        Ok(JobReport::Seen(Box::new(seen), Box::new(findings)))
    }

    fn decide(row: &Row, report: JobReport, now: DbTime) -> JobPassPlan {
        match report {
            JobReport::Requested(ending) => JobPassPlan::End(ending),
            JobReport::Seen(seen, findings) => {
                let plan = brain::decide(&row.job, &seen, Timestamp(now));
                JobPassPlan::Continue(Box::new(JobPassState {
                    before: Vec::new(),
                    plan,
                    findings: *findings,
                }))
            }
        }
    }

    /// Performs the plan. A task that a host accepted may have advanced by the time of the response: the pass continues
    /// from there instead of waiting for the next one.
    async fn act(&self, lease: &Lease, row: &Row, next: &mut JobPassPlan) -> Result<(), PassError> {
        let (JobPassPlan::Continue(state), Some(call)) = (next, agent_call(lease, &row.loaded)) else {
            return Ok(());
        };
        self.perform_actions(lease, row, call, &row.job, state).await?;
        let now = Timestamp(lease.now());
        let further =
            state.plan.change.as_ref().and_then(|change| brain::next_in_pass(&row.job, change, now));
        if let Some(job) = further {
            state.before.extend(state.plan.change.take());
            let seen = self.report(lease, row, &job, &mut state.findings).await?;
            state.plan = brain::decide(&job, &seen, now);
            self.perform_actions(lease, row, call, &job, state).await?;
        }
        self.send_peer_hosts(row, call, state).await
    }

    async fn apply(&self, lease: &Lease, row: Row, next: JobPassPlan) -> Result<ApplyOutcome, PassError> {
        let job = &row.loaded.job;
        let (changes, ending, mut set, due) = match &next {
            JobPassPlan::End(ending) => {
                let message = ending.message().unwrap_or("the run requested its end");
                let change = Change::new(job::Event::StopRequested, ending.event_reason(), message);
                (vec![change], Some(ending), vec![], None)
            }
            JobPassPlan::Continue(state) => {
                let JobPassState { before, plan, findings } = &**state;
                let changes = before.iter().chain(&plan.change).cloned().collect();
                let waits = plan.waits_for.map(|what| match &findings.waits {
                    Some(text) => format!("waiting: {text}"),
                    None => format!("waiting for {what}"),
                });
                let set =
                    vec![("disconnected_at", plan.disconnected_at.into()), ("status_message", waits.into())];
                (changes, plan.ending.as_ref(), set, Some(due_in(lease, plan.due)))
            }
        };
        let gate = match &next {
            JobPassPlan::Continue(state) => state.plan.gate,
            JobPassPlan::End(_) => None,
        };
        set.extend(gate.map(|gate| ("gate", gate.as_str().into())));
        let reached_gate = gate.is_some() && job.gate.is_none();
        let (mut events, mut status) = (Vec::new(), job.status);
        for Change { event, reason, message } in changes {
            let why = pipeline_cause(event::Pipeline::JobRunning, lease, reason, message);
            let moved = event::transition::<job::JobLifecycle>(job.id, status, event, why)?;
            events.extend(moved.record);
            set.extend(status_columns(status, moved.status));
            status = moved.status;
        }
        let came_to = Some(status).filter(|status| *status != job.status);
        let marks_group_due =
            came_to.filter(|to| *to == job::Status::Running && peer_hosts::is_requested(&row.loaded));
        let marks_group_due = marks_group_due.and(row.loaded.run.managed_job_id);
        if let JobPassPlan::Continue(state) = &next {
            set.extend(record::columns(&row.loaded, &row.shape, &state.findings, came_to)?);
        }
        if let Some(ending) = ending {
            set.extend(rows::ending_columns(ending));
            if is_planted(Bug::FinishOutsideTerminating) {
                finish_too_early(&mut set, events.last_mut(), ending);
            }
        }
        // After a change of its status also this pipeline: what its host reported during the pass is due.
        let mut wake = match events.is_empty() {
            true if reached_gate => vec![QUEUE.pipeline],
            true => vec![],
            false if ending.is_some() => vec![super::jobs_terminating::QUEUE.pipeline],
            false => vec![QUEUE.pipeline],
        };
        let marks_siblings_due = row.job.has_siblings;
        let moved = JobUpdate {
            set: dedup_columns(set),
            events,
            due_in_us: due,
            marks_siblings_due,
            marks_group_due,
            wakes: Vec::new(),
        };
        wake.extend(match moved.run_due() {
            RunDue::Unchanged => None,
            // The proxies learn at once that a replica ends.
            RunDue::Soon if row.loaded.run.service.is_none() => Some(Hint::RunsDueSoon.as_str()),
            RunDue::Soon | RunDue::AtOnce => Some(super::runs::QUEUE.pipeline),
        });
        let written = rows::apply(&self.0.db, lease.key(), job, moved).await?;
        Ok(apply_outcome(&written, due, wake))
    }
}

/// Result of one action.
enum ActionOutcome {
    Completed,
    NotYet(String),
    /// The action can never succeed: the job ends.
    Impossible(Box<Plan>),
}

impl JobsRunningPipeline {
    /// Queries the agents about a job in the state of `job`.
    async fn report(
        &self,
        lease: &Lease,
        row: &Row,
        job: &brain::RunningJobView,
        findings: &mut JobFindings,
    ) -> Result<RunningJobObservation, PassError> {
        let mut seen = RunningJobObservation {
            host: inputs::host_state(&row.loaded),
            shim: brain::ShimState::NotRequested,
            runner: brain::RunnerState::NotRequested,
            is_gpu_idle: self.is_gpu_idle(lease, row).await?,
            has_event_stream: self.is_reported(row),
        };
        let answers = row.loaded.instance.as_ref().is_some_and(inputs::may_have_agent);
        let Some(call) =
            agent_call(lease, &row.loaded).filter(|_| answers && seen.host == brain::HostState::Fine)
        else {
            return Ok(seen);
        };
        let request = brain::probe_targets(job);
        if request.shim {
            seen.shim = self.shim(call, findings).await;
        }
        let runner_may_be_there =
            !request.shim || matches!(&seen.shim, brain::ShimState::Task(brain::TaskState::Running { .. }));
        if request.runner && runner_may_be_there {
            let pulled = self.0.agents.pull(call).await;
            findings.answered |= pulled.is_ok();
            seen.runner = inputs::runner_state(pulled);
        }
        if let brain::RunnerState::Pulled(pulled) = &seen.runner {
            findings.no_connections = pulled.disconnected_for;
        }
        if job.status == job::Status::Running && !brain::has_ended(&seen.runner) {
            // The runner's output is read from the host's disk, where it outlives the runner; only the shim knows
            // whether the task is still alive.
            seen.shim = self.shim(call, findings).await;
        }
        Ok(seen)
    }

    /// Performs the actions of the plan. A plan that cannot be performed is replaced by another.
    async fn perform_actions(
        &self,
        lease: &Lease,
        row: &Row,
        call: CallContext,
        job: &brain::RunningJobView,
        state: &mut JobPassState,
    ) -> Result<(), PassError> {
        for action in state.plan.actions.clone() {
            let done = match action {
                Action::SubmitTask => self.submit_task(lease, row, call, &mut state.findings).await?,
                Action::SubmitJob => self.submit_job(lease, row, call, &mut state.findings).await?,
                Action::PullLogs => {
                    self.pull_logs(lease, row, call).await;
                    ActionOutcome::Completed
                }
                Action::OpenGate => call_outcome(self.0.agents.open_gate(call).await, Timestamp(lease.now())),
            };
            match done {
                ActionOutcome::Completed => {}
                // The action failed, so the change that depends on it is not made; the next pass observes again.
                ActionOutcome::NotYet(message) => {
                    state.plan = brain::postpone(job, "its host", Timestamp(lease.now()));
                    state.findings.waits = Some(message);
                    break;
                }
                ActionOutcome::Impossible(ended) => {
                    state.plan = *ended;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Sends the hosts of the other tasks to a task of a group that runs or starts. Repeated in each pass, so that the
    /// task learns of hosts that changed and a failed call is made up for.
    async fn send_peer_hosts(
        &self,
        row: &Row,
        call: CallContext,
        state: &JobPassState,
    ) -> Result<(), PassError> {
        let JobPassState { plan, findings, .. } = state;
        let begins = plan.actions.contains(&Action::SubmitJob) && plan.change.is_some();
        let runs = row.loaded.job.status == job::Status::Running && plan.ending.is_none();
        // An agent that does not answer is not called twice in a pass.
        if !(begins || runs && findings.answered) {
            return Ok(());
        }
        let Some(hosts) = peer_hosts::for_job(&self.0, &row.loaded).await? else { return Ok(()) };
        if let Err(error) = self.0.agents.send_hosts(call, &hosts).await {
            tracing::debug!(job = %row.loaded.job.id, %error, "failed to send the hosts of a group");
        }
        Ok(())
    }

    /// Returns whether the agent's events suffice. Open connections and idle GPUs are not reported by events, so they
    /// are polled.
    fn is_reported(&self, row: &Row) -> bool {
        let requirements_given = row.utilization.is_some() || row.job.inactivity_duration.is_some();
        !requirements_given
            && row.loaded.job.instance_id.is_some_and(|instance| self.0.agents.is_listening(instance))
    }

    /// Returns whether the GPUs were idle for the whole window, which begins no earlier than the commands.
    async fn is_gpu_idle(&self, lease: &Lease, row: &Row) -> Result<bool, PassError> {
        let (Some(policy), Some(since)) = (row.utilization, row.job.running_since) else { return Ok(false) };
        let (window, now) = (Span::secs(policy.time_window), Timestamp(lease.now()));
        if now.since(since) < window {
            return Ok(false);
        }
        let id = row.loaded.job.id;
        Ok(job_metrics::is_gpu_idle(&self.0.db, id, policy.min_gpu_utilization, window, now).await?)
    }

    async fn shim(&self, call: CallContext, findings: &mut JobFindings) -> brain::ShimState {
        let answer = self.0.agents.task(call).await;
        let seen = inputs::shim_state(&answer);
        findings.answered |= seen != brain::ShimState::Silent;
        match answer {
            Ok(task) => {
                if seen == brain::ShimState::Task(brain::TaskState::Queued) {
                    findings.waits = Some(task.termination_message.clone());
                }
                findings.task = Some(task);
            }
            Err(error) if seen == brain::ShimState::Silent => findings.waits = Some(error.to_string()),
            Err(_) => {}
        }
        seen
    }

    async fn submit_task(
        &self,
        lease: &Lease,
        row: &Row,
        call: CallContext,
        findings: &mut JobFindings,
    ) -> Result<ActionOutcome, PassError> {
        let now = Timestamp(lease.now());
        if row.loaded.instance.as_ref().is_some_and(is_queue_instance) {
            return match job_payload::container_request(&self.0, &row.loaded).await {
                Ok(order) => Ok(call_outcome(self.0.agents.enqueue(call, &order).await, now)),
                Err(error) => order_outcome(error, now),
            };
        }
        match job_payload::task_spec(&self.0, lease, &row.loaded).await {
            Ok((task, runs_in)) => {
                findings.runs_in = runs_in;
                Ok(call_outcome(self.0.agents.submit_task(call, &task).await, now))
            }
            Err(error) => order_outcome(error, now),
        }
    }

    async fn submit_job(
        &self,
        lease: &Lease,
        row: &Row,
        call: CallContext,
        findings: &mut JobFindings,
    ) -> Result<ActionOutcome, PassError> {
        let now = Timestamp(lease.now());
        match job_payload::runner_start(&self.0, &row.loaded).await {
            Ok(start) => {
                let started = self.0.agents.start_job(call, &start).await;
                Ok(call_outcome(started.map(|started| findings.started = started), now))
            }
            Err(error) => order_outcome(error, now),
        }
    }

    /// Copies new log output. If that fails, a later pass copies it, at the latest the one that drains the log.
    async fn pull_logs(&self, lease: &Lease, row: &Row, call: CallContext) {
        let log = job_log(&row.loaded.job, LogSource::Job);
        let (now, limits) = (Timestamp(lease.now()), CopyLimits::for_log_size(self.0.limits.log_bytes));
        if let Err(error) = copier::catch_up(&self.0.logs, &*self.0.agents, call, &log, now, limits).await {
            tracing::debug!(job = %row.loaded.job.id, %error, "failed to copy log");
        }
    }
}

/// Returns whether jobs on this instance are containers of the queue.
fn is_queue_instance(instance: &Instance) -> bool {
    instance.backend.as_deref() == Some(queue_backend::NAME)
}

fn call_outcome(answer: Result<(), AgentError>, now: Timestamp) -> ActionOutcome {
    match answer {
        Ok(()) => ActionOutcome::Completed,
        Err(AgentError::Refused { reason }) => {
            ActionOutcome::Impossible(Box::new(brain::end_as_refused(&reason, now)))
        }
        Err(error @ AgentError::Gone { .. }) => {
            ActionOutcome::Impossible(Box::new(brain::end_as_refused(&error.to_string(), now)))
        }
        Err(
            error @ (AgentError::Unreachable { .. }
            | AgentError::Barred { .. }
            | AgentError::Fenced { .. }
            | AgentError::UnknownTask { .. }
            | AgentError::Conflict { .. }
            | AgentError::Unsigned { .. }),
        ) => ActionOutcome::NotYet(error.to_string()),
    }
}

fn order_outcome(error: PayloadError, now: Timestamp) -> Result<ActionOutcome, PassError> {
    match error {
        PayloadError::Pass(error) => Err(error),
        PayloadError::NotYet { message } => Ok(ActionOutcome::NotYet(message)),
        PayloadError::Unsuitable(unsuitable @ UnstartableReason::NoVolume { .. }) => {
            Ok(ActionOutcome::Impossible(Box::new(brain::end_without_volume(&unsuitable.to_string(), now))))
        }
        PayloadError::Unsuitable(unsuitable) => {
            Ok(ActionOutcome::Impossible(Box::new(brain::end_as_unstartable(&unsuitable.to_string(), now))))
        }
    }
}

/// The planted bug: only `jobs_terminating` may do this.
fn finish_too_early(set: &mut Values, event: Option<&mut event::Event>, ending: &job::Ending) {
    let status = ending.final_status().status();
    set.retain(|(column, _)| *column != "status");
    set.extend([("status", status.into()), ("finished", true.into())]);
    if let Some(event) = event {
        event.to = Some(status.as_str());
        event.is_final = true;
    }
}

/// Keeps the last value of each column: a pass may move through several statuses.
fn dedup_columns(set: Values) -> Values {
    let mut words = Values::with_capacity(set.len());
    for (column, value) in set {
        words.retain(|(known, _)| *known != column);
        words.push((column, value));
    }
    words
}

/// Columns that change with the status.
fn status_columns(from: job::Status, to: job::Status) -> Vec<(&'static str, Val)> {
    if from == to {
        return Vec::new();
    }
    match to {
        job::Status::Pulling => vec![("status", to.into()), ("pulling_at", Val::Now)],
        job::Status::Running => vec![("status", to.into()), ("running_at", Val::Now)],
        // An ending sets its own status and time.
        job::Status::Terminating => Vec::new(),
        job::Status::Submitted
        | job::Status::Provisioning
        | job::Status::Terminated
        | job::Status::Aborted
        | job::Status::Failed
        | job::Status::Done => vec![("status", to.into())],
    }
}

pub(super) fn agent_call(lease: &Lease, loaded: &JobInputs) -> Option<CallContext> {
    let instance: InstanceId = loaded.job.instance_id?;
    Some(CallContext { instance, submission: loaded.job.id, epoch: lease.epoch })
}

pub(super) fn job_log(job: &Job, stream: LogSource) -> Log {
    Log { project: job.project_id, run: job.run_id, submission: job.id, stream }
}
