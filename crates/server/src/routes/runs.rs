//! Runs.

use windlass_api::{RenderedJson, operations::*, runs::*};

use crate::{
    agents::PortStream,
    app::App,
    auth::{Caller, ProjectScope},
    error::Result,
    http::ApiRoutes,
    services::runs,
};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .token::<ListRuns, _, _, _>(list)
        .project::<ReadRun, _, _>(read)
        .project::<PlanRun, _, _>(plan)
        .project::<ApplyRun, _, _>(apply)
        .project::<StopRuns, _, _>(stop)
        .project_stream::<ConnectJob, _, _, _, _>(connect, check_connect)
        .project::<DeleteRuns, _, _>(delete)
}

async fn list(app: App, caller: Caller, requested: ListRequest) -> Result<Vec<RenderedJson<Run>>> {
    runs::list(&app, &caller, requested).await
}

async fn read(app: App, scope: ProjectScope, requested: ReadRequest) -> Result<Run> {
    runs::read(&app, &scope, requested).await
}

async fn plan(app: App, scope: ProjectScope, requested: PlanRequest) -> Result<RunPlan> {
    runs::plan(&app, &scope, requested).await
}

async fn apply(app: App, scope: ProjectScope, requested: ApplyRequest) -> Result<Run> {
    runs::apply(&app, &scope, requested).await
}

async fn stop(app: App, scope: ProjectScope, requested: StopRequest) -> Result<()> {
    runs::stop(&app, &scope, &requested).await
}

async fn connect(app: App, scope: ProjectScope, requested: ConnectRequest) -> Result<PortStream> {
    runs::connect(&app, &scope, &requested).await
}

async fn check_connect(app: App, scope: ProjectScope, requested: ConnectRequest) -> Result<()> {
    runs::check_connect(&app, &scope, &requested).await
}

async fn delete(app: App, scope: ProjectScope, requested: DeleteRequest) -> Result<()> {
    runs::delete(&app, &scope, &requested.runs_names).await
}
