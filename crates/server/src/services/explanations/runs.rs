//! Explanations of runs and managed jobs.

use std::collections::BTreeSet;

use windlass_api::{
    explanations::{
        ExpectedEnd, ExplainedJob, Explanation, PreemptionReport, ProbeReport, QueueTurn, Refusal,
        RunInFront, RunRequest,
    },
    managed_jobs as jobs_wire,
    runs::{self as wire, Job, JobSubmission},
};
use windlass_model::{
    id::{ProjectId, RunId},
    run,
    time::Timestamp,
};

use super::{
    preempted,
    refusals::{Locations, RecordedRefusals, cures},
    turns,
};
use crate::{
    app::App,
    auth::ProjectScope,
    db::{explanations::ending_jobs, runs as rows},
    error::Result,
    services::{
        managed_jobs,
        runs::{self, end_in_words},
    },
};

pub(crate) async fn explain(app: &App, scope: &ProjectScope, requested: RunRequest) -> Result<Explanation> {
    let read = wire::ReadRequest { run_name: requested.run_name, id: requested.id };
    let run = runs::read(app, scope, read).await?;
    let name = run_name(&run);
    let waits = run.jobs.iter().filter_map(|job| job.job_submissions.last()).any(waits_for_instance);
    let needs_place = waits || lacked_capacity(&run);
    let locations =
        if needs_place { Locations::load(app, scope.project.id).await? } else { Locations::default() };
    let turn = if waits { turns::turn_of(app, &scope.caller, RunId(run.id)).await? } else { None };
    let in_front = turn.as_ref().map(|turn| turn.in_front.as_slice()).unwrap_or_default();
    let mut jobs: Vec<ExplainedJob> =
        run.jobs.iter().filter_map(|job| explained_job(job, &locations, in_front)).collect();
    let preempted = match rows::find(app.db(), RunId(run.id)).await? {
        Some(found) => {
            let visible = turns::visible_projects(app, &scope.caller).await?;
            preempted::report(app, &found.run, &visible).await?
        }
        None => None,
    };
    if needs_place && jobs.iter().all(|job| job.refusals.is_empty()) {
        add_present_refusals(app, scope, &run, &locations, &mut jobs).await;
    }
    let all_refusals = || jobs.iter().flat_map(|job| &job.refusals);
    let cures = cures(all_refusals());
    let expected = if waits { expected_end(app, scope.project.id).await? } else { None };
    Ok(Explanation {
        sentence: sentence(&run),
        reasons: with_turn(reasons(&run), turn.as_ref(), preempted.as_ref()),
        hint: hint(&run, all_refusals().next(), cures.is_empty(), &name),
        probes: probes(&run),
        cures,
        jobs,
        next_look_at: run.next_triggered_at,
        expected,
        command: format!("windlass why {name}"),
        deployment: run.deployment,
        scaling: run.scaling,
        turn,
        preempted,
    })
}

/// Returns whether the latest submission of a job ended for lack of capacity. It waits for its next attempt, or has
/// failed.
fn lacked_capacity(run: &wire::Run) -> bool {
    let mut latest = run.jobs.iter().filter_map(|job| job.job_submissions.last());
    latest.any(|last| last.termination_reason.as_deref() == Some("failed_to_start_due_to_no_capacity"))
}

/// Adds what does not fit at present, for a run that the scheduler has not evaluated yet.
async fn add_present_refusals(
    app: &App,
    scope: &ProjectScope,
    run: &wire::Run,
    locations: &Locations,
    jobs: &mut [ExplainedJob],
) {
    let request = wire::PlanRequest {
        run_spec: run.run_spec.clone(),
        max_offers: Some(1),
        full_offers: false,
        unallocated_resources: false,
        reverse_offers: false,
        for_offers_only: true,
    };
    // It only explains: a configuration that is no longer valid is not an error here.
    let Ok(plan) = runs::plan(app, scope, request).await else { return };
    for planned in plan.job_plans {
        let spec = planned.job_spec.value().unwrap_or_default();
        let number = |name: &str| spec[name].as_i64().unwrap_or(0);
        let (replica, rank) = (number("replica_num"), number("job_num"));
        let Some(job) = jobs.iter_mut().find(|job| (job.replica, job.rank) == (replica, rank)) else {
            continue;
        };
        let found = RecordedRefusals::of(planned.why.as_ref());
        job.left_out = found.left_out;
        job.refusals = found.refusals.into_iter().map(|one| locations.refusal(one)).collect();
    }
}

fn run_name(run: &wire::Run) -> String {
    let spec = run.run_spec.value().unwrap_or_default();
    spec["run_name"].as_str().unwrap_or_default().to_owned()
}

fn waits_for_instance(submission: &JobSubmission) -> bool {
    submission.status == "submitted"
}

async fn expected_end(app: &App, project: ProjectId) -> Result<Option<ExpectedEnd>> {
    let first = ending_jobs(app.db(), &[project], 1).await?.pop();
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

/// The answer in one sentence, for every state. A run that waits has the sentence of lists.
fn sentence(run: &wire::Run) -> String {
    if let Some(reason) = &run.reason {
        return reason.clone();
    }
    let mut last = run.jobs.iter().filter_map(|job| job.job_submissions.last());
    match run.status.as_str() {
        "pending" | "submitted" => "It is about to start.".to_owned(),
        "provisioning" => {
            let message = last.find(|last| !last.status_message.is_empty());
            let message = message.map_or("preparing", |last| last.status_message.as_str());
            format!("It has an instance and prepares to start: {message}.")
        }
        "running" => match &run.deployment {
            Some(deployment) if deployment.ready < deployment.wanted => {
                format!("It runs, and {} of {} replicas are ready.", deployment.ready, deployment.wanted)
            }
            _ => "It runs.".to_owned(),
        },
        "terminating" => format!("It is ending: {}.", end_in_words(run)),
        "done" => "It finished successfully.".to_owned(),
        status => format!("It {status}: {}.", end_in_words(run)),
    }
}

/// Further sentences: the messages of its end, of its deployment and of its jobs.
fn reasons(run: &wire::Run) -> Vec<String> {
    let mut all = run.reasons.clone();
    all.extend(run.deployment.as_ref().and_then(|deployment| deployment.message.clone()));
    for job in run.jobs.iter().filter(|_| run.jobs.len() > 1 || run.status == "running") {
        let Some(last) = job.job_submissions.last() else { continue };
        let spec = job.job_spec.value().unwrap_or_default();
        let name = spec["job_name"].as_str().unwrap_or("job").to_owned();
        let is_repeated = run.reasons.contains(&last.status_message);
        if !last.status_message.is_empty() && last.status_message != last.status && !is_repeated {
            all.push(format!("{name}: {}", last.status_message));
        }
    }
    let mut seen = BTreeSet::new();
    all.retain(|reason| seen.insert(reason.clone()));
    all
}

/// Adds the sentences about its preemption and its place in the queue.
fn with_turn(
    mut reasons: Vec<String>,
    turn: Option<&QueueTurn>,
    preempted: Option<&PreemptionReport>,
) -> Vec<String> {
    reasons.extend(preempted.into_iter().flat_map(|report| report.sentences.iter().cloned()));
    reasons.extend(turn.into_iter().flat_map(|turn| turn.sentences.iter().cloned()));
    reasons
}

fn probes(run: &wire::Run) -> Vec<ProbeReport> {
    if run.service.is_none() {
        return Vec::new();
    }
    let report = |job: &Job| {
        let last = job.job_submissions.last()?;
        let spec = job.job_spec.value().ok()?;
        let streak = last.probes.iter().map(|probe| probe.success_streak).min().unwrap_or(0);
        let waits = last.ready == Some(false);
        Some(ProbeReport {
            replica: spec["replica_num"].as_i64().unwrap_or(0),
            ready: last.status == "running" && !waits,
            success_streak: u32::try_from(streak).unwrap_or(0),
            message: waits.then(|| last.status_message.clone()).filter(|message| *message != last.status),
        })
    };
    run.jobs.iter().filter_map(report).collect()
}

fn hint(run: &wire::Run, nearest: Option<&Refusal>, has_no_cures: bool, name: &str) -> Option<String> {
    match (run.status.as_str(), nearest) {
        (_, _) if run.hint.is_some() && nearest.is_none() => run.hint.clone(),
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
    let mut jobs: Vec<ExplainedJob> = job.tasks.iter().map(explained).collect();
    let (turn, preempted) = explain_attempts(app, scope, &job, &mut jobs).await?;
    let cures = cures(jobs.iter().flat_map(|job| &job.refusals));
    let next: Option<Timestamp> = job.tasks.iter().filter_map(|task| task.next_retry_at).min();
    let task_reason =
        |task: &jobs_wire::Task| task.reason.as_ref().map(|reason| format!("{}: {reason}", task.name));
    let failure = |task: &jobs_wire::Task| {
        task.last_failure.as_ref().map(|reason| format!("{}: the last attempt failed: {reason}", task.name))
    };
    let reasons = job.tasks.iter().flat_map(|task| [task_reason(task), failure(task)]).flatten().collect();
    let sentence = job.reason.clone().unwrap_or_else(|| match job.status.as_str() {
        "SUCCEEDED" => "It finished successfully.".to_owned(),
        "RUNNING" => "It runs.".to_owned(),
        status => format!("Its status is {status}."),
    });
    Ok(Explanation {
        sentence,
        reasons: with_turn(reasons, turn.as_ref(), preempted.as_ref()),
        jobs,
        hint: (!cures.is_empty()).then(|| "One of the changes below makes it fit.".to_owned()),
        cures,
        deployment: None,
        scaling: Vec::new(),
        probes: Vec::new(),
        next_look_at: next,
        expected: None,
        command: format!("windlass why {number}"),
        turn,
        preempted,
    })
}

/// Turn of the first attempt that waits for an instance, and the preemption of the first that was preempted.
async fn explain_attempts(
    app: &App,
    scope: &ProjectScope,
    job: &jobs_wire::ManagedJob,
    explained: &mut [ExplainedJob],
) -> Result<(Option<QueueTurn>, Option<PreemptionReport>)> {
    let (mut turn, mut preempted) = (None, None);
    let visible = turns::visible_projects(app, &scope.caller).await?;
    for (task, explained) in job.tasks.iter().zip(explained) {
        let Some(name) = task.runs.last() else { continue };
        let Some(found) = rows::find_by_name(app.db(), scope.project.id, name).await? else { continue };
        if preempted.is_none() {
            preempted = preempted::report(app, &found.run, &visible).await?;
        }
        if turn.is_none() && found.run.status == run::Status::Submitted {
            turn = turns::turn_of(app, &scope.caller, found.run.id).await?;
            explained.position = turn.as_ref().map(|turn| turn.position);
            explained.in_front = turn.as_ref().map(|turn| turn.in_front.clone()).unwrap_or_default();
        }
    }
    Ok((turn, preempted))
}
