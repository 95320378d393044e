//! Outcome of a run: its description and exit code.

use windlass_api::runs::{JobSubmission, Run};

use crate::exit::{Exit, OWN_CODES_MIN};

/// Exit code of a command that waited for the run.
pub(crate) fn exit_for(run: &Run) -> Exit {
    match run.status.as_str() {
        "done" => Exit::Done,
        _ if is_stopped_by_limit(run) => Exit::RunLimit,
        "failed" => job_exit(run).unwrap_or(Exit::RunFailed),
        _ if is_stopped_by_user(run) => Exit::RunStopped,
        _ => job_exit(run).unwrap_or(Exit::RunFailed),
    }
}

/// Exit code of the first job, in order, that did not exit with 0.
fn job_exit(run: &Run) -> Option<Exit> {
    let code =
        latest_submissions(run).find_map(|submission| submission.exit_status.filter(|code| *code != 0))?;
    match u8::try_from(code) {
        Ok(small) if code < OWN_CODES_MIN => Some(Exit::Job(small)),
        Ok(_) | Err(_) => Some(Exit::JobCodeTooHigh),
    }
}

fn latest_submissions(run: &Run) -> impl Iterator<Item = &JobSubmission> {
    run.jobs.iter().filter_map(|job| job.job_submissions.last())
}

fn is_stopped_by_user(run: &Run) -> bool {
    matches!(run.termination_reason.as_deref(), Some("stopped_by_user" | "aborted_by_user"))
}

/// Returns whether a limit ended the run. The exit code of a program that was stopped is not reported as its own.
fn is_stopped_by_limit(run: &Run) -> bool {
    let limits = [
        "max_duration_exceeded",
        "inactivity_duration_exceeded",
        "terminated_due_to_utilization_policy",
        "log_quota_exceeded",
    ];
    latest_submissions(run)
        .filter_map(|one| one.termination_reason.as_deref())
        .any(|reason| limits.contains(&reason))
}

/// Indents the lines after the first, for output after `why:`.
pub(crate) fn indent_lines(text: &str) -> String {
    text.trim_end().replace('\n', "\n        ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::progress::tests::run, Exit, exit_for};

    #[test]
    fn a_run_ended_by_a_limit_has_its_own_exit_code() {
        let ended = |status: &str, job: serde_json::Value| {
            let mut run = run(&[job]);
            run.status = status.to_owned();
            exit_for(&run)
        };
        let limit = json!({"status": "terminated", "termination_reason": "max_duration_exceeded", "exit_status": 143});
        assert_eq!(ended("terminated", limit.clone()), Exit::RunLimit);
        assert_eq!(ended("failed", limit), Exit::RunLimit);
        let own = json!({"status": "failed", "termination_reason": "container_exited_with_error", "exit_status": 143});
        assert_eq!(ended("failed", own), Exit::Job(143));
    }
}
