//! How a job's end is told: state, reason, message and exit status. Decisions only.

use std::{os::unix::process::ExitStatusExt, process::ExitStatus};

/// What the state is called on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobStateName {
    Running,
    /// Prepared; it waits for its other nodes.
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

/// Why the job came to its end; the first one counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndCause {
    /// Its commands ended of themselves.
    Exited,
    /// They ended badly before the program itself began, as they say.
    SetupFailed,
    /// Somebody called `stop`. Its commands ended then, or were killed after so many seconds.
    Stopped {
        killed_after: Option<u64>,
    },
    /// The runner itself was told to end.
    Ended,
    MaxDuration {
        secs: u64,
    },
    LogQuota {
        bytes: u64,
    },
    /// The output could not be kept.
    OutputNotStored {
        why: String,
        no_disk: bool,
    },
    /// It could not be started; `reason` is a word of the termination reasons.
    NotStarted {
        reason: &'static str,
        why: String,
    },
}

/// A job's last word, without its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobEnd {
    pub state: JobStateName,
    pub reason: &'static str,
    pub message: String,
    pub detail: Option<&'static str>,
    pub exit_status: Option<i32>,
}

const EXIT_KILLED: i32 = 128 + 9;

/// `exit` is `None` where nothing ran. `oom` says that the kernel killed something of the task for want of memory.
pub fn ending(cause: EndCause, exit: Option<ExitStatus>, oom: bool) -> JobEnd {
    let exit_status = exit.and_then(status);
    let told = |state, reason, message: String| JobEnd { state, reason, message, detail: None, exit_status };
    match cause {
        EndCause::Exited if exit_status == Some(0) => told(JobStateName::Done, "", String::new()),
        EndCause::Exited | EndCause::SetupFailed => {
            let is_oom = oom && exit_status == Some(EXIT_KILLED);
            let mut message = exit.map(described).unwrap_or_default();
            if is_oom {
                message.push_str(": out of memory");
            }
            let in_setup = (cause == EndCause::SetupFailed).then_some("setup_failed");
            let detail = is_oom.then_some("oom_killed").or(in_setup);
            JobEnd { detail, ..told(JobStateName::Failed, "container_exited_with_error", message) }
        }
        EndCause::Stopped { killed_after } => {
            let message = killed_after.map(|secs| {
                format!("it had not ended {secs} s after it was asked to (`stop_duration`), and was killed")
            });
            told(JobStateName::Terminated, "terminated_by_server", message.unwrap_or_default())
        }
        // Whoever ended the task knows why; here it could be anything, the machine's shutdown included.
        EndCause::Ended => told(JobStateName::Terminated, "", "the task was told to end".to_owned()),
        EndCause::MaxDuration { secs } => {
            let message = format!("the commands ran longer than {secs} s");
            told(JobStateName::Terminated, "max_duration_exceeded", message)
        }
        EndCause::LogQuota { bytes } => {
            let message = format!(
                "the output passed {bytes} bytes an hour (the server's setting `log_rate_max`); what came after that was not kept"
            );
            told(JobStateName::Failed, "log_quota_exceeded", message)
        }
        EndCause::OutputNotStored { why, no_disk } => {
            let message = format!("the output could not be kept: {why}");
            JobEnd {
                detail: no_disk.then_some("no_disk"),
                ..told(JobStateName::Failed, "executor_error", message)
            }
        }
        EndCause::NotStarted { reason, why } => told(JobStateName::Failed, reason, why),
    }
}

/// As shells count: 128 + signal for one that was killed.
fn status(exit: ExitStatus) -> Option<i32> {
    exit.code().or_else(|| exit.signal().map(|signal| 128 + signal))
}

fn described(exit: ExitStatus) -> String {
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
    fn every_end_has_its_state_reason_and_exit_status() {
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
            let told = ending(cause.clone(), exit, oom);
            let got = (told.state, told.reason, told.exit_status, told.detail);
            assert_eq!(got, (state, reason, exit_status, detail), "{cause:?} {exit:?}");
        }
    }

    #[test]
    fn a_failure_says_what_happened() {
        assert_eq!(ending(EndCause::Exited, exited(7), false).message, "the commands exited with status 7");
        let oom = ending(EndCause::Exited, killed(9), true).message;
        assert_eq!(oom, "the commands were killed by signal 9: out of memory");
    }
}
