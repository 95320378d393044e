//! Table `tokens`: hashes of what callers present. No token is ever stored.

use uuid::Uuid;
use windlass_model::id::UserId;

use super::{
    Change, Db, DbError, Unit, Val,
    users::{COLUMNS, User, WIDTH, exec},
};
use crate::params;

/// A token that is valid now.
#[derive(Clone, Debug)]
pub struct Valid {
    pub id: Uuid,
    pub hash: String,
    /// A use was written down less than a minute ago.
    pub seen_lately: bool,
    /// Microseconds until it expires.
    pub expires_in_us: Option<i64>,
    pub user: User,
}

/// Finds the token with this hash if it, and its user, are alive.
pub async fn find(db: &Db, hash: &str) -> Result<Option<Valid>, DbError> {
    let sql = format!(
        "SELECT {COLUMNS}, t.id, t.hash, t.last_used_at IS NOT NULL AND t.last_used_at > now_us() - 60000000,
                t.expires_at - now_us()
         FROM tokens t JOIN users u ON u.id = t.user_id
         WHERE t.hash = $1 AND t.revoked_at IS NULL AND u.active AND NOT u.deleted
           AND (t.expires_at IS NULL OR t.expires_at > now_us())"
    );
    let Some(row) = db.query_opt(sql, params![hash]).await? else { return Ok(None) };
    Ok(Some(Valid {
        user: User::read(&row, 0)?,
        id: row.uuid(WIDTH)?,
        hash: row.text(WIDTH + 1)?,
        seen_lately: row.bool(WIDTH + 2)?,
        expires_in_us: row.opt_int(WIDTH + 3)?,
    }))
}

pub fn create(id: Uuid, user: UserId, hash: &str, prefix: &str, lives_us: Option<i64>) -> Change {
    Change::Insert {
        table: "tokens",
        values: vec![
            ("id", id.into()),
            ("user_id", user.into()),
            ("hash", hash.into()),
            ("prefix", prefix.into()),
            ("scope", "user".into()),
            ("created_at", Val::Now),
            ("expires_at", lives_us.map_or(Val::Null, Val::NowPlus)),
        ],
    }
}

/// Ends every token of the user.
pub fn revoke_all(user: UserId) -> Change {
    exec(
        "UPDATE tokens SET revoked_at = $2 WHERE user_id = $1 AND revoked_at IS NULL",
        params![user, Val::Now],
    )
}

/// Whether the user has a token that was not revoked.
pub async fn any(db: &Db, user: UserId) -> Result<bool, DbError> {
    let sql = "SELECT 1 FROM tokens WHERE user_id = $1 AND revoked_at IS NULL LIMIT 1";
    Ok(db.query_opt(sql, params![user]).await?.is_some())
}

pub async fn used(db: &Db, ids: &[Uuid]) -> Result<(), DbError> {
    let sql =
        "UPDATE tokens SET last_used_at = $2 WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    db.write(Unit::new().exec(sql, params![Val::list(ids), Val::Now])).await?;
    Ok(())
}

/// Makes the token valid for this user: new, or again.
pub fn ensure(id: Uuid, user: UserId, hash: &str, prefix: &str) -> Change {
    exec(
        "INSERT INTO tokens (id, user_id, hash, prefix, scope, created_at) VALUES ($1, $2, $3, $4, 'user', $5)
         ON CONFLICT (hash) DO UPDATE SET revoked_at = NULL, expires_at = NULL
         WHERE tokens.user_id = excluded.user_id",
        params![id, user, hash, prefix, Val::Now],
    )
}
