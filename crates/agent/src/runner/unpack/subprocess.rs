//! Unpacking in a separate child process, and its report.

use std::{
    fs::File,
    io::{self, Write as _},
    os::fd::AsFd as _,
    path::Path,
    process::{ExitCode, Stdio},
    time::Duration,
};

use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use super::{ArchiveLimits, Summary, TopLevel, UnpackError, unpack};
use crate::{
    runner::{helper_process, user_context::UserContext},
    safe_open::{self, LandlockStatus},
};

/// An archive that takes longer is stuck, most likely on a file system that does not respond.
const DEADLINE: Duration = Duration::from_secs(30 * 60);
/// Maximum size in bytes of the child's report.
const REPORT_BYTES_MAX: usize = 64 << 10;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[arg(long)]
    top: TopLevel,
}

/// Report that the child writes to its standard output.
#[derive(Debug, Serialize, Deserialize)]
struct ChildReport {
    landlock: LandlockStatus,
    ended: ChildOutcome,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ChildOutcome {
    Done(Summary),
    Refused(String),
    NoSpace(String),
    Failed(String),
}

#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    #[error("{0}")]
    Refused(String),
    #[error("{0}: no space left on the device")]
    NoSpace(String),
    #[error("{0}")]
    Failed(String),
    #[error("failed to unpack the archive: {what}")]
    Start {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("failed to unpack the archive: timed out after {} s", DEADLINE.as_secs())]
    Deadline,
    #[error("failed to unpack the archive: the child process ended without a report ({message})")]
    Silent { message: String },
}

/// Result of unpacking, and how the child was restricted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnpackResult {
    pub summary: Summary,
    pub landlock: LandlockStatus,
}

/// Unpacks `archive` into the directory `into` as the job's user. After an error, files that were created remain.
pub async fn run(
    into: &Path,
    archive: &Path,
    top: TopLevel,
    site: &UserContext,
) -> Result<UnpackResult, ChildError> {
    let start = |what| move |source| ChildError::Start { what, source };
    let archive = File::open(archive).map_err(start("cannot open it"))?;
    let top = match top {
        TopLevel::Keep => "keep",
        TopLevel::Rename => "rename",
    };
    let mut command = helper_process::agent_command("unpack", site);
    command.args(["--top", top]).current_dir(into);
    command.stdin(archive).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut group =
        helper_process::ProcessGroup::spawn(&mut command).map_err(start("cannot start a child process"))?;
    let (stdout, stderr) = (group.child().stdout.take(), group.child().stderr.take());
    let (ended, message, complaint) = tokio::join!(
        group.wait(DEADLINE),
        helper_process::read_tail(stdout, REPORT_BYTES_MAX),
        helper_process::read_tail(stderr, 1024)
    );
    ended.map_err(start("cannot wait for the child process"))?.ok_or(ChildError::Deadline)?;
    let report: ChildReport = serde_json::from_slice(&message)
        .map_err(|_| ChildError::Silent { message: String::from_utf8_lossy(&complaint).trim().to_owned() })?;
    match report.ended {
        ChildOutcome::Done(summary) => Ok(UnpackResult { summary, landlock: report.landlock }),
        ChildOutcome::Refused(why) => Err(ChildError::Refused(why)),
        ChildOutcome::NoSpace(why) => Err(ChildError::NoSpace(why)),
        ChildOutcome::Failed(why) => Err(ChildError::Failed(why)),
    }
}

/// Entry point of the child process.
pub fn main(args: &Args) -> ExitCode {
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let (landlock, result) = unpack_restricted(args.top);
    let ended = match result {
        Ok(summary) => ChildOutcome::Done(summary),
        Err(error @ UnpackError::Refused(_)) => ChildOutcome::Refused(error.to_string()),
        Err(UnpackError::Write { entry, source }) if source.kind() == io::ErrorKind::StorageFull => {
            ChildOutcome::NoSpace(format!("failed to unpack the archive: cannot write `{entry}`"))
        }
        Err(UnpackError::Write { entry, source }) => {
            ChildOutcome::Failed(format!("failed to unpack the archive: cannot write `{entry}`: {source}"))
        }
        Err(UnpackError::Read(source)) => ChildOutcome::Failed(format!("cannot read the archive: {source}")),
    };
    let message = serde_json::to_vec(&ChildReport { landlock, ended }).unwrap_or_default();
    match io::stdout().write_all(&message) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn unpack_restricted(top: TopLevel) -> (LandlockStatus, Result<Summary, UnpackError>) {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = match rustix::fs::open(".", flags, Mode::empty()) {
        Ok(dir) => dir,
        Err(errno) => {
            return (
                LandlockStatus::Absent,
                Err(UnpackError::Write { entry: ".".to_owned(), source: errno.into() }),
            );
        }
    };
    let landlock = safe_open::restrict_to_dir(dir.as_fd());
    let result = open_stdin()
        .map_err(UnpackError::Read)
        .and_then(|(archive, length)| unpack(archive, length, &dir, top, &ArchiveLimits::default()));
    (landlock, result)
}

fn open_stdin() -> io::Result<(File, u64)> {
    let file = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let length = file.metadata()?.len();
    Ok((file, length))
}
