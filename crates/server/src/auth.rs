//! Who calls, and what they may do.
//!
//! A token is 256 random bits behind a prefix that scanners recognise. Only its SHA-256 is stored: a
//! token is looked up by its hash and the hash is compared in constant time. Answers are remembered for
//! at most a second, and forgotten at once when this process changes users, tokens or members.

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
use windlass_model::id::{GatewayId, UserId};

use crate::{
    app::App,
    db::{
        DbError, gateways,
        projects::{self, Membership, Project},
        tokens,
        users::User,
    },
    error::{Error, Result},
    newcomers,
};

/// How long another replica may go on believing a token that was revoked here.
const CACHE_TTL: Duration = Duration::from_secs(1);
/// How long it is believed that a token is none of ours. It is about what services are shown, not about who may do what.
const SERVER_TOKEN_TTL: Duration = Duration::from_secs(10);
/// Entries of each kind. When full, all are forgotten: they live for a second anyway.
const ENTRIES_MAX: usize = 10_000;
const PREFIX: &str = "wl_";
/// The prefix, and 256 bits in base64.
const GENERATED_TOKEN_LEN: usize = 46;
/// How much of a token is shown in lists.
const SHOWN_PREFIX_LEN: usize = 8;

/// A token in the clear: shown once, never stored.
pub struct Token(String);

impl Token {
    pub fn draw() -> Result<Self, getrandom::Error> {
        let mut bits = [0_u8; 32];
        getrandom::fill(&mut bits)?;
        Ok(Self(format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bits))))
    }

    /// One that the operator chose.
    pub fn chosen(text: &str) -> Self {
        Self(text.to_owned())
    }

    pub fn text(&self) -> &str {
        &self.0
    }

    pub fn hash(&self) -> String {
        hex::encode(Sha256::digest(self.0.as_bytes()))
    }

    /// The part that may be shown. A short chosen token shows nothing of itself.
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

/// A user who proved it.
#[derive(Clone, Debug)]
pub struct Caller {
    pub user: Arc<User>,
    /// What was presented, so that its owner can be shown it again.
    pub token: Arc<Token>,
    /// What it is good for.
    pub scope: TokenScope,
}

impl Caller {
    /// Whether the token that was shown is good for an operation, whoever's it is.
    pub fn require_operation(&self, operation: &str) -> Result<()> {
        if self.scope.allows(operation) { Ok(()) } else { Err(out_of_scope()) }
    }

    /// Whether it opens services.
    pub fn require_services(&self) -> Result<()> {
        if self.scope.opens_services() { Ok(()) } else { Err(out_of_scope()) }
    }

    /// The levels that need no project. Where the body decides, its handler goes on to ask.
    pub fn must(&self, access: Access) -> Result<()> {
        let role = if self.user.admin { CallerRole::GlobalAdmin } else { CallerRole::Outsider };
        let passes = !access.in_project() && access.admits(role, Ownership::Own);
        if passes { Ok(()) } else { Err(Error::denied()) }
    }

    /// The user of this name themself, or a global admin.
    pub fn require_user(&self, name: &str) -> Result<()> {
        if self.user.admin || self.user.name == name { Ok(()) } else { Err(Error::denied()) }
    }
}

fn out_of_scope() -> Error {
    Error::Denied { msg: "Access denied: the token was made for less (see its scope)".into() }
}

/// As the column has it. A word that nobody knows is good for nothing of the API.
fn parse_scope(word: &str) -> TokenScope {
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
    /// What the client calls this request, so that a repeat of it has no second effect.
    pub idempotency_key: Option<String>,
}

impl ProjectScope {
    /// What the caller is here: a global admin is an admin everywhere.
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

    /// The role as the operation table has it.
    pub fn caller_role(&self) -> CallerRole {
        match self.role() {
            _ if self.caller.user.admin => CallerRole::GlobalAdmin,
            Some(ProjectRole::Admin) => CallerRole::ProjectAdmin,
            Some(ProjectRole::Manager) => CallerRole::Manager,
            Some(ProjectRole::User) => CallerRole::User,
            None => CallerRole::Outsider,
        }
    }

    /// Whether the caller may call an operation with this access at all. Where the owner of the object matters, the
    /// handler goes on with [`Self::require_ownership`].
    pub fn must(&self, access: Access) -> Result<()> {
        // Public projects are seen by everybody, and joined and left by those who are no managers.
        let is_open = matches!(access, Access::ProjectPublic | Access::ProjectSelfOrManager);
        let passes = access.in_project()
            && (access.admits(self.caller_role(), Ownership::Own) || (is_open && self.project.is_public));
        if passes { Ok(()) } else { Err(Error::denied()) }
    }

    /// Refuses an operation on an object of another user, unless its access admits the caller to those too.
    /// `what` names the object; `None` is an object that the server made.
    pub fn require_ownership<O: Operation>(&self, owner: Option<UserId>, what: &str) -> Result<()> {
        let is_own = owner == Some(self.caller.user.id);
        let object = if is_own { Ownership::Own } else { Ownership::Foreign };
        if O::ACCESS.admits(self.caller_role(), object) {
            return Ok(());
        }
        let whose = if owner.is_some() { "belongs to another user" } else { "was made by the server" };
        Err(Error::denied_with(format!(
            "{what} {whose}; its creator, managers and admins of the project and global admins may do this"
        )))
    }

    pub fn can_manage_ssh_fleets(&self) -> bool {
        self.caller.user.admin || self.membership.as_ref().is_some_and(|member| member.can_manage_ssh_fleets)
    }

    pub fn can_manage_secrets(&self) -> bool {
        self.caller.user.admin || self.membership.as_ref().is_some_and(|member| member.can_manage_secrets)
    }
}

/// Reads `Bearer TOKEN` and finds its user.
pub async fn caller(app: &App, authorization: Option<&str>) -> Result<Caller> {
    let denied = Error::Denied { msg: "Invalid token".into() };
    let Some(text) = authorization.and_then(bearer) else { return Err(denied) };
    let cache = app.access();
    let key: [u8; 32] = Sha256::digest(text.as_bytes()).into();
    if let Some(caller) = cache.tokens.get(&key) {
        newcomers::mark_known();
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
    let caller = Caller { user: Arc::new(valid.user), token: Arc::new(token), scope };
    let expires = valid.expires_in_us.and_then(|us| u64::try_from(us).ok()).map(Duration::from_micros);
    let life = expires.map_or(CACHE_TTL, |left| left.min(CACHE_TTL));
    cache.tokens.put(key, caller.clone(), life, || cache.generation() == generation);
    newcomers::mark_known();
    Ok(caller)
}

/// Reads `Bearer TOKEN` and finds the gateway whose processes show it.
pub async fn authenticate_gateway(app: &App, authorization: Option<&str>) -> Result<GatewayId> {
    let denied = || Error::Denied { msg: "Invalid token".into() };
    let text = authorization.and_then(bearer).ok_or_else(denied)?;
    let hash = Token::chosen(text).hash();
    let found = gateways::find_by_token(app.db(), &hash).await?;
    found
        .filter(|(_, held)| bool::from(held.as_bytes().ct_eq(hash.as_bytes())))
        .map(|(id, _)| id)
        .inspect(|_| newcomers::mark_known())
        .ok_or_else(denied)
}

/// Whether a token is one of ours, of whatever kind and whoever's, alive or not. Whoever tries many that are not is
/// refused.
pub async fn is_server_token(app: &App, text: &str, peer: IpAddr) -> Result<bool> {
    let cache = app.access();
    let key: [u8; 32] = Sha256::digest(text.as_bytes()).into();
    if let Some(known) = cache.ours.get(&key) {
        return Ok(known);
    }
    // What is so long was drawn, by us or by others, and cannot be guessed.
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

/// Whether the token is none that somebody chose, or was found to be good within the last second.
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

/// The project of this name and what the caller is in it; 404 when there is none.
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

/// What was found out lately about tokens and members.
#[derive(Debug, Default)]
pub struct AccessCache {
    tokens: TtlCache<[u8; 32], Caller>,
    scopes: TtlCache<(UserId, String), (Arc<Project>, Option<Membership>)>,
    /// Tokens that services were sent, and whether they are ours.
    ours: TtlCache<[u8; 32], bool>,
    /// Tokens whose use is yet to be written down.
    used: Mutex<HashSet<Uuid>>,
    /// Grows with every change of users, tokens and members. An answer read before a change is not
    /// remembered after it.
    generation: AtomicU64,
}

impl AccessCache {
    fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Something changed: nothing known before counts any more.
    pub fn forget(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.tokens.clear();
        self.scopes.clear();
        self.ours.clear();
    }

    /// Writes down which tokens were used, all at once. Called now and then, and at the end.
    pub async fn write_uses(&self, app: &App) -> Result<(), DbError> {
        let used: Vec<Uuid> = self.used.lock().drain().collect();
        if used.is_empty() { Ok(()) } else { tokens::mark_used(app.db(), &used).await }
    }
}

/// A map whose entries live for a moment.
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

    /// Keeps the value if `still` holds once nobody can clear the map in between.
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
    fn tokens_are_long_recognisable_and_never_the_same() {
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
    async fn what_was_found_out_is_forgotten_after_a_second() {
        let map = TtlCache::default();
        map.put(1, "a", Duration::from_secs(1), || true);
        assert_eq!(map.get(&1), Some("a"));
        tokio::time::advance(Duration::from_millis(1001)).await;
        assert_eq!(map.get(&1), None);
    }

    #[tokio::test]
    async fn an_answer_read_before_a_change_is_not_remembered_after_it() {
        let cache = AccessCache::default();
        let before = cache.generation();
        cache.forget();
        let map = TtlCache::default();
        map.put(1, "stale", Duration::from_secs(1), || cache.generation() == before);
        assert_eq!(map.get(&1), None);
    }
}
