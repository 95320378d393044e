//! Pipeline `jobs_terminating`: the last steps of a job, and its final status.
//!
//! Claims   jobs in Terminating.
//! Owns     jobs.finished, jobs.finished_at, jobs.stop_deadline_at, jobs.host_given_up, jobs.replica_registered;
//!          jobs.status (the final ones).
//! Wakes    on hint, else every 2 s.
//! Shares   instances.busy_blocks with `jobs_submitted`: both add, neither sets; jobs.replica_registered with the
//!          proxy, which sets it while a replica runs.
//! Why not  free the instance before the container is known to be removed? The next job would share its devices.

use windlass_engine::{ApplyOutcome, DbTime, Lease, Pipeline, Queue};
use windlass_model::{
    decide::jobs_terminating::{
        self as brain, Plan, TerminatingJobObservation, TerminationStep, VolumeAttachment,
    },
    event, job,
    time::{Span, Timestamp},
};

use super::{
    PipelineContext, apply_outcome, due_in,
    jobs_running::{agent_call, job_log},
    pipeline_cause,
};
use crate::{
    agents::{self, AgentError, CallContext},
    attachments,
    db::{
        DbError,
        pipeline_rows::jobs::{self as rows, JobEnd, JobInputs, JobUpdate},
    },
    hints::Hint,
    job_payload::STOP_MAX_SECS,
    job_spec_view::JobSpecView,
    logs::{
        LogSource,
        copier::{self, CopyError, CopyLimits},
    },
    pass_error::PassError,
};

pub(super) struct JobsTerminatingPipeline(pub(super) PipelineContext);

pub(crate) const QUEUE: Queue =
    Queue { pipeline: Hint::JobsTerminating.as_str(), table: "jobs", statuses: &["terminating"] };

/// Maximum number of steps in one pass: each step is performed once and the last one waits.
const STEPS_MAX: usize = 8;

pub(crate) struct Row {
    loaded: JobInputs,
    job: brain::TerminatingJobView,
}

/// The plan, and the deadline that the first pass sets.
pub(crate) struct TerminationPassPlan {
    plan: Plan,
    deadline: Option<Timestamp>,
    /// The job with its volumes.
    job: brain::TerminatingJobView,
}

impl Pipeline for JobsTerminatingPipeline {
    type Row = Row;
    type Observation = Vec<VolumeAttachment>;
    type Plan = TerminationPassPlan;
    type Error = PassError;

    fn queue(&self) -> Queue {
        QUEUE
    }

    async fn load(&self, lease: &Lease) -> Result<Option<Row>, PassError> {
        let Some(loaded) = rows::load(&self.0.db, lease).await? else { return Ok(None) };
        let facts = JobSpecView::of(&loaded.job)?;
        let mut job = view(&loaded, &facts, self.0.lost_after)?;
        if job.deadline.is_none()
            && let Some(managed_job) = loaded.run.managed_job_id
            && let Some(graceful) = rows::cancel_grace(&self.0.db, managed_job).await?
        {
            job.stop_grace = graceful;
        }
        Ok(Some(Row { loaded, job }))
    }

    /// Observes the volumes. Everything else is unknown until a step queries it.
    async fn observe(&self, lease: &Lease, row: &Row) -> Result<Vec<VolumeAttachment>, PassError> {
        let JobInputs { job, instance, .. } = &row.loaded;
        if !row.loaded.has_volumes {
            return Ok(Vec::new());
        }
        attachments::remaining_volumes(&self.0.db, &self.0.backends, lease, job, instance.as_ref()).await
    }

    fn decide(row: &Row, volumes: Vec<VolumeAttachment>, now: DbTime) -> TerminationPassPlan {
        let job = brain::TerminatingJobView { volumes, ..row.job.clone() };
        TerminationPassPlan {
            plan: brain::decide(&job, TerminatingJobObservation::NOTHING, Timestamp(now)),
            deadline: job.deadline,
            job,
        }
    }

    /// Performs steps until one has to wait: the result of a step decides the next, so that a job that ended by itself
    /// is finished in one pass.
    async fn act(&self, lease: &Lease, row: &Row, next: &mut TerminationPassPlan) -> Result<(), PassError> {
        let Some(call) = agent_call(lease, &row.loaded) else { return Ok(()) };
        let (mut job, mut seen) = (next.job.clone(), TerminatingJobObservation::NOTHING);
        for _ in 0..STEPS_MAX {
            let Plan::Step { step, .. } = &next.plan else { return Ok(()) };
            match step {
                TerminationStep::Wait | TerminationStep::Unregister => return Ok(()),
                TerminationStep::Detach { volumes, force } => {
                    let Some(instance) = &row.loaded.instance else { return Ok(()) };
                    let PipelineContext { db, backends, .. } = &self.0;
                    let stored = &row.loaded.job;
                    job.volumes =
                        attachments::detach(db, backends, lease, stored, instance, volumes, *force).await?;
                }
                TerminationStep::Stop { .. } if seen.stop != brain::StopDelivery::NotRequested => {
                    return Ok(());
                }
                TerminationStep::Stop { grace, deadline } => {
                    seen.stop = self.stop(call, *grace, &job).await;
                    if seen.stop == brain::StopDelivery::Received {
                        job.deadline = Some(*deadline);
                        next.deadline = job.deadline;
                    }
                }
                TerminationStep::DrainLogs if seen.logs != brain::LogDrain::NotRequested => return Ok(()),
                TerminationStep::DrainLogs => {
                    seen.logs = self.logs(lease, row, call).await;
                    if seen.logs == brain::LogDrain::Drained {
                        job.ending = self.with_exit_details(job.ending, call).await;
                        next.job.ending = job.ending.clone();
                    }
                }
                TerminationStep::RemoveTask if seen.task != brain::TaskPresence::NotRequested => {
                    return Ok(());
                }
                TerminationStep::RemoveTask => {
                    seen.task = self.remove(call, job.ending.reason().as_str()).await
                }
            }
            next.plan = brain::decide(&job, seen, Timestamp(lease.now()));
        }
        Ok(())
    }

    async fn apply(
        &self,
        lease: &Lease,
        row: Row,
        next: TerminationPassPlan,
    ) -> Result<ApplyOutcome, PassError> {
        match next.plan {
            Plan::End(end) => self.end(lease, &row, &end).await,
            Plan::Step { step, waits_for, due } => {
                let due_in_us = Some(due_in(lease, due));
                let mut set = vec![
                    ("stop_deadline_at", next.deadline.into()),
                    ("status_message", Plan::status_message(&next.job, waits_for, next.deadline).into()),
                ];
                let mut wake = vec![];
                if next.job.ending != row.job.ending {
                    set.push(("termination_message", next.job.ending.message().into()));
                    set.push(("exit_status", next.job.ending.exit_status().into()));
                }
                if step == TerminationStep::Unregister {
                    set.push(("replica_registered", false.into()));
                    wake.extend([Hint::Routes.as_str(), QUEUE.pipeline]);
                }
                let moved = JobUpdate { set, due_in_us, ..JobUpdate::default() };
                let written = rows::apply(&self.0.db, lease.key(), &row.loaded.job, moved).await?;
                Ok(apply_outcome(&written, due_in_us, wake))
            }
        }
    }
}

impl JobsTerminatingPipeline {
    /// Requests the commands to exit within `grace`; without one, the job ended by itself. A refusal is final: the
    /// deadline then ends the job.
    async fn stop(
        &self,
        call: CallContext,
        grace: Option<Span>,
        job: &brain::TerminatingJobView,
    ) -> brain::StopDelivery {
        let Some(grace) = grace else { return brain::StopDelivery::Received };
        let secs = u64::try_from(grace.as_secs()).unwrap_or_default();
        match self.0.agents.stop_job(call, secs, job.ending.is_preempted()).await {
            Err(AgentError::Unreachable { .. } | AgentError::Unsigned { .. }) => brain::StopDelivery::Silent,
            Ok(())
            | Err(
                AgentError::UnknownTask { .. }
                | AgentError::Gone { .. }
                | AgentError::Refused { .. }
                | AgentError::Conflict { .. }
                | AgentError::Barred { .. }
                | AgentError::Fenced { .. },
            ) => brain::StopDelivery::Received,
        }
    }

    /// Copies the rest of the logs: the job's, then the runner's if possible.
    async fn logs(&self, lease: &Lease, row: &Row, call: CallContext) -> brain::LogDrain {
        let (now, limits) = (Timestamp(lease.now()), CopyLimits::for_log_size(self.0.limits.log_bytes));
        let copy = async |stream| {
            let log = job_log(&row.loaded.job, stream);
            copier::catch_up(&self.0.logs, &*self.0.agents, call, &log, now, limits).await
        };
        let drained = match copy(LogSource::Job).await {
            Ok(progress) if progress.complete => brain::LogDrain::Drained,
            Ok(_) => brain::LogDrain::More,
            Err(CopyError::Agent(AgentError::UnknownTask { .. })) => brain::LogDrain::Drained,
            Err(CopyError::Agent(_)) => brain::LogDrain::Silent,
            Err(CopyError::Store(error)) => {
                tracing::warn!(job = %row.loaded.job.id, %error, "failed to copy the end of a log");
                brain::LogDrain::More
            }
        };
        if drained == brain::LogDrain::Drained
            && let Err(error) = copy(LogSource::Runner).await
        {
            tracing::debug!(job = %row.loaded.job.id, %error, "failed to copy the runner's log");
        }
        drained
    }

    /// Adds the exit status of a stopped job, and whether it was killed. A job that ended by itself has reported both
    /// before.
    async fn with_exit_details(&self, ending: job::Ending, call: CallContext) -> job::Ending {
        if ending.exit_status().is_some() {
            return ending;
        }
        let Ok(pulled) = self.0.agents.pull(call).await else { return ending };
        let Some(last) = pulled.record.states.into_iter().next_back() else { return ending };
        let ending = match last.exit_status {
            Some(code) => ending.with_exit_status(code),
            None => ending,
        };
        match (ending.message().map(str::to_owned), last.termination_message) {
            (_, reported) if reported.is_empty() => ending,
            // The same message may be the reason of the ending.
            (Some(message), reported) if message.contains(&reported) => ending,
            (Some(message), reported) => ending.with_message(format!("{message}; {reported}")),
            (None, reported) => ending.with_message(reported),
        }
    }

    async fn remove(&self, call: CallContext, reason: &str) -> brain::TaskPresence {
        match agents::discard(&*self.0.agents, call, reason).await {
            Ok(()) | Err(AgentError::UnknownTask { .. } | AgentError::Gone { .. }) => {
                brain::TaskPresence::Gone
            }
            Err(AgentError::Refused { .. } | AgentError::Conflict { .. }) => brain::TaskPresence::There,
            Err(
                AgentError::Unreachable { .. }
                | AgentError::Barred { .. }
                | AgentError::Fenced { .. }
                | AgentError::Unsigned { .. },
            ) => brain::TaskPresence::Silent,
        }
    }

    async fn end(
        &self,
        lease: &Lease,
        row: &Row,
        end: &brain::FinalRelease,
    ) -> Result<ApplyOutcome, PassError> {
        let job = &row.loaded.job;
        let change = end.change();
        let why = pipeline_cause(event::Pipeline::JobTerminating, lease, change.reason, &change.message);
        let moved = event::transition::<job::JobLifecycle>(job.id, job.status, change.event, why)?;
        let Some(event) = moved.record else {
            return Err(PassError::NoTransition { status: job.status.as_str() });
        };
        let end = JobEnd {
            status: moved.status,
            event: &event,
            host_given_up: end.gave_up_host(),
            frees: job.blocks > 0,
            ending: end.ending(),
            now: Timestamp(lease.now()),
        };
        let (written, due) = rows::end(&self.0.db, lease.key(), job, end).await?;
        let mut wake = vec![super::runs::QUEUE.pipeline];
        wake.extend(due.waiting_jobs.then_some(super::jobs_submitted::QUEUE.pipeline));
        wake.extend(due.instance.then_some(Hint::InstancesDueSoon.as_str()));
        Ok(apply_outcome(&written, None, wake))
    }
}

/// Time that the commands have to exit: of the fleet's rules if the job was preempted.
fn stop_grace(job: &crate::db::jobs::Job, facts: &JobSpecView) -> Result<Span, DbError> {
    let is_preempted = job.ending().is_some_and(|ending| ending.is_preempted());
    let note = if is_preempted { job.preemption_note()? } else { None };
    let own = || Span::secs(facts.stop_duration.unwrap_or(STOP_MAX_SECS));
    Ok(note.map_or_else(own, |note| Span(note.grace_us)))
}

fn view(
    loaded: &JobInputs,
    facts: &JobSpecView,
    lost_after: Span,
) -> Result<brain::TerminatingJobView, DbError> {
    let job = &loaded.job;
    let stored = job.ending().unwrap_or(job::Ending::new(job::TerminationReason::TerminatedByServer));
    // An abort replaces a stop in progress; nothing else changes an ending.
    let ending = match job.end_asked() {
        Some(requested)
            if requested.reason() == job::TerminationReason::AbortedByUser
                && stored.reason() == job::TerminationReason::TerminatedByUser =>
        {
            requested
        }
        Some(_) | None => stored,
    };
    let place = loaded.instance.as_ref().map(|i| brain::HeldInstance {
        has_shim: true,
        status: i.status,
        other_jobs: u32::try_from(loaded.others_there).unwrap_or(u32::MAX),
    });
    Ok(brain::TerminatingJobView {
        ending,
        terminating_since: job.terminating_at.unwrap_or(job.last_processed_at),
        is_registered: job.replica_registered,
        has_open_requests: loaded.in_use,
        has_run: job.running_at.is_some(),
        is_task_submitted: job.pulling_at.is_some(),
        deadline: job.stop_deadline_at,
        stop_duration: facts.stop_duration.map(Span::secs),
        stop_grace: stop_grace(job, facts)?,
        volumes: Vec::new(),
        instance: place,
        give_up_after: brain::give_up_timeout(lost_after),
    })
}
