//! Phases of the jobs of a run over time, and of earlier runs of the same name.

use std::collections::BTreeMap;

use windlass_api::explanations::{EarlierRun, PhaseSpan, Timeline, TimelineMark, TimelineRequest};
use windlass_model::{
    id::{ManagedJobId, RunId},
    time::Timestamp,
};

use crate::{
    app::App,
    auth::ProjectScope,
    db::{
        explanations::{self as rows, JobTimes},
        runs,
    },
    error::{Error, Result},
    services::managed_jobs,
};

const EARLIER_MAX: usize = 10;

pub(crate) async fn timeline(
    app: &App,
    scope: &ProjectScope,
    requested: TimelineRequest,
) -> Result<Timeline> {
    match (requested.id, requested.job_id) {
        (Some(id), None) => of_run(app, scope, RunId(id)).await,
        (None, Some(number)) => {
            let job = managed_jobs::read_one(app, scope, number).await?;
            let times = rows::times_of_managed_job(app.db(), ManagedJobId(job.id)).await?;
            let attempt = |times: &JobTimes| {
                let tasks = job.tasks.iter();
                let found = tasks.filter_map(|task| {
                    let at = task.runs.iter().position(|run| *run == times.run_name)?;
                    Some((i64::from(task.task_id), u32::try_from(at + 1).unwrap_or(u32::MAX)))
                });
                found.into_iter().next().unwrap_or((0, 1))
            };
            let spans = times.iter().flat_map(|times| {
                let (task, attempt) = attempt(times);
                spans(times).into_iter().map(move |span| PhaseSpan { attempt, rank: task, ..span })
            });
            Ok(Timeline { spans: spans.collect(), marks: marks(&times), previous: Vec::new() })
        }
        _ => Err(Error::refused("expected either `id` or `job_id`")),
    }
}

async fn of_run(app: &App, scope: &ProjectScope, id: RunId) -> Result<Timeline> {
    let found = runs::find(app.db(), id).await?.filter(|found| found.run.project_id == scope.project.id);
    let run = found.ok_or_else(|| Error::absent("Run"))?.run;
    let times = rows::times_of_runs(app.db(), &[id]).await?;
    let base = without_number(&run.name);
    let similar = rows::similar_runs(app.db(), run.project_id, (id.0, run.submitted_at), base).await?;
    let earlier: Vec<_> =
        similar.into_iter().filter(|run| without_number(&run.name) == base).take(EARLIER_MAX).collect();
    let ids: Vec<RunId> = earlier.iter().map(|run| run.id).collect();
    let mut phases = BTreeMap::<RunId, BTreeMap<String, f64>>::new();
    for times in rows::times_of_runs(app.db(), &ids).await? {
        if (times.replica_num, times.job_num) != (0, 0) {
            continue;
        }
        let of_run = phases.entry(times.run_id).or_default();
        for span in spans(&times) {
            let Some(to) = span.to else { continue };
            #[expect(clippy::cast_precision_loss, reason = "microseconds of a phase")]
            let seconds = to.since(span.from).0.max(0) as f64 / 1e6;
            *of_run.entry(span.phase).or_default() += seconds;
        }
    }
    let previous = earlier.into_iter().map(|run| EarlierRun {
        id: run.id.0,
        submitted_at: run.submitted_at,
        status: run.status,
        phases: phases.remove(&run.id).unwrap_or_default(),
    });
    Ok(Timeline {
        spans: times.iter().flat_map(spans).collect(),
        marks: marks(&times),
        previous: previous.collect(),
    })
}

/// Name without a number at its end: `train-7` and `train-8` are the same work.
fn without_number(name: &str) -> &str {
    let base = name.trim_end_matches(|letter: char| letter.is_ascii_digit()).trim_end_matches('-');
    if base.is_empty() { name } else { base }
}

/// Phases of a submission: they follow each other without gaps.
fn spans(times: &JobTimes) -> Vec<PhaseSpan> {
    let starts = [
        ("queue", Some(times.submitted_at)),
        ("machine", times.provisioned_at),
        ("image", times.pulling_at),
        ("run", times.running_at),
        ("stop", times.terminating_at),
    ];
    let mut begun: Vec<(&str, Timestamp)> =
        starts.into_iter().filter_map(|(phase, at)| Some((phase, at?))).collect();
    // Times are written by different passes; a phase never begins before the one before it.
    for at in 1..begun.len() {
        begun[at].1 = begun[at].1.max(begun[at - 1].1);
    }
    let last = begun.len().saturating_sub(1);
    let reason = times.termination_message.clone().or_else(|| times.termination_reason.clone());
    let span = |(at, (phase, from)): (usize, &(&str, Timestamp))| PhaseSpan {
        replica: times.replica_num,
        rank: times.job_num,
        submission: times.submission_num,
        submission_id: times.id.0,
        attempt: 0,
        phase: (*phase).to_owned(),
        from: *from,
        to: begun.get(at + 1).map(|(_, next)| *next).or(times.finished_at.map(|end| end.max(*from))),
        instance: times.instance.clone().filter(|_| at > 0),
        market: times.spot.filter(|_| at > 0).map(|spot| if spot { "spot" } else { "on-demand" }.to_owned()),
        reason: reason.clone().filter(|_| at == last && times.finished_at.is_some()),
    };
    begun.iter().enumerate().map(span).collect()
}

/// New submissions after lost ones.
fn marks(times: &[JobTimes]) -> Vec<TimelineMark> {
    let again = times.windows(2).filter(|pair| {
        let key = |times: &JobTimes| (times.run_id, times.replica_num, times.job_num);
        key(&pair[0]) == key(&pair[1])
    });
    let mark = |pair: &[JobTimes]| TimelineMark {
        at: pair[1].submitted_at,
        what: "recovery".to_owned(),
        message: pair[0]
            .termination_message
            .clone()
            .or_else(|| pair[0].termination_reason.as_ref().map(|reason| reason.replace('_', " ")))
            .unwrap_or_else(|| "submitted again".to_owned()),
        replica: Some(pair[1].replica_num),
        rank: Some(pair[1].job_num),
    };
    again.map(mark).collect()
}

#[cfg(test)]
mod tests {
    use windlass_model::id::SubmissionId;

    use super::*;

    fn times(all: [Option<i64>; 6]) -> JobTimes {
        let [submitted, provisioned, pulling, running, terminating, finished] =
            all.map(|secs| secs.map(Timestamp::from_secs));
        JobTimes {
            id: SubmissionId(uuid::Uuid::from_u128(1)),
            run_id: RunId(uuid::Uuid::from_u128(2)),
            replica_num: 0,
            job_num: 0,
            submission_num: 0,
            submitted_at: submitted.unwrap_or(Timestamp(0)),
            provisioned_at: provisioned,
            pulling_at: pulling,
            running_at: running,
            terminating_at: terminating,
            finished_at: finished,
            termination_reason: Some("done_by_runner".into()),
            termination_message: None,
            instance: Some("gpu-0".into()),
            spot: Some(false),
            run_name: "train".into(),
        }
    }

    #[test]
    fn phases_follow_each_other_without_gaps() {
        let all = spans(&times([Some(0), Some(5), Some(4), Some(9), None, Some(20)]));
        let shown: Vec<_> = all
            .iter()
            .map(|span| (span.phase.as_str(), span.from.0 / 1_000_000, span.to.map(|to| to.0 / 1_000_000)))
            .collect();
        assert_eq!(
            shown,
            [("queue", 0, Some(5)), ("machine", 5, Some(5)), ("image", 5, Some(9)), ("run", 9, Some(20))]
        );
        assert!(all[0].instance.is_none() && all[3].instance.is_some());
        assert!(all[2].reason.is_none() && all[3].reason.is_some());
        let waits = spans(&times([Some(0), None, None, None, None, None]));
        assert_eq!((waits.len(), waits[0].to), (1, None));
    }

    #[test]
    fn numbers_at_the_end_of_names_do_not_matter() {
        assert_eq!(
            (without_number("train-12"), without_number("train"), without_number("7")),
            ("train", "train", "7")
        );
    }
}
