//! Final state of a job: state, reason, message and exit status. Decisions only.

use std::{os::unix::process::ExitStatusExt, process::ExitStatus};

/// State of a job, with its name on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobStateName {
    Running,
    /// Prepared; waits for its other nodes.
    Ready,
    Done,
    Failed,
    Terminated,
}

impl JobStateName {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Ready => "ready",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Terminated => "terminated",
        }
    }
}

/// Cause of a job's end; the first one counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndCause {
    /// Its commands exited by themselves.
    Exited,
    /// Its commands failed during setup, before the program itself started, according to the phase file.
    SetupFailed,
    /// The server called `stop`. The commands exited then, or were killed after this many seconds.
    Stopped {
        killed_after: Option<u64>,
    },
    /// The runner itself was asked to exit.
    Ended,
    MaxDuration {
        secs: u64,
    },
    LogQuota {
        bytes: u64,
    },
    /// The output could not be stored.
    OutputNotStored {
        why: String,
        no_disk: bool,
    },
    /// The job cannot be started as it is specified, on this or any other host of its kind: its program or its user does
    /// not exist, for example.
    CannotStart {
        why: String,
    },
    /// The job could not be started; `reason` is one of the termination reasons.
    NotStarted {
        reason: &'static str,
        why: String,
    },
}

/// Final state of a job, without its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobEnd {
    pub state: JobStateName,
    pub reason: &'static str,
    pub message: String,
    pub detail: Option<&'static str>,
    pub exit_status: Option<i32>,
}

const EXIT_KILLED: i32 = 128 + 9;

/// Decides the final state. `exit` is `None` if nothing ran. `oom` is true if the kernel killed a process of the task
/// for lack of memory.
pub fn describe_end(cause: EndCause, exit: Option<ExitStatus>, oom: bool) -> JobEnd {
    let exit_status = exit.and_then(exit_code);
    let reported =
        |state, reason, message: String| JobEnd { state, reason, message, detail: None, exit_status };
    match cause {
        EndCause::Exited if exit_status == Some(0) => reported(JobStateName::Done, "", String::new()),
        EndCause::Exited | EndCause::SetupFailed => {
            let is_oom = oom && exit_status == Some(EXIT_KILLED);
            let mut message = exit.map(describe_exit).unwrap_or_default();
            if is_oom {
                message.push_str(": out of memory");
            }
            let in_setup = (cause == EndCause::SetupFailed).then_some("setup_failed");
            let detail = is_oom.then_some("oom_killed").or(in_setup);
            JobEnd { detail, ..reported(JobStateName::Failed, "container_exited_with_error", message) }
        }
        EndCause::Stopped { killed_after } => {
            let message = killed_after.map(|secs| {
                format!(
                    "it was still running {secs} s after the stop request (`stop_duration`) and was killed"
                )
            });
            reported(JobStateName::Terminated, "terminated_by_server", message.unwrap_or_default())
        }
        // The process that ended the task knows the reason; here it could be anything, including a shutdown of the
        // host.
        EndCause::Ended => reported(JobStateName::Terminated, "", "the task was stopped".to_owned()),
        EndCause::MaxDuration { secs } => {
            let message = format!("the commands ran longer than {secs} s");
            reported(JobStateName::Terminated, "max_duration_exceeded", message)
        }
        EndCause::LogQuota { bytes } => {
            let message = format!(
                "the output exceeded {bytes} bytes per hour (`log_rate_max` of the server); the rest was discarded"
            );
            reported(JobStateName::Failed, "log_quota_exceeded", message)
        }
        EndCause::OutputNotStored { why, no_disk } => {
            let message = format!("failed to store the output: {why}");
            JobEnd {
                detail: no_disk.then_some("no_disk"),
                ..reported(JobStateName::Failed, "executor_error", message)
            }
        }
        EndCause::CannotStart { why } => {
            JobEnd { detail: Some("setup_failed"), ..reported(JobStateName::Failed, "executor_error", why) }
        }
        EndCause::NotStarted { reason, why } => reported(JobStateName::Failed, reason, why),
    }
}

/// Returns the exit status as shells report it: 128 + signal for a process that was killed.
fn exit_code(exit: ExitStatus) -> Option<i32> {
    exit.code().or_else(|| exit.signal().map(|signal| 128 + signal))
}

fn describe_exit(exit: ExitStatus) -> String {
    match (exit.code(), exit.signal()) {
        (Some(code), _) => format!("the commands exited with status {code}"),
        (None, Some(signal)) => format!("the commands were killed by signal {signal}"),
        (None, None) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exited(code: i32) -> Option<ExitStatus> {
        Some(ExitStatus::from_raw(code << 8))
    }
    fn killed(signal: i32) -> Option<ExitStatus> {
        Some(ExitStatus::from_raw(signal))
    }

    #[test]
    fn every_end_cause_maps_to_its_state_reason_and_exit_status() {
        let table = [
            (EndCause::Exited, exited(0), false, JobStateName::Done, "", Some(0), None),
            (EndCause::Exited, exited(0), true, JobStateName::Done, "", Some(0), None),
            (
                EndCause::Exited,
                exited(3),
                false,
                JobStateName::Failed,
                "container_exited_with_error",
                Some(3),
                None,
            ),
            (
                EndCause::Exited,
                exited(3),
                true,
                JobStateName::Failed,
                "container_exited_with_error",
                Some(3),
                None,
            ),
            (
                EndCause::Exited,
                killed(9),
                false,
                JobStateName::Failed,
                "container_exited_with_error",
                Some(137),
                None,
            ),
            (
                EndCause::Exited,
                killed(9),
                true,
                JobStateName::Failed,
                "container_exited_with_error",
                Some(137),
                Some("oom_killed"),
            ),
            (
                EndCause::Exited,
                exited(137),
                true,
                JobStateName::Failed,
                "container_exited_with_error",
                Some(137),
                Some("oom_killed"),
            ),
            (
                EndCause::Exited,
                killed(11),
                false,
                JobStateName::Failed,
                "container_exited_with_error",
                Some(139),
                None,
            ),
            (
                EndCause::Stopped { killed_after: None },
                exited(0),
                false,
                JobStateName::Terminated,
                "terminated_by_server",
                Some(0),
                None,
            ),
            (
                EndCause::Stopped { killed_after: None },
                killed(9),
                true,
                JobStateName::Terminated,
                "terminated_by_server",
                Some(137),
                None,
            ),
            (
                EndCause::Stopped { killed_after: None },
                None,
                false,
                JobStateName::Terminated,
                "terminated_by_server",
                None,
                None,
            ),
            (EndCause::Ended, killed(15), false, JobStateName::Terminated, "", Some(143), None),
            (
                EndCause::MaxDuration { secs: 5 },
                killed(2),
                false,
                JobStateName::Terminated,
                "max_duration_exceeded",
                Some(130),
                None,
            ),
            (
                EndCause::LogQuota { bytes: 9 },
                killed(2),
                false,
                JobStateName::Failed,
                "log_quota_exceeded",
                Some(130),
                None,
            ),
            (
                EndCause::OutputNotStored { why: "full".into(), no_disk: true },
                killed(9),
                false,
                JobStateName::Failed,
                "executor_error",
                Some(137),
                Some("no_disk"),
            ),
            (
                EndCause::CannotStart { why: "no such program".into() },
                None,
                false,
                JobStateName::Failed,
                "executor_error",
                None,
                Some("setup_failed"),
            ),
            (
                EndCause::NotStarted { reason: "executor_error", why: "no".into() },
                None,
                false,
                JobStateName::Failed,
                "executor_error",
                None,
                None,
            ),
        ];
        for (cause, exit, oom, state, reason, exit_status, detail) in table {
            let reported = describe_end(cause.clone(), exit, oom);
            let got = (reported.state, reported.reason, reported.exit_status, reported.detail);
            assert_eq!(got, (state, reason, exit_status, detail), "{cause:?} {exit:?}");
        }
    }

    #[test]
    fn failure_messages_state_the_exit_status_or_signal() {
        assert_eq!(
            describe_end(EndCause::Exited, exited(7), false).message,
            "the commands exited with status 7"
        );
        let oom = describe_end(EndCause::Exited, killed(9), true).message;
        assert_eq!(oom, "the commands were killed by signal 9: out of memory");
    }
}
