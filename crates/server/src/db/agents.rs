//! What the server needs to reach agents: its signing keys, and of instances the way there and the credential.

use windlass_model::id::InstanceId;

use super::{Change, Db, DbError, Expect, record::statements};
use crate::params;

statements! {
    SIGNING_KEY = "SELECT id, seed_sealed FROM signing_keys WHERE purpose = $1";
    /// The first one stays: every replica then reads the same.
    OFFER_SIGNING_KEY = "INSERT INTO signing_keys (id, purpose, seed_sealed, created_at) \
                         VALUES ($1, $2, $3, now_us()) ON CONFLICT (purpose) DO NOTHING";
    CREDENTIAL = "SELECT agent_credential_sealed FROM instances WHERE id = $1";
    OFFER_CREDENTIAL = "UPDATE instances SET agent_credential_sealed = $2 \
                        WHERE id = $1 AND agent_credential_sealed IS NULL";
}

/// The id of the key's row and its sealed seed.
pub async fn signing_key(db: &Db, purpose: &str) -> Result<Option<(uuid::Uuid, Vec<u8>)>, DbError> {
    let row = db.query_opt(SIGNING_KEY.as_str(), params![purpose]).await?;
    row.map(|row| Ok((row.uuid(0)?, row.bytes(1)?))).transpose()
}

/// Keeps the key unless there is one for this purpose.
pub fn offer_signing_key(id: uuid::Uuid, purpose: &str, sealed: Vec<u8>) -> Change {
    let params = params![id, purpose, sealed];
    Change::Exec { sql: OFFER_SIGNING_KEY.as_str().into(), params, expect: Expect::Any }
}

/// The sealed credential: `None` for no such instance, `Some(None)` for one that has none yet.
pub async fn credential(db: &Db, instance: InstanceId) -> Result<Option<Option<Vec<u8>>>, DbError> {
    let row = db.query_opt(CREDENTIAL.as_str(), params![instance]).await?;
    row.map(|row| row.opt_bytes(0)).transpose()
}

/// Keeps the credential unless the instance has one.
pub fn offer_credential(instance: InstanceId, sealed: Vec<u8>) -> Change {
    let params = params![instance, sealed];
    Change::Exec { sql: OFFER_CREDENTIAL.as_str().into(), params, expect: Expect::Any }
}
