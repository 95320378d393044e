//! `windlass event`: events with their targets and actors, oldest first.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use uuid::Uuid;
use windlass_api::{
    events::{Event, ListRequest},
    operations::{ListEvents, ReadProject},
    server::EmptyRequest,
};
use windlass_model::time::{Span, Timestamp};

use super::{fleet, gateway, instance, logs::parse_since, secret, volume};
use crate::{
    cli::{Format, OutputArgs, ServerArgs},
    context::{self, Context},
    error::CliError,
    exit::Exit,
    output::{
        self, ListView, format,
        style::{Colour, Style},
        table::{Cell, Table},
    },
};

const PAGE: i64 = 100;
/// Maximum number of events that `--since` shows.
const SINCE_MAX: usize = 10_000;
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Transactions do not commit in the order of their event times. Each poll therefore overlaps the previous one by this
/// span, and skips events that were already shown.
const OVERLAP: Span = Span::secs(5);

const EXAMPLES: &str = "\
Examples:
  windlass event                            show the newest events, oldest first
  windlass event -f                         also follow new events
  windlass event --since 1h --target-run train
  windlass event --within-fleet rack -o jsonl | jq .message

`--target-…` selects events about the resource itself, `--within-…` also those about its jobs or instances.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// `list`, accepted for consistency with the other nouns
    #[arg(hide = true, value_parser = ["list"])]
    verb: Option<String>,
    /// Follow new events
    #[arg(short, long, visible_short_alias = 'w')]
    pub(crate) follow: bool,
    /// Start time: `10s`, `5m`, `1d` ago, or a time such as `2026-11-20T09:00:00Z`
    #[arg(long, value_name = "WHEN")]
    pub(crate) since: Option<String>,
    /// Number of events, newest
    #[arg(short = 'n', long, value_name = "N", default_value_t = 50, conflicts_with = "since",
          value_parser = clap::value_parser!(u16).range(0..=100))]
    pub(crate) last: u16,
    #[command(flatten)]
    pub(crate) about: TargetArgs,
    /// Type of a target to filter by, such as `job` or `instance`; may be repeated
    #[arg(long, value_name = "TYPE")]
    pub(crate) include_target_type: Vec<String>,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Filters by target.
#[derive(Debug, clap::Args)]
#[group(multiple = false)]
pub(crate) struct TargetArgs {
    /// Events about this run; like the other filters, may be repeated
    #[arg(long, value_name = "RUN", help_heading = "About")]
    pub(crate) target_run: Vec<String>,
    /// Events about this fleet
    #[arg(long, value_name = "FLEET", help_heading = "About")]
    pub(crate) target_fleet: Vec<String>,
    /// Events about this instance
    #[arg(long, value_name = "INSTANCE", help_heading = "About")]
    pub(crate) target_instance: Vec<String>,
    /// Events about this volume
    #[arg(long, value_name = "VOLUME", help_heading = "About")]
    pub(crate) target_volume: Vec<String>,
    /// Events about this gateway
    #[arg(long, value_name = "GATEWAY", help_heading = "About")]
    pub(crate) target_gateway: Vec<String>,
    /// Events about this secret
    #[arg(long, value_name = "SECRET", help_heading = "About")]
    pub(crate) target_secret: Vec<String>,
    /// Events about this run and its jobs
    #[arg(long, value_name = "RUN", help_heading = "About")]
    pub(crate) within_run: Vec<String>,
    /// Events about this fleet and its instances
    #[arg(long, value_name = "FLEET", help_heading = "About")]
    pub(crate) within_fleet: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let from = args.since.as_deref().map(parse_since).transpose()?;
    if args.follow && args.output.format == Format::Json {
        return Err(CliError::usage("`-f` cannot be used with `-o json`: its output has no end")
            .hint("use `-o jsonl`"));
    }
    context::with_context(&args.at, async |cx| {
        let requested = build_request(cx, args).await?;
        let events = match from {
            Some(from) => fetch_after(cx, &requested, from).await?,
            None => fetch_newest(cx, &requested, args.last.into()).await?,
        };
        if !args.follow {
            let name = |event: &Event| event.id.to_string();
            ListView { project: Some(&cx.project), kind: "events", name, none: "No events." }.print(
                &events,
                args.output.format,
                |wide| table(&events, wide),
            )?;
            return Ok(Exit::Done);
        }
        print_events(&events, args.output.format)?;
        // The feed starts after the last event, so fetch it even if it is not shown.
        let last = if events.is_empty() { fetch_newest(cx, &requested, 1).await? } else { events };
        let mut feed = EventFeed::after(requested, &last);
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            print_events(&feed.poll(cx).await?, args.output.format)?;
        }
    })
}

/// Builds the request; resolves names to IDs.
async fn build_request(cx: &Context, args: &Args) -> Result<ListRequest, CliError> {
    let about = &args.about;
    let mut request = ListRequest { limit: PAGE, ..ListRequest::default() };
    let runs = async |names: &[String]| -> Result<Option<Vec<Uuid>>, CliError> {
        let mut ids = Vec::new();
        for name in names {
            ids.push(cx.run(name).await?.id);
        }
        Ok((!ids.is_empty()).then_some(ids))
    };
    let fleets = async |names: &[String]| -> Result<Option<Vec<Uuid>>, CliError> {
        let mut ids = Vec::new();
        for name in names {
            ids.push(fleet::find(cx, name).await?.id);
        }
        Ok((!ids.is_empty()).then_some(ids))
    };
    request.target_runs = runs(&about.target_run).await?;
    request.within_runs = runs(&about.within_run).await?;
    request.target_fleets = fleets(&about.target_fleet).await?;
    request.within_fleets = fleets(&about.within_fleet).await?;
    for name in &about.target_instance {
        request.target_instances.get_or_insert_default().push(instance::find(cx, name).await?.id);
    }
    for name in &about.target_volume {
        request.target_volumes.get_or_insert_default().push(volume::find(cx, name).await?.id);
    }
    for name in &about.target_gateway {
        request.target_gateways.get_or_insert_default().push(gateway::find(cx, name).await?.id);
    }
    for name in &about.target_secret {
        request.target_secrets.get_or_insert_default().push(secret::find(cx, name).await?.id);
    }
    // Limit to the project, unless a run or a fleet of the project limits it already.
    if request.within_runs.is_none() && request.within_fleets.is_none() {
        request.within_projects = Some(vec![cx.call::<ReadProject>(&EmptyRequest {}).await?.project_id]);
    }
    request.include_target_types =
        (!args.include_target_type.is_empty()).then(|| args.include_target_type.clone());
    Ok(request)
}

/// Request for all events of the project.
pub(crate) async fn project_request(cx: &Context) -> Result<ListRequest, CliError> {
    let project = cx.call::<ReadProject>(&EmptyRequest {}).await?.project_id;
    Ok(ListRequest { within_projects: Some(vec![project]), limit: PAGE, ..ListRequest::default() })
}

pub(crate) async fn fetch_newest(
    cx: &Context,
    requested: &ListRequest,
    count: i64,
) -> Result<Vec<Event>, CliError> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let mut events = cx.call::<ListEvents>(&ListRequest { limit: count, ..requested.clone() }).await?;
    events.reverse();
    Ok(events)
}

/// Returns the events from a time on, page by page.
async fn fetch_after(cx: &Context, requested: &ListRequest, from: Timestamp) -> Result<Vec<Event>, CliError> {
    let mut request = ListRequest { ascending: true, prev_recorded_at: Some(from), ..requested.clone() };
    let mut all: Vec<Event> = Vec::new();
    loop {
        let page = cx.call_with_retry::<ListEvents>(&request).await?;
        let full = i64::try_from(page.len()) == Ok(request.limit);
        all.extend(page);
        let Some(last) = all.last().filter(|_| full) else { return Ok(all) };
        if all.len() >= SINCE_MAX {
            output::print_message(&format!(
                "Showing the first {SINCE_MAX} events; use a later `--since` to see the rest."
            ));
            return Ok(all);
        }
        (request.prev_recorded_at, request.prev_id) = (Some(last.recorded_at), Some(last.id));
    }
}

/// Stream of new events, each returned once.
pub(crate) struct EventFeed {
    requested: ListRequest,
    from: Timestamp,
    /// Times of the recently shown events.
    shown: BTreeMap<Uuid, Timestamp>,
}

impl EventFeed {
    /// Starts at the last of these events, or at the beginning if there are none.
    pub(crate) fn after(requested: ListRequest, events: &[Event]) -> Self {
        let mut feed = Self { requested, from: Timestamp(0), shown: BTreeMap::new() };
        feed.mark_shown(events);
        feed
    }

    fn mark_shown(&mut self, events: &[Event]) {
        if let Some(newest) = events.iter().map(|event| event.recorded_at).max() {
            self.from = self.from.max(newest - OVERLAP);
        }
        self.shown.extend(events.iter().map(|event| (event.id, event.recorded_at)));
        // Events at exactly this time are not requested again.
        let from = self.from;
        self.shown.retain(|_, at| *at > from);
    }

    /// Returns new events. Waits for a server that restarts.
    pub(crate) async fn poll(&mut self, cx: &Context) -> Result<Vec<Event>, CliError> {
        let mut events = fetch_after(cx, &self.requested, self.from).await?;
        let known: BTreeSet<Uuid> = self.shown.keys().copied().collect();
        events.retain(|event| !known.contains(&event.id));
        self.mark_shown(&events);
        Ok(events)
    }
}

/// `2026-11-20 09:00:01`, UTC.
pub(crate) fn format_time(event: &Event) -> String {
    event.recorded_at.to_string().chars().take(19).collect::<String>().replace('T', " ")
}

/// `run train, job train-0-0`.
pub(crate) fn format_targets(event: &Event) -> String {
    let named = |target: &windlass_api::events::Target| format!("{} {}", target.r#type, target.name);
    event.targets.iter().map(named).collect::<Vec<_>>().join(", ")
}

pub(crate) fn actor_name(event: &Event) -> &str {
    event.actor_user.as_deref().unwrap_or("system")
}

/// Prints line by line, without column widths: the width of later events is unknown.
fn print_events(events: &[Event], format: Format) -> Result<(), CliError> {
    let style = Style::stdout();
    match format {
        Format::Json | Format::Jsonl => output::print_jsonl(events)?,
        Format::Yaml => output::print_yaml_stream(events)?,
        Format::Name => events.iter().for_each(|event| output::print_data(&event.id.to_string())),
        Format::Table | Format::Wide => events.iter().for_each(|event| {
            let line = format!("{:<10}  {:<28}  {}", actor_name(event), format_targets(event), event.message);
            let line = output::printable(&line).replace(['\n', '\t'], " ");
            output::print_data(&format!("{}  {line}", style.paint(Colour::Dim, &format_time(event))));
        }),
    }
    Ok(())
}

fn table(events: &[Event], wide: bool) -> Table {
    let mut head = vec!["TIME", "BY", "ABOUT", "MESSAGE"];
    if wide {
        head.extend(["AGO", "ID"]);
    }
    let mut table = Table::new(head);
    let now = format::now();
    for event in events {
        let mut row = vec![
            Cell::coloured(format_time(event), Colour::Dim),
            actor_name(event).into(),
            format_targets(event).into(),
            event.message.as_str().into(),
        ];
        if wide {
            row.extend([format::ago(event.recorded_at, now).into(), event.id.to_string().into()]);
        }
        table.row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::{Event, EventFeed, ListRequest, Timestamp, Uuid};

    fn event(id: u128, secs: i64) -> Event {
        Event {
            id: Uuid::from_u128(id),
            message: String::new(),
            recorded_at: Timestamp::from_secs(secs),
            actor_user_id: None,
            actor_user: None,
            is_actor_user_deleted: None,
            targets: Vec::new(),
            details: None,
        }
    }

    #[test]
    fn event_feed_overlaps_to_catch_late_events_and_skips_shown_ones() {
        let mut feed = EventFeed::after(ListRequest::default(), &[event(1, 90), event(2, 100)]);
        // The overlap reaches back this far and no further.
        assert_eq!((feed.from, feed.shown.len()), (Timestamp::from_secs(95), 1));
        feed.mark_shown(&[event(3, 97)]);
        assert_eq!((feed.from, feed.shown.len()), (Timestamp::from_secs(95), 2));
        feed.mark_shown(&[event(4, 200)]);
        assert_eq!((feed.from, feed.shown.len()), (Timestamp::from_secs(195), 1));
        assert_eq!(EventFeed::after(ListRequest::default(), &[]).from, Timestamp(0));
    }
}
