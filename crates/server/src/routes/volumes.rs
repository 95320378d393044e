//! Volumes.

use windlass_api::{operations::*, server::EmptyRequest, volumes::*};

use crate::{
    app::App,
    auth::{Caller, ProjectScope},
    error::Result,
    http::ApiRoutes,
    services::volumes,
};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .token::<ListVolumes, _, _, _>(list)
        .project::<ListProjectVolumes, _, _>(list_project)
        .project::<ReadVolume, _, _>(read)
        .project::<CreateVolume, _, _>(create)
        .project::<DeleteVolumes, _, _>(delete)
}

async fn list(app: App, caller: Caller, requested: ListRequest) -> Result<Vec<Volume>> {
    volumes::list(&app, &caller, requested).await
}

async fn list_project(app: App, scope: ProjectScope, _: EmptyRequest) -> Result<Vec<Volume>> {
    volumes::list_project(&app, &scope).await
}

async fn read(app: App, scope: ProjectScope, requested: NameRequest) -> Result<Volume> {
    volumes::read(&app, &scope, &requested.name).await
}

async fn create(app: App, scope: ProjectScope, requested: CreateRequest) -> Result<Volume> {
    volumes::create(&app, &scope, &requested).await
}

async fn delete(app: App, scope: ProjectScope, requested: DeleteRequest) -> Result<()> {
    volumes::delete(&app, &scope, &requested.names).await
}
