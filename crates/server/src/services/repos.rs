//! Repos, their credentials, diffs and archives: the files of runs.

use sha2::{Digest as _, Sha256};
use uuid::Uuid;
use windlass_api::{Document, error::ApiErrorCode, files, operations::DeleteRepos, repos as wire};
use windlass_model::config::mounts::repository_name;

use super::{Upload, names};
use crate::{
    app::App,
    auth::{Caller, ProjectScope},
    db::{
        Change, Unit, WriteOutcome,
        documents::{REPO_CREDENTIALS, REPO_INFO},
        repos,
    },
    encryption::AssociatedData,
    error::{Error, Result},
};

const ID_CHARS_MAX: usize = 200;

/// Associated data of credentials, which belong to one user of a repo.
pub(super) fn creds_aad(repo: Uuid, user: &str) -> AssociatedData<'_> {
    AssociatedData { table: "repo_creds", owner: repo, name: user, version: 1 }
}

fn not_found() -> Error {
    Error::Refused { code: ApiErrorCode::ResourceNotExists, msg: "Repo not found".into() }
}

fn check_id(id: &str) -> Result<()> {
    if id.is_empty() || id.chars().count() > ID_CHARS_MAX || id.chars().any(char::is_control) {
        return Err(Error::refused("invalid repo_id"));
    }
    Ok(())
}

pub async fn list(app: &App, scope: &ProjectScope) -> Result<Vec<wire::RepoHead>> {
    let repos = repos::list(app.db(), scope.project.id).await?;
    repos
        .into_iter()
        .map(|repo| {
            Ok(wire::RepoHead { repo_id: repo.name, repo_info: REPO_INFO.decode(repo.id, &repo.info)? })
        })
        .collect()
}

pub async fn read(
    app: &App,
    scope: &ProjectScope,
    requested: wire::ReadRequest,
) -> Result<wire::RepoHeadWithCreds> {
    let found = repos::find(app.db(), scope.project.id, &requested.repo_id).await?;
    let repo = found.ok_or_else(not_found)?;
    let mut creds = None;
    if requested.include_creds
        && let Some(sealed) = repos::creds(app.db(), repo.id, scope.caller.user.id).await?
    {
        let user = scope.caller.user.id.to_string();
        let plain = app.keys().open_sealed(&creds_aad(repo.id, &user), &sealed)?;
        creds = Some(REPO_CREDENTIALS.decode_bytes(repo.id, &plain)?);
    }
    Ok(wire::RepoHeadWithCreds {
        repo_id: repo.name,
        repo_info: REPO_INFO.decode(repo.id, &repo.info)?,
        repo_creds: creds,
    })
}

/// Registers a repo. Credentials are per user; leaving them out keeps the stored ones.
pub async fn init(app: &App, scope: &ProjectScope, requested: wire::InitRequest) -> Result<()> {
    check_id(&requested.repo_id)?;
    let project = scope.project.id;
    let info = requested.repo_info.value()?;
    let kind = info["repo_type"].as_str().unwrap_or_default();
    if !matches!(kind, "remote" | "local" | "virtual") {
        return Err(Error::field("repo_info", "unknown repo_type"));
    }
    let put = repos::put(app.db().new_id()?, project, &requested.repo_id, kind, requested.repo_info.text());
    let (_, rows) = app.db().write(Unit::new().and([put])).await?.done()?;
    let Some(creds) = &requested.repo_creds else { return Ok(()) };
    let row = rows.first().and_then(|rows| rows.first()).ok_or_else(not_found)?;
    let (repo, user) = (row.uuid(0)?, scope.caller.user.id);
    let sealed = app.keys().seal(&creds_aad(repo, &user.to_string()), &serde_json::to_vec(creds)?)?;
    let change = repos::put_creds(project, &requested.repo_id, user, sealed);
    match app.db().write(Unit::new().and([change])).await? {
        WriteOutcome::Done { .. } => Ok(()),
        WriteOutcome::Stale { .. } => Err(not_found()),
    }
}

/// Returns the id of a repository that is cloned by its URL; the same that `windlass apply` gives to it.
pub(crate) fn remote_id(url: &str) -> String {
    format!("{}-{}", repository_name(url), &hex::encode(Sha256::digest(url))[..8])
}

/// Registers a repository that is cloned by its URL. Stored credentials are kept.
pub(crate) async fn register_remote(app: &App, scope: &ProjectScope, url: &str) -> Result<()> {
    let info = serde_json::json!({ "repo_type": "remote", "repo_name": repository_name(url) });
    let request =
        wire::InitRequest { repo_id: remote_id(url), repo_info: Document::new(&info)?, repo_creds: None };
    init(app, scope, request).await
}

/// Deletes repos. A repo that other users stored credentials or code in belongs to them, too: their runs need it.
pub async fn delete(app: &App, scope: &ProjectScope, ids: &[String]) -> Result<()> {
    let user = scope.caller.user.id;
    for id in ids {
        let other = repos::other_user(app.db(), scope.project.id, id, user).await?;
        scope.require_ownership::<DeleteRepos>(other.or(Some(user)), &format!("repo `{id}`"))?;
    }
    let changes = ids.iter().map(|id| repos::delete(scope.project.id, id));
    app.db().write(Unit::new().and(changes)).await?.done()?;
    Ok(())
}

pub async fn upload_code(app: &App, scope: &ProjectScope, repo_id: &str, upload: Upload) -> Result<()> {
    check_hash(&upload)?;
    let found = repos::find(app.db(), scope.project.id, repo_id).await?;
    let repo = found.ok_or_else(not_found)?;
    let (user, room) = (scope.caller.user.id, app.settings().limits.uploads_bytes);
    let change = repos::put_code(app.db().new_id()?, repo.id, user, &upload.name, upload.content, room);
    store_upload(app, change).await.map(drop)
}

pub async fn find_archive(app: &App, caller: &Caller, hash: &str) -> Result<files::Archive> {
    let found = repos::find_archive(app.db(), caller.user.id, hash).await?;
    let id = found.ok_or_else(|| Error::absent("File archive"))?;
    Ok(files::Archive { id, hash: hash.to_owned() })
}

/// Stores an archive. The same user and hash give the same archive.
pub async fn upload_archive(app: &App, caller: &Caller, upload: Upload) -> Result<files::Archive> {
    check_hash(&upload)?;
    let (user, room) = (caller.user.id, app.settings().limits.uploads_bytes);
    let change = repos::put_archive(app.db().new_id()?, user, &upload.name, upload.content, room);
    Ok(files::Archive { id: store_upload(app, change).await?, hash: upload.name })
}

/// Stores an upload and returns its id, if the user's quota permits it.
async fn store_upload(app: &App, change: Change) -> Result<Uuid> {
    let (_, rows) = app.db().write(Unit::new().and([change])).await?.done()?;
    let limit = app.settings().limits.uploads_bytes.unwrap_or(u64::MAX);
    let row = rows.first().and_then(|rows| rows.first()).ok_or(Error::UploadLimit { limit })?;
    Ok(row.uuid(0)?)
}

/// Checks that an upload is named by the hash of its content.
fn check_hash(upload: &Upload) -> Result<()> {
    names::check_hash("file name", &upload.name)?;
    if hex::encode(Sha256::digest(&upload.content)) == upload.name {
        return Ok(());
    }
    Err(Error::refused("the file name is not the SHA-256 of the file"))
}
