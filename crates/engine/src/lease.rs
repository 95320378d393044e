//! The leases this replica holds, and until when each may be relied on.
//!
//! A deadline is local and monotonic: the moment the lease was asked for, plus its time to live, minus a
//! margin. The database started counting later than that, so work stops before anybody else may take over,
//! whatever the wall clocks say.

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

use crate::store::{Held, Lease};

/// A lease on its way through the queue, a worker and the finish.
#[derive(Debug)]
pub(crate) struct Tracked {
    pub(crate) lease: Lease,
    term: Mutex<Term>,
    /// The database no longer knows the token.
    refused: AtomicBool,
    /// The guarded write is under way. From here a refusal proves nothing: our own commit causes it too.
    applying: AtomicBool,
    lost: AtomicBool,
    waker: AtomicWaker,
}

#[derive(Clone, Copy, Debug)]
struct Term {
    renewed_at: Instant,
    deadline: Instant,
}

/// The lease ended under the work, which was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lost;

impl Tracked {
    pub(crate) fn held(&self) -> Held {
        self.lease.held()
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.term.lock().deadline
    }

    pub(crate) fn start_applying(&self) {
        self.applying.store(true, Ordering::Release);
    }

    pub(crate) fn renew(&self, asked_at: Instant, lease_use: Duration) {
        *self.term.lock() = Term { renewed_at: asked_at, deadline: asked_at + lease_use };
    }

    pub(crate) fn refuse(&self) {
        self.refused.store(true, Ordering::Release);
        self.waker.wake();
    }

    fn is_refused(&self) -> bool {
        self.refused.load(Ordering::Acquire)
    }

    /// True for the first caller only: a loss is counted once.
    pub(crate) fn lose(&self) -> bool {
        let first = !self.lost.swap(true, Ordering::AcqRel);
        self.waker.wake();
        first
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.lost.load(Ordering::Acquire)
            || (self.is_refused() && !self.applying.load(Ordering::Acquire))
            || now >= self.deadline()
    }
}

/// All leases of one pipeline, by token: a row may be held a second time before the first hold is forgotten.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    by_token: Mutex<BTreeMap<Uuid, Arc<Tracked>>>,
    taken: Notify,
}

impl Leases {
    pub(crate) fn track(&self, lease: Lease, lease_use: Duration) -> Arc<Tracked> {
        let term = Term { renewed_at: lease.asked_at, deadline: lease.asked_at + lease_use };
        let tracked = Arc::new(Tracked {
            lease,
            term: Mutex::new(term),
            refused: AtomicBool::new(false),
            applying: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        });
        self.by_token.lock().insert(tracked.lease.token, tracked.clone());
        self.taken.notify_one();
        tracked
    }

    /// Waits until there is one. For one waiter.
    pub(crate) async fn some(&self) {
        while self.by_token.lock().is_empty() {
            self.taken.notified().await;
        }
    }

    pub(crate) fn release(&self, tracked: &Tracked) {
        self.by_token.lock().remove(&tracked.lease.token);
    }

    /// Forgets and names the leases whose deadline has passed.
    pub(crate) fn sweep(&self, now: Instant) -> Vec<Arc<Tracked>> {
        self.by_token.lock().extract_if(.., |_, tracked| now >= tracked.deadline()).map(|(_, t)| t).collect()
    }

    /// Leases that were last asked for at least `age` ago and that the database has not refused.
    pub(crate) fn older_than(&self, age: Duration, now: Instant) -> Vec<Arc<Tracked>> {
        let is_old = |tracked: &&Arc<Tracked>| {
            !tracked.is_refused() && now.saturating_duration_since(tracked.term.lock().renewed_at) >= age
        };
        self.by_token.lock().values().filter(is_old).cloned().collect()
    }

    /// Forgets and names all of them.
    pub(crate) fn take_all(&self) -> Vec<Arc<Tracked>> {
        std::mem::take(&mut *self.by_token.lock()).into_values().collect()
    }

    /// When the longest-held lease was taken.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.by_token.lock().values().map(|tracked| tracked.lease.asked_at).min()
    }
}

/// Runs the work for as long as all of its leases hold, then drops it. The leases are looked at before each
/// poll, so that a process that was frozen does not take one more step after it thaws.
pub(crate) async fn while_held<F: Future>(leases: &[Arc<Tracked>], work: F) -> Result<F::Output, Lost> {
    let mut guarded = Guarded { leases, alarm: None };
    let mut work = pin!(work);
    std::future::poll_fn(|context| {
        if guarded.is_over() {
            return Poll::Ready(Err(Lost));
        }
        if let Poll::Ready(output) = work.as_mut().poll(context) {
            return Poll::Ready(Ok(output));
        }
        guarded.poll_over(context).map(|()| Err(Lost))
    })
    .await
}

struct Guarded<'a> {
    leases: &'a [Arc<Tracked>],
    /// Made only when the work has to wait: most passes on a fast store never need a timer.
    alarm: Option<Pin<Box<Sleep>>>,
}

impl Guarded<'_> {
    fn is_over(&self) -> bool {
        let now = Instant::now();
        self.leases.iter().any(|tracked| tracked.is_over(now))
    }

    fn poll_over(&mut self, context: &mut Context<'_>) -> Poll<()> {
        for tracked in self.leases {
            tracked.waker.register(context.waker());
        }
        loop {
            // Looked at again after the waker is in place, or a refusal in between would go unnoticed.
            if self.is_over() {
                return Poll::Ready(());
            }
            let Some(deadline) = self.leases.iter().map(|tracked| tracked.deadline()).min() else {
                return Poll::Pending;
            };
            let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
            if alarm.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            // It rang for a deadline that has been moved since: set it anew.
            alarm.as_mut().reset(deadline);
        }
    }
}
