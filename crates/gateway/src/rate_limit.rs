//! Rate limits: one leaky bucket per key, stored as one number (generic cell rate algorithm).

use std::{
    collections::HashMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use hyper::HeaderMap;
use parking_lot::Mutex;

use crate::route::{LimitKey, RouteLimit};

/// Maximum number of keys of one limit. When full, keys with an empty bucket are removed, then all.
const KEYS_MAX: usize = 50_000;
/// Maximum length of a key. Longer keys are truncated, so that a header cannot fill the memory.
const KEY_BYTES_MAX: usize = 256;

/// Limits of one service.
#[derive(Debug)]
pub(crate) struct RateLimits {
    started: Instant,
    rules: Vec<LimitRule>,
}

#[derive(Debug)]
struct LimitRule {
    limit: RouteLimit,
    /// Cost of one request, in nanoseconds.
    cost: u64,
    /// Maximum lead of a bucket over the clock, in nanoseconds.
    slack: u64,
    /// Time at which the bucket of a key is empty again, in nanoseconds since the start.
    buckets: Mutex<HashMap<BucketKey, u64>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum BucketKey {
    Address(IpAddr),
    Value(Box<[u8]>),
}

impl RateLimits {
    pub(crate) fn new(limits: &[RouteLimit], now: Instant) -> Self {
        let mut rules: Vec<LimitRule> = limits
            .iter()
            .map(|limit| {
                // From one nanosecond to one minute: the range that the configuration allows.
                let cost = (1e9 / limit.rps).clamp(1.0, 60e9) as u64;
                let slack = cost.saturating_mul(limit.burst);
                LimitRule { limit: limit.clone(), cost, slack, buckets: Mutex::new(HashMap::new()) }
            })
            .collect();
        rules.sort_by_key(|rule| std::cmp::Reverse(rule.limit.prefix.len()));
        Self { started: now, rules }
    }

    /// Consumes one request from the budget, or returns the time to wait for one.
    pub(crate) fn acquire(
        &self,
        path: &str,
        headers: &HeaderMap,
        peer: IpAddr,
        now: Instant,
    ) -> Result<(), Duration> {
        if self.rules.is_empty() {
            return Ok(());
        }
        let path = normalize_path(path);
        let Some(rule) = self.rules.iter().find(|rule| path.starts_with(&rule.limit.prefix)) else {
            return Ok(());
        };
        let key = match &rule.limit.key {
            LimitKey::IpAddress => BucketKey::Address(peer),
            LimitKey::Header { header } => match headers.get(header.as_str()) {
                Some(value) => {
                    let bytes = value.as_bytes();
                    BucketKey::Value(bytes.get(..KEY_BYTES_MAX).unwrap_or(bytes).into())
                }
                None => BucketKey::Address(peer),
            },
        };
        let now = u64::try_from(now.saturating_duration_since(self.started).as_nanos()).unwrap_or(u64::MAX);
        rule.acquire(key, now)
    }
}

impl LimitRule {
    fn acquire(&self, key: BucketKey, now: u64) -> Result<(), Duration> {
        let mut buckets = self.buckets.lock();
        if buckets.len() >= KEYS_MAX && !buckets.contains_key(&key) {
            buckets.retain(|_, empty_at| *empty_at > now);
            if buckets.len() >= KEYS_MAX {
                buckets.clear();
            }
        }
        let empty_at = buckets.entry(key).or_insert(now);
        let ahead = (*empty_at).saturating_sub(now);
        if ahead > self.slack {
            return Err(Duration::from_nanos(ahead - self.slack));
        }
        *empty_at = now.max(*empty_at).saturating_add(self.cost);
        Ok(())
    }
}

/// Normalises a path as a replica will interpret it: `/%61pi`, `//api` and `/x/../api` are all `/api`. Otherwise a
/// different spelling could bypass a limit.
fn normalize_path(path: &str) -> std::borrow::Cow<'_, str> {
    if !path.contains('%') && !path.contains("//") && !path.contains("/.") {
        return path.into();
    }
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let [first, after @ ..] = rest {
        let decoded = match (first, after) {
            (b'%', [high, low, ..]) => hex(*high).zip(hex(*low)).map(|(high, low)| high << 4 | low),
            _ => None,
        };
        bytes.push(decoded.unwrap_or(*first));
        rest = if decoded.is_some() { after.get(2..).unwrap_or_default() } else { after };
    }
    let text = String::from_utf8_lossy(&bytes);
    let mut kept: Vec<&str> = Vec::new();
    for part in text.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(kept.pop()),
            part => kept.push(part),
        }
    }
    let mut plain = String::with_capacity(text.len());
    for part in kept {
        plain.push('/');
        plain.push_str(part);
    }
    if plain.is_empty() || text.ends_with('/') {
        plain.push('/');
    }
    plain.into()
}

const fn hex(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7));

    fn limit(prefix: &str, rps: f64, burst: u64) -> RouteLimit {
        RouteLimit { prefix: prefix.to_owned(), key: LimitKey::IpAddress, rps, burst }
    }

    #[test]
    fn rate_limit_allows_the_burst_on_top_of_the_rate() {
        let start = Instant::now();
        let limits = RateLimits::new(&[limit("/", 2.0, 3)], start);
        let take = |ms: u64| limits.acquire("/x", &HeaderMap::new(), PEER, start + Duration::from_millis(ms));
        for _ in 0..4 {
            assert_eq!(take(0), Ok(()));
        }
        assert_eq!(take(0), Err(Duration::from_millis(500)));
        assert_eq!(take(500), Ok(()));
        assert!(take(600).is_err());
        assert_eq!((0..9).filter(|_| take(60_000).is_ok()).count(), 4);
    }

    #[test]
    fn the_longest_prefix_sets_the_rate_limit_and_other_paths_are_unlimited() {
        let start = Instant::now();
        let limits = RateLimits::new(&[limit("/a", 1.0, 9), limit("/a/b", 1.0, 0)], start);
        let take = |path: &str| limits.acquire(path, &HeaderMap::new(), PEER, start).is_ok();
        assert!(take("/a/b") && !take("/a/b/c") && take("/a/x"));
        assert!((0..100).all(|_| take("/free")));
    }

    #[test]
    fn equivalent_spellings_of_a_path_share_its_rate_limit() {
        for path in ["/api/x", "//api", "/%61pi", "/x/../api", "/./api/", "/%2e/%2F/api"] {
            let start = Instant::now();
            let limits = RateLimits::new(&[limit("/api", 1.0, 0)], start);
            assert!(limits.acquire("/api", &HeaderMap::new(), PEER, start).is_ok());
            assert!(limits.acquire(path, &HeaderMap::new(), PEER, start).is_err(), "{path}");
        }
    }

    #[test]
    fn rate_limit_by_header_also_limits_requests_without_the_header() {
        let start = Instant::now();
        let key = LimitKey::Header { header: "x-user".to_owned() };
        let limits = RateLimits::new(&[RouteLimit { prefix: "/".into(), key, rps: 1.0, burst: 0 }], start);
        let take = |user: Option<&str>| {
            let mut headers = HeaderMap::new();
            user.map(|user| headers.insert("x-user", user.parse().unwrap()));
            limits.acquire("/", &headers, PEER, start).is_ok()
        };
        assert!(take(Some("a")) && !take(Some("a")) && take(Some("b")));
        assert!(take(None) && !take(None));
    }
}
