//! Location of a bucket, as users configure it, and the credentials for it.

use std::{io, path::Path, str::FromStr};

use super::S3Credentials;

const DEFAULT_REGION: &str = "us-east-1";
const CREDENTIALS_BYTES_MAX: u64 = 1 << 20;

/// Location of a bucket: `s3://BUCKET/PREFIX?endpoint=URL&region=NAME&ca=FILE&credentials=FILE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3Location {
    pub bucket: String,
    /// Prepended to every name; empty, or ends with a slash.
    pub prefix: String,
    pub region: String,
    pub host: String,
    pub port: u16,
    pub tls: bool,
    /// A file of certificates to trust instead of the system's.
    pub roots: Option<String>,
    /// A file with the credentials, in the format of `~/.aws/credentials`; else they are in the environment.
    pub credentials: Option<String>,
}

/// A location that is not valid. The text names what was expected.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct LocationError(pub &'static str);

#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    #[error("environment variable `{name}` is not set: the object store requires credentials")]
    NotSet { name: &'static str },
    #[error("failed to read the credentials in `{file}`")]
    Read {
        file: String,
        #[source]
        source: io::Error,
    },
    #[error("`{file}` has no `{name}`")]
    NotInFile { file: String, name: &'static str },
}

impl FromStr for S3Location {
    type Err = LocationError;

    fn from_str(text: &str) -> Result<Self, LocationError> {
        let rest =
            text.strip_prefix("s3://").ok_or(LocationError("expected `s3://BUCKET/PREFIX?endpoint=URL`"))?;
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (bucket, prefix) = path.split_once('/').unwrap_or((path, ""));
        if bucket.is_empty() || !path.bytes().all(is_unescaped) {
            return Err(LocationError(
                "expected letters, digits, `-`, `_`, `.` and `/` in bucket and prefix",
            ));
        }
        let mut region = DEFAULT_REGION.to_owned();
        let (mut endpoint, mut roots, mut credentials) = (None, None, None);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("region", value)) => region = value.to_owned(),
                Some(("endpoint", value)) => endpoint = Some(value.to_owned()),
                Some(("ca", value)) => roots = Some(value.to_owned()),
                Some(("credentials", value)) => credentials = Some(value.to_owned()),
                Some(_) | None => {
                    return Err(LocationError(
                        "expected `endpoint=URL`, `region=NAME`, `ca=FILE` or `credentials=FILE` after the `?`",
                    ));
                }
            }
        }
        const ENDPOINT: LocationError = LocationError("expected an endpoint such as `https://HOST:PORT`");
        let endpoint = endpoint.unwrap_or_else(|| format!("https://s3.{region}.amazonaws.com"));
        let (tls, authority) = match endpoint.split_once("://") {
            Some(("https", authority)) => (true, authority),
            Some(("http", authority)) => (false, authority),
            Some(_) | None => return Err(ENDPOINT),
        };
        let authority: hyper::http::uri::Authority =
            authority.trim_end_matches('/').parse().map_err(|_| ENDPOINT)?;
        let prefix = prefix.trim_matches('/');
        Ok(Self {
            bucket: bucket.to_owned(),
            prefix: if prefix.is_empty() { String::new() } else { format!("{prefix}/") },
            region,
            host: authority.host().trim_start_matches('[').trim_end_matches(']').to_owned(),
            port: authority.port_u16().unwrap_or(if tls { 443 } else { 80 }),
            tls,
            roots,
            credentials,
        })
    }
}

/// Returns whether a byte needs no escape in any context.
fn is_unescaped(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-_./".contains(&byte)
}

impl S3Location {
    /// Address of an object or of a group of objects, without the settings.
    pub fn address(&self, name: &str) -> String {
        format!("s3://{}/{}{name}", self.bucket, self.prefix)
    }

    /// Reads the credentials from the file of the location, or else from the environment.
    pub fn load_credentials(&self) -> Result<S3Credentials, CredentialsError> {
        let Some(file) = &self.credentials else {
            let must = |name| std::env::var(name).map_err(|_| CredentialsError::NotSet { name });
            return Ok(S3Credentials {
                key: must("AWS_ACCESS_KEY_ID")?,
                secret: must("AWS_SECRET_ACCESS_KEY")?,
                session: std::env::var("AWS_SESSION_TOKEN").ok(),
            });
        };
        let text = read_limited(Path::new(file))
            .map_err(|source| CredentialsError::Read { file: file.clone(), source })?;
        let must = |name: &'static str| {
            let missing = || CredentialsError::NotInFile { file: file.clone(), name };
            find_setting(&text, name).ok_or_else(missing)
        };
        Ok(S3Credentials {
            key: must("aws_access_key_id")?,
            secret: must("aws_secret_access_key")?,
            session: find_setting(&text, "aws_session_token"),
        })
    }
}

fn read_limited(file: &Path) -> io::Result<String> {
    use io::Read as _;
    let mut text = String::new();
    std::fs::File::open(file)?.take(CREDENTIALS_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

/// Finds a setting of the section `default`. Lines before any section belong to it.
fn find_setting(text: &str, name: &str) -> Option<String> {
    let mut is_default = true;
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            is_default = section.trim_end_matches(']').trim() == "default";
        } else if let Some((key, value)) = line.split_once('=')
            && is_default
            && key.trim() == name
        {
            return Some(value.trim().to_owned());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_locations_are_parsed_and_invalid_ones_are_explained() {
        let place: S3Location = "s3://jobs/a/b/?endpoint=http://[::1]:9000&region=eu-1".parse().unwrap();
        assert_eq!(
            (place.bucket.as_str(), place.prefix.as_str(), place.region.as_str()),
            ("jobs", "a/b/", "eu-1")
        );
        assert_eq!((place.host.as_str(), place.port, place.tls), ("::1", 9000, false));
        assert_eq!(place.address("x.1"), "s3://jobs/a/b/x.1");
        let place: S3Location = "s3://jobs?credentials=/etc/keys&ca=/ca.pem".parse().unwrap();
        assert_eq!((place.host.as_str(), place.port, place.tls), ("s3.us-east-1.amazonaws.com", 443, true));
        assert_eq!(
            (place.credentials.as_deref(), place.roots.as_deref()),
            (Some("/etc/keys"), Some("/ca.pem"))
        );
        for wrong in
            ["", "gs://b", "s3://", "s3:///x", "s3://b?colour=red", "s3://b?endpoint=ftp://h", "s3://b c"]
        {
            let error = wrong.parse::<S3Location>().unwrap_err().to_string();
            assert!(error.contains("expected"), "{error}");
        }
    }

    #[test]
    fn credentials_are_read_from_the_default_section_of_a_file() {
        let text =
            "[other]\naws_access_key_id = no\n[default]\naws_access_key_id = id\naws_secret_access_key=a=b\n";
        assert_eq!(find_setting(text, "aws_access_key_id").as_deref(), Some("id"));
        assert_eq!(find_setting(text, "aws_secret_access_key").as_deref(), Some("a=b"));
        assert_eq!(find_setting(text, "aws_session_token"), None);
        let place =
            S3Location { credentials: Some("/nonexistent".to_owned()), ..("s3://b".parse().unwrap()) };
        assert!(place.load_credentials().unwrap_err().to_string().contains("`/nonexistent`"));
    }
}
