//! Table `backends`: the backends that a project may use, with their configuration.

use std::collections::BTreeSet;

use uuid::Uuid;
use windlass_model::{id::ProjectId, time::Timestamp};

use super::{
    Change, Db, DbError, Expect, Val,
    record::{record, statements},
};
use crate::params;

record! {
    pub struct Backend {
        pub id: Uuid,
        pub project_id: ProjectId,
        pub kind: String,
        /// JSON, without secrets.
        pub config: String,
        pub auth_sealed: Option<Vec<u8>>,
        pub created_at: Timestamp,
    }
}

statements! {
    LIST = "SELECT {} FROM backends b WHERE b.project_id = $1 ORDER BY b.kind", Backend::columns("b");
    LIST_KINDS = "SELECT b.project_id, b.kind FROM backends b WHERE b.project_id IN \
                  (SELECT value FROM json_each(CAST($1 AS TEXT))) ORDER BY b.project_id, b.kind";
    PUT = "INSERT INTO backends (id, project_id, kind, config, auth_sealed, created_at) \
           VALUES ($1, $2, $3, $4, $5, now_us()) ON CONFLICT (project_id, kind) DO UPDATE SET \
           config = excluded.config, auth_sealed = excluded.auth_sealed";
    GRANT = "INSERT INTO backends (id, project_id, kind, config, created_at) VALUES ($1, $2, $3, '{{}}', now_us()) \
             ON CONFLICT (project_id, kind) DO NOTHING";
    LIST_GRANTS = "SELECT b.kind, p.name FROM backends b JOIN projects p ON p.id = b.project_id WHERE NOT p.deleted \
                   ORDER BY b.kind, p.name";
    GRANTED = "SELECT kind FROM backends WHERE project_id = $1";
    DELETE = "DELETE FROM backends WHERE project_id = $1 AND kind = $2";
}

pub async fn list(db: &Db, project: ProjectId) -> Result<Vec<Backend>, DbError> {
    db.query(LIST.as_str(), params![project]).await?.into_iter().map(Backend::read).collect()
}

/// Project and kind of each backend, for lists of projects.
pub async fn list_kinds(db: &Db, projects: &[ProjectId]) -> Result<Vec<(ProjectId, String)>, DbError> {
    let rows = db.query(LIST_KINDS.as_str(), vec![Val::list(projects)]).await?;
    rows.iter().map(|row| Ok((row.id(0)?, row.text(1)?))).collect()
}

/// Backends with the names of the projects that may use them.
pub async fn list_grants(db: &Db) -> Result<Vec<(String, String)>, DbError> {
    let rows = db.query(LIST_GRANTS.as_str(), params![]).await?;
    rows.iter().map(|row| Ok((row.text(0)?, row.text(1)?))).collect()
}

/// Adds the backend or replaces its configuration.
pub fn put(id: Uuid, project: ProjectId, kind: &str, config: &str, auth_sealed: Option<Vec<u8>>) -> Change {
    let params = params![id, project, kind, config, auth_sealed];
    Change::Exec { sql: PUT.as_str().into(), params, expect: Expect::Any }
}

/// Lets the project use the backend; an existing grant is left unchanged.
pub fn grant(id: Uuid, project: ProjectId, kind: &str) -> Change {
    Change::Exec { sql: GRANT.as_str().into(), params: params![id, project, kind], expect: Expect::Any }
}

/// Backends that the project may use.
pub async fn list_granted(db: &Db, project: ProjectId) -> Result<BTreeSet<String>, DbError> {
    db.query(GRANTED.as_str(), params![project]).await?.iter().map(|row| row.text(0)).collect()
}

pub fn delete(project: ProjectId, kind: &str) -> Change {
    Change::Exec { sql: DELETE.as_str().into(), params: params![project, kind], expect: Expect::Any }
}
