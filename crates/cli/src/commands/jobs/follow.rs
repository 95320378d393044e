//! Following a managed job: the output of all its tasks as it grows, over all their attempts, and why it waits.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;
use windlass_api::{
    managed_jobs::{ManagedJob, ReadRequest, Task},
    operations::{ReadManagedJob, ReadRun},
    runs::{self, Run},
};

use super::{is_final, is_over, logs::Selection};
use crate::{
    commands::is_finished,
    context::Context,
    follow::{Chorus, Manner, Pace, Part, Sung, Tail, Tree, Voices, last_lines},
    output,
    problem::Problem,
};

/// How often a job is looked at of which nothing is heard.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// A reason that passes sooner is not worth a line.
const REASON_AFTER: Duration = Duration::from_secs(2);

/// Whether there is a run of that name. A server that is away has said nothing about it.
pub(super) async fn exists(cx: &Context, run: &str) -> Result<bool, Problem> {
    Ok(read(cx, run).await?.is_some())
}

async fn read(cx: &Context, run: &str) -> Result<Option<Run>, Problem> {
    let request = runs::ReadRequest { run_name: Some(run.to_owned()), id: None };
    match cx.try_call::<ReadRun>(&request).await {
        Ok(run) => Ok(Some(run)),
        Err(error) if error.is_absent() || error.is_lost() => Ok(None),
        Err(error) => Err(cx.explain(&error).await),
    }
}

pub(super) struct Follower<'a> {
    cx: &'a Context,
    selection: Selection,
    chorus: Chorus<'a>,
    tree: Tree,
    pace: Pace,
    /// The tasks run beside each other: their lines have their names in front.
    is_group: bool,
    /// How many attempts of each task were shown to their end.
    shown: BTreeMap<u32, usize>,
    /// The attempts that were announced.
    announced: BTreeMap<u32, usize>,
    reasons: Reasons,
}

impl<'a> Follower<'a> {
    pub(super) fn new(cx: &'a Context, job: &ManagedJob, selection: Selection) -> Self {
        let is_group = job.shape == "group" && job.tasks.len() > 1 && selection.task.is_none();
        let voices = Voices::new(false, is_group, None);
        Self {
            cx,
            selection,
            chorus: Chorus::new(Manner::Text(voices)),
            tree: Tree::new(&job.name),
            pace: Pace::new(),
            is_group,
            shown: BTreeMap::new(),
            announced: BTreeMap::new(),
            reasons: Reasons::default(),
        }
    }

    /// To the end of the job, or of its task that is selection. The answer is the job as it was seen last.
    pub(super) async fn run(mut self, mut job: ManagedJob) -> Result<ManagedJob, Problem> {
        loop {
            for line in self.reasons.news(&job, &self.selection, Instant::now()) {
                output::say(&output::printable(&line));
            }
            let tasks: Vec<Task> =
                job.tasks.iter().filter(|task| self.selection.has_task(task)).cloned().collect();
            let mut all_told = true;
            for task in &tasks {
                match self.turn_to(task).await? {
                    Progress::All => {}
                    Progress::More => all_told = false,
                    Progress::Unread => return Ok(job),
                }
            }
            let over = if self.selection.task.is_some() {
                tasks.iter().all(|task| is_final(&task.status))
            } else {
                is_over(&job)
            };
            if over && all_told {
                return Ok(job);
            }
            let wait = if self.chorus.is_empty() { LOOK_EVERY } else { self.pace.wait() };
            let due = Instant::now() + wait;
            match self.chorus.sing(due, &mut self.tree).await? {
                Sung::Due => {}
                Sung::Over => self.pace.news(),
                Sung::Unread => return Ok(job),
            }
            job = self.cx.patiently::<ReadManagedJob>(&ReadRequest { job_id: job.job_id }).await?;
        }
    }

    /// Listens to the newest attempt of a task, after all of those before it.
    async fn turn_to(&mut self, task: &Task) -> Result<Progress, Problem> {
        loop {
            let index = self.shown.get(&task.task_id).copied().unwrap_or(0);
            let Some(name) = task.runs.get(index) else { break };
            if !self.selection.has_attempt(index) {
                self.shown.insert(task.task_id, index + 1);
                continue;
            }
            // An attempt is numbered before it is made; of a task that is over the last may never have been.
            let Some(run) = read(self.cx, name).await? else { break };
            self.announce(task, index);
            self.listen(task, name, &run).await?;
            if !is_finished(&run.status) {
                return Ok(Progress::More);
            }
            for (place, _) in submissions(task, &run) {
                if !self.chorus.leave(place, &mut self.tree).await? {
                    return Ok(Progress::Unread);
                }
            }
            self.shown.insert(task.task_id, index + 1);
            self.pace.news();
        }
        Ok(if is_final(&task.status) { Progress::All } else { Progress::More })
    }

    /// Where one attempt ends and the next begins, and which task a pipeline is at.
    fn announce(&mut self, task: &Task, index: usize) {
        let is_known = self.announced.get(&task.task_id).is_some_and(|known| *known >= index);
        if is_known {
            return;
        }
        self.announced.insert(task.task_id, index);
        let is_next_task = !self.is_group && task.task_id > 0 && self.selection.task.is_none();
        if index > 0 || is_next_task {
            output::say(&output::printable(&format!("── {} (attempt {})", task.name, index + 1)));
        }
    }

    async fn listen(&mut self, task: &Task, name: &str, run: &Run) -> Result<(), Problem> {
        let all = submissions(task, run);
        let several = all.len() > 1;
        for (place, submission) in all {
            match self.chorus.submission_at(place) {
                Some(known) if known == submission => continue,
                Some(_) => {
                    self.chorus.leave(place, &mut self.tree).await?;
                }
                None => {}
            }
            if self.is_group {
                let node = if several { format!("-{}", place.1) } else { String::new() };
                self.chorus.set_label(place, format!("{}{node}", task.name));
            }
            let mut part = Part::whole(name, submission);
            if let Some(lines) = self.selection.tail
                && let Some(offset) = last_lines(self.cx, &part, lines).await?
            {
                part.offset = offset;
            }
            self.chorus.add(place, Tail::new(self.cx, part));
            self.pace.news();
        }
        Ok(())
    }
}

/// How much of a task's output was told.
enum Progress {
    All,
    More,
    /// Nobody reads it any more.
    Unread,
}

/// The newest submission of each node; its place has the number of the task in front.
fn submissions(task: &Task, run: &Run) -> Vec<((i64, i64), uuid::Uuid)> {
    let of_node = |job: &runs::Job| {
        let spec = job.job_spec.value().unwrap_or_default();
        let place = (i64::from(task.task_id), spec["job_num"].as_i64().unwrap_or(0));
        Some((place, job.job_submissions.last()?.id))
    };
    run.jobs.iter().filter_map(of_node).collect()
}

/// What was said of why each task waits: each reason once, when it has stood for a while.
#[derive(Default)]
struct Reasons {
    /// Since when, and whether it was said.
    known: BTreeMap<u32, (String, Instant, bool)>,
}

impl Reasons {
    /// The lines that are to be said now.
    fn news(&mut self, job: &ManagedJob, selection: &Selection, now: Instant) -> Vec<String> {
        let mut lines = Vec::new();
        for task in job.tasks.iter().filter(|task| selection.has_task(task)) {
            let reason = task.reason.as_ref().filter(|_| !is_final(&task.status));
            let Some(reason) = reason else {
                self.known.remove(&task.task_id);
                continue;
            };
            // Others come first, and what they write says so.
            if task.pending_kind.as_deref() == Some("queued") && task.task_id > 0 && job.shape != "group" {
                continue;
            }
            let known = self.known.entry(task.task_id).or_insert_with(|| (String::new(), now, false));
            if known.0 != *reason {
                *known = (reason.clone(), now, false);
            }
            // A wait with a time of its own is there to stay.
            let stands = task.next_retry_at.is_some() || now.duration_since(known.1) >= REASON_AFTER;
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
    fn a_reason_is_said_once_and_only_when_it_lasts() {
        let (mut reasons, selection, now) = (Reasons::default(), Selection::default(), Instant::now());
        let starting = job("STARTING", "attempt 1 waits for nodes", None);
        assert!(reasons.news(&starting, &selection, now).is_empty(), "it may pass at once");
        let later = now + REASON_AFTER;
        assert_eq!(reasons.news(&starting, &selection, later), ["STARTING: attempt 1 waits for nodes"]);
        assert!(reasons.news(&starting, &selection, later).is_empty());
        let waits = job("PENDING", "no place; the next try is at …", Some("2026-11-20T09:01:00Z"));
        assert_eq!(reasons.news(&waits, &selection, later), ["PENDING: no place; the next try is at …"]);
        assert!(reasons.news(&waits, &selection, later + REASON_AFTER).is_empty());
        assert!(
            reasons.news(&job("FAILED", "exit code 3", None), &selection, later).is_empty(),
            "told at the end"
        );
    }
}
