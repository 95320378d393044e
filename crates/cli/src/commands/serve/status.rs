//! `windlass serve status`: services and their replicas, with the statuses of SkyPilot.

use serde::Serialize;
use serde_json::Value;
use windlass_api::runs::{Job, JobSubmission, Run};
use windlass_model::time::Timestamp;

use super::{active_services, is_service};
use crate::{
    cli::Format,
    commands::apply::service::not_active,
    context::{Context, run_name},
    error::CliError,
    exit::Exit,
    follow::deployment_status,
    output::{
        self, ListView, format,
        table::{Cell, Table},
    },
};

const EXAMPLES: &str = "\
Examples:
  windlass serve status                   active services, and their replicas
  windlass serve status --endpoint web    only the URL of one service";

#[derive(Debug, Default, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Names of services; defaults to all active ones
    #[arg(value_name = "SERVICE")]
    names: Vec<String>,
    /// Print only the URLs
    #[arg(long)]
    endpoint: bool,
}

/// A row of the list.
#[derive(Debug, Serialize)]
struct ServiceRow {
    name: String,
    /// Number of the newest configuration, from 1.
    version: i64,
    status: &'static str,
    ready_replicas: usize,
    desired_replicas: u32,
    endpoint: Option<String>,
    submitted_at: Timestamp,
    replicas: Vec<ReplicaRow>,
}

#[derive(Debug, Serialize)]
struct ReplicaRow {
    id: i64,
    version: i64,
    status: &'static str,
    launched_at: Timestamp,
    resources: String,
    region: String,
    instance: String,
    reason: Option<String>,
}

pub(super) async fn print(cx: &Context, args: &Args, format: Format) -> Result<Exit, CliError> {
    let mut runs = Vec::new();
    if args.names.is_empty() {
        runs = active_services(cx).await?;
    }
    for name in &args.names {
        let run = cx.run(name).await?;
        if !is_service(&run) {
            return Err(not_active(name).why("it is not a service"));
        }
        runs.push(run);
    }
    let now = format::now();
    let rows: Vec<ServiceRow> = runs.iter().map(|run| row(run, &cx.url, now)).collect();
    if args.endpoint {
        rows.iter().filter_map(|row| row.endpoint.as_deref()).for_each(output::print_data);
        return Ok(Exit::Done);
    }
    let name = |row: &ServiceRow| row.name.clone();
    let none = "No services. Run `windlass serve up FILE` to start one.";
    let list = ListView { project: Some(&cx.project), kind: "services", name, none };
    list.print(&rows, format, |_| service_table(&rows, now))?;
    if matches!(format, Format::Table | Format::Wide) && rows.iter().any(|row| !row.replicas.is_empty()) {
        output::print_data("");
        replica_table(&rows, now).print();
    }
    Ok(Exit::Done)
}

fn row(run: &Run, server: &str, now: Timestamp) -> ServiceRow {
    let spec = run.run_spec.value().unwrap_or_default();
    let within = spec["configuration"]["deployment"]["ready_within"].as_i64().unwrap_or_default();
    let replicas: Vec<ReplicaRow> = run.jobs.iter().filter_map(|job| replica(job, within, now)).collect();
    let ready = replicas.iter().filter(|replica| replica.status == "READY").count();
    let desired: u32 = run.scaling.iter().map(|group| group.desired).sum();
    let status = match run.status.as_str() {
        "terminating" => "SHUTTING_DOWN",
        "failed" => "FAILED",
        "terminated" | "done" => "SHUTDOWN",
        _ if ready > 0 => "READY",
        _ if desired == 0 && replicas.is_empty() => "NO_REPLICA",
        _ => "REPLICA_INIT",
    };
    ServiceRow {
        name: run_name(run),
        version: run.deployment_num + 1,
        status,
        ready_replicas: ready,
        desired_replicas: desired,
        endpoint: deployment_status::url(run, server),
        submitted_at: run.submitted_at,
        replicas,
    }
}

fn replica(job: &Job, ready_within: i64, now: Timestamp) -> Option<ReplicaRow> {
    let last = job.job_submissions.last()?;
    let spec = job.job_spec.value().unwrap_or_default();
    let given: Value =
        last.job_provisioning_data.as_ref().and_then(|data| data.value().ok()).unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let why = [&last.termination_reason_message, &last.error];
    Some(ReplicaRow {
        id: spec["replica_num"].as_i64().unwrap_or_default() + 1,
        version: last.deployment_num + 1,
        status: replica_status(last, ready_within, now),
        launched_at: last.submitted_at,
        resources: format::resources(&given["instance_type"]["resources"]),
        region: text(&given["region"]),
        instance: text(&given["hostname"]),
        reason: why.into_iter().flatten().next().cloned(),
    })
}

/// Status in the words of SkyPilot. `ready_within` is the time that a new replica has to become ready, in seconds.
fn replica_status(last: &JobSubmission, ready_within: i64, now: Timestamp) -> &'static str {
    let is_ready = last.probes.iter().all(|probe| probe.success_streak > 0);
    match last.status.as_str() {
        "submitted" => "PENDING",
        "provisioning" | "pulling" => "PROVISIONING",
        "running" if is_ready => "READY",
        "running" if now.since(last.submitted_at).as_secs() <= ready_within => "STARTING",
        "running" => "NOT_READY",
        "terminating" => "SHUTTING_DOWN",
        "terminated" | "aborted" | "done" => "SHUTDOWN",
        _ => "FAILED",
    }
}

fn service_table(rows: &[ServiceRow], now: Timestamp) -> Table {
    let mut table = Table::new(["NAME", "VERSION", "UPTIME", "STATUS", "REPLICAS", "ENDPOINT"]);
    table.keep("ENDPOINT");
    for row in rows {
        table.row(vec![
            row.name.clone().into(),
            row.version.to_string().into(),
            format::span(now.since(row.submitted_at)).into(),
            Cell::status(row.status),
            format!("{}/{}", row.ready_replicas, row.desired_replicas).into(),
            row.endpoint.clone().unwrap_or_default().into(),
        ]);
    }
    table
}

fn replica_table(rows: &[ServiceRow], now: Timestamp) -> Table {
    let mut table =
        Table::new(["SERVICE", "ID", "VERSION", "LAUNCHED", "RESOURCES", "STATUS", "REGION", "REASON"]);
    for row in rows {
        for replica in &row.replicas {
            table.row(vec![
                row.name.clone().into(),
                replica.id.to_string().into(),
                replica.version.to_string().into(),
                format::ago(replica.launched_at, now).into(),
                replica.resources.clone().into(),
                Cell::status(replica.status),
                replica.region.clone().into(),
                replica.reason.clone().unwrap_or_default().into(),
            ]);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use windlass_api::runs::JobSubmission;
    use windlass_model::time::{Span, Timestamp};

    #[test]
    fn a_replica_is_starting_until_its_initial_delay_is_over_and_then_not_ready() {
        let submitted = "2026-11-20T09:00:00Z";
        let status = |status: &str, streak: i64, age: i64| {
            let last: JobSubmission = serde_json::from_value(json!({
                "id": uuid::Uuid::nil(), "submission_num": 0, "submitted_at": submitted, "status": status,
                "last_processed_at": submitted, "probes": [{ "success_streak": streak }],
            }))
            .unwrap();
            super::replica_status(&last, 60, Timestamp::parse(submitted).unwrap() + Span::secs(age))
        };
        assert_eq!(status("submitted", 0, 5), "PENDING");
        assert_eq!(status("pulling", 0, 5), "PROVISIONING");
        assert_eq!(status("running", 0, 60), "STARTING");
        assert_eq!(status("running", 0, 61), "NOT_READY");
        assert_eq!(status("running", 1, 61), "READY");
        assert_eq!(status("failed", 0, 61), "FAILED");
    }
}
