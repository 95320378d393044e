//! Preemption of a run, for its owner: for whom, by which rule, and what follows.

use std::collections::BTreeSet;

use windlass_api::explanations::PreemptionReport;
use windlass_model::{id::ProjectId, plan::preemption::PreemptionRule, retry, time::Span};

use super::turns::whole_second;
use crate::{
    app::App,
    db::{
        instance_queue::{self as rows, PreemptedJob},
        runs::Run,
    },
    error::Result,
    parsed_run_spec::ParsedRunSpec,
};

/// The last preemption of a run, unless it has run again since.
pub(super) async fn report(
    app: &App,
    run: &Run,
    visible: &BTreeSet<ProjectId>,
) -> Result<Option<PreemptionReport>> {
    let found = rows::preempted_job(app.db(), run.id).await?;
    let spec = ParsedRunSpec::of(run).ok();
    let is_retried = spec
        .as_ref()
        .and_then(ParsedRunSpec::retry)
        .is_some_and(|policy| policy.on_events.contains(&retry::Event::Interruption));
    Ok(found.and_then(|job| to_report(job, is_retried, run.finished, visible)))
}

fn to_report(
    job: PreemptedJob,
    is_retried: bool,
    is_finished: bool,
    visible: &BTreeSet<ProjectId>,
) -> Option<PreemptionReport> {
    let note = job.note.as_ref()?;
    let successor = job.successor.as_ref().filter(|(project, ..)| visible.contains(project));
    let whom = match successor {
        Some((_, project, run)) => format!("run `{project}/{run}`"),
        None => "a run of another project".to_owned(),
    };
    let why = match note.rule {
        PreemptionRule::Class => "which is of a higher class",
        PreemptionRule::Share => "whose project is within its share, while this one held more than its own",
    };
    let at = whole_second(job.at);
    let mut sentences = vec![format!("It was preempted at {at} for {whom}, {why}.")];
    let grace = Span(note.grace_us).as_secs();
    if !job.is_finished {
        sentences.push(format!("Its jobs have {grace} s to exit."));
    }
    sentences.push(match job.managed_job {
        Some(number) => format!("Managed job {number} launches it again."),
        None if job.is_resubmitted => {
            "It was submitted again and has kept its place in the queue.".to_owned()
        }
        None if is_retried && !is_finished => {
            "It is submitted again and keeps its place in the queue.".to_owned()
        }
        None => {
            "Nothing submits it again: that takes `retry: {on_events: [interruption]}`, or a managed job."
                .to_owned()
        }
    });
    Some(PreemptionReport {
        at: job.at,
        rule: note.rule.as_str().to_owned(),
        project: successor.map(|(_, project, _)| project.clone()),
        run: successor.map(|(.., run)| run.clone()),
        grace_seconds: grace,
        sentences,
    })
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;
    use windlass_model::time::Timestamp;

    use super::*;
    use crate::db::pipeline_rows::preemption::PreemptionNote;

    #[test]
    fn a_preemption_names_the_other_run_only_if_its_project_is_visible_and_says_what_follows() {
        let project = ProjectId(Uuid::from_u128(7));
        let note = PreemptionNote {
            rule: PreemptionRule::Share,
            grace_us: Span::secs(60).0,
            message: String::new(),
        };
        let job = PreemptedJob {
            at: Timestamp::from_secs(1_793_000_000),
            note: Some(note),
            is_finished: false,
            is_resubmitted: false,
            successor: Some((project, "left".into(), "train".into())),
            managed_job: None,
        };
        let hidden = to_report(job.clone(), true, false, &BTreeSet::new()).unwrap();
        assert_eq!((&hidden.project, &hidden.run, hidden.grace_seconds), (&None, &None, 60));
        let text = hidden.sentences.join(" ");
        assert!(text.contains("for a run of another project, whose project is within its share"), "{text}");
        assert!(text.contains("have 60 s to exit"), "{text}");
        assert!(text.ends_with("It is submitted again and keeps its place in the queue."), "{text}");
        let seen = BTreeSet::from([project]);
        let ended = PreemptedJob { is_finished: true, ..job.clone() };
        let report = to_report(ended.clone(), false, true, &seen).unwrap();
        assert_eq!((report.project.as_deref(), report.run.as_deref()), (Some("left"), Some("train")));
        assert!(report.sentences[1].starts_with("Nothing submits it again"), "{:?}", report.sentences);
        let managed = PreemptedJob { managed_job: Some(4), ..ended };
        let last = to_report(managed, false, true, &seen).unwrap().sentences.pop();
        assert_eq!(last.as_deref(), Some("Managed job 4 launches it again."));
    }
}
