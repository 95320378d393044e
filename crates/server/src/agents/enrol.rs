//! What makes an agent ours: a credential for each instance, and the key that signs task specifications.
//!
//! Both are drawn once and kept sealed. Replicas that draw at the same time all end with the one that was stored
//! first, so an agent that was told by one of them obeys every one.

use base64::{Engine, prelude::BASE64_STANDARD};
use ring::signature::{Ed25519KeyPair, KeyPair};
use sha2::{Digest, Sha256};
use windlass_api::agent::{SIGNED_PREFIX, client::SignedSpec, pass::Pass, shim::TaskSpec};
use windlass_backend::Enrolment;
use windlass_model::id::InstanceId;

use crate::{
    db::{Db, DbError, Unit, agents as rows},
    secrets::{Belongs, KeyError, Keyring},
};

/// What the key for task specifications is called in the table.
const PURPOSE: &str = "task_specifications";
const CREDENTIAL_BYTES: usize = 32;
const SEED_BYTES: usize = 32;

#[derive(Debug, thiserror::Error)]
pub enum EnrolError {
    #[error(transparent)]
    Db(#[from] DbError),
    #[error(transparent)]
    Keys(#[from] KeyError),
    #[error("draw random bytes")]
    Random(#[from] getrandom::Error),
    #[error("find instance {instance}: there is none")]
    NoInstance { instance: InstanceId },
    /// The instance was never enrolled, so no agent of it can know us.
    #[error("find the credential of instance {instance}: it has none")]
    NotEnrolled { instance: InstanceId },
    #[error("read the signing key: its seed is not one of Ed25519")]
    Seed,
    #[error("read the credential of instance {instance}: it is not text")]
    Credential { instance: InstanceId },
    #[error("write the task specification")]
    Spec(#[source] serde_json::Error),
}

/// What the agent of an instance must be told. Makes the credential with the first call; a repeat, by any replica,
/// answers the same.
pub async fn enrolment(db: &Db, keys: &Keyring, instance: InstanceId) -> Result<Enrolment, EnrolError> {
    let signer = Signer::of(db, keys).await?;
    let held = rows::credential(db, instance).await?.ok_or(EnrolError::NoInstance { instance })?;
    if held.is_none() {
        let mut drawn = [0_u8; CREDENTIAL_BYTES];
        getrandom::fill(&mut drawn)?;
        let sealed = keys.seal(&belongs(instance), hex::encode(drawn).as_bytes())?;
        db.write(Unit::new().and([rows::offer_credential(instance, sealed)])).await?.done()?;
    }
    let credential = credential(db, keys, instance).await?;
    Ok(Enrolment {
        instance,
        credential_sha256: hex::encode(Sha256::digest(credential.as_bytes())),
        server_key: signer.public(),
    })
}

/// What calls to the agent of an enrolled instance carry. A secret.
pub async fn credential(db: &Db, keys: &Keyring, instance: InstanceId) -> Result<String, EnrolError> {
    let held = rows::credential(db, instance).await?.ok_or(EnrolError::NoInstance { instance })?;
    let sealed = held.ok_or(EnrolError::NotEnrolled { instance })?;
    let bytes = keys.open_sealed(&belongs(instance), &sealed)?;
    String::from_utf8(bytes).map_err(|_| EnrolError::Credential { instance })
}

fn belongs(instance: InstanceId) -> Belongs<'static> {
    Belongs::row("instances", "agent_credential_sealed", instance.0)
}

/// The key that signs task specifications, the same in all replicas.
pub struct Signer(Ed25519KeyPair);

impl Signer {
    /// Reads the key, and draws it where there is none yet.
    pub async fn of(db: &Db, keys: &Keyring) -> Result<Self, EnrolError> {
        if let Some(signer) = Self::stored(db, keys).await? {
            return Ok(signer);
        }
        let mut seed = [0_u8; SEED_BYTES];
        getrandom::fill(&mut seed)?;
        let id = db.new_id()?;
        let sealed = keys.seal(&Belongs::row("signing_keys", "seed_sealed", id), &seed)?;
        db.write(Unit::new().and([rows::offer_signing_key(id, PURPOSE, sealed)])).await?.done()?;
        Self::stored(db, keys).await?.ok_or(EnrolError::Seed)
    }

    async fn stored(db: &Db, keys: &Keyring) -> Result<Option<Self>, EnrolError> {
        let Some((id, sealed)) = rows::signing_key(db, PURPOSE).await? else { return Ok(None) };
        let seed = keys.open_sealed(&Belongs::row("signing_keys", "seed_sealed", id), &sealed)?;
        let key = Ed25519KeyPair::from_seed_unchecked(&seed).map_err(|_| EnrolError::Seed)?;
        Ok(Some(Self(key)))
    }

    /// Base64 of the public half.
    pub fn public(&self) -> String {
        BASE64_STANDARD.encode(self.0.public_key().as_ref())
    }

    /// A pass as it is shown.
    pub fn pass(&self, pass: &Pass) -> Result<String, EnrolError> {
        pass.write(|message| self.0.sign(message).as_ref().to_vec()).map_err(EnrolError::Spec)
    }

    /// The specification as it goes out, claims and all.
    pub fn sign(&self, spec: &TaskSpec) -> Result<SignedSpec, EnrolError> {
        let body = serde_json::to_vec(spec).map_err(EnrolError::Spec)?;
        let signature = self.0.sign(&[SIGNED_PREFIX, &body].concat());
        Ok(SignedSpec { signature: BASE64_STANDARD.encode(signature.as_ref()), body })
    }
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Signer").field(&self.public()).finish()
    }
}
