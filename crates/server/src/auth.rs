//! Who calls, and what they may do.
//!
//! A token is 256 random bits behind a prefix that scanners recognise. Only its SHA-256 is stored: a
//! token is looked up by its hash and the hash is compared in constant time. Answers are remembered for
//! at most a second, and forgotten at once when this process changes users, tokens or members.

use std::{
    collections::{HashMap, HashSet},
    hash::Hash,
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
use windlass_api::{Access, projects::ProjectRole};
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
const LIFE: Duration = Duration::from_secs(1);
/// Entries of each kind. When full, all are forgotten: they live for a second anyway.
const ENTRIES_MAX: usize = 10_000;
const PREFIX: &str = "wl_";
/// The prefix, and 256 bits in base64.
const DRAWN_BYTES: usize = 46;
/// How much of a token is shown in lists.
const SHOWN: usize = 8;

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
        if self.0.len() >= 4 * SHOWN { self.0.get(..SHOWN).unwrap_or_default() } else { "" }
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
}

impl Caller {
    /// The levels that need no project. Where the body decides, its handler goes on to ask.
    pub fn must(&self, access: Access) -> Result<()> {
        match access {
            Access::Open | Access::Token | Access::SelfOrAdmin => Ok(()),
            Access::GlobalAdmin if self.user.admin => Ok(()),
            Access::GlobalAdmin
            | Access::ProjectPublic
            | Access::ProjectUser
            | Access::ProjectSelfOrManager
            | Access::ProjectManager
            | Access::ProjectAdmin
            | Access::Gateway => Err(Error::denied()),
        }
    }

    /// The user of this name themself, or a global admin.
    pub fn must_be(&self, name: &str) -> Result<()> {
        if self.user.admin || self.user.name == name { Ok(()) } else { Err(Error::denied()) }
    }
}

/// A caller inside the project that the path names.
#[derive(Clone, Debug)]
pub struct Scope {
    pub caller: Caller,
    pub project: Arc<Project>,
    pub membership: Option<Membership>,
    /// Values of the path after the project's name.
    pub path: Vec<String>,
    /// What the client calls this request, so that a repeat of it has no second effect.
    pub idempotency_key: Option<String>,
}

impl Scope {
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

    pub fn must(&self, access: Access) -> Result<()> {
        let role = self.role();
        let passes = match access {
            Access::Open | Access::Token | Access::SelfOrAdmin | Access::GlobalAdmin | Access::Gateway => {
                false
            }
            Access::ProjectPublic => role.is_some() || self.project.is_public,
            // Joining and leaving are for people who are no managers: the handler reads the body.
            Access::ProjectSelfOrManager => role.is_some() || self.project.is_public,
            Access::ProjectUser => role.is_some(),
            Access::ProjectManager => role >= Some(ProjectRole::Manager),
            Access::ProjectAdmin => role >= Some(ProjectRole::Admin),
        };
        if passes { Ok(()) } else { Err(Error::denied()) }
    }

    pub fn may_manage_ssh_fleets(&self) -> bool {
        self.caller.user.admin || self.membership.as_ref().is_some_and(|member| member.can_manage_ssh_fleets)
    }

    pub fn may_manage_secrets(&self) -> bool {
        self.caller.user.admin || self.membership.as_ref().is_some_and(|member| member.can_manage_secrets)
    }
}

/// Reads `Bearer TOKEN` and finds its user.
pub async fn caller(app: &App, authorization: Option<&str>) -> Result<Caller> {
    let denied = Error::Denied { msg: "Invalid token" };
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
    let caller = Caller { user: Arc::new(valid.user), token: Arc::new(token) };
    let expires = valid.expires_in_us.and_then(|us| u64::try_from(us).ok()).map(Duration::from_micros);
    let life = expires.map_or(LIFE, |left| left.min(LIFE));
    cache.tokens.put(key, caller.clone(), life, || cache.generation() == generation);
    newcomers::mark_known();
    Ok(caller)
}

/// Reads `Bearer TOKEN` and finds the gateway whose processes show it.
pub async fn gateway(app: &App, authorization: Option<&str>) -> Result<GatewayId> {
    let denied = || Error::Denied { msg: "Invalid token" };
    let text = authorization.and_then(bearer).ok_or_else(denied)?;
    let hash = Token::chosen(text).hash();
    let found = gateways::find_by_token(app.db(), &hash).await?;
    found
        .filter(|(_, held)| bool::from(held.as_bytes().ct_eq(hash.as_bytes())))
        .map(|(id, _)| id)
        .inspect(|_| newcomers::mark_known())
        .ok_or_else(denied)
}

/// Whether the token is none that somebody chose, or was found to be good within the last second.
pub fn is_above_guessing(app: &App, authorization: Option<&str>) -> bool {
    let Some(text) = authorization.and_then(bearer) else { return false };
    if text.starts_with(PREFIX) && text.len() == DRAWN_BYTES {
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
pub async fn scope(app: &App, caller: Caller, name: &str, path: Vec<String>) -> Result<Scope> {
    let cache = app.access();
    let key = (caller.user.id, name.to_owned());
    if let Some((project, membership)) = cache.scopes.get(&key) {
        return Ok(Scope { caller, project, membership, path, idempotency_key: None });
    }
    let generation = cache.generation();
    let found = projects::find(app.db(), name, caller.user.id).await?;
    let Some((project, membership)) = found else {
        return Err(Error::Unknown { msg: "Project not found" });
    };
    let project = Arc::new(project);
    let known = (Arc::clone(&project), membership.clone());
    cache.scopes.put(key, known, LIFE, || cache.generation() == generation);
    Ok(Scope { caller, project, membership, path, idempotency_key: None })
}

/// What was found out lately about tokens and members.
#[derive(Debug, Default)]
pub struct AccessCache {
    tokens: Brief<[u8; 32], Caller>,
    scopes: Brief<(UserId, String), (Arc<Project>, Option<Membership>)>,
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
    }

    /// Writes down which tokens were used, all at once. Called now and then, and at the end.
    pub async fn write_uses(&self, app: &App) -> Result<(), DbError> {
        let used: Vec<Uuid> = self.used.lock().drain().collect();
        if used.is_empty() { Ok(()) } else { tokens::used(app.db(), &used).await }
    }
}

/// A map whose entries live for a moment.
#[derive(Debug)]
struct Brief<K, V>(Mutex<HashMap<K, (Instant, V)>>);

impl<K, V> Default for Brief<K, V> {
    fn default() -> Self {
        Self(Mutex::new(HashMap::new()))
    }
}

impl<K: Eq + Hash, V: Clone> Brief<K, V> {
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

    use super::{AccessCache, Brief, Token, bearer};

    #[test]
    fn tokens_are_long_recognisable_and_never_the_same() {
        let (a, b) = (Token::draw().unwrap(), Token::draw().unwrap());
        assert!(a.text().starts_with("wl_") && a.text().len() == super::DRAWN_BYTES);
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
        let map = Brief::default();
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
        let map = Brief::default();
        map.put(1, "stale", Duration::from_secs(1), || cache.generation() == before);
        assert_eq!(map.get(&1), None);
    }
}
