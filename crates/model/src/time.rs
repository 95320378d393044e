//! Time as the database stores it: microseconds since 1970, UTC.

use std::{
    fmt,
    ops::{Add, Sub},
};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A point in time, by the database's clock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(pub i64);

/// A duration in microseconds; may be negative.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Span(pub i64);

impl Span {
    pub const ZERO: Self = Self(0);

    pub const fn millis(n: i64) -> Self {
        Self(n.saturating_mul(1_000))
    }
    pub const fn secs(n: i64) -> Self {
        Self(n.saturating_mul(1_000_000))
    }
    pub const fn mins(n: i64) -> Self {
        Self::secs(n.saturating_mul(60))
    }
    pub const fn hours(n: i64) -> Self {
        Self::mins(n.saturating_mul(60))
    }
    pub const fn days(n: i64) -> Self {
        Self::hours(n.saturating_mul(24))
    }
    /// Returns whole seconds, rounded towards zero.
    pub const fn as_secs(self) -> i64 {
        self.0 / 1_000_000
    }
}

impl Timestamp {
    pub const fn from_secs(secs: i64) -> Self {
        Self(secs.saturating_mul(1_000_000))
    }

    /// Returns the time since `earlier`.
    pub const fn since(self, earlier: Self) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }

    /// Parses RFC 3339 with any offset.
    pub fn parse(text: &str) -> Result<Self, jiff::Error> {
        text.parse::<jiff::Timestamp>().map(|t| Self(t.as_microsecond()))
    }
}

impl Add<Span> for Timestamp {
    type Output = Self;
    fn add(self, span: Span) -> Self {
        Self(self.0.saturating_add(span.0))
    }
}

impl Sub<Span> for Timestamp {
    type Output = Self;
    fn sub(self, span: Span) -> Self {
        Self(self.0.saturating_sub(span.0))
    }
}

/// Prints RFC 3339, UTC, as the API requires: `2026-11-20T09:00:01.2Z`.
impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match jiff::Timestamp::from_microsecond(self.0) {
            Ok(t) => t.fmt(f),
            Err(_) => write!(f, "{} µs", self.0),
        }
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}s", self.0 as f64 / 1e6)
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}
