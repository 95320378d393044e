//! Fleets.

use windlass_api::{fleets::*, operations::*};

use crate::{
    app::App,
    auth::{Caller, ProjectScope},
    error::Result,
    http::ApiRoutes,
    services::fleets,
};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .token::<ListFleets, _, _, _>(list)
        .project::<ListProjectFleets, _, _>(list_project)
        .project::<ReadFleet, _, _>(read)
        .project::<PlanFleet, _, _>(plan)
        .project::<ApplyFleet, _, _>(apply)
        .project::<DeleteFleets, _, _>(delete)
        .project::<DeleteFleetInstances, _, _>(delete_instances)
}

async fn list(app: App, caller: Caller, requested: ListRequest) -> Result<Vec<Fleet>> {
    fleets::list(&app, &caller, requested).await
}

async fn list_project(app: App, scope: ProjectScope, requested: ProjectListRequest) -> Result<Vec<Fleet>> {
    fleets::list_project(&app, &scope, &requested).await
}

async fn read(app: App, scope: ProjectScope, requested: ReadRequest) -> Result<Fleet> {
    fleets::read(&app, &scope, &requested).await
}

async fn plan(app: App, scope: ProjectScope, requested: PlanRequest) -> Result<FleetPlan> {
    fleets::plan(&app, &scope, &requested).await
}

async fn apply(app: App, scope: ProjectScope, requested: ApplyRequest) -> Result<Fleet> {
    fleets::apply(&app, &scope, &requested).await
}

async fn delete(app: App, scope: ProjectScope, requested: DeleteRequest) -> Result<()> {
    fleets::delete(&app, &scope, &requested).await
}

async fn delete_instances(app: App, scope: ProjectScope, requested: DeleteInstancesRequest) -> Result<()> {
    fleets::delete_instances(&app, &scope, &requested).await
}
