//! Table `registry_passwords`, and the specifications of earlier versions that contain such passwords.

use uuid::Uuid;
use windlass_model::id::{ProjectId, UserId};

use super::{
    Change, Db, DbError, Expect, Val,
    documents::{JOB_SPEC, JsonColumn, RUN_COMPLETE_SPEC, RUN_SPEC},
};
use crate::params;

/// Migration that moves passwords out of specifications stored before this table existed.
const MIGRATION_NAME: &str = "registry_passwords";

/// A sealed password.
#[derive(Clone, Debug)]
pub struct SealedPassword {
    pub id: Uuid,
    pub project: ProjectId,
    pub user: UserId,
    pub sealed: Vec<u8>,
}

const COLUMNS: &str = "id, project_id, user_id, password_sealed";

fn read(row: &super::Row) -> Result<SealedPassword, DbError> {
    Ok(SealedPassword { id: row.uuid(0)?, project: row.id(1)?, user: row.id(2)?, sealed: row.bytes(3)? })
}

pub async fn find(db: &Db, id: Uuid) -> Result<Option<SealedPassword>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM registry_passwords WHERE id = $1");
    db.query_opt(sql, params![id]).await?.map(|row| read(&row)).transpose()
}

/// Passwords that a user stored in a project, newest first.
pub async fn list_by_user(db: &Db, project: ProjectId, user: UserId) -> Result<Vec<SealedPassword>, DbError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM registry_passwords WHERE project_id = $1 AND user_id = $2
         ORDER BY created_at DESC, id LIMIT 100"
    );
    db.query(sql, params![project, user]).await?.iter().map(read).collect()
}

pub fn create(password: SealedPassword) -> Change {
    Change::Insert {
        table: "registry_passwords",
        values: vec![
            ("id", password.id.into()),
            ("project_id", password.project.into()),
            ("user_id", password.user.into()),
            ("password_sealed", password.sealed.into()),
            ("created_at", Val::Now),
        ],
    }
}

/// Records that a run is about to refer to a password, which retention counts from.
pub fn touch(id: Uuid) -> Change {
    Change::Exec {
        sql: "UPDATE registry_passwords SET created_at = now_us() WHERE id = $1".into(),
        params: params![id],
        expect: Expect::One,
    }
}

/// A document that may contain a password.
#[derive(Clone, Debug)]
pub struct PasswordDocument {
    pub column: JsonColumn,
    pub id: Uuid,
    pub project: ProjectId,
    pub user: UserId,
    pub text: String,
}

/// Columns with such documents.
const DOCUMENTS: [(JsonColumn, &str); 3] = [
    (RUN_SPEC, "SELECT r.id, r.project_id, r.user_id, r.spec FROM runs r WHERE r.spec LIKE $1"),
    (
        RUN_COMPLETE_SPEC,
        "SELECT r.id, r.project_id, r.user_id, r.settled_spec FROM runs r WHERE r.settled_spec LIKE $1",
    ),
    (
        JOB_SPEC,
        "SELECT j.id, j.project_id, r.user_id, j.job_spec FROM jobs j JOIN runs r ON r.id = j.run_id \
         WHERE j.job_spec LIKE $1",
    ),
];

/// All documents that contain a registry's password.
pub async fn documents(db: &Db) -> Result<Vec<PasswordDocument>, DbError> {
    let mut all = Vec::new();
    for (column, sql) in DOCUMENTS {
        for row in db.query(sql, params!["%\"registry_auth\":{%\"password\":%"]).await? {
            all.push(PasswordDocument {
                column,
                id: row.uuid(0)?,
                project: row.id(1)?,
                user: row.id(2)?,
                text: row.text(3)?,
            });
        }
    }
    Ok(all)
}

/// Replaces the text, unless it was changed in the meantime.
pub fn replace(stored: &PasswordDocument, text: &str) -> Change {
    let (table, column) = (stored.column.table(), stored.column.name());
    Change::Exec {
        sql: format!("UPDATE {table} SET {column} = $3 WHERE id = $1 AND {column} = $2").into(),
        params: params![stored.id, stored.text.as_str(), text],
        expect: Expect::Any,
    }
}

pub async fn is_migration_done(db: &Db) -> Result<bool, DbError> {
    Ok(db.query_opt("SELECT 1 FROM chores WHERE name = $1", params![MIGRATION_NAME]).await?.is_some())
}

pub fn mark_migration_done() -> Change {
    Change::Exec {
        sql: "INSERT INTO chores (name, done_at) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING".into(),
        params: params![MIGRATION_NAME, Val::Now],
        expect: Expect::Any,
    }
}
