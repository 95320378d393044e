//! Table `tokens`: hashes of the tokens of callers. No token is ever stored.

use uuid::Uuid;
use windlass_model::{
    id::UserId,
    time::{Span, Timestamp},
};

use super::{
    Change, Db, DbError, Expect, Unit, Val,
    sessions::IS_VALID,
    users::{COLUMNS, User, WIDTH, exec},
};
use crate::params;

/// A token that is valid now.
#[derive(Clone, Debug)]
pub struct ValidToken {
    pub id: Uuid,
    pub hash: String,
    /// True if a use was recorded less than a minute ago.
    pub seen_lately: bool,
    /// Microseconds until it expires.
    pub expires_in_us: Option<i64>,
    pub scope: String,
    pub user: User,
}

/// Finds the token with this hash if it is valid and its user active.
pub async fn find(db: &Db, hash: &str) -> Result<Option<ValidToken>, DbError> {
    find_where(db, "t.hash", hash.into()).await
}

/// Finds the token with this id if it is valid and its user active.
pub async fn find_by_id(db: &Db, id: Uuid) -> Result<Option<ValidToken>, DbError> {
    find_where(db, "t.id", id.into()).await
}

async fn find_where(db: &Db, column: &str, value: Val) -> Result<Option<ValidToken>, DbError> {
    let sql = format!(
        "SELECT {COLUMNS}, t.id, t.hash, t.last_used_at IS NOT NULL AND t.last_used_at > now_us() - 60000000,
                t.expires_at - now_us(), t.scope
         FROM tokens t JOIN users u ON u.id = t.user_id
         WHERE {column} = $1 AND t.revoked_at IS NULL AND u.active AND NOT u.deleted
           AND (t.expires_at IS NULL OR t.expires_at > now_us())"
    );
    let Some(row) = db.query_opt(sql, vec![value]).await? else { return Ok(None) };
    Ok(Some(ValidToken {
        user: User::read(&row, 0)?,
        id: row.uuid(WIDTH)?,
        hash: row.text(WIDTH + 1)?,
        seen_lately: row.bool(WIDTH + 2)?,
        expires_in_us: row.opt_int(WIDTH + 3)?,
        scope: row.text(WIDTH + 4)?,
    }))
}

/// Returns whether any of these hashes belongs to a token of this server, of any kind.
pub async fn is_known(db: &Db, hashes: &[String]) -> Result<bool, DbError> {
    let sql = "SELECT 1 FROM tokens WHERE hash IN (SELECT value FROM json_each(CAST($1 AS TEXT))) \
               UNION ALL \
               SELECT 1 FROM queue_tokens WHERE hash IN (SELECT value FROM json_each(CAST($1 AS TEXT))) \
               UNION ALL \
               SELECT 1 FROM gateways WHERE token_hash IN (SELECT value FROM json_each(CAST($1 AS TEXT))) LIMIT 1";
    Ok(db.query_opt(sql, params![Val::list(hashes)]).await?.is_some())
}

/// Current state of one item on which the rights of a stream are based.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessState {
    /// `token`, `queue`, `project` or `member`.
    pub kind: String,
    /// Hash of the token or session, name of the queue token, or name of the project.
    pub key: String,
    pub user: String,
    pub state: String,
}

/// Current states of the named tokens, projects and members. Invalid ones are left out.
pub async fn access_states(
    db: &Db,
    hashes: &[String],
    queue_tokens: &[String],
    projects: &[String],
    users: &[UserId],
    idle: Span,
) -> Result<Vec<AccessState>, DbError> {
    let sql = format!(
        "SELECT 'token', t.hash, u.id, u.global_role || ' ' || t.scope \
               FROM tokens t JOIN users u ON u.id = t.user_id \
               WHERE t.hash IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND t.revoked_at IS NULL \
                 AND u.active AND NOT u.deleted AND (t.expires_at IS NULL OR t.expires_at > now_us()) \
               UNION ALL \
               SELECT 'token', s.hash, u.id, u.global_role || ' ' || t.scope \
               FROM sessions s JOIN tokens t ON t.id = s.token_id JOIN users u ON u.id = s.user_id \
               WHERE s.hash IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND {IS_VALID} $5 \
               UNION ALL \
               SELECT 'queue', q.uuid, u.id, u.global_role FROM queue_tokens q JOIN users u ON u.id = q.user_id \
               WHERE q.uuid IN (SELECT value FROM json_each(CAST($2 AS TEXT))) AND q.revoked_at IS NULL \
                 AND u.active AND NOT u.deleted \
               UNION ALL \
               SELECT 'project', p.name, '', CASE WHEN p.is_public THEN 'public' ELSE 'closed' END \
               FROM projects p WHERE p.name IN (SELECT value FROM json_each(CAST($3 AS TEXT))) AND NOT p.deleted \
               UNION ALL \
               SELECT 'member', p.name, m.user_id, m.role FROM projects p JOIN members m ON m.project_id = p.id \
               WHERE p.name IN (SELECT value FROM json_each(CAST($3 AS TEXT))) AND NOT p.deleted \
                 AND m.user_id IN (SELECT value FROM json_each(CAST($4 AS TEXT)))"
    );
    let params =
        params![Val::list(hashes), Val::list(queue_tokens), Val::list(projects), Val::list(users), idle.0];
    let rows = db.query(sql, params).await?;
    rows.iter()
        .map(|row| {
            Ok(AccessState { kind: row.text(0)?, key: row.text(1)?, user: row.text(2)?, state: row.text(3)? })
        })
        .collect()
}

/// Inserts the first token of a user.
pub fn create(id: Uuid, user: UserId, hash: &str, prefix: &str, lifetime_us: Option<i64>) -> Change {
    insert(id, user, hash, prefix, FULL_SCOPE, None, lifetime_us)
}

/// Scope column of a token that permits everything that its user may do.
pub const FULL_SCOPE: &str = "user";

fn insert(
    id: Uuid,
    user: UserId,
    hash: &str,
    prefix: &str,
    scope: &str,
    name: Option<&str>,
    lifetime_us: Option<i64>,
) -> Change {
    Change::Insert {
        table: "tokens",
        values: vec![
            ("id", id.into()),
            ("user_id", user.into()),
            ("hash", hash.into()),
            ("prefix", prefix.into()),
            ("scope", scope.into()),
            ("name", name.into()),
            ("created_at", Val::Now),
            ("expires_at", lifetime_us.map_or(Val::Null, Val::NowPlus)),
        ],
    }
}

#[derive(Clone, Debug)]
pub struct NamedToken {
    pub name: String,
    pub scope: String,
    pub prefix: String,
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
    pub last_used_at: Option<Timestamp>,
}

/// Conflicts on `tokens_name_key` if the user has a token of that name.
pub fn create_named(
    id: Uuid,
    user: UserId,
    (hash, prefix): (&str, &str),
    scope: &str,
    name: &str,
    lifetime_us: Option<i64>,
) -> Change {
    insert(id, user, hash, prefix, scope, Some(name), lifetime_us)
}

/// Named tokens of a user that were not revoked, including expired ones.
pub async fn list_named(db: &Db, user: UserId) -> Result<Vec<NamedToken>, DbError> {
    let sql = "SELECT name, scope, prefix, created_at, expires_at, last_used_at FROM tokens
               WHERE user_id = $1 AND name IS NOT NULL AND revoked_at IS NULL ORDER BY name";
    let rows = db.query(sql, params![user]).await?;
    rows.iter()
        .map(|row| {
            Ok(NamedToken {
                name: row.text(0)?,
                scope: row.text(1)?,
                prefix: row.text(2)?,
                created_at: Timestamp(row.int(3)?),
                expires_at: row.opt_int(4)?.map(Timestamp),
                last_used_at: row.opt_int(5)?.map(Timestamp),
            })
        })
        .collect()
}

/// Revokes a named token. Stale if the user has none of that name.
pub fn revoke_named(user: UserId, name: &str) -> Change {
    Change::Exec {
        sql: "UPDATE tokens SET revoked_at = $3 WHERE user_id = $1 AND name = $2 AND revoked_at IS NULL"
            .into(),
        params: params![user, name, Val::Now],
        expect: Expect::One,
    }
}

/// Revokes a named token, if the user has one of that name.
pub fn revoke_named_if_any(user: UserId, name: &str) -> Change {
    exec(
        "UPDATE tokens SET revoked_at = $3 WHERE user_id = $1 AND name = $2 AND revoked_at IS NULL",
        params![user, name, Val::Now],
    )
}

/// Revokes all tokens of the user.
pub fn revoke_all(user: UserId) -> Change {
    exec(
        "UPDATE tokens SET revoked_at = $2 WHERE user_id = $1 AND revoked_at IS NULL",
        params![user, Val::Now],
    )
}

/// Returns whether the user has a first token that was not revoked.
pub async fn has_first_token(db: &Db, user: UserId) -> Result<bool, DbError> {
    let sql = "SELECT 1 FROM tokens WHERE user_id = $1 AND name IS NULL AND revoked_at IS NULL LIMIT 1";
    Ok(db.query_opt(sql, params![user]).await?.is_some())
}

pub async fn mark_used(db: &Db, ids: &[Uuid]) -> Result<(), DbError> {
    let sql =
        "UPDATE tokens SET last_used_at = $2 WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    db.write(Unit::new().exec(sql, params![Val::list(ids), Val::Now])).await?;
    Ok(())
}

/// Makes the token valid for this user, whether it is new or was revoked.
pub fn ensure(id: Uuid, user: UserId, hash: &str, prefix: &str) -> Change {
    exec(
        "INSERT INTO tokens (id, user_id, hash, prefix, scope, created_at) VALUES ($1, $2, $3, $4, 'user', $5)
         ON CONFLICT (hash) DO UPDATE SET revoked_at = NULL, expires_at = NULL
         WHERE tokens.user_id = excluded.user_id",
        params![id, user, hash, prefix, Val::Now],
    )
}
