//! Secrets.

use windlass_api::{operations::*, secrets::*, server::EmptyRequest};

use crate::{app::App, auth::ProjectScope, error::Result, http::ApiRoutes, services::secrets};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .project::<ListSecrets, _, _>(list)
        .project::<ReadSecret, _, _>(read)
        .project::<SetSecret, _, _>(set)
        .project::<DeleteSecrets, _, _>(delete)
}

async fn list(app: App, scope: ProjectScope, _: EmptyRequest) -> Result<Vec<Secret>> {
    secrets::list(&app, &scope).await
}

async fn read(app: App, scope: ProjectScope, requested: NameRequest) -> Result<Secret> {
    secrets::read(&app, &scope, &requested.name).await
}

async fn set(app: App, scope: ProjectScope, requested: SetRequest) -> Result<Secret> {
    secrets::set(&app, &scope, requested).await
}

async fn delete(app: App, scope: ProjectScope, requested: DeleteRequest) -> Result<()> {
    secrets::delete(&app, &scope, &requested.secrets_names).await
}
