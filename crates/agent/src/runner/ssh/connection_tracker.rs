//! Open connections, and the time since the last one.
//!
//! A dev environment without connections is stopped after a while. Short connections (a probe, a copy) do not count, so
//! that a monitor that connects every minute does not keep it alive.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// Minimum duration of a connection that counts.
const CONNECTION_TIME_MIN: Duration = Duration::from_secs(10);

/// Authenticated connections. Clones share one count.
#[derive(Clone, Debug)]
pub struct ConnectionTracker(Arc<Mutex<OpenConnections>>);

impl Default for ConnectionTracker {
    fn default() -> Self {
        Self::new()
    }
}

impl ConnectionTracker {
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(OpenConnections::new(Instant::now()))))
    }

    /// Seconds without a connection of at least ten seconds; 0 while there is one.
    pub fn idle_secs(&self) -> i64 {
        i64::try_from(self.0.lock().idle(Instant::now()).as_secs()).unwrap_or(i64::MAX)
    }

    /// Number of open connections, regardless of their age.
    pub fn open(&self) -> usize {
        self.0.lock().since.len()
    }

    /// Counts a connection until the guard is dropped.
    pub(in crate::runner) fn enter(&self) -> TrackedConnection {
        let id = self.0.lock().enter(Instant::now());
        TrackedConnection { open: Arc::clone(&self.0), id }
    }
}

pub(in crate::runner) struct TrackedConnection {
    open: Arc<Mutex<OpenConnections>>,
    id: u64,
}

impl Drop for TrackedConnection {
    fn drop(&mut self) {
        self.open.lock().remove(self.id, Instant::now());
    }
}

#[derive(Debug)]
struct OpenConnections {
    since: BTreeMap<u64, Instant>,
    next: u64,
    /// The last moment at which a connection that counts was open, or the start.
    last: Instant,
}

impl OpenConnections {
    fn new(now: Instant) -> Self {
        Self { since: BTreeMap::new(), next: 0, last: now }
    }

    fn enter(&mut self, now: Instant) -> u64 {
        let id = self.next;
        self.next += 1;
        self.since.insert(id, now);
        id
    }

    fn remove(&mut self, id: u64, now: Instant) {
        if self.since.remove(&id).is_some_and(|since| now.duration_since(since) >= CONNECTION_TIME_MIN) {
            self.last = now;
        }
    }

    fn idle(&self, now: Instant) -> Duration {
        // Ids increase with time: the first is the oldest.
        let oldest = self.since.values().next();
        if oldest.is_some_and(|since| now.duration_since(*since) >= CONNECTION_TIME_MIN) {
            return Duration::ZERO;
        }
        now.duration_since(self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Replays `+ID@SECOND` (connect) and `-ID@SECOND` (disconnect), then checks the idle seconds at the end.
    #[track_caller]
    fn check(script: &str, at: u64, idle: u64) {
        let start = Instant::now();
        let second = |text: &str| start + Duration::from_secs(text.parse().unwrap());
        let mut open = OpenConnections::new(start);
        let mut ids = BTreeMap::new();
        for word in script.split_whitespace() {
            let (name, time) = word[1..].split_once('@').unwrap();
            if word.starts_with('+') {
                ids.insert(name, open.enter(second(time)));
            } else {
                open.remove(ids[name], second(time));
            }
        }
        assert_eq!(open.idle(start + Duration::from_secs(at)).as_secs(), idle, "{script} at {at}");
    }

    #[test]
    fn without_connections_idle_time_counts_from_the_start() {
        check("", 0, 0);
        check("", 300, 300);
    }

    #[test]
    fn a_long_connection_resets_the_idle_time_until_it_closes() {
        check("+a@100", 105, 105);
        check("+a@100", 110, 0);
        check("+a@100", 5000, 0);
        check("+a@100 -a@200", 200, 0);
        check("+a@100 -a@200", 230, 30);
    }

    #[test]
    fn a_short_connection_does_not_reset_the_idle_time() {
        check("+a@100 -a@109", 120, 120);
        check("+a@0 -a@50 +b@60 -b@65", 100, 50);
    }

    #[test]
    fn the_oldest_open_connection_decides_the_idle_time() {
        check("+a@0 +b@100 -a@105", 107, 2);
        check("+a@0 +b@100 -a@105", 110, 0);
        check("+a@0 +b@100 -b@105", 106, 0);
    }
}
