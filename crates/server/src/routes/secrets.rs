//! Secrets.

use windlass_api::{operations::*, secrets::*, server::Nothing};

use crate::{app::App, auth::Scope, error::Result, http::Routes, services::secrets};

pub(super) fn mount(routes: Routes) -> Routes {
    routes
        .project::<ListSecrets, _, _>(list)
        .project::<ReadSecret, _, _>(read)
        .project::<SetSecret, _, _>(set)
        .project::<DeleteSecrets, _, _>(delete)
}

async fn list(app: App, scope: Scope, _: Nothing) -> Result<Vec<Secret>> {
    secrets::list(&app, &scope).await
}

async fn read(app: App, scope: Scope, asked: NameRequest) -> Result<Secret> {
    secrets::read(&app, &scope, &asked.name).await
}

async fn set(app: App, scope: Scope, asked: SetRequest) -> Result<Secret> {
    secrets::set(&app, &scope, asked).await
}

async fn delete(app: App, scope: Scope, asked: DeleteRequest) -> Result<()> {
    secrets::delete(&app, &scope, &asked.secrets_names).await
}
