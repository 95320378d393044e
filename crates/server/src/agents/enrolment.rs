//! Enrolment of agents: a credential for each instance, and the key that signs task specifications.
//!
//! Both are generated once and stored sealed. Replicas that generate them at the same time all use the one that was
//! stored first, so an agent that one replica enrolled accepts calls from all of them.

use base64::{Engine, prelude::BASE64_STANDARD};
use ring::{
    hmac,
    signature::{Ed25519KeyPair, KeyPair},
};
use sha2::{Digest, Sha256};
use windlass_api::agent::{SIGNED_PREFIX, client::SignedSpec, port_pass::PortPass, shim::TaskSpec};
use windlass_backend::Enrolment;
use windlass_model::id::InstanceId;

use crate::{
    db::{Db, DbError, Unit, agents as rows},
    encryption::{AssociatedData, KeyError, Keyring},
    ssh_keys::{KeyPairError, key_pair_from_seed},
};

/// Name of the key for task specifications in the table.
const SIGNING_KEY_PURPOSE: &str = "task_specifications";
/// Separates the derived keys of gateways from other uses of the secret.
const GATEWAY_KEY_PREFIX: &[u8] = b"windlass SSH key of gateways 1\n";
/// The same for the keys with which the server logs in to rented machines.
const LOGIN_KEY_PREFIX: &[u8] = b"windlass SSH key of machines 1\n";
const CREDENTIAL_BYTES: usize = 32;
const SEED_BYTES: usize = 32;

#[derive(Debug, thiserror::Error)]
pub enum EnrolmentError {
    #[error(transparent)]
    Db(#[from] DbError),
    #[error(transparent)]
    Keys(#[from] KeyError),
    #[error("failed to generate random bytes")]
    Random(#[from] getrandom::Error),
    #[error("instance {instance} does not exist")]
    NoInstance { instance: InstanceId },
    /// The instance was never enrolled, so none of its agents can know this server.
    #[error("instance {instance} has no credential")]
    NotEnrolled { instance: InstanceId },
    #[error("invalid signing key: expected an Ed25519 seed")]
    Seed,
    #[error("invalid credential of instance {instance}: not valid UTF-8")]
    Credential { instance: InstanceId },
    #[error(transparent)]
    GatewayKey(#[from] KeyPairError),
    #[error("failed to encode the task specification")]
    Spec(#[source] serde_json::Error),
}

/// Returns the values that the agent of an instance needs. The first call creates the credential; a repeat, by any
/// replica, returns the same.
pub async fn enrolment(db: &Db, keys: &Keyring, instance: InstanceId) -> Result<Enrolment, EnrolmentError> {
    let signer = Signer::of(db, keys).await?;
    let held = rows::credential(db, instance).await?.ok_or(EnrolmentError::NoInstance { instance })?;
    if held.is_none() {
        let mut drawn = [0_u8; CREDENTIAL_BYTES];
        getrandom::fill(&mut drawn)?;
        let sealed = keys.seal(&credential_aad(instance), hex::encode(drawn).as_bytes())?;
        db.write(Unit::new().and([rows::set_first_credential(instance, sealed)])).await?.done()?;
    }
    let credential = credential(db, keys, instance).await?;
    Ok(Enrolment {
        instance,
        credential_sha256: hex::encode(Sha256::digest(credential.as_bytes())),
        server_key: signer.public(),
        gateway_key: Some(signer.gateway_key(instance)?.0),
    })
}

/// Credential that calls to the agent of an enrolled instance carry. A secret.
pub async fn credential(db: &Db, keys: &Keyring, instance: InstanceId) -> Result<String, EnrolmentError> {
    let held = rows::credential(db, instance).await?.ok_or(EnrolmentError::NoInstance { instance })?;
    let sealed = held.ok_or(EnrolmentError::NotEnrolled { instance })?;
    let bytes = keys.open_sealed(&credential_aad(instance), &sealed)?;
    String::from_utf8(bytes).map_err(|_| EnrolmentError::Credential { instance })
}

/// Private SSH key with which the server logs in to a rented machine, as text. A secret.
pub async fn login_key(db: &Db, keys: &Keyring, instance: InstanceId) -> Result<String, EnrolmentError> {
    Ok(Signer::of(db, keys).await?.login_key(instance)?.1)
}

fn credential_aad(instance: InstanceId) -> AssociatedData<'static> {
    AssociatedData::row("instances", "agent_credential_sealed", instance.0)
}

/// Key that signs task specifications, the same in all replicas.
pub struct Signer {
    key: Ed25519KeyPair,
    /// Secret from which the keys of gateways are derived.
    seed: Vec<u8>,
}

impl Signer {
    /// Reads the key; generates it if there is none.
    pub async fn of(db: &Db, keys: &Keyring) -> Result<Self, EnrolmentError> {
        if let Some(signer) = Self::load(db, keys).await? {
            return Ok(signer);
        }
        let mut seed = [0_u8; SEED_BYTES];
        getrandom::fill(&mut seed)?;
        let id = db.new_id()?;
        let sealed = keys.seal(&AssociatedData::row("signing_keys", "seed_sealed", id), &seed)?;
        db.write(Unit::new().and([rows::insert_signing_key(id, SIGNING_KEY_PURPOSE, sealed)]))
            .await?
            .done()?;
        Self::load(db, keys).await?.ok_or(EnrolmentError::Seed)
    }

    async fn load(db: &Db, keys: &Keyring) -> Result<Option<Self>, EnrolmentError> {
        let Some((id, sealed)) = rows::signing_key(db, SIGNING_KEY_PURPOSE).await? else { return Ok(None) };
        let seed = keys.open_sealed(&AssociatedData::row("signing_keys", "seed_sealed", id), &sealed)?;
        let key = Ed25519KeyPair::from_seed_unchecked(&seed).map_err(|_| EnrolmentError::Seed)?;
        Ok(Some(Self { key, seed }))
    }

    /// Public key, in base64.
    pub fn public(&self) -> String {
        BASE64_STANDARD.encode(self.key.public_key().as_ref())
    }

    /// Public and private SSH key with which gateways connect to the agent of this instance, and to nothing else. It is
    /// derived, not stored: all replicas compute the same.
    pub fn gateway_key(&self, instance: InstanceId) -> Result<(String, String), EnrolmentError> {
        self.derive_key(GATEWAY_KEY_PREFIX, instance, "windlass-gateway")
    }

    /// Public and private SSH key with which the server logs in to this instance, if it is a rented machine. Derived as
    /// well, so that a machine whose creation was not stored can still be reached.
    pub fn login_key(&self, instance: InstanceId) -> Result<(String, String), EnrolmentError> {
        self.derive_key(LOGIN_KEY_PREFIX, instance, "windlass-server")
    }

    fn derive_key(
        &self,
        prefix: &[u8],
        instance: InstanceId,
        name: &str,
    ) -> Result<(String, String), EnrolmentError> {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.seed);
        let message = [prefix, instance.0.as_bytes()].concat();
        let mut seed = [0_u8; SEED_BYTES];
        seed.copy_from_slice(hmac::sign(&key, &message).as_ref());
        let (public, private) = key_pair_from_seed(&seed, name)?;
        Ok((public.trim().to_owned(), private))
    }

    /// Encodes and signs a pass.
    pub fn pass(&self, pass: &PortPass) -> Result<String, EnrolmentError> {
        pass.encode(|message| self.key.sign(message).as_ref().to_vec()).map_err(EnrolmentError::Spec)
    }

    /// Signs the specification, including its claims.
    pub fn sign(&self, spec: &TaskSpec) -> Result<SignedSpec, EnrolmentError> {
        let body = serde_json::to_vec(spec).map_err(EnrolmentError::Spec)?;
        let signature = self.key.sign(&[SIGNED_PREFIX, &body].concat());
        Ok(SignedSpec { signature: BASE64_STANDARD.encode(signature.as_ref()), body })
    }
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Signer").field(&self.public()).finish()
    }
}
