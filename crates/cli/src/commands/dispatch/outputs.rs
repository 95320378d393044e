//! Location of the outputs of containers: a directory, or a bucket of an object store.

use std::path::PathBuf;

use windlass_objects::{S3Bucket, S3Location};

use crate::error::CliError;

#[derive(Clone, Debug)]
pub(crate) enum Outputs {
    Directory(PathBuf),
    /// The location, and its text.
    Bucket(Box<S3Location>, String),
}

/// Parses the value of `--outputs`.
pub(crate) fn parse(text: &str) -> Result<Outputs, String> {
    match text.split_once("://") {
        Some(("s3", _)) => {
            let place = text.parse().map_err(|error| format!("{error}"))?;
            Ok(Outputs::Bucket(Box::new(place), text.to_owned()))
        }
        Some(_) => Err("expected a directory or `s3://BUCKET/PREFIX?endpoint=URL`".to_owned()),
        None => Ok(Outputs::Directory(text.into())),
    }
}

impl Outputs {
    /// Path that plain processes must not see: the directory, or the file with the credentials.
    pub(super) fn hidden_path(&self) -> Option<PathBuf> {
        match self {
            Self::Directory(dir) => Some(dir.clone()),
            Self::Bucket(place, _) => place.credentials.as_ref().map(PathBuf::from),
        }
    }

    /// Variables with which executors find the location. Credentials of the environment are passed on.
    pub(super) fn environment(&self) -> Vec<(String, String)> {
        let text = match self {
            Self::Directory(dir) => dir.display().to_string(),
            Self::Bucket(_, text) => text.clone(),
        };
        let mut environment = vec![("WINDLASS_EXEC_OUTPUTS".to_owned(), text)];
        if let Self::Bucket(place, _) = self
            && place.credentials.is_none()
        {
            let names = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"];
            let set = names.into_iter().filter_map(|name| Some((name.to_owned(), std::env::var(name).ok()?)));
            environment.extend(set);
        }
        environment
    }

    /// Rejects credentials of the environment for a cluster, which shows variables of jobs to its other users.
    pub(super) fn check_cluster(&self) -> Result<(), CliError> {
        match self {
            Self::Bucket(place, _) if place.credentials.is_none() => Err(CliError::usage(
                "`--outputs s3://…` of a cluster requires `credentials=FILE` in the URL, a file that the nodes can read",
            )
            .hint("append `?credentials=/path/on/nodes`; the file has the format of `~/.aws/credentials`")),
            Self::Bucket(..) | Self::Directory(_) => Ok(()),
        }
    }

    /// Checks on this machine that the bucket exists and the credentials are accepted.
    pub(super) async fn check_bucket(&self) -> anyhow::Result<()> {
        let Self::Bucket(place, _) = self else { return Ok(()) };
        let unusable = |error: &dyn std::error::Error| {
            let cause = windlass_model::error_chain::format_chain(error);
            anyhow::anyhow!("cannot use `--outputs {}`: {cause}", place.address(""))
        };
        let credentials = place.load_credentials().map_err(|error| unusable(&error))?;
        let bucket = S3Bucket::new((**place).clone(), credentials).map_err(|error| unusable(&error))?;
        bucket.list("", None).await.map(|_| ()).map_err(|error| unusable(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_a_directory_or_a_bucket_and_a_cluster_needs_a_file_with_credentials() {
        assert!(
            matches!(parse("/mnt/outputs").unwrap(), Outputs::Directory(dir) if dir == std::path::Path::new("/mnt/outputs"))
        );
        let bucket = parse("s3://out/a?endpoint=http://h:1").unwrap();
        assert_eq!(bucket.environment()[0].1, "s3://out/a?endpoint=http://h:1");
        assert!(bucket.check_cluster().is_err());
        let with_file = parse("s3://out/a?credentials=/etc/keys").unwrap();
        assert!(with_file.check_cluster().is_ok());
        assert_eq!(with_file.hidden_path(), Some("/etc/keys".into()));
        for wrong in ["gs://out", "s3://", "https://host/x"] {
            assert!(parse(wrong).unwrap_err().contains("expected"), "{wrong}");
        }
    }
}
