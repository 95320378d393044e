//! Rows and messages of the changes that some events describe.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use uuid::Uuid;
use windlass_api::{
    changes::{FeedChange, FeedEvent, FeedGone, FeedRow},
    rows::{ContainerRow, ManagedJobRow},
};
use windlass_model::id::{InstanceId, ProjectId, RunId};

use super::FeedItem;
use crate::{
    app::App,
    db::{changes, projects},
    error::Result,
    services::rows,
};

/// Kinds of the feed, by entity of the event.
fn kind_of(entity: &str) -> Option<&'static str> {
    const KINDS: [&str; 7] = ["run", "job", "instance", "fleet", "volume", "gateway", "managed-job"];
    KINDS.into_iter().find(|kind| *kind == entity)
}

/// All changes of one object within a batch.
struct Change {
    project: Option<ProjectId>,
    seq: u64,
    name: String,
    from: Option<String>,
    to: Option<String>,
    reason: Option<String>,
    message: Option<String>,
}

impl Change {
    fn without_event(project: Option<ProjectId>, seq: u64) -> Self {
        let (from, to, reason, message) = (None, None, None, None);
        Self { project, seq, name: String::new(), from, to, reason, message }
    }
}

type Changes = BTreeMap<(&'static str, Uuid), Change>;

/// Merges events by object: the first status before, and the last after.
fn merge(events: Vec<changes::FeedEvent>) -> Changes {
    let mut merged = Changes::new();
    for event in events {
        let Some(kind) = kind_of(&event.entity) else { continue };
        let seq = u64::try_from(event.seq).unwrap_or(0);
        let change = merged.entry((kind, event.entity_id)).or_insert_with(|| Change {
            from: event.from_status,
            ..Change::without_event(event.project_id, seq)
        });
        change.seq = change.seq.max(seq);
        change.to = event.to_status.or(change.to.take());
        change.name = event.name.unwrap_or_default();
        (change.reason, change.message) = (event.reason, Some(event.message));
    }
    merged
}

/// Items for readers. Objects that depend on a job change with it.
pub(super) async fn items(app: &App, events: Vec<changes::FeedEvent>, seq: u64) -> Result<Vec<FeedItem>> {
    if events.is_empty() {
        return Ok(Vec::new());
    }
    let mut merged = merge(events);
    let of_kind = |merged: &Changes, kind: &str| -> Vec<Uuid> {
        merged.keys().filter(|(one, _)| *one == kind).map(|(_, id)| *id).collect()
    };
    for link in changes::job_links(app.db(), &of_kind(&merged, "job")).await? {
        let project = merged.get(&("job", link.id)).and_then(|change| change.project);
        merged.entry(("run", link.run_id.0)).or_insert_with(|| Change::without_event(project, seq));
        if let Some(instance) = link.instance_id {
            merged.entry(("instance", instance.0)).or_insert_with(|| Change::without_event(project, seq));
        }
    }
    let as_of = app.db().now().await?.0;
    let mut found = find_rows(app, &of_kind(&merged, "run"), &of_kind(&merged, "instance")).await?;
    let tasks = task_rows(app, &of_kind(&merged, "managed-job")).await?;
    let ids: BTreeSet<ProjectId> = merged.values().filter_map(|change| change.project).collect();
    let names = projects::names(app.db(), &ids.into_iter().collect::<Vec<_>>()).await?;
    let mut items = Vec::new();
    for ((kind, id), change) in merged {
        let (project, seq) = (change.project, change.seq);
        let project_name = project.and_then(|id| names.get(&id).cloned()).unwrap_or_default();
        let with_row = |id: String, name: String, row: Option<FeedRow>| {
            FeedEvent::Change(Box::new(FeedChange {
                seq,
                as_of,
                kind: kind.to_owned(),
                id,
                project: project_name.clone(),
                name,
                from: change.from.clone(),
                to: change.to.clone(),
                reason: change.reason.clone(),
                message: change.message.clone(),
                row,
            }))
        };
        let mut push = |event: FeedEvent| items.push(FeedItem { seq, kind, project, owner: None, event });
        match kind {
            "run" | "instance" => match found.remove(&id) {
                Some((name, row)) => push(with_row(id.to_string(), name, Some(row))),
                None => {
                    push(FeedEvent::Gone(FeedGone { seq, as_of, kind: kind.to_owned(), id: id.to_string() }))
                }
            },
            "managed-job" => {
                for row in tasks.get(&id).into_iter().flatten() {
                    let row = FeedRow::ManagedJob(Box::new(row.clone()));
                    let FeedRow::ManagedJob(task) = &row else { continue };
                    let (id, name) = (task.id.clone(), task.name.clone());
                    push(with_row(id, name, Some(row)));
                }
            }
            _ => push(with_row(id.to_string(), change.name.clone(), None)),
        }
    }
    items.sort_by_key(|item| item.seq);
    Ok(items)
}

/// Names and rows of runs and instances. Deleted ones are missing.
async fn find_rows(app: &App, runs: &[Uuid], instances: &[Uuid]) -> Result<HashMap<Uuid, (String, FeedRow)>> {
    let runs: Vec<RunId> = runs.iter().copied().map(RunId).collect();
    let deleted = changes::deleted_runs(app.db(), &runs).await?;
    let kept: Vec<RunId> = runs.into_iter().filter(|run| !deleted.contains(run)).collect();
    let mut found = HashMap::new();
    for row in rows::find_runs(app, &kept).await? {
        found.insert(row.id, (row.name.clone(), FeedRow::Run(Box::new(row))));
    }
    for id in instances {
        if let Some(row) = rows::find_instance(app, InstanceId(*id)).await? {
            found.insert(row.id, (row.name.clone(), FeedRow::Instance(Box::new(row))));
        }
    }
    Ok(found)
}

/// Rows of the tasks of managed jobs.
async fn task_rows(app: &App, jobs: &[Uuid]) -> Result<HashMap<Uuid, Vec<ManagedJobRow>>> {
    let mut found = HashMap::new();
    for (id, number) in changes::job_numbers(app.db(), jobs).await? {
        found.insert(id.0, rows::find_managed_job(app, number).await?);
    }
    Ok(found)
}

/// Changes of containers with these names: changes of the queue have no events.
pub(super) async fn containers(app: &App, uuids: &[String], seq: u64) -> Result<Vec<FeedItem>> {
    if uuids.is_empty() {
        return Ok(Vec::new());
    }
    let as_of = app.db().now().await?.0;
    let item = |(owner, row): (String, ContainerRow)| FeedItem {
        seq,
        kind: "container",
        project: None,
        owner: Some(owner),
        event: FeedEvent::Change(Box::new(FeedChange {
            seq,
            as_of,
            kind: "container".to_owned(),
            id: row.uuid.clone(),
            project: String::new(),
            name: row.name.clone(),
            from: None,
            to: Some(row.state.clone()),
            reason: None,
            message: None,
            row: Some(FeedRow::Container(Box::new(row))),
        })),
    };
    Ok(rows::find_containers(app, uuids).await?.into_iter().map(item).collect())
}
