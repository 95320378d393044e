//! Volumes.

use windlass_api::{operations::*, server::Nothing, volumes::*};

use crate::{
    app::App,
    auth::{Caller, Scope},
    error::Result,
    http::Routes,
    services::volumes,
};

pub(super) fn mount(routes: Routes) -> Routes {
    routes
        .token::<ListVolumes, _, _, _>(list)
        .project::<ListProjectVolumes, _, _>(list_project)
        .project::<ReadVolume, _, _>(read)
        .project::<CreateVolume, _, _>(create)
        .project::<DeleteVolumes, _, _>(delete)
}

async fn list(app: App, caller: Caller, asked: ListRequest) -> Result<Vec<Volume>> {
    volumes::list(&app, &caller, asked).await
}

async fn list_project(app: App, scope: Scope, _: Nothing) -> Result<Vec<Volume>> {
    volumes::list_project(&app, &scope).await
}

async fn read(app: App, scope: Scope, asked: NameRequest) -> Result<Volume> {
    volumes::read(&app, &scope, &asked.name).await
}

async fn create(app: App, scope: Scope, asked: CreateRequest) -> Result<Volume> {
    volumes::create(&app, &scope, &asked).await
}

async fn delete(app: App, scope: Scope, asked: DeleteRequest) -> Result<()> {
    volumes::delete(&app, &scope, &asked.names).await
}
