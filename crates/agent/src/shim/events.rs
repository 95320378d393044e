//! Events of this host, in order, for any number of readers.
//!
//! Events are kept in one ring. A reader has no separate queue but a position in the ring: however slow it is, it costs
//! nothing, and when the ring has overtaken it, it receives a reset and starts again from the full state.
//! [`Events::publish`] is called for every change; it never waits.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::watch;

use windlass_api::agent::events::{ShimEvent, ShimEventKind};

use crate::clock;

/// Number of events kept for readers that reconnect.
pub const EVENTS_KEPT_MAX: usize = 4096;
/// Interval of keep-alive messages on an idle stream.
pub const ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of events returned at once.
const BATCH_MAX: usize = 256;

/// Cheap to clone; all clones share one ring.
#[derive(Clone, Debug)]
pub struct EventLog {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    boot: String,
    ring: Mutex<Ring>,
    head: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Ring {
    /// Sequence number of the last event.
    seq: u64,
    kept: VecDeque<ShimEvent>,
}

impl EventLog {
    /// `boot` identifies this start of the shim: sequence numbers of another start are meaningless.
    pub fn new(boot: impl Into<String>) -> Self {
        let shared =
            Shared { boot: boot.into(), ring: Mutex::new(Ring::default()), head: watch::Sender::new(0) };
        Self { shared: Arc::new(shared) }
    }

    pub fn boot(&self) -> &str {
        &self.shared.boot
    }

    /// Publishes an event to all readers. Returns its sequence number.
    pub fn publish(&self, what: ShimEventKind) -> u64 {
        let mut ring = self.shared.ring.lock();
        ring.seq += 1;
        let event = ShimEvent { seq: ring.seq, at: clock::now_us(), kind: what };
        ring.kept.push_back(event);
        if ring.kept.len() > EVENTS_KEPT_MAX {
            ring.kept.pop_front();
        }
        // Sent under the lock, so that readers receive the heads in order.
        self.shared.head.send_replace(ring.seq);
        ring.seq
    }

    /// Returns a reader that has received all events up to `after` of the start `boot`.
    pub fn reader(&self, after: Option<u64>, boot: Option<&str>) -> EventReader {
        let seen = after.filter(|_| boot.is_none_or(|boot| boot == self.boot()));
        EventReader {
            events: self.clone(),
            head: self.shared.head.subscribe(),
            seen,
            alive_every: ALIVE_INTERVAL,
        }
    }

    /// Returns the next events after `seen`, or a gap.
    fn after(&self, seen: Option<u64>) -> RingRead {
        let ring = self.shared.ring.lock();
        let oldest = ring.seq - ring.kept.len() as u64 + 1;
        match seen {
            Some(seen) if seen <= ring.seq && seen + 1 >= oldest => {
                let skip = usize::try_from(seen + 1 - oldest).unwrap_or(usize::MAX);
                RingRead::Events(ring.kept.iter().skip(skip).take(BATCH_MAX).cloned().collect())
            }
            Some(_) | None => RingRead::Gap { head: ring.seq },
        }
    }
}

enum RingRead {
    Events(Vec<ShimEvent>),
    Gap { head: u64 },
}

/// Next item of a reader.
#[derive(Debug, PartialEq, Eq)]
pub enum StreamItem {
    /// Never empty.
    Events(Vec<ShimEvent>),
    /// The reader cannot continue from its position: it needs `Reset` and the full state, as of `seq`.
    Reset { seq: u64 },
    /// No event for [`ALIVE_INTERVAL`].
    Alive { seq: u64 },
}

/// Position of one reader in the ring.
#[derive(Debug)]
pub struct EventReader {
    events: EventLog,
    head: watch::Receiver<u64>,
    seen: Option<u64>,
    alive_every: Duration,
}

impl EventReader {
    /// Waits for the next item.
    pub async fn next(&mut self) -> StreamItem {
        let deadline = tokio::time::Instant::now() + self.alive_every;
        loop {
            // Marked as seen before the ring is read: an event after the read wakes this reader.
            let head = *self.head.borrow_and_update();
            match self.events.after(self.seen) {
                RingRead::Gap { head } => {
                    self.seen = Some(head);
                    return StreamItem::Reset { seq: head };
                }
                RingRead::Events(events) if !events.is_empty() => {
                    self.seen = events.last().map(|event| event.seq);
                    return StreamItem::Events(events);
                }
                RingRead::Events(_) => {}
            }
            if tokio::time::timeout_at(deadline, self.head.changed()).await.is_err() {
                return StreamItem::Alive { seq: head };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publish(events: &EventLog, count: u64) {
        for _ in 0..count {
            events.publish(ShimEventKind::Health { problems: Vec::new() });
        }
    }

    async fn seqs(reader: &mut EventReader) -> Vec<u64> {
        match reader.next().await {
            StreamItem::Events(events) => events.iter().map(|event| event.seq).collect(),
            StreamItem::Reset { .. } | StreamItem::Alive { .. } => Vec::new(),
        }
    }

    #[tokio::test]
    async fn a_new_event_reader_starts_with_a_reset_and_then_gets_new_events() {
        let events = EventLog::new("b1");
        publish(&events, 3);
        let mut reader = events.reader(None, None);
        assert_eq!(reader.next().await, StreamItem::Reset { seq: 3 });
        publish(&events, 2);
        assert_eq!(seqs(&mut reader).await, [4, 5]);
        reader.alive_every = Duration::from_millis(1);
        assert_eq!(reader.next().await, StreamItem::Alive { seq: 5 });
    }

    #[tokio::test]
    async fn a_reconnecting_event_reader_misses_nothing() {
        let events = EventLog::new("b1");
        publish(&events, 5);
        assert_eq!(seqs(&mut events.reader(Some(2), Some("b1"))).await, [3, 4, 5]);
        assert_eq!(seqs(&mut events.reader(Some(0), Some("b1"))).await, [1, 2, 3, 4, 5]);
    }

    #[tokio::test]
    async fn event_positions_of_another_start_or_of_the_future_cause_a_reset() {
        let events = EventLog::new("b2");
        publish(&events, 5);
        assert_eq!(events.reader(Some(3), Some("b1")).next().await, StreamItem::Reset { seq: 5 });
        assert_eq!(events.reader(Some(9), Some("b2")).next().await, StreamItem::Reset { seq: 5 });
        assert_eq!(events.reader(Some(u64::MAX), Some("b2")).next().await, StreamItem::Reset { seq: 5 });
    }

    #[tokio::test]
    async fn an_event_reader_overtaken_by_the_ring_buffer_is_reset() {
        let events = EventLog::new("b1");
        publish(&events, 1);
        let mut reader = events.reader(Some(0), Some("b1"));
        assert_eq!(seqs(&mut reader).await, [1]);
        publish(&events, EVENTS_KEPT_MAX as u64);
        // A reader that is behind by exactly the length of the ring has no gap.
        assert_eq!(seqs(&mut reader).await.first(), Some(&2));
        publish(&events, 2 * EVENTS_KEPT_MAX as u64);
        assert_eq!(reader.next().await, StreamItem::Reset { seq: 1 + 3 * EVENTS_KEPT_MAX as u64 });
    }

    #[tokio::test]
    async fn a_waiting_reader_is_woken_by_the_event() {
        let events = EventLog::new("b1");
        let mut reader = events.reader(Some(0), None);
        let waiting = tokio::spawn(async move { reader.next().await });
        tokio::task::yield_now().await;
        publish(&events, 1);
        assert!(matches!(waiting.await.unwrap(), StreamItem::Events(events) if events.len() == 1));
    }
}
