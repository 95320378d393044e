//! Location of logs, as users configure it: `files`, `dir:PATH` or `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`.

use std::{io, path::PathBuf, str::FromStr, sync::Arc};

use windlass_objects::{CredentialsError, LocationError};

use super::{
    LogStore,
    files::FileLogStore,
    objects::{
        ObjectLogStore,
        dir::DirBucket,
        s3::{self, S3Bucket},
    },
};

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
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
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
        if !text.starts_with("s3://") {
            return Err(wrong("expected `files`, `dir:PATH` or `s3://BUCKET/PREFIX?endpoint=URL`"));
        }
        text.parse().map(Self::S3).map_err(|LocationError(want)| wrong(want))
    }
}

impl LogLocation {
    /// Opens the store. `files` is the directory for logs as files; credentials for an object store come from the file
    /// that the location names, or from the environment, as with its own tools.
    pub fn open(&self, files: PathBuf) -> Result<Arc<dyn LogStore>, LogLocationError> {
        Ok(match self {
            Self::Files => Arc::new(FileLogStore::new(files)),
            Self::Dir(path) => Arc::new(ObjectLogStore::new(Arc::new(DirBucket::new(path.clone())))),
            Self::S3(place) => {
                let bucket = S3Bucket::new(place.clone(), place.load_credentials()?)
                    .map_err(LogLocationError::Open)?;
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
        let Ok(LogLocation::S3(place)) = "s3://jobs/a/b/?endpoint=http://[::1]:9000".parse() else {
            panic!("an object store")
        };
        assert_eq!((place.bucket.as_str(), place.prefix.as_str()), ("jobs", "a/b/"));
        for wrong in
            ["", "dir:logs", "s3://", "s3:///x", "s3://b?colour=red", "s3://b?endpoint=ftp://h", "s3://b c"]
        {
            let error = wrong.parse::<LogLocation>().unwrap_err().to_string();
            assert!(error.contains("expected"), "{error}");
        }
    }
}
