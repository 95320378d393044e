//! `windlass container`: commands on the container queue.

use serde_json::{Value, json};
use windlass_api::queue_client::{QueueError, QueueHttpClient, percent_encode};

use crate::{
    cli::{OutputArgs, ServerArgs},
    context::{self, Context},
    error::CliError,
    exit::Exit,
    output::{
        self,
        detail_view::DetailView,
        table::{Cell, Table},
    },
};

const EXAMPLES: &str = "\
Examples:
  windlass container                                              list queued and running containers
  windlass container show wlass-dz642-0a1b2c3d4e5f6g7             show its details
  windlass container logs wlass-dz642-0a1b2c3d4e5f6g7             print its output
  windlass container priority wlass-dz642-0a1b2c3d4e5f6g7 900     run it before others
  windlass container cancel wlass-dz642-0a1b2c3d4e5f6g7           cancel it";
const UUID: &str = "wlass-dz642-0a1b2c3d4e5f6g7";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Option<Action>,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// List queued containers
    #[command(after_help = "Examples:\n  windlass container list --all")]
    List {
        /// Include finished containers
        #[arg(short, long)]
        all: bool,
    },
    /// Show a container and the messages of dispatchers about it
    #[command(after_help = format!("Examples:\n  windlass container show {UUID}"))]
    Show {
        /// UUID of the container
        #[arg(value_name = "CONTAINER")]
        uuid: String,
    },
    /// Print the output of a container
    #[command(after_help = format!("Examples:\n  windlass container logs --stderr {UUID}"))]
    Logs {
        /// UUID of the container
        #[arg(value_name = "CONTAINER")]
        uuid: String,
        /// Print stderr instead of stdout
        #[arg(long)]
        stderr: bool,
    },
    /// Cancel all requests for a container; a running container is stopped
    #[command(after_help = format!("Examples:\n  windlass container cancel {UUID}"))]
    Cancel {
        /// UUID of the container
        #[arg(value_name = "CONTAINER")]
        uuid: String,
    },
    /// Set the priority of a container: 0 holds or stops it, 1000 is the highest
    #[command(after_help = format!("Examples:\n  windlass container priority {UUID} 900"))]
    Priority {
        /// UUID of the container
        #[arg(value_name = "CONTAINER")]
        uuid: String,
        /// Priority from 0 to 1000
        priority: u64,
    },
}

fn queue_error(error: &QueueError) -> CliError {
    CliError::from_error("the request to the container queue failed", error)
}

pub(crate) fn queue_client(cx: &Context) -> Result<QueueHttpClient, CliError> {
    QueueHttpClient::with_certificate(&cx.url, &cx.token, cx.certificate.as_deref())
        .map_err(|error| queue_error(&error))
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let format = args.output.format;
    context::with_context(&args.at, async |cx| {
        let client = queue_client(cx)?;
        match &args.action {
            None => list(&client, false, format).await,
            Some(Action::List { all }) => list(&client, *all, format).await,
            Some(Action::Show { uuid }) => show(&client, uuid, format).await,
            Some(Action::Logs { uuid, stderr }) => logs(&client, uuid, *stderr).await,
            Some(Action::Cancel { uuid }) => set_priority(&client, uuid, 0).await,
            Some(Action::Priority { uuid, priority }) => set_priority(&client, uuid, *priority).await,
        }
    })
}

fn field_text(record: &Value, name: &str) -> String {
    match &record[name] {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other @ (Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => other.to_string(),
    }
}

async fn fetch_items(client: &QueueHttpClient, path: &str) -> Result<Vec<Value>, CliError> {
    let page = client.get(path).await.map_err(|error| queue_error(&error))?;
    Ok(page["items"].as_array().cloned().unwrap_or_default())
}

async fn list(client: &QueueHttpClient, all: bool, format: crate::cli::Format) -> Result<Exit, CliError> {
    let states = if all { json!([]) } else { json!([["state", "in", ["Queued", "Locked", "Running"]]]) };
    let order = percent_encode(&json!(["priority desc", "created_at"]).to_string());
    let path = format!("containers?limit=1000&filters={}&order={order}", percent_encode(&states.to_string()));
    let found = fetch_items(client, &path).await?;
    if found.is_empty() && format == crate::cli::Format::Name {
        return Ok(Exit::Done);
    }
    let names: Vec<String> = found.iter().map(|one| field_text(one, "uuid")).collect();
    output::print_one(format, &json!({ "containers": found }), &names.join("\n"), |_| {
        if found.is_empty() {
            let more =
                if all { "" } else { " Run `windlass container list --all` to include finished ones." };
            return output::print_message(&format!("No containers.{more}"));
        }
        let mut table = Table::new(vec!["CONTAINER", "STATE", "PRIORITY", "IMAGE", "EXIT", "WHY"]);
        for one in &found {
            let reported = |name: &str| one["runtime_status"][name].as_str().map(str::to_owned);
            let why = reported("error").or_else(|| reported("activity"));
            let is_waiting = matches!(one["state"].as_str(), Some("Queued" | "Locked"));
            let scheduling = Some(field_text(one, "scheduling_status")).filter(|text| !text.is_empty());
            let why = why.or(scheduling).or_else(|| reported("warning").filter(|_| is_waiting));
            table.row(vec![
                field_text(one, "uuid").into(),
                Cell::status(field_text(one, "state")),
                field_text(one, "priority").into(),
                field_text(one, "container_image").into(),
                field_text(one, "exit_code").into(),
                why.unwrap_or_default().into(),
            ]);
        }
        table.print();
    })?;
    Ok(Exit::Done)
}

async fn show(client: &QueueHttpClient, uuid: &str, format: crate::cli::Format) -> Result<Exit, CliError> {
    let record = client.get(&format!("containers/{uuid}")).await.map_err(|error| queue_error(&error))?;
    let filters =
        percent_encode(&json!([["object_uuid", "=", uuid], ["event_type", "=", "dispatch"]]).to_string());
    let message = fetch_items(client, &format!("logs?filters={filters}&order=id&limit=100")).await?;
    let document = json!({ "container": record, "dispatch": message });
    output::print_one(format, &document, uuid, |_| {
        let mut facts = DetailView::new();
        facts.add("Container", uuid);
        facts.status("State", field_text(&record, "state"));
        for (name, attribute) in [
            ("Priority", "priority"),
            ("Attempt", "attempt"),
            ("Image", "container_image"),
            ("Command", "command"),
            ("Needs", "runtime_constraints"),
            ("Scheduling", "scheduling_status"),
            ("Locked by", "locked_by_uuid"),
            ("Started", "started_at"),
            ("Ended", "finished_at"),
            ("Exit code", "exit_code"),
        ] {
            facts.add(name, field_text(&record, attribute));
        }
        let reported = |name: &str| record["runtime_status"][name].as_str().unwrap_or_default();
        facts.add("Activity", reported("activity"));
        facts.add("Why", reported("error"));
        facts.add("Warning", reported("warning"));
        facts.add("Output", field_text(&record, "output"));
        facts.add("Usage", format_usage(&record["runtime_status"]["usage"]));
        for row in &message {
            let properties = &row["properties"];
            facts.add(
                "Dispatcher",
                format!(
                    "{} {}: {}",
                    field_text(row, "event_at"),
                    field_text(properties, "event"),
                    field_text(properties, "text")
                ),
            );
        }
        facts.print();
    })?;
    Ok(Exit::Done)
}

/// `cpu 1.2s, memory 36 MB, time 3.0s`, without the parts that are unknown.
fn format_usage(usage: &Value) -> String {
    let seconds = |name: &str| usage[name].as_f64().map(|us| us / 1e6);
    let cpu = seconds("cpu_us").map(|secs| format!("cpu {secs:.1} s"));
    let memory = usage["memory_peak"].as_u64().map(|bytes| format!("memory {} MB", bytes.div_ceil(1 << 20)));
    let wall = seconds("wall_us").map(|secs| format!("time {secs:.1} s"));
    let parts: Vec<String> = [cpu, memory, wall].into_iter().flatten().collect();
    parts.join(", ")
}

async fn logs(client: &QueueHttpClient, uuid: &str, stderr: bool) -> Result<Exit, CliError> {
    let stream = if stderr { "stderr" } else { "stdout" };
    let mut from = 0;
    loop {
        let path = format!("containers/{uuid}/output?stream={stream}&offset={from}");
        let bytes = client.get_bytes(&path).await.map_err(|error| queue_error(&error))?;
        if bytes.is_empty() || !output::write_raw(&bytes) {
            return Ok(Exit::Done);
        }
        from += bytes.len();
    }
}

/// Sets the priority of all requests for a container, which determines the priority of the container.
async fn set_priority(client: &QueueHttpClient, uuid: &str, priority: u64) -> Result<Exit, CliError> {
    let filters =
        percent_encode(&json!([["container_uuid", "=", uuid], ["state", "=", "Committed"]]).to_string());
    let requests = fetch_items(client, &format!("container_requests?filters={filters}&limit=1000")).await?;
    if requests.is_empty() {
        return Err(CliError::new(format!("no active request for container {uuid}"))
            .hint("run `windlass container` to list queued and running containers"));
    }
    for request in requests {
        let path = format!("container_requests/{}", field_text(&request, "uuid"));
        let change = json!({ "container_request": { "priority": priority } });
        client.put(&path, &change).await.map_err(|error| queue_error(&error))?;
    }
    output::print_message(&match priority {
        0 => format!(
            "Cancelled the requests for {uuid}; the container is stopped unless another request needs it."
        ),
        priority => format!("Set the priority of {uuid} to {priority}."),
    });
    Ok(Exit::Done)
}
