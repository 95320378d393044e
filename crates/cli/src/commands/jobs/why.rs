//! `windlass why JOB`: why a managed job is waiting, failed or ended.

use serde_json::json;
use windlass_api::{
    explanations::{ExplainedJob, Explanation, ManagedJobRequest},
    managed_jobs::{DeadlineReport, ListRequest, ManagedJob, ReadRequest, Task},
    operations::{ExplainManagedJob, ListManagedJobs, ReadManagedJob},
};
use windlass_model::time::{Span, Timestamp};

use super::is_final;
use crate::{
    cli::Format,
    commands::why::{document, print_cures, print_refusals, print_turn, without_refusal},
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
    let explanation = cx.call::<ExplainManagedJob>(&ManagedJobRequest { job_id: job.job_id }).await?;
    let facts = [("name", json!(job.name)), ("status", json!(job.status)), ("managed_job", json!(job))];
    let shown = document(&explanation, facts);
    output::print_one(format, &shown, &job.job_id.to_string(), |_| print_job(&job, &explanation))?;
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

fn print_job(job: &ManagedJob, explanation: &Explanation) {
    let now = format::now();
    let explained = |task: &Task| explanation.jobs.iter().find(|one| one.rank == i64::from(task.task_id));
    let launched = format::ago(job.created_at, now);
    print_line(&format!(
        "{}: managed job {}, {}, {} (launched {launched})",
        job.name, job.job_id, job.status, job.schedule_state
    ));
    match job.tasks.as_slice() {
        [only] => print_task(only, explained(only), "  ", now),
        many => {
            for task in many {
                print_line(&format!("  task {} ({}): {}", task.task_id, task.name, task.status));
                print_task(task, explained(task), "    ", now);
            }
        }
    }
    print_turn(explanation);
    print_cures(&explanation.cures);
}

fn print_task(task: &Task, explained: Option<&ExplainedJob>, indent: &str, now: Timestamp) {
    let refused = explained.filter(|job| !job.refusals.is_empty() || job.left_out > 0);
    if let Some(reason) = task.reason.as_ref().and_then(|reason| without_refusal(reason, refused)) {
        print_line(&format!("{indent}why:  {reason}"));
    }
    if task.attempt > 0 {
        let run = task.runs.last().map(|run| format!(" (run {run})")).unwrap_or_default();
        print_line(&format!("{indent}attempt: {}{run}", task.attempt));
    }
    if let Some(failure) = separate_failure(task).filter(|_| !is_final(&task.status)) {
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
    let Some(refused) = refused else { return };
    print_line(&format!("{indent}requires: {}", task.resources));
    print_refusals("does not fit", refused);
}

/// The last failure, unless the reason of the task contains it.
fn separate_failure(task: &Task) -> Option<&str> {
    let failure = task.last_failure.as_deref()?;
    let is_known = task.reason.as_ref().is_some_and(|reason| reason.contains(failure));
    (!is_known).then_some(failure)
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

#[cfg(test)]
mod tests {
    use serde_json::json;
    use windlass_api::managed_jobs::Task;

    use super::separate_failure;

    #[test]
    fn the_last_failure_is_not_printed_twice() {
        let task = |reason: &str| -> Task {
            serde_json::from_value(json!({
                "task_id": 0, "name": "a", "resources": "any", "status": "RECOVERING", "schedule_state": "ALIVE",
                "job_duration": 0, "recovery_count": 1, "restarts_on_errors": 1, "attempt": 2, "runs": [],
                "reason": reason, "last_failure": "the commands exited with status 5",
            }))
            .unwrap()
        };
        let known = task("the commands exited with status 5; next attempt at 10:00");
        assert_eq!(separate_failure(&known), None);
        let other = task("attempt 2 is waiting for nodes");
        assert_eq!(separate_failure(&other), Some("the commands exited with status 5"));
    }
}
