//! Limit of unauthenticated connections per address.
//!
//! A connection counts until a request on it has authenticated, and not while one of its requests is answered. When an
//! address exceeds its share, its oldest connection is closed: a client that opens thousands of idle connections closes
//! only those, and blocks neither other addresses nor other clients behind the same address.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Number of addresses that together can fill all permits with unauthenticated connections.
const ADDRESS_SHARES: usize = 4;

tokio::task_local! {
    /// Connection of the current request.
    pub(crate) static CURRENT_CONNECTION: Arc<TrackedConnection>;
}

/// Marks the connection of the current request as authenticated.
pub(crate) fn mark_authenticated() {
    // Work outside of a request has no connection.
    let _ = CURRENT_CONNECTION.try_with(|connection| connection.mark_known());
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

/// Unauthenticated connections by network, oldest first.
type ConnectionsByNetwork = HashMap<IpAddr, BTreeMap<u64, Arc<Notify>>>;

#[derive(Debug)]
pub(crate) struct UnauthenticatedConnections {
    share: usize,
    next: AtomicU64,
    waiting: Mutex<ConnectionsByNetwork>,
}

impl UnauthenticatedConnections {
    /// Creates the limit for a server with `connections_max` connections.
    pub(crate) fn new(connections_max: usize) -> Self {
        let share = (connections_max / ADDRESS_SHARES).max(1);
        Self { share, next: AtomicU64::new(0), waiting: Mutex::default() }
    }

    /// Registers a new connection.
    pub(crate) fn connected(self: &Arc<Self>, from: IpAddr) -> Arc<TrackedConnection> {
        let connection = TrackedConnection {
            newcomers: Arc::clone(self),
            from: client_network(from),
            position: AtomicU64::new(0),
            closed: Arc::new(Notify::new()),
            requests: AtomicUsize::new(0),
            is_known: AtomicBool::new(false),
        };
        connection.wait();
        Arc::new(connection)
    }

    /// Closes the oldest unauthenticated connection of the address that has most of them. Called when all permits are
    /// in use.
    pub(crate) fn evict_oldest(&self) {
        let mut waiting = self.waiting.lock();
        let most = waiting.iter().max_by_key(|(_, row)| row.len()).map(|(from, _)| *from);
        if let Some(from) = most
            && let Some((_, oldest)) = waiting.get_mut(&from).and_then(BTreeMap::pop_first)
        {
            oldest.notify_one();
        }
    }

    #[cfg(test)]
    fn count(&self) -> usize {
        self.waiting.lock().values().map(BTreeMap::len).sum()
    }
}

/// One open connection, registered until it is dropped.
#[derive(Debug)]
pub(crate) struct TrackedConnection {
    newcomers: Arc<UnauthenticatedConnections>,
    from: IpAddr,
    position: AtomicU64,
    closed: Arc<Notify>,
    requests: AtomicUsize,
    is_known: AtomicBool,
}

impl TrackedConnection {
    /// Completes when the connection must be closed in favour of a newer one.
    pub(crate) async fn closed(&self) {
        self.closed.notified().await;
    }

    /// Excludes the connection from the limit until the returned guard is dropped.
    pub(crate) fn request(self: &Arc<Self>) -> RequestGuard {
        if self.requests.fetch_add(1, Ordering::AcqRel) == 0 {
            self.unregister();
        }
        RequestGuard(Arc::clone(self))
    }

    fn mark_known(&self) {
        self.is_known.store(true, Ordering::Release);
    }

    fn wait(&self) {
        let position = self.newcomers.next.fetch_add(1, Ordering::Relaxed);
        self.position.store(position, Ordering::Release);
        let mut waiting = self.newcomers.waiting.lock();
        let row = waiting.entry(self.from).or_default();
        row.insert(position, Arc::clone(&self.closed));
        if row.len() > self.newcomers.share
            && let Some((_, oldest)) = row.pop_first()
        {
            oldest.notify_one();
        }
    }

    fn unregister(&self) {
        let mut waiting = self.newcomers.waiting.lock();
        if let Some(row) = waiting.get_mut(&self.from) {
            row.remove(&self.position.load(Ordering::Acquire));
            if row.is_empty() {
                waiting.remove(&self.from);
            }
        }
    }
}

impl Drop for TrackedConnection {
    fn drop(&mut self) {
        self.unregister();
    }
}

/// A request in progress.
pub(crate) struct RequestGuard(Arc<TrackedConnection>);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        let is_last = self.0.requests.fetch_sub(1, Ordering::AcqRel) == 1;
        if is_last && !self.0.is_known.load(Ordering::Acquire) {
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

    fn is_closed(connection: &TrackedConnection) -> bool {
        connection.closed().now_or_never().is_some()
    }

    #[test]
    fn only_the_oldest_unauthenticated_connection_of_an_address_is_evicted() {
        let newcomers = Arc::new(UnauthenticatedConnections::new(8));
        let other = newcomers.connected(from("10.0.0.2"));
        let all: Vec<_> = (0..3).map(|_| newcomers.connected(from("10.0.0.1"))).collect();
        assert_eq!(all.iter().map(|one| is_closed(one)).collect::<Vec<_>>(), [true, false, false]);
        assert!(!is_closed(&other));
        drop((all, other));
        assert_eq!(newcomers.count(), 0, "nothing is remembered of those who left");
    }

    #[test]
    fn eviction_hits_the_address_with_the_most_connections() {
        let newcomers = Arc::new(UnauthenticatedConnections::new(100));
        let one = newcomers.connected(from("10.0.0.1"));
        let many: Vec<_> = (0..3).map(|_| newcomers.connected(from("10.0.0.2"))).collect();
        newcomers.evict_oldest();
        assert!(!is_closed(&one) && is_closed(&many[0]) && !is_closed(&many[1]));
        drop((one, many));
        // No connection is left to evict.
        newcomers.evict_oldest();
        assert_eq!(newcomers.count(), 0);
    }

    #[test]
    fn authenticated_and_active_connections_are_not_evicted() {
        let newcomers = Arc::new(UnauthenticatedConnections::new(4));
        let known = newcomers.connected(from("10.0.0.1"));
        {
            let _answering = known.request();
            known.mark_known();
        }
        let refreshing = newcomers.connected(from("10.0.0.1"));
        let answering = refreshing.request();
        let idle = newcomers.connected(from("10.0.0.1"));
        assert!(!is_closed(&known) && !is_closed(&refreshing) && !is_closed(&idle));
        // An unauthenticated request puts the connection back in line, as the newest.
        drop(answering);
        assert!(!is_closed(&known) && !is_closed(&refreshing) && is_closed(&idle));
    }

    #[test]
    fn an_ipv6_network_shares_one_connection_limit() {
        let newcomers = Arc::new(UnauthenticatedConnections::new(4));
        let first = newcomers.connected(from("2001:db8:0:7::1"));
        let far = newcomers.connected(from("2001:db8:0:8::1"));
        let second = newcomers.connected(from("2001:db8:0:7:ffff::2"));
        assert!(is_closed(&first) && !is_closed(&far) && !is_closed(&second));
        assert_eq!(client_network(from("::ffff:10.0.0.1")), from("10.0.0.1"));
    }
}
