//! `windlass why RUN|JOB`: explains why a run or a managed job is waiting, failed or ended. The server computes the
//! explanation; the web UI shows the same one.

use serde_json::{Value, json};
use windlass_api::{
    explanations::{Cure, ExplainedJob, Explanation, QueueTurn, RunRequest},
    operations::{ExplainRun, ReadRun},
    runs::{JobSubmission, ReadRequest, Run},
};

use super::{apply, jobs, stop::is_finished};
use crate::{
    cli::{OutputArgs, ServerArgs},
    context::{self, Context, run_name},
    error::CliError,
    exit::Exit,
    follow::{self, deployment_status},
    output::{self, format},
};

const EXAMPLES: &str = "\
Examples:
  windlass why train              show why it is waiting, what does not fit and what would help
  windlass why 12                 the same for a managed job, by number or name
  windlass why train -o json      the same as JSON";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of a run, or number or name of a managed job
    #[arg(value_name = "RUN|JOB")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    context::with_context(&args.at, async |cx| {
        let Some(run) = find_run(cx, &args.name).await? else {
            return jobs::why::explain_job(cx, &args.name, args.output.format).await;
        };
        let request = RunRequest { run_name: Some(args.name.clone()), id: None };
        let explanation = cx.call::<ExplainRun>(&request).await?;
        let name = run_name(&run);
        let document = document(
            &explanation,
            [
                ("name", json!(name)),
                ("status", json!(run.status)),
                ("status_message", json!(run.status_message)),
                ("termination_reason", json!(run.termination_reason)),
                ("asleep", json!(deployment_status::is_scaled_to_zero(&run))),
                ("next_start_at", json!(run.next_triggered_at)),
            ],
        );
        output::print_one(args.output.format, &document, &name, |_| print_run(&run, &explanation, &cx.url))?;
        if let Some(job) = jobs::why::find_job_named(cx, &args.name).await {
            output::print_message(&format!("A managed job has the same name: run `windlass why {job}`."));
        }
        Ok(Exit::Done)
    })
}

/// Returns `None` if there is no run of that name.
async fn find_run(cx: &Context, name: &str) -> Result<Option<Run>, CliError> {
    let request = ReadRequest { run_name: Some(name.to_owned()), id: None };
    match cx.try_call::<ReadRun>(&request).await {
        Ok(run) => Ok(Some(run)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(cx.explain(&error).await),
    }
}

/// The explanation of the server, and facts about its object.
pub(super) fn document<const N: usize>(explanation: &Explanation, facts: [(&str, Value); N]) -> Value {
    let mut document = json!(explanation);
    for (name, value) in facts {
        document[name] = value;
    }
    document
}

/// Describes the end of the first job that ended by itself and not well, otherwise of any.
fn describe_end<'a>(submissions: impl Iterator<Item = &'a JobSubmission>) -> Option<String> {
    let is_consequence = |submission: &&JobSubmission| match submission.termination_reason.as_deref() {
        Some("done_by_runner") => 2,
        Some("terminated_by_server" | "scaled_down") => 1,
        Some(_) | None => 0,
    };
    submissions
        .filter(|submission| submission.termination_reason.is_some())
        .min_by_key(is_consequence)
        .and_then(format_end)
}

/// Describes how a submission ended.
fn format_end(last: &JobSubmission) -> Option<String> {
    match (last.termination_reason.as_deref()?, last.exit_status) {
        ("done_by_runner", code) => Some(format!("finished, exit code {}", code.unwrap_or(0))),
        (reason, Some(code)) => Some(format!("{}, exit code {code}", reason.replace('_', " "))),
        (reason, None) => Some(reason.replace('_', " ")),
    }
}

fn print_run(run: &Run, explanation: &Explanation, server: &str) {
    let name = run_name(run);
    let status = if run.status_message.is_empty() { &run.status } else { &run.status_message };
    let since = format::ago(run.last_processed_at, format::now());
    output::print_data(&output::printable(&format!("{name}: {status} (last checked {since})")));
    let latest = run.jobs.iter().filter_map(|job| job.job_submissions.last());
    if let Some(reason) = describe_end(latest)
        && is_finished(&run.status)
    {
        output::print_data(&format!("  reason: {}", output::printable(&reason)));
    }
    let refused: Vec<&ExplainedJob> =
        explanation.jobs.iter().filter(|job| !job.refusals.is_empty() || job.left_out > 0).collect();
    // The first line may contain the sentence already.
    for why in texts(run, explanation).into_iter().filter(|why| *why != status.as_str()) {
        if let Some(why) = without_refusal(why, refused.first().copied()) {
            output::print_data(&format!("  why:  {}", follow::indent_lines(&output::printable(&why))));
        }
    }
    print_service(run, server);
    print_jobs(run);
    print_turn(explanation);
    for group in group_by_refusals(&refused) {
        let specs: Vec<Value> = group.iter().map(|job| spec_of(run, job)).collect();
        let names: Vec<&str> = specs.iter().map(|spec| spec["job_name"].as_str().unwrap_or("?")).collect();
        let heading = if run.jobs.len() > 1 { names.join(", ") } else { "does not fit".to_owned() };
        group.iter().take(1).for_each(|job| print_refusals(&heading, job));
        let mut resources: Vec<String> =
            specs.iter().map(|spec| apply::format_resources(&spec["requirements"]["resources"])).collect();
        resources.dedup();
        output::print_data(&format!("  requires: {}", resources.join(", or ")));
    }
    print_cures(&explanation.cures);
    // The list says the same; and skip hints to run this command.
    let hint = explanation.hint.as_ref().filter(|hint| refused.is_empty() && !hint.contains("windlass why"));
    if let Some(hint) = hint {
        output::print_data(&format!("  hint: {}", output::printable(hint)));
    }
}

/// Specification of an explained job.
fn spec_of(run: &Run, job: &ExplainedJob) -> Value {
    let mut specs = run.jobs.iter().map(|job| job.job_spec.value().unwrap_or_default());
    let is_same = |spec: &Value| {
        (spec["replica_num"].as_i64(), spec["job_num"].as_i64()) == (Some(job.replica), Some(job.rank))
    };
    specs.find(is_same).unwrap_or_default()
}

/// Puts jobs that nothing fits for the same reasons together, so that each list is printed once.
fn group_by_refusals<'a>(jobs: &[&'a ExplainedJob]) -> Vec<Vec<&'a ExplainedJob>> {
    let mut groups: Vec<(Value, Vec<&'a ExplainedJob>)> = Vec::new();
    for &job in jobs {
        let list = json!([job.refusals, job.left_out]);
        match groups.iter_mut().find(|(known, _)| *known == list) {
            Some((_, members)) => members.push(job),
            None => groups.push((list, vec![job])),
        }
    }
    groups.into_iter().map(|(_, members)| members).collect()
}

/// The sentence of a run that waits, begins or ends, or else the reasons.
fn texts<'a>(run: &Run, explanation: &'a Explanation) -> Vec<&'a str> {
    let is_between = matches!(run.status.as_str(), "provisioning" | "terminating");
    if run.reason.is_some() || (is_between && run.reasons.is_empty()) {
        return vec![&explanation.sentence];
    }
    // Lines about single jobs follow below.
    explanation.reasons.iter().filter(|reason| run.reasons.contains(reason)).map(String::as_str).collect()
}

/// Prints when the run starts next, where its service answers, and how it is deployed and scaled.
fn print_service(run: &Run, server: &str) {
    if let Some(next) = deployment_status::next_start(run, format::now()) {
        output::print_data(&format!("  next start: {next}"));
    }
    if let Some(address) =
        deployment_status::format_address(run, server).filter(|_| !is_finished(&run.status))
    {
        output::print_data(&output::printable(&format!("  address: {address}")));
    }
    if let Some(line) = deployment_status::format_deployment(run) {
        output::print_data(&output::printable(&format!("  {line}")));
    }
    for line in deployment_status::format_scaling(run) {
        output::print_data(&output::printable(&format!("  scaling: {line}")));
    }
}

/// Prints each job of a run with several jobs, and of an active run.
fn print_jobs(run: &Run) {
    for job in &run.jobs {
        let is_active = !is_finished(&run.status);
        // A replica that an update or less traffic made superfluous says nothing about the service.
        let is_replaced = |latest: &&JobSubmission| {
            is_active
                && is_finished(&latest.status)
                && latest.termination_reason.as_deref() == Some("scaled_down")
        };
        let latest = job.job_submissions.last().filter(|_| run.jobs.len() > 1 || is_active);
        let Some(latest) = latest.filter(|latest| !is_replaced(latest)) else { continue };
        let spec = job.job_spec.value().unwrap_or_default();
        let job_name = spec["job_name"].as_str().unwrap_or("?").to_owned();
        // The list of what does not fit follows.
        let status = if latest.status == "submitted" { &latest.status } else { &latest.status_message };
        output::print_data(&output::printable(&format!("  {job_name}: {status}")));
        match latest.queue_position {
            Some(0) => output::print_data("    next in line for an instance"),
            Some(ahead) => output::print_data(&format!(
                "    {} ahead of it",
                format::count(usize::try_from(ahead).unwrap_or(0), "run")
            )),
            None => {}
        }
        if let Some(line) = format_runtime(latest) {
            output::print_data(&output::printable(&format!("    runs in {line}")));
        }
    }
}

/// Prints the place of the run in the queue with who comes before it, and its preemption.
pub(super) fn print_turn(explanation: &Explanation) {
    if let Some(preempted) = &explanation.preempted {
        output::print_data("  preempted:");
        preempted.sentences.iter().for_each(|line| print_indented(line));
    }
    let Some(turn) = &explanation.turn else { return };
    output::print_data("  queue:");
    turn.sentences.iter().for_each(|line| print_indented(line));
    print_in_front(turn);
}

/// Prints who comes before a run, and by which rule.
fn print_in_front(turn: &QueueTurn) {
    if turn.in_front.is_empty() {
        return;
    }
    output::print_data("  before it:");
    for other in &turn.in_front {
        let name = match (&other.project, &other.run) {
            (Some(project), Some(run)) => format!("{project}/{run}"),
            (..) => "a run of another project".to_owned(),
        };
        print_indented(&format!("{name} ({}): {}", other.requested, format_rule(&other.rule)));
    }
}

fn print_indented(text: &str) {
    output::print_data(&output::printable(&format!("    {text}")));
}

/// Rule that puts a run before another one.
pub(super) fn format_rule(rule: &str) -> &'static str {
    match rule {
        "class" => "higher class",
        "share" => "its project is within its share",
        "usage" => "its project used less",
        "priority" => "higher priority",
        _ => "waits for longer",
    }
}

/// Runtime of a job, and its user if known.
fn format_runtime(submission: &JobSubmission) -> Option<String> {
    let runtime = submission.job_runtime_data.as_ref()?.value().ok()?;
    let runs_in = runtime["runs_in"].as_str()?;
    let user = runtime["username"].as_str().map(|user| format!(", as user {user}")).unwrap_or_default();
    Some(format!("{runs_in}{user}"))
}

/// Prints the changes after which a job would fit somewhere.
pub(super) fn print_cures(cures: &[Cure]) {
    if cures.is_empty() {
        return;
    }
    output::print_data("  to make it fit:");
    for cure in cures {
        let places = usize::try_from(cure.fits).unwrap_or(usize::MAX);
        let places =
            if places > 1 { format!(" (fits {})", format::count(places, "place")) } else { String::new() };
        output::print_data(&output::printable(&format!("    {}{places}", cure.message)));
    }
}

/// Removes the nearest miss from a reason, because the list below begins with it. `None` if nothing remains.
pub(super) fn without_refusal(reason: &str, job: Option<&ExplainedJob>) -> Option<String> {
    let lines = job.map(|job| apply::format_refusals(&json!(job), 1)).unwrap_or_default();
    let nearest = lines.first().and_then(|line| Some((line, reason.find(line.as_str())?)));
    let Some((line, at)) = nearest else { return Some(reason.to_owned()) };
    let before = reason[..at].trim_end().trim_end_matches(':');
    let rest = &reason[at + line.len()..];
    // The number of other places follows, as the scheduler counts them.
    let counted = rest.strip_prefix("; and ").and_then(|rest| {
        let end = ["place does not fit", "places do not fit"];
        end.iter().find_map(|end| Some(&rest[rest.find(end)? + end.len()..]))
    });
    let rest = counted.unwrap_or(rest);
    let kept = format!("{before}{rest}");
    let kept = kept.trim_start_matches("; ");
    (!kept.is_empty()).then(|| kept.to_owned())
}

pub(super) fn print_refusals(heading: &str, job: &ExplainedJob) {
    let lines = apply::format_refusals(&json!(job), usize::MAX);
    if lines.is_empty() {
        return;
    }
    output::print_data(&output::printable(&format!("  {heading}:")));
    lines.iter().for_each(|line| output::print_data(&output::printable(&format!("    {line}"))));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{ExplainedJob, JobSubmission, describe_end, group_by_refusals, without_refusal};

    #[test]
    fn jobs_with_equal_refusals_share_one_list() {
        let job = |rank: i64, message: &str| -> ExplainedJob {
            let short = json!([{ "kind": "cpus", "message": message, "cure": "", "passes": false }]);
            let refusal = json!({ "place": "a", "place_id": null, "place_kind": "instance", "count": 1, "shortfalls": short });
            serde_json::from_value(json!({
                "replica": 0, "rank": rank, "submission_id": null, "status": "submitted", "position": null,
                "in_front": [], "refusals": [refusal], "left_out": 0,
            }))
            .unwrap()
        };
        let all = [job(0, "has 2 CPUs"), job(1, "has no GPU"), job(2, "has 2 CPUs")];
        let groups = group_by_refusals(&all.iter().collect::<Vec<_>>());
        let ranks: Vec<Vec<i64>> =
            groups.iter().map(|group| group.iter().map(|job| job.rank).collect()).collect();
        assert_eq!(ranks, [vec![0, 2], vec![1]]);
    }

    #[test]
    fn the_end_of_a_run_is_that_of_the_job_that_caused_it() {
        let ended = |reason: &str, code: i32| -> JobSubmission {
            let time = "2026-11-20T09:00:00Z";
            serde_json::from_value(json!({
                "id": uuid::Uuid::nil(), "submission_num": 0, "submitted_at": time, "last_processed_at": time,
                "status": "failed", "status_message": "failed", "termination_reason": reason, "exit_status": code,
            }))
            .unwrap()
        };
        let done = ended("done_by_runner", 0);
        let stopped = ended("terminated_by_server", 143);
        let failed = ended("container_exited_with_error", 5);
        let described = describe_end([&done, &stopped, &failed].into_iter());
        assert_eq!(described.as_deref(), Some("container exited with error, exit code 5"));
        assert_eq!(describe_end([&done].into_iter()).as_deref(), Some("finished, exit code 0"));
        assert_eq!(describe_end([].into_iter()), None);
    }

    #[test]
    fn a_reason_is_printed_without_the_refusal_that_the_list_shows() {
        let short = json!([{ "kind": "cpus", "message": "needs 8 CPUs, has 2", "cure": "lower cpu to 2", "passes": false }]);
        let refusal = json!({ "place": "local-0", "place_id": null, "place_kind": "instance", "count": 1, "shortfalls": short });
        let why: ExplainedJob = serde_json::from_value(json!({
            "replica": 0, "rank": 0, "submission_id": null, "status": "submitted", "position": null, "in_front": [],
            "refusals": [refusal], "left_out": 0,
        }))
        .unwrap();
        let cases = [
            ("local-0: needs 8 CPUs, has 2 (lower cpu to 2)", None),
            ("local-0: needs 8 CPUs, has 2 (lower cpu to 2); and 3 other places do not fit", None),
            (
                "no instance for it yet: local-0: needs 8 CPUs, has 2 (lower cpu to 2); and 1 other place does not fit",
                Some("no instance for it yet"),
            ),
            (
                "attempt 2 failed: job 0 ended: local-0: needs 8 CPUs, has 2 (lower cpu to 2); attempt 3 begins at 10:00",
                Some("attempt 2 failed: job 0 ended; attempt 3 begins at 10:00"),
            ),
            ("waiting for its turn", Some("waiting for its turn")),
        ];
        for (reason, kept) in cases {
            assert_eq!(without_refusal(reason, Some(&why)).as_deref(), kept, "{reason}");
            assert_eq!(without_refusal(reason, None).as_deref(), Some(reason));
        }
    }
}
