//! The registry client: authentication, redirects, retries and mirrors.

use std::{
    collections::{HashMap, VecDeque},
    sync::OnceLock,
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::{
    Response, StatusCode,
    body::{Bytes, Incoming},
    header::{self, HeaderName},
};
use parking_lot::Mutex;
use ring::digest::{Context, SHA256};
use serde::Deserialize;
use tokio::time::{Instant, sleep, timeout};
use windlass_dial::{AllowedAddresses, TlsRoots, TlsRootsError};

use crate::{
    Image, ImageConfig, ImageName, Layer, Platform, Version,
    challenge::Challenge,
    http::{FetchError, Url, get, is_loopback, percent_encode},
    image::{Document, INDEX_TYPES, MANIFEST_TYPES},
    layer_download::{LayerDownload, LayerHosts},
    name::is_digest,
};

const REDIRECTS_MAX: usize = 5;
/// Attempts per call while the registry is unreachable, overloaded or failing.
pub(crate) const ATTEMPTS_MAX: u32 = 3;
const RETRY_DELAY_MIN: Duration = Duration::from_millis(200);
/// Maximum `Retry-After` that is waited for; beyond it the call fails.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(20);
/// Size limit of a manifest, an index, a configuration or a token response.
const DOCUMENT_BYTES_MAX: usize = 8 << 20;
/// Time limit for reading such a document.
const DOCUMENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Lifetime of a token when the registry does not state one.
const TOKEN_LIFETIME_DEFAULT: Duration = Duration::from_secs(60);
/// Time before its expiry at which a token is renewed.
const TOKEN_MARGIN: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    #[error("failed to reach the registry {registry}")]
    Unreachable {
        registry: String,
        #[source]
        source: FetchError,
    },
    #[error("image {name} does not exist in the registry {}", name.registry())]
    NotFound { name: ImageName },
    #[error("the registry {} denies access to the image {name} {} a user name and password", name.registry(), if *with_password { "with" } else { "without" })]
    Denied { name: ImageName, with_password: bool },
    #[error("image {} has no build for {}, only for {}", .0.name, list(&.0.wanted), list(&.0.has))]
    NoPlatform(Box<MissingPlatform>),
    #[error("the registry {registry} answered with status {status}{}{message}", if message.is_empty() { "" } else { ": " })]
    Refused { registry: String, status: u16, message: String },
    #[error("invalid image {name}: {problem}")]
    Invalid { name: ImageName, problem: String },
}

/// Image without a build for any of the requested platforms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingPlatform {
    pub name: ImageName,
    pub wanted: Vec<Platform>,
    pub has: Vec<Platform>,
}

impl RegistryError {
    fn no_platform(name: &ImageName, wanted: &[Platform], has: Vec<Platform>) -> Self {
        Self::NoPlatform(Box::new(MissingPlatform { name: name.clone(), wanted: wanted.to_vec(), has }))
    }

    /// Returns whether retrying later cannot change the result.
    pub fn is_final(&self) -> bool {
        match self {
            Self::NotFound { .. } | Self::Denied { .. } | Self::NoPlatform(_) | Self::Invalid { .. } => true,
            Self::Unreachable { .. } | Self::Refused { .. } => false,
        }
    }
}

fn list(platforms: &[Platform]) -> String {
    let names: Vec<String> = platforms.iter().map(ToString::to_string).collect();
    names.join(", ")
}

#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    pub username: String,
    pub password: String,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("username", &self.username).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Registries contacted without TLS, at any address.
    pub plain_http: Vec<String>,
    /// Addresses that other registries, and the hosts to which they refer, may have. Registries at loopback addresses
    /// are contacted without TLS only if every address is allowed.
    pub allowed_addresses: AllowedAddresses,
    /// Mirror hosts by registry. They are tried first, without credentials.
    pub mirrors: HashMap<String, Vec<String>>,
}

/// Client for any registry. Caches bearer tokens until they expire.
#[derive(Default)]
pub struct Client {
    settings: Settings,
    tls_roots: OnceLock<TlsRoots>,
    tokens: Mutex<HashMap<TokenKey, (String, Instant)>>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct TokenKey {
    host: String,
    repository: String,
    username: Option<String>,
    /// A token is valid for callers who know the password that obtained it, and for no others.
    password_hash: Option<String>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// One call: the image, the host that serves it, and the credentials.
pub(crate) struct ImageRequest<'a> {
    pub(crate) name: &'a ImageName,
    pub(crate) host: &'a str,
    pub(crate) credentials: Option<&'a Credentials>,
}

impl Client {
    pub fn new(settings: Settings) -> Self {
        Self { settings, ..Self::default() }
    }

    /// Resolves a name for a platform to its configuration and layers.
    pub async fn resolve_image(
        &self,
        name: &ImageName,
        platform: &Platform,
        credentials: Option<&Credentials>,
    ) -> Result<Image, RegistryError> {
        self.describe_image(name, std::slice::from_ref(platform), credentials).await
    }

    /// Resolves a name for the first of the platforms that it has a build for.
    pub async fn describe_image(
        &self,
        name: &ImageName,
        platforms: &[Platform],
        credentials: Option<&Credentials>,
    ) -> Result<Image, RegistryError> {
        let mut last_error = None;
        for call in self.requests_for(name, credentials) {
            match self.resolve_image_from(&call, platforms).await {
                Ok(image) => return Ok(image),
                // The registry itself comes last, so its error is the one reported.
                Err(error) => last_error = Some(error),
            }
        }
        Err(last_error.unwrap_or_else(|| RegistryError::NotFound { name: name.clone() }))
    }

    /// Downloads a layer, starting at byte `from`. `hashed` covers the bytes before it. A mirror whose connections break is
    /// left for the next host. One that sends wrong bytes is found at the end; then the whole layer is to be downloaded again
    /// from [`LayerHosts::Registry`].
    pub async fn download_layer<'a>(
        &'a self,
        name: &'a ImageName,
        layer: &Layer,
        credentials: Option<&'a Credentials>,
        hosts: LayerHosts,
        (from, hashed): (u64, Option<Context>),
    ) -> Result<LayerDownload<'a>, RegistryError> {
        let mut hosts: VecDeque<_> = match hosts {
            LayerHosts::MirrorsFirst => self.requests_for(name, credentials).collect(),
            LayerHosts::Registry => self.requests_for(name, credentials).last().into_iter().collect(),
        };
        let (call, body) = self.open_at_any(&mut hosts, name, layer, from).await?;
        let hash = hashed.unwrap_or_else(|| Context::new(&SHA256));
        let layer = layer.clone();
        Ok(LayerDownload::new(self, call, hosts, layer, (from, hash), body))
    }

    /// Returns whether the registry of an image has mirrors.
    pub fn has_mirrors(&self, name: &ImageName) -> bool {
        self.settings.mirrors.get(name.registry()).is_some_and(|hosts| !hosts.is_empty())
    }

    /// Opens a layer at the first of the hosts that responds, and removes it and those before it.
    pub(crate) async fn open_at_any<'a>(
        &self,
        hosts: &mut VecDeque<ImageRequest<'a>>,
        name: &ImageName,
        layer: &Layer,
        from: u64,
    ) -> Result<(ImageRequest<'a>, Incoming), RegistryError> {
        let mut last_error = None;
        while let Some(call) = hosts.pop_front() {
            match self.open_blob(call, &layer.digest, layer.size, from).await {
                Ok(opened) => return Ok(opened),
                Err(error) => last_error = Some(error),
            }
        }
        Err(last_error.unwrap_or_else(|| RegistryError::NotFound { name: name.clone() }))
    }

    /// Returns the calls to try in order: mirrors, then the registry itself.
    fn requests_for<'a>(
        &'a self,
        name: &'a ImageName,
        credentials: Option<&'a Credentials>,
    ) -> impl Iterator<Item = ImageRequest<'a>> {
        let mirrors = self.settings.mirrors.get(name.registry()).into_iter().flatten();
        let mirrors = mirrors.map(|host| ImageRequest { name, host, credentials: None });
        mirrors.chain(std::iter::once(ImageRequest { name, host: name.api_host(), credentials }))
    }

    async fn resolve_image_from(
        &self,
        call: &ImageRequest<'_>,
        wanted: &[Platform],
    ) -> Result<Image, RegistryError> {
        let name = call.name;
        let invalid = |problem: String| RegistryError::Invalid { name: name.clone(), problem };
        let decoded = |bytes: &Bytes| {
            serde_json::from_slice::<Document>(bytes)
                .map_err(|error| invalid(format!("malformed manifest: {error}")))
        };
        let (mut digest, kind, bytes) = self.fetch_manifest(call, name.version().as_str()).await?;
        let mut document = decoded(&bytes)?;
        let mut platforms = Vec::new();
        if document.is_index(&kind) {
            platforms = document.platforms().map(|(platform, _)| platform.clone()).collect();
            let build_for = |one: &Platform| document.platforms().find(|(platform, _)| one.can_run(platform));
            let chosen = wanted.iter().find_map(build_for);
            let Some((_, chosen)) = chosen else {
                return Err(RegistryError::no_platform(name, wanted, platforms));
            };
            let (chosen_digest, _, bytes) = self.fetch_manifest(call, &chosen.digest).await?;
            (digest, document) = (chosen_digest, decoded(&bytes)?);
        }
        let config =
            document.config.ok_or_else(|| invalid("the manifest has no configuration".to_owned()))?;
        let path = format!("blobs/{}", validate_digest(&config.digest).map_err(&invalid)?);
        let (_, bytes) = self.fetch_document(call, &path, &[]).await?;
        verify_digest(&bytes, &config.digest).map_err(&invalid)?;
        let config = ImageConfig::parse(&bytes)
            .map_err(|error| invalid(format!("malformed configuration: {error}")))?;
        for layer in &document.layers {
            validate_digest(&layer.digest).map_err(&invalid)?;
        }
        if platforms.is_empty() {
            platforms.extend(config.platform.clone());
            let has_none = |only: &&Platform| !wanted.iter().any(|one| one.can_run(only));
            if let Some(only) = platforms.first().filter(has_none) {
                return Err(RegistryError::no_platform(name, wanted, vec![only.clone()]));
            }
        }
        Ok(Image { digest, platforms, config, layers: document.layers })
    }

    /// Fetches a manifest or index; returns its digest, media type and bytes.
    async fn fetch_manifest(
        &self,
        call: &ImageRequest<'_>,
        version: &str,
    ) -> Result<(String, String, Bytes), RegistryError> {
        let accepted = [INDEX_TYPES, MANIFEST_TYPES].concat().join(", ");
        let path = format!("manifests/{version}");
        let (kind, bytes) = self.fetch_document(call, &path, &[(header::ACCEPT, accepted)]).await?;
        let digest = sha256(&bytes);
        if is_digest(version) && digest != version {
            let problem = format!("digest mismatch: received {digest}, expected {version}");
            return Err(RegistryError::Invalid { name: call.name.clone(), problem });
        }
        Ok((digest, kind, bytes))
    }

    /// Fetches a small document; returns its media type and bytes.
    async fn fetch_document(
        &self,
        call: &ImageRequest<'_>,
        path: &str,
        headers: &[(HeaderName, String)],
    ) -> Result<(String, Bytes), RegistryError> {
        let url = self.url(call, path);
        let response = self.fetch(call, &url, headers).await?;
        let kind = response.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let kind = kind.unwrap_or_default().split(';').next().unwrap_or_default().trim().to_owned();
        let bytes = read_document(response, &url).await;
        Ok((kind, bytes.map_err(|error| call.body_error(error))?))
    }

    pub(crate) async fn open_blob<'a>(
        &self,
        call: ImageRequest<'a>,
        digest: &str,
        size: u64,
        from: u64,
    ) -> Result<(ImageRequest<'a>, Incoming), RegistryError> {
        let url = self.url(&call, &format!("blobs/{digest}"));
        let range: &[(HeaderName, String)] =
            if from == 0 { &[] } else { &[(header::RANGE, format!("bytes={from}-"))] };
        let response = self.fetch(&call, &url, range).await?;
        if from > 0 && response.status() != StatusCode::PARTIAL_CONTENT {
            let problem =
                format!("{} ignored the range request for a layer (byte {from} of {size})", call.host);
            return Err(RegistryError::Invalid { name: call.name.clone(), problem });
        }
        if let Some(found) = blob_size(&response).filter(|found| *found != size) {
            return Err(RegistryError::Invalid {
                name: call.name.clone(),
                problem: size_mismatch(found, size),
            });
        }
        Ok((call, response.into_body()))
    }

    fn url(&self, call: &ImageRequest<'_>, path: &str) -> Url {
        let is_plain = self.may_be_plain(call.host);
        let path = format!("/v2/{}/{path}", call.name.repository());
        Url { tls: !is_plain, authority: call.host.to_owned(), path }
    }

    fn may_be_plain(&self, authority: &str) -> bool {
        let any = matches!(self.settings.allowed_addresses, AllowedAddresses::Any);
        self.is_listed_plain(authority) || (any && is_loopback(authority))
    }

    fn is_listed_plain(&self, authority: &str) -> bool {
        self.settings.plain_http.iter().any(|host| host == authority)
    }

    /// Sends a request until it succeeds: authenticates when challenged, and retries transient failures.
    async fn fetch(
        &self,
        call: &ImageRequest<'_>,
        url: &Url,
        headers: &[(HeaderName, String)],
    ) -> Result<Response<Incoming>, RegistryError> {
        let mut wait = RETRY_DELAY_MIN;
        let mut authorization = self.cached_token(call);
        let mut challenged = false;
        let mut tries = 0;
        loop {
            tries += 1;
            let mut all = headers.to_vec();
            all.extend(authorization.clone().map(|value| (header::AUTHORIZATION, value)));
            let response = match self.follow_redirects(url, &all).await {
                Ok(response) => response,
                Err(source) if tries < ATTEMPTS_MAX && !matches!(source, FetchError::TlsRoots(_)) => {
                    sleep(wait).await;
                    wait *= 2;
                    continue;
                }
                Err(source) => return Err(call.unreachable_error(source)),
            };
            let status = response.status();
            if status.is_success() {
                return Ok(response);
            }
            if status == StatusCode::UNAUTHORIZED && !challenged {
                challenged = true;
                let requested = response.headers().get_all(header::WWW_AUTHENTICATE).iter();
                let challenge = requested.filter_map(|value| Challenge::parse(value.to_str().ok()?)).next();
                let Some(challenge) = challenge else { return Err(call.denied_error()) };
                authorization = Some(self.authorize(call, &challenge).await?);
                tries = 0;
                continue;
            }
            if status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error() {
                let requested =
                    response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
                let requested =
                    requested.and_then(|text| text.parse().ok()).map_or(wait, Duration::from_secs);
                if tries < ATTEMPTS_MAX && requested <= RETRY_AFTER_MAX {
                    sleep(requested).await;
                    wait *= 2;
                    continue;
                }
            }
            return Err(match status {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => call.denied_error(),
                StatusCode::NOT_FOUND => RegistryError::NotFound { name: call.name.clone() },
                _ => call.status_error(status, &read_document(response, url).await.unwrap_or_default()),
            });
        }
    }

    /// Follows redirects. Credentials are sent to the first host only.
    async fn follow_redirects(
        &self,
        url: &Url,
        headers: &[(HeaderName, String)],
    ) -> Result<Response<Incoming>, FetchError> {
        let mut url = url.clone();
        let mut headers = headers.to_vec();
        for _ in 0..=REDIRECTS_MAX {
            let allowed = match self.is_listed_plain(&url.authority) {
                true => AllowedAddresses::Any,
                false => self.settings.allowed_addresses.clone(),
            };
            let response = get(&url, &headers, allowed, || self.tls_roots()).await?;
            let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let Some(location) = location.filter(|_| response.status().is_redirection()) else {
                return Ok(response);
            };
            let next = url.join(location)?;
            if url.tls && !next.tls {
                return Err(FetchError::InsecureRedirect { host: url.authority });
            }
            if next.authority != url.authority {
                headers.retain(|(name, _)| *name != header::AUTHORIZATION);
            }
            url = next;
        }
        Err(FetchError::TooManyRedirects { host: url.authority })
    }

    fn tls_roots(&self) -> Result<TlsRoots, TlsRootsError> {
        if let Some(trust) = self.tls_roots.get() {
            return Ok(trust.clone());
        }
        let trust = TlsRoots::from_system()?;
        Ok(self.tls_roots.get_or_init(|| trust).clone())
    }

    fn cached_token(&self, call: &ImageRequest<'_>) -> Option<String> {
        let tokens = self.tokens.lock();
        let (token, until) = tokens.get(&call.token_key())?;
        (*until > Instant::now()).then(|| token.clone())
    }

    /// Obtains the value of the `Authorization` header.
    async fn authorize(
        &self,
        call: &ImageRequest<'_>,
        challenge: &Challenge,
    ) -> Result<String, RegistryError> {
        let basic = call.credentials.map(|credentials| {
            format!("Basic {}", STANDARD.encode(format!("{}:{}", credentials.username, credentials.password)))
        });
        let (realm, service, scope) = match challenge {
            Challenge::Basic => return basic.ok_or_else(|| call.denied_error()),
            Challenge::Bearer { realm, service, scope } => (realm, service, scope),
        };
        let own_scope = format!("repository:{}:pull", call.name.repository());
        let mut address = realm.clone();
        address.push(if address.contains('?') { '&' } else { '?' });
        address += &format!("scope={}", percent_encode(scope.as_ref().unwrap_or(&own_scope)));
        if let Some(service) = service {
            address += &format!("&service={}", percent_encode(service));
        }
        let url = Url::parse(&address).map_err(|error| call.unreachable_error(error))?;
        if !url.tls && !self.may_be_plain(&url.authority) {
            return Err(call.unreachable_error(FetchError::InsecureRedirect { host: url.authority }));
        }
        let headers: Vec<_> = basic.map(|value| (header::AUTHORIZATION, value)).into_iter().collect();
        let response =
            self.follow_redirects(&url, &headers).await.map_err(|error| call.unreachable_error(error))?;
        let status = response.status();
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            return Err(call.denied_error());
        }
        let bytes = read_document(response, &url).await.map_err(|error| call.body_error(error))?;
        if !status.is_success() {
            return Err(call.status_error(status, &bytes));
        }
        let token: TokenResponse =
            serde_json::from_slice(&bytes).map_err(|error| RegistryError::Invalid {
                name: call.name.clone(),
                problem: format!("malformed token response: {error}"),
            })?;
        let Some(text) = token.token.or(token.access_token).filter(|text| !text.is_empty()) else {
            return Err(call.denied_error());
        };
        let life =
            token.expires_in.map_or(TOKEN_LIFETIME_DEFAULT, Duration::from_secs).saturating_sub(TOKEN_MARGIN);
        let value = format!("Bearer {text}");
        self.tokens.lock().insert(call.token_key(), (value.clone(), Instant::now() + life));
        Ok(value)
    }
}

#[derive(Deserialize)]
struct TokenResponse {
    token: Option<String>,
    access_token: Option<String>,
    expires_in: Option<u64>,
}

impl ImageRequest<'_> {
    fn token_key(&self) -> TokenKey {
        TokenKey {
            host: self.host.to_owned(),
            repository: self.name.repository().to_owned(),
            username: self.credentials.map(|credentials| credentials.username.clone()),
            password_hash: self.credentials.map(|credentials| sha256(credentials.password.as_bytes())),
        }
    }

    pub(crate) fn unreachable_error(&self, source: FetchError) -> RegistryError {
        RegistryError::Unreachable { registry: self.host.to_owned(), source }
    }

    fn denied_error(&self) -> RegistryError {
        RegistryError::Denied { name: self.name.clone(), with_password: self.credentials.is_some() }
    }

    fn status_error(&self, status: StatusCode, body: &[u8]) -> RegistryError {
        let message = error_message(body);
        RegistryError::Refused { registry: self.host.to_owned(), status: status.as_u16(), message }
    }

    fn body_error(&self, error: BodyError) -> RegistryError {
        match error {
            BodyError::TooLarge => RegistryError::Invalid {
                name: self.name.clone(),
                problem: format!("a document exceeds {} MiB", DOCUMENT_BYTES_MAX >> 20),
            },
            BodyError::Fetch(source) => self.unreachable_error(source),
        }
    }
}

/// Returns the first error message in a registry's response, truncated.
fn error_message(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Problems {
        errors: Vec<Problem>,
    }
    #[derive(Deserialize)]
    struct Problem {
        #[serde(default)]
        message: String,
    }
    let problems: Option<Problems> = serde_json::from_slice(body).ok();
    let message = problems.and_then(|found| found.errors.into_iter().next()).map(|first| first.message);
    message.unwrap_or_default().chars().take(200).filter(|letter| !letter.is_control()).collect()
}

enum BodyError {
    TooLarge,
    Fetch(FetchError),
}

async fn read_document(response: Response<Incoming>, url: &Url) -> Result<Bytes, BodyError> {
    let host = || url.authority.clone();
    let collecting = Limited::new(response.into_body(), DOCUMENT_BYTES_MAX).collect();
    match timeout(DOCUMENT_TIMEOUT, collecting).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(BodyError::TooLarge),
        Ok(Err(error)) => Err(BodyError::Fetch(match error.downcast::<hyper::Error>() {
            Ok(source) => FetchError::Http { host: host(), source: *source },
            Err(_) => FetchError::Timeout { host: host() },
        })),
        Err(_) => Err(BodyError::Fetch(FetchError::Timeout { host: host() })),
    }
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(ring::digest::digest(&SHA256, bytes)))
}

fn validate_digest(digest: &str) -> Result<&str, String> {
    if is_digest(digest) { Ok(digest) } else { Err(format!("`{digest}` is not a sha256 digest")) }
}

pub(crate) fn verify_digest(bytes: &[u8], digest: &str) -> Result<(), String> {
    let found = sha256(bytes);
    if found == digest {
        Ok(())
    } else {
        Err(format!("digest mismatch: received {found}, expected {digest}"))
    }
}

pub(crate) fn size_mismatch(found: u64, declared: u64) -> String {
    format!("a layer has {found} bytes, and its manifest declares {declared}")
}

/// Returns the size of the whole blob, if the response states it.
fn blob_size(response: &Response<Incoming>) -> Option<u64> {
    let header = |name: HeaderName| response.headers().get(name)?.to_str().ok();
    if response.status() == StatusCode::PARTIAL_CONTENT {
        return header(header::CONTENT_RANGE)?.rsplit_once('/')?.1.trim().parse().ok();
    }
    header(header::CONTENT_LENGTH)?.trim().parse().ok()
}

impl Version {
    /// Returns whether the name always refers to the same image.
    pub fn is_fixed(&self) -> bool {
        matches!(self, Self::Digest(_))
    }
}
