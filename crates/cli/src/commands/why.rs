//! `windlass why RUN|JOB`: explains why a run or a managed job is waiting, failed or ended.

use serde_json::{Value, json};
use windlass_api::{
    operations::{PlanRun, ReadRun},
    runs::{Job, JobSubmission, PlanRequest, ReadRequest, Run, RunPlan},
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

/// Maximum number of locations for which fixes are listed.
const FIXES_MAX: usize = 3;

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
        let plan = if waits_for_capacity(&run) { Some(fetch_plan(cx, &run).await?) } else { None };
        let name = run_name(&run);
        let document = json!({
            "name": name,
            "status": run.status,
            "status_message": run.status_message,
            "termination_reason": run.termination_reason,
            "reason": run.reason,
            "reasons": follow::reasons(&run),
            "asleep": deployment_status::is_scaled_to_zero(&run),
            "next_start_at": run.next_triggered_at,
            "deployment": run.deployment,
            "scaling": run.scaling,
            "hint": follow::hint(&run, &name),
            "shortfalls": shortfalls(&run),
            "job_plans": plan.as_ref().map(|plan| &plan.job_plans),
        });
        output::print_one(args.output.format, &document, &name, |_| print_run(&run, plan.as_ref(), &cx.url))?;
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

/// Returns whether the run waits for its schedule or for a request, and so needs no capacity.
fn needs_no_capacity(run: &Run) -> bool {
    deployment_status::is_scaled_to_zero(run) || (run.status == "pending" && run.next_triggered_at.is_some())
}

/// Returns whether the run waits for capacity; only then are offers requested.
fn waits_for_capacity(run: &Run) -> bool {
    if needs_no_capacity(run) {
        return false;
    }
    let mut latest = run.jobs.iter().filter_map(|job| job.job_submissions.last());
    run.status == "submitted"
        || latest.any(|last| last.termination_reason.as_deref() == Some("failed_to_start_due_to_no_capacity"))
}

/// Describes how a submission ended.
fn format_end(last: &JobSubmission) -> Option<String> {
    match (last.termination_reason.as_deref()?, last.exit_status) {
        ("done_by_runner", code) => Some(format!("finished, exit code {}", code.unwrap_or(0))),
        (reason, Some(code)) => Some(format!("{}, exit code {code}", reason.replace('_', " "))),
        (reason, None) => Some(reason.replace('_', " ")),
    }
}

/// Returns the result of the last placement attempt for each job without an instance: its name and the refusals.
fn shortfalls(run: &Run) -> Vec<Value> {
    let of_job = |job: &Job| {
        let why = job.job_submissions.last()?.why.as_ref()?.value().ok()?;
        let spec = job.job_spec.value().unwrap_or_default();
        Some(json!({ "job": spec["job_name"], "refusals": why["refusals"], "left_out": why["left_out"] }))
    };
    run.jobs.iter().filter_map(of_job).collect()
}

async fn fetch_plan(cx: &Context, run: &Run) -> Result<RunPlan, CliError> {
    let request = PlanRequest {
        run_spec: run.run_spec.clone(),
        max_offers: Some(3),
        full_offers: false,
        unallocated_resources: false,
        reverse_offers: false,
        for_offers_only: true,
    };
    cx.call::<PlanRun>(&request).await
}

fn print_run(run: &Run, plan: Option<&RunPlan>, server: &str) {
    let name = run_name(run);
    let status = if run.status_message.is_empty() { &run.status } else { &run.status_message };
    let since = format::ago(run.last_processed_at, format::now());
    output::print_data(&output::printable(&format!("{name}: {status} (last checked {since})")));
    let mut latest = run.jobs.iter().filter_map(|job| job.job_submissions.last());
    if let Some(reason) = latest.find_map(format_end)
        && is_finished(&run.status)
    {
        output::print_data(&format!("  reason: {}", output::printable(&reason)));
    }
    let noted = if needs_no_capacity(run) { Vec::new() } else { shortfalls(run) };
    if let Some(reason) = run.reason.as_ref().and_then(|reason| without_refusal(reason, noted.first())) {
        output::print_data(&format!("  why:  {}", follow::indent_lines(&output::printable(&reason))));
    }
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
    let reasons = follow::reasons(run).into_iter().filter(|_| run.reason.is_none());
    for why in reasons.filter_map(|why| without_refusal(&why, noted.first())) {
        output::print_data(&format!("  why:  {}", follow::indent_lines(&output::printable(&why))));
    }
    print_jobs(run);
    for job in &noted {
        let heading = if run.jobs.len() > 1 { job["job"].as_str().unwrap_or("?") } else { "does not fit" };
        print_refusals(heading, job);
    }
    if let Some(plan) = plan {
        for job in &plan.job_plans {
            let spec = job.job_spec.value().unwrap_or_default();
            output::print_data(&format!(
                "  requires: {}",
                apply::format_resources(&spec["requirements"]["resources"])
            ));
            // The recorded refusals are the same, slightly older.
            match job.why.as_ref().filter(|_| noted.is_empty()) {
                Some(why) => print_refusals("does not fit now", &why.value().unwrap_or_default()),
                None if noted.is_empty() => {
                    let count = usize::try_from(job.total_offers).unwrap_or(0);
                    output::print_data(&format!("  fits now: {}", format::count(count, "offer")));
                }
                None => {}
            }
        }
    }
    let mut seen =
        plan.into_iter().flat_map(|plan| &plan.job_plans).filter_map(|job| job.why.as_ref()?.value().ok());
    let cures = format_fixes(&noted.first().cloned().or_else(|| seen.next()).unwrap_or_default());
    if !cures.is_empty() {
        output::print_data("  to make it fit:");
        cures.iter().for_each(|line| output::print_data(&output::printable(&format!("    {line}"))));
    }
    // Skip hints to run this command.
    if let Some(hint) = follow::hint(run, &name).filter(|hint| !hint.contains("windlass why")) {
        output::print_data(&format!("  hint: {hint}"));
    }
}

/// Prints each job of a run with several jobs, and of an active run.
fn print_jobs(run: &Run) {
    for job in &run.jobs {
        let Some(latest) =
            job.job_submissions.last().filter(|_| run.jobs.len() > 1 || !is_finished(&run.status))
        else {
            continue;
        };
        let spec = job.job_spec.value().unwrap_or_default();
        let job_name = spec["job_name"].as_str().unwrap_or("?").to_owned();
        output::print_data(&output::printable(&format!("  {job_name}: {}", latest.status_message)));
        match latest.queue_position {
            Some(0) => output::print_data("    next in line for an instance"),
            Some(ahead) => output::print_data(&format!(
                "    {} ahead of it",
                format::count(usize::try_from(ahead).unwrap_or(0), "job")
            )),
            None => {}
        }
        if let Some(line) = format_runtime(latest) {
            output::print_data(&output::printable(&format!("    runs in {line}")));
        }
    }
}

/// Runtime of a job, and its user if known.
fn format_runtime(submission: &JobSubmission) -> Option<String> {
    let runtime = submission.job_runtime_data.as_ref()?.value().ok()?;
    let runs_in = runtime["runs_in"].as_str()?;
    let user = runtime["username"].as_str().map(|user| format!(", as user {user}")).unwrap_or_default();
    Some(format!("{runs_in}{user}"))
}

/// Lists the changes after which the job would fit, for locations where no other obstacle remains.
pub(super) fn format_fixes(why: &Value) -> Vec<String> {
    let refusals = why["refusals"].as_array().map(Vec::as_slice).unwrap_or_default();
    let cure = |refusal: &Value| {
        let short = refusal["shortfalls"].as_array().filter(|short| !short.is_empty())?;
        let cures: Option<Vec<&str>> =
            short.iter().map(|one| one["cure"].as_str().filter(|cure| !cure.is_empty())).collect();
        Some(format!("on {}: {}", refusal["place"].as_str()?, cures?.join(", and ")))
    };
    refusals.iter().filter_map(cure).take(FIXES_MAX).collect()
}

/// Removes the nearest miss from a reason, because the list below begins with it. `None` if nothing remains.
pub(super) fn without_refusal(reason: &str, why: Option<&Value>) -> Option<String> {
    let lines = why.map(|why| apply::format_refusals(why, 1)).unwrap_or_default();
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

pub(super) fn print_refusals(heading: &str, why: &Value) {
    let lines = apply::format_refusals(why, usize::MAX);
    if lines.is_empty() {
        return;
    }
    output::print_data(&output::printable(&format!("  {heading}:")));
    lines.iter().for_each(|line| output::print_data(&output::printable(&format!("    {line}"))));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::without_refusal;

    #[test]
    fn a_reason_is_printed_without_the_refusal_that_the_list_shows() {
        let short = json!([{ "message": "needs 8 CPUs, has 2", "cure": "lower cpu to 2" }]);
        let why = json!({ "refusals": [{ "place": "local-0", "count": 1, "shortfalls": short }] });
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
