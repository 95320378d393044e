//! Costs.

use windlass_api::{
    costs::{CostReport, ListRequest},
    operations::ListCosts,
};

use crate::{app::App, auth::ProjectScope, error::Result, http::ApiRoutes, services::costs};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes.project::<ListCosts, _, _>(list)
}

async fn list(app: App, scope: ProjectScope, requested: ListRequest) -> Result<CostReport> {
    costs::list(&app, &scope, &requested).await
}
