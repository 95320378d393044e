//! The connections to all hosts: at most two each, made on demand, kept, and made again with patience.

use std::{collections::HashMap, hash::Hash, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{Connection, Learned, Target, TunnelError};

/// What a channel of control may hold: more than HTTP/2 lets the other side send unasked.
const CONTROL_CAP: usize = 32 << 20;
/// What a channel with people's traffic may hold.
const TRAFFIC_CAP: usize = 4 << 20;
/// A host that does not answer a ping in this time is connected to anew.
const PING_WITHIN: Duration = Duration::from_secs(5);

/// How long to wait before the next attempt, after so many failures in a row.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    pub first: Duration,
    pub last: Duration,
}

impl Backoff {
    pub const STANDARD: Self = Self { first: Duration::from_millis(500), last: Duration::from_secs(30) };

    /// Doubles, and is spread by a quarter so that many hosts do not come at once. `spread` is in 0..=255.
    pub fn wait(self, failures: u32, spread: u8) -> Duration {
        let doubled = self.first.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(self.last);
        doubled.mul_f64(0.75 + f64::from(spread) / 512.0)
    }
}

/// Connections by host. `K` is whatever tells hosts apart.
pub struct Hosts<K> {
    slots: Mutex<HashMap<K, Arc<Slot>>>,
    backoff: Backoff,
}

#[derive(Default)]
struct Slot {
    control: Line,
    traffic: Line,
}

/// One connection of a host; the lock also makes attempts one at a time.
#[derive(Default)]
struct Line {
    state: tokio::sync::Mutex<State>,
}

#[derive(Default)]
struct State {
    live: Option<Arc<Connection>>,
    failures: u32,
    failed: Option<(Instant, String)>,
}

impl<K: Eq + Hash + Clone> Hosts<K> {
    pub fn new(backoff: Backoff) -> Self {
        Self { slots: Mutex::default(), backoff }
    }

    /// The connection for control, made if need be.
    pub async fn control(
        &self,
        host: &K,
        target: &Target,
    ) -> Result<(Arc<Connection>, Vec<Learned>), TunnelError> {
        let slot = self.slot(host);
        self.line(&slot.control, target, CONTROL_CAP).await
    }

    /// The connection for people's traffic, made if need be.
    pub async fn traffic(
        &self,
        host: &K,
        target: &Target,
    ) -> Result<(Arc<Connection>, Vec<Learned>), TunnelError> {
        let slot = self.slot(host);
        self.line(&slot.traffic, target, TRAFFIC_CAP).await
    }

    /// Checks that the host still answers; a silent connection is given up, so that the next call makes a new one.
    pub async fn check(&self, host: &K) -> Result<(), TunnelError> {
        let slot = self.slot(host);
        let live = slot.control.state.lock().await.live.clone();
        let Some(connection) = live else { return Ok(()) };
        let answered = connection.ping(PING_WITHIN).await;
        if answered.is_err() {
            let mut state = slot.control.state.lock().await;
            if state.live.as_ref().is_some_and(|live| Arc::ptr_eq(live, &connection)) {
                state.live = None;
            }
        }
        answered
    }

    /// Lets a host go: its connections end once nobody uses them.
    pub fn forget(&self, host: &K) {
        self.slots.lock().remove(host);
    }

    fn slot(&self, host: &K) -> Arc<Slot> {
        Arc::clone(self.slots.lock().entry(host.clone()).or_default())
    }

    async fn line(
        &self,
        line: &Line,
        target: &Target,
        cap: usize,
    ) -> Result<(Arc<Connection>, Vec<Learned>), TunnelError> {
        let mut state = line.state.lock().await;
        if let Some(live) = &state.live {
            if !live.is_closed() {
                return Ok((Arc::clone(live), Vec::new()));
            }
            state.live = None;
        }
        if let Some((at, last)) = &state.failed {
            // The address of the slot serves as the spread: different for each host, the same for one.
            let spread = (std::ptr::from_ref(line).addr() >> 6) as u8;
            let due = *at + self.backoff.wait(state.failures, spread);
            let now = Instant::now();
            if now < due {
                let (host, last) = (target.name(), last.clone());
                return Err(TunnelError::Waiting { host, last, wait: due - now });
            }
        }
        match Connection::open(target, cap).await {
            Ok((connection, learned)) => {
                let connection = Arc::new(connection);
                *state = State { live: Some(Arc::clone(&connection)), failures: 0, failed: None };
                Ok((connection, learned))
            }
            Err(error) => {
                state.failures += 1;
                state.failed = Some((Instant::now(), error.to_string()));
                Err(error)
            }
        }
    }
}

impl<K> std::fmt::Debug for Hosts<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hosts").field("slots", &self.slots.lock().len()).finish_non_exhaustive()
    }
}
