//! The only module that reads the host's clock.

use std::time::UNIX_EPOCH;

/// Current time in microseconds since 1970.
#[expect(clippy::disallowed_methods, reason = "this is the agent's one clock module")]
pub fn now_us() -> i64 {
    let since = std::time::SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// Current time in milliseconds since 1970.
pub fn now_ms() -> i64 {
    now_us() / 1000
}
