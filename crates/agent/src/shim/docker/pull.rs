//! Image pulls, and the decision whether a local image may be used.
//!
//! A local image is used, unless its tag is `latest` (or absent, which means the same): that tag moves, so the registry
//! is queried each time. When the registry cannot be reached and there is a local image of the name, it is used
//! nevertheless: a host that could run the task a minute ago should not fail because of an outage of the registry. A
//! registry that *responds* (no such image, access denied) is obeyed.
//!
//! For access to images that were pulled with credentials see `proofs`.

use std::time::Duration;

use bollard::{
    Docker as Engine, auth::DockerCredentials, errors::Error, models::ImageInspect,
    query_parameters::CreateImageOptionsBuilder,
};
use futures_util::StreamExt;
use tokio::time::{Instant, timeout_at};

use super::{
    call_with_timeout, error_map,
    error_map::RegistryFailure,
    progress::{ProgressLine, PullLayers},
    pull_access::{AccessState, PullAccessStore},
    reference::ImageReference,
};
use crate::{
    clock,
    shim::runtime::{ProgressCallback, RegistryAuth, RuntimeError},
};

/// Maximum time for a registry to check credentials.
const REGISTRY_TIMEOUT: Duration = Duration::from_secs(30);

pub(super) struct ImagePull<'a> {
    pub(super) engine: &'a Engine,
    pub(super) proofs: &'a PullAccessStore,
    /// Maximum time without progress.
    pub(super) stall: Duration,
    pub(super) image: ImageReference,
    pub(super) auth: Option<&'a RegistryAuth>,
    pub(super) progress: ProgressCallback,
}

impl ImagePull<'_> {
    pub(super) async fn run(self) -> Result<(), RuntimeError> {
        let here = self.here().await?;
        match here.filter(|_| !self.image.moves()) {
            Some(here) => self.check_access(&here).await,
            None => self.fetch().await,
        }
    }

    async fn here(&self) -> Result<Option<ImageInspect>, RuntimeError> {
        let name = self.image.full();
        let what = format!("failed to inspect image {name}");
        match call_with_timeout(what.clone(), self.engine.inspect_image(&name)).await? {
            Ok(image) => Ok(Some(image)),
            Err(error) if error_map::error_status(&error) == Some(404) => Ok(None),
            Err(error) => Err(error_map::from_call_error(what, error)),
        }
    }

    async fn fetch(&self) -> Result<(), RuntimeError> {
        match self.transfer().await {
            Ok(()) => self.record_access().await,
            Err(TransferError::Stalled) => {
                Err(RuntimeError::Stalled { what: self.image.full(), secs: self.stall.as_secs() })
            }
            Err(TransferError::Engine(error)) => {
                let unreachable = error_map::classify_registry_error(&error_map::engine_message(&error))
                    == RegistryFailure::Unreachable;
                match self.here().await {
                    Ok(Some(here)) if unreachable => {
                        tracing::warn!(
                            image = self.image.full(),
                            "registry unreachable; using the local image"
                        );
                        self.check_access(&here).await
                    }
                    Ok(_) | Err(_) => Err(self.registry_error(error)),
                }
            }
        }
    }

    /// Performs the transfer. Dropping this future closes the connection, which ends the pull in the engine.
    async fn transfer(&self) -> Result<(), TransferError> {
        let options = CreateImageOptionsBuilder::default()
            .from_image(&self.image.repository)
            .tag(self.image.version())
            .build();
        let mut lines = self.engine.create_image(Some(options), None, self.credentials());
        let mut layers = PullLayers::default();
        let mut deadline = Instant::now() + self.stall;
        while let Some(line) = timeout_at(deadline, lines.next()).await.map_err(|_| TransferError::Stalled)? {
            let line = line.map_err(TransferError::Engine)?;
            let (Some(layer), Some(status)) = (&line.id, &line.status) else { continue };
            let number = |value: Option<i64>| value.and_then(|value| u64::try_from(value).ok());
            let detail = line.progress_detail.as_ref();
            let line = ProgressLine {
                layer,
                status,
                current: detail.and_then(|detail| number(detail.current)),
                total: detail.and_then(|detail| number(detail.total)),
            };
            if layers.note(line) {
                deadline = Instant::now() + self.stall;
                (self.progress)(layers.totals());
            }
        }
        Ok(())
    }

    /// Records, after a pull with credentials, that the image is private and that these credentials give access to it.
    async fn record_access(&self) -> Result<(), RuntimeError> {
        let Some(auth) = self.auth else { return Ok(()) };
        // An engine that reports success without having the image is queried again when the container is created.
        let Some(id) = self.here().await?.and_then(|here| here.id) else { return Ok(()) };
        self.save_proof(&id, auth)
    }

    /// Checks whether the task may use a local image.
    async fn check_access(&self, here: &ImageInspect) -> Result<(), RuntimeError> {
        let id = here.id.as_deref().unwrap_or_default();
        let access = self.proofs.access(id, &self.image.repository, self.auth, clock::now_ms());
        match access.map_err(|source| self.proof_store_error(source))? {
            AccessState::Public | AccessState::Proven => Ok(()),
            AccessState::Unproven => {
                self.verify_with_registry().await?;
                self.auth.map_or(Ok(()), |auth| self.save_proof(id, auth))
            }
        }
    }

    /// Requests the manifest from the registry with the credentials of the task.
    async fn verify_with_registry(&self) -> Result<(), RuntimeError> {
        let name = self.image.full();
        let requested = self.engine.inspect_registry_image(&name, self.credentials());
        match tokio::time::timeout(REGISTRY_TIMEOUT, requested).await {
            Ok(Ok(_)) => Ok(()),
            // Podman cannot query without a pull; a pull of a local image transfers no layers.
            Ok(Err(error)) if is_unsupported_call(&error) => match self.transfer().await {
                Ok(()) => Ok(()),
                Err(TransferError::Stalled) => {
                    Err(RuntimeError::Stalled { what: name, secs: self.stall.as_secs() })
                }
                Err(TransferError::Engine(error)) => Err(self.registry_error(error)),
            },
            Ok(Err(error)) => Err(self.registry_error(error)),
            Err(_) => Err(RuntimeError::Stalled { what: name, secs: REGISTRY_TIMEOUT.as_secs() }),
        }
    }

    fn save_proof(&self, id: &str, auth: &RegistryAuth) -> Result<(), RuntimeError> {
        let noted = self.proofs.add(id, &self.image.repository, auth, clock::now_ms());
        noted.map_err(|source| self.proof_store_error(source))
    }

    fn proof_store_error(&self, source: std::io::Error) -> RuntimeError {
        error_map::from_io_error(format!("failed to check access to image {}", self.image.full()), source)
    }

    fn registry_error(&self, error: Error) -> RuntimeError {
        error_map::from_registry_error(&self.image.full(), self.auth.is_some(), error)
    }

    fn credentials(&self) -> Option<DockerCredentials> {
        self.auth.map(|auth| DockerCredentials {
            username: Some(auth.username.clone()),
            password: Some(auth.password.clone()),
            serveraddress: Some(self.image.registry().to_owned()),
            ..DockerCredentials::default()
        })
    }
}

enum TransferError {
    Stalled,
    Engine(Error),
}

/// Returns whether the engine does not support registry queries, as opposed to a query that failed.
fn is_unsupported_call(error: &Error) -> bool {
    let message = error_map::engine_message(error).to_lowercase();
    let unknown_call = ["", "not found", "page not found", "not implemented"].contains(&message.as_str());
    unknown_call && matches!(error_map::error_status(error), Some(404 | 405 | 501))
}
