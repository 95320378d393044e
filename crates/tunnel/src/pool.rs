//! Pool of the connections to all hosts: at most two each, opened on demand, reused, and reopened with backoff.

use std::{collections::HashMap, hash::Hash, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;
use windlass_dial::AllowedAddresses;

use crate::{Connection, HostKeyEntry, SshDestination, TunnelError};

/// Buffer cap of a control channel: more than HTTP/2 flow control lets the other side send.
const CONTROL_CAP: usize = 32 << 20;
/// Buffer cap of a channel with user traffic.
const TRAFFIC_CAP: usize = 4 << 20;
/// Time after which a host that has not answered a ping is connected to again.
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// Delay before the next attempt, depending on the number of consecutive failures.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    pub initial: Duration,
    pub max: Duration,
}

impl Backoff {
    pub const STANDARD: Self = Self { initial: Duration::from_millis(500), max: Duration::from_secs(30) };

    /// Returns the delay: it doubles with each failure and is spread by a quarter, so that many hosts do not reconnect
    /// at once. `spread` is in 0..=255.
    pub fn delay(self, failures: u32, spread: u8) -> Duration {
        let doubled = self.initial.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(self.max);
        doubled.mul_f64(0.75 + f64::from(spread) / 512.0)
    }
}

/// Connections by host. `K` identifies a host.
///
/// Hosts behind the same jump host share one connection to it (one for control, one for traffic): its SSH server would
/// reject a thousand separate ones.
pub struct SshPool<K> {
    hosts: Mutex<HashMap<K, Arc<HostConnections>>>,
    jump_hosts: Mutex<HashMap<String, Arc<PooledConnection>>>,
    backoff: Backoff,
    allowed: AllowedAddresses,
}

#[derive(Default)]
struct HostConnections {
    control: PooledConnection,
    traffic: PooledConnection,
}

/// One connection of a host. The lock also serialises attempts.
#[derive(Default)]
struct PooledConnection {
    state: tokio::sync::Mutex<ConnectionState>,
}

#[derive(Default)]
struct ConnectionState {
    /// Address, user and keys. A different target starts without a connection and without failures.
    target_key: String,
    connection: Option<Arc<Connection>>,
    failures: u32,
    last_failure: Option<(Instant, Arc<TunnelError>)>,
}

impl<K: Eq + Hash + Clone> SshPool<K> {
    pub fn new(backoff: Backoff) -> Self {
        Self {
            hosts: Mutex::default(),
            jump_hosts: Mutex::default(),
            backoff,
            allowed: AllowedAddresses::default(),
        }
    }

    /// Restricts the pool to these addresses. Hosts behind a jump host are dialled by that host and are not restricted.
    #[must_use]
    pub fn with_allowed(self, allowed: AllowedAddresses) -> Self {
        Self { allowed, ..self }
    }

    /// Returns the control connection; opens it if necessary.
    pub async fn control_connection(
        &self,
        host: &K,
        target: &SshDestination,
    ) -> Result<(Arc<Connection>, Vec<HostKeyEntry>), TunnelError> {
        let slot = self.host_connections(host);
        self.get_or_connect(&slot.control, target, CONTROL_CAP).await
    }

    /// Returns the connection for user traffic; opens it if necessary.
    pub async fn traffic_connection(
        &self,
        host: &K,
        target: &SshDestination,
    ) -> Result<(Arc<Connection>, Vec<HostKeyEntry>), TunnelError> {
        let slot = self.host_connections(host);
        self.get_or_connect(&slot.traffic, target, TRAFFIC_CAP).await
    }

    /// Checks that the host still responds. An unresponsive connection is dropped, so that the next call opens a new
    /// one.
    pub async fn check(&self, host: &K) -> Result<(), TunnelError> {
        let slot = self.host_connections(host);
        let live = slot.control.state.lock().await.connection.clone();
        let Some(connection) = live else { return Ok(()) };
        let answered = connection.ping(PING_TIMEOUT).await;
        if answered.is_err() {
            let mut state = slot.control.state.lock().await;
            if state.connection.as_ref().is_some_and(|live| Arc::ptr_eq(live, &connection)) {
                state.connection = None;
            }
        }
        answered
    }

    /// Removes a host. Its connections are closed when they are no longer in use.
    pub fn forget(&self, host: &K) {
        self.hosts.lock().remove(host);
        // A jump host that is no longer in use is referenced only by its pooled connection.
        self.jump_hosts.lock().retain(|_, line| {
            let Ok(state) = line.state.try_lock() else { return true };
            state.connection.as_ref().is_some_and(|live| Arc::strong_count(live) > 1)
        });
    }

    fn jump_host(&self, gate: &SshDestination, cap: usize) -> Arc<PooledConnection> {
        Arc::clone(self.jump_hosts.lock().entry(jump_host_key(gate, cap)).or_default())
    }

    fn host_connections(&self, host: &K) -> Arc<HostConnections> {
        Arc::clone(self.hosts.lock().entry(host.clone()).or_default())
    }

    async fn get_or_connect(
        &self,
        line: &PooledConnection,
        target: &SshDestination,
        cap: usize,
    ) -> Result<(Arc<Connection>, Vec<HostKeyEntry>), TunnelError> {
        let mut state = line.state.lock().await;
        let key = target_key(target);
        if state.target_key != key {
            *state = ConnectionState { target_key: key, ..ConnectionState::default() };
        }
        if let Some(live) = &state.connection {
            if !live.is_closed() {
                return Ok((Arc::clone(live), Vec::new()));
            }
            state.connection = None;
        }
        if let Some((at, last)) = &state.last_failure {
            // The address of the slot serves as the spread: different for each host, constant for one.
            let spread = (std::ptr::from_ref(line).addr() >> 6) as u8;
            let due = *at + self.backoff.delay(state.failures, spread);
            let now = Instant::now();
            if now < due {
                return Err(TunnelError::BackingOff { last: Arc::clone(last), wait: due - now });
            }
        }
        match self.open(target, cap).await {
            Ok((connection, host_keys)) => {
                let connection = Arc::new(connection);
                (state.connection, state.failures, state.last_failure) =
                    (Some(Arc::clone(&connection)), 0, None);
                Ok((connection, host_keys))
            }
            // Not an attempt: the pooled connection of the jump host determines when the next one is due.
            Err(error @ TunnelError::BackingOff { .. }) => Err(error),
            Err(error) => {
                state.failures = state.failures.saturating_add(1);
                state.last_failure = Some((Instant::now(), Arc::new(error.clone())));
                Err(error)
            }
        }
    }

    async fn open(
        &self,
        target: &SshDestination,
        cap: usize,
    ) -> Result<(Connection, Vec<HostKeyEntry>), TunnelError> {
        let Some(via) = &target.via else {
            return Connection::open_allowed(target, cap, &self.allowed).await;
        };
        let gate = self.jump_host(via, cap);
        let (below, mut host_keys) = Box::pin(self.get_or_connect(&gate, via, cap)).await?;
        let (connection, more) = Connection::open_through(below, target, cap).await?;
        host_keys.extend(more);
        Ok((connection, host_keys))
    }
}

/// Identifies a connection to a jump host. Includes the expected host key, because it is checked once per connection.
fn jump_host_key(gate: &SshDestination, cap: usize) -> String {
    let via = gate.via.as_ref().map(|via| jump_host_key(via, cap));
    format!("{cap} {} {:?} {:?} {via:?}", gate.name(), gate.keys, gate.pin)
}

/// Identifies a target. Does not include pins, so that pinning a key does not change it.
fn target_key(target: &SshDestination) -> String {
    let via = target.via.as_ref().map(|via| target_key(via));
    format!("{} {:?} {via:?}", target.name(), target.keys)
}

impl<K> std::fmt::Debug for SshPool<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hosts").field("slots", &self.hosts.lock().len()).finish_non_exhaustive()
    }
}
