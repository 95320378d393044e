//! Unpacking in a separate child process, and its report.

use std::{
    fs::File,
    io::{self, Write as _},
    os::{
        fd::AsFd,
        unix::{ffi::OsStrExt as _, process::CommandExt as _},
    },
    path::Path,
    process::{ExitCode, Stdio},
    time::Duration,
};

use rustix::fs::{Mode, OFlags, ResolveFlags, XattrFlags};
use serde::{Deserialize, Serialize};
use tokio::{io::AsyncReadExt as _, process::Command};

use super::{Excess, LayerError, LayerLimits, LayerSummary, OwnerIds, unpack};
use crate::{
    isolation::{restrict, user_map::UserMap},
    safe_open::{self, LandlockStatus},
};

/// A layer that takes longer is stuck, most likely on a file system that does not respond.
const DEADLINE: Duration = Duration::from_secs(60 * 60);
/// Maximum size in bytes of the child's report.
const REPORT_BYTES_MAX: u64 = 64 << 20;
const MESSAGE_BYTES_MAX: u64 = 4096;
/// Capabilities of the child: `CHOWN`, `DAC_OVERRIDE`, `FOWNER`, `FSETID`, `MKNOD` (for removed files on kernels before
/// 5.8) and `SETFCAP`.
const CAPABILITIES: [u32; 6] = [0, 1, 3, 4, 27, 31];

#[derive(Debug, clap::Args)]
pub struct Args {
    #[arg(long)]
    entries: u64,
    #[arg(long)]
    bytes: u64,
}

/// Report that the child writes to its standard output.
#[derive(Debug, Serialize, Deserialize)]
struct ChildReport {
    landlock: LandlockStatus,
    outcome: ChildOutcome,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ChildOutcome {
    Done(LayerSummary),
    Refused(String),
    TooLarge { excess: Excess, message: String },
    NoSpace(String),
    Failed(String),
}

#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    #[error("{0}")]
    Refused(String),
    #[error("{message}")]
    TooLarge { excess: Excess, message: String },
    #[error("{0}: no space left on the device")]
    NoSpace(String),
    #[error("{0}")]
    Failed(String),
    #[error("failed to unpack a layer: {what}")]
    Start {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("failed to unpack a layer: timed out after {} s", DEADLINE.as_secs())]
    Deadline,
    #[error("failed to unpack a layer: the child process ended without a report ({message})")]
    NoReport { message: String },
}

/// Unpacks the file `layer` into the directory `into`. After an error, files that were created remain. Dropping the
/// future kills the child.
pub async fn run(
    agent: &Path,
    layer: File,
    into: &Path,
    limits: LayerLimits,
) -> Result<(LayerSummary, LandlockStatus), UnpackError> {
    let start = |what| move |source| UnpackError::Start { what, source };
    let mut command = std::process::Command::new(agent);
    command.arg0("windlass-agent").args(["child", "unpack-layer"]).env_clear().current_dir(into);
    command.args(["--entries", &limits.entries.to_string(), "--bytes", &limits.bytes.to_string()]);
    command.stdin(layer).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut command = Command::from(command);
    let mut child = command.kill_on_drop(true).spawn().map_err(start("cannot start a child process"))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let work = async {
        let (mut report, mut message) = (Vec::new(), Vec::new());
        let (report_read, message_read) = tokio::join!(
            async {
                match stdout {
                    Some(from) => from.take(REPORT_BYTES_MAX).read_to_end(&mut report).await,
                    None => Ok(0),
                }
            },
            async {
                match stderr {
                    Some(from) => from.take(MESSAGE_BYTES_MAX).read_to_end(&mut message).await,
                    None => Ok(0),
                }
            }
        );
        report_read.and(message_read)?;
        child.wait().await?;
        Ok((report, message))
    };
    let finished = tokio::time::timeout(DEADLINE, work).await.map_err(|_| UnpackError::Deadline)?;
    let (report, message) = finished.map_err(start("cannot read the report of the child process"))?;
    let report: ChildReport = serde_json::from_slice(&report).map_err(|_| UnpackError::NoReport {
        message: String::from_utf8_lossy(&message).trim().to_owned(),
    })?;
    match report.outcome {
        ChildOutcome::Done(summary) => Ok((summary, report.landlock)),
        ChildOutcome::Refused(why) => Err(UnpackError::Refused(why)),
        ChildOutcome::TooLarge { excess, message } => Err(UnpackError::TooLarge { excess, message }),
        ChildOutcome::NoSpace(why) => Err(UnpackError::NoSpace(why)),
        ChildOutcome::Failed(why) => Err(UnpackError::Failed(why)),
    }
}

/// Entry point of the child process.
pub fn main(args: &Args) -> ExitCode {
    rustix::process::umask(Mode::empty());
    let limits = LayerLimits { entries: args.entries, bytes: args.bytes };
    let (landlock, result) = unpack_restricted(&limits);
    let outcome = match result {
        Ok(summary) => ChildOutcome::Done(summary),
        Err(error @ LayerError::Refused(_)) => ChildOutcome::Refused(error.to_string()),
        Err(LayerError::TooLarge { excess, message }) => ChildOutcome::TooLarge { excess, message },
        Err(LayerError::Write { entry, source }) if source.kind() == io::ErrorKind::StorageFull => {
            ChildOutcome::NoSpace(format!("failed to write `{entry}`"))
        }
        Err(LayerError::Write { entry, source }) => {
            ChildOutcome::Failed(format!("failed to write `{entry}`: {source}"))
        }
        // The file was verified and is local: what cannot be decompressed is the fault of the image.
        Err(LayerError::Read(source)) => ChildOutcome::Refused(format!("invalid compressed data: {source}")),
    };
    let message = serde_json::to_vec(&ChildReport { landlock, outcome }).unwrap_or_default();
    match io::stdout().write_all(&message) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn unpack_restricted(limits: &LayerLimits) -> (LandlockStatus, Result<LayerSummary, LayerError>) {
    let failed = |source| LayerError::Write { entry: ".".to_owned(), source };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = match rustix::fs::open(".", flags, Mode::empty()) {
        Ok(dir) => dir,
        Err(errno) => return (LandlockStatus::Absent, Err(failed(errno.into()))),
    };
    let map = UserMap::for_own_user();
    let owners = match &map {
        None => OwnerIds::Any,
        Some(map) if map.subordinate.is_some() => OwnerIds::Below(map.id_count()),
        Some(_) => OwnerIds::RootOnly,
    };
    // As root of a user namespace it can write to directories of any mode, and give files away.
    if let Some(map) = &map
        && let Err(error) = map.enter()
    {
        return (LandlockStatus::Absent, Err(failed(error)));
    }
    if rustix::process::geteuid().is_root()
        && let Err(error) = restrict::restrict_self_to(&CAPABILITIES)
    {
        return (LandlockStatus::Absent, Err(failed(error)));
    }
    let landlock = safe_open::restrict_to_dir(dir.as_fd());
    let layer = io::stdin().as_fd().try_clone_to_owned().map(File::from).map_err(LayerError::Read);
    let unpacked = layer.and_then(|layer| unpack(layer, &dir, limits, owners));
    let marked = unpacked.and_then(|mut summary| {
        if map.is_some() {
            // The mark for overlay mounts in a user namespace needs no other rights.
            mark_opaque(&dir, &std::mem::take(&mut summary.opaque), c"user.overlay.opaque")
                .map_err(failed)?;
        }
        Ok(summary)
    });
    (landlock, marked)
}

/// Marks directories below `dir` that hide those of lower layers.
pub(in crate::image) fn mark_opaque(
    dir: impl AsFd,
    paths: &[Vec<u8>],
    mark: &std::ffi::CStr,
) -> io::Result<()> {
    for path in paths {
        let path = std::ffi::OsStr::from_bytes(path);
        let path = if path.is_empty() { std::ffi::OsStr::new(".") } else { path };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let handle = rustix::fs::openat2(&dir, path, flags, Mode::empty(), resolve)?;
        rustix::fs::fsetxattr(&handle, mark, b"y", XattrFlags::empty())?;
    }
    Ok(())
}
