//! Usage of the users and projects whose containers wait: dispatchers order the queue by it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use windlass_model::{
    dispatch::turns::{JobRank, OwnerShare, OwnerUsage, QueueUsage},
    id::ProjectId,
    plan::quota::QuotaResource,
    queue::QueueCaller,
};

use super::{Error, Requester, Result};
use crate::{
    app::App,
    db::{
        queue_list::{ListQuery, TURN},
        queue_usage::{self, QueuedJob},
        quotas, usage,
    },
};

/// Returns the usage of the owners of listed containers if the list is requested in the order of turns, which only
/// dispatchers may do: it tells how much others use.
pub async fn for_list(
    app: &App,
    asker: &Requester,
    requested: &ListQuery,
    listed: &[Value],
) -> Result<Option<Value>> {
    if !requested.order.iter().any(|(name, _)| name == TURN) {
        return Ok(None);
    }
    let QueueCaller::Dispatcher { .. } = asker.as_dispatcher() else {
        return Err(Error::denied("only dispatchers may list containers in the order of turns"));
    };
    Ok(Some(serde_json::to_value(queue_usage(app, listed).await?)?))
}

async fn queue_usage(app: &App, listed: &[Value]) -> Result<QueueUsage> {
    let now = app.db().now().await?;
    let queued = queue_usage::queued_jobs(app.db()).await?;
    let text = |record: &Value, name: &str| record[name].as_str().map(str::to_owned);
    let uuids: BTreeSet<String> = listed.iter().filter_map(|record| text(record, "uuid")).collect();
    let jobs: BTreeSet<&str> = queued.iter().map(|job| job.uuid.as_str()).collect();
    let requested = listed.iter().filter(|one| one["uuid"].as_str().is_some_and(|uuid| !jobs.contains(uuid)));
    let users: BTreeSet<String> = requested.filter_map(|record| text(record, "owner_uuid")).collect();
    let of_users = queue_usage::of_users(app.db(), &users, now).await?;
    let mut owners: Vec<OwnerUsage> = of_users
        .into_iter()
        .map(|(owner, of)| OwnerUsage { owner, used: of.used, held: of.held, weight: 1, shares: Vec::new() })
        .collect();
    let shares = project_shares(app, &queued).await?;
    let projects: Vec<ProjectId> = shares.keys().copied().collect();
    for of in usage::of_projects(app.db(), &projects, now).await? {
        let waiting: u64 = of_project(&queued, of.project).map(|job| job.held_units).sum();
        owners.push(OwnerUsage {
            owner: of.project.to_string(),
            used: of.used,
            // A job in the queue of containers holds nothing yet.
            held: of.held.saturating_sub(waiting),
            weight: of.weight,
            shares: shares.get(&of.project).cloned().unwrap_or_default(),
        });
    }
    let rank = |job: &QueuedJob| JobRank {
        owner: job.project.to_string(),
        class: job.rank.class,
        amounts: amounts(job, shares.get(&job.project)),
    };
    let jobs = queued.iter().filter(|job| uuids.contains(&job.uuid));
    let jobs = jobs.map(|job| (job.uuid.clone(), rank(job))).collect();
    Ok(QueueUsage { now, owners, jobs })
}

fn of_project(queued: &[QueuedJob], project: ProjectId) -> impl Iterator<Item = &QueuedJob> {
    queued.iter().filter(move |job| job.project == project)
}

/// Guaranteed shares of the projects whose jobs are queued, and what is held of them.
async fn project_shares(app: &App, queued: &[QueuedJob]) -> Result<BTreeMap<ProjectId, Vec<OwnerShare>>> {
    let mut shares: BTreeMap<ProjectId, Vec<OwnerShare>> =
        queued.iter().map(|job| (job.project, Vec::new())).collect();
    let projects: Vec<ProjectId> = shares.keys().copied().collect();
    for named in quotas::list(app.db(), &projects).await? {
        let quota = named.quota;
        let (None, Some(share)) = (quota.member, quota.share) else { continue };
        let waiting: u64 =
            of_project(queued, quota.project).map(|job| job.held.amount(&quota.resource)).sum();
        let used = quota.used.saturating_sub(waiting);
        let resource = quota.resource.to_string();
        shares.entry(quota.project).or_default().push(OwnerShare { resource, share, used });
    }
    Ok(shares)
}

/// Amounts of the resources of which the project has shares.
fn amounts(job: &QueuedJob, shares: Option<&Vec<OwnerShare>>) -> BTreeMap<String, u64> {
    let resources = shares.into_iter().flatten().map(|share| &share.resource);
    let known = resources.filter_map(|name| Some((name.clone(), QuotaResource::parse(name)?)));
    known.map(|(name, resource)| (name, job.held.amount(&resource))).collect()
}
