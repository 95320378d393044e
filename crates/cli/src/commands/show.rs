//! `windlass show RUN`: the submitted configuration, the jobs, their instances and results.

use serde_json::Value;
use windlass_api::runs::{Job, JobSubmission, Run};

use super::{apply::format_resources, is_finished};
use crate::{
    cli::{OutputArgs, ServerArgs},
    context::{self, run_name},
    error::CliError,
    exit::Exit,
    follow::deployment_status,
    output::{
        self,
        detail_view::DetailView,
        format,
        table::{Cell, Table},
    },
};

const EXAMPLES: &str = "\
Examples:
  windlass show train             the configuration, the jobs, their instances and results
  windlass show train -o wide     every submission of every job
  windlass show train -o json     the whole run, as JSON";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the run
    #[arg(value_name = "RUN")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    context::with_context(&args.at, async |cx| {
        let run = cx.run(&args.name).await?;
        output::print_one(args.output.format, &run, &args.name, |wide| {
            facts(&run, &cx.url).print();
            let table = jobs(&run, wide);
            if !run.jobs.is_empty() {
                output::print_data("");
                if wide { table.whole().print() } else { table.print() }
            }
        })?;
        Ok(Exit::Done)
    })
}

fn facts(run: &Run, server: &str) -> DetailView {
    let now = format::now();
    let spec = run.run_spec.value().unwrap_or_default();
    let configuration = &spec["configuration"];
    let (word, sentence) = format::split_status(&run.status, &run.status_message);
    let mut facts = DetailView::new();
    facts.add("Name", run_name(run));
    facts.status("Status", word);
    facts.add("Message", run.reason.as_deref().unwrap_or(sentence));
    facts.add("Why", if is_finished(&run.status) { run.reasons.join("\n") } else { String::new() });
    facts.add("Type", field_text(&configuration["type"]));
    facts.add("Project", &run.project_name);
    facts.add("User", &run.user);
    facts.add(
        "Submitted",
        format!("{} ({})", format::timestamp(run.submitted_at), format::ago(run.submitted_at, now)),
    );
    facts.add("Next start", deployment_status::next_start(run, now).unwrap_or_default());
    let address = deployment_status::format_address(run, server).filter(|_| !is_finished(&run.status));
    facts.add("Address", address.unwrap_or_default());
    facts.add("File", field_text(&spec["configuration_path"]));
    facts.add("Image", field_text(&configuration["image"]));
    facts.add("Commands", lines(&configuration["commands"]));
    facts.add("Variables", format_variables(&configuration["env"]));
    let wanted = run.jobs.first().and_then(|job| job.job_spec.value().ok()).unwrap_or_default();
    if !wanted.is_null() {
        facts.add("Resources", format_resources(&wanted["requirements"]["resources"]));
    }
    facts.add("Fleet", run.fleet.as_ref().map(|fleet| fleet.name.clone()).unwrap_or_default());
    facts.add("Cost", if run.cost > 0.0 { format::price(run.cost) } else { String::new() });
    facts.add("Id", run.id.to_string());
    facts
}

fn field_text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn lines(value: &Value) -> String {
    let all: Vec<&str> = value.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    all.join("\n")
}

/// Formats only the names: values may be secrets.
fn format_variables(env: &Value) -> String {
    let names: Vec<&str> = env.as_object().into_iter().flatten().map(|(name, _)| name.as_str()).collect();
    names.join(", ")
}

/// Lists the newest submission of each job, or all submissions if `wide` is set.
fn jobs(run: &Run, wide: bool) -> Table {
    let mut head = vec!["JOB", "STATUS", "INSTANCE", "BACKEND", "RESOURCES", "SUBMITTED", "ENDED", "MESSAGE"];
    if wide {
        head.insert(1, "SUBMISSION");
    }
    let mut table = Table::new(head);
    for job in &run.jobs {
        let newest = job.job_submissions.len().saturating_sub(1);
        let shown = if wide { 0 } else { newest };
        for submission in job.job_submissions.iter().skip(shown) {
            table.row(row(job, submission, wide));
        }
    }
    table
}

fn row(job: &Job, submission: &JobSubmission, wide: bool) -> Vec<Cell> {
    let now = format::now();
    let spec = job.job_spec.value().unwrap_or_default();
    let given =
        submission.job_provisioning_data.as_ref().and_then(|given| given.value().ok()).unwrap_or_default();
    let region = given["region"].as_str().unwrap_or_default();
    let backend = given["backend"].as_str().map(|name| format::backend(name, region)).unwrap_or_default();
    let (word, sentence) = format::split_status(&submission.status, &submission.status_message);
    let message = submission.termination_reason_message.as_deref().and_then(|message| message.lines().next());
    let mut row: Vec<Cell> = vec![
        field_text(&spec["job_name"]).into(),
        Cell::status(word),
        field_text(&given["instance_id"]).into(),
        backend.into(),
        format::resources(&given["instance_type"]["resources"]).into(),
        format::ago(submission.submitted_at, now).into(),
        submission.finished_at.map(|time| format::ago(time, now)).unwrap_or_default().into(),
        message.unwrap_or(sentence).into(),
    ];
    if wide {
        row.insert(1, submission.submission_num.to_string().into());
    }
    row
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Run, facts, jobs};
    use crate::output::style::Style;

    fn run() -> Run {
        let time = "2026-11-20T09:00:00Z";
        let submission = |num: i64, more: serde_json::Value| {
            let mut one = json!({"id": uuid::Uuid::nil(), "submission_num": num, "submitted_at": time,
                "last_processed_at": time});
            one.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            one
        };
        serde_json::from_value(json!({
            "id": uuid::Uuid::nil(), "project_name": "main", "user": "ada", "submitted_at": time,
            "last_processed_at": time, "status": "failed", "status_message": "failed",
            "run_spec": {"run_name": "train", "configuration": {"type": "task", "commands": ["make", "./train"],
                "env": {"TOKEN": "s3cret"}, "image": "debian"}, "configuration_path": "train.yml"},
            "jobs": [{"job_spec": {"job_name": "train-0-0", "replica_num": 0, "job_num": 0}, "job_submissions": [
                submission(0, json!({"status": "failed", "status_message": "interrupted"})),
                submission(1, json!({"status": "failed", "status_message": "exited (3)", "exit_status": 3,
                    "finished_at": time, "termination_reason_message": "exit code 3\nlast line",
                    "job_provisioning_data": {"backend": "remote", "region": "local", "instance_id": "local-0"}})),
            ]}],
        }))
        .unwrap()
    }

    #[test]
    fn show_prints_the_submitted_run_without_variable_values() {
        let lines = facts(&run(), "http://h").lines(Style::plain()).join("\n");
        for part in ["train", "failed", "train.yml", "debian", "make\n", "./train", "TOKEN", "ada"] {
            assert!(lines.contains(part), "no {part} in\n{lines}");
        }
        assert!(!lines.contains("s3cret"), "{lines}");
    }

    #[test]
    fn each_job_shows_where_it_ran_and_how_it_ended() {
        let lines = jobs(&run(), false).lines(Style::plain());
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[1].starts_with("train-0-0  exited (3)  local-0   local"), "{lines:?}");
        assert!(lines[1].ends_with("exit code 3"), "{lines:?}");
        assert_eq!(jobs(&run(), true).lines(Style::plain()).len(), 3);
    }
}
