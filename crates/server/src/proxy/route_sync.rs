//! Synchronizes the routes of this server with the database, and reports request counts.
//!
//! A sync follows each hint, or happens after [`SYNC_INTERVAL`]. Before the first request goes to a replica, this proxy
//! registers at it; when the replica has left the routes and its last request was answered, the proxy unregisters. A
//! replica that is to end waits until no proxy is registered at it.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Instant, timeout},
};
use windlass_engine::Hints;
use windlass_gateway::{
    Replica, Routes, ServiceWaker,
    route::{RouteSnapshot, Service},
    stats::TrafficTotals,
};
use windlass_model::{
    decide::replicas::Traffic,
    id::{RunId, SubmissionId},
};

use super::route_builder::RouteBuilder;
use crate::{
    app::App,
    db::{Db, DbError, service_replicas as rows},
    hints::Hint,
};

const SYNC_INTERVAL: Duration = Duration::from_secs(2);
/// Interval at which this proxy reports that it is alive, and its request counts.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);
const SWEEP_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum time to wait for requests to a replica that left the routes.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time for the first sync of a server.
const FIRST_SYNC_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct RouteSync {
    db: Db,
    hints: Hints,
    routes: Arc<Routes>,
    /// Id of this proxy, new with each start.
    id: String,
    state: Mutex<SyncState>,
    /// Notified when a request waits for a service without replicas.
    woken: Notify,
}

#[derive(Default)]
struct SyncState {
    known: RouteBuilder,
    current: Vec<Service>,
    runs: HashMap<String, RunId>,
    seats: HashSet<SubmissionId>,
    /// Counts of each service at the last report.
    reported_totals: HashMap<RunId, TrafficTotals>,
    reported: Option<Instant>,
    swept: Option<Instant>,
}

impl ServiceWaker for RouteSync {
    fn wake(&self, _project: &str, _run: &str) {
        self.woken.notify_one();
    }
}

impl RouteSync {
    pub(super) fn new(app: &App) -> Self {
        Self {
            db: app.db().clone(),
            hints: app.hints().clone(),
            routes: Arc::clone(app.routes()),
            id: app.next_request_id(),
            state: Mutex::default(),
            woken: Notify::new(),
        }
    }

    /// Runs the first sync. If the database does not answer, a later sync retries.
    pub(super) async fn begin(self: &Arc<Self>) {
        match timeout(FIRST_SYNC_TIMEOUT, self.sync_routes()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "failed to read the routes"),
            Err(_) => tracing::warn!("timed out reading the routes from the database"),
        }
    }

    pub(super) async fn run(self: Arc<Self>) {
        let hints = self.hints.subscribe(Hint::Routes.as_str());
        loop {
            let woken = tokio::select! {
                () = self.woken.notified() => true,
                _ = timeout(SYNC_INTERVAL, hints.wait()) => false,
            };
            if let Err(error) = self.sync_routes().await {
                // The known replicas keep receiving requests.
                tracing::debug!(%error, "failed to read the routes");
            }
            if let Err(error) = self.report(woken).await {
                tracing::debug!(%error, "failed to report the requests of services");
            }
            self.routes.sweep();
        }
    }

    /// Unregisters this proxy: it forwards no more requests.
    pub(super) async fn end(&self) {
        if let Err(error) = rows::remove_proxy(&self.db, &self.id).await {
            tracing::debug!(%error, "failed to unregister this proxy");
        }
    }

    async fn sync_routes(self: &Arc<Self>) -> Result<(), DbError> {
        let services = rows::services(&self.db).await?;
        let ready = if services.is_empty() { Vec::new() } else { rows::ready_replicas(&self.db).await? };
        let (routes, fresh) = {
            let mut state = self.state.lock();
            let routes = state.known.routes(&services, &ready);
            state.runs =
                services.iter().map(|one| (format!("{}/{}", one.project, one.name), one.run)).collect();
            if routes == state.current {
                return Ok(());
            }
            let fresh: Vec<_> =
                ready.iter().map(|replica| replica.id).filter(|id| !state.seats.contains(id)).collect();
            (routes, fresh)
        };
        if !fresh.is_empty() {
            rows::record_proxy(&self.db, &self.id, &fresh).await?;
        }
        let leaving = {
            let mut state = self.state.lock();
            state.seats.extend(fresh);
            state.current.clone_from(&routes);
            let generation = self.routes.generation() + 1;
            self.routes.replace(RouteSnapshot { generation, services: routes }).unwrap_or_default()
        };
        for replica in leaving {
            tokio::spawn(Arc::clone(self).drain(replica));
        }
        Ok(())
    }

    /// Unregisters at a replica that left the routes, once its last request was answered.
    async fn drain(self: Arc<Self>, replica: Arc<Replica>) {
        let drained = replica.drain(DRAIN_TIMEOUT).await;
        let Ok(job) = replica.id().parse::<SubmissionId>() else { return };
        tracing::debug!(%job, ?drained, "replica drained");
        self.state.lock().seats.remove(&job);
        match rows::release_seat(&self.db, &self.id, job).await {
            Ok(()) => self.hints.hint(Hint::JobsTerminating.as_str()),
            Err(error) => tracing::debug!(%error, %job, "failed to unregister at a replica"),
        }
    }

    /// Reports that this proxy is alive, and the requests since the last report.
    async fn report(&self, woken: bool) -> Result<(), DbError> {
        let now = Instant::now();
        let (came, asleep) = {
            let mut state = self.state.lock();
            let is_due = state.reported.is_none_or(|at| now.duration_since(at) >= REPORT_INTERVAL);
            if !woken && !is_due || state.current.is_empty() && state.seats.is_empty() {
                return Ok(());
            }
            state.reported = Some(now);
            let mut came = Vec::new();
            let mut asleep = Vec::new();
            for live in self.routes.services() {
                let service = live.service();
                let Some(run) = state.runs.get(&format!("{}/{}", service.project, service.run)).copied()
                else {
                    continue;
                };
                let total = TrafficTotals::now(live.stats(), now.into_std());
                let before = state.reported_totals.insert(run, total).unwrap_or_default();
                if let Some(since) = total.since(before) {
                    let TrafficTotals { requests, in_flight_us, held_us, answers } = since;
                    let traffic = Traffic { requests, in_flight_us, waiting_us: held_us };
                    let answers = serde_json::to_string(&answers.wire()).ok();
                    came.push(rows::ServiceTraffic { run, traffic, answers });
                    if live.replicas().is_empty() {
                        asleep.push(run);
                    }
                }
            }
            (came, asleep)
        };
        rows::record_proxy(&self.db, &self.id, &[]).await?;
        if !came.is_empty() {
            rows::record_traffic(&self.db, &self.id, &came, &asleep).await?;
            if !asleep.is_empty() {
                self.hints.hint("runs");
            }
        }
        let sweeps = {
            let mut state = self.state.lock();
            let is_due = state.swept.is_none_or(|at| now.duration_since(at) >= SWEEP_INTERVAL);
            if is_due {
                state.swept = Some(now);
            }
            is_due
        };
        if sweeps { rows::sweep(&self.db).await } else { Ok(()) }
    }
}
