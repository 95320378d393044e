//! `windlass instance`: instances of the project, with their state and their jobs.

use serde_json::Value;
use uuid::Uuid;
use windlass_api::{
    agent::shim::ProcessesInfo,
    instances::{Instance, ListRequest, ReadRequest},
    operations::{ListInstances, ReadInstance},
};
use windlass_backend::processes_from;
use windlass_model::plan::execution_mode::ProcessSupport;

use super::instance_status;
use crate::{
    cli::{OutputArgs, ServerArgs, WatchArgs},
    context::{self, Context},
    error::CliError,
    exit::Exit,
    output::{
        self, ListView,
        detail_view::DetailView,
        format,
        table::{Cell, Table},
    },
};

const PAGE: i64 = 1000;

const EXAMPLES: &str = "\
Examples:
  windlass instance                   list instances with their status
  windlass instance --fleet rack -a   list all instances of a fleet, including terminated ones
  windlass instance get rack-0        show the details of an instance, such as why it is unreachable
  windlass fleet delete -i 0 rack     delete an instance";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Option<Action>,
    #[command(flatten)]
    pub(crate) listing: ListArgs,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Filters and repetition of the list.
#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// Include terminated instances
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Fleet to filter by; may be repeated
    #[arg(long, value_name = "FLEET")]
    pub(crate) fleet: Vec<String>,
    #[command(flatten)]
    pub(crate) often: WatchArgs,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// List instances
    #[command(after_help = "Examples:\n  windlass instance list -a")]
    List(ListArgs),
    /// Show an instance by name or ID
    #[command(after_help = "Examples:\n  windlass instance get rack-0")]
    Get {
        /// Name or ID of the instance
        #[arg(value_name = "INSTANCE")]
        name: String,
    },
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let format = args.output.format;
    let listing = match &args.action {
        Some(Action::List(listing)) => listing,
        _ => &args.listing,
    };
    context::with_context(&args.at, async |cx| match &args.action {
        None | Some(Action::List(_)) => {
            let none = "No instances. Run `windlass apply -f FLEET.yml` to create a fleet.";
            let name = |instance: &Instance| instance.name.clone();
            let list = ListView { project: Some(&cx.project), kind: "instances", name, none };
            list.show(format, listing.often.watch, async || list_selected(cx, listing).await, table).await
        }
        Some(Action::Get { name }) => {
            let instance = find(cx, name).await?;
            output::print_one(format, &instance, &instance.name, |_| facts(&instance).print())?;
            Ok(Exit::Done)
        }
    })
}

async fn list_selected(cx: &Context, requested: &ListArgs) -> Result<Vec<Instance>, CliError> {
    let mut fleets = Vec::new();
    for name in &requested.fleet {
        fleets.push(super::fleet::find(cx, name).await?.id);
    }
    list(cx, !requested.all, (!fleets.is_empty()).then_some(fleets)).await
}

/// Returns one page of the project's instances, which is more than a screen.
pub(crate) async fn list(
    cx: &Context,
    only_active: bool,
    fleet_ids: Option<Vec<Uuid>>,
) -> Result<Vec<Instance>, CliError> {
    let request = ListRequest {
        project_names: Some(vec![cx.project.clone()]),
        fleet_ids,
        only_active,
        limit: PAGE,
        ..ListRequest::default()
    };
    cx.call::<ListInstances>(&request).await
}

/// Finds an instance by name or ID. Prefers an active one to a terminated one.
pub(crate) async fn find(cx: &Context, name: &str) -> Result<Instance, CliError> {
    if let Ok(id) = name.parse::<Uuid>() {
        match cx.try_call::<ReadInstance>(&ReadRequest { id }).await {
            Ok(instance) => return Ok(instance),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(cx.explain(&error).await),
        }
    }
    let mut all = list(cx, false, None).await?;
    all.sort_by_key(|instance| instance.status == "terminated");
    match all.iter().position(|instance| instance.name == name) {
        Some(at) => Ok(all.swap_remove(at)),
        None => Err(cx.unknown("instance", name, all.iter().map(|instance| instance.name.as_str()))),
    }
}

fn instance_type(instance: &Instance) -> Value {
    instance.instance_type.as_ref().and_then(|kind| kind.value().ok()).unwrap_or_default()
}

pub(crate) fn format_backend(instance: &Instance) -> &str {
    let region = instance.region.as_deref().unwrap_or_default();
    instance.backend.as_deref().map(|name| format::backend(name, region)).unwrap_or_default()
}

pub(crate) fn format_resources(instance: &Instance) -> String {
    format::resources(&instance_type(instance)["resources"])
}

/// `2/8`; empty for an instance that is not divided.
fn format_blocks(instance: &Instance) -> String {
    match instance.total_blocks {
        Some(total) if total > 1 => format!("{}/{total}", instance.busy_blocks),
        Some(_) | None => String::new(),
    }
}

/// Problem of an instance, or the reason why it ended.
pub(crate) fn status_reason(instance: &Instance) -> String {
    let ended = instance.termination_reason_message.clone().or_else(|| instance.termination_reason.clone());
    let engine = || engine_error(instance).map(|why| format!("its container engine is not available: {why}"));
    ended.or_else(|| instance.status_message.clone()).or_else(engine).unwrap_or_default()
}

/// Reason why its container engine does not respond.
pub(crate) fn engine_error(instance: &Instance) -> Option<String> {
    instance_type(instance)["engine_away"].as_str().map(str::to_owned)
}

/// Isolation of plain processes on an instance; `None` if its agent has not reported it.
pub(crate) fn processes(instance: &Instance) -> Option<ProcessSupport> {
    let kind = instance_type(instance);
    if kind["runtime"] == "docker" {
        return Some(ProcessSupport::None);
    }
    let reported: ProcessesInfo = serde_json::from_value(kind["processes"].clone()).ok()?;
    Some(processes_from(Some(&reported), reported.mode))
}

pub(crate) fn facts(instance: &Instance) -> DetailView {
    let now = format::now();
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let ago = |time: Option<_>| time.map(|time| format::ago(time, now)).unwrap_or_default();
    let mut facts = DetailView::new();
    facts.add("Name", &instance.name);
    facts.status("Status", instance_status(instance));
    facts.add("Why", status_reason(instance));
    if instance.unreachable {
        facts.add("Unreachable", ago(instance.unreachable_since));
        facts.add("Hint", unreachable_hint(instance));
    }
    facts.add("Last seen", ago(instance.seen_at));
    facts.add("Health", &instance.health_status);
    facts.add("Fleet", text(&instance.fleet_name));
    facts.add("Job", text(&instance.job_name));
    facts.add("Blocks", format_blocks(instance));
    facts.add("Backend", format_backend(instance));
    facts.add("Region", text(&instance.region));
    facts.add("Host", text(&instance.hostname));
    facts.add("Type", instance_type(instance)["name"].as_str().unwrap_or_default());
    facts.add("Resources", format_resources(instance));
    facts
        .add("Engine", engine_error(instance).map(|why| format!("not available: {why}")).unwrap_or_default());
    facts.add("Plain processes", processes(instance).map(|them| them.to_string()).unwrap_or_default());
    facts.add("Driver", instance.gpu_driver.as_ref().map(|gpu| gpu.version.clone()).unwrap_or_default());
    facts.add("Agent", text(&instance.agent_version));
    facts.add("Price", instance.price.map(format::price).unwrap_or_default());
    facts.add("Created", instance.created.to_string());
    facts.add("Id", instance.id.to_string());
    facts
}

fn unreachable_hint(instance: &Instance) -> String {
    match instance.hostname.as_deref() {
        Some(host) if format_backend(instance) == "ssh" => {
            format!("check that the host is up and that `ssh {host}` works from the server")
        }
        Some(_) | None => "run `windlass event --within-fleet FLEET` to see what happened to it".to_owned(),
    }
}

fn table(instances: &[Instance], wide: bool) -> Table {
    let now = format::now();
    let mut head = vec!["NAME", "FLEET", "BACKEND", "RESOURCES", "PRICE", "STATUS", "JOB"];
    let has_messages = instances.iter().any(|instance| !status_reason(instance).is_empty());
    if wide {
        head.extend(["BLOCKS", "TYPE", "HOST", "REGION", "DRIVER", "SEEN", "CREATED", "ERROR"]);
    } else if has_messages {
        head.push("MESSAGE");
    }
    let mut table = Table::new(head);
    for instance in instances {
        let text = |value: &Option<String>| Cell::from(value.clone().unwrap_or_default());
        let mut row = vec![
            instance.name.as_str().into(),
            text(&instance.fleet_name),
            format_backend(instance).into(),
            format_resources(instance).into(),
            instance.price.map(format::price).unwrap_or_default().into(),
            Cell::status(instance_status(instance)),
            text(&instance.job_name),
        ];
        if wide {
            let driver = instance.gpu_driver.as_ref().map(|driver| driver.version.clone());
            row.extend([
                format_blocks(instance).into(),
                instance_type(instance)["name"].as_str().unwrap_or_default().into(),
                text(&instance.hostname),
                text(&instance.region),
                text(&driver),
                instance.seen_at.map(|time| format::ago(time, now)).unwrap_or_default().into(),
                format::ago(instance.created, now).into(),
                status_reason(instance).into(),
            ]);
        } else if has_messages {
            row.push(status_reason(instance).into());
        }
        table.row(row);
    }
    table
}
