//! `windlass why JOB`: why a managed job is waiting, failed or ended.

use windlass_api::{
    managed_jobs::{DeadlineReport, ListRequest, ManagedJob, ReadRequest, Task},
    operations::{ListManagedJobs, ReadManagedJob},
};
use windlass_model::time::{Span, Timestamp};

use super::is_final;
use crate::{
    cli::Format,
    commands::why::{format_fixes, print_refusals, without_refusal},
    context::Context,
    error::CliError,
    exit::Exit,
    output::{self, format},
};

/// Shows a managed job, or fails if neither a run nor a job has that name.
pub(crate) async fn explain_job(cx: &Context, name: &str, format: Format) -> Result<Exit, CliError> {
    let Some(job) = find(cx, name).await? else {
        return Err(cx.unknown_run(name).await);
    };
    output::print_one(format, &job, &job.job_id.to_string(), |_| print_job(&job))?;
    Ok(Exit::Done)
}

/// Number of a managed job with the given name.
pub(crate) async fn find_job_named(cx: &Context, name: &str) -> Option<i64> {
    let request = name_request(name);
    let found = cx.try_call::<ListManagedJobs>(&request).await.ok()?;
    found.first().map(|job| job.job_id)
}

/// Request for the newest job of that name, of any user.
fn name_request(name: &str) -> ListRequest {
    ListRequest { name: Some(name.to_owned()), all_users: true, limit: Some(1), ..ListRequest::default() }
}

async fn find(cx: &Context, name: &str) -> Result<Option<ManagedJob>, CliError> {
    let job_id = match name.parse::<i64>() {
        Ok(number) => number,
        Err(_) => match cx.call::<ListManagedJobs>(&name_request(name)).await?.first() {
            Some(job) => job.job_id,
            None => return Ok(None),
        },
    };
    match cx.try_call::<ReadManagedJob>(&ReadRequest { job_id }).await {
        Ok(job) => Ok(Some(job)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(cx.explain(&error).await),
    }
}

fn print_job(job: &ManagedJob) {
    let now = format::now();
    let launched = format::ago(job.created_at, now);
    print_line(&format!(
        "{}: managed job {}, {}, {} (launched {launched})",
        job.name, job.job_id, job.status, job.schedule_state
    ));
    match job.tasks.as_slice() {
        [only] => print_task(only, "  ", now),
        many => {
            for task in many {
                print_line(&format!("  task {} ({}): {}", task.task_id, task.name, task.status));
                print_task(task, "    ", now);
            }
        }
    }
}

fn print_task(task: &Task, indent: &str, now: Timestamp) {
    let why = task.why.as_ref().and_then(|why| why.value().ok());
    if let Some(reason) = task.reason.as_ref().and_then(|reason| without_refusal(reason, why.as_ref())) {
        print_line(&format!("{indent}why:  {reason}"));
    }
    if task.attempt > 0 {
        let run = task.runs.last().map(|run| format!(" (run {run})")).unwrap_or_default();
        print_line(&format!("{indent}attempt: {}{run}", task.attempt));
    }
    if let Some(failure) = task.last_failure.as_ref().filter(|_| !is_final(&task.status)) {
        print_line(&format!("{indent}last failure: {failure}"));
    }
    if let Some(next) = task.next_retry_at {
        print_line(&format!(
            "{indent}next retry: {} (in {})",
            format::timestamp(next),
            format::span(next.since(now))
        ));
    }
    if let Some(cost) = task.cost.filter(|cost| *cost > 0.0) {
        print_line(&format!("{indent}cost so far: {}", format::price(cost)));
    }
    if let Some(deadline) = &task.deadline {
        print_line(&format!("{indent}deadline: {}", format_deadline(deadline)));
    }
    if let Some(place) = &task.placement {
        print_line(&format!("{indent}placement: {place}"));
    }
    let Some(why) = why else { return };
    print_line(&format!("{indent}requires: {}", task.resources));
    print_refusals("does not fit", &why);
    let cures = format_fixes(&why);
    if !cures.is_empty() {
        print_line("  to make it fit:");
        cures.iter().for_each(|cure| print_line(&format!("    {cure}")));
    }
}

/// `2026-11-18T10:00:00Z, 2 h left; 3 h on spot nodes, 1 h on demand, 2 changeovers`.
fn format_deadline(report: &DeadlineReport) -> String {
    let left = format::span(Span::secs(report.spare.abs()));
    let state = match report.on_time {
        true => format!("{left} left"),
        false => format!("missed by {left}"),
    };
    format!(
        "{}, {state}; {} on spot nodes, {} on demand, {}",
        format::timestamp(report.due_at),
        format::span(Span::secs(report.spot_node_seconds)),
        format::span(Span::secs(report.on_demand_node_seconds)),
        format::count(usize::try_from(report.changeovers).unwrap_or(usize::MAX), "changeover"),
    )
}

fn print_line(text: &str) {
    output::print_data(&output::printable(text));
}
