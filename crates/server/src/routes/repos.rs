//! Repos and files.

use windlass_api::{
    files::{Archive, HashRequest},
    operations::*,
    repos::*,
    server::EmptyRequest,
};

use crate::{
    app::App,
    auth::{Caller, ProjectScope},
    error::Result,
    http::ApiRoutes,
    services::{Upload, repos},
};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .project::<ListRepos, _, _>(list)
        .project::<ReadRepo, _, _>(read)
        .project::<InitRepo, _, _>(init)
        .project::<DeleteRepos, _, _>(delete)
        .project_upload::<UploadCode, _, _>(upload_code)
        .token::<ReadArchive, _, _, _>(find_archive)
        .token_upload::<UploadArchive, _, _>(upload_archive)
}

async fn list(app: App, scope: ProjectScope, _: EmptyRequest) -> Result<Vec<RepoHead>> {
    repos::list(&app, &scope).await
}

async fn read(app: App, scope: ProjectScope, requested: ReadRequest) -> Result<RepoHeadWithCreds> {
    repos::read(&app, &scope, requested).await
}

async fn init(app: App, scope: ProjectScope, requested: InitRequest) -> Result<()> {
    repos::init(&app, &scope, requested).await
}

async fn delete(app: App, scope: ProjectScope, requested: DeleteRequest) -> Result<()> {
    repos::delete(&app, &scope, &requested.repos_ids).await
}

async fn upload_code(
    app: App,
    scope: ProjectScope,
    requested: UploadCodeQuery,
    upload: Upload,
) -> Result<()> {
    repos::upload_code(&app, &scope, &requested.repo_id, upload).await
}

async fn find_archive(app: App, caller: Caller, requested: HashRequest) -> Result<Archive> {
    repos::find_archive(&app, &caller, &requested.hash).await
}

async fn upload_archive(app: App, caller: Caller, _: EmptyRequest, upload: Upload) -> Result<Archive> {
    repos::upload_archive(&app, &caller, upload).await
}
