//! Table `queue_tokens`: tokens that are valid only for the queue's API, each restricted to its purpose.

use uuid::Uuid;
use windlass_model::{id::UserId, time::Timestamp};

use super::{
    Change, Db, DbError, Expect, Val,
    record::{record, statements},
};
use crate::params;

record! {
    pub struct QueueToken {
        pub id: Uuid,
        pub uuid: String,
        /// `user`, `dispatcher`, `executor` or `container`.
        pub kind: String,
        pub hash: String,
        pub secret_sealed: Option<Vec<u8>>,
        pub user_id: UserId,
        pub container_uuid: Option<String>,
        pub attempt: i64,
        pub created_at: Timestamp,
        /// Hash of the user's token with which it was created; it becomes invalid together with that one.
        pub made_with: Option<String>,
        pub expires_at: Option<Timestamp>,
    }
}

/// A row `t` that is valid now: not revoked, not expired, and created with a token that is still valid. Tokens of
/// attempts end with their attempt.
const IS_GOOD: &str = "t.revoked_at IS NULL AND (t.expires_at IS NULL OR t.expires_at > now_us()) \
     AND (t.kind IN ('executor', 'container') OR EXISTS (SELECT 1 FROM tokens k \
     WHERE k.hash = t.made_with AND k.user_id = t.user_id AND k.revoked_at IS NULL \
     AND (k.expires_at IS NULL OR k.expires_at > now_us())))";

statements! {
    BY_UUID = "SELECT {} FROM queue_tokens t JOIN users u ON u.id = t.user_id \
               WHERE t.uuid = $1 AND {} AND u.active AND NOT u.deleted", QueueToken::columns("t"), IS_GOOD;
    BY_HASH = "SELECT {} FROM queue_tokens t JOIN users u ON u.id = t.user_id \
               WHERE t.hash = $1 AND {} AND u.active AND NOT u.deleted", QueueToken::columns("t"), IS_GOOD;
    OF_USER = "SELECT {} FROM queue_tokens t WHERE t.user_id = $1 AND {} \
               AND t.kind IN ('user', 'dispatcher') ORDER BY t.created_at LIMIT 1000", QueueToken::columns("t"), IS_GOOD;
    REVOKE = "UPDATE queue_tokens SET revoked_at = now_us(), secret_sealed = NULL \
              WHERE uuid = $1 AND user_id = $2 AND revoked_at IS NULL";
    REVOKE_OF = "UPDATE queue_tokens SET revoked_at = now_us(), secret_sealed = NULL \
                 WHERE container_uuid = $1 AND revoked_at IS NULL";
}

/// Finds a token that is valid now.
pub async fn by_uuid(db: &Db, uuid: &str) -> Result<Option<QueueToken>, DbError> {
    db.query_opt(BY_UUID.as_str(), params![uuid]).await?.map(QueueToken::read).transpose()
}

pub async fn by_hash(db: &Db, hash: &str) -> Result<Option<QueueToken>, DbError> {
    db.query_opt(BY_HASH.as_str(), params![hash]).await?.map(QueueToken::read).transpose()
}

/// Tokens that a user keeps; those of containers are created and revoked automatically.
pub async fn list_by_user(db: &Db, user: UserId) -> Result<Vec<QueueToken>, DbError> {
    db.query(OF_USER.as_str(), params![user]).await?.into_iter().map(QueueToken::read).collect()
}

pub fn create(token: QueueToken) -> Change {
    Change::Insert { table: "queue_tokens", values: token.into_values() }
}

/// Stale if the user has no such token.
pub fn revoke(uuid: &str, user: UserId) -> Change {
    let params: Vec<Val> = params![uuid, user];
    Change::Exec { sql: REVOKE.as_str().into(), params, expect: Expect::One }
}

/// Revokes all tokens of a container's attempts.
pub fn revoke_for_container(container: &str) -> Change {
    Change::Exec { sql: REVOKE_OF.as_str().into(), params: params![container], expect: Expect::Any }
}
