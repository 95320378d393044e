//! Rows of instances.

use std::{cmp::Ordering, collections::HashMap};

use serde_json::Value;
use windlass_api::{
    backends::BackendType,
    rows::{InstanceJob, InstanceRow, InstanceUse, Rows, RowsRequest},
};
use windlass_model::id::{FleetId, InstanceId, ProjectId};

use super::{FilterFields, RequestedPage, directed, page_of, parse_sort, resource_words, visible_projects};
use crate::{
    app::App,
    auth::Caller,
    db::{
        DbError, Page,
        documents::INSTANCE_TYPE,
        fleets,
        instances::{self, Instance, NamedProjects, Query},
        projects,
    },
    error::Result,
    services::blocks,
};

/// Maximum number of instances that are read for a list.
const READ_MAX: i64 = 10_000;

#[derive(Clone, Copy)]
enum Column {
    Name,
    Status,
    Fleet,
    Blocks,
    Price,
    CreatedAt,
}

const SORTS: [(&str, Column); 6] = [
    ("name", Column::Name),
    ("status", Column::Status),
    ("fleet", Column::Fleet),
    ("blocks", Column::Blocks),
    ("price", Column::Price),
    ("created_at", Column::CreatedAt),
];

pub(crate) async fn list(app: &App, caller: &Caller, requested: RowsRequest) -> Result<Rows<InstanceRow>> {
    let page = RequestedPage::of(&requested)?;
    let (column, descending) =
        parse_sort(requested.sort.as_deref(), &SORTS)?.unwrap_or((Column::Name, false));
    let lists_ended = requested.statuses.iter().any(|status| status == "terminated");
    let query = Query {
        projects: visible_projects(app, caller, &requested.projects).await?,
        include_imported: true,
        fleets: None,
        only_active: !lists_ended,
        page: Page { limit: READ_MAX, ..Page::default() },
    };
    let as_of = app.db().now().await?;
    let found = instances::list(app.db(), &query).await?;
    let has_more = i64::try_from(found.len()).is_ok_and(|count| count >= READ_MAX);
    let all = to_rows(app, found).await?;
    let order = |one: &InstanceRow, other: &InstanceRow| directed(descending, compare(column, one, other));
    let mut listed = page_of(all, &requested, page, fields, order, (has_more, as_of));
    add_jobs(app, &mut listed.rows, query.projects.as_deref()).await?;
    blocks::add_use(app, &mut listed.rows).await?;
    Ok(listed)
}

/// Row of one instance, if it exists, as its project sees it.
pub(crate) async fn find(app: &App, id: InstanceId) -> Result<Option<InstanceRow>> {
    let Some(found) = instances::find(app.db(), id).await? else { return Ok(None) };
    let project = found.project_id;
    let mut rows = to_rows(app, vec![found]).await?;
    add_jobs(app, &mut rows, Some(&[project])).await?;
    blocks::add_use(app, &mut rows).await?;
    Ok(rows.pop())
}

fn fields(row: &InstanceRow) -> FilterFields<'_> {
    FilterFields {
        status: &row.status,
        user: None,
        kind: Some(&row.backend),
        fleet: row.fleet.as_deref(),
        at: row.created_at,
        texts: [Some(&row.name), row.message.as_deref(), None, None],
        id: row.id.to_string(),
    }
}

fn compare(column: Column, one: &InstanceRow, other: &InstanceRow) -> Ordering {
    let share = |row: &InstanceRow| (row.blocks_busy.saturating_mul(10_000)) / row.blocks_total.max(1);
    match column {
        Column::Name => one.name.cmp(&other.name),
        Column::Status => one.status.cmp(&other.status),
        Column::Fleet => one.fleet.cmp(&other.fleet),
        Column::Blocks => share(one).cmp(&share(other)),
        Column::Price => one.price.total_cmp(&other.price),
        Column::CreatedAt => one.created_at.cmp(&other.created_at),
    }
}

async fn to_rows(app: &App, found: Vec<Instance>) -> Result<Vec<InstanceRow>> {
    let project_ids: Vec<ProjectId> = found.iter().map(|row| row.project_id).collect();
    let fleet_ids: Vec<FleetId> = found.iter().filter_map(|row| row.fleet_id).collect();
    let projects = projects::names(app.db(), &project_ids).await?;
    let fleets = fleets::names(app.db(), &fleet_ids).await?;
    let row = |row: Instance| {
        let project = projects.get(&row.project_id).cloned().unwrap_or_default();
        let fleet = row.fleet_id.and_then(|id| fleets.get(&id).cloned());
        to_row(row, project, fleet)
    };
    found.into_iter().map(row).collect()
}

fn to_row(row: Instance, project: String, fleet: Option<String>) -> Result<InstanceRow> {
    let kind: Option<Value> = INSTANCE_TYPE.decode_opt(row.id, row.instance_type.as_deref())?;
    let kind = kind.unwrap_or_default();
    let (resources, cpus, memory_mib) = resource_words::installed(&kind["resources"]);
    Ok(InstanceRow {
        id: row.id.0,
        project,
        name: row.name,
        fleet,
        instance_num: row.instance_num,
        backend: row
            .backend
            .map_or_else(String::new, |name| BackendType::from_name(&name).as_str().to_owned()),
        region: row.region.filter(|region| !region.is_empty()),
        status: row.status.as_str().to_owned(),
        message: row.status_message.or(row.health_message).or(row.termination_message),
        health: row.health,
        unreachable_since: row.unreachable_since.filter(|_| row.unreachable),
        draining: row.termination_asked_at.is_some() && !row.finished,
        resources: resources.words,
        gpu: resources.gpu,
        gpus: resources.gpus,
        cpus,
        memory_mib,
        blocks_total: row.total_blocks.unwrap_or(1),
        blocks_busy: row.busy_blocks,
        market: kind["resources"]["cpus"]
            .is_number()
            .then(|| if row.spot { "spot".to_owned() } else { "on-demand".to_owned() }),
        price: row.price.unwrap_or(0.0),
        jobs: Vec::new(),
        used: InstanceUse::default(),
        created_at: row.created_at,
        finished_at: row.finished_at,
    })
}

/// Adds the jobs of these projects that are on the instances.
async fn add_jobs(app: &App, rows: &mut [InstanceRow], named: NamedProjects<'_>) -> Result<()> {
    let ids: Vec<InstanceId> = rows.iter().map(|row| InstanceId(row.id)).collect();
    let mut jobs = HashMap::<InstanceId, Vec<InstanceJob>>::new();
    for job in instances::list_jobs(app.db(), &ids, named).await? {
        jobs.entry(job.instance_id).or_default().push(InstanceJob {
            run: job.run_name,
            project: job.project_name,
            run_id: job.run_id.0,
            job: job.job_name,
            blocks: job.blocks,
        });
    }
    for row in rows {
        row.jobs = jobs.remove(&InstanceId(row.id)).unwrap_or_default();
    }
    Ok(())
}

/// Number of GPUs of an instance.
pub(crate) fn installed_gpus(row: &Instance) -> Result<i64, DbError> {
    let kind: Option<Value> = INSTANCE_TYPE.decode_opt(row.id, row.instance_type.as_deref())?;
    Ok(kind.map_or(0, |kind| resource_words::installed(&kind["resources"]).0.gpus))
}
