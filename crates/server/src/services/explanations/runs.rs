//! Explanations of runs and managed jobs.

use windlass_api::{
    explanations::{ExpectedEnd, ExplainedJob, Explanation, ProbeReport, Refusal, RunInFront, RunRequest},
    managed_jobs as jobs_wire,
    runs::{self as wire, Job, JobSubmission},
};
use windlass_model::{id::ProjectId, time::Timestamp};

use super::refusals::{Locations, RecordedRefusals, cures};
use crate::{
    app::App,
    auth::ProjectScope,
    db::explanations as rows,
    error::Result,
    services::{managed_jobs, runs},
};

/// Runs before a waiting one that are named.
const IN_FRONT_MAX: usize = 10;
const WAITING_MAX: i64 = 2000;

pub(crate) async fn explain(app: &App, scope: &ProjectScope, requested: RunRequest) -> Result<Explanation> {
    let read = wire::ReadRequest { run_name: requested.run_name, id: requested.id };
    let run = runs::read(app, scope, read).await?;
    let name = run_name(&run);
    let waits = run.jobs.iter().filter_map(|job| job.job_submissions.last()).any(waits_for_instance);
    let locations = if waits { Locations::load(app, scope.project.id).await? } else { Locations::default() };
    let in_front = if waits { in_front(app, scope.project.id, &name).await? } else { Vec::new() };
    let jobs: Vec<ExplainedJob> =
        run.jobs.iter().filter_map(|job| explained_job(job, &locations, &in_front)).collect();
    let all_refusals = || jobs.iter().flat_map(|job| &job.refusals);
    let cures = cures(all_refusals());
    let expected = if waits { expected_end(app, scope.project.id).await? } else { None };
    Ok(Explanation {
        sentence: sentence(&run, &jobs),
        reasons: reasons(&run),
        hint: hint(&run, all_refusals().next(), cures.is_empty(), &name),
        probes: probes(&run),
        cures,
        jobs,
        next_look_at: run.next_triggered_at,
        expected,
        command: format!("windlass why {name}"),
        deployment: run.deployment,
        scaling: run.scaling,
    })
}

fn run_name(run: &wire::Run) -> String {
    let spec = run.run_spec.value().unwrap_or_default();
    spec["run_name"].as_str().unwrap_or_default().to_owned()
}

fn waits_for_instance(submission: &JobSubmission) -> bool {
    submission.status == "submitted"
}

async fn in_front(app: &App, project: ProjectId, name: &str) -> Result<Vec<RunInFront>> {
    let waiting = rows::waiting_jobs(app.db(), &[project], WAITING_MAX).await?;
    let mut ahead: Vec<RunInFront> = Vec::new();
    for job in waiting.into_iter().take_while(|job| job.run != name) {
        if ahead.last().is_some_and(|last| last.run.as_ref() == Some(&job.run)) {
            continue;
        }
        ahead.push(RunInFront {
            position: i64::try_from(ahead.len()).unwrap_or(i64::MAX),
            project: Some(job.project),
            run: Some(job.run),
            waits_since: job.submitted_at,
        });
        if ahead.len() == IN_FRONT_MAX {
            break;
        }
    }
    Ok(ahead)
}

async fn expected_end(app: &App, project: ProjectId) -> Result<Option<ExpectedEnd>> {
    let first = rows::ending_jobs(app.db(), &[project], 1).await?.pop();
    Ok(first.map(|job| ExpectedEnd { run: Some(job.run), ends_at: job.ends_at }))
}

fn explained_job(job: &Job, locations: &Locations, in_front: &[RunInFront]) -> Option<ExplainedJob> {
    let last = job.job_submissions.last()?;
    let spec = job.job_spec.value().unwrap_or_default();
    let recorded = RecordedRefusals::of(last.why.as_ref());
    let waits = waits_for_instance(last);
    Some(ExplainedJob {
        replica: spec["replica_num"].as_i64().unwrap_or(0),
        rank: spec["job_num"].as_i64().unwrap_or(0),
        submission_id: Some(last.id),
        status: last.status.clone(),
        position: last.queue_position,
        in_front: if waits { in_front.to_vec() } else { Vec::new() },
        left_out: recorded.left_out,
        refusals: recorded.refusals.into_iter().map(|one| locations.refusal(one)).collect(),
    })
}

/// The answer in one sentence, for every state.
fn sentence(run: &wire::Run, jobs: &[ExplainedJob]) -> String {
    let last = run.jobs.iter().filter_map(|job| job.job_submissions.last());
    match run.status.as_str() {
        "pending" => run.reason.clone().unwrap_or_else(|| "It waits for its next start.".to_owned()),
        "submitted" => waiting_sentence(jobs),
        "provisioning" => {
            let message = last.map(|last| last.status_message.as_str()).find(|message| !message.is_empty());
            format!("It has an instance and prepares to start: {}.", message.unwrap_or("preparing"))
        }
        "running" => match &run.deployment {
            Some(deployment) if deployment.ready < deployment.wanted => {
                format!("It runs, and {} of {} replicas are ready.", deployment.ready, deployment.wanted)
            }
            _ => "It runs.".to_owned(),
        },
        "terminating" => format!("It is ending: {}.", end_words(run)),
        "done" => "It finished successfully.".to_owned(),
        status => format!("It {status}: {}.", end_words(run)),
    }
}

fn waiting_sentence(jobs: &[ExplainedJob]) -> String {
    let Some(job) = jobs.iter().find(|job| job.status == "submitted") else {
        return "It is about to start.".to_owned();
    };
    let can_pass = job.refusals.iter().any(|one| one.shortfalls.iter().all(|short| short.passes));
    match (job.refusals.first(), job.position) {
        (None, Some(0) | None) => "It waits to be placed, and is next in line.".to_owned(),
        (None, Some(ahead)) => format!("It waits to be placed; {ahead} jobs are before it."),
        (Some(nearest), position) if can_pass => {
            let ahead = match position {
                Some(ahead @ 1..) => format!("; {ahead} jobs are before it"),
                _ => String::new(),
            };
            format!("It waits until {} is free{ahead}.", nearest.place)
        }
        (Some(nearest), _) => {
            let short =
                nearest.shortfalls.iter().map(|short| short.message.as_str()).collect::<Vec<_>>().join("; ");
            format!("It will not start as it is: {} {short}.", nearest.place)
        }
    }
}

/// Reason of the end of a run, in words.
fn end_words(run: &wire::Run) -> String {
    let of_job = |last: &JobSubmission| {
        let message = last.termination_reason_message.clone().filter(|message| !message.is_empty());
        let code = last.exit_status.filter(|code| *code != 0).map(|code| format!("exit code {code}"));
        message.or(code).or_else(|| last.error.clone())
    };
    let mut last = run.jobs.iter().filter_map(|job| job.job_submissions.last());
    let reason = run.termination_reason.as_ref().map(|reason| reason.replace('_', " "));
    last.find_map(of_job)
        .or_else(|| run.error.clone())
        .or(reason)
        .unwrap_or_else(|| "no reason recorded".to_owned())
}

fn reasons(run: &wire::Run) -> Vec<String> {
    let mut all = Vec::new();
    all.extend(run.reason.clone().filter(|_| run.status == "submitted"));
    all.extend(run.deployment.as_ref().and_then(|deployment| deployment.message.clone()));
    for job in run.jobs.iter().filter(|_| run.jobs.len() > 1 || run.status == "running") {
        let Some(last) = job.job_submissions.last() else { continue };
        let spec = job.job_spec.value().unwrap_or_default();
        let name = spec["job_name"].as_str().unwrap_or("job").to_owned();
        if !last.status_message.is_empty() && last.status_message != last.status {
            all.push(format!("{name}: {}", last.status_message));
        }
    }
    all.dedup();
    all
}

fn probes(run: &wire::Run) -> Vec<ProbeReport> {
    if run.service.is_none() {
        return Vec::new();
    }
    let report = |job: &Job| {
        let last = job.job_submissions.last()?;
        let spec = job.job_spec.value().ok()?;
        let streak = last.probes.iter().map(|probe| probe.success_streak).min().unwrap_or(0);
        let waits = last.status_message.starts_with("not ready");
        Some(ProbeReport {
            replica: spec["replica_num"].as_i64().unwrap_or(0),
            ready: last.status == "running" && !waits,
            success_streak: u32::try_from(streak).unwrap_or(0),
            message: waits.then(|| last.status_message.clone()),
        })
    };
    run.jobs.iter().filter_map(report).collect()
}

fn hint(run: &wire::Run, nearest: Option<&Refusal>, has_no_cures: bool, name: &str) -> Option<String> {
    match (run.status.as_str(), nearest) {
        ("submitted", Some(_)) if !has_no_cures => Some("One of the changes below makes it fit.".to_owned()),
        ("submitted", Some(_)) => {
            Some("Waiting may be enough; otherwise add an instance that fits.".to_owned())
        }
        ("failed", _) => Some(format!("Read its output: `windlass logs {name}`.")),
        _ => None,
    }
}

/// Explains a managed job by its tasks, and by the newest attempt of the first one that waits.
pub(crate) async fn explain_managed_job(app: &App, scope: &ProjectScope, number: i64) -> Result<Explanation> {
    let job = managed_jobs::read_one(app, scope, number).await?;
    let locations = Locations::load(app, scope.project.id).await?;
    let explained = |task: &jobs_wire::Task| {
        let recorded = RecordedRefusals::of(task.why.as_ref());
        ExplainedJob {
            replica: 0,
            rank: i64::from(task.task_id),
            submission_id: None,
            status: task.status.clone(),
            position: None,
            in_front: Vec::new(),
            left_out: recorded.left_out,
            refusals: recorded.refusals.into_iter().map(|one| locations.refusal(one)).collect(),
        }
    };
    let jobs: Vec<ExplainedJob> = job.tasks.iter().map(explained).collect();
    let cures = cures(jobs.iter().flat_map(|job| &job.refusals));
    let next: Option<Timestamp> = job.tasks.iter().filter_map(|task| task.next_retry_at).min();
    let task_reason =
        |task: &jobs_wire::Task| task.reason.as_ref().map(|reason| format!("{}: {reason}", task.name));
    let failure = |task: &jobs_wire::Task| {
        task.last_failure.as_ref().map(|reason| format!("{}: the last attempt failed: {reason}", task.name))
    };
    let sentence = job.reason.clone().unwrap_or_else(|| match job.status.as_str() {
        "SUCCEEDED" => "It finished successfully.".to_owned(),
        "RUNNING" => "It runs.".to_owned(),
        status => format!("Its status is {status}."),
    });
    Ok(Explanation {
        sentence,
        reasons: job.tasks.iter().flat_map(|task| [task_reason(task), failure(task)]).flatten().collect(),
        jobs,
        hint: (!cures.is_empty()).then(|| "One of the changes below makes it fit.".to_owned()),
        cures,
        deployment: None,
        scaling: Vec::new(),
        probes: Vec::new(),
        next_look_at: next,
        expected: None,
        command: format!("windlass why {number}"),
    })
}
