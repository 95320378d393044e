//! Pipeline `managed_jobs`: a managed job, followed through the runs of its attempts.
//!
//! Claims   managed_jobs in Pending, Starting, Running, Recovering, Cancelling, Succeeded, Cancelled, Failed,
//!          FailedSetup, FailedPrechecks, FailedNoResource, FailedController, until their nodes are released.
//! Owns     managed_jobs.status, managed_jobs.schedule, managed_jobs.claimed, managed_jobs.finished,
//!          managed_jobs.finished_at, managed_job_tasks.status, managed_job_tasks.schedule,
//!          managed_job_tasks.record, managed_job_tasks.wants_slot.
//! Wakes    on hint (one of its runs changed, a slot was granted, a cancel was requested), else after 5 to 30 s.
//! Shares   managed_job_tasks.granted with passes over other jobs: any pass may set it, the pass that uses the slot
//!          clears it.
//! Why not  create the run of an attempt in a separate step? A run is rows of the same database: it is created, or
//!          requested to stop, in the unit that writes the record, under the lease. So no attempt is created twice.

mod inputs;
mod launch;

use std::collections::BTreeMap;

use windlass_engine::{ApplyOutcome, DbTime, Lease, Pipeline, Queue};
use windlass_model::{
    config::job_spec_builder::DefaultImages,
    decide::jobs_terminating::LOGS_GRACE,
    decide::managed_jobs::{
        self as brain, AttemptAction, AttemptObservation, CancelRequest, Decision, ManagedJobView,
        TaskTransition, TaskView, internal_error, slots,
    },
    event::{self, Event},
    managed_job::{self, ScheduleEvent, ScheduleState, plan::ManagedJobPlan, record::TaskRecord},
    money::Price,
    skypilot::ServerContext,
    time::{Span, Timestamp},
};

use super::{PipelineContext, due_in, pipeline_cause};
use crate::{
    attempt_specs::{self, TaskArchives},
    db::{
        Unit, Val, Values, WriteOutcome,
        documents::{MANAGED_JOB_FILES, MANAGED_JOB_PLAN, MANAGED_TASK_RECORD},
        pipeline_rows::managed_jobs::{
            self as rows, AttemptRun, ManagedJobInputs, ManagedJobUpdate, StopRun, TaskUpdate,
        },
    },
    hints::Hint,
    offer_cache::OfferCache,
    pass_error::PassError,
    services::offers::OfferSupply,
};

pub(super) struct ManagedJobsPipeline {
    pub(super) context: PipelineContext,
    pub(super) market: OfferCache,
}

pub(crate) const QUEUE: Queue = Queue {
    pipeline: Hint::ManagedJobs.as_str(),
    table: "managed_jobs",
    statuses: &[
        "PENDING",
        "STARTING",
        "RUNNING",
        "RECOVERING",
        "CANCELLING",
        "SUCCEEDED",
        "CANCELLED",
        "FAILED",
        "FAILED_SETUP",
        "FAILED_PRECHECKS",
        "FAILED_NO_RESOURCE",
        "FAILED_CONTROLLER",
    ],
};

pub(crate) struct Row {
    loaded: ManagedJobInputs,
    plan: ManagedJobPlan,
    /// Records of the tasks, in the same order.
    records: Vec<TaskRecord>,
    files: TaskArchives,
    site: ServerContext,
    images: DefaultImages,
}

/// Observation of the newest attempt of each task.
pub(crate) struct AttemptsReport {
    attempts: BTreeMap<usize, AttemptRun>,
    /// Attempts before those that may be submitted now.
    previous: BTreeMap<usize, AttemptRun>,
    has_contended_slots: bool,
    newest_idle: Option<Timestamp>,
    /// Tasks with a deadline for which all nodes are available on the spot market now.
    on_spot: Vec<usize>,
    /// Prices of the candidates of tasks that use the cheapest one.
    prices: BTreeMap<usize, Vec<Option<Price>>>,
    jitter: f64,
}

pub(crate) struct ManagedJobPassPlan {
    /// Records on which the decision is based, with the granted slots.
    records: Vec<TaskRecord>,
    moves: Vec<(usize, TaskTransition)>,
    decision: Decision,
    attempts: BTreeMap<usize, AttemptRun>,
    previous: BTreeMap<usize, AttemptRun>,
    jitter: f64,
}

impl Pipeline for ManagedJobsPipeline {
    type Row = Row;
    type Observation = AttemptsReport;
    type Plan = ManagedJobPassPlan;
    type Error = PassError;

    fn queue(&self) -> Queue {
        QUEUE
    }

    async fn load(&self, lease: &Lease) -> Result<Option<Row>, PassError> {
        let Some(loaded) = rows::load(&self.context.db, lease).await? else { return Ok(None) };
        let plan: ManagedJobPlan = MANAGED_JOB_PLAN.decode(loaded.job.id, &loaded.job.plan)?;
        let files = MANAGED_JOB_FILES.decode(loaded.job.id, &loaded.job.files)?;
        let records = loaded.tasks.iter().map(|task| MANAGED_TASK_RECORD.decode(task.id, &task.record));
        let records = records.collect::<Result<_, _>>()?;
        let project = loaded.job.project_id;
        let site =
            attempt_specs::allowed_infra(&self.context.db, &self.context.backends, project, &plan).await?;
        let images = self.context.images.with_project(loaded.project_image.as_deref());
        Ok(Some(Row { loaded, plan, records, files, site, images }))
    }

    async fn observe(&self, _lease: &Lease, row: &Row) -> Result<AttemptsReport, PassError> {
        let (db, job) = (&self.context.db, &row.loaded.job);
        let mut names = BTreeMap::new();
        for (index, record) in row.records.iter().enumerate() {
            if record.attempt > 0 && record.schedule != ScheduleState::Done {
                names.insert(launch::run_name(row, index, record.attempt), (index, true));
            }
            if let Some(before) = record.attempt_before() {
                names.insert(launch::run_name(row, index, before), (index, false));
            }
        }
        let known: Vec<String> = names.keys().cloned().collect();
        let (mut attempts, mut previous) = (BTreeMap::new(), BTreeMap::new());
        for one in rows::attempts(db, job.id, &known).await? {
            let Some((index, is_newest)) = names.get(&one.run.name) else { continue };
            if *is_newest {
                attempts.insert(*index, one)
            } else {
                previous.insert(*index, one)
            };
        }
        let launches = row.records.iter().any(|record| record.schedule == ScheduleState::Launching);
        let has_contended_slots = launches && rows::has_waiting_tasks(db).await?;
        let waits = row.records.iter().any(|record| record.schedule == ScheduleState::AliveBackoff);
        let newest_idle = if waits { rows::newest_idle(db, job).await? } else { None };
        let newest_idle = newest_idle.map(Timestamp);
        let (on_spot, prices) = (self.on_spot(row).await, self.prices(row).await?);
        let jitter = jitter_from_id(&db.new_id()?);
        Ok(AttemptsReport { attempts, previous, has_contended_slots, newest_idle, on_spot, prices, jitter })
    }

    fn decide(row: &Row, mut seen: AttemptsReport, now: DbTime) -> ManagedJobPassPlan {
        let now = Timestamp(now);
        let cancel = cancel_request(row);
        let mut moves = Vec::new();
        let mut records = row.records.clone();
        for (index, record) in records.iter_mut().enumerate() {
            // The row is complete: it was loaded with its files and its plan.
            if record.schedule == ScheduleState::Inactive {
                record.schedule(ScheduleEvent::Submitted);
            }
            let granted = row.loaded.tasks[index].granted && cancel.is_none();
            let Some((next, event)) = granted.then(|| slots::apply_grant(record, now)).flatten() else {
                continue;
            };
            let message = "a launch slot was granted".to_owned();
            moves.push((
                index,
                TaskTransition {
                    from: record.status,
                    to: next.status,
                    event,
                    source: None,
                    rule: None,
                    message,
                },
            ));
            *record = next;
        }
        let tasks = records.iter().enumerate();
        let tasks: Vec<TaskView> = tasks
            .map(|(index, record)| TaskView {
                has_spot_capacity: seen.on_spot.contains(&index),
                has_contended_slots: seen.has_contended_slots,
                prices: seen.prices.remove(&index).unwrap_or_default(),
                ..task_view(record, seen.attempts.get(&index), seen.newest_idle, now)
            })
            .collect();
        let view = ManagedJobView { plan: &row.plan, cancel, tasks, jitter: seen.jitter };
        let decision = brain::decide(&view, now);
        let AttemptsReport { attempts, previous, jitter, .. } = seen;
        ManagedJobPassPlan { records, moves, decision, attempts, previous, jitter }
    }

    /// All effects are rows too, and are written with the rest.
    async fn act(&self, _lease: &Lease, _row: &Row, _next: &mut ManagedJobPassPlan) -> Result<(), PassError> {
        Ok(())
    }

    async fn apply(
        &self,
        lease: &Lease,
        row: Row,
        mut next: ManagedJobPassPlan,
    ) -> Result<ApplyOutcome, PassError> {
        let now = Timestamp(lease.now());
        let (mut stops, mut runs) = (Vec::new(), Vec::new());
        for decided in &mut next.decision.tasks {
            let index = usize::try_from(decided.task).unwrap_or_default();
            match &decided.action {
                None => {}
                Some(AttemptAction::Stop(stop)) => {
                    stops.extend(next.attempts.get(&index).map(|attempt| StopRun {
                        run: attempt.run.id,
                        abort: is_grace_expired(&row, stop.grace, now),
                        by: row.loaded.job.user_id,
                    }))
                }
                Some(AttemptAction::Submit(submit)) => {
                    let before = next.previous.get(&index);
                    match launch::run_unit(&self.context, lease, &row, (index, before), submit)? {
                        Ok(unit) => runs.push(unit),
                        Err(why) => {
                            let (record, moved) =
                                internal_error::apply_internal_error(&decided.record, &why, next.jitter, now);
                            decided.record = record;
                            decided.transitions.extend(moved);
                        }
                    }
                }
            }
        }
        self.write(lease, &row, next, stops, runs).await
    }
}

impl ManagedJobsPipeline {
    /// Lists the tasks with a deadline that have spot capacity. No other tasks need offers.
    async fn on_spot(&self, row: &Row) -> Vec<usize> {
        let live = row.plan.tasks.iter().zip(&row.records).enumerate();
        let wanted: Vec<usize> = live
            .filter(|(_, (task, record))| task.deadline.is_some() && record.schedule != ScheduleState::Done)
            .map(|(index, _)| index)
            .collect();
        if wanted.is_empty() {
            return wanted;
        }
        let market = self.market.seen().await;
        let is_there = |index: &usize| launch::has_spot_capacity(row, *index, &market.offers);
        wanted.into_iter().filter(is_there).collect()
    }

    /// Queries prices only for tasks that may launch and that leave the choice of candidate open.
    async fn prices(&self, row: &Row) -> Result<BTreeMap<usize, Vec<Option<Price>>>, PassError> {
        let launches = |index: &usize| {
            row.plan.tasks[*index].cheapest_first
                && holds_slot(row.loaded.tasks[*index].granted, &row.records[*index])
        };
        let wanted: Vec<usize> = (0..row.plan.tasks.len().min(row.records.len())).filter(launches).collect();
        if wanted.is_empty() {
            return Ok(BTreeMap::new());
        }
        let PipelineContext { db, local_processes, .. } = &self.context;
        let supply = OfferSupply::of(db, &self.market, *local_processes, row.loaded.job.project_id).await?;
        Ok(wanted.into_iter().map(|index| (index, launch::candidate_prices(row, index, &supply))).collect())
    }

    async fn write(
        &self,
        lease: &Lease,
        row: &Row,
        next: ManagedJobPassPlan,
        stops: Vec<StopRun>,
        runs: Vec<Unit>,
    ) -> Result<ApplyOutcome, PassError> {
        let decision = next.decision;
        let mut records = next.records;
        let mut moves = next.moves;
        for decided in decision.tasks {
            let index = usize::try_from(decided.task).unwrap_or_default();
            moves.extend(decided.transitions.into_iter().map(|moved| (index, moved)));
            if let Some(record) = records.get_mut(index) {
                *record = decided.record;
            }
        }
        let is_done = decision.schedule == ScheduleState::Done;
        let claimed = brain::has_launched(&records) && !is_done;
        let frees = frees_slot(row, &records) || (row.loaded.job.claimed && !claimed);
        let due_in_us = decision.due_at.map(|at| due_in(lease, at));
        let mut set: Values = vec![
            ("status", decision.status.into()),
            ("schedule", decision.schedule.into()),
            ("claimed", claimed.into()),
        ];
        if is_done {
            // The secrets are not needed after the end.
            set.extend([("finished", true.into()), ("finished_at", Val::Now), ("secrets_sealed", Val::Null)]);
        }
        let mut wake = Vec::new();
        if !stops.is_empty() {
            wake.push(super::runs::QUEUE.pipeline);
        }
        if !runs.is_empty() {
            wake.push(super::jobs_submitted::QUEUE.pipeline);
        }
        let outcome = ManagedJobUpdate {
            set,
            due_in_us,
            tasks: changed_tasks(row, &records, &decision.waiting_for_slot)?,
            stops,
            runs,
            events: transition_events(lease, row, &moves)?
                .into_iter()
                .chain(schedule_events(lease, row, decision.schedule))
                .collect(),
        };
        match rows::apply(&self.context.db, lease, &row.loaded.job, outcome).await? {
            WriteOutcome::Done { .. } => {}
            WriteOutcome::Stale { at: None } => return Ok(ApplyOutcome::LeaseLost),
            WriteOutcome::Stale { at: Some(_) } => return Ok(ApplyOutcome::RelatedBusy),
        }
        let granted = (frees || !decision.waiting_for_slot.is_empty()) && self.grant_slots().await?;
        if granted || due_in_us.is_some_and(|due| due <= 0) {
            wake.push(QUEUE.pipeline);
        }
        Ok(ApplyOutcome::Written { due_in_us, wake })
    }

    /// Grants free slots to waiting tasks. Returns whether any was granted.
    async fn grant_slots(&self) -> Result<bool, PassError> {
        let limits = self.context.job_limits;
        let line = rows::slot_queue(&self.context.db, limits).await?;
        let queue: Vec<slots::SlotRequest> = line.waiting.iter().map(|(waiting, _)| *waiting).collect();
        let granted = slots::grant_slots(&queue, limits, line.in_use, line.held.as_ref());
        let chosen: Vec<_> =
            line.waiting.into_iter().filter(|(waiting, _)| granted.contains(waiting)).collect();
        if chosen.is_empty() {
            return Ok(false);
        }
        rows::grant(&self.context.db, &chosen, limits).await?;
        Ok(true)
    }
}

fn cancel_request(row: &Row) -> Option<CancelRequest> {
    let job = &row.loaded.job;
    job.cancel_asked_at.map(|_| CancelRequest { grace: job.cancel_graceful_us.map(Span) })
}

/// Returns whether the time for a graceful cancel is over.
fn is_grace_expired(row: &Row, graceful: Option<Span>, now: Timestamp) -> bool {
    match (graceful, row.loaded.job.cancel_asked_at) {
        // The job's runner ends its commands when the time is over; this covers a runner that does not.
        (Some(timeout), Some(requested)) => now >= requested + timeout + LOGS_GRACE,
        (_, _) => false,
    }
}

fn task_view(
    record: &TaskRecord,
    attempt: Option<&AttemptRun>,
    newest_idle: Option<Timestamp>,
    now: Timestamp,
) -> TaskView {
    let seen = match record.attempt {
        0 => AttemptObservation::Nothing,
        _ => inputs::attempt_observation(attempt, now),
    };
    // A wait begins with the last attempt, at most one back-off before the next.
    let since = record.next_retry_at.map(|at| at - slots::backoff(record.launch_tries, 1.0));
    TaskView {
        record: record.clone(),
        observation: seen,
        has_spot_capacity: false,
        has_contended_slots: false,
        has_new_capacity: newest_idle.zip(since).is_some_and(|(idle, since)| idle > since),
        progress: None,
        releasing_since: attempt.and_then(inputs::releasing_since),
        prices: Vec::new(),
    }
}

/// Derives a number from 0 to 1 from a random id: the simulation's ids depend on its seed.
fn jitter_from_id(id: &uuid::Uuid) -> f64 {
    f64::from(id.as_fields().0) / f64::from(u32::MAX)
}

fn holds_slot(granted: bool, record: &TaskRecord) -> bool {
    granted || record.schedule.holds_launch_slot()
}

/// Returns whether a launch slot was released.
fn frees_slot(row: &Row, records: &[TaskRecord]) -> bool {
    let before = row.loaded.tasks.iter().zip(&row.records);
    before.zip(records).any(|((task, old), new)| holds_slot(task.granted, old) && !holds_slot(false, new))
}

/// The tasks whose rows change.
fn changed_tasks(
    row: &Row,
    records: &[TaskRecord],
    requirements: &[u32],
) -> Result<Vec<TaskUpdate>, PassError> {
    let mut written = Vec::new();
    for (index, (task, record)) in row.loaded.tasks.iter().zip(records).enumerate() {
        let wants_slot = u32::try_from(index).is_ok_and(|index| requirements.contains(&index));
        if *record == row.records[index] && !task.granted && task.wants_slot == wants_slot {
            continue;
        }
        written.push(TaskUpdate {
            task: task.task,
            status: record.status,
            schedule: record.schedule,
            record: serde_json::to_string(record).map_err(PassError::document)?,
            wants_slot,
            takes_grant: task.granted,
        });
    }
    Ok(written)
}

/// Events of a change of the job's schedule state. One pass may complete a submission and launch it.
fn schedule_events(lease: &Lease, row: &Row, to: ScheduleState) -> Vec<Event> {
    let from = row.loaded.job.schedule;
    let mut path = vec![from];
    if from == ScheduleState::Inactive && !matches!(to, ScheduleState::Inactive | ScheduleState::Done) {
        path.push(ScheduleState::Waiting);
    }
    path.push(to);
    path.dedup();
    let step = |states: &[ScheduleState]| {
        let [from, to] = states else { return None };
        let message = format!("Schedule state {from} -> {to}");
        let why = pipeline_cause(event::Pipeline::ManagedJob, lease, "schedule", message);
        let note = Event::note(event::Entity::ManagedJob, row.loaded.job.id, why);
        let (from, to) = (Some(from.as_str()), Some(to.as_str()));
        Some(Event { kind: event::EventKind::Schedule, from, to, ..note })
    };
    path.windows(2).filter_map(step).collect()
}

/// One event per transition. That of a recovery names its cause.
fn transition_events(
    lease: &Lease,
    row: &Row,
    moves: &[(usize, TaskTransition)],
) -> Result<Vec<Event>, PassError> {
    let several = row.plan.tasks.len() > 1;
    let mut events = Vec::new();
    for (index, moved) in moves {
        let Some(task) = row.loaded.tasks.get(*index) else { continue };
        let source = || moved.source.map_or(moved.event.as_str(), |source| source.as_str());
        let reason = moved.rule.map_or_else(source, |rule| rule.as_str());
        let message = match u32::try_from(*index) {
            Ok(number) if several => format!("Task {}: {}", row.plan.task_name(number), moved.message),
            Ok(_) | Err(_) => moved.message.clone(),
        };
        let why = pipeline_cause(event::Pipeline::ManagedJob, lease, reason, message);
        let step = event::transition::<managed_job::ManagedTaskLifecycle>(
            task.id,
            moved.from,
            moved.event,
            why.clone(),
        )?;
        let note = || Event::note(event::Entity::ManagedJob, task.id, why);
        events.push(step.record.unwrap_or_else(note));
    }
    Ok(events)
}
