//! Calls to registries: who is asked, with which right, how often.

use std::{collections::HashMap, sync::OnceLock, time::Duration};

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
use windlass_dial::{Trust, TrustError};

use crate::{
    Image, ImageConfig, ImageName, Layer, Platform, Version,
    challenge::Challenge,
    http::{FetchError, Url, encoded, get, is_loopback},
    image::{Document, INDEX_TYPES, MANIFEST_TYPES},
    name::is_digest,
};

const REDIRECTS_MAX: usize = 5;
/// Tries of one call that meets a registry which is away, busy or out of order.
const TRIES: u32 = 3;
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// A registry may ask for a longer wait; then the call fails instead.
const WAIT_MAX: Duration = Duration::from_secs(20);
/// Of a manifest, an index, a configuration or a token.
const DOCUMENT_BYTES_MAX: usize = 8 << 20;
/// A document that takes longer does not come.
const DOCUMENT_WITHIN: Duration = Duration::from_secs(30);
/// A layer of which nothing more comes for so long has stalled.
const CHUNK_WITHIN: Duration = Duration::from_secs(60);
/// Where a registry does not say how long a token holds.
const TOKEN_LIFE: Duration = Duration::from_secs(60);
/// A token is renewed before its end.
const TOKEN_MARGIN: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    #[error("reach the registry {registry}")]
    Unreachable {
        registry: String,
        #[source]
        source: FetchError,
    },
    #[error("find the image {name}: {} has none of this name", name.registry())]
    NotFound { name: ImageName },
    #[error("read the image {name}: {} refuses it{}", name.registry(), if *with_password { " with this user name and password" } else { " without a user name and password" })]
    Denied { name: ImageName, with_password: bool },
    #[error("find the image {name} for {wanted}: it is there for {} only", list(has))]
    NoPlatform { name: ImageName, wanted: Platform, has: Vec<Platform> },
    #[error("the registry {registry} answers {status}{}{message}", if message.is_empty() { "" } else { ": " })]
    Refused { registry: String, status: u16, message: String },
    #[error("read the image {name}: {problem}")]
    Invalid { name: ImageName, problem: String },
}

impl RegistryError {
    /// The registry is sure of it: to ask again changes nothing.
    pub fn is_final(&self) -> bool {
        match self {
            Self::NotFound { .. } | Self::Denied { .. } | Self::NoPlatform { .. } | Self::Invalid { .. } => {
                true
            }
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
    /// Registries that are spoken to without TLS, beside those of this machine.
    pub plain_http: Vec<String>,
    /// By registry: hosts that have copies of its images, asked first, without anybody's password.
    pub mirrors: HashMap<String, Vec<String>>,
}

/// A client of all registries. Tokens are kept while they hold.
#[derive(Default)]
pub struct Client {
    settings: Settings,
    trust: OnceLock<Trust>,
    tokens: Mutex<HashMap<TokenKey, (String, Instant)>>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct TokenKey {
    host: String,
    repository: String,
    username: Option<String>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// Which registry is asked for what, by whom.
struct Call<'a> {
    name: &'a ImageName,
    host: &'a str,
    credentials: Option<&'a Credentials>,
}

impl Client {
    pub fn new(settings: Settings) -> Self {
        Self { settings, ..Self::default() }
    }

    /// What the name means for a platform: its configuration and its layers.
    pub async fn image(
        &self,
        name: &ImageName,
        platform: &Platform,
        credentials: Option<&Credentials>,
    ) -> Result<Image, RegistryError> {
        let mut first = None;
        for call in self.calls(name, credentials) {
            match self.image_at(&call, platform).await {
                Ok(image) => return Ok(image),
                // The registry itself comes last and has the last word.
                Err(error) => first = Some(error),
            }
        }
        Err(first.unwrap_or_else(|| RegistryError::NotFound { name: name.clone() }))
    }

    /// A layer from byte `from` on. `hashed` has seen the bytes before.
    pub async fn layer<'a>(
        &'a self,
        name: &'a ImageName,
        layer: &Layer,
        credentials: Option<&'a Credentials>,
        from: u64,
        hashed: Option<Context>,
    ) -> Result<Blob<'a>, RegistryError> {
        let mut first = None;
        for call in self.calls(name, credentials) {
            match self.blob_at(call, &layer.digest, layer.size, from).await {
                Ok((call, body)) => {
                    let hash = hashed.unwrap_or_else(|| Context::new(&SHA256));
                    let (digest, size) = (layer.digest.clone(), layer.size);
                    return Ok(Blob { client: self, call, digest, size, at: from, hash, body, tries: 0 });
                }
                Err(error) => first = Some(error),
            }
        }
        Err(first.unwrap_or_else(|| RegistryError::NotFound { name: name.clone() }))
    }

    /// Mirrors first, then the registry itself.
    fn calls<'a>(
        &'a self,
        name: &'a ImageName,
        credentials: Option<&'a Credentials>,
    ) -> impl Iterator<Item = Call<'a>> {
        let mirrors = self.settings.mirrors.get(name.registry()).into_iter().flatten();
        let mirrors = mirrors.map(|host| Call { name, host, credentials: None });
        mirrors.chain(std::iter::once(Call { name, host: name.api_host(), credentials }))
    }

    async fn image_at(&self, call: &Call<'_>, wanted: &Platform) -> Result<Image, RegistryError> {
        let name = call.name;
        let invalid = |problem: String| RegistryError::Invalid { name: name.clone(), problem };
        let decoded = |bytes: &Bytes| {
            serde_json::from_slice::<Document>(bytes)
                .map_err(|error| invalid(format!("its manifest: {error}")))
        };
        let (mut digest, kind, bytes) = self.manifest(call, name.version().as_str()).await?;
        let mut document = decoded(&bytes)?;
        let mut platforms = Vec::new();
        if document.is_index(&kind) {
            platforms = document.platforms().map(|(platform, _)| platform.clone()).collect();
            let chosen = document.platforms().find(|(platform, _)| wanted.runs(platform));
            let Some((_, chosen)) = chosen else {
                let (name, wanted) = (name.clone(), wanted.clone());
                return Err(RegistryError::NoPlatform { name, wanted, has: platforms });
            };
            let (chosen_digest, _, bytes) = self.manifest(call, &chosen.digest).await?;
            (digest, document) = (chosen_digest, decoded(&bytes)?);
        }
        let config =
            document.config.ok_or_else(|| invalid("its manifest names no configuration".to_owned()))?;
        let path = format!("blobs/{}", checked_digest(&config.digest).map_err(&invalid)?);
        let (_, bytes) = self.document(call, &path, &[]).await?;
        verified(&bytes, &config.digest).map_err(&invalid)?;
        let config =
            ImageConfig::parse(&bytes).map_err(|error| invalid(format!("its configuration: {error}")))?;
        for layer in &document.layers {
            checked_digest(&layer.digest).map_err(&invalid)?;
        }
        if platforms.is_empty() {
            platforms.extend(config.platform.clone());
            if let Some(only) = platforms.first().filter(|only| !wanted.runs(only)) {
                let (name, wanted, has) = (name.clone(), wanted.clone(), vec![only.clone()]);
                return Err(RegistryError::NoPlatform { name, wanted, has });
            }
        }
        Ok(Image { digest, platforms, config, layers: document.layers })
    }

    /// By tag or digest: its digest, its type, its bytes.
    async fn manifest(
        &self,
        call: &Call<'_>,
        version: &str,
    ) -> Result<(String, String, Bytes), RegistryError> {
        let accepted = [INDEX_TYPES, MANIFEST_TYPES].concat().join(", ");
        let path = format!("manifests/{version}");
        let (kind, bytes) = self.document(call, &path, &[(header::ACCEPT, accepted)]).await?;
        let digest = sha256(&bytes);
        if is_digest(version) && digest != version {
            let problem = format!("what came has the digest {digest} and should have {version}");
            return Err(RegistryError::Invalid { name: call.name.clone(), problem });
        }
        Ok((digest, kind, bytes))
    }

    /// A small answer, whole, with its type.
    async fn document(
        &self,
        call: &Call<'_>,
        path: &str,
        headers: &[(HeaderName, String)],
    ) -> Result<(String, Bytes), RegistryError> {
        let url = self.url(call, path);
        let response = self.fetch(call, &url, headers).await?;
        let kind = response.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let kind = kind.unwrap_or_default().split(';').next().unwrap_or_default().trim().to_owned();
        let bytes = whole(response, &url).await;
        Ok((kind, bytes.map_err(|error| call.broken(error))?))
    }

    async fn blob_at<'a>(
        &self,
        call: Call<'a>,
        digest: &str,
        size: u64,
        from: u64,
    ) -> Result<(Call<'a>, Incoming), RegistryError> {
        let url = self.url(&call, &format!("blobs/{digest}"));
        let range: &[(HeaderName, String)] =
            if from == 0 { &[] } else { &[(header::RANGE, format!("bytes={from}-"))] };
        let response = self.fetch(&call, &url, range).await?;
        if from > 0 && response.status() != StatusCode::PARTIAL_CONTENT {
            let problem = format!("{} does not send a layer from byte {from} of {size} on", call.host);
            return Err(RegistryError::Invalid { name: call.name.clone(), problem });
        }
        Ok((call, response.into_body()))
    }

    fn url(&self, call: &Call<'_>, path: &str) -> Url {
        let is_plain =
            is_loopback(call.host) || self.settings.plain_http.iter().any(|host| host == call.host);
        let path = format!("/v2/{}/{path}", call.name.repository());
        Url { tls: !is_plain, authority: call.host.to_owned(), path }
    }

    /// An answer that is good. Asked again with a right where one is asked for, and later where the registry is out of order.
    async fn fetch(
        &self,
        call: &Call<'_>,
        url: &Url,
        headers: &[(HeaderName, String)],
    ) -> Result<Response<Incoming>, RegistryError> {
        let mut wait = FIRST_WAIT;
        let mut authorization = self.kept_token(call);
        let mut challenged = false;
        let mut tries = 0;
        loop {
            tries += 1;
            let mut all = headers.to_vec();
            all.extend(authorization.clone().map(|value| (header::AUTHORIZATION, value)));
            let response = match self.follow(url, &all).await {
                Ok(response) => response,
                Err(source) if tries < TRIES && !matches!(source, FetchError::Trust(_)) => {
                    sleep(wait).await;
                    wait *= 2;
                    continue;
                }
                Err(source) => return Err(call.unreachable(source)),
            };
            let status = response.status();
            if status.is_success() {
                return Ok(response);
            }
            if status == StatusCode::UNAUTHORIZED && !challenged {
                challenged = true;
                let asked = response.headers().get_all(header::WWW_AUTHENTICATE).iter();
                let challenge = asked.filter_map(|value| Challenge::parse(value.to_str().ok()?)).next();
                let Some(challenge) = challenge else { return Err(call.denied()) };
                authorization = Some(self.authorize(call, &challenge).await?);
                tries = 0;
                continue;
            }
            if status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error() {
                let asked = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
                let asked = asked.and_then(|text| text.parse().ok()).map_or(wait, Duration::from_secs);
                if tries < TRIES && asked <= WAIT_MAX {
                    sleep(asked).await;
                    wait *= 2;
                    continue;
                }
            }
            return Err(match status {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => call.denied(),
                StatusCode::NOT_FOUND => RegistryError::NotFound { name: call.name.clone() },
                _ => call.refused(status, &whole(response, url).await.unwrap_or_default()),
            });
        }
    }

    /// Through redirects. Rights are for the first host alone.
    async fn follow(
        &self,
        url: &Url,
        headers: &[(HeaderName, String)],
    ) -> Result<Response<Incoming>, FetchError> {
        let mut url = url.clone();
        let mut headers = headers.to_vec();
        for _ in 0..=REDIRECTS_MAX {
            let response = get(&url, &headers, || self.trust()).await?;
            let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let Some(location) = location.filter(|_| response.status().is_redirection()) else {
                return Ok(response);
            };
            let next = url.join(location)?;
            if url.tls && !next.tls {
                return Err(FetchError::Downgrade { host: url.authority });
            }
            if next.authority != url.authority {
                headers.retain(|(name, _)| *name != header::AUTHORIZATION);
            }
            url = next;
        }
        Err(FetchError::Redirects { host: url.authority })
    }

    fn trust(&self) -> Result<Trust, TrustError> {
        if let Some(trust) = self.trust.get() {
            return Ok(trust.clone());
        }
        let trust = Trust::of_machine()?;
        Ok(self.trust.get_or_init(|| trust).clone())
    }

    fn kept_token(&self, call: &Call<'_>) -> Option<String> {
        let tokens = self.tokens.lock();
        let (token, until) = tokens.get(&call.token_key())?;
        (*until > Instant::now()).then(|| token.clone())
    }

    /// The value of the header `Authorization`.
    async fn authorize(&self, call: &Call<'_>, challenge: &Challenge) -> Result<String, RegistryError> {
        let basic = call.credentials.map(|credentials| {
            format!("Basic {}", STANDARD.encode(format!("{}:{}", credentials.username, credentials.password)))
        });
        let (realm, service, scope) = match challenge {
            Challenge::Basic => return basic.ok_or_else(|| call.denied()),
            Challenge::Bearer { realm, service, scope } => (realm, service, scope),
        };
        let own_scope = format!("repository:{}:pull", call.name.repository());
        let mut address = realm.clone();
        address.push(if address.contains('?') { '&' } else { '?' });
        address += &format!("scope={}", encoded(scope.as_ref().unwrap_or(&own_scope)));
        if let Some(service) = service {
            address += &format!("&service={}", encoded(service));
        }
        let url = Url::parse(&address).map_err(|error| call.unreachable(error))?;
        let may_be_plain = is_loopback(&url.authority) || self.settings.plain_http.contains(&url.authority);
        if !url.tls && !may_be_plain {
            return Err(call.unreachable(FetchError::Downgrade { host: url.authority }));
        }
        let headers: Vec<_> = basic.map(|value| (header::AUTHORIZATION, value)).into_iter().collect();
        let response = self.follow(&url, &headers).await.map_err(|error| call.unreachable(error))?;
        let status = response.status();
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            return Err(call.denied());
        }
        let bytes = whole(response, &url).await.map_err(|error| call.broken(error))?;
        if !status.is_success() {
            return Err(call.refused(status, &bytes));
        }
        let token: Token = serde_json::from_slice(&bytes).map_err(|error| RegistryError::Invalid {
            name: call.name.clone(),
            problem: format!("the token for it: {error}"),
        })?;
        let Some(text) = token.token.or(token.access_token).filter(|text| !text.is_empty()) else {
            return Err(call.denied());
        };
        let life = token.expires_in.map_or(TOKEN_LIFE, Duration::from_secs).saturating_sub(TOKEN_MARGIN);
        let value = format!("Bearer {text}");
        self.tokens.lock().insert(call.token_key(), (value.clone(), Instant::now() + life));
        Ok(value)
    }
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
    expires_in: Option<u64>,
}

impl Call<'_> {
    fn token_key(&self) -> TokenKey {
        TokenKey {
            host: self.host.to_owned(),
            repository: self.name.repository().to_owned(),
            username: self.credentials.map(|credentials| credentials.username.clone()),
        }
    }

    fn unreachable(&self, source: FetchError) -> RegistryError {
        RegistryError::Unreachable { registry: self.host.to_owned(), source }
    }

    fn denied(&self) -> RegistryError {
        RegistryError::Denied { name: self.name.clone(), with_password: self.credentials.is_some() }
    }

    fn refused(&self, status: StatusCode, body: &[u8]) -> RegistryError {
        let message = problem(body);
        RegistryError::Refused { registry: self.host.to_owned(), status: status.as_u16(), message }
    }

    fn broken(&self, error: BodyError) -> RegistryError {
        match error {
            BodyError::TooLarge => RegistryError::Invalid {
                name: self.name.clone(),
                problem: format!("a document of it is larger than {} MiB", DOCUMENT_BYTES_MAX >> 20),
            },
            BodyError::Fetch(source) => self.unreachable(source),
        }
    }
}

/// The first sentence of the registry's own, cut where it is long.
fn problem(body: &[u8]) -> String {
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

async fn whole(response: Response<Incoming>, url: &Url) -> Result<Bytes, BodyError> {
    let host = || url.authority.clone();
    let collecting = Limited::new(response.into_body(), DOCUMENT_BYTES_MAX).collect();
    match timeout(DOCUMENT_WITHIN, collecting).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(BodyError::TooLarge),
        Ok(Err(error)) => Err(BodyError::Fetch(match error.downcast::<hyper::Error>() {
            Ok(source) => FetchError::Exchange { host: host(), source: *source },
            Err(_) => FetchError::Silent { host: host() },
        })),
        Err(_) => Err(BodyError::Fetch(FetchError::Silent { host: host() })),
    }
}

fn sha256(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(ring::digest::digest(&SHA256, bytes)))
}

fn checked_digest(digest: &str) -> Result<&str, String> {
    if is_digest(digest) { Ok(digest) } else { Err(format!("`{digest}` is no sha256 digest")) }
}

fn verified(bytes: &[u8], digest: &str) -> Result<(), String> {
    let found = sha256(bytes);
    if found == digest {
        Ok(())
    } else {
        Err(format!("what came has the digest {found} and should have {digest}"))
    }
}

/// A layer while it comes. A connection that breaks is made again and goes on where it stopped.
pub struct Blob<'a> {
    client: &'a Client,
    call: Call<'a>,
    digest: String,
    size: u64,
    at: u64,
    hash: Context,
    body: Incoming,
    /// Connections that broke since the last byte.
    tries: u32,
}

impl Blob<'_> {
    /// The next bytes; `None` once all have come and the digest is right.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, RegistryError> {
        loop {
            let invalid = |problem| RegistryError::Invalid { name: self.call.name.clone(), problem };
            let broken = match timeout(CHUNK_WITHIN, self.body.frame()).await {
                Ok(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) if bytes.is_empty() => continue,
                    Ok(bytes) => {
                        self.at += bytes.len() as u64;
                        if self.at > self.size {
                            return Err(invalid(format!("a layer is larger than its {} bytes", self.size)));
                        }
                        self.hash.update(&bytes);
                        self.tries = 0;
                        return Ok(Some(bytes));
                    }
                    Err(_) => continue,
                },
                Ok(None) if self.at == self.size => {
                    let found = format!("sha256:{}", hex::encode(self.hash.clone().finish()));
                    if found == self.digest {
                        return Ok(None);
                    }
                    let wanted = &self.digest;
                    return Err(invalid(format!("a layer has the digest {found} and should have {wanted}")));
                }
                Ok(None) => FetchError::Silent { host: self.call.host.to_owned() },
                Ok(Some(Err(source))) => FetchError::Exchange { host: self.call.host.to_owned(), source },
                Err(_) => FetchError::Silent { host: self.call.host.to_owned() },
            };
            self.tries += 1;
            if self.tries >= TRIES {
                return Err(self.call.unreachable(broken));
            }
            let call =
                Call { name: self.call.name, host: self.call.host, credentials: self.call.credentials };
            (_, self.body) = self.client.blob_at(call, &self.digest, self.size, self.at).await?;
        }
    }

    /// How many bytes have come, and what is known of them: enough to go on in another process.
    pub fn progress(&self) -> (u64, Context) {
        (self.at, self.hash.clone())
    }
}

impl std::fmt::Debug for Blob<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Blob").field("digest", &self.digest).field("at", &self.at).finish_non_exhaustive()
    }
}

impl Version {
    /// The same name means the same image for ever.
    pub fn is_fixed(&self) -> bool {
        matches!(self, Self::Digest(_))
    }
}
