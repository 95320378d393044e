//! Converts server responses to rows and lines.

use windlass_api::{events::Event, instances::Instance, runs::Run};
use windlass_model::time::Timestamp;

use super::state::Row;
use crate::{
    commands::{
        apply::{format_refusals, format_resources},
        event, instance, instance_status, is_finished,
    },
    context::run_name,
    output::{format, style::Style},
};

fn new_row(key: String, run: Option<String>, status: &str, cells: Vec<String>) -> Row {
    // Unknown values are shown as a dash, as in every table.
    let cells = cells.into_iter().map(|cell| if cell.is_empty() { "-".to_owned() } else { cell }).collect();
    Row { key, run, status: status.to_owned(), cells }
}

/// Returns the status and its message. A run with one job has the status of its job; the message of a run that waits is
/// the sentence of `why`.
fn format_status(run: &Run) -> (&str, &str) {
    let (status, message) = own_status(run);
    (status, run.reason.as_deref().unwrap_or(message))
}

fn own_status(run: &Run) -> (&str, &str) {
    let latest = match run.jobs.as_slice() {
        [job] => job.job_submissions.last(),
        _ => None,
    };
    match latest.filter(|one| !one.status_message.is_empty() && !run.retrying) {
        Some(latest) => format::split_status(&latest.status, &latest.status_message),
        None => format::split_status(&run.status, &run.status_message),
    }
}

pub(super) fn run_rows(runs: &[Run], now: Timestamp) -> Vec<Row> {
    let one = |run: &Run| {
        let name = run_name(run);
        let spec = run.run_spec.value().unwrap_or_default();
        let mut given =
            run.jobs.iter().filter_map(|job| job.job_submissions.last()?.job_provisioning_data.as_ref());
        let given = given.next_back().and_then(|given| given.value().ok()).unwrap_or_default();
        let (word, sentence) = format_status(run);
        let cells = vec![
            name.clone(),
            word.to_owned(),
            spec["configuration"]["type"].as_str().unwrap_or_default().to_owned(),
            run.user.clone(),
            run.fleet.as_ref().map(|fleet| fleet.name.clone()).unwrap_or_default(),
            format::gpu(&given["instance_type"]["resources"]).unwrap_or_default(),
            given["price"].as_f64().map(format::price).unwrap_or_default(),
            format::ago(run.submitted_at, now),
            sentence.to_owned(),
        ];
        new_row(name.clone(), Some(name), word, cells)
    };
    runs.iter().map(one).collect()
}

/// Returns the runs that wait for an instance, in scheduling order.
pub(super) fn queue_rows(runs: &[Run], now: Timestamp) -> Vec<Row> {
    let priority = |run: &Run| {
        run.run_spec.value().unwrap_or_default()["configuration"]["priority"].as_i64().unwrap_or(0)
    };
    let waits = |run: &&Run| matches!(run.status.as_str(), "pending" | "submitted");
    let mut waiting: Vec<&Run> = runs.iter().filter(waits).collect();
    waiting.sort_by_key(|run| (-priority(run), run.submitted_at));
    let one = |run: &&Run| {
        let name = run_name(run);
        let requirements = run.jobs.first().and_then(|job| job.job_spec.value().ok()).unwrap_or_default();
        let (word, sentence) = format_status(run);
        let cells = vec![
            name.clone(),
            word.to_owned(),
            priority(run).to_string(),
            format::span(now.since(run.submitted_at)),
            run.user.clone(),
            format_resources(&requirements["requirements"]["resources"]),
            sentence.to_owned(),
        ];
        new_row(name.clone(), Some(name), word, cells)
    };
    waiting.iter().map(one).collect()
}

pub(super) fn instance_rows(instances: &[Instance]) -> Vec<Row> {
    let one = |one: &Instance| {
        let status = instance_status(one);
        let cells = vec![
            one.name.clone(),
            status.clone(),
            one.fleet_name.clone().unwrap_or_default(),
            instance::format_backend(one).to_owned(),
            instance::format_resources(one),
            one.price.map(format::price).unwrap_or_default(),
            one.job_name.clone().unwrap_or_default(),
        ];
        new_row(one.id.to_string(), None, &status, cells)
    };
    instances.iter().map(one).collect()
}

pub(super) fn event_rows<'a>(events: impl Iterator<Item = &'a Event>) -> Vec<Row> {
    let one = |one: &Event| {
        let run = one.targets.iter().find(|target| target.r#type == "run").map(|target| target.name.clone());
        let cells = vec![
            event::format_time(one),
            event::format_targets(one),
            event::actor_name(one).to_owned(),
            one.message.replace('\n', " "),
        ];
        new_row(one.id.to_string(), run, "", cells)
    };
    events.map(one).collect()
}

/// Describes the state of a run with its reasons.
pub(super) fn describe_run(run: &Run, now: Timestamp) -> Vec<String> {
    let spec = run.run_spec.value().unwrap_or_default();
    let mut lines = vec![
        format!("status     {}", format_status(run).0),
        format!("type       {}", spec["configuration"]["type"].as_str().unwrap_or("?")),
        format!("user       {}", run.user),
        format!("submitted  {} ({})", run.submitted_at, format::ago(run.submitted_at, now)),
    ];
    lines.extend(
        Some(format_status(run).1)
            .filter(|message| !message.is_empty())
            .map(|message| format!("message    {message}")),
    );
    lines.extend(run.fleet.as_ref().map(|fleet| format!("fleet      {}", fleet.name)));
    lines.extend((run.cost > 0.0).then(|| format!("cost       {}", format::price(run.cost))));
    lines.extend(run.next_triggered_at.map(|next| format!("next start {next}")));
    for why in &run.reasons {
        lines.push(format!("why        {}", why.replace('\n', " ")));
    }
    for job in &run.jobs {
        let Some(latest) = job.job_submissions.last() else { continue };
        let spec = job.job_spec.value().unwrap_or_default();
        lines.push(String::new());
        lines.push(format!(
            "{}: {}, submission {}",
            spec["job_name"].as_str().unwrap_or("?"),
            latest.status_message,
            latest.submission_num
        ));
        lines.push(format!("  requires {}", format_resources(&spec["requirements"]["resources"])));
        if let Some(given) = latest.job_provisioning_data.as_ref().and_then(|given| given.value().ok()) {
            let host = given["hostname"].as_str().unwrap_or_default();
            lines.push(format!(
                "  has      {} {host}",
                format::resources(&given["instance_type"]["resources"])
            ));
        }
        if let Some(why) = latest.why.as_ref().and_then(|why| why.value().ok()) {
            lines.push("  does not fit:".to_owned());
            lines.extend(format_refusals(&why, usize::MAX).into_iter().map(|line| format!("    {line}")));
        }
    }
    if let Some(hint) = run.hint.as_ref().filter(|_| !is_finished(&run.status) || run.status == "failed") {
        lines.extend([String::new(), format!("hint: {hint}")]);
    }
    lines
}

pub(super) fn describe_instance(one: &Instance) -> Vec<String> {
    instance::facts(one).lines(Style::plain())
}

pub(super) fn describe_event(one: &Event) -> Vec<String> {
    let mut lines = vec![
        format!("time     {}", one.recorded_at),
        format!("by       {}", event::actor_name(one)),
        String::new(),
        one.message.clone(),
        String::new(),
    ];
    lines.extend(
        one.targets.iter().map(|target| format!("{}  {}  {}", target.r#type, target.name, target.id)),
    );
    lines
}
