//! Shares of connections: of an address until a request has authenticated, and of a user from then on.
//!
//! A connection counts for its address until a request on it has authenticated, and not while one of its requests is
//! answered. When an address exceeds its share, its oldest connection is closed: a client that opens thousands of idle
//! connections closes only those, and blocks neither other addresses nor other clients behind the same address.
//!
//! A user's connections count whether or not a request is answered. When a user exceeds the share, the oldest idle one
//! is closed, or the newest if none is idle. Connections of gateways, dispatchers and executors are not counted: these are
//! programs of the operator.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use tokio::sync::Notify;
use windlass_model::id::UserId;

/// Number of addresses that together can fill all permits with unauthenticated connections.
const ADDRESS_SHARES: usize = 4;
/// Number of users that together can fill all permits.
const USER_SHARES: usize = 2;

tokio::task_local! {
    /// Connection of the current request.
    pub(crate) static CURRENT_CONNECTION: Arc<TrackedConnection>;
}

/// Counts the connection of the current request for a user from now on; `None` for a program of the operator.
pub(crate) fn mark_authenticated(user: Option<UserId>) {
    // Work outside of a request has no connection.
    let _ = CURRENT_CONNECTION.try_with(|connection| connection.mark_known(user));
}

/// The address, or its /64 network for IPv6: a client with one IPv6 address can use any address of its network.
pub(crate) fn client_network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
    }
}

/// Address or user that a connection counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Holder {
    Network(IpAddr),
    User(UserId),
    Operator,
}

#[derive(Debug, Default)]
struct ShareState {
    /// Connections without a request in progress, oldest first.
    idle: HashMap<Holder, BTreeMap<u64, Arc<Notify>>>,
    /// All connections of users.
    of_users: HashMap<UserId, usize>,
}

impl ShareState {
    /// Closes the oldest idle connection of the holder. Returns false if none is idle.
    fn evict(&mut self, holder: Holder) -> bool {
        let Some(row) = self.idle.get_mut(&holder) else { return false };
        let oldest = row.pop_first();
        if row.is_empty() {
            self.idle.remove(&holder);
        }
        oldest.inspect(|(_, closed)| closed.notify_one()).is_some()
    }

    fn forget_idle(&mut self, holder: Holder, position: u64) {
        if let Some(row) = self.idle.get_mut(&holder) {
            row.remove(&position);
            if row.is_empty() {
                self.idle.remove(&holder);
            }
        }
    }

    fn uncount(&mut self, holder: Holder) {
        if let Holder::User(user) = holder
            && let Some(count) = self.of_users.get_mut(&user)
        {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.of_users.remove(&user);
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct ConnectionShares {
    address_share: usize,
    user_share: usize,
    next: AtomicU64,
    state: Mutex<ShareState>,
}

impl ConnectionShares {
    /// Creates the shares of a server with `connections_max` connections.
    pub(crate) fn new(connections_max: usize) -> Self {
        let share = |parts: usize| (connections_max / parts).max(1);
        Self {
            address_share: share(ADDRESS_SHARES),
            user_share: share(USER_SHARES),
            next: AtomicU64::new(0),
            state: Mutex::default(),
        }
    }

    /// Registers a new connection.
    pub(crate) fn connected(self: &Arc<Self>, from: IpAddr) -> Arc<TrackedConnection> {
        let connection = TrackedConnection {
            shares: Arc::clone(self),
            holder: Mutex::new(Holder::Network(client_network(from))),
            position: AtomicU64::new(0),
            closed: Arc::new(Notify::new()),
            requests: AtomicUsize::new(0),
        };
        connection.wait();
        Arc::new(connection)
    }

    /// Closes the oldest idle connection of the address that has most of them, or else that of such a user. Called when
    /// all permits are in use.
    pub(crate) fn evict_oldest(&self) {
        let mut state = self.state.lock();
        let is_authenticated = |holder: &Holder| !matches!(holder, Holder::Network(_));
        let most = state
            .idle
            .iter()
            .max_by_key(|(holder, row)| (!is_authenticated(holder), row.len()))
            .map(|(holder, _)| *holder);
        if let Some(holder) = most {
            state.evict(holder);
        }
    }

    #[cfg(test)]
    fn count(&self) -> usize {
        let state = self.state.lock();
        state.idle.values().map(BTreeMap::len).sum::<usize>() + state.of_users.len()
    }
}

/// One open connection, registered until it is dropped.
#[derive(Debug)]
pub(crate) struct TrackedConnection {
    shares: Arc<ConnectionShares>,
    holder: Mutex<Holder>,
    position: AtomicU64,
    closed: Arc<Notify>,
    requests: AtomicUsize,
}

impl TrackedConnection {
    /// Completes when the connection must be closed in favour of a newer one.
    pub(crate) async fn closed(&self) {
        self.closed.notified().await;
    }

    /// Marks the connection as busy until the returned guard is dropped.
    pub(crate) fn request(self: &Arc<Self>) -> RequestGuard {
        if self.requests.fetch_add(1, Ordering::AcqRel) == 0 {
            let holder = self.holder.lock();
            self.shares.state.lock().forget_idle(*holder, self.position.load(Ordering::Acquire));
        }
        RequestGuard(Arc::clone(self))
    }

    /// Called during a request, while the connection is not idle.
    fn mark_known(&self, user: Option<UserId>) {
        let now = user.map_or(Holder::Operator, Holder::User);
        let mut holder = self.holder.lock();
        if *holder == now {
            return;
        }
        let mut state = self.shares.state.lock();
        state.uncount(*holder);
        *holder = now;
        if let Some(user) = user {
            let count = state.of_users.entry(user).or_default();
            *count += 1;
            if *count > self.shares.user_share && !state.evict(now) {
                self.closed.notify_one();
            }
        }
    }

    /// Registers the connection as idle.
    fn wait(&self) {
        let holder = self.holder.lock();
        if *holder == Holder::Operator {
            return;
        }
        let position = self.shares.next.fetch_add(1, Ordering::Relaxed);
        self.position.store(position, Ordering::Release);
        let mut state = self.shares.state.lock();
        let row = state.idle.entry(*holder).or_default();
        row.insert(position, Arc::clone(&self.closed));
        if matches!(*holder, Holder::Network(_)) && row.len() > self.shares.address_share {
            state.evict(*holder);
        }
    }
}

impl Drop for TrackedConnection {
    fn drop(&mut self) {
        let holder = *self.holder.lock();
        let mut state = self.shares.state.lock();
        state.forget_idle(holder, self.position.load(Ordering::Acquire));
        state.uncount(holder);
    }
}

/// A request in progress.
pub(crate) struct RequestGuard(Arc<TrackedConnection>);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        if self.0.requests.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn from(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn user(number: u128) -> Option<UserId> {
        Some(UserId(uuid::Uuid::from_u128(number)))
    }

    fn is_closed(connection: &TrackedConnection) -> bool {
        connection.closed().now_or_never().is_some()
    }

    /// A connection with one completed request.
    fn authenticated(
        shares: &Arc<ConnectionShares>,
        address: &str,
        user: Option<UserId>,
    ) -> Arc<TrackedConnection> {
        let connection = shares.connected(from(address));
        let _answering = connection.request();
        connection.mark_known(user);
        Arc::clone(&connection)
    }

    #[test]
    fn only_the_oldest_unauthenticated_connection_of_an_address_is_evicted() {
        let shares = Arc::new(ConnectionShares::new(8));
        let other = shares.connected(from("10.0.0.2"));
        let all: Vec<_> = (0..3).map(|_| shares.connected(from("10.0.0.1"))).collect();
        assert_eq!(all.iter().map(|one| is_closed(one)).collect::<Vec<_>>(), [true, false, false]);
        assert!(!is_closed(&other));
        drop((all, other));
        assert_eq!(shares.count(), 0, "nothing is remembered of those who left");
    }

    #[test]
    fn eviction_hits_the_address_with_the_most_connections() {
        let shares = Arc::new(ConnectionShares::new(100));
        let one = shares.connected(from("10.0.0.1"));
        let many: Vec<_> = (0..3).map(|_| shares.connected(from("10.0.0.2"))).collect();
        shares.evict_oldest();
        assert!(!is_closed(&one) && is_closed(&many[0]) && !is_closed(&many[1]));
        drop((one, many));
        // No connection is left to evict.
        shares.evict_oldest();
        assert_eq!(shares.count(), 0);
    }

    #[test]
    fn authenticated_and_active_connections_do_not_count_for_their_address() {
        let shares = Arc::new(ConnectionShares::new(4));
        let known = authenticated(&shares, "10.0.0.1", user(1));
        let refreshing = shares.connected(from("10.0.0.1"));
        let answering = refreshing.request();
        let idle = shares.connected(from("10.0.0.1"));
        assert!(!is_closed(&known) && !is_closed(&refreshing) && !is_closed(&idle));
        // An unauthenticated request puts the connection back in line, as the newest.
        drop(answering);
        assert!(!is_closed(&known) && !is_closed(&refreshing) && is_closed(&idle));
    }

    #[test]
    fn a_user_above_the_connection_share_loses_the_oldest_idle_connection() {
        let shares = Arc::new(ConnectionShares::new(4));
        let other = authenticated(&shares, "10.0.0.1", user(2));
        let own: Vec<_> = (0..3).map(|_| authenticated(&shares, "10.0.0.1", user(1))).collect();
        assert_eq!(own.iter().map(|one| is_closed(one)).collect::<Vec<_>>(), [true, false, false]);
        assert!(!is_closed(&other));
        drop((own, other));
        assert_eq!(shares.count(), 0);
    }

    #[test]
    fn a_user_whose_connections_are_all_busy_gets_no_further_one() {
        let shares = Arc::new(ConnectionShares::new(4));
        let (mut busy, mut answering) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            let connection = shares.connected(from("10.0.0.1"));
            answering.push(connection.request());
            busy.push(connection);
        }
        for connection in &busy {
            connection.mark_known(user(1));
            connection.mark_known(user(1));
        }
        assert_eq!(busy.iter().map(|one| is_closed(one)).collect::<Vec<_>>(), [false, false, true]);
        drop((answering, busy));
        assert_eq!(shares.count(), 0);
    }

    #[test]
    fn connections_of_the_operators_programs_are_not_counted() {
        let shares = Arc::new(ConnectionShares::new(4));
        let all: Vec<_> = (0..9).map(|_| authenticated(&shares, "10.0.0.1", None)).collect();
        shares.evict_oldest();
        assert!(all.iter().all(|connection| !is_closed(connection)));
        assert_eq!(shares.count(), 0);
    }

    #[test]
    fn without_permits_unauthenticated_connections_are_evicted_before_idle_ones_of_users() {
        let shares = Arc::new(ConnectionShares::new(100));
        let known: Vec<_> = (0..3).map(|_| authenticated(&shares, "10.0.0.1", user(1))).collect();
        let newcomer = shares.connected(from("10.0.0.2"));
        shares.evict_oldest();
        assert!(is_closed(&newcomer) && known.iter().all(|connection| !is_closed(connection)));
        drop(newcomer);
        shares.evict_oldest();
        assert_eq!(known.iter().map(|one| is_closed(one)).collect::<Vec<_>>(), [true, false, false]);
    }

    #[test]
    fn an_ipv6_network_shares_one_connection_limit() {
        let shares = Arc::new(ConnectionShares::new(4));
        let first = shares.connected(from("2001:db8:0:7::1"));
        let far = shares.connected(from("2001:db8:0:8::1"));
        let second = shares.connected(from("2001:db8:0:7:ffff::2"));
        assert!(is_closed(&first) && !is_closed(&far) && !is_closed(&second));
        assert_eq!(client_network(from("::ffff:10.0.0.1")), from("10.0.0.1"));
    }
}
