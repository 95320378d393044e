//! Access control: the hook that queries the server, and a bounded cache of its responses.

use std::{collections::HashMap, net::IpAddr, sync::Arc, task::Context, time::Duration};

use futures_util::future::BoxFuture;
use hyper::{
    HeaderMap,
    header::{self, HeaderValue},
};
use parking_lot::{Mutex, RwLock};
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, timeout};

/// Prefixes of windlass's cookies. They are never passed to a service and never accepted from one.
pub const COOKIE_PREFIXES: [&str; 2] = ["__Host-windlass-", "windlass-insecure-"];
/// Cookie of a browser session.
pub const SESSION_COOKIE: &str = "__Host-windlass-session";
/// Header with which a replica learns the identity of the caller.
pub const IDENTITY_HEADER: &str = "x-windlass-identity";
/// Prefixes of the tokens of users and gateways, and of the queue.
const TOKEN_PREFIXES: [&[u8]; 2] = [b"wl_", b"v2/wlass-"];
const TOKEN_MAX: usize = 4096;

/// Decision of the gatekeeper.
#[derive(Clone, Debug)]
pub enum Verdict {
    Allow {
        /// Signed identity; passed on unchanged.
        identity: Option<HeaderValue>,
    },
    /// The token is unknown, or its user is not a member of the project.
    Deny,
    /// The server could not be queried. The request is refused, and nothing is cached.
    Unknown,
}

/// Decides whether a token permits requests to the services of a project.
pub trait Gatekeeper: Send + Sync + 'static {
    /// `peer` is the address of the caller, by which token guessing is detected.
    fn check<'a>(&'a self, token: &'a str, project: &'a str, peer: IpAddr) -> BoxFuture<'a, Verdict>;

    /// Returns whether a token is one of the server's, whatever it permits: such a token must not be passed to a
    /// service. `None` if the server could not be queried.
    fn is_known<'a>(&'a self, token: &'a str, project: &'a str, peer: IpAddr) -> BoxFuture<'a, Option<bool>>;

    /// Completes when a token that permitted access to the project no longer does, with a delay of a few seconds at
    /// most.
    fn wait_until_revoked(&self, token: &str, project: &str) -> BoxFuture<'static, ()>;
}

/// Access rights that a long-lived response depends on.
pub(crate) struct AccessGrant {
    gatekeeper: Arc<dyn Gatekeeper>,
    token: String,
    project: String,
    /// Created at the first wait, because most responses complete earlier. Never locked: the mutex only makes a request
    /// that contains it `Sync`.
    revocation: Mutex<Option<BoxFuture<'static, ()>>>,
}

impl AccessGrant {
    pub(crate) fn new(gatekeeper: &Arc<dyn Gatekeeper>, token: &str, project: &str) -> Self {
        Self {
            gatekeeper: Arc::clone(gatekeeper),
            token: token.to_owned(),
            project: project.to_owned(),
            revocation: Mutex::new(None),
        }
    }

    /// Returns whether the rights have been revoked; wakes the task when they are.
    pub(crate) fn is_revoked(&mut self, cx: &mut Context<'_>) -> bool {
        let lost = self.revocation.get_mut();
        let lost = lost.get_or_insert_with(|| self.gatekeeper.wait_until_revoked(&self.token, &self.project));
        lost.as_mut().poll(cx).is_ready()
    }

    pub(crate) fn is_watched(&mut self) -> bool {
        self.revocation.get_mut().is_some()
    }
}

/// Lifetimes of cached decisions.
#[derive(Clone, Copy, Debug)]
pub struct TokenCacheConfig {
    /// Time for which an accepted token is used without another check: the maximum for which a revoked one works.
    pub fresh_for: Duration,
    /// Time for which an accepted token is used if it cannot be checked again.
    pub allow_ttl: Duration,
    pub deny_ttl: Duration,
    pub entries_max: usize,
}

/// Gatekeeper with a cache. Stores hashes of tokens only.
pub struct CachingGatekeeper<G> {
    inner: G,
    config: TokenCacheConfig,
    verdicts: RwLock<HashMap<[u8; 32], CachedVerdict>>,
}

struct CachedVerdict {
    verdict: Verdict,
    /// Time of the next check.
    fresh_until: Instant,
    until: Instant,
}

/// Time for which a request waits for another check of a token that was accepted before.
const RECHECK_TIMEOUT: Duration = Duration::from_millis(500);

impl<G> CachingGatekeeper<G> {
    pub fn new(inner: G, config: TokenCacheConfig) -> Self {
        Self { inner, config, verdicts: RwLock::new(HashMap::new()) }
    }

    /// Clears the cache, after a revocation.
    pub fn clear(&self) {
        self.verdicts.write().clear();
    }

    fn store(&self, key: [u8; 32], verdict: &Verdict, now: Instant) {
        let life = match verdict {
            Verdict::Allow { .. } => self.config.allow_ttl,
            Verdict::Deny => self.config.deny_ttl,
            Verdict::Unknown => return,
        };
        let mut answers = self.verdicts.write();
        if answers.len() >= self.config.entries_max {
            answers.retain(|_, answer| answer.until > now);
            if answers.len() >= self.config.entries_max {
                answers.clear();
            }
        }
        let fresh_until = now + life.min(self.config.fresh_for);
        answers.insert(key, CachedVerdict { verdict: verdict.clone(), fresh_until, until: now + life });
    }

    /// Returns the verdict that is still valid, and whether it needs no other check.
    fn cached(&self, key: &[u8; 32], now: Instant) -> Option<(Verdict, bool)> {
        let verdicts = self.verdicts.read();
        let answer = verdicts.get(key).filter(|answer| answer.until > now)?;
        Some((answer.verdict.clone(), answer.fresh_until > now))
    }

    /// Uses the verdict for a while without another check, because the last one failed. It does not last longer.
    fn postpone_check(&self, key: &[u8; 32], now: Instant) {
        if let Some(answer) = self.verdicts.write().get_mut(key) {
            answer.fresh_until = now + self.config.fresh_for;
        }
    }
}

impl<G: Gatekeeper> Gatekeeper for CachingGatekeeper<G> {
    fn check<'a>(&'a self, token: &'a str, project: &'a str, peer: IpAddr) -> BoxFuture<'a, Verdict> {
        Box::pin(async move {
            let key: [u8; 32] =
                Sha256::new().chain_update(project).chain_update([0]).chain_update(token).finalize().into();
            // The lifetime starts before the query, so that a revocation during the query does not prolong it.
            let now = Instant::now();
            let verdict = match self.cached(&key, now) {
                Some((verdict, true)) => return verdict,
                Some((verdict, false)) => {
                    let checked = timeout(RECHECK_TIMEOUT, self.inner.check(token, project, peer)).await;
                    match checked.unwrap_or(Verdict::Unknown) {
                        Verdict::Unknown => {
                            self.postpone_check(&key, now);
                            return verdict;
                        }
                        checked @ (Verdict::Allow { .. } | Verdict::Deny) => checked,
                    }
                }
                None => self.inner.check(token, project, peer).await,
            };
            self.store(key, &verdict, now);
            verdict
        })
    }

    fn is_known<'a>(&'a self, token: &'a str, project: &'a str, peer: IpAddr) -> BoxFuture<'a, Option<bool>> {
        Box::pin(async move {
            // Project names contain no such byte, so the two kinds of entries cannot collide.
            let key: [u8; 32] =
                Sha256::new().chain_update(project).chain_update([1]).chain_update(token).finalize().into();
            let now = Instant::now();
            if let Some(answer) = self.verdicts.read().get(&key)
                && answer.until > now
            {
                return Some(matches!(answer.verdict, Verdict::Allow { .. }));
            }
            let is_known = self.inner.is_known(token, project, peer).await?;
            let verdict = if is_known { Verdict::Allow { identity: None } } else { Verdict::Deny };
            self.store(key, &verdict, now);
            Some(is_known)
        })
    }

    fn wait_until_revoked(&self, token: &str, project: &str) -> BoxFuture<'static, ()> {
        self.inner.wait_until_revoked(token, project)
    }
}

/// Returns whether a cookie, or the value of `Set-Cookie`, is one of windlass.
pub(crate) fn is_our_cookie(cookie: &[u8]) -> bool {
    COOKIE_PREFIXES.iter().any(|prefix| {
        cookie.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix.as_bytes()))
    })
}

/// Returns the token of a request, and whether it is in `Authorization`.
pub(crate) fn find_token(headers: &HeaderMap) -> Option<(&str, bool)> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(bearer_token);
    if let Some(token) = bearer {
        return std::str::from_utf8(token)
            .ok()
            .filter(|token| token.len() <= TOKEN_MAX)
            .map(|token| (token, true));
    }
    headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(';'))
        .filter_map(|cookie| cookie.trim().split_once('='))
        .find(|(name, _)| *name == SESSION_COOKIE)
        .map(|(_, token)| (token, false))
        .filter(|(token, _)| token.len() <= TOKEN_MAX)
}

fn bearer_token(value: &HeaderValue) -> Option<&[u8]> {
    let (scheme, token) = value.as_bytes().split_at_checked(7)?;
    // The queue's clients send `OAuth2`, which has the same length.
    let is_known = scheme.eq_ignore_ascii_case(b"bearer ") || scheme.eq_ignore_ascii_case(b"oauth2 ");
    is_known.then(|| token.trim_ascii()).filter(|token| !token.is_empty())
}

/// Returns whether an `Authorization` header contains a token with a prefix of windlass.
pub(crate) fn is_windlass_token(value: &HeaderValue) -> bool {
    bearer_token(value).is_some_and(|token| TOKEN_PREFIXES.iter().any(|prefix| token.starts_with(prefix)))
}

/// Returns the tokens in `Authorization` without a prefix of windlass. They may still be tokens of the server: an
/// operator can choose any value.
pub(crate) fn unrecognized_tokens(headers: &HeaderMap) -> impl Iterator<Item = Option<&str>> {
    let values = headers.get_all(header::AUTHORIZATION).iter().filter(|value| !is_windlass_token(value));
    values
        .filter_map(bearer_token)
        .map(|token| std::str::from_utf8(token).ok().filter(|token| token.len() <= TOKEN_MAX))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    struct CountingGatekeeper(AtomicUsize);

    impl Gatekeeper for CountingGatekeeper {
        fn check<'a>(&'a self, token: &'a str, _project: &'a str, _peer: IpAddr) -> BoxFuture<'a, Verdict> {
            self.0.fetch_add(1, Ordering::Relaxed);
            let verdict = match token {
                "good" => Verdict::Allow { identity: None },
                "away" => Verdict::Unknown,
                _ => Verdict::Deny,
            };
            Box::pin(std::future::ready(verdict))
        }

        fn is_known<'a>(
            &'a self,
            token: &'a str,
            _project: &'a str,
            _peer: IpAddr,
        ) -> BoxFuture<'a, Option<bool>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Box::pin(std::future::ready((token != "away").then_some(token == "good")))
        }

        fn wait_until_revoked(&self, _token: &str, _project: &str) -> BoxFuture<'static, ()> {
            Box::pin(std::future::pending())
        }
    }

    fn cached(allow: Duration, entries_max: usize) -> CachingGatekeeper<CountingGatekeeper> {
        let trust = TokenCacheConfig {
            fresh_for: Duration::from_secs(3),
            allow_ttl: allow,
            deny_ttl: Duration::from_secs(60),
            entries_max,
        };
        CachingGatekeeper::new(CountingGatekeeper(AtomicUsize::new(0)), trust)
    }

    fn requested(gate: &CachingGatekeeper<CountingGatekeeper>) -> usize {
        gate.inner.0.load(Ordering::Relaxed)
    }

    #[tokio::test]
    async fn an_auth_verdict_is_cached_per_token_and_project() {
        let gate = cached(Duration::from_secs(60), 10);
        for (token, project, times) in
            [("good", "a", 1), ("good", "a", 1), ("good", "b", 2), ("bad", "a", 3), ("bad", "a", 3)]
        {
            let verdict = gate.check(token, project, HERE).await;
            assert_eq!(matches!(verdict, Verdict::Allow { .. }), token == "good");
            assert_eq!(requested(&gate), times);
        }
        gate.clear();
        gate.check("good", "a", HERE).await;
        assert_eq!(requested(&gate), 4);
        for (token, known, times) in [
            ("good", Some(true), 5),
            ("good", Some(true), 5),
            ("bad", Some(false), 6),
            ("bad", Some(false), 6),
        ] {
            assert_eq!((gate.is_known(token, "a", HERE).await, requested(&gate)), (known, times), "{token}");
        }
        assert_eq!(
            (gate.is_known("away", "a", HERE).await, gate.is_known("away", "a", HERE).await),
            (None, None)
        );
        assert_eq!(requested(&gate), 8, "silence is not remembered");
    }

    #[tokio::test]
    async fn a_cached_auth_verdict_expires_and_an_unknown_verdict_is_not_cached() {
        let gate = cached(Duration::ZERO, 10);
        gate.check("good", "a", HERE).await;
        gate.check("good", "a", HERE).await;
        assert_eq!(requested(&gate), 2);
        gate.check("away", "a", HERE).await;
        assert!(matches!(gate.check("away", "a", HERE).await, Verdict::Unknown));
        assert_eq!(requested(&gate), 4);
    }

    /// Its answer can be changed.
    struct ScriptedGatekeeper(parking_lot::Mutex<Verdict>);

    impl Gatekeeper for ScriptedGatekeeper {
        fn check<'a>(&'a self, _token: &'a str, _project: &'a str, _peer: IpAddr) -> BoxFuture<'a, Verdict> {
            Box::pin(std::future::ready(self.0.lock().clone()))
        }

        fn is_known<'a>(
            &'a self,
            _token: &'a str,
            _project: &'a str,
            _peer: IpAddr,
        ) -> BoxFuture<'a, Option<bool>> {
            Box::pin(std::future::ready(None))
        }

        fn wait_until_revoked(&self, _token: &str, _project: &str) -> BoxFuture<'static, ()> {
            Box::pin(std::future::pending())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_revoked_token_is_refused_at_its_next_check_and_kept_while_it_cannot_be_checked() {
        let secs = Duration::from_secs;
        let trust =
            TokenCacheConfig { fresh_for: secs(3), allow_ttl: secs(60), deny_ttl: secs(5), entries_max: 10 };
        let scripted = ScriptedGatekeeper(parking_lot::Mutex::new(Verdict::Allow { identity: None }));
        let gate = CachingGatekeeper::new(scripted, trust);
        let is_allowed = async || matches!(gate.check("x", "a", HERE).await, Verdict::Allow { .. });
        assert!(is_allowed().await);
        // The server does not respond: the token is accepted up to its limit, and no longer.
        *gate.inner.0.lock() = Verdict::Unknown;
        for _ in 0..14 {
            tokio::time::advance(secs(4)).await;
            assert!(is_allowed().await);
        }
        tokio::time::advance(secs(5)).await;
        assert!(matches!(gate.check("x", "a", HERE).await, Verdict::Unknown));
        // The server responds again, and revokes the token.
        *gate.inner.0.lock() = Verdict::Allow { identity: None };
        assert!(is_allowed().await);
        *gate.inner.0.lock() = Verdict::Deny;
        tokio::time::advance(secs(2)).await;
        assert!(is_allowed().await, "not checked yet");
        tokio::time::advance(secs(1)).await;
        assert!(!is_allowed().await);
    }

    #[tokio::test]
    async fn the_auth_cache_is_bounded() {
        let gate = cached(Duration::from_secs(60), 8);
        for n in 0..100 {
            gate.check(&n.to_string(), "a", HERE).await;
            assert!(gate.verdicts.read().len() <= 8);
        }
    }

    #[test]
    fn a_token_is_read_from_the_authorization_header_or_the_session_cookie() {
        let find = |name: &str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
            find_token(&headers).map(|(token, field)| (token.to_owned(), field))
        };
        assert_eq!(find("authorization", "Bearer x"), Some(("x".to_owned(), true)));
        assert_eq!(find("authorization", "bearer  x "), Some(("x".to_owned(), true)));
        assert_eq!(find("authorization", "OAuth2 x"), Some(("x".to_owned(), true)));
        assert_eq!(find("authorization", "Basic x"), None);
        assert_eq!(find("authorization", "Bearer "), None);
        assert_eq!(find("cookie", "a=b; __Host-windlass-session=y"), Some(("y".to_owned(), false)));
        assert_eq!(find("cookie", "x__Host-windlass-session=y"), None);
    }
}
