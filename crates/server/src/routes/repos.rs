//! Repos and files.

use windlass_api::{
    files::{Archive, HashRequest},
    operations::*,
    repos::*,
    server::Nothing,
};

use crate::{
    app::App,
    auth::{Caller, Scope},
    error::Result,
    http::Routes,
    services::{Upload, repos},
};

pub(super) fn mount(routes: Routes) -> Routes {
    routes
        .project::<ListRepos, _, _>(list)
        .project::<ReadRepo, _, _>(read)
        .project::<InitRepo, _, _>(init)
        .project::<DeleteRepos, _, _>(delete)
        .project_upload::<UploadCode, _, _>(upload_code)
        .token::<ReadArchive, _, _, _>(find_archive)
        .token_upload::<UploadArchive, _, _>(upload_archive)
}

async fn list(app: App, scope: Scope, _: Nothing) -> Result<Vec<RepoHead>> {
    repos::list(&app, &scope).await
}

async fn read(app: App, scope: Scope, asked: ReadRequest) -> Result<RepoHeadWithCreds> {
    repos::read(&app, &scope, asked).await
}

async fn init(app: App, scope: Scope, asked: InitRequest) -> Result<()> {
    repos::init(&app, &scope, asked).await
}

async fn delete(app: App, scope: Scope, asked: DeleteRequest) -> Result<()> {
    repos::delete(&app, &scope, &asked.repos_ids).await
}

async fn upload_code(app: App, scope: Scope, asked: UploadCodeQuery, upload: Upload) -> Result<()> {
    repos::upload_code(&app, &scope, &asked.repo_id, upload).await
}

async fn find_archive(app: App, caller: Caller, asked: HashRequest) -> Result<Archive> {
    repos::find_archive(&app, &caller, &asked.hash).await
}

async fn upload_archive(app: App, caller: Caller, _: Nothing, upload: Upload) -> Result<Archive> {
    repos::upload_archive(&app, &caller, upload).await
}
