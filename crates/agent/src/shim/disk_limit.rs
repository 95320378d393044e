//! Ends tasks that use more disk than they requested.
//!
//! Usage is measured, not enforced by a quota: every few seconds the contents of the task directory are added up and,
//! for a container, the bytes that it wrote to its own layer. A task may exceed its limit for that long. Data written
//! to a volume or a mounted directory of the host is not counted: these are meant for larger data.

use std::{
    collections::HashSet,
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;
use windlass_api::agent::shim::TerminateRequest;
use windlass_model::job::TerminationDetail;

use super::{
    api::Shim,
    runtime::{Runtime, RuntimeError},
    tasks::{DiskLimit, Tasks},
};

/// Time between two measurements of a task.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Measurements use at most 1/`TIME_SHARE_DIVISOR` of the time, however many files there are.
const TIME_SHARE_DIVISOR: u32 = 20;
/// Grace period of the job; it may continue to write meanwhile.
const GRACE_SECS: u64 = 5;
/// Unit of the kernel's block counts, whatever the file system uses.
const BLOCK_BYTES: u64 = 512;

/// Measures until the shim stops.
pub(super) async fn enforce_limits(shim: Arc<Shim>) {
    loop {
        let began = Instant::now();
        check_limits(&shim.tasks, &*shim.runtime).await;
        let pause = CHECK_INTERVAL.max(began.elapsed() * TIME_SHARE_DIVISOR);
        if shim.stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
            return;
        }
    }
}

/// Measures every task that has a limit once, and ends those that exceed it.
pub(super) async fn check_limits(tasks: &Arc<Tasks>, runtime: &dyn Runtime) {
    for DiskLimit { dir, handle, bytes } in tasks.disk_limits() {
        let used = match runtime.disk_used(&dir, &handle).await {
            Ok(used) => used,
            // The task may have ended meanwhile. The next measurement tries again.
            Err(error) => {
                tracing::debug!(id = %dir.id, %error, "failed to measure disk usage of task");
                continue;
            }
        };
        if used <= bytes {
            continue;
        }
        let terminate = TerminateRequest {
            termination_reason: TerminationDetail::DiskLimitExceeded.as_str().to_owned(),
            termination_message: limit_message(used, bytes),
            timeout: GRACE_SECS,
        };
        tracing::info!(id = %dir.id, used, limit = bytes, "task exceeded its disk limit");
        if let Err(error) = tasks.terminate(dir.id, terminate, None).await {
            tracing::warn!(id = %dir.id, %error, "failed to end task that exceeded its disk limit");
        }
    }
}

fn limit_message(used: u64, limit: u64) -> String {
    format!(
        "disk limit exceeded: the job uses {}, its `disk` limit is {}; hint: raise `disk` in `resources`, or \
         write to a volume",
        format_size(used),
        format_size(limit)
    )
}

/// Formats a size as configurations write it.
fn format_size(bytes: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "it is shown with one digit")]
    let bytes = bytes as f64;
    let (mib, gib) = (f64::from(1_u32 << 20), f64::from(1_u32 << 30));
    if bytes < gib { format!("{:.1}MB", bytes / mib) } else { format!("{:.1}GB", bytes / gib) }
}

/// Returns the disk usage of a directory with its contents.
pub(super) async fn disk_usage(path: PathBuf) -> Result<u64, RuntimeError> {
    let failed = |source: io::Error| RuntimeError::Failed {
        what: "failed to measure the disk usage of a task".to_owned(),
        source: Box::new(source),
    };
    let measured = tokio::task::spawn_blocking(move || measure_dir(&path)).await;
    measured.map_err(|error| failed(io::Error::other(error)))?.map_err(failed)
}

/// Does not follow links or enter other file systems, and counts a file with several names once. A file that disappears
/// meanwhile counts as zero.
fn measure_dir(root: &Path) -> io::Result<u64> {
    let top = fs::symlink_metadata(root)?;
    let (device, mut sum) = (top.dev(), top.blocks() * BLOCK_BYTES);
    let mut counted = HashSet::new();
    let mut left = vec![root.to_owned()];
    while let Some(dir) = left.pop() {
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        for entry in entries.flatten() {
            let Ok(seen) = entry.metadata() else { continue };
            if seen.dev() != device || (seen.nlink() > 1 && !seen.is_dir() && !counted.insert(seen.ino())) {
                continue;
            }
            sum += seen.blocks() * BLOCK_BYTES;
            if seen.is_dir() {
                left.push(entry.path());
            }
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_use_counts_hard_links_once_and_does_not_follow_symlinks() {
        let outside = windlass_testkit::temp_dir("disk").unwrap();
        fs::write(outside.path().join("large"), vec![7; 4 << 20]).unwrap();
        let dir = windlass_testkit::temp_dir("disk").unwrap();
        let deep = dir.path().join("a/b");
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join("one"), vec![7; 1 << 20]).unwrap();
        fs::hard_link(deep.join("one"), dir.path().join("same")).unwrap();
        std::os::unix::fs::symlink(outside.path(), dir.path().join("link")).unwrap();
        // A sparse file counts only its allocated blocks.
        fs::File::create(dir.path().join("sparse")).unwrap().set_len(1 << 30).unwrap();
        let used = measure_dir(dir.path()).unwrap();
        assert!((1 << 20..2 << 20).contains(&used), "{used}");
        assert!(measure_dir(&dir.path().join("none")).is_err());
    }

    #[test]
    fn the_disk_limit_message_states_the_usage_and_the_limit() {
        let message = limit_message(3 << 30, 1 << 30);
        assert!(
            message.starts_with("disk limit exceeded: the job uses 3.0GB, its `disk` limit is 1.0GB"),
            "{message}"
        );
    }
}
