//! Key with which the nodes of one replica reach each other: generated for each generation, sealed on each job.

use serde::{Deserialize, Serialize};
use windlass_api::agent::runner::SshKey;
use windlass_model::id::SubmissionId;

use crate::{
    db::{DbError, documents::NODE_KEY},
    encryption::{AssociatedData, KeyError, Keyring},
    ssh_keys::{KeyPairError, generate_key_pair},
};

/// Content of `jobs.secrets_sealed`.
#[derive(Serialize, Deserialize)]
struct SealedNodeKey {
    ssh_key: SshKey,
}

/// One key for a whole replica.
pub struct NodeKey(SshKey);

#[derive(Debug, thiserror::Error)]
pub enum NodeKeyError {
    #[error(transparent)]
    Draw(#[from] KeyPairError),
    #[error("failed to encode a key for the nodes of a replica")]
    Write(#[source] serde_json::Error),
    #[error(transparent)]
    Seal(#[from] KeyError),
}

impl NodeKey {
    pub fn draw() -> Result<Self, NodeKeyError> {
        let (public, private) = generate_key_pair("windlass")?;
        Ok(Self(SshKey { private, public }))
    }

    /// Seals the key for one job of the replica.
    pub fn seal_for(&self, keys: &Keyring, job: SubmissionId) -> Result<Vec<u8>, NodeKeyError> {
        let plain =
            serde_json::to_vec(&SealedNodeKey { ssh_key: self.0.clone() }).map_err(NodeKeyError::Write)?;
        Ok(keys.seal(&node_key_aad(job), &plain)?)
    }
}

fn node_key_aad(job: SubmissionId) -> AssociatedData<'static> {
    AssociatedData::row("jobs", "secrets_sealed", job.0)
}

/// Opens the key of a job.
pub(crate) fn open(keys: &Keyring, job: SubmissionId, sealed: &[u8]) -> Result<SshKey, OpenNodeKeyError> {
    let plain = keys.open_sealed(&node_key_aad(job), sealed)?;
    let SealedNodeKey { ssh_key } = NODE_KEY.decode_bytes(job, &plain)?;
    Ok(ssh_key)
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenNodeKeyError {
    #[error(transparent)]
    Keys(#[from] KeyError),
    #[error(transparent)]
    Db(#[from] DbError),
}
