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

async fn read(app: App, scope: ProjectScope, asked: ReadRequest) -> Result<RepoHeadWithCreds> {
    repos::read(&app, &scope, asked).await
}

async fn init(app: App, scope: ProjectScope, asked: InitRequest) -> Result<()> {
    repos::init(&app, &scope, asked).await
}

async fn delete(app: App, scope: ProjectScope, asked: DeleteRequest) -> Result<()> {
    repos::delete(&app, &scope, &asked.repos_ids).await
}

async fn upload_code(app: App, scope: ProjectScope, asked: UploadCodeQuery, upload: Upload) -> Result<()> {
    repos::upload_code(&app, &scope, &asked.repo_id, upload).await
}

async fn find_archive(app: App, caller: Caller, asked: HashRequest) -> Result<Archive> {
    repos::find_archive(&app, &caller, &asked.hash).await
}

async fn upload_archive(app: App, caller: Caller, _: EmptyRequest, upload: Upload) -> Result<Archive> {
    repos::upload_archive(&app, &caller, upload).await
}
