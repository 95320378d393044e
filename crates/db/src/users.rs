//! Tables `users` and `public_keys`.

use uuid::Uuid;
use windlass_model::{id::UserId, time::Timestamp};

use super::{
    Change, Db, DbError, Row, Unit, Val, WriteOutcome, filter::Filter, filter::Page, filter::contains_pattern,
};
use crate::params;

pub(super) const COLUMNS: &str = "u.id, u.name, u.global_role, u.email, u.active, u.ssh_public_key, u.created_at, u.deleted, \
     u.can_use_queue";
/// Number of `COLUMNS`.
pub(super) const WIDTH: usize = 9;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub id: UserId,
    pub name: String,
    pub admin: bool,
    pub email: Option<String>,
    pub active: bool,
    pub ssh_public_key: Option<String>,
    pub created_at: Timestamp,
    pub deleted: bool,
    /// True if the user may request containers of the queue.
    pub can_use_queue: bool,
}

impl User {
    /// Reads `COLUMNS` from column `at` on.
    pub(super) fn read(row: &Row, at: usize) -> Result<Self, DbError> {
        Ok(Self {
            id: row.id(at)?,
            name: row.text(at + 1)?,
            admin: row.str(at + 2)? == "admin",
            email: row.opt_text(at + 3)?,
            active: row.bool(at + 4)?,
            ssh_public_key: row.opt_text(at + 5)?,
            created_at: Timestamp(row.int(at + 6)?),
            deleted: row.bool(at + 7)?,
            can_use_queue: row.bool(at + 8)?,
        })
    }
}

pub fn role(admin: bool) -> &'static str {
    if admin { "admin" } else { "user" }
}

/// Values of a new row.
#[derive(Debug)]
pub struct NewUser<'a> {
    pub id: UserId,
    pub name: &'a str,
    pub admin: bool,
    pub email: Option<&'a str>,
    pub active: bool,
    pub ssh_public_key: &'a str,
    pub ssh_private_key_sealed: Vec<u8>,
}

/// Conflicts on `users_name_key` if the name is in use.
pub fn create(new: NewUser<'_>) -> Change {
    Change::Insert {
        table: "users",
        values: vec![
            ("id", new.id.into()),
            ("name", new.name.into()),
            ("global_role", role(new.admin).into()),
            ("email", new.email.into()),
            ("active", new.active.into()),
            ("ssh_public_key", new.ssh_public_key.into()),
            ("ssh_private_key_sealed", new.ssh_private_key_sealed.into()),
            ("created_at", Val::Now),
        ],
    }
}

/// Ids and names of all users, including deleted ones.
pub async fn names(db: &Db) -> Result<Vec<(UserId, String)>, DbError> {
    let rows = db.query("SELECT u.id, u.name FROM users u", params![]).await?;
    rows.iter().map(|row| Ok((row.id(0)?, row.text(1)?))).collect()
}

pub async fn by_name(db: &Db, name: &str) -> Result<Option<User>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM users u WHERE u.name = $1 AND NOT u.deleted");
    db.query_opt(sql, params![name]).await?.map(|row| User::read(&row, 0)).transpose()
}

/// Returns whether a user has this name, ignoring case.
pub async fn is_name_taken(db: &Db, name: &str) -> Result<bool, DbError> {
    let sql = "SELECT 1 FROM users WHERE lower(name) = lower($1) AND NOT deleted LIMIT 1";
    Ok(db.query_opt(sql, params![name]).await?.is_some())
}

pub async fn by_names(db: &Db, names: &[String]) -> Result<Vec<User>, DbError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM users u
         WHERE u.name IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT u.deleted"
    );
    db.query(sql, params![Val::list(names)]).await?.iter().map(|row| User::read(row, 0)).collect()
}

/// Active users with this address, ignoring case.
pub async fn by_email(db: &Db, email: &str) -> Result<Vec<User>, DbError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM users u WHERE lower(u.email) = lower($1) AND u.active AND NOT u.deleted LIMIT 2"
    );
    db.query(sql, params![email]).await?.iter().map(|row| User::read(row, 0)).collect()
}

/// Ids of all users, including deleted ones.
pub async fn all_ids(db: &Db) -> Result<Vec<UserId>, DbError> {
    db.query("SELECT id FROM users", vec![]).await?.iter().map(|row| row.id(0)).collect()
}

pub async fn by_ids(db: &Db, ids: &[UserId]) -> Result<Vec<User>, DbError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM users u WHERE u.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))"
    );
    db.query(sql, params![Val::list(ids)]).await?.iter().map(|row| User::read(row, 0)).collect()
}

/// Users by time of creation, and their total number.
pub async fn list(db: &Db, pattern: Option<&str>, page: &Page) -> Result<(Vec<User>, i64), DbError> {
    let all = || {
        let mut filter = Filter::new();
        filter.and("NOT u.deleted");
        if let Some(pattern) = pattern {
            filter.is("lower(u.name) LIKE ? ESCAPE '!'", contains_pattern(pattern));
        }
        filter
    };
    let (counted, params) = all().done();
    let count = db.query_opt(format!("SELECT count(*) FROM users u{counted}"), params).await?;
    let mut filter = all();
    filter.after("u.created_at", "u.id", page);
    let (shown, params) = filter.done();
    let order = page.order("u.created_at", "u.id");
    let rows = db.query(format!("SELECT {COLUMNS} FROM users u{shown}{order}"), params).await?;
    let users = rows.iter().map(|row| User::read(row, 0)).collect::<Result<_, _>>()?;
    Ok((users, count.map_or(Ok(0), |row| row.int(0))?))
}

/// Number of users who may use the server now.
pub async fn count_active(db: &Db) -> Result<i64, DbError> {
    let row =
        db.query_opt("SELECT count(*) FROM users u WHERE u.active AND NOT u.deleted", params![]).await?;
    row.map_or(Ok(0), |row| row.int(0))
}

pub async fn ssh_private_key(db: &Db, id: UserId) -> Result<Option<Vec<u8>>, DbError> {
    let row = db.query_opt("SELECT ssh_private_key_sealed FROM users WHERE id = $1", params![id]).await?;
    row.map_or(Ok(None), |row| row.opt_bytes(0))
}

pub fn set_ssh_key(id: UserId, public: &str, private_sealed: Vec<u8>) -> Change {
    exec(
        "UPDATE users SET ssh_public_key = $2, ssh_private_key_sealed = $3 WHERE id = $1",
        params![id, public, private_sealed],
    )
}

pub fn update(id: UserId, admin: bool, email: Option<&str>, active: bool) -> Change {
    exec(
        "UPDATE users SET global_role = $2, email = $3, active = $4 WHERE id = $1",
        params![id, role(admin), email, active],
    )
}

/// Grants or revokes the right to request containers of the queue.
pub fn set_can_use_queue(id: UserId, can: bool) -> Change {
    exec("UPDATE users SET can_use_queue = $2 WHERE id = $1", params![id, can])
}

/// Deletes a user. The row is kept for references to it; the name is free again, memberships and keys are deleted.
pub fn delete(id: UserId) -> [Change; 3] {
    [
        exec(
            "UPDATE users SET deleted = TRUE, active = FALSE, ssh_private_key_sealed = NULL WHERE id = $1",
            params![id],
        ),
        exec("DELETE FROM members WHERE user_id = $1", params![id]),
        exec("DELETE FROM public_keys WHERE user_id = $1", params![id]),
    ]
}

#[derive(Clone, Debug)]
pub struct PublicKey {
    pub id: Uuid,
    pub name: String,
    pub key: String,
    pub fingerprint: String,
    pub created_at: Timestamp,
}

const KEY_COLUMNS: &str = "id, name, key, fingerprint, created_at";

fn read_key(row: &Row) -> Result<PublicKey, DbError> {
    Ok(PublicKey {
        id: row.uuid(0)?,
        name: row.text(1)?,
        key: row.text(2)?,
        fingerprint: row.text(3)?,
        created_at: Timestamp(row.int(4)?),
    })
}

pub async fn public_keys(db: &Db, user: UserId) -> Result<Vec<PublicKey>, DbError> {
    let sql = format!("SELECT {KEY_COLUMNS} FROM public_keys WHERE user_id = $1 ORDER BY created_at, id");
    db.query(sql, params![user]).await?.iter().map(read_key).collect()
}

/// Conflicts on `public_keys_fingerprint_key` if the user already has the key.
pub async fn add_public_key(
    db: &Db,
    user: UserId,
    name: &str,
    key: &str,
    fingerprint: &str,
) -> Result<PublicKey, DbError> {
    let id = db.new_id()?;
    let unit = Unit::new().insert(
        "public_keys",
        vec![
            ("id", id.into()),
            ("user_id", user.into()),
            ("name", name.into()),
            ("key", key.into()),
            ("fingerprint", fingerprint.into()),
            ("created_at", Val::Now),
        ],
    );
    let (now, _) = db.write(unit).await?.done()?;
    Ok(PublicKey {
        id,
        name: name.to_owned(),
        key: key.to_owned(),
        fingerprint: fingerprint.to_owned(),
        created_at: Timestamp(now),
    })
}

pub async fn delete_public_keys(db: &Db, user: UserId, ids: &[Uuid]) -> Result<WriteOutcome, DbError> {
    let sql = "DELETE FROM public_keys
               WHERE user_id = $1 AND id IN (SELECT value FROM json_each(CAST($2 AS TEXT)))";
    db.write(Unit::new().exec(sql, params![user, Val::list(ids)])).await
}

pub(super) fn exec(sql: &'static str, params: Vec<Val>) -> Change {
    Change::Exec { sql: sql.into(), params, expect: super::Expect::Any }
}
