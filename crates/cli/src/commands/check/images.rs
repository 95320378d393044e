//! `windlass check --images`: queries registries for images and their platforms.

use serde_json::{Value, json};
use windlass_model::{config::run::Run, plan::execution_mode::PLAIN_PROCESS_IMAGE};
use windlass_registry::{Client, Credentials, Image, ImageName, NameError, Platform, RegistryError};

use crate::error::CliError;

/// Prefix of a reference to a secret, whose value only the server has.
const SECRET_REFERENCE: &str = "${{";

/// The registry's response for one image.
pub(super) enum ImageReport {
    Exists {
        name: ImageName,
        platforms: Vec<Platform>,
        bytes: Option<u64>,
    },
    /// The registry confirmed that a job with this image cannot start.
    Missing {
        reason: String,
    },
    /// The registry did not respond, or requires a password that only the server has.
    Unknown {
        reason: String,
    },
}

impl ImageReport {
    pub(super) fn text(&self) -> String {
        match self {
            Self::Exists { name, platforms, bytes } => {
                let platforms: Vec<String> = platforms.iter().map(ToString::to_string).collect();
                let size = bytes.map(|bytes| format!(", {} MB to download", bytes.div_ceil(1_000_000)));
                format!("image {name} exists for {}{}", platforms.join(", "), size.unwrap_or_default())
            }
            Self::Missing { reason } => reason.clone(),
            Self::Unknown { reason } => format!("the image was not checked: {reason}"),
        }
    }

    pub(super) fn document(&self) -> Value {
        match self {
            Self::Exists { name, platforms, bytes } => {
                let platforms: Vec<String> = platforms.iter().map(ToString::to_string).collect();
                json!({ "state": "exists", "name": name.to_string(), "platforms": platforms, "bytes": bytes })
            }
            Self::Missing { reason } => json!({ "state": "missing", "reason": reason }),
            Self::Unknown { reason } => json!({ "state": "unknown", "reason": reason }),
        }
    }
}

/// A registry client with its runtime.
pub(super) struct ImageChecker {
    client: Client,
    runtime: tokio::runtime::Runtime,
}

impl ImageChecker {
    pub(super) fn new() -> Result<Self, CliError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime
            .map_err(|error| CliError::new("failed to start the async runtime").why(error.to_string()))?;
        Ok(Self { client: Client::default(), runtime })
    }

    /// Returns `None` for a run without an image.
    pub(super) fn check(&self, run: &Run) -> Option<ImageReport> {
        let image =
            run.image.as_deref().filter(|image| !image.is_empty() && *image != PLAIN_PROCESS_IMAGE)?;
        let name: ImageName = match image.parse() {
            Ok(name) => name,
            Err(NameError { .. }) if image.contains(SECRET_REFERENCE) => return None,
            Err(error) => return Some(ImageReport::Missing { reason: error.to_string() }),
        };
        let written = run.registry_auth.as_ref();
        let is_reference = |text: &str| text.contains(SECRET_REFERENCE);
        let has_references =
            written.is_some_and(|auth| is_reference(&auth.username) || is_reference(&auth.password));
        let credentials = written
            .filter(|_| !has_references)
            .map(|auth| Credentials { username: auth.username.clone(), password: auth.password.clone() });
        let platform = Platform::current();
        let answer = self.runtime.block_on(self.client.resolve_image(&name, &platform, credentials.as_ref()));
        Some(report(name, answer, has_references))
    }
}

fn report(name: ImageName, answer: Result<Image, RegistryError>, has_references: bool) -> ImageReport {
    match answer {
        Ok(image) => {
            let bytes = Some(image.size());
            ImageReport::Exists { name, platforms: image.platforms, bytes }
        }
        // Instances may have a different platform than this machine.
        Err(RegistryError::NoPlatform(other)) => {
            ImageReport::Exists { name, platforms: other.has, bytes: None }
        }
        Err(RegistryError::Denied { .. }) if has_references => ImageReport::Unknown {
            reason: "the password of its registry is a secret, which only the server can read".to_owned(),
        },
        Err(error) if error.is_final() => ImageReport::Missing { reason: error.to_string() },
        Err(error) => ImageReport::Unknown { reason: windlass_model::error_chain::format_chain(&error) },
    }
}
