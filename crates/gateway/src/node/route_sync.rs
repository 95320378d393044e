//! Synchronises the routes of a gateway with the server, and reports its traffic.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::timeout};
use uuid::Uuid;
use windlass_api::{
    gateways::{GatewayReport, LeaveRequest, RoutesRequest, TrafficReport},
    operations::{LeaveGateway, ReadGatewayRoutes, ReportGateway},
};

use super::{
    SavedRoutes,
    certificates::CertificateManager,
    replica_connector::ReplicaConnector,
    server::{ServerClient, ServerError},
};
use crate::{
    connect::Connector,
    gateway_config,
    replica::Replica,
    route_cache_file::{self, RouteFileError},
    route_table::Routes,
    scale_from_zero::ServiceWaker,
    serve::OwnHostname,
    stats::TrafficTotals,
};

/// Long-poll wait: the server responds by then, changed or not.
const POLL_WAIT: Duration = Duration::from_secs(8);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval of traffic reports. The server considers a gateway lost after three missing reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);
const REPORT_TIMEOUT: Duration = Duration::from_secs(4);
/// Delay between two attempts to reach an unreachable server.
const RETRY_DELAY: Duration = Duration::from_millis(500);
/// Maximum time to wait for requests to a replica that was removed.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

pub(super) struct RouteSync {
    server: Arc<ServerClient>,
    id: Uuid,
    address: Option<String>,
    file: PathBuf,
    /// Manager of certificates, if HTTPS is enabled.
    certificates: Option<Arc<CertificateManager>>,
    own_hostname: Arc<OwnHostname>,
    routes: Arc<Routes>,
    connector: Arc<ReplicaConnector>,
    state: Mutex<SyncState>,
    /// Notified when a report is due at once.
    report_due: Notify,
}

#[derive(Default)]
struct SyncState {
    version: Option<String>,
    /// Counters of each service at the last report.
    reported: HashMap<String, TrafficTotals>,
    drained: Vec<Uuid>,
    /// Last error of the server connection; logged once.
    last_error: Option<String>,
}

impl ServiceWaker for RouteSync {
    fn wake(&self, _project: &str, _run: &str) {
        self.report_due.notify_one();
    }
}

impl RouteSync {
    pub(super) fn new(
        server: Arc<ServerClient>,
        id: Uuid,
        address: Option<String>,
        state: &Path,
        certificates: Option<Arc<CertificateManager>>,
    ) -> Self {
        Self {
            server,
            id,
            address,
            file: state.join("routes"),
            certificates,
            own_hostname: Arc::default(),
            routes: Arc::default(),
            connector: Arc::new(ReplicaConnector::new()),
            state: Mutex::default(),
            report_due: Notify::new(),
        }
    }

    pub(super) fn routes(&self) -> &Arc<Routes> {
        &self.routes
    }

    /// Returns the name of the gateway itself.
    pub(super) fn own(&self) -> Arc<OwnHostname> {
        Arc::clone(&self.own_hostname)
    }

    /// Returns the metrics of the connection to the server, for Prometheus.
    pub(super) fn metrics(&self) -> String {
        let reached = u8::from(self.state.lock().last_error.is_none());
        format!(
            "# HELP windlass_gateway_server_reached Whether the last request to the server succeeded.\n\
             # TYPE windlass_gateway_server_reached gauge\nwindlass_gateway_server_reached {reached}\n\
             # HELP windlass_gateway_generation Number of route changes in this process.\n\
             # TYPE windlass_gateway_generation gauge\nwindlass_gateway_generation {}\n",
            self.routes.generation()
        )
    }

    /// Applies the settings that come with the routes.
    fn apply_settings(&self, reported: &gateway_config::GatewayConfig) {
        self.own_hostname.set(reported.own.as_deref());
        if let Some(certificates) = &self.certificates {
            certificates.update(reported);
        }
    }

    pub(super) fn connector(&self) -> Arc<dyn Connector> {
        Arc::clone(&self.connector) as Arc<dyn Connector>
    }

    /// Loads the stored routes. A damaged file is logged and ignored; the routes then come from the server.
    pub(super) fn restore(&self) -> Result<(), RouteFileError> {
        match SavedRoutes::read(&self.file) {
            Ok(None) => {}
            Ok(Some(kept)) => {
                self.apply_settings(&kept.reported);
                self.connector.replace(kept.reported.sites.clone());
                if let Err(stale) = self.routes.replace(kept.snapshot()) {
                    tracing::warn!(%stale, "failed to apply stored routes");
                }
            }
            Err(error @ RouteFileError::Damaged { .. }) | Err(error @ RouteFileError::Content { .. }) => {
                tracing::warn!(%error, "failed to load stored routes");
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Polls the server for routes until dropped.
    pub(super) async fn run(self: Arc<Self>) {
        loop {
            let requested = RoutesRequest {
                node: self.id,
                address: self.address.clone(),
                version: self.state.lock().version.clone(),
                wait_ms: u64::try_from(POLL_WAIT.as_millis()).unwrap_or_default(),
            };
            match self.server.call::<ReadGatewayRoutes>(&requested, RESPONSE_TIMEOUT).await {
                Ok(answer) => {
                    self.mark_reachable();
                    let Some(document) = answer.routes else { continue };
                    match serde_json::from_str::<gateway_config::GatewayConfig>(document.text()) {
                        Ok(reported) => self.apply_routes(answer.version, reported).await,
                        Err(error) => {
                            tracing::error!(%error, "failed to parse routes; the server may be newer than this gateway");
                            tokio::time::sleep(RETRY_DELAY).await;
                        }
                    }
                }
                Err(error) => {
                    self.mark_unreachable(&error);
                    tokio::time::sleep(RETRY_DELAY).await;
                }
            }
        }
    }

    fn mark_reachable(&self) {
        if self.state.lock().last_error.take().is_some() {
            tracing::info!("server is reachable again");
        }
    }

    fn mark_unreachable(&self, error: &ServerError) {
        let text = error.to_string();
        let mut state = self.state.lock();
        if state.last_error.as_ref() != Some(&text) {
            tracing::warn!(%error, "failed to fetch routes; continuing with the known ones");
            state.last_error = Some(text);
        }
    }

    async fn apply_routes(self: &Arc<Self>, version: String, mut reported: gateway_config::GatewayConfig) {
        for service in &mut reported.services {
            // A redirect to HTTPS requires an HTTPS listener.
            service.https &= self.certificates.is_some();
        }
        self.apply_settings(&reported);
        let kept =
            SavedRoutes { generation: self.routes.generation() + 1, version: version.clone(), reported };
        // Sites first, so that every replica in the routes can be reached.
        self.connector.replace(kept.reported.sites.clone());
        let leaving = self.routes.replace(kept.snapshot()).unwrap_or_default();
        self.state.lock().version = Some(version);
        tracing::info!(
            generation = kept.generation,
            services = kept.reported.services.len(),
            "routes updated"
        );
        for replica in leaving {
            tokio::spawn(Arc::clone(self).drain(replica));
        }
        let file = self.file.clone();
        let saved = tokio::task::spawn_blocking(move || route_cache_file::save(&file, &kept)).await;
        if let Ok(Err(error)) = saved {
            tracing::warn!(%error, "failed to store routes");
        }
    }

    async fn drain(self: Arc<Self>, replica: Arc<Replica>) {
        let drained = replica.drain(DRAIN_TIMEOUT).await;
        tracing::debug!(replica = replica.id(), ?drained, "replica drained");
        if let Ok(id) = replica.id().parse() {
            self.state.lock().drained.push(id);
            self.report_due.notify_one();
        }
    }

    /// Sends traffic reports until dropped.
    pub(super) async fn run_reports(self: Arc<Self>) {
        loop {
            let _ = timeout(REPORT_INTERVAL, self.report_due.notified()).await;
            if let Err(error) = self.send_report().await {
                tracing::debug!(%error, "failed to report traffic");
                tokio::time::sleep(RETRY_DELAY).await;
            }
            self.routes.sweep();
        }
    }

    async fn send_report(&self) -> Result<(), ServerError> {
        let (now, mut totals) = (std::time::Instant::now(), Vec::new());
        let mut report = GatewayReport {
            node: self.id,
            address: self.address.clone(),
            came: Vec::new(),
            left: Vec::new(),
        };
        {
            let state = self.state.lock();
            report.left.clone_from(&state.drained);
            for live in self.routes.services() {
                let service = live.service();
                let key = format!("{}/{}", service.project, service.run);
                let total = TrafficTotals::now(live.stats(), now);
                let before = state.reported.get(&key).copied().unwrap_or_default();
                if let Some(came) = total.since(before) {
                    report.came.push(TrafficReport {
                        project: service.project.clone(),
                        run: service.run.clone(),
                        requests: came.requests,
                        in_flight_us: came.in_flight_us,
                        waiting_us: came.held_us,
                        answers: Some(came.answers.wire()),
                        asleep: live.replicas().is_empty(),
                    });
                }
                totals.push((key, total));
            }
        }
        self.server.call::<ReportGateway>(&report, REPORT_TIMEOUT).await?;
        let mut state = self.state.lock();
        state.drained.retain(|id| !report.left.contains(id));
        state.reported = totals.into_iter().collect();
        Ok(())
    }

    /// Sends the last report and deregisters this process.
    pub(super) async fn deregister(&self) {
        if let Err(error) = self.send_report().await {
            tracing::debug!(%error, "failed to send the last traffic report");
        }
        let requested = LeaveRequest { node: self.id };
        if let Err(error) = self.server.call::<LeaveGateway>(&requested, REPORT_TIMEOUT).await {
            tracing::debug!(%error, "failed to deregister");
        }
    }
}
