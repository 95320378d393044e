//! Projects and members.

use windlass_api::{
    backends::{CheckRequest, Finding, GrantRequest, ServerBackend},
    operations::*,
    projects::*,
    server::EmptyRequest,
};

use crate::{
    app::App,
    auth::{Caller, ProjectScope},
    error::Result,
    http::ApiRoutes,
    services::{grants, projects},
};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .token::<ListProjects, _, _, _>(list)
        .token::<ListProjectsWithoutFleets, _, _, _>(list_without_fleets)
        .token::<CreateProject, _, _, _>(create)
        .token::<DeleteProjects, _, _, _>(delete)
        .project::<ReadProject, _, _>(read)
        .project::<SetMembers, _, _>(set_members)
        .project::<AddMembers, _, _>(add_members)
        .project::<RemoveMembers, _, _>(remove_members)
        .project::<UpdateProject, _, _>(update)
        .token::<SetMemberRights, _, _, _>(set_rights)
        .token::<GrantBackend, _, _, _>(grant_backend)
        .token::<RevokeBackend, _, _, _>(revoke_backend)
        .token::<ListBackends, _, _, _>(list_backends)
        .token::<CheckBackend, _, _, _>(check_backend)
}

async fn set_rights(app: App, caller: Caller, requested: MemberRightsRequest) -> Result<Project> {
    projects::set_rights(&app, &caller, &requested).await
}

async fn grant_backend(app: App, caller: Caller, requested: GrantRequest) -> Result<Project> {
    grants::grant_backend(&app, &caller, &requested).await
}

async fn revoke_backend(app: App, caller: Caller, requested: GrantRequest) -> Result<Project> {
    grants::revoke_backend(&app, &caller, &requested).await
}

async fn list_backends(app: App, _: Caller, _: EmptyRequest) -> Result<Vec<ServerBackend>> {
    grants::list_backends(&app).await
}

async fn check_backend(app: App, _: Caller, requested: CheckRequest) -> Result<Vec<Finding>> {
    grants::check_backend(&app, &requested.backend).await
}

async fn list(app: App, caller: Caller, requested: ListRequest) -> Result<ProjectList> {
    projects::list(&app, &caller, requested).await
}

async fn list_without_fleets(app: App, caller: Caller, _: EmptyRequest) -> Result<Vec<Project>> {
    projects::list_without_fleets(&app, &caller).await
}

async fn create(app: App, caller: Caller, requested: CreateRequest) -> Result<Project> {
    projects::create(&app, &caller, requested).await
}

async fn delete(app: App, caller: Caller, requested: DeleteRequest) -> Result<()> {
    projects::delete(&app, &caller, &requested.projects_names).await
}

async fn read(app: App, scope: ProjectScope, _: EmptyRequest) -> Result<Project> {
    projects::read(&app, &scope).await
}

async fn set_members(app: App, scope: ProjectScope, requested: MembersRequest) -> Result<Project> {
    projects::set_members(&app, &scope, requested).await
}

async fn add_members(app: App, scope: ProjectScope, requested: MembersRequest) -> Result<Project> {
    projects::add_members(&app, &scope, requested).await
}

async fn remove_members(app: App, scope: ProjectScope, requested: RemoveMembersRequest) -> Result<Project> {
    projects::remove_members(&app, &scope, requested).await
}

async fn update(app: App, scope: ProjectScope, requested: UpdateRequest) -> Result<Project> {
    projects::update(&app, &scope, requested).await
}
