//! The one place that reads the wall clock, and only for SQLite: the server is the database there.
//! On Postgres time comes from the server's `now()`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::SystemTime,
};

/// Microseconds since 1970, never going back.
#[derive(Clone)]
pub(super) struct Clock {
    read: Arc<dyn Fn() -> i64 + Send + Sync>,
    last: Arc<AtomicI64>,
}

impl Clock {
    #[expect(clippy::disallowed_methods, reason = "this is the database's clock")]
    pub(super) fn wall() -> Self {
        Self::of(Arc::new(|| {
            let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
        }))
    }

    pub(super) fn of(read: Arc<dyn Fn() -> i64 + Send + Sync>) -> Self {
        Self { read, last: Arc::new(AtomicI64::new(i64::MIN)) }
    }

    /// A wall clock that was set back stands still here until it has caught up.
    pub(super) fn now(&self) -> i64 {
        let read = (self.read)();
        read.max(self.last.fetch_max(read, Ordering::Relaxed))
    }
}

impl std::fmt::Debug for Clock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Clock").finish_non_exhaustive()
    }
}
