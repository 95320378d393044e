//! `windlass queue`: the runs that wait for instances, in the order in which they start.

use windlass_api::{
    explanations::{QueueEntry, QueueList},
    operations::ListQueue,
    server::EmptyRequest,
};
use windlass_model::time::Timestamp;

use super::why::format_rule;
use crate::{
    cli::{OutputArgs, ServerArgs, WatchArgs},
    context::{self, Context},
    error::CliError,
    exit::Exit,
    output::{self, ListView, format, table::Table},
};

const EXAMPLES: &str = "\
Examples:
  windlass queue                list the runs that wait, with the start of each as far as it can be foreseen
  windlass queue -o wide        also what each of them waits for
  windlass queue -w             update the table when it changes
  windlass queue -o json

The list has the runs of all your projects, and those of other projects that share fleets with them. Projects that share
no fleets have separate queues; QUEUE is shown if there are several. RULE is the rule by which a run comes after the one
before it. STARTS assumes that all jobs last until their time limits.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) watch: WatchArgs,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    context::with_context(&args.at, async |cx| {
        let none = "No run waits for an instance.";
        let name = |entry: &QueueEntry| format_name(entry);
        let view = ListView { project: None, kind: "queue", name, none };
        view.show(
            args.output.format,
            args.watch.watch,
            async || list(cx).await,
            |rows, wide| table(rows, wide, format::now()),
        )
        .await
    })
}

async fn list(cx: &Context) -> Result<Vec<QueueEntry>, CliError> {
    let QueueList { mut entries, .. } = cx.call::<ListQueue>(&EmptyRequest {}).await?;
    // Each queue as a whole: the server lists all runs in one order.
    entries.sort_by_key(|entry| entry.queue);
    Ok(entries)
}

/// `project/run`; runs of projects that the caller may not see have no name.
fn format_name(entry: &QueueEntry) -> String {
    match (&entry.project, &entry.run) {
        (Some(project), Some(run)) => format!("{project}/{run}"),
        (..) => "(another project)".to_owned(),
    }
}

fn table(entries: &[QueueEntry], wide: bool, now: Timestamp) -> Table {
    let has_several = entries.iter().any(|entry| entry.queue > 0);
    let mut head = if has_several { vec!["QUEUE"] } else { Vec::new() };
    head.extend(["AHEAD", "RUN", "USER", "CLASS", "WANTS", "WAITS", "STARTS", "RULE"]);
    if wide {
        head.push("NEAREST");
    }
    let mut table = Table::new(head);
    for entry in entries {
        let starts = entry.turn.as_ref().and_then(|turn| turn.starts_at).map(|at| {
            if at <= now { "now".to_owned() } else { format!("in {}", format::span(at.since(now))) }
        });
        let queue = (entry.queue + 1).to_string();
        let mut row = if has_several { vec![queue.into()] } else { Vec::new() };
        row.extend([
            entry.position.to_string().into(),
            output::printable(&format_name(entry)).into(),
            output::printable(entry.user.as_deref().unwrap_or_default()).into(),
            entry.class.clone().into(),
            output::printable(&entry.requested).into(),
            format::span(now.since(entry.waits_since)).into(),
            starts.unwrap_or_default().into(),
            entry.rule.as_deref().map(format_rule).unwrap_or_default().into(),
        ]);
        if wide {
            let nearest = entry.nearest.as_ref().map(|miss| format!("{}: {}", miss.place, miss.message));
            row.push(output::printable(&nearest.unwrap_or_default()).into());
        }
        table.row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use windlass_api::explanations::QueueEntry;
    use windlass_model::time::Timestamp;

    use super::table;
    use crate::output::style::Style;

    #[test]
    fn the_queue_shows_the_order_its_rules_and_foreseen_starts_without_hidden_names() {
        let turn = json!({"position": 1, "length": 2, "class": "normal", "priority": 0, "is_within_share": false,
            "quotas": [], "usage": 0.0, "weight": 1, "in_front": [], "reserved": [], "sentences": [],
            "starts_at": "2026-11-19T10:30:00Z"});
        let entry = |more: serde_json::Value| -> QueueEntry {
            let mut entry = json!({"position": 0, "project": null, "run": null, "run_id": null, "user": null, "type": null,
                "mine": false, "wants": "1 × GPU", "waits_since": "2026-11-19T09:00:00Z", "nearest": null,
                "passes": true, "blocked_by": [], "class": "urgent"});
            entry.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            serde_json::from_value(entry).unwrap()
        };
        let nearest = json!({"place": "gpu-0", "message": "is busy", "cure": "", "patch": null});
        let mine = json!({"position": 1, "project": "main", "run": "train", "user": "ada", "mine": true,
            "class": "normal", "rule": "class", "turn": turn, "nearest": nearest});
        let entries = [entry(json!({})), entry(mine)];
        let now = Timestamp::from_secs(1_795_082_400);
        let lines = table(&entries, true, now).lines(Style::plain());
        assert!(lines[1].starts_with("0") && lines[1].contains("(another project)"), "{lines:?}");
        assert!(lines[2].contains("main/train") && lines[2].contains("higher class"), "{lines:?}");
        assert!(lines[2].contains("in 30 min") && lines[2].ends_with("gpu-0: is busy"), "{lines:?}");
        assert!(!lines[0].contains("QUEUE"), "there is one queue: {lines:?}");
        let lines = table(&[entry(json!({})), entry(json!({"queue": 1}))], false, now).lines(Style::plain());
        assert!(lines[0].starts_with("QUEUE  AHEAD"), "{lines:?}");
        assert!(lines[1].starts_with("1 ") && lines[2].starts_with("2 "), "{lines:?}");
    }
}
