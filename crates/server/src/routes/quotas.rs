//! Quotas of projects and members.

use windlass_api::{operations::*, quotas as wire, server::EmptyRequest};

use crate::{app::App, auth::ProjectScope, error::Result, http::ApiRoutes, services::quotas};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .project::<ListQuotas, _, _>(list)
        .project::<SetQuota, _, _>(set)
        .project::<DeleteQuota, _, _>(delete)
}

async fn list(app: App, scope: ProjectScope, _: EmptyRequest) -> Result<wire::Quotas> {
    quotas::list(&app, &scope).await
}

async fn set(app: App, scope: ProjectScope, sent: wire::SetRequest) -> Result<wire::Quotas> {
    quotas::set(&app, &scope, &sent).await
}

async fn delete(app: App, scope: ProjectScope, sent: wire::DeleteRequest) -> Result<wire::Quotas> {
    quotas::delete(&app, &scope, &sent).await
}
