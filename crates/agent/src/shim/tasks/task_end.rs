//! Translation of an end into termination reason, message and detail. Pure.

use windlass_api::agent::runner::JobState;
use windlass_model::{
    error_chain::format_chain,
    job::{Ending, TerminationDetail, TerminationReason},
};

use super::{
    host::HostError,
    task::{StopRequest, TaskEnd},
};
use crate::{
    runner::serve::EXIT_RUNNER_FAILED,
    shim::runtime::{Exit, LossReason, RuntimeError},
    task_dir::ExitRecord,
};

/// Maximum number of the container's last lines in the message.
const TAIL_LINES_MAX: usize = 5;
const MESSAGE_BYTES_MAX: usize = 4096;

/// Files that the task left in its `run` directory. The job may have written them, so they may refine the end, never
/// deny it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ExitEvidence {
    pub(super) last_word: Option<ExitRecord>,
    pub(super) job: Option<JobState>,
}

/// End of a container that ended by itself.
pub(super) fn from_exit(exit: &Exit, left: &ExitEvidence) -> TaskEnd {
    match exit.lost {
        Some(LossReason::EngineRestarted) => return Ending::host_runtime_restart().into(),
        Some(LossReason::HostRebooted) => return Ending::host_reboot().into(),
        Some(LossReason::Vanished) => return for_vanished(),
        None => {}
    }
    let Some(code) = exit.code else { return for_vanished() };
    if let Some(job) = left.job.as_ref().filter(|job| is_port_conflict(code, job)) {
        let ending = Ending::new(TerminationReason::PortsBindingFailed);
        return ending.with_message(truncate_message(job.termination_message.clone())).into();
    }
    let oom = exit.oom_killed || left.last_word.as_ref().is_some_and(|word| word.oom_killed);
    let detail = left
        .job
        .as_ref()
        .and_then(|job| job.detail.as_deref())
        .and_then(|word| word.parse::<TerminationDetail>().ok());
    let mut ending = Ending::exited(code);
    if code != 0 {
        match (oom, detail) {
            (true, _) | (_, Some(TerminationDetail::OomKilled)) => {
                ending = ending.with_detail(TerminationDetail::OomKilled)
            }
            (_, Some(TerminationDetail::NoDisk)) => ending = ending.with_detail(TerminationDetail::NoDisk),
            (_, Some(TerminationDetail::SetupFailed)) => {
                ending = ending.with_detail(TerminationDetail::SetupFailed)
            }
            // A job may not claim the other details.
            (
                false,
                Some(
                    TerminationDetail::HostReboot
                    | TerminationDetail::HostRuntimeRestart
                    | TerminationDetail::NoFleets
                    | TerminationDetail::RegionFull
                    | TerminationDetail::NeverFits
                    | TerminationDetail::DiskLimitExceeded
                    | TerminationDetail::PreemptedByScheduler,
                )
                | None,
            ) => {}
        }
        let from = exit.tail.len().saturating_sub(TAIL_LINES_MAX);
        ending = ending.with_message(truncate_message(exit.tail[from..].join("\n")));
    }
    ending.into()
}

/// Returns whether the runner failed because another process uses its port: then no command of the job was started.
fn is_port_conflict(code: i32, job: &JobState) -> bool {
    code == i32::from(EXIT_RUNNER_FAILED)
        && job.termination_reason == TerminationReason::PortsBindingFailed.as_str()
}

/// Exit statuses after SIGKILL and SIGTERM, as shells count them.
const SIGNAL_EXIT_CODES: [i32; 2] = [137, 143];

/// Returns whether the task ended by a signal of unknown origin: the job's runner reports at most that it received a
/// request to end.
pub(super) fn is_external_kill(exit: &Exit, left: &ExitEvidence) -> bool {
    let is_signalled = exit.code.is_some_and(|code| SIGNAL_EXIT_CODES.contains(&code));
    let is_oom = exit.oom_killed || left.last_word.as_ref().is_some_and(|word| word.oom_killed);
    let is_reported = left.job.as_ref().is_some_and(|job| match job.state.as_str() {
        "done" | "failed" => true,
        "terminated" => !job.termination_reason.is_empty(),
        _ => false,
    });
    is_signalled && exit.lost.is_none() && !is_oom && !is_reported
}

/// End of a task that ran and disappeared although the host and its engine kept running.
pub(super) fn for_vanished() -> TaskEnd {
    Ending::new(TerminationReason::ExecutorError).with_message("the container vanished").into()
}

/// End of a task that was stopped. The exit status is kept if it is known.
pub(super) fn for_stop(stop_request: &StopRequest, exit: Option<&Exit>) -> TaskEnd {
    let exit_status = exit.filter(|exit| exit.lost.is_none()).and_then(|exit| exit.code);
    // Internal to the shim; not a reason that clients know.
    if stop_request.reason == TerminationDetail::DiskLimitExceeded.as_str() {
        let end = TaskEnd::from(Ending::disk_limit_exceeded().with_message(&stop_request.message));
        return TaskEnd { exit_status, ..end };
    }
    TaskEnd {
        reason: stop_request.reason.clone(),
        message: stop_request.message.clone(),
        exit_status,
        detail: None,
    }
}

/// End of a task whose GPUs, keys, volumes or mounts were not available.
pub(super) fn for_prepare_error(error: &(dyn std::error::Error + 'static)) -> TaskEnd {
    let no_disk = error.downcast_ref::<HostError>().is_some_and(HostError::is_disk_full);
    let ending = if no_disk { Ending::no_disk() } else { Ending::new(TerminationReason::ExecutorError) };
    ending.with_message(truncate_message(format_chain(error))).into()
}

/// End of a task whose image could not be pulled, or whose container could not be created.
pub(super) fn for_create_error(error: &RuntimeError) -> TaskEnd {
    let ending = Ending::new(TerminationReason::CreatingContainerError)
        .with_message(truncate_message(format_chain(error)));
    match error {
        RuntimeError::NoDisk { .. } => ending.with_detail(TerminationDetail::NoDisk),
        RuntimeError::NoImage { .. }
        | RuntimeError::Unauthorized { .. }
        | RuntimeError::Stalled { .. }
        | RuntimeError::Away { .. }
        | RuntimeError::Failed { .. }
        | RuntimeError::Refused { .. } => ending,
    }
    .into()
}

pub(super) fn for_pull_timeout(secs: u64) -> TaskEnd {
    let message = format!("the image was not pulled within {secs} s");
    Ending::new(TerminationReason::CreatingContainerError).with_message(message).into()
}

/// End of a task whose records were lost and whose state is unknown: it is never started on a guess.
pub(super) fn for_lost_journal() -> TaskEnd {
    let message = "the host's journal was damaged, and no container of this task was found";
    Ending::new(TerminationReason::ExecutorError).with_message(message).into()
}

fn truncate_message(mut message: String) -> String {
    if message.len() > MESSAGE_BYTES_MAX {
        let end = message.floor_char_boundary(MESSAGE_BYTES_MAX);
        message.truncate(end);
    }
    message
}
