//! Sealed columns of all tables, for sealing everything with a new master key.

use uuid::Uuid;
use windlass_model::id::{ProjectId, SecretId};

use super::{Change, Db, DbError, Expect};
use crate::params;

/// Tables and columns that are sealed for the id of their row.
pub const ROW_COLUMNS: [(&str, &str); 14] = [
    ("users", "ssh_private_key_sealed"),
    ("projects", "ssh_private_key_sealed"),
    ("backends", "auth_sealed"),
    ("fleets", "spec_sealed"),
    ("instances", "ssh_sealed"),
    ("instances", "agent_credential_sealed"),
    ("jobs", "secrets_sealed"),
    ("managed_jobs", "secrets_sealed"),
    ("gateways", "ssh_private_key_sealed"),
    ("signing_keys", "seed_sealed"),
    ("containers", "secrets_sealed"),
    ("container_requests", "secrets_sealed"),
    ("queue_tokens", "secret_sealed"),
    ("registry_passwords", "password_sealed"),
];

/// All values of one column. Names come only from `ROW_COLUMNS`.
pub async fn column_values(
    db: &Db,
    table: &'static str,
    column: &'static str,
) -> Result<Vec<(Uuid, Vec<u8>)>, DbError> {
    let sql = format!("SELECT id, {column} FROM {table} WHERE {column} IS NOT NULL");
    db.query(sql, vec![]).await?.iter().map(|row| Ok((row.uuid(0)?, row.bytes(1)?))).collect()
}

/// Replaces the seal of a value, unless the value was replaced in the meantime.
pub fn replace(table: &'static str, column: &'static str, id: Uuid, old: Vec<u8>, new: Vec<u8>) -> Change {
    Change::Exec {
        sql: format!("UPDATE {table} SET {column} = $3 WHERE id = $1 AND {column} = $2").into(),
        params: params![id, old, new],
        expect: Expect::Any,
    }
}

/// A secret's value, with the data for which it is sealed.
#[derive(Clone, Debug)]
pub struct SealedSecret {
    pub id: SecretId,
    pub project: ProjectId,
    pub name: String,
    pub version: i64,
    pub sealed: Vec<u8>,
}

pub async fn secrets(db: &Db) -> Result<Vec<SealedSecret>, DbError> {
    let rows = db.query("SELECT id, project_id, name, version, sealed FROM secrets", vec![]).await?;
    rows.iter()
        .map(|row| {
            Ok(SealedSecret {
                id: row.id(0)?,
                project: row.id(1)?,
                name: row.text(2)?,
                version: row.int(3)?,
                sealed: row.bytes(4)?,
            })
        })
        .collect()
}

pub fn replace_secret(id: SecretId, version: i64, key_id: &str, new: Vec<u8>) -> Change {
    Change::Exec {
        sql: "UPDATE secrets SET sealed = $4, key_id = $3 WHERE id = $1 AND version = $2".into(),
        params: params![id, version, key_id, new],
        expect: Expect::Any,
    }
}

/// Repo, user and value of each credential.
pub async fn repo_creds(db: &Db) -> Result<Vec<(Uuid, Uuid, Vec<u8>)>, DbError> {
    let rows = db.query("SELECT repo_id, user_id, sealed FROM repo_creds", vec![]).await?;
    rows.iter().map(|row| Ok((row.uuid(0)?, row.uuid(1)?, row.bytes(2)?))).collect()
}

pub fn replace_repo_creds(repo: Uuid, user: Uuid, old: Vec<u8>, new: Vec<u8>) -> Change {
    Change::Exec {
        sql: "UPDATE repo_creds SET sealed = $4 WHERE repo_id = $1 AND user_id = $2 AND sealed = $3".into(),
        params: params![repo, user, old, new],
        expect: Expect::Any,
    }
}

/// Ids of the keys with which this database is sealed. The keys themselves are never stored here.
pub async fn key_ids(db: &Db) -> Result<Vec<String>, DbError> {
    let rows = db.query("SELECT id FROM sealing_keys WHERE retired_at IS NULL ORDER BY id", vec![]).await?;
    rows.iter().map(|row| row.text(0)).collect()
}

/// Records that values may be sealed with this key.
pub fn add_key(id: &str) -> Change {
    Change::Exec {
        sql: "INSERT INTO sealing_keys (id, created_at) VALUES ($1, now_us()) ON CONFLICT (id) DO NOTHING"
            .into(),
        params: params![id],
        expect: Expect::Any,
    }
}

/// Records that no value is sealed with any other key.
pub fn retire_other_keys(id: &str) -> Change {
    Change::Exec {
        sql: "UPDATE sealing_keys SET retired_at = now_us() WHERE id <> $1 AND retired_at IS NULL".into(),
        params: params![id],
        expect: Expect::Any,
    }
}
