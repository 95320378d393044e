//! Pulls, and the decision whether a local image may be used: the same rules as with an engine.
//!
//! A local image is used, unless its tag is `latest`, which moves: then the registry is queried each time. If the
//! registry cannot be reached and there is a local image of the name, it is used nevertheless. For access to images that
//! were pulled with credentials see `pull_access`.

use std::sync::Arc;

use windlass_registry::{Credentials, ImageName, RegistryError, Version, local::LocalName};

use super::{OciRuntime, io_error};
use crate::{
    clock,
    image::{ImageStore, PullError, StoredImage, layer::subprocess::UnpackError},
    shim::{
        docker::pull_access::AccessState,
        runtime::{ProgressCallback, RegistryAuth, RuntimeError},
    },
};

/// Name of an image: in a registry, or on this host.
pub(super) enum ImageSource {
    Registry(ImageName),
    Local(LocalName),
}

impl ImageSource {
    pub(super) fn parse(text: &str) -> Result<Self, RuntimeError> {
        let refused = |why: String| RuntimeError::Refused { what: text.to_owned(), why };
        match LocalName::parse(text) {
            Some(name) => name.map(Self::Local).map_err(|error| refused(error.to_string())),
            None => text.parse().map(Self::Registry).map_err(|error| {
                let error: windlass_registry::NameError = error;
                refused(error.to_string())
            }),
        }
    }

    /// Stores the image: from its registry or from this host.
    pub(super) async fn fetch(
        &self,
        store: &ImageStore,
        credentials: Option<&Credentials>,
        progress: ProgressCallback,
    ) -> Result<StoredImage, PullError> {
        match self {
            Self::Registry(name) => store.pull(name, credentials, progress).await,
            Self::Local(name) => store.import(name, progress).await,
        }
    }

    /// Name in the store.
    pub(super) fn full(&self) -> String {
        match self {
            Self::Registry(name) => name.to_string(),
            Self::Local(name) => name.to_string(),
        }
    }
}

fn is_moving(name: &ImageName) -> bool {
    *name.version() == Version::Tag("latest".to_owned())
}

impl OciRuntime {
    pub(super) async fn pull_image(
        &self,
        image: &str,
        auth: Option<&RegistryAuth>,
        progress: ProgressCallback,
    ) -> Result<(), RuntimeError> {
        let source = ImageSource::parse(image)?;
        let store = &self.shared.store;
        let name = match &source {
            // It may have changed, and no registry has to be queried.
            ImageSource::Local(_) => {
                let imported = self.fetch_with_space(&source, None, progress).await?;
                return imported.map(drop).map_err(|error| pull_error(image, error));
            }
            ImageSource::Registry(name) => name,
        };
        let find = || store.find(&source.full()).map_err(|error| io_error(image, error));
        if let Some(here) = find()?.filter(|_| !is_moving(name)) {
            return self.check_access(name, &here, auth).await;
        }
        let credentials = auth.map(to_credentials);
        let pulled = self.fetch_with_space(&source, credentials.as_ref(), progress).await?;
        match pulled {
            Ok(pulled) => {
                self.remove_unused_in_background();
                auth.map_or(Ok(()), |auth| self.save_proof(name, &pulled, auth))
            }
            Err(error) if error.is_unreachable() => match find()? {
                Some(here) => {
                    tracing::warn!(image, "registry unreachable; using the local image");
                    self.check_access(name, &here, auth).await
                }
                None => Err(pull_error(image, error)),
            },
            Err(error) => Err(pull_error(image, error)),
        }
    }

    /// Stores an image; if all images would exceed their limit, after unused ones were removed.
    async fn fetch_with_space(
        &self,
        source: &ImageSource,
        credentials: Option<&Credentials>,
        progress: ProgressCallback,
    ) -> Result<Result<StoredImage, PullError>, RuntimeError> {
        let fetched = source.fetch(&self.shared.store, credentials, Arc::clone(&progress)).await;
        let Err(PullError::Full { bytes, .. }) = &fetched else { return Ok(fetched) };
        let bytes = *bytes;
        let what = "failed to remove unused images".to_owned();
        self.run_blocking(what, move |shared| shared.make_space(bytes)).await?;
        Ok(source.fetch(&self.shared.store, credentials, progress).await)
    }

    /// Checks whether the task may use a local image.
    async fn check_access(
        &self,
        name: &ImageName,
        here: &StoredImage,
        auth: Option<&RegistryAuth>,
    ) -> Result<(), RuntimeError> {
        let full = name.to_string();
        let repository = repository(name);
        let access = self.shared.proofs.access(&here.digest, &repository, auth, clock::now_ms());
        match access.map_err(|error| io_error(&full, error))? {
            AccessState::Public | AccessState::Proven => Ok(()),
            AccessState::Unproven => {
                let credentials = auth.map(to_credentials);
                let resolved = self.shared.store.resolve(name, credentials.as_ref()).await;
                resolved.map_err(|error| pull_error(&full, error))?;
                auth.map_or(Ok(()), |auth| self.save_proof(name, here, auth))
            }
        }
    }

    fn save_proof(
        &self,
        name: &ImageName,
        image: &StoredImage,
        auth: &RegistryAuth,
    ) -> Result<(), RuntimeError> {
        let saved = self.shared.proofs.add(&image.digest, &repository(name), auth, clock::now_ms());
        saved.map_err(|error| io_error(name.to_string(), error))
    }
}

fn repository(name: &ImageName) -> String {
    format!("{}/{}", name.registry(), name.repository())
}

fn to_credentials(auth: &RegistryAuth) -> Credentials {
    Credentials { username: auth.username.clone(), password: auth.password.clone() }
}

pub(super) fn pull_error(image: &str, error: PullError) -> RuntimeError {
    let what = image.to_owned();
    match error {
        PullError::Registry(RegistryError::NotFound { .. }) => RuntimeError::NoImage { what },
        PullError::Registry(RegistryError::Denied { .. }) => RuntimeError::Unauthorized { what },
        PullError::Registry(error @ RegistryError::NoPlatform(_)) => {
            RuntimeError::Refused { what, why: error.to_string() }
        }
        PullError::Registry(error) => RuntimeError::Failed { what, source: Box::new(error) },
        PullError::Local(error) => RuntimeError::Refused { what, why: error.to_string() },
        PullError::Stalled { secs } => RuntimeError::Stalled { what, secs },
        PullError::Unpack { source: UnpackError::NoSpace(_), .. } => RuntimeError::NoDisk { what },
        PullError::Unpack {
            digest,
            source: UnpackError::Refused(why) | UnpackError::TooLarge { message: why, .. },
        } => RuntimeError::Refused { what, why: format!("layer {digest}: {why}") },
        PullError::Invalid(why) => RuntimeError::Refused { what, why },
        error @ PullError::Full { .. } => RuntimeError::NoDisk { what: format!("{what}: {error}") },
        PullError::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
            RuntimeError::NoDisk { what }
        }
        error @ (PullError::Unpack { .. } | PullError::Io { .. }) => {
            RuntimeError::Failed { what, source: Box::new(error) }
        }
    }
}
