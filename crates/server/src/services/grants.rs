//! Grants of the server's backends to projects, made by global admins.
//!
//! A fleet or a volume that names another backend is rejected. Where a fleet names none, placement leaves out the
//! offers of backends that are not granted to its project.

use std::time::Duration;

use windlass_api::{
    backends::{Finding, GrantRequest, ServerBackend},
    projects as wire,
};
use windlass_backend::BackendFinding;
use windlass_model::{
    backend_kind::BackendKind,
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
    hints::Hint,
};

/// Maximum time for the check of a backend.
const CHECK_TIMEOUT: Duration = Duration::from_secs(60);

fn needs_grant(backend: &str) -> bool {
    BackendKind::of(backend).needs_grant()
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

/// Grants of the first project: all backends that the server has when the project is created, without those that
/// `config.yml` gives to projects.
pub(crate) fn first_grants(app: &App, project: ProjectId) -> Result<Vec<Change>, DbError> {
    let configured: Vec<&str> = configured_grants(app).map(|(_, kind)| kind).collect();
    let names = app.backends().all().map(|backend| backend.name());
    let names = names.filter(|name| needs_grant(name) && !configured.contains(name));
    names.map(|name| grant_change(app, project, name)).collect()
}

/// Projects and backends in `config.yml`.
fn configured_grants(app: &App) -> impl Iterator<Item = (&str, &str)> {
    let projects = app.settings().projects.iter();
    projects.flat_map(|project| {
        project.backends.iter().map(|backend| (project.name.as_str(), backend.kind.as_str()))
    })
}

/// Grants the backends in `config.yml` to their projects. One that is removed there later stays granted, because an
/// admin may have granted it as well.
pub(crate) async fn grant_configured(app: &App, admin: UserId) -> Result<()> {
    for (project, backend) in configured_grants(app) {
        let Some((found, _)) = projects::find(app.db(), project, admin).await? else {
            tracing::warn!(
                project,
                backend,
                "config.yml has a backend for a project that does not exist; it is granted at the next start after                  the project was created"
            );
            continue;
        };
        let change = grant_change(app, found.id, backend)?;
        app.db().write(Unit::new().and([change])).await?.done()?;
    }
    Ok(())
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

/// The backends of the server, and the projects that may use them.
pub async fn list_backends(app: &App) -> Result<Vec<ServerBackend>> {
    let grants = backends::list_grants(app.db()).await?;
    let all = app.backends().all().map(|backend| {
        let granted = grants.iter().filter(|(kind, _)| kind == backend.name());
        let projects = granted.map(|(_, project)| project.clone()).collect();
        ServerBackend { name: backend.name().to_owned(), projects }
    });
    Ok(all.collect())
}

/// Checks a backend at its provider.
pub async fn check_backend(app: &App, name: &str) -> Result<Vec<Finding>> {
    app.check_backends([name])?;
    let Some(backend) = app.backends().named(name) else { return Err(Error::absent("Backend")) };
    let found = tokio::time::timeout(CHECK_TIMEOUT, backend.check()).await;
    let late =
        || Error::refused(format!("backend `{name}` did not answer within {} s", CHECK_TIMEOUT.as_secs()));
    let found = found.map_err(|_| late())?;
    Ok(found.into_iter().map(|BackendFinding { what, problem }| Finding { what, problem }).collect())
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
    app.wake(&[Hint::Fleets, Hint::JobsSubmitted]);
    project_service::reload(app, &project.name, caller.user.id).await
}
