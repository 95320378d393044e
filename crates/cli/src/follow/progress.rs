//! Progress of each job until it runs: as text, as data, and as a bar. Pure.

use serde::Serialize;
use uuid::Uuid;
use windlass_api::runs::{Job, JobSubmission, Run};

use crate::{commands::apply::format_refusals, output::format};

/// Progress of an image pull.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PullProgress {
    pub(crate) downloaded_bytes: u64,
    pub(crate) extracted_bytes: u64,
    pub(crate) total_bytes: u64,
    /// False while the total may still grow.
    pub(crate) is_total_final: bool,
}

impl PullProgress {
    /// Download and extraction count one half each.
    pub(crate) fn percent(&self) -> u64 {
        let total = u128::from(self.total_bytes.max(1)) * 2;
        let done = u128::from(self.downloaded_bytes) + u128::from(self.extracted_bytes);
        u64::try_from((done * 100 / total).min(100)).unwrap_or(100)
    }

    fn is_done(&self) -> bool {
        self.is_total_final && self.total_bytes > 0 && self.extracted_bytes >= self.total_bytes
    }
}

/// Current state of one job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct JobProgress {
    pub(crate) replica: i64,
    pub(crate) job: i64,
    pub(crate) submission: Uuid,
    pub(crate) status: String,
    /// Message for people.
    pub(crate) message: String,
    /// Number of jobs ahead of it in the queue, while it waits for an instance.
    pub(crate) queue_position: Option<i64>,
    /// Reason why it has no instance: that of the nearest match.
    pub(crate) why: Option<String>,
    pub(crate) pull: Option<PullProgress>,
}

impl JobProgress {
    /// `1-0`: rank and replica, the suffix of the job name.
    pub(crate) fn label(&self) -> String {
        format!("{}-{}", self.job, self.replica)
    }

    /// Returns whether the job has not started yet.
    pub(crate) fn is_starting(&self) -> bool {
        matches!(self.status.as_str(), "submitted" | "provisioning" | "pulling")
    }

    /// The message and its reason.
    pub(crate) fn words(&self) -> String {
        match &self.why {
            Some(why) => format!("{}: {why}", self.message),
            None => self.message.clone(),
        }
    }

    /// Key by which line output detects progress: an image pull counts in quarters.
    pub(crate) fn milestone(&self) -> (String, Option<u64>) {
        let quarter = self.pull.as_ref().filter(|pull| !pull.is_done()).map(|pull| pull.percent() / 25);
        let text = if quarter.is_some() { String::new() } else { self.words() };
        (text, quarter)
    }
}

/// Returns whether the run has not started yet: its jobs have not, or it waits for a retry.
pub(crate) fn is_coming(run: &Run, jobs: &[JobProgress]) -> bool {
    matches!(run.status.as_str(), "pending" | "submitted") || jobs.iter().any(JobProgress::is_starting)
}

/// Returns the newest submission of each job.
pub(crate) fn job_progress(run: &Run) -> Vec<JobProgress> {
    run.jobs.iter().filter_map(progress_of).collect()
}

fn progress_of(job: &Job) -> Option<JobProgress> {
    let latest = job.job_submissions.last()?;
    let spec = job.job_spec.value().unwrap_or_default();
    let pull = pull_progress(latest);
    let lacks = latest.termination_reason.as_deref() == Some("failed_to_start_due_to_no_capacity");
    let noted = latest.why.as_ref().filter(|_| latest.status == "submitted");
    let noted = noted.and_then(|why| format_refusals(&why.value().unwrap_or_default(), 1).into_iter().next());
    // For a finished attempt, use its termination message.
    let text = latest.termination_reason_message.as_deref().filter(|_| lacks);
    let why = noted.or_else(|| text.and_then(|text| text.lines().next()).map(str::to_owned));
    Some(JobProgress {
        replica: spec["replica_num"].as_i64().unwrap_or(0),
        job: spec["job_num"].as_i64().unwrap_or(0),
        submission: latest.id,
        status: latest.status.clone(),
        message: message(latest, pull.as_ref()),
        queue_position: latest.queue_position.filter(|_| latest.status == "submitted"),
        why,
        pull: pull.filter(|_| latest.status == "pulling"),
    })
}

fn pull_progress(latest: &JobSubmission) -> Option<PullProgress> {
    let seen = latest.image_pull_progress.as_ref()?.value().ok()?;
    let bytes = |name: &str| seen[name].as_u64().unwrap_or(0);
    Some(PullProgress {
        downloaded_bytes: bytes("downloaded_bytes"),
        extracted_bytes: bytes("extracted_bytes"),
        total_bytes: bytes("total_bytes"),
        is_total_final: seen["is_total_bytes_final"].as_bool().unwrap_or(false),
    })
}

fn message(latest: &JobSubmission, pull: Option<&PullProgress>) -> String {
    let machine = || {
        let given = latest.job_provisioning_data.as_ref()?.value().ok()?;
        let name = given["instance_id"].as_str().filter(|name| !name.is_empty())?.to_owned();
        Some(name)
    };
    match (latest.status.as_str(), latest.queue_position) {
        ("submitted", Some(0)) => "queued, next in line".to_owned(),
        ("submitted", Some(ahead)) => format!("queued, {ahead} ahead of it"),
        ("submitted", None) => "queued".to_owned(),
        ("provisioning", _) => match machine() {
            Some(name) => format!("provisioning on {name}"),
            None => "provisioning".to_owned(),
        },
        ("pulling", _) => match pull.filter(|pull| pull.total_bytes > 0) {
            Some(pull) if pull.is_done() => "starting".to_owned(),
            Some(pull) => {
                let at_least = if pull.is_total_final { "" } else { "at least " };
                let (done, total) = (format::bytes(pull.downloaded_bytes), format::bytes(pull.total_bytes));
                format!("pulling the image, {done} of {at_least}{total}")
            }
            None => "preparing".to_owned(),
        },
        _ if latest.status_message.is_empty() => latest.status.clone(),
        _ => latest.status_message.clone(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::{Value, json};
    use windlass_api::runs::Run;

    use super::job_progress;

    /// Returns a run with these jobs, as a server returns it.
    pub(crate) fn run(jobs: &[Value]) -> Run {
        let time = "2026-11-15T13:00:00+00:00";
        let jobs: Vec<Value> = jobs
            .iter()
            .enumerate()
            .map(|(num, job)| {
                let mut submission = json!({
                    "id": uuid::Uuid::from_u128(num as u128), "submission_num": 0,
                    "submitted_at": time, "last_processed_at": time,
                });
                submission.as_object_mut().unwrap().extend(job.as_object().unwrap().clone());
                json!({"job_spec": {"replica_num": 0, "job_num": num, "job_name": format!("train-{num}-0")},
                       "job_submissions": [submission]})
            })
            .collect();
        serde_json::from_value(json!({
            "id": uuid::Uuid::nil(), "project_name": "main", "user": "admin", "submitted_at": time,
            "last_processed_at": time, "status": "submitted", "run_spec": {"run_name": "train"}, "jobs": jobs,
        }))
        .unwrap()
    }

    #[test]
    fn every_startup_stage_has_a_progress_text() {
        let pull = |downloaded: u64, extracted: u64, last: bool| {
            json!({"status": "pulling", "image_pull_progress": {"downloaded_bytes": downloaded,
                "extracted_bytes": extracted, "total_bytes": 2_000_000_u64, "is_total_bytes_final": last}})
        };
        let why = json!({"refusals": [{"place": "gpu-0", "count": 1, "shortfalls": [
            {"kind": "cpus", "message": "needs 8 CPUs, has 2", "cure": "", "passes": true}]}], "left_out": 0});
        let message: Vec<String> = job_progress(&run(&[
            json!({"status": "submitted", "queue_position": 0}),
            json!({"status": "submitted", "queue_position": 3, "why": why}),
            json!({"status": "provisioning", "job_provisioning_data": {"instance_id": "gpu-0"}}),
            json!({"status": "pulling"}),
            pull(500_000, 0, false),
            pull(2_000_000, 2_000_000, true),
            json!({"status": "running", "status_message": "running"}),
        ]))
        .iter()
        .map(super::JobProgress::words)
        .collect();
        assert_eq!(
            message,
            [
                "queued, next in line",
                "queued, 3 ahead of it: gpu-0: needs 8 CPUs, has 2",
                "provisioning on gpu-0",
                "preparing",
                "pulling the image, 500 kB of at least 2 MB",
                "starting",
                "running",
            ]
        );
    }

    #[test]
    fn pull_progress_is_reported_in_quarters() {
        let at = |downloaded: u64| {
            let job = json!({"status": "pulling", "image_pull_progress": {"downloaded_bytes": downloaded,
                "extracted_bytes": 0, "total_bytes": 100, "is_total_bytes_final": true}});
            job_progress(&run(&[job])).remove(0).milestone()
        };
        assert_eq!(at(10), at(40));
        assert_ne!(at(40), at(60));
    }
}
