//! The connections to all hosts: at most two each, made on demand, kept, and made again with patience.

use std::{collections::HashMap, hash::Hash, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;
use windlass_dial::AllowedAddresses;

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
///
/// Hosts behind the same jump host share one connection to it (one for control, one for traffic): a thousand of them
/// would be turned away by its server otherwise.
pub struct Hosts<K> {
    slots: Mutex<HashMap<K, Arc<Slot>>>,
    gates: Mutex<HashMap<String, Arc<Line>>>,
    backoff: Backoff,
    allowed: AllowedAddresses,
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
    /// Where and as whom; a new way has neither a connection nor failures yet.
    way: String,
    live: Option<Arc<Connection>>,
    failures: u32,
    failed: Option<(Instant, Arc<TunnelError>)>,
}

impl<K: Eq + Hash + Clone> Hosts<K> {
    pub fn new(backoff: Backoff) -> Self {
        Self {
            slots: Mutex::default(),
            gates: Mutex::default(),
            backoff,
            allowed: AllowedAddresses::default(),
        }
    }

    /// Dials these addresses only. What is behind a jump host is dialled by that one, and is not meant.
    #[must_use]
    pub fn only(self, allowed: AllowedAddresses) -> Self {
        Self { allowed, ..self }
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
        // A gate that nobody goes through any more is held by its own line alone.
        self.gates.lock().retain(|_, line| {
            let Ok(state) = line.state.try_lock() else { return true };
            state.live.as_ref().is_some_and(|live| Arc::strong_count(live) > 1)
        });
    }

    fn gate(&self, gate: &Target, cap: usize) -> Arc<Line> {
        Arc::clone(self.gates.lock().entry(gate_name(gate, cap)).or_default())
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
        let way = way(target);
        if state.way != way {
            *state = State { way, ..State::default() };
        }
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
                return Err(TunnelError::Waiting { last: Arc::clone(last), wait: due - now });
            }
        }
        match self.open(target, cap).await {
            Ok((connection, learned)) => {
                let connection = Arc::new(connection);
                (state.live, state.failures, state.failed) = (Some(Arc::clone(&connection)), 0, None);
                Ok((connection, learned))
            }
            // Not an attempt of its own: the gate's line says when the next is due.
            Err(error @ TunnelError::Waiting { .. }) => Err(error),
            Err(error) => {
                state.failures = state.failures.saturating_add(1);
                state.failed = Some((Instant::now(), Arc::new(error.clone())));
                Err(error)
            }
        }
    }

    async fn open(&self, target: &Target, cap: usize) -> Result<(Connection, Vec<Learned>), TunnelError> {
        let Some(via) = &target.via else {
            return Connection::open_allowed(target, cap, &self.allowed).await;
        };
        let gate = self.gate(via, cap);
        let (below, mut learned) = Box::pin(self.line(&gate, via, cap)).await?;
        let (connection, more) = Connection::open_through(below, target, cap).await?;
        learned.extend(more);
        Ok((connection, learned))
    }
}

/// What makes two ways to a gate the same: also which host key is right, for that is checked once per connection.
fn gate_name(gate: &Target, cap: usize) -> String {
    let via = gate.via.as_ref().map(|via| gate_name(via, cap));
    format!("{cap} {} {:?} {:?} {via:?}", gate.name(), gate.keys, gate.pin)
}

/// What makes two targets one way to a host. A key that is pinned on the way does not change it.
fn way(target: &Target) -> String {
    let via = target.via.as_ref().map(|via| way(via));
    format!("{} {:?} {via:?}", target.name(), target.keys)
}

impl<K> std::fmt::Debug for Hosts<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hosts").field("slots", &self.slots.lock().len()).finish_non_exhaustive()
    }
}
