//! AWS request signatures, version 4.

use std::fmt::Write as _;

use ring::hmac::{self, HMAC_SHA256};
use sha2::{Digest as _, Sha256};

/// Credentials of the caller. Never logged.
#[derive(Clone)]
pub struct S3Credentials {
    pub key: String,
    pub secret: String,
    /// Set for temporary credentials.
    pub session: Option<String>,
}

impl std::fmt::Debug for S3Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").finish_non_exhaustive()
    }
}

/// The signed parts of a request. `path` is already encoded; `query` and `headers` (lower case) are sorted here.
pub(super) struct CanonicalRequest<'a> {
    pub(super) method: &'a str,
    pub(super) path: &'a str,
    pub(super) query: &'a [(String, String)],
    pub(super) headers: &'a [(&'a str, &'a str)],
    pub(super) body_hash: &'a str,
}

/// Value of the `Authorization` header. `time` has the form `20130524T000000Z`.
pub(super) fn authorization(
    identity: &S3Credentials,
    region: &str,
    time: &str,
    requested: &CanonicalRequest<'_>,
) -> String {
    let mut headers = requested.headers.to_vec();
    headers.sort_unstable();
    let names = headers.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(";");
    let mut canonical =
        format!("{}\n{}\n{}\n", requested.method, requested.path, canonical_query(requested.query));
    for (name, value) in &headers {
        // Writing to a string cannot fail.
        let _ = writeln!(canonical, "{name}:{}", value.trim());
    }
    let _ = write!(canonical, "\n{names}\n{}", requested.body_hash);
    let day = time.get(..8).unwrap_or_default();
    let scope = format!("{day}/{region}/s3/aws4_request");
    let text = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{}", sha256_hex(canonical.as_bytes()));
    let mut key = format!("AWS4{}", identity.secret).into_bytes();
    for part in [day, region, "s3", "aws4_request"] {
        key = hmac_sha256(&key, part.as_bytes());
    }
    let signature = hex::encode(hmac_sha256(&key, text.as_bytes()));
    format!(
        "AWS4-HMAC-SHA256 Credential={}/{scope},SignedHeaders={names},Signature={signature}",
        identity.key
    )
}

pub(super) fn sha256_hex(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

fn hmac_sha256(key: &[u8], text: &[u8]) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(HMAC_SHA256, key), text).as_ref().to_vec()
}

/// Renders a query in the canonical order and encoding that is signed and sent.
pub(super) fn canonical_query(pairs: &[(String, String)]) -> String {
    let mut pairs: Vec<(String, String)> = pairs
        .iter()
        .map(|(name, value)| (percent_encode(name, false), percent_encode(value, false)))
        .collect();
    pairs.sort_unstable();
    pairs.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&")
}

/// Percent-encodes everything but unreserved characters and, if `keep_slashes`, slashes.
pub(super) fn percent_encode(text: &str, keep_slashes: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(byte as char),
            b'/' if keep_slashes => out.push('/'),
            _ => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::{CanonicalRequest, S3Credentials, authorization, percent_encode, sha256_hex};

    const TIME: &str = "20130524T000000Z";
    const HOST: (&str, &str) = ("host", "examplebucket.s3.amazonaws.com");

    /// The examples that AWS publishes for signatures in a header.
    fn signature(
        method: &str,
        path: &str,
        query: &[(&str, &str)],
        more: &[(&str, &str)],
        body: &[u8],
    ) -> String {
        let identity = S3Credentials {
            key: "AKIAIOSFODNN7EXAMPLE".into(),
            secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".into(),
            session: None,
        };
        let body_hash = sha256_hex(body);
        let mut headers = vec![HOST, ("x-amz-date", TIME), ("x-amz-content-sha256", &body_hash)];
        headers.extend(more);
        let query: Vec<_> = query.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        let requested =
            CanonicalRequest { method, path, query: &query, headers: &headers, body_hash: &body_hash };
        let text = authorization(&identity, "us-east-1", TIME, &requested);
        text.split_once("Signature=").unwrap().1.to_owned()
    }

    #[test]
    fn signatures_match_the_published_aws_examples() {
        assert_eq!(
            signature("GET", "/test.txt", &[], &[("range", "bytes=0-9")], b""),
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
        );
        let more = [("date", "Fri, 24 May 2013 00:00:00 GMT"), ("x-amz-storage-class", "REDUCED_REDUNDANCY")];
        let path = format!("/{}", percent_encode("test$file.text", true));
        assert_eq!(
            signature("PUT", &path, &[], &more, b"Welcome to Amazon S3."),
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"
        );
        assert_eq!(
            signature("GET", "/", &[("lifecycle", "")], &[], b""),
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"
        );
        assert_eq!(
            signature("GET", "/", &[("prefix", "J"), ("max-keys", "2")], &[], b""),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
        );
    }

    #[test]
    fn debug_output_of_credentials_hides_secrets() {
        let identity =
            S3Credentials { key: "k".into(), secret: "canary".into(), session: Some("canary".into()) };
        assert!(!format!("{identity:?}").contains("canary"));
    }
}
