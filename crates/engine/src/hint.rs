//! Hints: wake-ups of pipelines. They carry no data, so losing, delaying or repeating one only changes latency: the
//! pipeline reads the database.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Hub of one replica. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Hints {
    bus: Arc<Mutex<HintBus>>,
}

#[derive(Debug, Default)]
struct HintBus {
    subscribers: BTreeMap<&'static str, Vec<Weak<HintSignal>>>,
    outboxes: Vec<Weak<Outbox>>,
}

#[derive(Debug, Default)]
struct HintSignal {
    is_set: AtomicBool,
    notify: Notify,
}

#[derive(Debug, Default)]
struct Outbox {
    names: Mutex<BTreeSet<&'static str>>,
    notify: Notify,
}

impl Hints {
    pub fn new() -> Self {
        Self::default()
    }

    /// Wakes the pipeline here, and in other replicas if a task forwards [`Hints::outgoing`]. Call it after the commit,
    /// never before: a pipeline that reads too early sees no change.
    pub fn hint(&self, pipeline: &'static str) {
        self.hint_local(pipeline);
        self.bus.lock().outboxes.retain(|outbox| {
            let Some(outbox) = outbox.upgrade() else { return false };
            outbox.names.lock().insert(pipeline);
            outbox.notify.notify_one();
            true
        });
    }

    /// Wakes the pipeline in this replica only: for hints that came from another one.
    pub fn hint_local(&self, pipeline: &str) {
        if let Some(wakers) = self.bus.lock().subscribers.get_mut(pipeline) {
            wakers.retain(|waker| {
                let Some(waker) = waker.upgrade() else { return false };
                waker.is_set.store(true, Ordering::Release);
                waker.notify.notify_one();
                true
            });
        }
    }

    /// Wakes all pipelines of this replica: for a listener that was disconnected and may have missed hints.
    pub fn hint_all_local(&self) {
        let names: Vec<_> = self.bus.lock().subscribers.keys().copied().collect();
        for name in names {
            self.hint_local(name);
        }
    }

    /// Subscribes to hints for one pipeline from now on.
    pub fn subscribe(&self, pipeline: &'static str) -> Subscription {
        let waker = Arc::new(HintSignal::default());
        self.bus.lock().subscribers.entry(pipeline).or_default().push(Arc::downgrade(&waker));
        Subscription { signal: waker }
    }

    /// Returns the hints of this replica from now on, to be forwarded to the others.
    pub fn outgoing(&self) -> OutgoingHints {
        let outbox = Arc::new(Outbox::default());
        self.bus.lock().outboxes.push(Arc::downgrade(&outbox));
        OutgoingHints { outbox }
    }
}

/// One subscriber of one pipeline. Pending hints are merged into one.
#[derive(Debug)]
pub struct Subscription {
    signal: Arc<HintSignal>,
}

impl Subscription {
    /// Waits for a pending hint.
    pub async fn wait(&self) {
        while !self.take() {
            self.signal.notify.notified().await;
        }
    }

    /// Clears a pending hint and returns whether there was one: later claims include what it announced.
    pub fn take(&self) -> bool {
        self.signal.is_set.swap(false, Ordering::AcqRel)
    }
}

/// Names of pipelines to send to other replicas.
#[derive(Debug)]
pub struct OutgoingHints {
    outbox: Arc<Outbox>,
}

impl OutgoingHints {
    /// Waits until there is something to send; each name appears once however often it was hinted.
    pub async fn next(&mut self) -> Vec<&'static str> {
        loop {
            let names = std::mem::take(&mut *self.outbox.names.lock());
            if !names.is_empty() {
                return names.into_iter().collect();
            }
            self.outbox.notify.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn pending_hints_are_coalesced_into_one() {
        let hints = Hints::new();
        let runs = hints.subscribe("runs");
        assert!(runs.wait().now_or_never().is_none());
        hints.hint("runs");
        hints.hint("runs");
        hints.hint("jobs");
        assert!(runs.wait().now_or_never().is_some());
        assert!(runs.wait().now_or_never().is_none());
        hints.hint_all_local();
        assert!(runs.take());
        assert!(!runs.take());
    }

    #[test]
    fn a_hint_wakes_every_subscriber_of_the_name() {
        let hints = Hints::new();
        let (one, two) = (hints.subscribe("runs"), hints.subscribe("runs"));
        hints.hint("runs");
        assert!(one.take() && two.take());
        drop(one);
        hints.hint("runs");
        assert!(two.take());
    }

    #[test]
    fn outgoing_hints_contain_each_name_once_and_no_local_hints() {
        let hints = Hints::new();
        let mut outgoing = hints.outgoing();
        hints.hint_local("jobs");
        assert!(outgoing.next().now_or_never().is_none());
        for name in ["runs", "jobs", "runs"] {
            hints.hint(name);
        }
        assert_eq!(outgoing.next().now_or_never(), Some(vec!["jobs", "runs"]));
        assert!(outgoing.next().now_or_never().is_none());
    }
}
