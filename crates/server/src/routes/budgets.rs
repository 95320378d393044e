//! Usage, and budgets of projects and members.

use windlass_api::{
    budgets as wire,
    operations::*,
    server::EmptyRequest,
    usage::{ListRequest, UsageReport},
};

use crate::{
    app::App,
    auth::{Caller, ProjectScope},
    error::Result,
    http::ApiRoutes,
    services::{budgets, usage},
};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .token::<ListUsage, _, _, _>(list_usage)
        .project::<ListBudgets, _, _>(list)
        .project::<SetBudget, _, _>(set)
        .project::<DeleteBudget, _, _>(delete)
}

async fn list_usage(app: App, caller: Caller, requested: ListRequest) -> Result<UsageReport> {
    usage::list(&app, &caller, &requested).await
}

async fn list(app: App, scope: ProjectScope, _: EmptyRequest) -> Result<wire::Budgets> {
    budgets::list(&app, &scope).await
}

async fn set(app: App, scope: ProjectScope, sent: wire::SetRequest) -> Result<wire::Budgets> {
    budgets::set(&app, &scope, &sent).await
}

async fn delete(app: App, scope: ProjectScope, sent: wire::DeleteRequest) -> Result<wire::Budgets> {
    budgets::delete(&app, &scope, &sent).await
}
