//! Leases that this replica holds, and their local deadlines.
//!
//! A deadline is local and monotonic: the time at which the lease was requested, plus its time to live, minus a margin.
//! The database started counting later than that, so work stops before another replica may claim the row, whatever the
//! wall clocks show.

use std::{
    collections::BTreeMap,
    future::Future,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Instant, Sleep, sleep_until},
};
use uuid::Uuid;

use crate::store::{Lease, LeaseKey};

/// A lease on its path through the queue, a worker and the finish.
#[derive(Debug)]
pub(crate) struct TrackedLease {
    pub(crate) lease: Lease,
    term: Mutex<LeaseTerm>,
    /// The database no longer has the token.
    refused: AtomicBool,
    /// The guarded write is in progress. From here a refusal proves nothing: our own commit also causes it.
    applying: AtomicBool,
    lost: AtomicBool,
    waker: AtomicWaker,
}

#[derive(Clone, Copy, Debug)]
struct LeaseTerm {
    renewed_at: Instant,
    deadline: Instant,
}

/// The lease ended during the work, which was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeaseLost;

impl TrackedLease {
    pub(crate) fn key(&self) -> LeaseKey {
        self.lease.key()
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.term.lock().deadline
    }

    pub(crate) fn start_applying(&self) {
        self.applying.store(true, Ordering::Release);
    }

    pub(crate) fn renew(&self, requested_at: Instant, lease_use: Duration) {
        *self.term.lock() = LeaseTerm { renewed_at: requested_at, deadline: requested_at + lease_use };
    }

    pub(crate) fn mark_refused(&self) {
        self.refused.store(true, Ordering::Release);
        self.waker.wake();
    }

    fn is_refused(&self) -> bool {
        self.refused.load(Ordering::Acquire)
    }

    /// Returns true for the first caller only: a loss is counted once.
    pub(crate) fn mark_lost(&self) -> bool {
        let first = !self.lost.swap(true, Ordering::AcqRel);
        self.waker.wake();
        first
    }

    pub(crate) fn has_ended(&self, now: Instant) -> bool {
        self.lost.load(Ordering::Acquire)
            || (self.is_refused() && !self.applying.load(Ordering::Acquire))
            || now >= self.deadline()
    }
}

/// All leases of one pipeline, by token: a row may be claimed again before its first lease is removed.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    by_token: Mutex<BTreeMap<Uuid, Arc<TrackedLease>>>,
    added: Notify,
    emptied: Notify,
}

impl Leases {
    pub(crate) fn track(&self, lease: Lease, lease_use: Duration) -> Arc<TrackedLease> {
        let term = LeaseTerm { renewed_at: lease.requested_at, deadline: lease.requested_at + lease_use };
        let tracked = Arc::new(TrackedLease {
            lease,
            term: Mutex::new(term),
            refused: AtomicBool::new(false),
            applying: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        });
        self.by_token.lock().insert(tracked.lease.token, tracked.clone());
        self.added.notify_one();
        tracked
    }

    /// Waits until there is a lease. Supports one waiter.
    pub(crate) async fn wait_for_any(&self) {
        while self.by_token.lock().is_empty() {
            self.added.notified().await;
        }
    }

    /// Waits until there is no lease. Supports one waiter.
    pub(crate) async fn wait_for_none(&self) {
        while !self.by_token.lock().is_empty() {
            self.emptied.notified().await;
        }
    }

    pub(crate) fn release(&self, tracked: &TrackedLease) {
        let mut by_token = self.by_token.lock();
        by_token.remove(&tracked.lease.token);
        self.notify_if_empty(&by_token);
    }

    fn notify_if_empty(&self, by_token: &BTreeMap<Uuid, Arc<TrackedLease>>) {
        if by_token.is_empty() {
            self.emptied.notify_one();
        }
    }

    /// Removes and returns the leases whose deadline has passed.
    pub(crate) fn remove_expired(&self, now: Instant) -> Vec<Arc<TrackedLease>> {
        let mut by_token = self.by_token.lock();
        let expired =
            by_token.extract_if(.., |_, tracked| now >= tracked.deadline()).map(|(_, t)| t).collect();
        self.notify_if_empty(&by_token);
        expired
    }

    /// Returns the leases that were last requested at least `age` ago and that the database has not refused.
    pub(crate) fn older_than(&self, age: Duration, now: Instant) -> Vec<Arc<TrackedLease>> {
        let is_old = |tracked: &&Arc<TrackedLease>| {
            !tracked.is_refused() && now.saturating_duration_since(tracked.term.lock().renewed_at) >= age
        };
        self.by_token.lock().values().filter(is_old).cloned().collect()
    }

    /// Removes and returns all leases.
    pub(crate) fn take_all(&self) -> Vec<Arc<TrackedLease>> {
        self.emptied.notify_one();
        std::mem::take(&mut *self.by_token.lock()).into_values().collect()
    }

    /// Returns when the oldest lease was claimed.
    pub(crate) fn oldest_requested_at(&self) -> Option<Instant> {
        self.by_token.lock().values().map(|tracked| tracked.lease.requested_at).min()
    }
}

/// Runs the work as long as all of its leases are valid, then drops it. The leases are checked before each poll, so
/// that a process that was suspended performs no further step after it resumes.
pub(crate) async fn while_held<F: Future>(
    leases: &[Arc<TrackedLease>],
    work: F,
) -> Result<F::Output, LeaseLost> {
    let mut guarded = LeaseWatch { leases, timer: None };
    let mut work = pin!(work);
    std::future::poll_fn(|context| {
        if guarded.has_ended() {
            return Poll::Ready(Err(LeaseLost));
        }
        if let Poll::Ready(output) = work.as_mut().poll(context) {
            return Poll::Ready(Ok(output));
        }
        guarded.poll_ended(context).map(|()| Err(LeaseLost))
    })
    .await
}

struct LeaseWatch<'a> {
    leases: &'a [Arc<TrackedLease>],
    /// Created only if the work has to wait: most passes on a fast store never need a timer.
    timer: Option<Pin<Box<Sleep>>>,
}

impl LeaseWatch<'_> {
    fn has_ended(&self) -> bool {
        let now = Instant::now();
        self.leases.iter().any(|tracked| tracked.has_ended(now))
    }

    fn poll_ended(&mut self, context: &mut Context<'_>) -> Poll<()> {
        for tracked in self.leases {
            tracked.waker.register(context.waker());
        }
        loop {
            // Checked again after the waker is registered, since a refusal in between would go unnoticed.
            if self.has_ended() {
                return Poll::Ready(());
            }
            let Some(deadline) = self.leases.iter().map(|tracked| tracked.deadline()).min() else {
                return Poll::Pending;
            };
            let alarm = self.timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
            if alarm.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            // It fired for a deadline that has been extended since: reset it.
            alarm.as_mut().reset(deadline);
        }
    }
}
