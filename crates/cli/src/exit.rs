//! Exit codes.
//!
//! Codes below 200 are those of the job, for commands that wait for a job; `docs/cli.md` has the whole table.

use std::process::ExitCode;

/// Lowest code of windlass; lower codes may come from a job.
pub(crate) const OWN_CODES_MIN: i64 = 200;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Done,
    /// Refused or failed.
    Failed,
    /// Invalid arguments.
    Usage,
    /// Exit code of the job; below 200.
    Job(u8),
    /// The run or the applied resource failed for another reason than a job's exit code.
    RunFailed,
    /// A user stopped the run.
    RunStopped,
    /// The job exited with 200 or more.
    JobCodeTooHigh,
    /// A limit ended the run, such as `max_duration`.
    RunLimit,
}

impl Exit {
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::Job(code) => code,
            Self::RunFailed => 200,
            Self::RunStopped => 201,
            Self::JobCodeTooHigh => 202,
            Self::RunLimit => 203,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        exit.code().into()
    }
}
