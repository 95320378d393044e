//! Routes in use: replaced as a whole, read without waiting.
//!
//! The counters and open connections of a service persist across route changes. A replica that a new snapshot omits
//! receives no further requests and drains.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Instant,
};

use parking_lot::RwLock;
use tokio::sync::{Notify, watch};

use crate::{
    rate_limit::RateLimits,
    replica::Replica,
    route::{Balance, RouteSnapshot, Service},
    stats::ServiceStats,
};

/// Service with its runtime state.
#[derive(Debug)]
pub struct ServiceState {
    pub(crate) key: Arc<str>,
    pub(crate) service: Service,
    pub(crate) limits: Arc<RateLimits>,
    pub(crate) replicas: Vec<Arc<Replica>>,
    persistent: Arc<PersistentState>,
}

/// State that persists across route changes.
#[derive(Debug)]
struct PersistentState {
    stats: ServiceStats,
    next: AtomicUsize,
    /// Notified when a full replica has capacity again.
    freed: Arc<Notify>,
}

impl ServiceState {
    fn new(service: Service, before: Option<&Arc<Self>>) -> Self {
        let now = Instant::now();
        let persistent = before.map_or_else(
            || {
                let freed = Arc::new(Notify::new());
                Arc::new(PersistentState { stats: ServiceStats::new(now), next: AtomicUsize::new(0), freed })
            },
            |before| Arc::clone(&before.persistent),
        );
        let replicas = service
            .groups
            .iter()
            .flat_map(|group| &group.replicas)
            .map(|replica| {
                before
                    .and_then(|before| {
                        let same =
                            |old: &&Arc<Replica>| *old.id == replica.id && old.target == replica.target;
                        before.replicas.iter().find(same).cloned()
                    })
                    .unwrap_or_else(|| Arc::new(Replica::new(replica, Arc::clone(&persistent.freed))))
            })
            .collect();
        let limits = before.filter(|before| before.service.limits == service.limits).map_or_else(
            || Arc::new(RateLimits::new(&service.limits, now)),
            |before| Arc::clone(&before.limits),
        );
        let key = format!("{}/{}", service.project, service.run).into();
        Self { key, service, limits, replicas, persistent }
    }

    pub fn service(&self) -> &Service {
        &self.service
    }

    pub fn stats(&self) -> &ServiceStats {
        &self.persistent.stats
    }

    pub fn replicas(&self) -> &[Arc<Replica>] {
        &self.replicas
    }

    /// Returns the maximum number of concurrent requests per replica.
    pub(crate) fn at_once(&self) -> usize {
        self.service.at_once.map_or(usize::MAX, |max| max as usize)
    }

    /// Returns the notification of a full replica that has capacity again.
    pub(crate) fn freed(&self) -> Arc<Notify> {
        Arc::clone(&self.persistent.freed)
    }

    /// Selects the replica for the next request. Skips those just tried and those that are full; those that recently
    /// failed come last.
    pub(crate) fn pick_replica(&self, tried: &[Arc<Replica>]) -> Option<&Arc<Replica>> {
        let count = self.replicas.len();
        let start = if count > 1 { self.persistent.next.fetch_add(1, Relaxed) % count } else { 0 };
        let (late, early) = self.replicas.split_at_checked(start)?;
        let max = self.at_once();
        let able = || {
            early.iter().chain(late).filter(|replica| {
                !replica.is_down()
                    && replica.outstanding() < max
                    && !tried.iter().any(|other| Arc::ptr_eq(other, replica))
            })
        };
        let well = || able().filter(|replica| !replica.is_ejected());
        match self.service.balance {
            Balance::RoundRobin => well().next(),
            Balance::LeastOutstanding => well().min_by_key(|replica| replica.outstanding()),
        }
        .or_else(|| able().next())
    }
}

/// One generation of routes.
#[derive(Debug, Default)]
struct RouteGeneration {
    generation: u64,
    services: HashMap<Arc<str>, Arc<ServiceState>>,
    hosts: HashMap<Box<str>, Arc<ServiceState>>,
    /// By the part after `*.`.
    wildcards: HashMap<Box<str>, Arc<ServiceState>>,
}

/// Refusal of a snapshot that is not newer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("route generation {offered} is not newer than {current}")]
pub struct StaleGeneration {
    pub current: u64,
    pub offered: u64,
}

#[derive(Debug)]
pub struct Routes {
    table: RwLock<Arc<RouteGeneration>>,
    generation: watch::Sender<u64>,
}

impl Default for Routes {
    fn default() -> Self {
        Self { table: RwLock::default(), generation: watch::Sender::new(0) }
    }
}

impl Routes {
    /// Applies a newer snapshot. Returns the replicas that it omits: they drain.
    pub fn replace(&self, snapshot: RouteSnapshot) -> Result<Vec<Arc<Replica>>, StaleGeneration> {
        let mut slot = self.table.write();
        let old = Arc::clone(&slot);
        if snapshot.generation <= old.generation {
            return Err(StaleGeneration { current: old.generation, offered: snapshot.generation });
        }
        let generation = snapshot.generation;
        let mut table = RouteGeneration { generation, ..RouteGeneration::default() };
        for service in snapshot.services {
            let key = format!("{}/{}", service.project, service.run);
            let live = Arc::new(ServiceState::new(service, old.services.get(key.as_str())));
            for domain in &live.service.domains {
                let domain = domain.to_ascii_lowercase();
                match domain.strip_prefix("*.") {
                    Some(rest) => table.wildcards.insert(rest.into(), Arc::clone(&live)),
                    None => table.hosts.insert(domain.into(), Arc::clone(&live)),
                };
            }
            table.services.insert(Arc::clone(&live.key), live);
        }
        let kept: HashSet<*const Replica> =
            table.services.values().flat_map(|live| &live.replicas).map(Arc::as_ptr).collect();
        let leaving: Vec<Arc<Replica>> = old
            .services
            .values()
            .flat_map(|live| &live.replicas)
            .filter(|replica| !kept.contains(&Arc::as_ptr(replica)))
            .cloned()
            .collect();
        *slot = Arc::new(table);
        drop(slot);
        for replica in &leaving {
            replica.begin_drain();
        }
        self.generation.send_replace(generation);
        Ok(leaving)
    }

    fn table(&self) -> Arc<RouteGeneration> {
        Arc::clone(&self.table.read())
    }

    pub fn generation(&self) -> u64 {
        self.table.read().generation
    }

    /// Subscribes to changes of the generation.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    /// Finds a service by `project/run`.
    pub fn service(&self, key: &str) -> Option<Arc<ServiceState>> {
        self.table.read().services.get(key).cloned()
    }

    /// Finds a service by host name, case-insensitively. An exact name takes precedence over a wildcard.
    pub fn host(&self, name: &str) -> Option<Arc<ServiceState>> {
        if name.bytes().any(|b| b.is_ascii_uppercase()) {
            return self.find_by_lowercase_host(&name.to_ascii_lowercase());
        }
        self.find_by_lowercase_host(name)
    }

    fn find_by_lowercase_host(&self, name: &str) -> Option<Arc<ServiceState>> {
        let table = self.table.read();
        table
            .hosts
            .get(name)
            .or_else(|| name.split_once('.').and_then(|(_, rest)| table.wildcards.get(rest)))
            .cloned()
    }

    pub fn services(&self) -> Vec<Arc<ServiceState>> {
        self.table().services.values().cloned().collect()
    }

    /// Returns the present routes as a snapshot.
    pub fn snapshot(&self) -> RouteSnapshot {
        let table = self.table();
        let mut services: Vec<Service> = table.services.values().map(|live| live.service.clone()).collect();
        services.sort_by(|a, b| (&a.project, &a.run).cmp(&(&b.project, &b.run)));
        RouteSnapshot { generation: table.generation, services }
    }

    /// Closes idle connections that are too old or were closed by replicas. To be called every few seconds.
    pub fn sweep(&self) {
        for live in self.table().services.values() {
            for replica in &live.replicas {
                replica.close_stale();
            }
        }
    }
}
