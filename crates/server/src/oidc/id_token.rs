//! Verification of ID tokens: JSON Web Tokens (RFC 7519) that a provider signs for one login.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256,
    RSA_PKCS1_2048_8192_SHA384, RSA_PKCS1_2048_8192_SHA512, RSA_PSS_2048_8192_SHA256,
    RSA_PSS_2048_8192_SHA384, RSA_PSS_2048_8192_SHA512, RsaParameters, RsaPublicKeyComponents,
    UnparsedPublicKey, VerificationAlgorithm,
};
use serde::Deserialize;
use serde_json::Value;
use subtle::ConstantTimeEq as _;
use windlass_model::time::Timestamp;

/// Difference of clocks that is tolerated, in seconds.
const LEEWAY_SECS: i64 = 60;
const TOKEN_BYTES_MAX: usize = 64 * 1024;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TokenError {
    #[error("it is not a signed token")]
    Malformed,
    #[error("its algorithm `{0}` is not accepted")]
    Algorithm(String),
    #[error("it is signed with a key that the provider does not list")]
    UnknownKey,
    #[error("its signature is wrong")]
    Signature,
    #[error("its `{0}` is missing or wrong")]
    Claim(&'static str),
    #[error("it has expired, or the clocks differ")]
    Expired,
}

/// A verified identity.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct VerifiedIdentity {
    pub(crate) subject: String,
    pub(crate) username: Option<String>,
    /// Only if the provider has verified it.
    pub(crate) email: Option<String>,
    pub(crate) groups: Vec<String>,
}

/// Claims that a token must have.
#[derive(Debug)]
pub(super) struct Expected<'a> {
    pub(super) issuer: &'a str,
    pub(super) client_id: &'a str,
    pub(super) nonce: &'a str,
    pub(super) groups_claim: &'a str,
    pub(super) now: Timestamp,
}

/// A public key of a provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key {
    id: Option<String>,
    /// `None`: any that fits the kind of key.
    algorithm: Option<String>,
    material: Material,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Material {
    Rsa {
        n: Vec<u8>,
        e: Vec<u8>,
    },
    /// Uncompressed point.
    P256(Vec<u8>),
    P384(Vec<u8>),
    Ed25519(Vec<u8>),
}

impl Key {
    /// Parses a key of a key set (RFC 7517). Keys of other kinds and for other uses are left out.
    pub(super) fn parse(key: &Value) -> Option<Self> {
        let text = |name: &str| key[name].as_str();
        let bytes = |name: &str| URL_SAFE_NO_PAD.decode(text(name)?).ok();
        if text("use").is_some_and(|usage| usage != "sig") {
            return None;
        }
        let point = |len: usize| {
            let (x, y) = (bytes("x")?, bytes("y")?);
            (x.len() == len && y.len() == len).then(|| [vec![4], x, y].concat())
        };
        let material = match (text("kty")?, text("crv")) {
            // Some providers write the modulus with a leading zero.
            ("RSA", _) => Material::Rsa { n: without_zeros(bytes("n")?), e: without_zeros(bytes("e")?) },
            ("EC", Some("P-256")) => Material::P256(point(32)?),
            ("EC", Some("P-384")) => Material::P384(point(48)?),
            ("OKP", Some("Ed25519")) => Material::Ed25519(bytes("x")?),
            _ => return None,
        };
        let owned = |name| text(name).map(str::to_owned);
        Some(Self { id: owned("kid"), algorithm: owned("alg"), material })
    }

    /// Verifies a signature, if the key is for this algorithm.
    fn verify(&self, algorithm: &str, message: &[u8], signature: &[u8]) -> Option<bool> {
        if self.algorithm.as_deref().is_some_and(|own| own != algorithm) {
            return None;
        }
        let point = |kind: &'static dyn VerificationAlgorithm, point: &[u8]| {
            Some(UnparsedPublicKey::new(kind, point).verify(message, signature).is_ok())
        };
        match (&self.material, algorithm) {
            (Material::Rsa { n, e }, _) => {
                let key = RsaPublicKeyComponents { n, e };
                Some(key.verify(rsa_parameters(algorithm)?, message, signature).is_ok())
            }
            (Material::P256(key), "ES256") => point(&ECDSA_P256_SHA256_FIXED, key),
            (Material::P384(key), "ES384") => point(&ECDSA_P384_SHA384_FIXED, key),
            (Material::Ed25519(key), "EdDSA") => point(&ED25519, key),
            _ => None,
        }
    }
}

fn without_zeros(number: Vec<u8>) -> Vec<u8> {
    number.into_iter().skip_while(|byte| *byte == 0).collect()
}

fn rsa_parameters(algorithm: &str) -> Option<&'static RsaParameters> {
    Some(match algorithm {
        "RS256" => &RSA_PKCS1_2048_8192_SHA256,
        "RS384" => &RSA_PKCS1_2048_8192_SHA384,
        "RS512" => &RSA_PKCS1_2048_8192_SHA512,
        "PS256" => &RSA_PSS_2048_8192_SHA256,
        "PS384" => &RSA_PSS_2048_8192_SHA384,
        "PS512" => &RSA_PSS_2048_8192_SHA512,
        _ => return None,
    })
}

/// Algorithms with public keys. Neither `none` nor those whose key is a shared secret are accepted.
fn is_accepted(algorithm: &str) -> bool {
    rsa_parameters(algorithm).is_some() || matches!(algorithm, "ES256" | "ES384" | "EdDSA")
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    #[serde(default)]
    kid: Option<String>,
    /// Extensions that must be understood; none is.
    #[serde(default)]
    crit: Option<Value>,
}

/// Verifies a token and returns its identity.
pub(super) fn verify(
    token: &str,
    keys: &[Key],
    expected: &Expected<'_>,
) -> Result<VerifiedIdentity, TokenError> {
    let mut parts = token.splitn(4, '.');
    let (Some(header), Some(payload), Some(signature), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(TokenError::Malformed);
    };
    if token.len() > TOKEN_BYTES_MAX {
        return Err(TokenError::Malformed);
    }
    let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).map_err(|_| TokenError::Malformed);
    let parsed: Header = serde_json::from_slice(&decode(header)?).map_err(|_| TokenError::Malformed)?;
    if parsed.crit.is_some() {
        return Err(TokenError::Malformed);
    }
    if !is_accepted(&parsed.alg) {
        return Err(TokenError::Algorithm(parsed.alg));
    }
    let message = &token.as_bytes()[..header.len() + 1 + payload.len()];
    verify_signature(&parsed, message, &decode(signature)?, keys)?;
    let claims: Value = serde_json::from_slice(&decode(payload)?).map_err(|_| TokenError::Malformed)?;
    check_claims(&claims, expected)?;
    read_identity(&claims, expected.groups_claim)
}

fn verify_signature(
    header: &Header,
    message: &[u8],
    signature: &[u8],
    keys: &[Key],
) -> Result<(), TokenError> {
    let named = |key: &&Key| header.kid.is_none() || key.id.is_none() || key.id == header.kid;
    let mut verdicts =
        keys.iter().filter(named).filter_map(|key| key.verify(&header.alg, message, signature)).peekable();
    if verdicts.peek().is_none() {
        return Err(TokenError::UnknownKey);
    }
    if verdicts.any(|is_valid| is_valid) { Ok(()) } else { Err(TokenError::Signature) }
}

/// Section 3.1.3.7 of OpenID Connect Core.
fn check_claims(claims: &Value, expected: &Expected<'_>) -> Result<(), TokenError> {
    let is = |name: &str, text: &str| claims[name].as_str() == Some(text);
    if !is("iss", expected.issuer) {
        return Err(TokenError::Claim("iss"));
    }
    let client = expected.client_id;
    let is_audience = match &claims["aud"] {
        Value::String(one) => one == client,
        // One of several audiences could have requested the token for itself.
        Value::Array(all) => all.iter().any(|one| one == client) && (all.len() == 1 || is("azp", client)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => false,
    };
    if !is_audience {
        return Err(TokenError::Claim("aud"));
    }
    if !claims["azp"].is_null() && !is("azp", client) {
        return Err(TokenError::Claim("azp"));
    }
    let nonce = claims["nonce"].as_str().unwrap_or_default();
    if !bool::from(nonce.as_bytes().ct_eq(expected.nonce.as_bytes())) {
        return Err(TokenError::Claim("nonce"));
    }
    let now = expected.now.0 / 1_000_000;
    let seconds =
        |name: &str| claims[name].as_i64().or_else(|| claims[name].as_f64().map(|value| value as i64));
    let expires = seconds("exp").ok_or(TokenError::Claim("exp"))?;
    let begins = seconds("nbf").or_else(|| seconds("iat")).unwrap_or(now);
    if expires <= now - LEEWAY_SECS || begins > now + LEEWAY_SECS { Err(TokenError::Expired) } else { Ok(()) }
}

fn read_identity(claims: &Value, groups_claim: &str) -> Result<VerifiedIdentity, TokenError> {
    let text = |name: &str| claims[name].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let groups = match &claims[groups_claim] {
        Value::String(group) => vec![group.clone()],
        Value::Array(groups) => groups.iter().filter_map(|group| group.as_str().map(str::to_owned)).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => Vec::new(),
    };
    // Some providers send the text `true`.
    let is_verified = claims["email_verified"] == true || claims["email_verified"] == "true";
    Ok(VerifiedIdentity {
        subject: text("sub").ok_or(TokenError::Claim("sub"))?,
        username: text("preferred_username"),
        email: text("email").filter(|_| is_verified),
        groups,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ring::{
        rand::SystemRandom,
        signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _},
    };
    use serde_json::json;

    use super::*;

    const NOW: i64 = 1_800_000_000;

    fn expected() -> Expected<'static> {
        Expected {
            issuer: "https://id.example",
            client_id: "windlass",
            nonce: "n-1",
            groups_claim: "groups",
            now: Timestamp(NOW * 1_000_000),
        }
    }

    fn claims() -> Value {
        json!({ "iss": "https://id.example", "aud": "windlass", "nonce": "n-1", "sub": "7", "exp": NOW + 60, "iat": NOW,
                "email": "ada@example.org", "email_verified": true, "preferred_username": "ada", "groups": ["ml"] })
    }

    fn encode(value: &Value) -> String {
        URL_SAFE_NO_PAD.encode(value.to_string())
    }

    /// A provider with one Ed25519 key.
    struct Signer(Ed25519KeyPair);

    impl Signer {
        fn new() -> Self {
            let pair = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
            Self(Ed25519KeyPair::from_pkcs8(pair.as_ref()).unwrap())
        }

        fn keys(&self) -> Vec<Key> {
            let x = URL_SAFE_NO_PAD.encode(self.0.public_key());
            vec![Key::parse(&json!({ "kty": "OKP", "crv": "Ed25519", "kid": "k", "x": x })).unwrap()]
        }

        fn sign(&self, header: &Value, claims: &Value) -> String {
            let message = format!("{}.{}", encode(header), encode(claims));
            let signature = URL_SAFE_NO_PAD.encode(self.0.sign(message.as_bytes()));
            format!("{message}.{signature}")
        }
    }

    fn header() -> Value {
        json!({ "alg": "EdDSA", "kid": "k" })
    }

    #[test]
    fn a_token_of_the_provider_for_this_login_is_an_identity() {
        let signer = Signer::new();
        let verified = verify(&signer.sign(&header(), &claims()), &signer.keys(), &expected()).unwrap();
        let identity = VerifiedIdentity {
            subject: "7".into(),
            username: Some("ada".into()),
            email: Some("ada@example.org".into()),
            groups: vec!["ml".into()],
        };
        assert_eq!(verified, identity);
    }

    #[test]
    fn a_token_with_a_wrong_claim_is_refused() {
        let signer = Signer::new();
        let with = |name: &str, value: Value| {
            let mut claims = claims();
            claims[name] = value;
            verify(&signer.sign(&header(), &claims), &signer.keys(), &expected())
        };
        assert_eq!(with("iss", json!("https://evil.example")), Err(TokenError::Claim("iss")));
        assert_eq!(with("aud", json!("other")), Err(TokenError::Claim("aud")));
        assert_eq!(with("aud", json!(["other", "windlass"])), Err(TokenError::Claim("aud")));
        assert!(with("aud", json!(["windlass"])).is_ok());
        assert_eq!(with("azp", json!("other")), Err(TokenError::Claim("azp")));
        assert_eq!(with("nonce", json!("n-2")), Err(TokenError::Claim("nonce")));
        assert_eq!(with("nonce", Value::Null), Err(TokenError::Claim("nonce")));
        assert_eq!(with("sub", json!("")), Err(TokenError::Claim("sub")));
        assert_eq!(with("exp", json!(NOW - 61)), Err(TokenError::Expired));
        assert_eq!(with("exp", Value::Null), Err(TokenError::Claim("exp")));
        assert_eq!(with("iat", json!(NOW + 61)), Err(TokenError::Expired));
        assert_eq!(with("email_verified", json!(false)).unwrap().email, None);
        assert_eq!(with("email_verified", json!("true")).unwrap().email.as_deref(), Some("ada@example.org"));
        assert_eq!(with("groups", json!("one")).unwrap().groups, ["one"]);
    }

    #[test]
    fn a_token_that_the_provider_did_not_sign_is_refused() {
        let (signer, other) = (Signer::new(), Signer::new());
        let token = signer.sign(&header(), &claims());
        assert_eq!(verify(&token, &other.keys(), &expected()), Err(TokenError::Signature));
        assert_eq!(verify(&token, &[], &expected()), Err(TokenError::UnknownKey));
        let unknown = signer.sign(&json!({ "alg": "EdDSA", "kid": "x" }), &claims());
        assert_eq!(verify(&unknown, &signer.keys(), &expected()), Err(TokenError::UnknownKey));
        // Claims that were changed after they were signed.
        let parts: Vec<&str> = token.split('.').collect();
        let mut changed = claims();
        changed["sub"] = json!("8");
        let changed = format!("{}.{}.{}", parts[0], encode(&changed), parts[2]);
        assert_eq!(verify(&changed, &signer.keys(), &expected()), Err(TokenError::Signature));
    }

    #[test]
    fn only_algorithms_with_public_keys_are_accepted() {
        let signer = Signer::new();
        for algorithm in ["none", "HS256", "RS1", "", "eddsa"] {
            let token = signer.sign(&json!({ "alg": algorithm, "kid": "k" }), &claims());
            let refused = verify(&token, &signer.keys(), &expected());
            assert_eq!(refused, Err(TokenError::Algorithm(algorithm.to_owned())));
        }
        let unsigned = format!("{}.{}.", encode(&json!({ "alg": "none" })), encode(&claims()));
        assert!(verify(&unsigned, &signer.keys(), &expected()).is_err());
        // A key counts for its own kind of signature only.
        let token = signer.sign(&json!({ "alg": "RS256", "kid": "k" }), &claims());
        assert_eq!(verify(&token, &signer.keys(), &expected()), Err(TokenError::UnknownKey));
        let token = signer.sign(&json!({ "alg": "EdDSA", "crit": ["exp"] }), &claims());
        assert_eq!(verify(&token, &signer.keys(), &expected()), Err(TokenError::Malformed));
        for malformed in ["", "a.b", "a.b.c.d", "..", "!.!.!"] {
            assert_eq!(
                verify(malformed, &signer.keys(), &expected()),
                Err(TokenError::Malformed),
                "{malformed}"
            );
        }
    }

    #[test]
    fn keys_on_elliptic_curves_verify_signatures() {
        let random = SystemRandom::new();
        let pair = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        let pair =
            EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, pair.as_ref(), &random).unwrap();
        let public = pair.public_key().as_ref();
        let part = |range: std::ops::Range<usize>| URL_SAFE_NO_PAD.encode(&public[range]);
        let key = json!({ "kty": "EC", "crv": "P-256", "alg": "ES256", "x": part(1..33), "y": part(33..65) });
        let message = format!("{}.{}", encode(&json!({ "alg": "ES256" })), encode(&claims()));
        let signature = pair.sign(&random, message.as_bytes()).unwrap();
        let token = format!("{message}.{}", URL_SAFE_NO_PAD.encode(signature));
        assert!(verify(&token, &[Key::parse(&key).unwrap()], &expected()).is_ok());
    }

    #[test]
    fn keys_that_do_not_sign_are_left_out() {
        for key in [
            json!({ "kty": "RSA", "use": "enc", "n": "AQ", "e": "AQAB" }),
            json!({ "kty": "oct", "k": "AQ" }),
            json!({ "kty": "EC", "crv": "P-256", "x": "AQ", "y": "AQ" }),
            json!({}),
        ] {
            assert_eq!(Key::parse(&key), None, "{key}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: windlass_testkit::fuzz_cases(),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// No other text than one that the provider signed is an identity, and no key set ends the server.
        #[test]
        fn fuzz_of_id_tokens_and_key_sets(
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
            noise in "(?s).{0,100}",
            parts in prop::collection::vec("[A-Za-z0-9_=-]{0,40}", 0..5),
            field in prop::sample::select(&["kty", "crv", "use", "alg", "kid", "n", "e", "x", "y"][..]),
            value in "[A-Za-z0-9_-]{0,70}",
        ) {
            let signer = Signer::new();
            let text = signer.sign(&header(), &claims());
            let mut changed = text.clone().into_bytes();
            *at.get_mut(&mut changed) = byte;
            let changed = String::from_utf8_lossy(&changed).into_owned();
            for wrong in [parts.join("."), noise.clone(), format!("{text}{noise}."), text[1..].to_owned()] {
                prop_assert!(verify(&wrong, &signer.keys(), &expected()).is_err(), "{wrong}");
            }
            prop_assert!(changed == text || verify(&changed, &signer.keys(), &expected()).is_err(), "{changed}");
            for kind in ["RSA", "EC", "OKP"] {
                let mut key = json!({ "kty": kind, "crv": "P-256", "n": "AQAB", "e": "AQAB", "x": "AA", "y": "AA" });
                key[field] = json!(value);
                let keys: Vec<Key> = Key::parse(&key).into_iter().collect();
                for algorithm in ["RS256", "PS512", "ES256", "ES384", "EdDSA"] {
                    let token = signer.sign(&json!({ "alg": algorithm }), &claims());
                    prop_assert!(verify(&token, &keys, &expected()).is_err());
                }
            }
        }
    }
}
