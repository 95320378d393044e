//! Sharing between projects.

use windlass_api::{exports as wire, operations::*, server::EmptyRequest};

use crate::{app::App, auth::ProjectScope, error::Result, http::ApiRoutes, services::exports};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .project::<ListExports, _, _>(list)
        .project::<CreateExport, _, _>(create)
        .project::<UpdateExport, _, _>(update)
        .project::<DeleteExport, _, _>(delete)
        .project::<ListImports, _, _>(list_imports)
        .project::<DeleteImport, _, _>(delete_import)
}

async fn list(app: App, scope: ProjectScope, _: EmptyRequest) -> Result<wire::Exports> {
    exports::list(&app, &scope).await
}

async fn create(app: App, scope: ProjectScope, sent: wire::CreateRequest) -> Result<wire::Export> {
    exports::create(&app, &scope, &sent).await
}

async fn update(app: App, scope: ProjectScope, sent: wire::UpdateRequest) -> Result<wire::Export> {
    exports::update(&app, &scope, &sent).await
}

async fn delete(app: App, scope: ProjectScope, sent: wire::NameRequest) -> Result<()> {
    exports::delete(&app, &scope, &sent.name).await
}

async fn list_imports(app: App, scope: ProjectScope, _: EmptyRequest) -> Result<wire::Imports> {
    exports::list_imports(&app, &scope).await
}

async fn delete_import(app: App, scope: ProjectScope, sent: wire::DeleteImportRequest) -> Result<()> {
    exports::delete_import(&app, &scope, &sent).await
}
