//! Quotas of projects and their members.
//!
//! A quota of a project protects other projects from it, so only a global admin sets it. One of a member divides what the
//! project has, which its managers do.

use windlass_api::quotas as wire;
use windlass_model::{
    config::job_spec::JobSpec,
    event::Entity,
    id::{ProjectId, UserId},
    plan::quota::{Quota, QuotaResource, least_amount},
};

use crate::{
    app::App,
    auth::ProjectScope,
    db::{
        Change, Unit, WriteOutcome, projects,
        quotas::{self, NamedQuota},
        users,
    },
    error::{Error, Result},
    events::{EventSubject, note},
    hints::Hint,
    parsed_run_spec::ParsedRunSpec,
    services::offers::{OfferSupply, least_price, supply_error},
};

const MIB_PER_GB: f64 = 1024.0;
const MICRODOLLARS: f64 = 1e6;

pub async fn list(app: &App, scope: &ProjectScope) -> Result<wire::Quotas> {
    let found = quotas::list(app.db(), &[scope.project.id]).await?;
    Ok(wire::Quotas { quotas: found.into_iter().map(to_wire).collect() })
}

pub async fn set(app: &App, scope: &ProjectScope, sent: &wire::SetRequest) -> Result<wire::Quotas> {
    let resource = parse_resource(&sent.resource)?;
    let (max, share) = (amount("max", sent.max, &resource)?, amount("share", sent.share, &resource)?);
    match (max, share) {
        (None, None) => return Err(Error::field("max", "is required, or `share`")),
        (Some(max), Some(share)) if share > max => {
            return Err(Error::field("share", "must not be more than `max`"));
        }
        (_, Some(_)) if sent.username.is_some() => {
            return Err(Error::field("share", "is for a whole project; a member has only a `max`"));
        }
        (..) => {}
    }
    let member = check_right(app, scope, sent.username.as_deref(), "quota").await?;
    let project = scope.project.id;
    let quota = Quota { project, member, resource, max, share, used: 0, first_end: None };
    let change = quotas::set(app.db().new_id()?, &quota);
    let of = sent.username.as_ref().map(|name| format!(" of {name}")).unwrap_or_default();
    let parts = [("max", max), ("share", share)];
    let parts = parts.iter().filter_map(|(name, amount)| Some((*name, (*amount)?)));
    let parts: Vec<String> =
        parts.map(|(name, amount)| format!("{name} {}", quota.resource.amount(amount))).collect();
    let message = format!("Quota{of} for {} set to {}", quota.resource, parts.join(", "));
    write(app, scope, change, "quota_set", message).await?;
    list(app, scope).await
}

/// The amount in stored units.
fn amount(field: &'static str, sent: Option<f64>, resource: &QuotaResource) -> Result<Option<u64>> {
    let Some(sent) = sent else { return Ok(None) };
    let amount = sent * unit(resource);
    if !(0.0..=1e15).contains(&amount) {
        return Err(Error::field(field, "must be a number from 0 to 1e9"));
    }
    Ok(Some(amount.round() as u64))
}

pub async fn delete(app: &App, scope: &ProjectScope, sent: &wire::DeleteRequest) -> Result<wire::Quotas> {
    let resource = parse_resource(&sent.resource)?;
    let member = check_right(app, scope, sent.username.as_deref(), "quota").await?;
    let change = quotas::delete(scope.project.id, member, &resource);
    let of = sent.username.as_ref().map(|name| format!(" of {name}")).unwrap_or_default();
    let message = format!("Quota{of} for {resource} deleted");
    match write(app, scope, change, "quota_deleted", message).await? {
        WriteOutcome::Done { .. } => list(app, scope).await,
        WriteOutcome::Stale { .. } => Err(Error::absent("Quota")),
    }
}

/// Rejects jobs that exceed a quota by themselves: they would never start.
pub(crate) async fn check_jobs(
    app: &App,
    (project, user): (ProjectId, UserId),
    shape: &ParsedRunSpec,
    jobs: &[JobSpec],
) -> Result<()> {
    let quotas = quotas::list(app.db(), &[project]).await?;
    let limits_price = |named: &NamedQuota| {
        let quota = &named.quota;
        quota.resource == QuotaResource::Price && quota.max.is_some() && quota.applies_to(project, user)
    };
    let supply = if quotas.iter().any(limits_price) {
        let processes = app.settings().local_processes;
        Some(OfferSupply::of(app.db(), app.market(), processes, project).await.map_err(supply_error)?)
    } else {
        None
    };
    for NamedQuota { quota, member_name } in quotas {
        if !quota.applies_to(project, user) {
            continue;
        }
        // Nodes of a replica start together.
        let least = |job: &JobSpec| match (&quota.resource, &supply) {
            // Without any offer the price is unknown.
            (QuotaResource::Price, Some(supply)) => {
                least_price(supply, shape, job).map_or(0, |price| price.0)
            }
            (resource, _) => least_amount(&job.requirements.resources, resource),
        };
        let wanted = jobs.iter().map(|job| u64::from(job.jobs_per_replica.max(1)).saturating_mul(least(job)));
        let wanted = wanted.max().unwrap_or_default();
        let Some(max) = quota.max else { continue };
        if wanted > max {
            let whose = member_name.map_or("the project".to_owned(), |name| format!("member `{name}`"));
            let resource = &quota.resource;
            return Err(Error::refused(format!(
                "the run needs {} of `{resource}`, but {whose} may hold at most {} by its quota, and holds {} now; \
                 hint: request less, or have an admin raise the quota with `windlass quota set`",
                resource.amount(wanted),
                resource.amount(max),
                resource.amount(quota.used)
            )));
        }
    }
    Ok(())
}

fn parse_resource(text: &str) -> Result<QuotaResource> {
    QuotaResource::parse(text)
        .ok_or_else(|| Error::field("resource", "must be `gpu`, `gpu:NAME`, `cpu`, `memory` or `price`"))
}

/// The member that the caller may limit; `None` for the whole project.
pub(super) async fn check_right(
    app: &App,
    scope: &ProjectScope,
    member: Option<&str>,
    what: &str,
) -> Result<Option<UserId>> {
    let Some(name) = member else {
        if scope.caller.user.admin {
            return Ok(None);
        }
        return Err(Error::refused(format!(
            "only a global admin can set a {what} of a project; hint: set one of a member with `--user`"
        )));
    };
    let user = users::by_name(app.db(), name).await?;
    let members = projects::members(app.db(), &[scope.project.id]).await?;
    let user = user.filter(|user| members.iter().any(|member| member.user.id == user.id));
    user.map(|user| Some(user.id))
        .ok_or_else(|| Error::refused(format!("`{name}` is not a member of the project")))
}

/// Writes a change of what jobs of the project may hold or use, with its event; jobs that wait are evaluated again.
pub(super) async fn write(
    app: &App,
    scope: &ProjectScope,
    change: Change,
    reason: &str,
    message: String,
) -> Result<WriteOutcome> {
    let project = &scope.project;
    let about = EventSubject {
        entity: Entity::Project,
        id: project.id.0,
        name: &project.name,
        project: Some(project.id),
    };
    let reported = note(app.db(), Some(scope.caller.user.id), &about, reason, message)?;
    let unit = Unit::new().and([change, quotas::mark_waiting_due(project.id)]).and(reported);
    let written = app.db().write(unit).await?;
    app.wake(&[Hint::JobsSubmitted]);
    Ok(written)
}

pub(super) fn to_wire(found: NamedQuota) -> wire::Quota {
    let NamedQuota { quota, member_name } = found;
    let unit = unit(&quota.resource);
    wire::Quota {
        username: member_name,
        max: quota.max.map(|max| max as f64 / unit),
        share: quota.share.map(|share| share as f64 / unit),
        used: quota.used as f64 / unit,
        resource: quota.resource.to_string(),
    }
}

/// Number of stored units in one that the API shows.
fn unit(resource: &QuotaResource) -> f64 {
    match resource {
        QuotaResource::Gpus | QuotaResource::GpusNamed(_) | QuotaResource::Cpus => 1.0,
        QuotaResource::Memory => MIB_PER_GB,
        QuotaResource::Price => MICRODOLLARS,
    }
}
