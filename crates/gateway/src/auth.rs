//! Who may call: the hook that asks the server, and a bounded memory of its answers.

use std::{
    collections::HashMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use futures_util::future::BoxFuture;
use hyper::{
    HeaderMap,
    header::{self, HeaderValue},
};
use parking_lot::RwLock;
use sha2::{Digest as _, Sha256};

/// Cookies with this start are ours: never shown to a service, never set by one.
pub const COOKIE_PREFIX: &str = "__Host-windlass-";
/// The cookie of a browser's session.
pub const COOKIE: &str = "__Host-windlass-session";
/// Where a replica finds out who calls.
pub const IDENTITY: &str = "x-windlass-identity";
const TOKEN_PREFIX: &[u8] = b"wl_";
const TOKEN_MAX: usize = 4096;

/// What the gatekeeper says.
#[derive(Clone, Debug)]
pub enum Verdict {
    Allow {
        /// Signed by whoever knows the key; passed on as it is.
        identity: Option<HeaderValue>,
    },
    /// The token is unknown, or its user is no member of the project.
    Deny,
    /// Nobody could be asked. The request is refused, and nothing is remembered.
    Unknown,
}

/// Decides whether a token opens the services of a project.
pub trait Gatekeeper: Send + Sync + 'static {
    /// `peer` is where the caller sits: who guesses tokens is known by it.
    fn check<'a>(&'a self, token: &'a str, project: &'a str, peer: IpAddr) -> BoxFuture<'a, Verdict>;
}

/// How long answers are believed.
#[derive(Clone, Copy, Debug)]
pub struct Trust {
    /// A revoked token works on for at most this long.
    pub allow: Duration,
    pub deny: Duration,
    pub entries_max: usize,
}

/// A gatekeeper with a memory. Tokens are not kept, only their hashes.
pub struct Cached<G> {
    inner: G,
    trust: Trust,
    answers: RwLock<HashMap<[u8; 32], Answer>>,
}

struct Answer {
    verdict: Verdict,
    until: Instant,
}

impl<G> Cached<G> {
    pub fn new(inner: G, trust: Trust) -> Self {
        Self { inner, trust, answers: RwLock::new(HashMap::new()) }
    }

    /// Forgets everything: something was revoked.
    pub fn forget(&self) {
        self.answers.write().clear();
    }

    fn remember(&self, key: [u8; 32], verdict: &Verdict, now: Instant) {
        let life = match verdict {
            Verdict::Allow { .. } => self.trust.allow,
            Verdict::Deny => self.trust.deny,
            Verdict::Unknown => return,
        };
        let mut answers = self.answers.write();
        if answers.len() >= self.trust.entries_max {
            answers.retain(|_, answer| answer.until > now);
            if answers.len() >= self.trust.entries_max {
                answers.clear();
            }
        }
        answers.insert(key, Answer { verdict: verdict.clone(), until: now + life });
    }
}

impl<G: Gatekeeper> Gatekeeper for Cached<G> {
    fn check<'a>(&'a self, token: &'a str, project: &'a str, peer: IpAddr) -> BoxFuture<'a, Verdict> {
        Box::pin(async move {
            let key: [u8; 32] =
                Sha256::new().chain_update(project).chain_update([0]).chain_update(token).finalize().into();
            // The life of an answer begins before the question: what was revoked meanwhile is not believed longer.
            let now = Instant::now();
            if let Some(answer) = self.answers.read().get(&key)
                && answer.until > now
            {
                return answer.verdict.clone();
            }
            let verdict = self.inner.check(token, project, peer).await;
            self.remember(key, &verdict, now);
            verdict
        })
    }
}

/// The token of a request, and whether it is in `Authorization`.
pub(crate) fn token(headers: &HeaderMap) -> Option<(&str, bool)> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(bearer);
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
        .find(|(name, _)| *name == COOKIE)
        .map(|(_, token)| (token, false))
        .filter(|(token, _)| token.len() <= TOKEN_MAX)
}

fn bearer(value: &HeaderValue) -> Option<&[u8]> {
    let (scheme, token) = value.as_bytes().split_at_checked(7)?;
    (scheme.eq_ignore_ascii_case(b"bearer ")).then(|| token.trim_ascii()).filter(|token| !token.is_empty())
}

/// Whether an `Authorization` carries a token of ours, wherever it was sent.
pub(crate) fn is_ours(value: &HeaderValue) -> bool {
    bearer(value).is_some_and(|token| token.starts_with(TOKEN_PREFIX))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    struct Counting(AtomicUsize);

    impl Gatekeeper for Counting {
        fn check<'a>(&'a self, token: &'a str, _project: &'a str, _peer: IpAddr) -> BoxFuture<'a, Verdict> {
            self.0.fetch_add(1, Ordering::Relaxed);
            let verdict = match token {
                "good" => Verdict::Allow { identity: None },
                "away" => Verdict::Unknown,
                _ => Verdict::Deny,
            };
            Box::pin(std::future::ready(verdict))
        }
    }

    fn cached(allow: Duration, entries_max: usize) -> Cached<Counting> {
        let trust = Trust { allow, deny: Duration::from_secs(60), entries_max };
        Cached::new(Counting(AtomicUsize::new(0)), trust)
    }

    fn asked(gate: &Cached<Counting>) -> usize {
        gate.inner.0.load(Ordering::Relaxed)
    }

    #[tokio::test]
    async fn an_answer_is_remembered_for_its_token_and_project_only() {
        let gate = cached(Duration::from_secs(60), 10);
        for (token, project, times) in
            [("good", "a", 1), ("good", "a", 1), ("good", "b", 2), ("bad", "a", 3), ("bad", "a", 3)]
        {
            let verdict = gate.check(token, project, HERE).await;
            assert_eq!(matches!(verdict, Verdict::Allow { .. }), token == "good");
            assert_eq!(asked(&gate), times);
        }
        gate.forget();
        gate.check("good", "a", HERE).await;
        assert_eq!(asked(&gate), 4);
    }

    #[tokio::test]
    async fn an_answer_dies_at_its_bound_and_silence_is_not_remembered() {
        let gate = cached(Duration::ZERO, 10);
        gate.check("good", "a", HERE).await;
        gate.check("good", "a", HERE).await;
        assert_eq!(asked(&gate), 2);
        gate.check("away", "a", HERE).await;
        assert!(matches!(gate.check("away", "a", HERE).await, Verdict::Unknown));
        assert_eq!(asked(&gate), 4);
    }

    #[tokio::test]
    async fn the_memory_is_bounded() {
        let gate = cached(Duration::from_secs(60), 8);
        for n in 0..100 {
            gate.check(&n.to_string(), "a", HERE).await;
            assert!(gate.answers.read().len() <= 8);
        }
    }

    #[test]
    fn a_token_is_found_in_a_field_or_a_cookie() {
        let find = |name: &str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
            token(&headers).map(|(token, field)| (token.to_owned(), field))
        };
        assert_eq!(find("authorization", "Bearer x"), Some(("x".to_owned(), true)));
        assert_eq!(find("authorization", "bearer  x "), Some(("x".to_owned(), true)));
        assert_eq!(find("authorization", "Basic x"), None);
        assert_eq!(find("authorization", "Bearer "), None);
        assert_eq!(find("cookie", "a=b; __Host-windlass-session=y"), Some(("y".to_owned(), false)));
        assert_eq!(find("cookie", "x__Host-windlass-session=y"), None);
    }
}
