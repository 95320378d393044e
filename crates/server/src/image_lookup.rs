//! Lookup of images at their registries, before a run is placed.
//!
//! An answer is cached for some minutes, by image and credentials. A registry that cannot be reached is not asked again
//! for a while, so that its absence costs one request some seconds, and not every one. The number of lookups at a time
//! is limited, and each has a time limit that includes the wait for its turn.
//!
//! A user names the registry, so the lookup must not tell what is in the networks of this machine: private addresses
//! are not contacted unless a setting lists them, and one message covers every registry without a usable answer. The
//! cause is in the log of the server.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout},
};
use windlass_dial::{AllowedAddresses, Network};
use windlass_model::{error_chain::format_chain, resources::CpuArch};
use windlass_registry::{
    Client, Credentials, Image, ImageName, Platform, RegistryError, Settings as ClientSettings,
};

/// Lifetime of the description of an image.
const FOUND_TTL: Duration = Duration::from_secs(5 * 60);
/// Lifetime of a refusal: a user who pushes the image or corrects the password should not wait.
const REFUSED_TTL: Duration = Duration::from_secs(10);
/// Time for which a registry that did not answer is not asked again.
const AWAY_TTL: Duration = Duration::from_secs(30);
/// Maximum number of cached answers; beyond it the cache is emptied.
const CACHED_MAX: usize = 4_096;
/// Maximum number of lookups at a time.
const LOOKUPS_MAX: usize = 16;

/// Advice for images that were built or loaded on an instance, but have the name of a registry.
const ONLY_ON_INSTANCES: &str =
    "for images that exist only on instances, the server needs the setting `image_lookup: off`";

/// Answer of a registry about an image.
#[derive(Clone, Debug)]
pub(crate) enum ImageAnswer {
    Found(Arc<ImageFacts>),
    /// No instance could pull the image.
    Refused {
        reason: String,
    },
    /// The registry was not asked or did not answer. Instances may still have the image, or reach the registry.
    NotChecked {
        reason: String,
    },
}

/// Description of an image.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ImageFacts {
    pub(crate) digest: String,
    pub(crate) platforms: Vec<String>,
    /// Architectures that instances may have; empty if they do not restrict the choice.
    pub(crate) architectures: Vec<CpuArch>,
    pub(crate) entrypoint: Vec<String>,
    pub(crate) command: Vec<String>,
    pub(crate) user: String,
    pub(crate) working_dir: String,
    pub(crate) environment: Vec<String>,
}

impl From<Image> for ImageFacts {
    fn from(image: Image) -> Self {
        let architecture = |platform: &Platform| match platform.architecture.as_str() {
            "amd64" => Some(CpuArch::X86),
            "arm64" => Some(CpuArch::Arm),
            _ => None,
        };
        let mut architectures: Vec<CpuArch> = image.platforms.iter().filter_map(architecture).collect();
        architectures.sort_unstable();
        architectures.dedup();
        if architectures.len() > 1 {
            architectures.clear();
        }
        Self {
            digest: image.digest,
            platforms: image.platforms.iter().map(ToString::to_string).collect(),
            architectures,
            entrypoint: image.config.entrypoint,
            command: image.config.command,
            user: image.config.user,
            working_dir: image.config.working_dir,
            environment: image.config.environment,
        }
    }
}

/// Client of registries with its cache.
pub(crate) struct ImageLookup {
    client: Client,
    /// Time limit of one lookup; `None` disables lookups.
    limit: Option<Duration>,
    permits: Semaphore,
    answers: Mutex<HashMap<CacheKey, (ImageAnswer, Instant)>>,
    /// Registries without a usable answer, which are not asked until that time.
    away: Mutex<HashMap<String, Instant>>,
}

#[derive(PartialEq, Eq, Hash)]
struct CacheKey {
    name: ImageName,
    /// User name and a hash of the password.
    credentials: Option<(String, [u8; 32])>,
}

impl ImageLookup {
    pub(crate) fn new(
        limit: Option<Duration>,
        insecure_registries: Vec<String>,
        registry_networks: Vec<Network>,
    ) -> Self {
        let settings = ClientSettings {
            plain_http: insecure_registries,
            allowed_addresses: AllowedAddresses::Public { but: registry_networks },
            ..ClientSettings::default()
        };
        Self {
            client: Client::new(settings),
            limit,
            permits: Semaphore::new(LOOKUPS_MAX),
            answers: Mutex::default(),
            away: Mutex::default(),
        }
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.limit.is_some()
    }

    /// Asks the registry of the image, or returns a recent answer. `None` if lookups are disabled.
    pub(crate) async fn find(&self, image: &str, credentials: Option<&Credentials>) -> Option<ImageAnswer> {
        let limit = self.limit?;
        let name: ImageName = match image.parse() {
            Ok(name) => name,
            Err(error) => {
                let error: windlass_registry::NameError = error;
                return Some(ImageAnswer::Refused { reason: error.to_string() });
            }
        };
        if let Some(known) = self.recent(&name, credentials) {
            return Some(known);
        }
        let answer = match timeout(limit, self.request(&name, credentials)).await {
            Ok(answer) => answer,
            Err(_) => {
                tracing::info!(registry = name.registry(), ?limit, "registry did not answer in time");
                self.mark_away(&name);
                unusable_answer(&name)
            }
        };
        self.keep(name, credentials, &answer);
        Some(answer)
    }

    async fn request(&self, name: &ImageName, credentials: Option<&Credentials>) -> ImageAnswer {
        // The semaphore is never closed.
        let _permit = self.permits.acquire().await.ok();
        let platforms = ["amd64", "arm64"].map(Platform::linux);
        match self.client.describe_image(name, &platforms, credentials).await {
            Ok(image) => ImageAnswer::Found(Arc::new(image.into())),
            Err(error) => {
                if let RegistryError::Unreachable { .. } | RegistryError::Refused { .. } = &error {
                    self.mark_away(name);
                }
                answer_for(&error, name)
            }
        }
    }

    fn recent(&self, name: &ImageName, credentials: Option<&Credentials>) -> Option<ImageAnswer> {
        let now = Instant::now();
        let key = CacheKey::new(name.clone(), credentials);
        if let Some((answer, until)) = self.answers.lock().get(&key)
            && *until > now
        {
            return Some(answer.clone());
        }
        let until = self.away.lock().get(name.registry()).copied()?;
        (until > now).then(|| unusable_answer(name))
    }

    fn mark_away(&self, name: &ImageName) {
        let mut away = self.away.lock();
        if away.len() >= CACHED_MAX {
            away.clear();
        }
        away.insert(name.registry().to_owned(), Instant::now() + AWAY_TTL);
    }

    fn keep(&self, name: ImageName, credentials: Option<&Credentials>, answer: &ImageAnswer) {
        let ttl = match answer {
            ImageAnswer::Found(_) => FOUND_TTL,
            ImageAnswer::Refused { .. } => REFUSED_TTL,
            ImageAnswer::NotChecked { .. } => return,
        };
        let mut answers = self.answers.lock();
        if answers.len() >= CACHED_MAX {
            answers.clear();
        }
        let key = CacheKey::new(name, credentials);
        answers.insert(key, (answer.clone(), Instant::now() + ttl));
    }
}

impl CacheKey {
    fn new(name: ImageName, credentials: Option<&Credentials>) -> Self {
        use sha2::Digest as _;
        let credentials = credentials
            .map(|known| (known.username.clone(), sha2::Sha256::digest(known.password.as_bytes()).into()));
        Self { name, credentials }
    }
}

/// Answer for a registry that cannot be reached, may not be contacted, or responded with something else than an image.
fn unusable_answer(name: &ImageName) -> ImageAnswer {
    let reason = format!(
        "the server got no usable answer from {}; hint: a registry in a private network must be listed in the setting \
         `--registry-networks` of the server, or in `--insecure-registries` if it has no TLS",
        name.registry()
    );
    ImageAnswer::NotChecked { reason }
}

fn answer_for(error: &RegistryError, name: &ImageName) -> ImageAnswer {
    match error {
        RegistryError::NoPlatform(_) => ImageAnswer::Refused { reason: error.to_string() },
        RegistryError::NotFound { .. } | RegistryError::Denied { with_password: false, .. }
            if name.is_on_docker_hub() =>
        {
            // Images that were built on an instance usually have a name without a host.
            let reason = format!("{error}; only an instance that already has the image can run it");
            ImageAnswer::NotChecked { reason }
        }
        RegistryError::NotFound { .. } => {
            ImageAnswer::Refused { reason: format!("{error}; hint: check its name; {ONLY_ON_INSTANCES}") }
        }
        RegistryError::Denied { with_password, .. } => {
            let hint = match with_password {
                true => "check the name of the image and `registry_auth`",
                false => "check the name of the image, or set `registry_auth`",
            };
            ImageAnswer::Refused { reason: format!("{error}; hint: {hint}; {ONLY_ON_INSTANCES}") }
        }
        // A document that this client cannot read may be valid for the engine of an instance.
        RegistryError::Unreachable { .. } | RegistryError::Refused { .. } | RegistryError::Invalid { .. } => {
            tracing::info!(registry = name.registry(), error = %format_chain(error), "failed to look up image");
            unusable_answer(name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_docker_hub_lacks_may_be_on_an_instance_and_others_are_refused() {
        let answer = |image: &str, with_password: bool| {
            let name: ImageName = image.parse().unwrap();
            let missing = answer_for(&RegistryError::NotFound { name: name.clone() }, &name);
            let denied = answer_for(&RegistryError::Denied { name: name.clone(), with_password }, &name);
            [missing, denied].map(|answer| matches!(answer, ImageAnswer::Refused { .. }))
        };
        assert_eq!(answer("myapp:dev", false), [false, false]);
        assert_eq!(answer("myapp:dev", true), [false, true], "wrong credentials are an error");
        assert_eq!(answer("ghcr.io/team/app", false), [true, true]);
    }
}
