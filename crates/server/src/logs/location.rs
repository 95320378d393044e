//! Location of logs, as users configure it: `files`, `dir:PATH` or `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`.

use std::{io, path::PathBuf, str::FromStr, sync::Arc};

use super::{
    LogStore,
    files::FileLogStore,
    objects::{
        ObjectLogStore,
        dir::DirBucket,
        s3::{self, S3Bucket, S3Credentials},
    },
};

const DEFAULT_REGION: &str = "us-east-1";

/// `Files` supports one server; the others support any number.
#[derive(Clone, Debug, Default)]
pub enum LogLocation {
    /// In the data directory.
    #[default]
    Files,
    /// A directory that all servers share.
    Dir(PathBuf),
    S3(s3::S3Location),
}

#[derive(Debug, thiserror::Error)]
pub enum LogLocationError {
    #[error("invalid `--log-store` value `{text}`: {want}")]
    Text { text: String, want: &'static str },
    #[error("environment variable `{name}` is not set: the object store requires credentials")]
    NoCredentials { name: &'static str },
    #[error("failed to open the log store")]
    Open(#[source] io::Error),
    #[error("cannot use the log store")]
    Check(#[source] io::Error),
}

impl FromStr for LogLocation {
    type Err = LogLocationError;

    fn from_str(text: &str) -> Result<Self, LogLocationError> {
        let wrong = |want| LogLocationError::Text { text: text.to_owned(), want };
        if text == "files" {
            return Ok(Self::Files);
        }
        if let Some(path) = text.strip_prefix("dir:") {
            let path = PathBuf::from(path);
            return if path.is_absolute() {
                Ok(Self::Dir(path))
            } else {
                Err(wrong("expected an absolute path"))
            };
        }
        let rest = text.strip_prefix("s3://");
        let rest =
            rest.ok_or_else(|| wrong("expected `files`, `dir:PATH` or `s3://BUCKET/PREFIX?endpoint=URL`"))?;
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (bucket, prefix) = path.split_once('/').unwrap_or((path, ""));
        if bucket.is_empty() || !path.bytes().all(is_unescaped) {
            return Err(wrong("expected letters, digits, `-`, `_`, `.` and `/` in bucket and prefix"));
        }
        let (mut region, mut endpoint, mut roots) = (DEFAULT_REGION.to_owned(), None, None);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("region", value)) => region = value.to_owned(),
                Some(("endpoint", value)) => endpoint = Some(value.to_owned()),
                Some(("ca", value)) => roots = Some(value.to_owned()),
                Some(_) | None => {
                    return Err(wrong("expected `endpoint=URL`, `region=NAME` or `ca=FILE` after the `?`"));
                }
            }
        }
        let endpoint = endpoint.unwrap_or_else(|| format!("https://s3.{region}.amazonaws.com"));
        let (tls, authority) = match endpoint.split_once("://") {
            Some(("https", authority)) => (true, authority),
            Some(("http", authority)) => (false, authority),
            Some(_) | None => return Err(wrong("expected an endpoint such as `https://HOST:PORT`")),
        };
        let authority: hyper::http::uri::Authority = authority
            .trim_end_matches('/')
            .parse()
            .map_err(|_| wrong("expected an endpoint such as `https://HOST:PORT`"))?;
        let prefix = prefix.trim_matches('/');
        Ok(Self::S3(s3::S3Location {
            bucket: bucket.to_owned(),
            prefix: if prefix.is_empty() { String::new() } else { format!("{prefix}/") },
            region,
            host: authority.host().trim_start_matches('[').trim_end_matches(']').to_owned(),
            port: authority.port_u16().unwrap_or(if tls { 443 } else { 80 }),
            tls,
            roots,
        }))
    }
}

/// Returns whether a byte needs no escape in any context.
fn is_unescaped(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-_./".contains(&byte)
}

impl LogLocation {
    /// Opens the store. `files` is the directory for logs as files; credentials for an object store come from the
    /// environment, as with its own tools.
    pub fn open(&self, files: PathBuf) -> Result<Arc<dyn LogStore>, LogLocationError> {
        Ok(match self {
            Self::Files => Arc::new(FileLogStore::new(files)),
            Self::Dir(path) => Arc::new(ObjectLogStore::new(Arc::new(DirBucket::new(path.clone())))),
            Self::S3(place) => {
                let must = |name| std::env::var(name).map_err(|_| LogLocationError::NoCredentials { name });
                let identity = S3Credentials {
                    key: must("AWS_ACCESS_KEY_ID")?,
                    secret: must("AWS_SECRET_ACCESS_KEY")?,
                    session: std::env::var("AWS_SESSION_TOKEN").ok(),
                };
                let bucket = S3Bucket::new(place.clone(), identity).map_err(LogLocationError::Open)?;
                Arc::new(ObjectLogStore::new(Arc::new(bucket)))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::LogLocation;

    #[test]
    fn log_locations_are_parsed_and_invalid_ones_are_explained() {
        assert!(matches!("files".parse(), Ok(LogLocation::Files)));
        assert!(
            matches!("dir:/mnt/logs".parse(), Ok(LogLocation::Dir(path)) if path.to_str() == Some("/mnt/logs"))
        );
        let Ok(LogLocation::S3(place)) = "s3://jobs/a/b/?endpoint=http://[::1]:9000&region=eu-1".parse()
        else {
            panic!("an object store")
        };
        assert_eq!(
            (place.bucket.as_str(), place.prefix.as_str(), place.region.as_str()),
            ("jobs", "a/b/", "eu-1")
        );
        assert_eq!((place.host.as_str(), place.port, place.tls), ("::1", 9000, false));
        let Ok(LogLocation::S3(place)) = "s3://jobs".parse() else { panic!("an object store") };
        assert_eq!((place.host.as_str(), place.port, place.tls), ("s3.us-east-1.amazonaws.com", 443, true));
        for wrong in
            ["", "dir:logs", "s3://", "s3:///x", "s3://b?colour=red", "s3://b?endpoint=ftp://h", "s3://b c"]
        {
            let error = wrong.parse::<LogLocation>().unwrap_err().to_string();
            assert!(error.contains("expected"), "{error}");
        }
    }
}
