//! `windlass fleet`: commands on fleets and their instances.

use std::{path::PathBuf, time::Duration};

use serde_json::{Value, json};
use uuid::Uuid;
use windlass_api::{
    exports,
    fleets::{DeleteInstancesRequest, DeleteRequest, Fleet, ProjectListRequest, ReadRequest},
    instances::Instance,
    operations::{
        DeleteFleetInstances, DeleteFleets, ListExports, ListProjectFleets, ReadFleet, UpdateExport,
    },
    server::EmptyRequest,
};
use windlass_model::config::{Configuration, error};

use super::{
    apply,
    instance::{engine_error, processes, status_reason},
};
use crate::{
    cli::{Format, OutputArgs, ServerArgs, WatchArgs},
    context::{self, Context},
    error::CliError,
    exit::Exit,
    output::{
        self, ListView, format,
        table::{Cell, Table},
    },
};

const EXAMPLES: &str = "\
Examples:
  windlass fleet                          list fleets and their instances
  windlass fleet -w                       update the list when something changes
  windlass fleet get rack -o json         show the details of a fleet
  windlass fleet delete -i 2 rack         delete one instance of a fleet
  windlass fleet delete -y --wait rack    delete a fleet and wait until it is gone
  windlass fleet add -y local             create the fleet of the server's machine again
  windlass apply -f fleet.yml             create or update a fleet";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Option<Action>,
    #[command(flatten)]
    pub(crate) listing: WatchArgs,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// List fleets and their instances
    #[command(after_help = "Examples:\n  windlass fleet list -w")]
    List(WatchArgs),
    /// Show a fleet
    #[command(after_help = "Examples:\n  windlass fleet get rack -o json")]
    Get {
        /// Name of the fleet
        #[arg(value_name = "FLEET")]
        name: String,
    },
    /// Create the fleet of the machine that the server runs on again
    #[command(after_help = "Examples:\n  windlass fleet add -y local")]
    Add {
        /// `local`; create other fleets with `windlass apply -f FILE`
        #[arg(value_name = "NAME", value_parser = ["local"])]
        name: String,
        /// Skip the confirmation prompt
        #[arg(short, long)]
        yes: bool,
    },
    /// Delete fleets, or instances of a fleet
    #[command(
        after_help = "Examples:\n  windlass fleet delete -y --wait rack\n  windlass fleet delete -i 2 rack"
    )]
    Delete {
        /// Names of the fleets
        #[arg(required = true, value_name = "FLEET")]
        names: Vec<String>,
        /// Number of an instance to delete, instead of the whole fleet; may be repeated
        #[arg(short, long, value_name = "NUM")]
        instance: Vec<i64>,
        /// Skip the confirmation prompt
        #[arg(short, long)]
        yes: bool,
        /// Delete SSH hosts that do not respond without cleaning them up
        #[arg(long, conflicts_with = "instance")]
        force: bool,
        /// Wait until the deletion is complete
        #[arg(short, long)]
        wait: bool,
    },
}

const NO_FLEETS: &str = "No fleets. Run `windlass apply -f FILE` to create one.";
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Name of the fleet of the machine that the server runs on.
const LOCAL_FLEET: &str = "local";

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let format = args.output.format;
    let listing = match &args.action {
        Some(Action::List(listing)) => listing,
        _ => &args.listing,
    };
    if let Some(Action::Add { name, yes }) = &args.action {
        return add_local(args, name, *yes);
    }
    context::with_context(&args.at, async |cx| match &args.action {
        None | Some(Action::List(_)) => {
            let name = |fleet: &Fleet| fleet.name.clone();
            let list = ListView { project: Some(&cx.project), kind: "fleets", name, none: NO_FLEETS };
            if listing.watch || format != Format::Table {
                return list.show(format, listing.watch, async || list_named(cx, format).await, table).await;
            }
            let fleets = list_named(cx, format).await?;
            let exit = list.show(format, false, async || Ok(fleets.clone()), table).await?;
            print_unusable(&fleets);
            Ok(exit)
        }
        Some(Action::Get { name }) => {
            let fleet = find(cx, name).await?;
            output::print_one(format, &fleet, &fleet.name, |_| {
                show(std::slice::from_ref(&fleet), format);
                for line in process_modes(&fleet.instances) {
                    output::print_message(&output::printable(&line));
                }
            })?;
            Ok(Exit::Done)
        }
        Some(Action::Delete { names, instance, yes, force, wait }) => {
            delete_and_wait(cx, names, instance, DeleteOptions { yes: *yes, force: *force }, *wait).await
        }
        // Unreachable in practice: `add` is handled above.
        Some(Action::Add { .. }) => Ok(Exit::Done),
    })
}

/// Options for skipping the confirmation and the cleanup of hosts.
#[derive(Clone, Copy)]
pub(super) struct DeleteOptions {
    pub(super) yes: bool,
    pub(super) force: bool,
}

/// Deletes fleets, or instances of a fleet.
pub(super) async fn delete_and_wait(
    cx: &Context,
    names: &[String],
    nums: &[i64],
    sure: DeleteOptions,
    wait: bool,
) -> Result<Exit, CliError> {
    let fleets = request_delete(cx, names, nums, sure).await?;
    if fleets.is_empty() {
        return Ok(Exit::Failed);
    }
    if names.iter().any(|name| name == LOCAL_FLEET) && nums.is_empty() {
        output::print_message(
            "Run `windlass fleet add local` to create the fleet of the server's machine again.",
        );
    }
    if wait {
        wait_for_end(cx, &fleets, nums).await?;
        output::print_message("Deleted.");
    }
    Ok(Exit::Done)
}

/// Applies the fleet that a server creates only at its first start.
fn add_local(args: &Args, name: &str, yes: bool) -> Result<Exit, CliError> {
    let document = json!({
        "type": "fleet", "name": name, "backends": ["local"], "nodes": { "min": 1, "max": 1 },
        "blocks": "auto", "idle_duration": "off",
    });
    let configuration = Configuration::from_json(&document).map_err(|problems| {
        CliError::new("failed to create the fleet's configuration").why(error::summary(&problems))
    })?;
    let applied = apply::Args::plain(args.at.clone(), args.output, yes);
    let source =
        apply::with_overrides(&applied, "the command line".to_owned(), PathBuf::from("."), configuration)?;
    let exit = apply::submit(&applied, &source)?;
    if exit == Exit::Done {
        context::with_context(&args.at, async |cx| share_again(cx).await)?;
    }
    Ok(exit)
}

/// Adds the fleet to the export of the first start, which the deletion of the fleet left empty. If an admin deleted the
/// export, other projects are not to use the fleet.
async fn share_again(cx: &Context) -> Result<(), CliError> {
    let known = cx.call::<ListExports>(&EmptyRequest {}).await?.exports;
    let lacks_fleet = |export: &&exports::Export| {
        export.name == LOCAL_FLEET && export.exported_fleets.iter().all(|fleet| fleet.name != LOCAL_FLEET)
    };
    if known.iter().any(|export| lacks_fleet(&export)) {
        let request = exports::UpdateRequest {
            name: LOCAL_FLEET.to_owned(),
            add_exported_fleets: vec![LOCAL_FLEET.to_owned()],
            ..exports::UpdateRequest::default()
        };
        cx.call::<UpdateExport>(&request).await?;
        output::print_message("Other projects can use it again, by the export `local`.");
    }
    Ok(())
}

async fn list(cx: &Context) -> Result<Vec<Fleet>, CliError> {
    cx.call::<ListProjectFleets>(&ProjectListRequest { include_imported: true }).await
}

/// Fleets as people name them: `project/name` for one that another project shares.
async fn list_named(cx: &Context, format: Format) -> Result<Vec<Fleet>, CliError> {
    let mut fleets = list(cx).await?;
    if !matches!(format, Format::Json | Format::Jsonl | Format::Yaml) {
        for fleet in fleets.iter_mut().filter(|fleet| fleet.project_name != cx.project) {
            fleet.name = format!("{}/{}", fleet.project_name, fleet.name);
        }
    }
    Ok(fleets)
}

pub(crate) async fn find(cx: &Context, name: &str) -> Result<Fleet, CliError> {
    let request = ReadRequest { name: Some(name.to_owned()), id: None };
    match cx.try_call::<ReadFleet>(&request).await {
        Ok(fleet) => Ok(fleet),
        Err(error) if error.is_not_found() => {
            let all = list(cx).await?;
            Err(cx.unknown("fleet", name, all.iter().map(|fleet| fleet.name.as_str())))
        }
        Err(error) => Err(cx.explain(&error).await),
    }
}

/// Requests the deletion and returns the affected fleets; none if the user declines.
async fn request_delete(
    cx: &Context,
    names: &[String],
    nums: &[i64],
    sure: DeleteOptions,
) -> Result<Vec<Uuid>, CliError> {
    let mut fleets = Vec::new();
    for name in names {
        fleets.push(find(cx, name).await?.id);
    }
    let listed = names.join(", ");
    let what = match (names, nums) {
        (_, []) => listed,
        ([name], nums) => {
            let nums: Vec<String> = nums.iter().map(ToString::to_string).collect();
            format!("instance {} of {name}", nums.join(", "))
        }
        _ => return Err(CliError::usage("`-i` requires exactly one fleet, but several are given")),
    };
    if !output::confirm_delete(sure.yes, &what)? {
        return Ok(Vec::new());
    }
    match names {
        [name] if !nums.is_empty() => {
            let request = DeleteInstancesRequest { name: name.clone(), instance_nums: nums.to_vec() };
            cx.call::<DeleteFleetInstances>(&request).await?;
        }
        names => cx.call::<DeleteFleets>(&DeleteRequest { names: names.to_vec(), force: sure.force }).await?,
    }
    output::print_message(&format!("Deleting {what}."));
    Ok(fleets)
}

/// Waits until the fleets, or the given instances of the fleet, are no longer listed as alive.
async fn wait_for_end(cx: &Context, fleets: &[Uuid], nums: &[i64]) -> Result<(), CliError> {
    loop {
        let listed = list(cx).await?;
        let alive = listed.iter().filter(|fleet| fleets.contains(&fleet.id)).any(|fleet| {
            let mut instances = fleet.instances.iter();
            nums.is_empty()
                || instances.any(|one| nums.contains(&one.instance_num) && one.status != "terminated")
        });
        if !alive {
            return Ok(());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

pub(crate) fn show(fleets: &[Fleet], format: Format) {
    let table = table(fleets, format == Format::Wide);
    if format == Format::Wide {
        table.whole().print();
    } else {
        table.print();
        print_unusable(fleets);
    }
}

fn print_unusable(fleets: &[Fleet]) {
    for line in fleets.iter().flat_map(|fleet| &fleet.instances).filter_map(format_unusable_reason) {
        output::print_message(&output::printable(&line));
    }
}

/// Isolation of plain processes: one line if it is the same on all instances that reported it.
fn process_modes(instances: &[Instance]) -> Vec<String> {
    let modes: Vec<(&str, String)> = instances
        .iter()
        .filter_map(|instance| Some((instance.name.as_str(), processes(instance)?.to_string())))
        .collect();
    match modes.split_first() {
        None => Vec::new(),
        Some(((_, first), rest)) if rest.iter().all(|(_, mode)| mode == first) => {
            vec![format!("Plain processes: {first}")]
        }
        Some(_) => modes.iter().map(|(name, mode)| format!("{name}: plain processes: {mode}")).collect(),
    }
}

/// Reason why an instance cannot be used, or only without images, on a separate line because it is longer than a column.
fn format_unusable_reason(instance: &Instance) -> Option<String> {
    let is_hindered = instance.unreachable
        || engine_error(instance).is_some()
        || matches!(instance.status.as_str(), "pending" | "provisioning" | "terminating");
    let why = status_reason(instance);
    if !is_hindered || why.is_empty() {
        return None;
    }
    let host = instance.hostname.as_deref().map(|host| format!(" ({host})")).unwrap_or_default();
    Some(format!("{}{host}: {why}", instance.name))
}

fn table(fleets: &[Fleet], wide: bool) -> Table {
    let now = format::now();
    let mut table = if wide {
        Table::new([
            "NAME",
            "NODES",
            "RESOURCES",
            "INSTANCE",
            "BACKEND",
            "PRICE",
            "STATUS",
            "CREATED",
            "ERROR",
        ])
    } else {
        Table::new(["NAME", "NODES", "RESOURCES", "BACKEND", "PRICE", "STATUS", "CREATED"])
    };
    for fleet in fleets {
        let spec = fleet.spec.value().unwrap_or_default();
        let mut row: Vec<Cell> =
            vec![fleet.name.as_str().into(), format_nodes(&spec["configuration"]).into(), "".into()];
        if wide {
            row.push("".into());
        }
        row.extend([
            "".into(),
            "".into(),
            Cell::status(&fleet.status),
            format::ago(fleet.created_at, now).into(),
        ]);
        if wide {
            row.push(fleet.status_message.clone().unwrap_or_default().into());
        }
        table.row(row);
        for instance in fleet.instances.iter().filter(|instance| wide || instance.status != "terminated") {
            table.row(instance_row(instance, wide, now));
        }
    }
    table
}

/// `1..4`, or the number of hosts.
fn format_nodes(configuration: &Value) -> String {
    if let Some(hosts) = configuration["ssh_config"]["hosts"].as_array() {
        return hosts.len().to_string();
    }
    let (min, max) =
        (configuration["nodes"]["min"].as_i64().unwrap_or(0), configuration["nodes"]["max"].as_i64());
    match max {
        Some(max) if max == min => min.to_string(),
        Some(max) => format!("{min}..{max}"),
        None => format!("{min}.."),
    }
}

fn instance_row(instance: &Instance, wide: bool, now: windlass_model::time::Timestamp) -> Vec<Cell> {
    let kind = instance.instance_type.as_ref().and_then(|kind| kind.value().ok()).unwrap_or_default();
    let region = instance.region.as_deref().unwrap_or_default();
    let backend = instance.backend.as_deref().map(|name| format::backend(name, region)).unwrap_or_default();
    let mut row: Vec<Cell> = vec![
        format!("  instance={}", instance.instance_num).into(),
        "".into(),
        format::resources(&kind["resources"]).into(),
    ];
    if wide {
        row.push(kind["name"].as_str().unwrap_or_default().into());
    }
    row.extend([
        backend.into(),
        instance.price.map(format::price).unwrap_or_default().into(),
        Cell::status(format_status(instance)),
        format::ago(instance.created, now).into(),
    ]);
    if wide {
        row.push(status_reason(instance).into());
    }
    row
}

/// `2/8 busy` for a shared instance, followed by its problems.
pub(crate) fn format_status(instance: &Instance) -> String {
    let mut text = match instance.total_blocks {
        Some(total) if total > 1 && instance.status == "busy" => {
            format!("{}/{total} busy", instance.busy_blocks)
        }
        Some(_) | None => instance.status.clone(),
    };
    if instance.unreachable {
        text.push_str(" (unreachable)");
    }
    if instance.health_status != "healthy" && !instance.health_status.is_empty() {
        text = format!("{text} ({})", instance.health_status);
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Instance, format_unusable_reason, process_modes};

    fn instance(status: &str, message: Option<&str>, unreachable: bool) -> Instance {
        serde_json::from_value(json!({
            "id": uuid::Uuid::nil(), "project_name": "main", "name": "rack-0", "instance_num": 0, "hostname": "10.0.0.7",
            "status": status, "status_message": message, "unreachable": unreachable, "health_status": "healthy",
            "created": "2026-01-01T00:00:00Z",
        }))
        .unwrap()
    }

    #[test]
    fn an_unready_or_unreachable_host_shows_the_reason() {
        let why = "connect to 10.0.0.7: no route to host";
        let text = format!("rack-0 (10.0.0.7): {why}");
        assert_eq!(format_unusable_reason(&instance("pending", Some(why), false)), Some(text.clone()));
        assert_eq!(format_unusable_reason(&instance("idle", Some(why), true)), Some(text));
        assert_eq!(format_unusable_reason(&instance("idle", None, false)), None);
        assert_eq!(format_unusable_reason(&instance("pending", None, false)), None);
    }

    #[test]
    fn the_isolation_of_plain_processes_is_shown_once_or_for_each_instance() {
        let with = |name: &str, processes: serde_json::Value| {
            let mut instance = instance("idle", None, false);
            instance.name = name.to_owned();
            let kind = json!({ "name": "x", "processes": processes });
            instance.instance_type = Some(windlass_api::Document::new(&kind).unwrap());
            instance
        };
        let confined = || json!({ "mode": "confined", "confined_by": "users" });
        let same = [with("a", confined()), with("b", confined()), instance("pending", None, false)];
        let [line] = &process_modes(&same)[..] else { panic!("one line") };
        assert_eq!(line, "Plain processes: confined (own user)");
        let different = [with("a", confined()), with("b", json!({ "mode": "refused" }))];
        let lines = process_modes(&different);
        assert_eq!(lines, ["a: plain processes: confined (own user)", "b: plain processes: refused"]);
        assert!(process_modes(&[]).is_empty());
    }
}
