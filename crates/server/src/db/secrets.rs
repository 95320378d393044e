//! Table `secrets`: sealed values. What seals them is not this folder's business.

use windlass_model::{
    id::{ProjectId, SecretId},
    time::Timestamp,
};

use super::{
    Change, Db, DbError, Expect, Val,
    record::{record, statements},
};
use crate::params;

record! {
    pub struct Secret {
        pub id: SecretId,
        pub project_id: ProjectId,
        pub name: String,
        /// Grows by one with every change of the value.
        pub version: i64,
        pub sealed: Vec<u8>,
        pub key_id: String,
        pub created_at: Timestamp,
        pub updated_at: Timestamp,
    }
}

statements! {
    FIND = "SELECT {} FROM secrets s WHERE s.project_id = $1 AND s.name = $2", Secret::columns("s");
    LIST = "SELECT {} FROM secrets s WHERE s.project_id = $1 ORDER BY s.name", Secret::columns("s");
    /// One text for both: the id stays that of the first value, the version grows.
    PUT = "INSERT INTO secrets (id, project_id, name, version, sealed, key_id, created_at, updated_at) \
           VALUES ($1, $2, $3, 1, $4, $5, now_us(), now_us()) ON CONFLICT (project_id, name) DO UPDATE SET \
           version = secrets.version + 1, sealed = excluded.sealed, key_id = excluded.key_id, \
           updated_at = excluded.updated_at RETURNING id, version";
    DELETE = "DELETE FROM secrets WHERE project_id = $1 AND name = $2";
}

pub async fn find(db: &Db, project: ProjectId, name: &str) -> Result<Option<Secret>, DbError> {
    db.query_opt(FIND.as_str(), params![project, name]).await?.as_ref().map(Secret::read).transpose()
}

pub async fn list(db: &Db, project: ProjectId) -> Result<Vec<Secret>, DbError> {
    db.query(LIST.as_str(), params![project]).await?.iter().map(Secret::read).collect()
}

/// Creates or replaces. Its row in `Written::Done` is `(id, version)`; `id` is used when it is new.
pub fn put(id: SecretId, project: ProjectId, name: &str, sealed: Vec<u8>, key_id: &str) -> Change {
    Change::Query { sql: PUT.as_str().into(), params: params![id, project, name, sealed, key_id] }
}

/// Stale when there is none of that name.
pub fn delete(project: ProjectId, name: &str) -> Change {
    let params: Vec<Val> = params![project, name];
    Change::Exec { sql: DELETE.as_str().into(), params, expect: Expect::One }
}
