//! Tables `repos`, `repo_creds`, `codes` and `archives`: the files of runs.

use uuid::Uuid;
use windlass_model::{
    id::{ProjectId, UserId},
    time::Timestamp,
};

use super::{
    Change, Db, DbError, Expect, Unit, Val,
    record::{record, statements},
};
use crate::params;

record! {
    pub struct Repo {
        pub id: Uuid,
        pub project_id: ProjectId,
        /// The repo's id, as clients name it.
        pub name: String,
        pub kind: String,
        /// JSON, as the client sent it.
        pub info: String,
        pub created_at: Timestamp,
    }
}

statements! {
    FIND = "SELECT {} FROM repos r WHERE r.project_id = $1 AND r.name = $2", Repo::columns("r");
    LIST = "SELECT {} FROM repos r WHERE r.project_id = $1 ORDER BY r.created_at, r.id", Repo::columns("r");
    PUT = "INSERT INTO repos (id, project_id, name, kind, info, created_at) VALUES ($1, $2, $3, $4, $5, now_us()) \
           ON CONFLICT (project_id, name) DO UPDATE SET kind = excluded.kind, info = excluded.info RETURNING id";
    DELETE = "DELETE FROM repos WHERE project_id = $1 AND name = $2";
    /// A user other than $3 who stored credentials or code in the repo.
    OTHER_USER = "SELECT coalesce(\
                      (SELECT min(c.user_id) FROM repo_creds c WHERE c.repo_id = r.id AND c.user_id <> $3), \
                      (SELECT min(d.user_id) FROM codes d WHERE d.repo_id = r.id AND d.user_id <> $3)) \
                  FROM repos r WHERE r.project_id = $1 AND r.name = $2";
    PUT_CREDS = "INSERT INTO repo_creds (repo_id, user_id, sealed) SELECT id, $3, $4 FROM repos \
                 WHERE project_id = $1 AND name = $2 \
                 ON CONFLICT (repo_id, user_id) DO UPDATE SET sealed = excluded.sealed";
    CREDS = "SELECT sealed FROM repo_creds WHERE repo_id = $1 AND user_id = $2";
    /// Nothing is stored, and no id returned, if the user's quota is exceeded; existing content needs none.
    PUT_CODE = "INSERT INTO codes (id, repo_id, hash, blob, created_at, used_at, user_id, size) \
                SELECT $1, $2, $3, $4, now_us(), now_us(), $5, CAST($6 AS BIGINT) \
                WHERE CAST($6 AS BIGINT) \
                  + (SELECT CAST(coalesce(sum(c.size), 0) AS BIGINT) FROM codes c WHERE c.user_id = $5) \
                  + (SELECT CAST(coalesce(sum(a.size), 0) AS BIGINT) FROM archives a WHERE a.user_id = $5) \
                  <= CAST($7 AS BIGINT) \
                OR EXISTS (SELECT 1 FROM codes c WHERE c.repo_id = $2 AND c.hash = $3) \
                ON CONFLICT (repo_id, hash) DO UPDATE SET used_at = excluded.used_at RETURNING id";
    USE_CODE = "UPDATE codes SET used_at = now_us() WHERE hash = $3 \
                AND repo_id IN (SELECT id FROM repos WHERE project_id = $1 AND name = $2)";
    CODE = "SELECT blob FROM codes WHERE repo_id = $1 AND hash = $2";
    /// As `PUT_CODE`.
    PUT_ARCHIVE = "INSERT INTO archives (id, user_id, hash, blob, created_at, used_at, size) \
                   SELECT $1, $2, $3, $4, now_us(), now_us(), CAST($5 AS BIGINT) \
                   WHERE CAST($5 AS BIGINT) \
                     + (SELECT CAST(coalesce(sum(c.size), 0) AS BIGINT) FROM codes c WHERE c.user_id = $2) \
                     + (SELECT CAST(coalesce(sum(a.size), 0) AS BIGINT) FROM archives a WHERE a.user_id = $2) \
                     <= CAST($6 AS BIGINT) \
                   OR EXISTS (SELECT 1 FROM archives a WHERE a.user_id = $2 AND a.hash = $3) \
                   ON CONFLICT (user_id, hash) DO UPDATE SET used_at = excluded.used_at RETURNING id";
    /// The caller is about to name it in a run: it counts as used now.
    FIND_ARCHIVE = "UPDATE archives SET used_at = now_us() WHERE user_id = $1 AND hash = $2 RETURNING id";
    USE_ARCHIVES = "UPDATE archives SET used_at = now_us() \
                    WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    COUNT_ARCHIVES = "SELECT count(*) FROM archives WHERE user_id = $1 \
                      AND id IN (SELECT value FROM json_each(CAST($2 AS TEXT)))";
    ARCHIVE = "SELECT user_id, hash, blob FROM archives WHERE id = $1";
}

pub async fn find(db: &Db, project: ProjectId, name: &str) -> Result<Option<Repo>, DbError> {
    db.query_opt(FIND.as_str(), params![project, name]).await?.map(Repo::read).transpose()
}

pub async fn list(db: &Db, project: ProjectId) -> Result<Vec<Repo>, DbError> {
    db.query(LIST.as_str(), params![project]).await?.into_iter().map(Repo::read).collect()
}

/// Adds the repo or replaces its data. Its row in `Written::Done` is the repo's id.
pub fn put(id: Uuid, project: ProjectId, name: &str, kind: &str, info: &str) -> Change {
    Change::Query { sql: PUT.as_str().into(), params: params![id, project, name, kind, info] }
}

/// Deletes a repo with its credentials and codes. An unknown name is not an error.
pub fn delete(project: ProjectId, name: &str) -> Change {
    exec(&DELETE, params![project, name], Expect::Any)
}

/// Another user who stored credentials or code in a repo; `None` if only this user did, or if there is no such repo.
pub async fn other_user(
    db: &Db,
    project: ProjectId,
    name: &str,
    user: UserId,
) -> Result<Option<UserId>, DbError> {
    let row = db.query_opt(OTHER_USER.as_str(), params![project, name, user]).await?;
    row.map_or(Ok(None), |row| row.opt_id(0))
}

/// Stale if there is no such repo.
pub fn put_creds(project: ProjectId, name: &str, user: UserId, sealed: Vec<u8>) -> Change {
    exec(&PUT_CREDS, params![project, name, user, sealed], Expect::One)
}

pub async fn creds(db: &Db, repo: Uuid, user: UserId) -> Result<Option<Vec<u8>>, DbError> {
    db.query_opt(CREDS.as_str(), params![repo, user]).await?.map(|row| row.bytes(0)).transpose()
}

/// Minimum size that counts for an upload: many small ones cost more than their bytes.
const SIZE_MIN: usize = 16 * 1024;

/// Size that counts for an upload of so many bytes, and the quota of the user.
fn size_and_quota(bytes: usize, room: Option<u64>) -> (i64, i64) {
    let size = i64::try_from(bytes.max(SIZE_MIN)).unwrap_or(i64::MAX / 2);
    (size, room.and_then(|room| i64::try_from(room).ok()).unwrap_or(i64::MAX))
}

/// Stores a diff once per repo and hash. No row in `Written::Done`: the user's uploads would exceed `room`.
pub fn put_code(id: Uuid, repo: Uuid, user: UserId, hash: &str, blob: Vec<u8>, room: Option<u64>) -> Change {
    let (size, room) = size_and_quota(blob.len(), room);
    Change::Query { sql: PUT_CODE.as_str().into(), params: params![id, repo, hash, blob, user, size, room] }
}

pub async fn code(db: &Db, repo: Uuid, hash: &str) -> Result<Option<Vec<u8>>, DbError> {
    db.query_opt(CODE.as_str(), params![repo, hash]).await?.map(|row| row.bytes(0)).transpose()
}

/// Stores an archive. Its row in `Written::Done` is the id: the same for the same user and hash. No row: the user's
/// uploads would exceed `room`.
pub fn put_archive(id: Uuid, user: UserId, hash: &str, blob: Vec<u8>, room: Option<u64>) -> Change {
    let (size, room) = size_and_quota(blob.len(), room);
    Change::Query { sql: PUT_ARCHIVE.as_str().into(), params: params![id, user, hash, blob, size, room] }
}

pub async fn find_archive(db: &Db, user: UserId, hash: &str) -> Result<Option<Uuid>, DbError> {
    let unit = Unit::new().query(FIND_ARCHIVE.as_str(), params![user, hash]);
    let (_, rows) = db.write(unit).await?.done()?;
    rows.first().and_then(|rows| rows.first()).map(|row| row.uuid(0)).transpose()
}

/// Marks archives that a new run names as used, so that they are kept with it.
pub fn mark_archives_used(ids: &[Uuid]) -> Change {
    exec(&USE_ARCHIVES, params![Val::list(ids)], Expect::Any)
}

/// Marks a diff as used, by hash and name of its repo.
pub fn mark_code_used(project: ProjectId, repo: &str, hash: &str) -> Change {
    exec(&USE_CODE, params![project, repo, hash], Expect::Any)
}

/// Returns whether all of these are archives of this user.
pub async fn owns_archives(db: &Db, user: UserId, ids: &[Uuid]) -> Result<bool, DbError> {
    let ids: std::collections::BTreeSet<Uuid> = ids.iter().copied().collect();
    if ids.is_empty() {
        return Ok(true);
    }
    let row = db.query_opt(COUNT_ARCHIVES.as_str(), params![user, Val::list(&ids)]).await?;
    Ok(row.map_or(Ok(0), |row| row.int(0))? == i64::try_from(ids.len()).unwrap_or(i64::MAX))
}

/// Owner, hash and bytes of an archive.
pub async fn archive(db: &Db, id: Uuid) -> Result<Option<(UserId, String, Vec<u8>)>, DbError> {
    let row = db.query_opt(ARCHIVE.as_str(), params![id]).await?;
    row.map(|row| Ok((row.id(0)?, row.text(1)?, row.bytes(2)?))).transpose()
}

fn exec(sql: &'static str, params: Vec<Val>, expect: Expect) -> Change {
    Change::Exec { sql: sql.into(), params, expect }
}
