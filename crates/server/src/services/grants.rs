//! Grants of the server's backends to projects, made by global admins.
//!
//! A fleet or a volume that names another backend is rejected. Where a fleet names none, placement leaves out the
//! offers of backends that are not granted to its project.

use windlass_api::{backends::GrantRequest, projects as wire};
use windlass_backend::remote;
use windlass_model::{
    event::Entity,
    id::{ProjectId, UserId},
};

use super::projects as project_service;
use crate::{
    app::App,
    auth::{Caller, ProjectScope},
    db::{
        Change, DbError, Unit, backends,
        projects::{self, Project},
    },
    error::{Error, Result},
    events::{EventSubject, note},
};

/// Hosts of SSH fleets are part of their fleet: adding them is a right of members, not a grant.
fn needs_grant(backend: &str) -> bool {
    backend != remote::NAME
}

/// Rejects backends that are not granted to the project.
pub(crate) async fn check<'a>(
    app: &App,
    scope: &ProjectScope,
    named: impl IntoIterator<Item = &'a str>,
) -> Result<()> {
    let named: Vec<&str> = named.into_iter().filter(|name| needs_grant(name)).collect();
    if named.is_empty() {
        return Ok(());
    }
    let project = &scope.project;
    let granted = backends::list_granted(app.db(), project.id).await?;
    match named.into_iter().find(|name| !granted.contains(*name)) {
        None => Ok(()),
        Some(backend) => Err(Error::refused(format!(
            "project `{0}` may not use backend `{backend}`; hint: a global admin can grant it with `windlass \
             project grant-backend {0} {backend}`",
            project.name
        ))),
    }
}

/// Grants of the first project: all backends that the server has when the project is created.
pub(crate) fn first_grants(app: &App, project: ProjectId) -> Result<Vec<Change>, DbError> {
    let names = app.backends().all().map(|backend| backend.name()).filter(|name| needs_grant(name));
    names.map(|name| grant_change(app, project, name)).collect()
}

pub(crate) fn grant_change(app: &App, project: ProjectId, backend: &str) -> Result<Change, DbError> {
    Ok(backends::grant(app.db().new_id()?, project, backend))
}

pub async fn grant_backend(app: &App, caller: &Caller, requested: &GrantRequest) -> Result<wire::Project> {
    if !needs_grant(&requested.backend) {
        return Err(Error::refused(
            "SSH hosts require no grant; hint: run `windlass project members PROJECT --allow-ssh-fleets USER`",
        ));
    }
    app.check_backends([requested.backend.as_str()])?;
    let project = find(app, caller.user.id, &requested.project_name).await?;
    let change = grant_change(app, project.id, &requested.backend)?;
    let message = format!("Backend {} granted", requested.backend);
    write(app, caller, &project, change, "backend_granted", message).await
}

pub async fn revoke_backend(app: &App, caller: &Caller, requested: &GrantRequest) -> Result<wire::Project> {
    let project = find(app, caller.user.id, &requested.project_name).await?;
    if !backends::list_granted(app.db(), project.id).await?.contains(&requested.backend) {
        return Err(Error::absent("Grant"));
    }
    let change = backends::delete(project.id, &requested.backend);
    let message = format!("Backend {} revoked", requested.backend);
    write(app, caller, &project, change, "backend_revoked", message).await
}

async fn find(app: &App, user: UserId, name: &str) -> Result<Project> {
    let found = projects::find(app.db(), name, user).await?;
    found.map(|(project, _)| project).ok_or_else(|| Error::absent("Project"))
}

async fn write(
    app: &App,
    caller: &Caller,
    project: &Project,
    change: Change,
    reason: &str,
    message: String,
) -> Result<wire::Project> {
    let about = EventSubject {
        entity: Entity::Project,
        id: project.id.0,
        name: &project.name,
        project: Some(project.id),
    };
    let reported = note(app.db(), Some(caller.user.id), &about, reason, message)?;
    app.db().write(Unit::new().and([change]).and(reported)).await?.done()?;
    app.wake(&["fleets", "jobs_submitted"]);
    project_service::reload(app, &project.name, caller.user.id).await
}
