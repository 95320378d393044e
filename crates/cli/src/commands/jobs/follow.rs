//! Follows a managed job: the output of all its tasks over all attempts, and the reasons why it waits.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;
use windlass_api::{
    managed_jobs::{ManagedJob, ReadRequest, Task},
    operations::{ReadManagedJob, ReadRun},
    runs::{self, Run},
};

use super::{is_final, is_job_finished, logs::LogSelection};
use crate::{
    commands::is_finished,
    context::Context,
    error::CliError,
    follow::{
        LogMux, LogPrinter, LogRange, LogTail, OutputMode, PollBackoff, ProgressTree, PumpEnd,
        find_last_lines,
    },
    output,
};

/// Polling interval for a job without output.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Reasons that pass sooner are not printed.
const REASON_DELAY: Duration = Duration::from_secs(2);

/// Returns whether a run of that name exists. An unreachable server is an error, not a missing run.
pub(super) async fn run_exists(cx: &Context, run: &str) -> Result<bool, CliError> {
    Ok(find_run(cx, run).await?.is_some())
}

async fn find_run(cx: &Context, run: &str) -> Result<Option<Run>, CliError> {
    let request = runs::ReadRequest { run_name: Some(run.to_owned()), id: None };
    match cx.try_call::<ReadRun>(&request).await {
        Ok(run) => Ok(Some(run)),
        Err(error) if error.is_not_found() || error.is_unconfirmed() => Ok(None),
        Err(error) => Err(cx.explain(&error).await),
    }
}

pub(super) struct JobFollower<'a> {
    cx: &'a Context,
    selection: LogSelection,
    log_mux: LogMux<'a>,
    tree: ProgressTree,
    pace: PollBackoff,
    /// The tasks run in parallel: their lines are prefixed with their names.
    is_group: bool,
    /// Number of attempts of each task whose output was shown completely.
    shown: BTreeMap<u32, usize>,
    /// Index of the last attempt whose header was printed, by task.
    announced: BTreeMap<u32, usize>,
    reasons: WaitReasons,
}

impl<'a> JobFollower<'a> {
    pub(super) fn new(cx: &'a Context, job: &ManagedJob, selection: LogSelection) -> Self {
        let is_group = job.shape == "group" && job.tasks.len() > 1 && selection.task.is_none();
        let printer = LogPrinter::new(false, is_group, None);
        Self {
            cx,
            selection,
            log_mux: LogMux::new(OutputMode::Text(printer)),
            tree: ProgressTree::new(&job.name),
            pace: PollBackoff::new(),
            is_group,
            shown: BTreeMap::new(),
            announced: BTreeMap::new(),
            reasons: WaitReasons::default(),
        }
    }

    /// Follows to the end of the job, or of its selected task. Returns the last observed state of the job.
    pub(super) async fn run(mut self, mut job: ManagedJob) -> Result<ManagedJob, CliError> {
        loop {
            for line in self.reasons.take_due(&job, &self.selection, Instant::now()) {
                output::print_message(&output::printable(&line));
            }
            let tasks: Vec<Task> =
                job.tasks.iter().filter(|task| self.selection.has_task(task)).cloned().collect();
            let mut all_reported = true;
            for task in &tasks {
                match self.follow_attempts(task).await? {
                    TaskOutput::Complete => {}
                    TaskOutput::Partial => all_reported = false,
                    TaskOutput::OutputClosed => return Ok(job),
                }
            }
            let over = if self.selection.task.is_some() {
                tasks.iter().all(|task| is_final(&task.status))
            } else {
                is_job_finished(&job)
            };
            if over && all_reported {
                return Ok(job);
            }
            let wait = if self.log_mux.is_empty() { POLL_INTERVAL } else { self.pace.wait() };
            let due = Instant::now() + wait;
            match self.log_mux.pump(due, &mut self.tree).await? {
                PumpEnd::DeadlineReached => {}
                PumpEnd::Over => self.pace.news(),
                PumpEnd::OutputClosed => return Ok(job),
            }
            job = self.cx.call_with_retry::<ReadManagedJob>(&ReadRequest { job_id: job.job_id }).await?;
        }
    }

    /// Follows the newest attempt of a task, after showing all previous ones.
    async fn follow_attempts(&mut self, task: &Task) -> Result<TaskOutput, CliError> {
        loop {
            let index = self.shown.get(&task.task_id).copied().unwrap_or(0);
            let Some(name) = task.runs.get(index) else { break };
            if !self.selection.has_attempt(index) {
                self.shown.insert(task.task_id, index + 1);
                continue;
            }
            // An attempt is numbered before its run is created; the last attempt of a finished task may have no run.
            let Some(run) = find_run(self.cx, name).await? else { break };
            self.print_attempt_header(task, index);
            self.follow_submissions(task, name, &run).await?;
            if !is_finished(&run.status) {
                return Ok(TaskOutput::Partial);
            }
            for (place, _) in newest_submissions(task, &run) {
                if !self.log_mux.remove(place, &mut self.tree).await? {
                    return Ok(TaskOutput::OutputClosed);
                }
            }
            self.shown.insert(task.task_id, index + 1);
            self.pace.news();
        }
        Ok(if is_final(&task.status) { TaskOutput::Complete } else { TaskOutput::Partial })
    }

    /// Prints the boundary between two attempts, and the current task of a pipeline.
    fn print_attempt_header(&mut self, task: &Task, index: usize) {
        let is_known = self.announced.get(&task.task_id).is_some_and(|known| *known >= index);
        if is_known {
            return;
        }
        self.announced.insert(task.task_id, index);
        let is_next_task = !self.is_group && task.task_id > 0 && self.selection.task.is_none();
        if index > 0 || is_next_task {
            output::print_message(&output::printable(&format!("── {} (attempt {})", task.name, index + 1)));
        }
    }

    async fn follow_submissions(&mut self, task: &Task, name: &str, run: &Run) -> Result<(), CliError> {
        let all = newest_submissions(task, run);
        let several = all.len() > 1;
        for (place, submission) in all {
            match self.log_mux.submission_of(place) {
                Some(known) if known == submission => continue,
                Some(_) => {
                    self.log_mux.remove(place, &mut self.tree).await?;
                }
                None => {}
            }
            if self.is_group {
                let node = if several { format!("-{}", place.1) } else { String::new() };
                self.log_mux.set_label(place, format!("{}{node}", task.name));
            }
            let mut part = LogRange::whole(name, submission);
            if let Some(lines) = self.selection.tail
                && let Some(offset) = find_last_lines(self.cx, &part, lines).await?
            {
                part.offset = offset;
            }
            self.log_mux.add(place, LogTail::new(self.cx, part));
            self.pace.news();
        }
        Ok(())
    }
}

/// Extent to which the output of a task was printed.
enum TaskOutput {
    Complete,
    Partial,
    /// The reader closed stdout.
    OutputClosed,
}

/// Returns the newest submission of each node; its key starts with the number of the task.
fn newest_submissions(task: &Task, run: &Run) -> Vec<((i64, i64), uuid::Uuid)> {
    let of_node = |job: &runs::Job| {
        let spec = job.job_spec.value().unwrap_or_default();
        let place = (i64::from(task.task_id), spec["job_num"].as_i64().unwrap_or(0));
        Some((place, job.job_submissions.last()?.id))
    };
    run.jobs.iter().filter_map(of_node).collect()
}

/// Reasons why tasks wait. Each reason is printed once, after it has lasted for a while.
#[derive(Default)]
struct WaitReasons {
    /// Reason, its start, and whether it was printed.
    known: BTreeMap<u32, (String, Instant, bool)>,
}

impl WaitReasons {
    /// Returns the lines that are due.
    fn take_due(&mut self, job: &ManagedJob, selection: &LogSelection, now: Instant) -> Vec<String> {
        let mut lines = Vec::new();
        for task in job.tasks.iter().filter(|task| selection.has_task(task)) {
            let reason = task.reason.as_ref().filter(|_| !is_final(&task.status));
            let Some(reason) = reason else {
                self.known.remove(&task.task_id);
                continue;
            };
            // The task waits for previous tasks, whose output shows that.
            if task.pending_kind.as_deref() == Some("queued") && task.task_id > 0 && job.shape != "group" {
                continue;
            }
            let known = self.known.entry(task.task_id).or_insert_with(|| (String::new(), now, false));
            if known.0 != *reason {
                *known = (reason.clone(), now, false);
            }
            // A wait with a retry time will not pass quickly.
            let stands = task.next_retry_at.is_some() || now.duration_since(known.1) >= REASON_DELAY;
            if stands && !known.2 {
                known.2 = true;
                let name = if job.tasks.len() > 1 { format!("{}: ", task.name) } else { String::new() };
                lines.push(format!("{name}{}: {reason}", task.status));
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn job(status: &str, reason: &str, next: Option<&str>) -> ManagedJob {
        let time = "2026-11-20T09:00:00Z";
        let task = json!({
            "task_id": 0, "name": "train", "resources": "any", "status": status, "schedule_state": "ALIVE_BACKOFF",
            "reason": reason, "job_duration": 0, "recovery_count": 0, "restarts_on_errors": 0, "attempt": 1,
            "runs": [], "next_retry_at": next,
        });
        let job = json!({
            "id": uuid::Uuid::nil(), "job_id": 1, "name": "train", "project_name": "main", "user": "admin",
            "shape": "single", "priority": 0, "rank": 0, "num_jobs": 1, "status": status,
            "schedule_state": "ALIVE_BACKOFF", "cancel_asked": false, "created_at": time, "job_duration": 0,
            "recovery_count": 0, "tasks": [task],
        });
        serde_json::from_str(&job.to_string()).unwrap()
    }

    #[test]
    fn a_wait_reason_is_printed_once_and_only_if_it_persists() {
        let (mut reasons, selection, now) = (WaitReasons::default(), LogSelection::default(), Instant::now());
        let starting = job("STARTING", "attempt 1 is waiting for nodes", None);
        assert!(reasons.take_due(&starting, &selection, now).is_empty(), "it may pass at once");
        let later = now + REASON_DELAY;
        assert_eq!(
            reasons.take_due(&starting, &selection, later),
            ["STARTING: attempt 1 is waiting for nodes"]
        );
        assert!(reasons.take_due(&starting, &selection, later).is_empty());
        let waits = job("PENDING", "no place; next attempt at …", Some("2026-11-20T09:01:00Z"));
        assert_eq!(reasons.take_due(&waits, &selection, later), ["PENDING: no place; next attempt at …"]);
        assert!(reasons.take_due(&waits, &selection, later + REASON_DELAY).is_empty());
        assert!(
            reasons.take_due(&job("FAILED", "exit code 3", None), &selection, later).is_empty(),
            "told at the end"
        );
    }
}
