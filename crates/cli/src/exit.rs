//! What the exit code means.
//!
//! Below 200 it is the job's own code, where a command waited for a job; `docs/cli.md` has the whole table.

use std::process::ExitCode;

/// Codes from here on are ours and never a job's.
pub(crate) const OWN_CODES_MIN: i64 = 200;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Done,
    /// Refused or failed.
    Failed,
    /// The command was called in a way that cannot work.
    Usage,
    /// What the job itself returned; below 200.
    Job(u8),
    /// The run, or what was to be applied, failed, and not by a job's own exit code.
    RunFailed,
    /// Somebody stopped the run.
    RunStopped,
    /// The job returned 200 or more.
    JobCodeTooHigh,
    /// A limit of the run ended it, such as `max_duration`.
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
