//! State that every part of the server shares. Cheap to clone; every clone is the same server.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicU64, Ordering},
};

use tokio::sync::watch;
use windlass_api::runs as wire;
use windlass_backend::Backends;
use windlass_engine::Hints;
use windlass_gateway::Routes;

use crate::{
    StartError,
    agents::AgentApi,
    auth::AccessCache,
    change_feed::ChangeFeed,
    config::Settings,
    configured_backends::MissingBackend,
    db::Db,
    encryption::Keyring,
    error::Error,
    hints::Hint,
    image_lookup::ImageLookup,
    logs::{mask::MaskCache, notifying_store::NotifyingLogStore, readers::LogReaders},
    metrics::Metrics,
    offer_cache::OfferCache,
    oidc::OidcClient,
    rate_limit::RateLimiter,
    services::runs::RenderedRunCache,
    stream_rights::StreamRights,
};

#[derive(Clone)]
pub struct App(Arc<Inner>);

/// Weak reference to the server, for parts that the server owns.
pub struct WeakApp(std::sync::Weak<Inner>);

impl WeakApp {
    pub fn upgrade(&self) -> Option<App> {
        self.0.upgrade().map(App)
    }
}

struct Inner {
    db: Db,
    settings: Settings,
    keys: Arc<Keyring>,
    masks: MaskCache,
    metrics: Metrics,
    access: AccessCache,
    stream_rights: StreamRights,
    changes: ChangeFeed,
    paces: RateLimiter,
    hints: Hints,
    logs: Arc<NotifyingLogStore>,
    backends: Backends,
    tails: LogReaders,
    /// Set once, to end responses that would otherwise not end.
    closing: watch::Sender<bool>,
    market: OfferCache,
    images: ImageLookup,
    oidc: Option<OidcClient>,
    finished_runs: RenderedRunCache<wire::Run>,
    /// Services that are reached through this server.
    routes: Arc<Routes>,
    /// Incremented with every change of the container queue in this process.
    queue: watch::Sender<u64>,
    /// Connections to the hosts; unset where no pipelines run.
    agents: OnceLock<Arc<dyn AgentApi>>,
    /// Names requests together with `requests`: random per process, so that logs of replicas can be joined.
    process: String,
    requests: AtomicU64,
}

impl App {
    /// Creates a server without backends.
    pub fn new(db: Db, settings: Settings, keys: Keyring) -> Result<Self, StartError> {
        Self::with_backends(db, settings, keys, Backends::default())
    }

    pub fn with_backends(
        db: Db,
        settings: Settings,
        keys: Keyring,
        backends: Backends,
    ) -> Result<Self, StartError> {
        let mut process = [0_u8; 6];
        getrandom::fill(&mut process)?;
        let logs = Arc::new(NotifyingLogStore::new(settings.log_store.open(settings.data_dir.join("logs"))?));
        let hints = Hints::new();
        let keys = Arc::new(keys);
        let masks = MaskCache::new(db.clone(), Arc::clone(&keys), settings.mask_secrets);
        let tails = LogReaders::new(db.clone(), Arc::clone(&logs), hints.clone(), masks.clone());
        Ok(Self(Arc::new(Inner {
            db,
            paces: RateLimiter::new(settings.paces),
            images: ImageLookup::new(
                settings.image_lookup,
                settings.insecure_registries.clone(),
                settings.registry_networks.clone(),
            ),
            oidc: settings.oidc.clone().map(OidcClient::new),
            settings,
            keys,
            masks,
            metrics: Metrics::new(),
            access: AccessCache::default(),
            stream_rights: StreamRights::default(),
            changes: ChangeFeed::default(),
            hints,
            logs,
            market: OfferCache::new(backends.clone()),
            backends,
            tails,
            closing: watch::Sender::new(false),
            finished_runs: RenderedRunCache::default(),
            routes: Arc::new(Routes::default()),
            queue: watch::Sender::new(0),
            agents: OnceLock::new(),
            process: hex::encode(process),
            requests: AtomicU64::new(1),
        })))
    }

    pub fn downgrade(&self) -> WeakApp {
        WeakApp(Arc::downgrade(&self.0))
    }

    pub fn db(&self) -> &Db {
        &self.0.db
    }

    pub fn settings(&self) -> &Settings {
        &self.0.settings
    }

    /// Client of the identity provider, if one is set.
    pub(crate) fn oidc(&self) -> Option<&OidcClient> {
        self.0.oidc.as_ref()
    }

    pub fn keys(&self) -> &Arc<Keyring> {
        &self.0.keys
    }

    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    pub fn access(&self) -> &AccessCache {
        &self.0.access
    }

    /// Streams that end when their callers lose the required rights.
    pub(crate) fn stream_rights(&self) -> &StreamRights {
        &self.0.stream_rights
    }

    /// Feed of changes.
    pub(crate) fn changes(&self) -> &ChangeFeed {
        &self.0.changes
    }

    /// Rate limits of callers.
    pub fn paces(&self) -> &RateLimiter {
        &self.0.paces
    }

    /// Cache of finished runs, as lists show them.
    pub(crate) fn finished_runs(&self) -> &RenderedRunCache<wire::Run> {
        &self.0.finished_runs
    }

    /// Logs of jobs.
    pub fn logs(&self) -> &Arc<NotifyingLogStore> {
        &self.0.logs
    }

    /// Rejects names of backends that this server does not have: the request could never be fulfilled.
    pub fn check_backends<'a>(&self, named: impl IntoIterator<Item = &'a str>) -> Result<(), Error> {
        self.missing_backend(named).map_or(Ok(()), |missing| Err(missing.refusal(None)))
    }

    /// Returns the first of these backends that this server does not have.
    pub(crate) fn missing_backend<'a>(
        &self,
        named: impl IntoIterator<Item = &'a str>,
    ) -> Option<MissingBackend> {
        let has: Vec<&str> = self.0.backends.all().map(|backend| backend.name()).collect();
        // A server that only keeps records has none at all.
        let missing = named.into_iter().find(|name| !has.is_empty() && !has.contains(name))?;
        Some(MissingBackend::new(missing, &has))
    }

    /// Providers of instances.
    pub fn backends(&self) -> &Backends {
        &self.0.backends
    }

    /// Secrets that are masked in logs.
    pub(crate) fn masks(&self) -> &MaskCache {
        &self.0.masks
    }

    /// Readers that follow logs.
    pub fn tails(&self) -> &LogReaders {
        &self.0.tails
    }

    /// Connections to hosts, if they are set.
    pub fn agents(&self) -> Option<&Arc<dyn AgentApi>> {
        self.0.agents.get()
    }

    /// Sets the connections to hosts. Called once, by the code that starts the pipelines.
    pub fn set_agents(&self, agents: Arc<dyn AgentApi>) {
        let _ = self.0.agents.set(agents);
    }

    /// Ends responses that would last forever: the server stops.
    pub fn close(&self) {
        self.0.closing.send_replace(true);
    }

    /// Returns when the server stops.
    pub async fn closed(&self) {
        // The sender lives as long as this.
        let _ = self.0.closing.subscribe().wait_for(|closing| *closing).await;
    }

    /// Notifies listeners after a commit to the container queue.
    pub fn notify_queue_changed(&self) {
        self.0.queue.send_modify(|count| *count = count.wrapping_add(1));
    }

    pub fn subscribe_queue(&self) -> watch::Receiver<u64> {
        self.0.queue.subscribe()
    }

    /// Offers of the backends.
    pub fn market(&self) -> &OfferCache {
        &self.0.market
    }

    /// Images as their registries describe them.
    pub(crate) fn images(&self) -> &ImageLookup {
        &self.0.images
    }

    /// Services that are reached through this server.
    pub fn routes(&self) -> &Arc<Routes> {
        &self.0.routes
    }

    /// Hints on which the pipelines of this replica wait.
    pub fn hints(&self) -> &Hints {
        &self.0.hints
    }

    /// Hints pipelines, after a commit that made work for them.
    pub fn wake(&self, hints: &[Hint]) {
        for hint in hints {
            self.0.hints.hint(hint.as_str());
        }
    }

    pub fn next_request_id(&self) -> String {
        format!("{}-{}", self.0.process, self.0.requests.fetch_add(1, Ordering::Relaxed))
    }
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("App").field("settings", self.settings()).finish_non_exhaustive()
    }
}
