//! Table `secrets`: sealed values. Sealing is done outside of this folder.

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
        /// Incremented with every change of the value.
        pub version: i64,
        pub sealed: Vec<u8>,
        pub key_id: String,
        /// Users whose runs may use it: `everyone`, `managers`, or a JSON list of user ids.
        pub users: String,
        pub created_at: Timestamp,
        pub updated_at: Timestamp,
    }
}

statements! {
    FIND = "SELECT {} FROM secrets s WHERE s.project_id = $1 AND s.name = $2", Secret::columns("s");
    LIST = "SELECT {} FROM secrets s WHERE s.project_id = $1 ORDER BY s.name", Secret::columns("s");
    STATE = "SELECT count(*), coalesce(max(s.updated_at), 0) FROM secrets s WHERE s.project_id = $1";
    /// Only if the version is unchanged: a value is sealed for its version.
    REPLACE = "UPDATE secrets SET version = $2 + 1, sealed = $3, key_id = $4, users = $5, updated_at = now_us() \
               WHERE id = $1 AND version = $2";
    NAMED = "SELECT {} FROM secrets s WHERE s.project_id = $1 AND s.name IN \
             (SELECT value FROM json_each(CAST($2 AS TEXT))) ORDER BY s.name", Secret::columns("s");
    DELETE = "DELETE FROM secrets WHERE project_id = $1 AND name = $2";
}

pub async fn find(db: &Db, project: ProjectId, name: &str) -> Result<Option<Secret>, DbError> {
    db.query_opt(FIND.as_str(), params![project, name]).await?.map(Secret::read).transpose()
}

pub async fn list(db: &Db, project: ProjectId) -> Result<Vec<Secret>, DbError> {
    db.query(LIST.as_str(), params![project]).await?.into_iter().map(Secret::read).collect()
}

/// State of the secrets of a project. It differs after each change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SecretsState {
    count: i64,
    updated_at: i64,
}

pub async fn state(db: &Db, project: ProjectId) -> Result<SecretsState, DbError> {
    match db.query_opt(STATE.as_str(), params![project]).await? {
        Some(row) => Ok(SecretsState { count: row.int(0)?, updated_at: row.int(1)? }),
        None => Ok(SecretsState { count: 0, updated_at: 0 }),
    }
}

/// Existing secrets with these names.
pub async fn find_named(
    db: &Db,
    project: ProjectId,
    names: impl IntoIterator<Item = &str>,
) -> Result<Vec<Secret>, DbError> {
    let names: Vec<&str> = names.into_iter().collect();
    let rows = db.query(NAMED.as_str(), vec![project.into(), Val::list(&names)]).await?;
    rows.into_iter().map(Secret::read).collect()
}

/// Stores the first version. Conflicts on `secrets_name_key` if the name is in use.
pub fn create(
    id: SecretId,
    project: ProjectId,
    name: &str,
    sealed: Vec<u8>,
    key_id: &str,
    users: &str,
) -> Change {
    Change::Insert {
        table: "secrets",
        values: vec![
            ("id", id.into()),
            ("project_id", project.into()),
            ("name", name.into()),
            ("version", 1_i64.into()),
            ("sealed", sealed.into()),
            ("key_id", key_id.into()),
            ("users", users.into()),
            ("created_at", Val::Now),
            ("updated_at", Val::Now),
        ],
    }
}

/// Stores the version after `version`. Stale if another write was faster.
pub fn replace(id: SecretId, version: i64, sealed: Vec<u8>, key_id: &str, users: &str) -> Change {
    Change::Exec {
        sql: REPLACE.as_str().into(),
        params: params![id, version, sealed, key_id, users],
        expect: Expect::One,
    }
}

/// Stale if there is no secret of that name.
pub fn delete(project: ProjectId, name: &str) -> Change {
    let params: Vec<Val> = params![project, name];
    Change::Exec { sql: DELETE.as_str().into(), params, expect: Expect::One }
}
