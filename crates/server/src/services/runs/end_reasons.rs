//! Reasons why a run ended or is not ready, and what helps: from the messages of its jobs. Pure.

use std::collections::BTreeSet;

use windlass_api::runs::{JobSubmission, Run};
use windlass_model::run::TerminationReason as RunTerminationReason;

fn latest_submissions(run: &Run) -> impl Iterator<Item = &JobSubmission> {
    run.jobs.iter().filter_map(|job| job.job_submissions.last())
}

/// The limit of `retry` that ended a run, from the message of its end: the last clause names it.
pub(super) fn exceeded_retry_limit(reason: Option<&str>, message: Option<&str>) -> Option<String> {
    let limit = RunTerminationReason::RetryLimitExceeded;
    let (_, clause) = message.filter(|_| reason == Some(limit.as_str()))?.rsplit_once("; ")?;
    Some(format!("{}: {clause}", limit.error()?))
}

/// Every distinct message, most specific first. `limit`: the limit of `retry` that ended the run.
pub(super) fn reasons(run: &Run, limit: Option<String>) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    // A replica that was scaled down does not describe the others.
    let is_active = !matches!(run.status.as_str(), "terminated" | "failed" | "done");
    let is_gone = |submission: &&JobSubmission| {
        is_active && submission.termination_reason.as_deref() == Some("scaled_down")
    };
    // One that the server ended because of another job describes that job once more.
    let is_consequence = |submission: &&JobSubmission| {
        submission.termination_reason.as_deref() == Some("terminated_by_server")
    };
    let has_cause = latest_submissions(run).any(|submission| {
        submission.termination_reason.as_deref().is_some_and(|reason| reason != "done_by_runner")
            && !is_consequence(&submission)
    });
    let shown = latest_submissions(run).filter(|submission| !is_gone(submission));
    for submission in shown.filter(|submission| !(has_cause && is_consequence(submission))) {
        if submission.ready == Some(false) && submission.status_message != submission.status {
            all.push(submission.status_message.clone());
        }
        let message = submission.termination_reason_message.iter().chain(&submission.error);
        let before = all.len();
        all.extend(message.filter(|message| !message.trim().is_empty()).cloned());
        // The agent's message contains the exit code already.
        if all.len() == before
            && let Some(code) = submission.exit_status.filter(|code| *code != 0)
        {
            all.push(format!("exit code {code}"));
        }
        if let Some(reason) = &submission.termination_reason
            && reason != "done_by_runner"
            && all.is_empty()
        {
            all.push(reason.replace('_', " "));
        }
    }
    all.extend(limit.or_else(|| run.error.clone()).filter(|message| !message.trim().is_empty()));
    let mut seen = BTreeSet::new();
    all.retain(|message| seen.insert(message.trim().to_lowercase()));
    all
}

/// Reason of the end of a run, in words.
pub(crate) fn end_in_words(run: &Run) -> String {
    let reason = run.termination_reason.as_ref().map(|reason| reason.replace('_', " "));
    let first = run.reasons.first().and_then(|reason| reason.lines().next()).map(str::to_owned);
    first.or(reason).unwrap_or_else(|| "no reason recorded".to_owned())
}

/// Suggests a fix.
pub(super) fn hint(run: &Run, name: &str) -> Option<String> {
    let reason = latest_submissions(run).find_map(|submission| submission.termination_reason.as_deref());
    let text = match reason? {
        "failed_to_start_due_to_no_capacity" => {
            format!("run `windlass why {name}` to see what does not fit, and `windlass fleet` to list fleets")
        }
        "creating_container_error" => {
            "check `image` and `registry_auth`, and that the host can reach the registry".to_owned()
        }
        "executor_error" | "waiting_runner_limit_exceeded" => {
            format!("run `windlass logs --diagnose {name}` to see the log of the agent")
        }
        "instance_unreachable" => "run `windlass fleet` to see the status of the instance".to_owned(),
        "max_duration_exceeded" => "raise `max_duration`, or set it to `off`".to_owned(),
        "ports_binding_failed" => {
            "another process on the host uses the port; choose another one in `ports`".to_owned()
        }
        "volume_error" => "run `windlass volume` to see the status of the volumes".to_owned(),
        _ => return None,
    };
    Some(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use uuid::Uuid;

    use super::*;

    #[test]
    fn a_job_that_ended_because_of_another_one_is_no_separate_reason() {
        let time = "2026-11-20T09:00:00Z";
        let job = |num: i64, reason: &str, message: &str| {
            let submission = json!({ "id": Uuid::nil(), "submission_num": 0, "submitted_at": time,
                "last_processed_at": time, "status": "failed", "status_message": "failed",
                "termination_reason": reason, "termination_reason_message": message });
            json!({ "job_spec": { "replica_num": 0, "job_num": num }, "job_submissions": [submission] })
        };
        let run = |jobs: serde_json::Value| -> Run {
            serde_json::from_value(json!({ "id": Uuid::nil(), "project_name": "main", "user": "admin",
                "submitted_at": time, "last_processed_at": time, "status": "failed", "run_spec": {}, "jobs": jobs }))
            .unwrap()
        };
        let ended = "job 1 of replica 0 ended: the commands exited with status 5";
        let other = job(0, "terminated_by_server", ended);
        let cause = job(1, "container_exited_with_error", "the commands exited with status 5");
        assert_eq!(reasons(&run(json!([other, cause])), None), ["the commands exited with status 5"]);
        assert_eq!(reasons(&run(json!([other])), None), [ended]);
    }

    #[test]
    fn the_limit_of_retries_names_its_duration_and_the_number_of_attempts() {
        let message = "job 0 of replica 0 ended: the commands exited with status 3; retry duration of 60 s exceeded \
                       after 4 attempts (75 s elapsed)";
        let limit = |reason: &str| exceeded_retry_limit(Some(reason), Some(message));
        let text = "retry limit exceeded: retry duration of 60 s exceeded after 4 attempts (75 s elapsed)";
        assert_eq!(limit("retry_limit_exceeded").as_deref(), Some(text));
        assert_eq!(limit("job_failed"), None);
    }
}
