//! Authentication and authorization of callers.
//!
//! A token is 256 random bits behind a prefix that scanners recognise. Only its SHA-256 is stored: a token is looked up
//! by its hash, and the hash is compared in constant time. Results are cached for at most a second, and dropped at once
//! when this process changes users, tokens or members.

use std::{
    collections::{HashMap, HashSet},
    hash::Hash,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tokio::time::Instant;
use uuid::Uuid;
use windlass_api::{
    Access, Operation,
    operation::{CallerRole, Ownership},
    projects::ProjectRole,
    users::TokenScope,
};
use windlass_model::{
    config::job_spec_builder::DefaultImages,
    id::{GatewayId, UserId},
};

use crate::{
    app::App,
    connection_shares::mark_authenticated,
    db::{
        DbError, gateways,
        projects::{self, Membership, Project},
        sessions::{self, Session},
        tokens,
        users::User,
    },
    error::{Error, Result},
};

/// Time for which another replica may accept a token that was revoked here.
const CACHE_TTL: Duration = Duration::from_secs(1);
/// Time for which it is cached that a token is not from this server. Affects what services are sent, not access.
const SERVER_TOKEN_TTL: Duration = Duration::from_secs(10);
/// Maximum number of entries of each kind. When full, all are dropped: they live for a second anyway.
const ENTRIES_MAX: usize = 10_000;
const PREFIX: &str = "wl_";
/// Prefix of the cookies of sessions.
const SESSION_PREFIX: &str = "wls_";
/// The prefix, and 256 bits in base64.
const GENERATED_TOKEN_LEN: usize = 46;
/// Length of the part of a token that lists show.
const SHOWN_PREFIX_LEN: usize = 8;

/// A token in plain text: shown once, never stored.
pub struct Token(String);

impl Token {
    pub fn draw() -> Result<Self, getrandom::Error> {
        let mut bits = [0_u8; 32];
        getrandom::fill(&mut bits)?;
        Ok(Self(format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bits))))
    }

    /// Generates the cookie of a session.
    pub fn draw_session() -> Result<Self, getrandom::Error> {
        let mut bits = [0_u8; 32];
        getrandom::fill(&mut bits)?;
        Ok(Self(format!("{SESSION_PREFIX}{}", URL_SAFE_NO_PAD.encode(bits))))
    }

    /// A token that the operator chose.
    pub fn chosen(text: &str) -> Self {
        Self(text.to_owned())
    }

    pub fn text(&self) -> &str {
        &self.0
    }

    pub fn hash(&self) -> String {
        hex::encode(Sha256::digest(self.0.as_bytes()))
    }

    /// Part that may be shown: nothing of a short chosen token.
    pub fn shown(&self) -> &str {
        if self.0.len() >= 4 * SHOWN_PREFIX_LEN {
            self.0.get(..SHOWN_PREFIX_LEN).unwrap_or_default()
        } else {
            ""
        }
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

/// An authenticated user.
#[derive(Clone, Debug)]
pub struct Caller {
    pub user: Arc<User>,
    /// Presented token or cookie of a session.
    pub token: Arc<Token>,
    pub credential: Credential,
    /// Operations that the token permits.
    pub scope: TokenScope,
}

/// Kind of credential that a caller presented.
#[derive(Clone, Debug)]
pub enum Credential {
    /// A token, with its id.
    Token(Uuid),
    /// The cookie of a browser.
    Session(Session),
}

impl Caller {
    /// Presented token, so that its owner can be shown it again. The cookie of a session is never shown.
    pub fn shown_token(&self) -> Option<&Token> {
        match self.credential {
            Credential::Token(_) => Some(&self.token),
            Credential::Session(_) => None,
        }
    }

    /// Session of the caller, if it is a browser.
    pub fn session(&self) -> Option<&Session> {
        match &self.credential {
            Credential::Token(_) => None,
            Credential::Session(session) => Some(session),
        }
    }

    /// Checks that the presented token permits an operation, regardless of the user.
    pub fn require_operation(&self, operation: &str) -> Result<()> {
        if self.scope.allows(operation) { Ok(()) } else { Err(out_of_scope()) }
    }

    /// Checks that the token permits access to services.
    pub fn require_services(&self) -> Result<()> {
        if self.scope.opens_services() { Ok(()) } else { Err(out_of_scope()) }
    }

    /// Checks the access levels that need no project. Where the body matters, the handler checks further.
    pub fn must(&self, access: Access) -> Result<()> {
        let role = if self.user.admin { CallerRole::GlobalAdmin } else { CallerRole::Outsider };
        let passes = !access.in_project() && access.admits(role, Ownership::Own);
        if passes { Ok(()) } else { Err(Error::denied()) }
    }

    /// Checks that the caller is the user of this name or a global admin.
    pub fn require_user(&self, name: &str) -> Result<()> {
        if self.user.admin || self.user.name == name { Ok(()) } else { Err(Error::denied()) }
    }
}

fn out_of_scope() -> Error {
    Error::Denied { msg: "Access denied: the scope of the token does not permit this".into() }
}

/// Parses the scope column. An unknown value permits no operation of the API.
pub(crate) fn parse_scope(word: &str) -> TokenScope {
    if word == tokens::FULL_SCOPE {
        return TokenScope::All;
    }
    TokenScope::ALL.into_iter().find(|scope| scope.name() == word).unwrap_or(TokenScope::Services)
}

/// A caller inside the project that the path names.
#[derive(Clone, Debug)]
pub struct ProjectScope {
    pub caller: Caller,
    pub project: Arc<Project>,
    pub membership: Option<Membership>,
    /// Values of the path after the project's name.
    pub path: Vec<String>,
    /// Client's key of this request, so that a repeat has no second effect.
    pub idempotency_key: Option<String>,
}

impl ProjectScope {
    /// Role of the caller in this project: a global admin is an admin everywhere.
    pub fn role(&self) -> Option<ProjectRole> {
        if self.caller.user.admin {
            return Some(ProjectRole::Admin);
        }
        match self.membership.as_ref()?.role.as_str() {
            "admin" => Some(ProjectRole::Admin),
            "manager" => Some(ProjectRole::Manager),
            "user" => Some(ProjectRole::User),
            _ => None,
        }
    }

    /// Images of runs that name none.
    pub fn default_images(&self, app: &App) -> DefaultImages {
        app.settings().images.with_project(self.project.default_image.as_deref())
    }

    /// Role as the operation table defines it.
    pub fn caller_role(&self) -> CallerRole {
        match self.role() {
            _ if self.caller.user.admin => CallerRole::GlobalAdmin,
            Some(ProjectRole::Admin) => CallerRole::ProjectAdmin,
            Some(ProjectRole::Manager) => CallerRole::Manager,
            Some(ProjectRole::User) => CallerRole::User,
            None => CallerRole::Outsider,
        }
    }

    /// Checks that the caller may call an operation with this access at all. Where the owner of the object matters, the
    /// handler continues with [`Self::require_ownership`].
    pub fn must(&self, access: Access) -> Result<()> {
        // Every user can see public projects; users who are not managers can join and leave them.
        let is_open = matches!(access, Access::ProjectPublic | Access::ProjectSelfOrManager);
        let passes = access.in_project()
            && (access.admits(self.caller_role(), Ownership::Own) || (is_open && self.project.is_public));
        if passes { Ok(()) } else { Err(Error::denied()) }
    }

    /// Rejects an operation on an object of another user, unless its access admits the caller to those too. `what`
    /// names the object; `None` is an object that the server created.
    pub fn require_ownership<O: Operation>(&self, owner: Option<UserId>, what: &str) -> Result<()> {
        let is_own = owner == Some(self.caller.user.id);
        let object = if is_own { Ownership::Own } else { Ownership::Foreign };
        if O::ACCESS.admits(self.caller_role(), object) {
            return Ok(());
        }
        let whose = if owner.is_some() { "belongs to another user" } else { "was created by the server" };
        Err(Error::denied_with(format!(
            "{what} {whose}; only its creator, managers and admins of the project, and global admins may do this"
        )))
    }

    pub fn can_manage_ssh_fleets(&self) -> bool {
        self.caller.user.admin || self.membership.as_ref().is_some_and(|member| member.can_manage_ssh_fleets)
    }

    pub fn can_manage_secrets(&self) -> bool {
        self.caller.user.admin || self.membership.as_ref().is_some_and(|member| member.can_manage_secrets)
    }
}

/// Parses `Bearer TOKEN` and finds its user.
pub async fn authenticate(app: &App, authorization: Option<&str>) -> Result<Caller> {
    let denied = Error::Denied { msg: "Invalid token".into() };
    let Some(text) = authorization.and_then(bearer).filter(|text| !is_session_cookie(text)) else {
        return Err(denied);
    };
    let cache = app.access();
    let key: [u8; 32] = Sha256::digest(text.as_bytes()).into();
    if let Some(caller) = cache.tokens.get(&key) {
        mark_authenticated(Some(caller.user.id));
        return Ok(caller);
    }
    let generation = cache.generation();
    let token = Token::chosen(text);
    let hash = token.hash();
    let Some(valid) = tokens::find(app.db(), &hash).await? else { return Err(denied) };
    if !bool::from(valid.hash.as_bytes().ct_eq(hash.as_bytes())) {
        return Err(denied);
    }
    if !valid.seen_lately {
        cache.used.lock().insert(valid.id);
    }
    let scope = parse_scope(&valid.scope);
    let credential = Credential::Token(valid.id);
    let caller = Caller { user: Arc::new(valid.user), token: Arc::new(token), credential, scope };
    let expires = valid.expires_in_us.and_then(|us| u64::try_from(us).ok()).map(Duration::from_micros);
    let life = expires.map_or(CACHE_TTL, |left| left.min(CACHE_TTL));
    cache.tokens.put(key, caller.clone(), life, || cache.generation() == generation);
    mark_authenticated(Some(caller.user.id));
    Ok(caller)
}

/// Finds the user of a session by its cookie. `address` is recorded as that of its last request.
pub async fn authenticate_session(app: &App, cookie: &str, address: Option<IpAddr>) -> Result<Caller> {
    if !app.settings().web_ui || !is_session_cookie(cookie) {
        return Err(Error::Unauthenticated);
    }
    let cache = app.access();
    let key: [u8; 32] = Sha256::digest(cookie.as_bytes()).into();
    if let Some(caller) = cache.tokens.get(&key) {
        mark_authenticated(Some(caller.user.id));
        return Ok(caller);
    }
    let generation = cache.generation();
    let token = Token::chosen(cookie);
    let hash = token.hash();
    let idle = app.settings().limits.web_sessions.idle;
    let valid = sessions::find(app.db(), &hash, idle).await?.ok_or(Error::Unauthenticated)?;
    if !bool::from(valid.hash.as_bytes().ct_eq(hash.as_bytes())) {
        return Err(Error::Unauthenticated);
    }
    if let Some(address) = address.filter(|_| !valid.seen_lately) {
        cache.seen_sessions.lock().insert(valid.session.id, address);
    }
    let caller = Caller {
        user: Arc::new(valid.user),
        token: Arc::new(token),
        credential: Credential::Session(valid.session),
        scope: parse_scope(&valid.scope),
    };
    cache.tokens.put(key, caller.clone(), CACHE_TTL, || cache.generation() == generation);
    mark_authenticated(Some(caller.user.id));
    Ok(caller)
}

/// Returns whether a text can be the cookie of a session. A bearer token is never accepted as one, and vice versa.
pub fn is_session_cookie(text: &str) -> bool {
    text.starts_with(SESSION_PREFIX)
}

/// A process of a gateway, and the hash of the token that it presented.
#[derive(Clone, Debug)]
pub struct GatewayCaller {
    pub gateway: GatewayId,
    pub token_hash: String,
}

/// Parses `Bearer TOKEN` and finds the gateway whose processes present it.
pub async fn authenticate_gateway(app: &App, authorization: Option<&str>) -> Result<GatewayCaller> {
    let denied = || Error::Denied { msg: "Invalid token".into() };
    let text = authorization.and_then(bearer).ok_or_else(denied)?;
    let hash = Token::chosen(text).hash();
    let found = gateways::find_by_token(app.db(), &hash).await?;
    found
        .filter(|(_, held)| bool::from(held.as_bytes().ct_eq(hash.as_bytes())))
        .map(|(gateway, token_hash)| GatewayCaller { gateway, token_hash })
        .inspect(|_| mark_authenticated(None))
        .ok_or_else(denied)
}

/// Returns whether a token is from this server, of any kind and user, active or not. A client that tries many others is
/// rejected.
pub async fn is_server_token(app: &App, text: &str, peer: IpAddr) -> Result<bool> {
    let cache = app.access();
    let key: [u8; 32] = Sha256::digest(text.as_bytes()).into();
    if let Some(known) = cache.ours.get(&key) {
        return Ok(known);
    }
    // A token this long was generated, here or elsewhere, and cannot be guessed.
    let is_guess = text.len() < GENERATED_TOKEN_LEN;
    if is_guess {
        app.paces().check_login(peer)?;
    }
    // `v2/UUID/SECRET` and `v2/UUID/SECRET/CONTAINER`, as the queue writes them.
    let secret = text.strip_prefix("v2/").and_then(|rest| rest.split('/').nth(1)).unwrap_or(text);
    let hashes = [Token::chosen(text).hash(), Token::chosen(secret).hash()];
    let known = tokens::is_known(app.db(), &hashes).await?;
    if is_guess && !known {
        app.paces().tried(peer)?;
    }
    cache.ours.put(key, known, SERVER_TOKEN_TTL, || true);
    Ok(known)
}

/// Returns whether the token was generated, or was found to be valid within the last second.
pub fn is_unguessable(app: &App, authorization: Option<&str>) -> bool {
    let Some(text) = authorization.and_then(bearer) else { return false };
    if text.starts_with(PREFIX) && text.len() == GENERATED_TOKEN_LEN {
        return true;
    }
    let key: [u8; 32] = Sha256::digest(text.as_bytes()).into();
    app.access().tokens.get(&key).is_some()
}

fn bearer(header: &str) -> Option<&str> {
    let (scheme, token) = header.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// Finds the project of this name and the caller's membership; 404 if there is none.
pub async fn project_scope(app: &App, caller: Caller, name: &str, path: Vec<String>) -> Result<ProjectScope> {
    let cache = app.access();
    let key = (caller.user.id, name.to_owned());
    if let Some((project, membership)) = cache.scopes.get(&key) {
        return Ok(ProjectScope { caller, project, membership, path, idempotency_key: None });
    }
    let generation = cache.generation();
    let found = projects::find(app.db(), name, caller.user.id).await?;
    let Some((project, membership)) = found else {
        return Err(Error::Unknown { msg: "Project not found" });
    };
    let project = Arc::new(project);
    let known = (Arc::clone(&project), membership.clone());
    cache.scopes.put(key, known, CACHE_TTL, || cache.generation() == generation);
    Ok(ProjectScope { caller, project, membership, path, idempotency_key: None })
}

/// Cache of recent results about tokens and members.
#[derive(Debug, Default)]
pub struct AccessCache {
    tokens: TtlCache<[u8; 32], Caller>,
    scopes: TtlCache<(UserId, String), (Arc<Project>, Option<Membership>)>,
    /// Tokens that services received, and whether they are from this server.
    ours: TtlCache<[u8; 32], bool>,
    /// Tokens whose use is not yet recorded.
    used: Mutex<HashSet<Uuid>>,
    /// Sessions whose use is not yet recorded, with the addresses of the requests.
    seen_sessions: Mutex<HashMap<Uuid, IpAddr>>,
    /// Incremented with every change of users, tokens and members. A result read before a change is not cached after
    /// it.
    generation: AtomicU64,
}

impl AccessCache {
    fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Drops all entries after a change.
    pub fn forget(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.tokens.clear();
        self.scopes.clear();
        self.ours.clear();
    }

    /// Records which tokens were used, all at once. Called now and then, and at the end.
    pub async fn write_uses(&self, app: &App) -> Result<(), DbError> {
        let used: Vec<Uuid> = self.used.lock().drain().collect();
        if !used.is_empty() {
            tokens::mark_used(app.db(), &used).await?;
        }
        let seen: Vec<_> = self.seen_sessions.lock().drain().collect();
        if !seen.is_empty() {
            let seen = seen.into_iter().map(|(id, address)| (id, address.to_string())).collect();
            sessions::mark_seen(app.db(), seen).await?;
        }
        Ok(())
    }
}

/// A map whose entries expire after a short time.
#[derive(Debug)]
struct TtlCache<K, V>(Mutex<HashMap<K, (Instant, V)>>);

impl<K, V> Default for TtlCache<K, V> {
    fn default() -> Self {
        Self(Mutex::new(HashMap::new()))
    }
}

impl<K: Eq + Hash, V: Clone> TtlCache<K, V> {
    fn get(&self, key: &K) -> Option<V> {
        let now = Instant::now();
        self.0.lock().get(key).filter(|(until, _)| *until > now).map(|(_, value)| value.clone())
    }

    /// Stores the value if `still` holds while the map is locked and cannot be cleared.
    fn put(&self, key: K, value: V, life: Duration, still: impl FnOnce() -> bool) {
        let mut map = self.0.lock();
        if !still() {
            return;
        }
        if map.len() >= ENTRIES_MAX {
            map.clear();
        }
        map.insert(key, (Instant::now() + life, value));
    }

    fn clear(&self) {
        self.0.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{AccessCache, Token, TtlCache, bearer};

    #[test]
    fn generated_tokens_are_long_prefixed_and_unique() {
        let (a, b) = (Token::draw().unwrap(), Token::draw().unwrap());
        assert!(a.text().starts_with("wl_") && a.text().len() == super::GENERATED_TOKEN_LEN);
        assert_ne!(a.text(), b.text());
        assert_eq!(a.hash().len(), 64);
        assert_eq!(format!("{a:?}"), "Token(…)");
        assert_eq!(Token::chosen("short").shown(), "");
    }

    #[test]
    fn only_bearer_tokens_are_read() {
        assert_eq!(bearer("Bearer abc"), Some("abc"));
        assert_eq!(bearer("bearer  abc "), Some("abc"));
        assert_eq!(bearer("Basic abc"), None);
        assert_eq!(bearer("Bearer "), None);
        assert_eq!(bearer("Bearer"), None);
    }

    #[tokio::test(start_paused = true)]
    async fn cached_entries_expire_after_their_ttl() {
        let map = TtlCache::default();
        map.put(1, "a", Duration::from_secs(1), || true);
        assert_eq!(map.get(&1), Some("a"));
        tokio::time::advance(Duration::from_millis(1001)).await;
        assert_eq!(map.get(&1), None);
    }

    #[tokio::test]
    async fn a_value_read_before_a_change_is_not_cached_after_it() {
        let cache = AccessCache::default();
        let before = cache.generation();
        cache.forget();
        let map = TtlCache::default();
        map.put(1, "stale", Duration::from_secs(1), || cache.generation() == before);
        assert_eq!(map.get(&1), None);
    }
}
