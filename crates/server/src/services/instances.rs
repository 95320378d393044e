//! Instances: list and show. They are ended through their fleets.

use std::collections::HashMap;

use windlass_api::{backends::BackendType, instances as wire};
use windlass_model::id::{FleetId, InstanceId, ProjectId};

use super::runs::visible_projects;
use crate::{
    app::App,
    auth::{Caller, ProjectScope},
    db::{
        Page,
        documents::{INSTANCE_GPU_DRIVER, INSTANCE_TYPE},
        fleets,
        instances::{self, Instance, NamedProjects, Query},
        projects, series,
    },
    error::{Error, Result},
};

const LIST_MAX: i64 = 1000;

pub async fn list(app: &App, caller: &Caller, requested: wire::ListRequest) -> Result<Vec<wire::Instance>> {
    if !(0..=LIST_MAX).contains(&requested.limit) {
        return Err(Error::field("limit", "must be from 0 to 1000"));
    }
    let projects = match &requested.project_names {
        None => match visible_projects(app, caller, None).await? {
            Some(projects) => projects,
            None => return Ok(Vec::new()),
        },
        Some(names) => {
            let mut ids = Vec::new();
            for name in names {
                ids.extend(visible_projects(app, caller, Some(name)).await?.flatten().unwrap_or_default());
            }
            Some(ids)
        }
    };
    let query = Query {
        projects,
        include_imported: requested.include_imported,
        fleets: requested.fleet_ids.map(|ids| ids.into_iter().map(FleetId).collect()),
        only_active: requested.only_active,
        page: Page {
            time: requested.prev_created_at,
            id: requested.prev_id,
            limit: requested.limit,
            ascending: requested.ascending,
            ..Page::default()
        },
    };
    let rows = instances::list(app.db(), &query).await?;
    to_wire(app, rows, query.projects.as_deref()).await
}

/// Jobs of the project that ran on an instance.
pub(crate) async fn history(
    app: &App,
    scope: &ProjectScope,
    requested: wire::HistoryRequest,
) -> Result<wire::InstanceHistory> {
    let id = InstanceId(requested.id);
    let found = instances::find(app.db(), id).await?;
    found.filter(|row| row.project_id == scope.project.id).ok_or_else(not_found)?;
    let jobs = series::past_jobs(app.db(), id, scope.project.id).await?;
    let past = |job: series::PastJob| wire::PastJob {
        run: job.run,
        run_id: job.run_id.0,
        job: job.job,
        user: job.user,
        from: job.from,
        to: job.to,
        status: job.status,
        reason: job.reason,
    };
    Ok(wire::InstanceHistory { jobs: jobs.into_iter().map(past).collect() })
}

pub async fn read(app: &App, scope: &ProjectScope, requested: &wire::ReadRequest) -> Result<wire::Instance> {
    let found = instances::find(app.db(), InstanceId(requested.id)).await?;
    // The project of the row counts, not the one that the caller names.
    let found = found.filter(|row| row.project_id == scope.project.id).ok_or_else(not_found)?;
    to_wire(app, vec![found], Some(&[scope.project.id])).await?.pop().ok_or_else(not_found)
}

fn not_found() -> Error {
    Error::absent("Instance")
}

pub async fn health_checks(
    app: &App,
    scope: &ProjectScope,
    requested: &wire::HealthChecksRequest,
) -> Result<wire::HealthChecks> {
    let fleet = fleets::find_by_name(app.db(), scope.project.id, &requested.fleet_name).await?;
    let fleet = fleet.ok_or_else(|| Error::absent("Fleet"))?;
    let known = instances::list_by_fleets(app.db(), &[fleet.id]).await?;
    if !known.iter().any(|instance| instance.instance_num == requested.instance_num) {
        return Err(not_found());
    }
    // Past checks are not stored yet; the latest is part of the instance.
    Ok(wire::HealthChecks { health_checks: Vec::new() })
}

/// Adds the names of projects, fleets and jobs: three queries for any number of instances. Jobs of other projects than
/// `named` are not named.
pub(super) async fn to_wire(
    app: &App,
    rows: Vec<Instance>,
    named: NamedProjects<'_>,
) -> Result<Vec<wire::Instance>> {
    let ids: Vec<InstanceId> = rows.iter().map(|row| row.id).collect();
    let project_ids: Vec<ProjectId> = rows.iter().map(|row| row.project_id).collect();
    let fleet_ids: Vec<FleetId> = rows.iter().filter_map(|row| row.fleet_id).collect();
    let projects = projects::names(app.db(), &project_ids).await?;
    let fleets = fleets::names(app.db(), &fleet_ids).await?;
    let mut jobs = HashMap::new();
    for (id, name) in instances::job_names(app.db(), &ids, named).await? {
        jobs.entry(id).or_insert(name);
    }
    rows.into_iter()
        .map(|row| {
            let fleet_name = row.fleet_id.and_then(|id| fleets.get(&id).cloned());
            Ok(wire::Instance {
                id: row.id.0,
                project_name: projects.get(&row.project_id).cloned().unwrap_or_default(),
                backend: row.backend.map(|name| BackendType::from_name(&name).as_str().to_owned()),
                instance_type: INSTANCE_TYPE.decode_opt(row.id, row.instance_type.as_deref())?,
                name: row.name,
                fleet_id: row.fleet_id.map(|id| id.0),
                fleet_name,
                instance_num: row.instance_num,
                job_name: jobs.remove(&row.id),
                hostname: row.hostname,
                status: row.status.as_str().to_owned(),
                status_message: row.status_message.or(row.health_message),
                unreachable: row.unreachable,
                health_status: row.health,
                termination_reason: row.termination_reason,
                termination_reason_message: row.termination_message,
                created: row.created_at,
                finished_at: row.finished_at,
                region: row.region,
                availability_zone: row.availability_zone,
                price: row.price,
                total_blocks: row.total_blocks,
                busy_blocks: row.busy_blocks,
                gpu_driver: INSTANCE_GPU_DRIVER.decode_opt(row.id, row.gpu_driver.as_deref())?,
                seen_at: row.seen_at,
                unreachable_since: row.unreachable_since,
                agent_version: row.agent_version,
            })
        })
        .collect()
}
