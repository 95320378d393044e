//! Conversion of managed jobs to responses.

use std::collections::HashMap;

use windlass_api::{Document, managed_jobs as wire};
use windlass_model::{
    deadline_policy::{NodeTime, deadline_report},
    decide::managed_jobs::slots::{SlotLimits, SlotUsage},
    id::ManagedJobId,
    managed_job::{
        PendingKind, ScheduleState, Status,
        plan::{self, ManagedJobPlan, RequestedAmount, Shape},
        reason::{self, AttemptProgress, TaskContext},
        record::{TaskRecord, job_totals},
    },
    run,
    time::{Span, Timestamp},
    yaml_text::to_yaml,
};

use crate::{
    app::App,
    db::{
        costs,
        documents::{JOB_SHORTFALLS, MANAGED_JOB_PLAN, MANAGED_TASK_RECORD},
        explanations::{self, JobTimes},
        managed_jobs::{self as rows, AttemptState, JobWithTasks},
        pipeline_rows::managed_jobs as passes,
    },
    error::Result,
    services::configurations::remove_unset,
};

/// A job with its stored documents, decoded.
struct StoredJob {
    named: JobWithTasks,
    plan: ManagedJobPlan,
    records: Vec<TaskRecord>,
}

impl StoredJob {
    fn of(named: JobWithTasks) -> Result<Self> {
        let plan: ManagedJobPlan = MANAGED_JOB_PLAN.decode(named.job.id, &named.job.plan)?;
        let records = named.tasks.iter().map(|task| MANAGED_TASK_RECORD.decode(task.id, &task.record));
        let records = records.collect::<std::result::Result<_, _>>()?;
        Ok(Self { named, plan, records })
    }

    fn run_name(&self, task: u32, attempt: u32) -> String {
        self.plan.run_name(&self.named.job.id.to_string(), task, attempt)
    }

    /// Runs that explain why a task waits. `detailed`: also those that explain why it waited before.
    fn explaining_runs(&self, detailed: bool) -> impl Iterator<Item = String> {
        let tells = move |record: &TaskRecord| {
            let launches = record.schedule == ScheduleState::Launching;
            let waited = record.status == Status::Pending
                || matches!(record.status, Status::FailedPrechecks | Status::FailedNoResource);
            record.attempt > 0 && (launches || (detailed && waited))
        };
        let records = (0..).zip(&self.records).filter(move |(_, record)| tells(record));
        records.map(|(task, record)| self.run_name(task, record.attempt))
    }

    fn waits_for_slot(&self) -> bool {
        let waits = |record: &TaskRecord| {
            matches!(record.status, Status::Pending | Status::Recovering)
                && record.schedule != ScheduleState::AliveBackoff
        };
        self.records.iter().any(waits)
    }
}

/// Data read from the database besides the rows of the jobs, once for all of them.
#[derive(Default)]
struct JobContext {
    slots: Option<(SlotLimits, SlotUsage)>,
    attempts: HashMap<String, Vec<AttemptState>>,
    /// Cost of the runs of a job, if a single one is read.
    costs: Option<HashMap<String, f64>>,
    /// Attempts by the name of their run, if a single job is read.
    times: Option<HashMap<String, Vec<JobTimes>>>,
}

impl JobContext {
    async fn of(app: &App, jobs: &[StoredJob], detailed: bool, now: Timestamp) -> Result<Self> {
        let mut context = Self::default();
        if jobs.iter().any(StoredJob::waits_for_slot) {
            context.slots = Some((app.settings().job_limits, passes::slots_in_use(app.db()).await?));
        }
        let telling = jobs.iter().map(|job| (job.named.job.id, job.explaining_runs(detailed)));
        let (mut ids, mut names): (Vec<ManagedJobId>, Vec<String>) = (Vec::new(), Vec::new());
        for (id, runs) in telling {
            let before = names.len();
            names.extend(runs);
            if names.len() > before {
                ids.push(id);
            }
        }
        for state in rows::attempt_states(app.db(), &ids, &names).await? {
            context.attempts.entry(state.run_name.clone()).or_default().push(state);
        }
        if let (true, [only]) = (detailed, jobs) {
            let id = only.named.job.id;
            context.costs = Some(costs::by_run_of_job(app.db(), id, now).await?);
            let mut times = HashMap::<String, Vec<JobTimes>>::new();
            for one in explanations::times_of_managed_job(app.db(), id).await? {
                times.entry(one.run_name.clone()).or_default().push(one);
            }
            context.times = Some(times);
        }
        Ok(context)
    }

    /// State of the run of an attempt, with the newest message of its nodes.
    fn attempt(&self, run: &str) -> AttemptProgress {
        let Some(nodes) = self.attempts.get(run) else { return AttemptProgress::Unknown };
        let Some(status) = nodes.first().and_then(|node| node.run_status) else {
            return AttemptProgress::Unknown;
        };
        let message = nodes.iter().rev().find_map(|node| node.message.clone());
        match status {
            run::Status::Pending | run::Status::Submitted => {
                let placed = nodes.iter().any(|node| node.has_instance);
                if placed {
                    AttemptProgress::Preparing { message }
                } else {
                    AttemptProgress::Queued { message }
                }
            }
            run::Status::Provisioning | run::Status::Running => AttemptProgress::Preparing { message },
            run::Status::Terminating => AttemptProgress::Ending,
            run::Status::Terminated | run::Status::Failed | run::Status::Done => AttemptProgress::Unknown,
        }
    }

    fn shortfalls(&self, run: &str) -> Result<Option<Document>> {
        let mut nodes = self.attempts.get(run).into_iter().flatten().rev();
        let text = nodes.find_map(|node| node.shortfalls.as_deref());
        Ok(JOB_SHORTFALLS.decode_opt(format_args!("of run `{run}`"), text)?)
    }
}

/// Converts jobs. `detailed`: with every offer that did not fit.
pub(super) async fn jobs(
    app: &App,
    named: Vec<JobWithTasks>,
    detailed: bool,
) -> Result<Vec<wire::ManagedJob>> {
    let now = app.db().now().await?;
    let jobs = named.into_iter().map(StoredJob::of).collect::<Result<Vec<_>>>()?;
    let context = JobContext::of(app, &jobs, detailed, now).await?;
    jobs.into_iter().map(|stored| job(stored, &context, now)).collect()
}

fn job(stored: StoredJob, context: &JobContext, now: Timestamp) -> Result<wire::ManagedJob> {
    let sums = job_totals(&stored.records, now);
    let total = sums.submitted_at.map(|from| sums.end_at.unwrap_or(now).since(from).as_secs());
    let tasks: Vec<wire::Task> = (0..)
        .zip(&stored.records)
        .map(|(number, record)| task(&stored, context, number, record, now))
        .collect::<Result<_>>()?;
    let reasons = tasks.iter().map(|task| (task.name.as_str(), task.reason.as_deref()));
    let reason = reason::job_reason(reasons);
    let StoredJob { named: JobWithTasks { job, project_name, user_name, .. }, plan, .. } = stored;
    Ok(wire::ManagedJob {
        id: job.id.0,
        job_id: job.number,
        name: job.name,
        project_name,
        user: user_name,
        shape: shape_name(&plan.shape).to_owned(),
        priority: job.priority,
        run_priority: plan::run_priority(job.priority),
        rank: job.rank,
        num_jobs: job.copies,
        status: job.status.as_str().to_owned(),
        schedule_state: job.schedule.as_str().to_owned(),
        reason,
        cancel_requested: job.cancel_asked_at.is_some(),
        created_at: job.submitted_at,
        submitted_at: sums.submitted_at,
        end_at: sums.end_at,
        total_duration: total,
        job_duration: sums.job_duration.as_secs(),
        recovery_count: sums.recovery_count,
        cost: context.costs.as_ref().map(|costs| costs.values().sum()),
        text: context.times.is_some().then(|| plan_text(&plan)).transpose()?,
        tasks,
    })
}

/// The plan of a job as YAML, without what is not set. Plans contain no values of secrets.
pub(super) fn plan_text(plan: &ManagedJobPlan) -> Result<String> {
    let mut value = serde_json::to_value(plan)?;
    remove_unset(&mut value);
    let mut text = to_yaml(&value);
    text.push('\n');
    Ok(text)
}

fn shape_name(of: &Shape) -> &'static str {
    match of {
        Shape::Single => "single",
        Shape::Pipeline => "pipeline",
        Shape::Dag => "dag",
        Shape::Group(_) => "group",
    }
}

/// Context of a task besides its record.
fn circumstances(stored: &StoredJob, context: &JobContext, number: u32, record: &TaskRecord) -> TaskContext {
    let of = usize::try_from(number).ok().and_then(|number| stored.plan.tasks.get(number));
    let is_queued = record.status == Status::Pending && record.pending == Some(PendingKind::Queued);
    let has_succeeded = |task: u32| {
        let before = usize::try_from(task).ok().and_then(|task| stored.records.get(task));
        before.is_some_and(|before| before.status == Status::Succeeded)
    };
    let after = of.filter(|_| is_queued).map(|task| task.after.as_slice()).unwrap_or_default();
    let open = after.iter().copied().filter(|task| !has_succeeded(*task));
    TaskContext {
        waits_for: open.map(|task| stored.plan.task_name(task)).collect(),
        slots: context.slots,
        attempt: context.attempt(&stored.run_name(number, record.attempt)),
    }
}

fn task(
    stored: &StoredJob,
    context: &JobContext,
    number: u32,
    record: &TaskRecord,
    now: Timestamp,
) -> Result<wire::Task> {
    let of = usize::try_from(number).ok().and_then(|number| stored.plan.tasks.get(number));
    let newest = stored.run_name(number, record.attempt);
    let why = context.shortfalls(&newest)?;
    let runs: Vec<String> = (1..=record.attempt).map(|attempt| stored.run_name(number, attempt)).collect();
    let cost = context.costs.as_ref().map(|costs| runs.iter().filter_map(|run| costs.get(run)).sum());
    Ok(wire::Task {
        cost,
        deadline: of.and_then(|task| deadline(task, record, now)),
        task_id: number,
        name: stored.plan.task_name(number),
        resources: of.map(resources).unwrap_or_default(),
        status: record.status.as_str().to_owned(),
        schedule_state: record.schedule.as_str().to_owned(),
        pending_kind: record.pending.map(|kind| kind.as_str().to_owned()),
        reason: reason::task_reason(record, &circumstances(stored, context, number, record)),
        last_failure: record.last_failure.clone(),
        why,
        submitted_at: record.submitted_at,
        start_at: record.start_at,
        end_at: record.end_at,
        last_recovered_at: record.last_recovered_at,
        next_retry_at: record.next_retry_at,
        total_duration: record.total_duration(now).map(Span::as_secs),
        job_duration: record.job_duration(now).as_secs(),
        recovery_count: record.recovery_count,
        restarts_on_errors: record.restarts_on_errors,
        placement: record.placement.as_ref().map(|placement| placement.place.clone()),
        attempt: record.attempt,
        attempts: context.times.as_ref().map(|times| attempts(&runs, times, context)),
        after: context.times.is_some().then(|| of.map(|task| task.after.clone()).unwrap_or_default()),
        runs,
    })
}

/// Attempts of a task whose runs exist, the oldest first.
fn attempts(
    runs: &[String],
    times: &HashMap<String, Vec<JobTimes>>,
    context: &JobContext,
) -> Vec<wire::TaskAttempt> {
    let attempt = |(number, run): (u32, &String)| {
        let nodes = times.get(run)?;
        let first = nodes.first()?;
        let ended = nodes.iter().all(|node| node.finished_at.is_some());
        let word = |reason: &String| reason.replace('_', " ");
        let reason = |node: &JobTimes| {
            node.termination_message.clone().or_else(|| node.termination_reason.as_ref().map(word))
        };
        Some(wire::TaskAttempt {
            attempt: number,
            run: run.clone(),
            run_id: Some(first.run_id.0),
            market: first.spot.map(|spot| if spot { "spot" } else { "on-demand" }.to_owned()),
            placement: first.instance.clone(),
            from: first.submitted_at,
            to: nodes.iter().filter_map(|node| node.finished_at).max().filter(|_| ended),
            reason: nodes.iter().find_map(reason),
            cost: context.costs.as_ref().and_then(|costs| costs.get(run)).copied().unwrap_or(0.0),
        })
    };
    (1..).zip(runs).filter_map(attempt).collect()
}

/// Report of a task with a deadline that got its first launch slot; until now, if it has not ended.
fn deadline(task: &plan::TaskPlan, record: &TaskRecord, now: Timestamp) -> Option<wire::DeadlineReport> {
    let (terms, began) = (task.deadline?, record.submitted_at?);
    let mut stretches = record.stretches.clone();
    let running_since = record.last_recovered_at.filter(|_| record.status == Status::Running);
    let current = running_since.zip(record.market);
    stretches.extend(current.map(|(from, market)| NodeTime { market, from, to: now }));
    let ended = record.end_at.unwrap_or(now);
    let report = deadline_report(terms, began, ended, task.nodes, &stretches);
    #[expect(clippy::cast_possible_truncation, reason = "seconds of a task")]
    let seconds = |number: f64| number as i64;
    Some(wire::DeadlineReport {
        due_at: began + Span::secs(terms.within),
        on_time: report.on_time,
        spare: seconds(report.spare),
        spot_node_seconds: seconds(report.spot_node_seconds),
        on_demand_node_seconds: seconds(report.on_demand_node_seconds),
        changeovers: report.changeovers,
    })
}

/// Resources that a task requests: `2x H100:8, 4+ CPU, 16 GB, spot`.
fn resources(task: &plan::TaskPlan) -> String {
    let Some(first) = task.candidates.first() else { return String::new() };
    let amount = |amount: &RequestedAmount| format!("{}{}", amount.of, if amount.or_more { "+" } else { "" });
    let mut parts = Vec::new();
    parts.extend(first.accelerator.as_ref().map(|gpu| format!("{}:{}", gpu.name, gpu.count)));
    parts.extend(first.cpus.as_ref().map(|cpus| format!("{} CPU", amount(cpus))));
    parts.extend(first.memory.as_ref().map(|memory| format!("{} GB", amount(memory))));
    if first.spot == Some(true) {
        parts.push("spot".to_owned());
    }
    let what = if parts.is_empty() { "any".to_owned() } else { parts.join(", ") };
    if task.nodes > 1 { format!("{}x {what}", task.nodes) } else { what }
}
