//! Instances.

use windlass_api::{instances::*, operations::*};

use crate::{
    app::App,
    auth::{Caller, ProjectScope},
    error::Result,
    http::ApiRoutes,
    services::instances,
};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .token::<ListInstances, _, _, _>(list)
        .project::<ReadInstance, _, _>(read)
        .project::<ListInstanceJobs, _, _>(history)
        .project::<ListHealthChecks, _, _>(health_checks)
}

async fn list(app: App, caller: Caller, requested: ListRequest) -> Result<Vec<Instance>> {
    instances::list(&app, &caller, requested).await
}

async fn read(app: App, scope: ProjectScope, requested: ReadRequest) -> Result<Instance> {
    instances::read(&app, &scope, &requested).await
}

async fn history(app: App, scope: ProjectScope, requested: HistoryRequest) -> Result<InstanceHistory> {
    instances::history(&app, &scope, requested).await
}

async fn health_checks(
    app: App,
    scope: ProjectScope,
    requested: HealthChecksRequest,
) -> Result<HealthChecks> {
    instances::health_checks(&app, &scope, &requested).await
}
