//! Tables `sessions` and `login_codes`: hashes of the cookies of browsers, and of the codes that open sessions.

use uuid::Uuid;
use windlass_model::{
    id::UserId,
    time::{Span, Timestamp},
};

use super::{
    Change, Db, DbError, Expect, Unit, Val,
    record::{record, statements},
    users::{COLUMNS, User, WIDTH},
};
use crate::params;

/// Time for which a code is valid: a minute.
pub const CODE_LIFETIME_US: i64 = 60_000_000;

record! {
    pub struct Session {
        pub id: Uuid,
        pub address: String,
        pub browser: String,
        pub opened_at: Timestamp,
        pub last_seen_at: Timestamp,
        pub expires_at: Timestamp,
    }
}

/// A session that is valid now.
#[derive(Clone, Debug)]
pub struct ValidSession {
    pub session: Session,
    pub hash: String,
    /// Scope of the token that opened it.
    pub scope: String,
    /// True if a use was recorded less than a minute ago.
    pub seen_lately: bool,
    pub user: User,
}

/// A row `s` with its token `t` and its user `u` that is valid now, if a request came within a span before now: the
/// text that follows.
pub(super) const IS_VALID: &str = "s.expires_at > now_us() \
     AND t.revoked_at IS NULL AND (t.expires_at IS NULL OR t.expires_at > now_us()) AND u.active AND NOT u.deleted \
     AND s.last_seen_at > now_us() -";

statements! {
    FIND = "SELECT {}, {}, s.hash, t.scope, s.last_seen_at > now_us() - 60000000 \
            FROM sessions s JOIN tokens t ON t.id = s.token_id JOIN users u ON u.id = s.user_id \
            WHERE s.hash = $1 AND {} $2", COLUMNS, Session::columns("s"), IS_VALID;
    OF_USER = "SELECT {} FROM sessions s JOIN tokens t ON t.id = s.token_id JOIN users u ON u.id = s.user_id \
               WHERE s.user_id = $1 AND {} $2 ORDER BY s.last_seen_at DESC, s.id LIMIT 1000",
               Session::columns("s"), IS_VALID;
    DELETE = "DELETE FROM sessions WHERE user_id = $1 AND id IN (SELECT value FROM json_each(CAST($2 AS TEXT)))";
    MARK_SEEN = "UPDATE sessions SET last_seen_at = now_us(), address = $2 WHERE id = $1";
    CODE = "SELECT t.id FROM login_codes c JOIN tokens t ON t.id = c.token_id JOIN users u ON u.id = t.user_id \
            WHERE c.hash = $1 AND c.expires_at > now_us() AND t.revoked_at IS NULL \
              AND (t.expires_at IS NULL OR t.expires_at > now_us()) AND u.active AND NOT u.deleted";
    USE_CODE = "DELETE FROM login_codes WHERE hash = $1";
    DELETE_ENDED = "DELETE FROM sessions WHERE expires_at < now_us() OR last_seen_at < now_us() - $1";
    DELETE_OLD_CODES = "DELETE FROM login_codes WHERE expires_at < now_us()";
}

/// Finds the session with this hash if it is valid and its token and user are.
pub async fn find(db: &Db, hash: &str, idle: Span) -> Result<Option<ValidSession>, DbError> {
    let Some(mut row) = db.query_opt(FIND.as_str(), params![hash, idle.0]).await? else { return Ok(None) };
    let user = User::read(&row, 0)?;
    let at = WIDTH + Session::WIDTH;
    let (hash, scope, seen_lately) = (row.text(at)?, row.text(at + 1)?, row.bool(at + 2)?);
    Ok(Some(ValidSession { user, session: Session::read_from(&mut row, WIDTH)?, hash, scope, seen_lately }))
}

pub async fn list_by_user(db: &Db, user: UserId, idle: Span) -> Result<Vec<Session>, DbError> {
    db.query(OF_USER.as_str(), params![user, idle.0]).await?.into_iter().map(Session::read).collect()
}

/// Session that is opened now and ends after `life`.
pub fn open(
    id: Uuid,
    hash: &str,
    token: Uuid,
    user: UserId,
    address: &str,
    browser: &str,
    life: Span,
) -> Change {
    Change::Insert {
        table: "sessions",
        values: vec![
            ("id", id.into()),
            ("hash", hash.into()),
            ("token_id", token.into()),
            ("user_id", user.into()),
            ("address", address.into()),
            ("browser", browser.into()),
            ("opened_at", Val::Now),
            ("last_seen_at", Val::Now),
            ("expires_at", Val::NowPlus(life.0)),
        ],
    }
}

/// Ends sessions of a user.
pub fn delete(user: UserId, ids: &[Uuid]) -> Change {
    Change::Exec { sql: DELETE.as_str().into(), params: params![user, Val::list(ids)], expect: Expect::Any }
}

/// Records the last requests of sessions and their addresses.
pub async fn mark_seen(db: &Db, seen: Vec<(Uuid, String)>) -> Result<(), DbError> {
    let mut unit = Unit::new();
    for (id, address) in seen {
        unit = unit.exec(MARK_SEEN.as_str(), params![id, address]);
    }
    db.write(unit).await?;
    Ok(())
}

pub fn create_code(hash: &str, token: Uuid) -> Change {
    Change::Insert {
        table: "login_codes",
        values: vec![
            ("hash", hash.into()),
            ("token_id", token.into()),
            ("expires_at", Val::NowPlus(CODE_LIFETIME_US)),
        ],
    }
}

/// Id of the valid token for which this code was created.
pub async fn find_code(db: &Db, hash: &str) -> Result<Option<Uuid>, DbError> {
    db.query_opt(CODE.as_str(), params![hash]).await?.map(|row| row.uuid(0)).transpose()
}

/// Stale if the code was used already.
pub fn use_code(hash: &str) -> Change {
    Change::Exec { sql: USE_CODE.as_str().into(), params: params![hash], expect: Expect::One }
}

/// Deletes sessions and codes that are no longer valid.
pub async fn delete_ended(db: &Db, idle: Span) -> Result<(), DbError> {
    let unit =
        Unit::new().exec(DELETE_ENDED.as_str(), params![idle.0]).exec(DELETE_OLD_CODES.as_str(), params![]);
    db.write(unit).await?.done().map(drop)
}
