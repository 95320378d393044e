//! Proxy state of a replica: idle connections, outstanding requests and health.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Waker},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

use crate::{
    route::{self, ReplicaTarget},
    upstream::UpstreamConnection,
};

/// Maximum number of idle connections to one replica.
const IDLE_MAX: usize = 256;
/// Maximum idle time of a connection. Replicas may close idle connections earlier.
const IDLE_TIMEOUT: Duration = Duration::from_secs(50);
/// Time for which a replica is avoided after its first failed connection. It doubles with each failure, up to the
/// maximum.
const EJECT_MS: u64 = 500;
const EJECT_MS_MAX: u64 = 30_000;

/// Replica. It persists across route changes that still include it.
pub struct Replica {
    pub(crate) id: Arc<str>,
    pub(crate) target: ReplicaTarget,
    created_at: Instant,
    outstanding: AtomicUsize,
    #[expect(
        clippy::vec_box,
        reason = "they come in boxes and leave in them: to take them out would copy them"
    )]
    idle: Mutex<Vec<Box<UpstreamConnection>>>,
    is_draining: AtomicBool,
    down: AtomicBool,
    failures: AtomicU32,
    /// Milliseconds since `began`.
    ejected_until: AtomicU64,
    all_answered: Notify,
    /// Shared by all replicas of the service.
    capacity_freed: Arc<Notify>,
}

/// Result of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainOutcome {
    /// All requests were answered.
    Clean,
    /// Number of requests that were still unanswered at the timeout.
    Cut(usize),
}

impl std::fmt::Debug for Replica {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replica").field("id", &self.id).field("outstanding", &self.outstanding).finish()
    }
}

impl Replica {
    /// `freed` is notified when the replica has capacity again.
    pub(crate) fn new(replica: &route::ReplicaRoute, capacity_freed: Arc<Notify>) -> Self {
        Self {
            capacity_freed,
            id: replica.id.as_str().into(),
            target: replica.target.clone(),
            created_at: Instant::now(),
            outstanding: AtomicUsize::new(0),
            idle: Mutex::new(Vec::new()),
            is_draining: AtomicBool::new(false),
            down: AtomicBool::new(false),
            failures: AtomicU32::new(0),
            ejected_until: AtomicU64::new(0),
            all_answered: Notify::new(),
        }
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the number of requests that are not yet answered in full.
    pub fn outstanding(&self) -> usize {
        self.outstanding.load(Relaxed)
    }

    /// Sets the result of a health check. A replica that is down receives no requests.
    pub fn set_down(&self, down: bool) {
        self.down.store(down, Relaxed);
        if !down {
            self.mark_healthy();
        }
    }

    pub(crate) fn is_down(&self) -> bool {
        self.down.load(Relaxed)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.created_at.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(crate) fn is_ejected(&self) -> bool {
        self.failures.load(Relaxed) > 0 && self.now_ms() < self.ejected_until.load(Relaxed)
    }

    /// Marks the replica as unreachable: others are preferred for a while.
    pub(crate) fn mark_failed(&self) {
        let failures = self.failures.fetch_add(1, Relaxed).min(16);
        let pause = (EJECT_MS << failures).min(EJECT_MS_MAX);
        self.ejected_until.store(self.now_ms() + pause, Relaxed);
        self.idle.lock().clear();
    }

    pub(crate) fn mark_healthy(&self) {
        if self.failures.load(Relaxed) > 0 {
            self.failures.store(0, Relaxed);
        }
    }

    /// Reserves capacity for one request, unless the replica has `max` already.
    pub(crate) fn reserve(self: &Arc<Self>, max: usize) -> Option<OutstandingRequest> {
        let more = |count: usize| (count < max).then_some(count + 1);
        self.outstanding.fetch_update(Relaxed, Relaxed, more).ok()?;
        Some(OutstandingRequest { replica: Arc::clone(self), max })
    }

    /// Returns an idle connection that is still usable.
    pub(crate) fn take_idle(&self, cx: &mut Context<'_>) -> Option<Box<UpstreamConnection>> {
        let mut idle = self.idle.lock();
        while let Some(mut conn) = idle.pop() {
            if conn.idle_since.elapsed() < IDLE_TIMEOUT && conn.is_reusable(cx) {
                return Some(conn);
            }
        }
        None
    }

    pub(crate) fn put_idle(&self, mut conn: Box<UpstreamConnection>) {
        if self.is_draining.load(Relaxed) {
            return;
        }
        conn.idle_since = Instant::now();
        let mut idle = self.idle.lock();
        if idle.len() < IDLE_MAX {
            idle.push(conn);
        }
    }

    /// Closes connections that are too old, and those that the replica has closed.
    pub(crate) fn close_stale(&self) {
        let mut cx = Context::from_waker(Waker::noop());
        self.idle
            .lock()
            .retain_mut(|conn| conn.idle_since.elapsed() < IDLE_TIMEOUT && conn.is_reusable(&mut cx));
    }

    pub(crate) fn begin_drain(&self) {
        self.is_draining.store(true, Relaxed);
        self.idle.lock().clear();
    }

    /// Waits until all requests are answered, up to `bound`.
    pub async fn drain(&self, bound: Duration) -> DrainOutcome {
        let clean = async {
            loop {
                let answered = self.all_answered.notified();
                if self.outstanding() == 0 {
                    return;
                }
                answered.await;
            }
        };
        match tokio::time::timeout(bound, clean).await {
            Ok(()) => DrainOutcome::Clean,
            Err(_) => DrainOutcome::Cut(self.outstanding()),
        }
    }
}

/// Request that this replica has not answered in full.
pub(crate) struct OutstandingRequest {
    pub(crate) replica: Arc<Replica>,
    /// Maximum number of outstanding requests.
    max: usize,
}

impl Drop for OutstandingRequest {
    fn drop(&mut self) {
        let replica = &self.replica;
        let before = replica.outstanding.fetch_sub(1, std::sync::atomic::Ordering::AcqRel);
        if before == 1 && replica.is_draining.load(Relaxed) {
            replica.all_answered.notify_waiters();
        }
        if before >= self.max {
            // Wakes the request that has waited longest.
            replica.capacity_freed.notify_one();
        }
    }
}
