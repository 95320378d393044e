//! Runs.

use windlass_api::{RenderedJson, operations::*, runs::*};

use crate::{
    agents::Port,
    app::App,
    auth::{Caller, Scope},
    error::Result,
    http::Routes,
    services::runs,
};

pub(super) fn mount(routes: Routes) -> Routes {
    routes
        .token::<ListRuns, _, _, _>(list)
        .project::<ReadRun, _, _>(read)
        .project::<PlanRun, _, _>(plan)
        .project::<ApplyRun, _, _>(apply)
        .project::<StopRuns, _, _>(stop)
        .project_stream::<ConnectJob, _, _, _, _>(connect, may_connect)
        .project::<DeleteRuns, _, _>(delete)
}

async fn list(app: App, caller: Caller, asked: ListRequest) -> Result<Vec<RenderedJson<Run>>> {
    runs::list(&app, &caller, asked).await
}

async fn read(app: App, scope: Scope, asked: ReadRequest) -> Result<Run> {
    runs::read(&app, &scope, asked).await
}

async fn plan(app: App, scope: Scope, asked: PlanRequest) -> Result<RunPlan> {
    runs::plan(&app, &scope, asked).await
}

async fn apply(app: App, scope: Scope, asked: ApplyRequest) -> Result<Run> {
    runs::apply(&app, &scope, asked).await
}

async fn stop(app: App, scope: Scope, asked: StopRequest) -> Result<()> {
    runs::stop(&app, &scope, &asked).await
}

async fn connect(app: App, scope: Scope, asked: ConnectRequest) -> Result<Port> {
    runs::connect(&app, &scope, &asked).await
}

async fn may_connect(app: App, scope: Scope, asked: ConnectRequest) -> Result<()> {
    runs::may_connect(&app, &scope, &asked).await
}

async fn delete(app: App, scope: Scope, asked: DeleteRequest) -> Result<()> {
    runs::delete(&app, &scope, &asked.runs_names).await
}
