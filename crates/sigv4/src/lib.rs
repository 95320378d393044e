//! AWS request signatures, version 4: for the APIs of AWS and for S3-compatible stores.

use std::fmt::Write as _;

use ring::hmac::{self, HMAC_SHA256};
use sha2::{Digest as _, Sha256};

/// Credentials of the caller. Never logged.
#[derive(Clone)]
pub struct AwsCredentials {
    pub key: String,
    pub secret: String,
    /// Set for temporary credentials.
    pub session: Option<String>,
}

impl std::fmt::Debug for AwsCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AwsCredentials").finish_non_exhaustive()
    }
}

/// The signed parts of a request. `path` is already encoded; `query` and `headers` (lower case) are sorted here.
pub struct CanonicalRequest<'a> {
    pub method: &'a str,
    pub path: &'a str,
    pub query: &'a [(String, String)],
    pub headers: &'a [(&'a str, &'a str)],
    pub body_hash: &'a str,
}

/// Service and region for which a signature is valid.
#[derive(Clone, Copy, Debug)]
pub struct Scope<'a> {
    pub region: &'a str,
    /// `s3`, `ec2`, …
    pub service: &'a str,
}

/// Value of the `Authorization` header. `time` is that of [`amz_date`].
pub fn authorization(
    identity: &AwsCredentials,
    Scope { region, service }: Scope<'_>,
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
    let scope = format!("{day}/{region}/{service}/aws4_request");
    let text = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{}", sha256_hex(canonical.as_bytes()));
    let mut key = format!("AWS4{}", identity.secret).into_bytes();
    for part in [day, region, service, "aws4_request"] {
        key = hmac_sha256(&key, part.as_bytes());
    }
    let signature = hex::encode(hmac_sha256(&key, text.as_bytes()));
    format!(
        "AWS4-HMAC-SHA256 Credential={}/{scope},SignedHeaders={names},Signature={signature}",
        identity.key
    )
}

/// Present time in the form `20130524T000000Z`, which the header `x-amz-date` has.
#[expect(clippy::disallowed_methods, reason = "a signature is good at one moment, by the wall clock")]
pub fn amz_date() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let now = i64::try_from(since.as_secs()).ok().and_then(|secs| jiff::Timestamp::from_second(secs).ok());
    now.unwrap_or_default().strftime("%Y%m%dT%H%M%SZ").to_string()
}

pub fn sha256_hex(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

fn hmac_sha256(key: &[u8], text: &[u8]) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(HMAC_SHA256, key), text).as_ref().to_vec()
}

/// Renders a query in the canonical order and encoding that is signed and sent.
pub fn canonical_query(pairs: &[(String, String)]) -> String {
    let mut pairs: Vec<(String, String)> = pairs
        .iter()
        .map(|(name, value)| (percent_encode(name, false), percent_encode(value, false)))
        .collect();
    pairs.sort_unstable();
    pairs.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&")
}

/// Percent-encodes everything but unreserved characters and, if `keep_slashes`, slashes.
pub fn percent_encode(text: &str, keep_slashes: bool) -> String {
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
    use super::{AwsCredentials, CanonicalRequest, Scope, authorization, percent_encode, sha256_hex};

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
        let identity = AwsCredentials {
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
        let text = authorization(&identity, Scope { region: "us-east-1", service: "s3" }, TIME, &requested);
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

    /// AWS's suite of test vectors, and the example of a query to IAM in the documentation.
    #[test]
    fn signatures_of_other_services_match_the_published_aws_examples() {
        let identity = AwsCredentials {
            key: "AKIDEXAMPLE".into(),
            secret: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY".into(),
            session: None,
        };
        let signature = |service, method, query: &[(&str, &str)], headers: &[(&str, &str)], body: &[u8]| {
            let time = "20150830T123600Z";
            let mut headers = headers.to_vec();
            headers.push(("x-amz-date", time));
            let query: Vec<_> = query.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
            let body_hash = sha256_hex(body);
            let requested = CanonicalRequest {
                method,
                path: "/",
                query: &query,
                headers: &headers,
                body_hash: &body_hash,
            };
            let scope = Scope { region: "us-east-1", service };
            authorization(&identity, scope, time, &requested).split_once("Signature=").unwrap().1.to_owned()
        };
        let host = ("host", "example.amazonaws.com");
        assert_eq!(
            signature("service", "GET", &[], &[host], b""),
            "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"
        );
        assert_eq!(
            signature("service", "GET", &[("Param2", "value2"), ("Param1", "value1")], &[host], b""),
            "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"
        );
        let form = ("content-type", "application/x-www-form-urlencoded");
        assert_eq!(
            signature("service", "POST", &[], &[host, form], b"Param1=value1"),
            "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a"
        );
        let iam = [
            ("host", "iam.amazonaws.com"),
            ("content-type", "application/x-www-form-urlencoded; charset=utf-8"),
        ];
        assert_eq!(
            signature("iam", "GET", &[("Action", "ListUsers"), ("Version", "2010-05-08")], &iam, b""),
            "5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"
        );
    }

    #[test]
    fn debug_output_of_credentials_hides_secrets() {
        let identity =
            AwsCredentials { key: "k".into(), secret: "canary".into(), session: Some("canary".into()) };
        assert!(!format!("{identity:?}").contains("canary"));
    }
}
