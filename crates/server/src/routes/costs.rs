//! Costs.

use windlass_api::{
    costs::{CostReport, ListRequest},
    operations::ListCosts,
};

use crate::{app::App, auth::Scope, error::Result, http::Routes, services::costs};

pub(super) fn mount(routes: Routes) -> Routes {
    routes.project::<ListCosts, _, _>(list)
}

async fn list(app: App, scope: Scope, asked: ListRequest) -> Result<CostReport> {
    costs::list(&app, &scope, &asked).await
}
