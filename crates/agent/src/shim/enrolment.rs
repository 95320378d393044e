//! Enrolment of the host: the credential that the server presents, and the keys with which it signs task
//! specifications.
//!
//! Written once by `windlass-agent shim enrol`, and again for each rotation: a running shim reads the new file on the
//! next call. The host stores only the hash of the credential and only the public halves of the keys.

use std::{
    fs,
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use parking_lot::Mutex;
use ring::signature::{ED25519, UnparsedPublicKey};
use serde::{Deserialize, Serialize};

use windlass_api::agent::{SIGNED_PREFIX, port_pass::PortPass, shim::Claims};
use windlass_model::id::InstanceId;

use super::gateway_key::GatewayKey;
use crate::http;

pub const FILE: &str = "enrolment.json";
/// The old credential and the new one, during a rotation.
pub const CREDENTIALS_MAX: usize = 2;
/// Keys of the servers that share the database, and their successors.
pub const SERVER_KEYS_MAX: usize = 16;
const FILE_BYTES_MAX: u64 = 64 * 1024;
const KEY_BYTES: usize = 32;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enrolment {
    pub instance_id: InstanceId,
    /// SHA-256 (hex) of the credential; two during a rotation.
    #[serde(deserialize_with = "one_or_more")]
    pub credential_sha256: Vec<String>,
    /// Ed25519 public keys, base64 of 32 bytes each.
    pub server_keys: Vec<String>,
    /// Key of gateways. A host that the server does not reach over SSH has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<GatewayKey>,
}

#[derive(Debug, thiserror::Error)]
pub enum EnrolmentError {
    #[error("failed to read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("failed to write {path}")]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} has mode {mode:03o} and is accessible to other users; set its mode to 600")]
    Open { path: PathBuf, mode: u32 },
    #[error("failed to parse {path}")]
    Json {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("invalid enrolment: expected 1 to {CREDENTIALS_MAX} credential hashes of 64 hex digits")]
    Credentials,
    #[error("invalid enrolment: expected 1 to {SERVER_KEYS_MAX} server keys of {KEY_BYTES} bytes in base64")]
    ServerKeys,
}

impl Enrolment {
    pub fn read(path: &Path) -> Result<Option<Self>, EnrolmentError> {
        let failed = |source| EnrolmentError::Read { path: path.to_owned(), source };
        let file = match fs::File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(failed)?,
        };
        let mode = file.metadata().map_err(failed)?.mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(EnrolmentError::Open { path: path.to_owned(), mode });
        }
        let mut text = String::new();
        file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(failed)?;
        let enrolment: Self = serde_json::from_str(&text)
            .map_err(|source| EnrolmentError::Json { path: path.to_owned(), source })?;
        enrolment.verify_spec()?;
        Ok(Some(enrolment))
    }

    /// Replaces the whole file, readable by its owner alone.
    pub fn write(&self, path: &Path) -> Result<(), EnrolmentError> {
        self.verify_spec()?;
        let failed = |source| EnrolmentError::Write { path: path.to_owned(), source };
        let text = serde_json::to_string_pretty(self)
            .map_err(|source| EnrolmentError::Json { path: path.to_owned(), source })?;
        let fresh = path.with_extension(format!("json.{}", std::process::id()));
        let written = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&fresh)
            .and_then(|mut file| {
                file.write_all(text.as_bytes())?;
                file.write_all(b"\n")?;
                file.sync_all()
            })
            .and_then(|()| fs::rename(&fresh, path));
        if written.is_err() {
            let _ = fs::remove_file(&fresh);
        }
        written.map_err(failed)
    }

    fn verify_spec(&self) -> Result<(), EnrolmentError> {
        let is_hash = |text: &String| text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let hashes = &self.credential_sha256;
        if hashes.is_empty() || hashes.len() > CREDENTIALS_MAX || !hashes.iter().all(is_hash) {
            return Err(EnrolmentError::Credentials);
        }
        let is_key = |text: &String| BASE64_STANDARD.decode(text).is_ok_and(|key| key.len() == KEY_BYTES);
        let keys = &self.server_keys;
        if keys.is_empty() || keys.len() > SERVER_KEYS_MAX || !keys.iter().all(is_key) {
            return Err(EnrolmentError::ServerKeys);
        }
        Ok(())
    }

    pub fn knows(&self, credential: &str) -> bool {
        http::matches_hash(credential, self.credential_sha256.iter().map(String::as_str))
    }

    /// Returns the presented pass if a server of this host issued it for this host. It may have expired.
    pub fn pass(&self, shown: &str) -> Option<PortPass> {
        let pass = PortPass::decode(shown, |message, signature| self.is_valid_signature(message, signature))?;
        (pass.instance == self.instance_id).then_some(pass)
    }

    fn is_valid_signature(&self, message: &[u8], signature: &[u8]) -> bool {
        self.server_keys.iter().any(|key| {
            let Ok(key) = BASE64_STANDARD.decode(key) else { return false };
            UnparsedPublicKey::new(&ED25519, key).verify(message, signature).is_ok()
        })
    }

    /// Returns whether a server of this host signed exactly these bytes.
    fn is_signed_by_server(&self, body: &[u8], signature: &str) -> bool {
        let Ok(signature) = BASE64_STANDARD.decode(signature) else { return false };
        self.is_valid_signature(&[SIGNED_PREFIX, body].concat(), &signature)
    }
}

/// Reason why a specification is not valid for this host at this time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    #[error("the task specification is not signed")]
    Unsigned,
    #[error("invalid signature: the task specification is not signed by a server of this host")]
    WrongSignature,
    #[error("the task specification has no claims")]
    NoClaims,
    #[error("the task specification is for another instance")]
    WrongInstance,
    #[error("the task specification expired {0} s ago; check the clocks of the server and this host")]
    Expired(i64),
    #[error("the task specification is for epoch {claimed}, but the call has epoch {called}")]
    EpochMismatch { claimed: i64, called: i64 },
}

/// A specification as presented, with everything needed to verify it.
#[derive(Clone, Copy, Debug)]
pub struct PresentedSpec<'a> {
    pub body: &'a [u8],
    pub signature: Option<&'a str>,
    pub claims: Option<Claims>,
    /// Epoch in the header of the call.
    pub epoch: Option<i64>,
}

/// Decides whether a specification is valid here and now. Checks the signature first: an unauthenticated caller learns
/// nothing else.
pub fn check(
    enrolment: &Enrolment,
    presented: PresentedSpec<'_>,
    now_secs: i64,
) -> Result<Claims, SpecError> {
    let signature = presented.signature.ok_or(SpecError::Unsigned)?;
    if !enrolment.is_signed_by_server(presented.body, signature) {
        return Err(SpecError::WrongSignature);
    }
    let claims = presented.claims.ok_or(SpecError::NoClaims)?;
    if claims.instance_id != enrolment.instance_id {
        return Err(SpecError::WrongInstance);
    }
    if claims.expires_at <= now_secs {
        return Err(SpecError::Expired(now_secs.saturating_sub(claims.expires_at)));
    }
    match presented.epoch {
        Some(called) if called != claims.epoch => {
            Err(SpecError::EpochMismatch { claimed: claims.epoch, called })
        }
        Some(_) | None => Ok(claims),
    }
}

/// The enrolment that is on disk now.
#[derive(Debug)]
pub struct EnrolmentFile {
    path: PathBuf,
    cached: Mutex<Option<(FileVersion, Option<Arc<Enrolment>>)>>,
}

/// Identifies one version of a file.
type FileVersion = Option<(u64, i64, i64, u64)>;

impl EnrolmentFile {
    pub fn new(home: &Path) -> Self {
        Self { path: home.join(FILE), cached: Mutex::new(None) }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file when it has changed. An unusable file counts as absent: all calls are refused.
    pub fn enrolment(&self) -> Option<Arc<Enrolment>> {
        let stamp = fs::metadata(&self.path)
            .ok()
            .map(|meta| (meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.size()));
        let mut cached = self.cached.lock();
        if let Some((then, enrolment)) = &*cached
            && *then == stamp
        {
            return enrolment.clone();
        }
        let read = Enrolment::read(&self.path).unwrap_or_else(|error| {
            tracing::error!(error = &error as &dyn std::error::Error, "failed to read enrolment");
            None
        });
        let read = read.map(Arc::new);
        *cached = Some((stamp, read.clone()));
        read
    }
}

fn one_or_more<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum OneOrMore {
        One(String),
        More(Vec<String>),
    }
    Ok(match OneOrMore::deserialize(deserializer)? {
        OneOrMore::One(one) => vec![one],
        OneOrMore::More(more) => more,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ring::signature::{Ed25519KeyPair, KeyPair};

    use super::*;
    use crate::digest::sha256_hex;

    const NOW: i64 = 1_800_000_000;
    const BODY: &[u8] = br#"{"id":"x"}"#;

    fn key(seed: u8) -> Ed25519KeyPair {
        Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap()
    }

    fn public_key(seed: u8) -> String {
        BASE64_STANDARD.encode(key(seed).public_key().as_ref())
    }

    fn sign(seed: u8, body: &[u8]) -> String {
        BASE64_STANDARD.encode(key(seed).sign(&[SIGNED_PREFIX, body].concat()).as_ref())
    }

    fn own_instance() -> InstanceId {
        InstanceId(uuid::Uuid::from_u128(7))
    }

    fn enrolment() -> Enrolment {
        Enrolment {
            instance_id: own_instance(),
            credential_sha256: vec![sha256_hex(b"old"), sha256_hex(b"new")],
            server_keys: vec![public_key(1), public_key(2)],
            gateway: None,
        }
    }

    fn claims() -> Claims {
        Claims { instance_id: own_instance(), epoch: 4, expires_at: NOW + 60 }
    }

    #[track_caller]
    fn check_spec(
        signature: Option<String>,
        claims: Option<Claims>,
        epoch: Option<i64>,
        want: Result<(), SpecError>,
    ) {
        let presented = PresentedSpec { body: BODY, signature: signature.as_deref(), claims, epoch };
        assert_eq!(check(&enrolment(), presented, NOW).map(|_| ()), want);
    }

    #[test]
    fn a_pass_is_valid_only_if_an_enrolled_server_signed_it_for_this_host() {
        let pass =
            |instance| PortPass { instance, tasks: std::collections::BTreeMap::new(), expires_at: NOW };
        let written = |seed: u8, pass: &PortPass| {
            pass.encode(|message| key(seed).sign(message).as_ref().to_vec()).unwrap()
        };
        let mine = pass(own_instance());
        assert_eq!(enrolment().pass(&written(1, &mine)), Some(mine.clone()));
        assert_eq!(enrolment().pass(&written(3, &mine)), None, "of a server that is not ours");
        let foreign = pass(InstanceId(uuid::Uuid::from_u128(8)));
        assert_eq!(enrolment().pass(&written(1, &foreign)), None, "for another host");
        assert_eq!(enrolment().pass("new"), None);
        assert!(!enrolment().knows(&written(1, &mine)), "it is no credential");
    }

    #[test]
    fn x8_only_a_signed_unexpired_specification_for_this_instance_and_epoch_is_accepted() {
        let good = || Some(sign(1, BODY));
        check_spec(good(), Some(claims()), Some(4), Ok(()));
        check_spec(Some(sign(2, BODY)), Some(claims()), None, Ok(()));
        check_spec(None, Some(claims()), None, Err(SpecError::Unsigned));
        check_spec(Some(sign(3, BODY)), Some(claims()), None, Err(SpecError::WrongSignature));
        check_spec(Some(sign(1, b"{}")), Some(claims()), None, Err(SpecError::WrongSignature));
        check_spec(Some("not base64".to_owned()), Some(claims()), None, Err(SpecError::WrongSignature));
        check_spec(Some(String::new()), Some(claims()), None, Err(SpecError::WrongSignature));
        check_spec(good(), None, None, Err(SpecError::NoClaims));
        let foreign = Claims { instance_id: InstanceId(uuid::Uuid::from_u128(8)), ..claims() };
        check_spec(good(), Some(foreign), None, Err(SpecError::WrongInstance));
        check_spec(good(), Some(Claims { expires_at: NOW, ..claims() }), None, Err(SpecError::Expired(0)));
        let ancient = Claims { expires_at: i64::MIN, ..claims() };
        check_spec(good(), Some(ancient), None, Err(SpecError::Expired(i64::MAX)));
        let other = SpecError::EpochMismatch { claimed: 4, called: 5 };
        check_spec(good(), Some(claims()), Some(5), Err(other));
    }

    #[test]
    fn x8_a_signature_over_the_bare_body_is_rejected() {
        let bare = BASE64_STANDARD.encode(key(1).sign(BODY).as_ref());
        check_spec(Some(bare), Some(claims()), None, Err(SpecError::WrongSignature));
    }

    #[test]
    fn both_credentials_are_accepted_during_rotation() {
        assert!(enrolment().knows("old"));
        assert!(enrolment().knows("new"));
        assert!(!enrolment().knows("older"));
        assert!(!enrolment().knows(&sha256_hex(b"old")));
    }

    #[test]
    fn a_single_credential_hash_may_be_given_without_a_list() {
        let text = format!(
            r#"{{"instance_id":"{}","credential_sha256":"{}","server_keys":["{}"],"more":1}}"#,
            own_instance(),
            sha256_hex(b"one"),
            public_key(1)
        );
        let read: Enrolment = serde_json::from_str(&text).unwrap();
        assert!(read.verify_spec().is_ok() && read.knows("one"));
    }

    #[test]
    fn an_enrolment_without_a_hash_or_key_is_invalid() {
        assert!(matches!(
            Enrolment { credential_sha256: vec![String::new()], ..enrolment() }.verify_spec(),
            Err(EnrolmentError::Credentials)
        ));
        assert!(matches!(
            Enrolment { server_keys: vec!["AAAA".to_owned()], ..enrolment() }.verify_spec(),
            Err(EnrolmentError::ServerKeys)
        ));
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: windlass_testkit::fuzz_cases(),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// A pass comes from a gateway: no other text than one that a server signed is a pass.
        #[test]
        fn fuzz_of_port_passes(noise in "(?s).{0,200}", at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let enrolment = enrolment();
            let pass =
                PortPass { instance: own_instance(), tasks: std::collections::BTreeMap::default(), expires_at: NOW };
            let text = pass.encode(|message| key(1).sign(message).as_ref().to_vec()).unwrap();
            prop_assert_eq!(enrolment.pass(&text), Some(pass));
            let mut changed = text.clone().into_bytes();
            *at.get_mut(&mut changed) = byte;
            let changed = String::from_utf8_lossy(&changed).into_owned();
            prop_assert!(changed == text || enrolment.pass(&changed).is_none());
            let cut = &text[..at.index(text.len())];
            for text in [cut.to_owned(), format!("{cut}{noise}"), format!("{text}{noise}."), noise] {
                prop_assert!(enrolment.pass(&text).is_none());
            }
        }
    }
}
