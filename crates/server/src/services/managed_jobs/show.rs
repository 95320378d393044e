//! Rows of managed jobs, as clients read them.

use windlass_api::managed_jobs as wire;
use windlass_model::{
    managed_job::{
        plan::{self, Amount, Plan, Shape},
        record::{Record, summary},
    },
    time::Timestamp,
};

use crate::{db::managed_jobs::Named, error::Result};

pub(super) fn job(named: Named, now: Timestamp) -> Result<wire::ManagedJob> {
    let Named { job, tasks, project_name, user_name } = named;
    let plan: Plan = serde_json::from_str(&job.plan)?;
    let records: Vec<Record> =
        tasks.iter().map(|task| serde_json::from_str(&task.record)).collect::<Result<_, _>>()?;
    let sums = summary(&records, now);
    let total = sums.submitted_at.map(|from| sums.end_at.unwrap_or(now).since(from).as_secs());
    let shown =
        (0..).zip(&records).map(|(number, record)| task(&plan, &job.id.to_string(), number, record, now));
    Ok(wire::ManagedJob {
        id: job.id.0,
        job_id: job.number,
        name: job.name,
        project_name,
        user: user_name,
        shape: shape(&plan.shape).to_owned(),
        priority: job.priority,
        rank: job.rank,
        num_jobs: job.copies,
        status: job.status.as_str().to_owned(),
        schedule_state: job.schedule.as_str().to_owned(),
        cancel_asked: job.cancel_asked_at.is_some(),
        created_at: job.submitted_at,
        submitted_at: sums.submitted_at,
        end_at: sums.end_at,
        total_duration: total,
        job_duration: sums.job_duration.as_secs(),
        recovery_count: sums.recovery_count,
        tasks: shown.collect(),
    })
}

fn shape(of: &Shape) -> &'static str {
    match of {
        Shape::Single => "single",
        Shape::Pipeline => "pipeline",
        Shape::Dag => "dag",
        Shape::Group(_) => "group",
    }
}

fn task(plan: &Plan, job: &str, number: u32, record: &Record, now: Timestamp) -> wire::Task {
    let of = usize::try_from(number).ok().and_then(|number| plan.tasks.get(number));
    wire::Task {
        task_id: number,
        name: plan.task_name(number),
        resources: of.map(resources).unwrap_or_default(),
        status: record.status.as_str().to_owned(),
        schedule_state: record.schedule.as_str().to_owned(),
        pending_kind: record.pending.map(|kind| kind.as_str().to_owned()),
        reason: record.failure_reason.clone(),
        submitted_at: record.submitted_at,
        start_at: record.start_at,
        end_at: record.end_at,
        last_recovered_at: record.last_recovered_at,
        next_retry_at: record.next_retry_at,
        total_duration: record.total_duration(now).map(windlass_model::time::Span::as_secs),
        job_duration: record.job_duration(now).as_secs(),
        recovery_count: record.recovery_count,
        restarts_on_errors: record.restarts_on_errors,
        placement: record.placement.as_ref().map(|placement| placement.place.clone()),
        attempt: record.attempt,
        runs: (1..=record.attempt).map(|attempt| plan.run_name(job, number, attempt)).collect(),
    }
}

/// What a task asks for: `2x H100:8, 4+ CPU, 16 GB, spot`.
fn resources(task: &plan::Task) -> String {
    let Some(first) = task.candidates.first() else { return String::new() };
    let amount = |amount: &Amount| format!("{}{}", amount.of, if amount.or_more { "+" } else { "" });
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
