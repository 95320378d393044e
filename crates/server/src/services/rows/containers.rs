//! Rows of the container queue.

use std::{cmp::Ordering, collections::HashMap};

use serde_json::Value;
use windlass_api::rows::{ContainerRow, Rows, RowsRequest};
use windlass_model::queue::{Container, change};

use super::{FilterFields, RequestedPage, directed, page_of, parse_sort};
use crate::{
    app::App,
    auth::Caller,
    db::{containers, dispatchers, users},
    error::Result,
    services::queue::auth::user_uuid,
};

/// Maximum number of containers that are read for a list.
const READ_MAX: i64 = 2000;
const GIB: f64 = 1_073_741_824.0;

#[derive(Clone, Copy)]
enum Column {
    CreatedAt,
    Name,
    Status,
    Owner,
    Priority,
}

const SORTS: [(&str, Column); 5] = [
    ("created_at", Column::CreatedAt),
    ("name", Column::Name),
    ("status", Column::Status),
    ("owner", Column::Owner),
    ("priority", Column::Priority),
];

pub(crate) async fn list(app: &App, caller: &Caller, requested: RowsRequest) -> Result<Rows<ContainerRow>> {
    let page = RequestedPage::of(&requested)?;
    let (column, descending) =
        parse_sort(requested.sort.as_deref(), &SORTS)?.unwrap_or((Column::CreatedAt, true));
    let as_of = app.db().now().await?;
    // The queue has no projects; users see their own containers.
    let owner = (!caller.user.admin).then(|| user_uuid(caller.user.id));
    let found = containers::list_newest(app.db(), owner.as_deref(), READ_MAX).await?;
    let has_more = i64::try_from(found.len()).is_ok_and(|count| count >= READ_MAX);
    let all = to_rows(app, found).await?;
    let order = |one: &ContainerRow, other: &ContainerRow| directed(descending, compare(column, one, other));
    Ok(page_of(all, &requested, page, fields, order, (has_more, as_of)))
}

/// Rows of those of these containers that exist, with their owners.
pub(crate) async fn find(app: &App, uuids: &[String]) -> Result<Vec<(String, ContainerRow)>> {
    let found: Vec<Container> =
        containers::containers(app.db(), uuids).await?.into_iter().map(|found| found.doc).collect();
    let owners: Vec<String> = found.iter().map(|container| container.owner_uuid.clone()).collect();
    Ok(owners.into_iter().zip(to_rows(app, found).await?).collect())
}

fn fields(row: &ContainerRow) -> FilterFields<'_> {
    FilterFields {
        status: &row.state,
        user: Some(&row.owner),
        kind: row.dispatcher.as_deref(),
        fleet: None,
        at: row.created_at,
        texts: [Some(&row.name), Some(&row.owner), row.scheduling_status.as_deref(), None],
        id: row.uuid.clone(),
    }
}

fn compare(column: Column, one: &ContainerRow, other: &ContainerRow) -> Ordering {
    match column {
        Column::CreatedAt => one.created_at.cmp(&other.created_at),
        Column::Name => one.name.cmp(&other.name),
        Column::Status => one.state.cmp(&other.state),
        Column::Owner => one.owner.cmp(&other.owner),
        Column::Priority => one.priority.cmp(&other.priority),
    }
}

async fn to_rows(app: &App, found: Vec<Container>) -> Result<Vec<ContainerRow>> {
    let uuids: Vec<String> = found.iter().map(|container| container.uuid.clone()).collect();
    let mut names = HashMap::new();
    for request in containers::requests_for(app.db(), &uuids).await? {
        let Some(container) = request.doc.container_uuid.clone() else { continue };
        let newest = names.entry(container).or_insert((request.doc.created_at, String::new()));
        if request.doc.created_at >= newest.0 {
            *newest = (request.doc.created_at, request.doc.name);
        }
    }
    let held_by: HashMap<String, String> =
        dispatchers::list(app.db()).await?.into_iter().map(|one| (one.token_uuid, one.name)).collect();
    let owners: HashMap<String, String> =
        users::names(app.db()).await?.into_iter().map(|(id, name)| (user_uuid(id), name)).collect();
    let row = |container: Container| {
        let reported = Some(container.scheduling_status.clone()).filter(|text| !text.is_empty());
        let reported = reported.or_else(|| change::attempt_error(&container).map(str::to_owned));
        ContainerRow {
            id: container.uuid.clone(),
            name: names.remove(&container.uuid).map(|(_, name)| name).unwrap_or_default(),
            state: container.state.as_str().to_owned(),
            priority: container.priority,
            dispatcher: container.locked_by_uuid.as_ref().and_then(|token| held_by.get(token).cloned()),
            scheduling_status: reported,
            attempt: u32::try_from(container.attempt).unwrap_or(u32::MAX),
            owner: owners.get(&container.owner_uuid).cloned().unwrap_or_else(|| container.owner_uuid.clone()),
            resources: describe_resources(&container),
            exit_code: container.exit_code,
            cost: container.cost,
            created_at: container.created_at,
            started_at: container.started_at,
            finished_at: container.finished_at,
            uuid: container.uuid,
        }
    };
    Ok(found.into_iter().map(row).collect())
}

fn describe_resources(container: &Container) -> String {
    let constraints = &container.work.runtime_constraints;
    let number = |name: &str| constraints.get(name).and_then(Value::as_f64).filter(|number| *number > 0.0);
    let mut parts = Vec::new();
    let gpus = constraints.get("gpu").and_then(|gpu| gpu["device_count"].as_u64()).filter(|count| *count > 0);
    parts.extend(gpus.map(|count| format!("{count} × GPU")));
    parts.extend(number("vcpus").map(|cpus| format!("{cpus:.0} CPU")));
    parts.extend(number("ram").map(|ram| format!("{:.1} GB", ram / GIB)));
    if parts.is_empty() { "any".to_owned() } else { parts.join(", ") }
}
