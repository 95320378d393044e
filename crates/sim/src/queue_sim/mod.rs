//! Simulation of the container queue: the real server and the real dispatchers, on virtual time, over a lower scheduler
//! that fails in every possible way.
//!
//! One seed is one history: two hundred requests, one or two dispatchers that are killed at any await, each with a pool
//! of at most ten workers that start late, fail to start or to stop, become silent, break, or have no executor.
//! Executors crash, hang, or continue unobserved. Requests, responses and commands are lost; the server is overloaded
//! once. Users change priorities, cancel requests, and hold some for a while. At the end every container must have
//! ended exactly once, and nothing may remain of it.

mod checks;
mod executor;
mod pool;
mod pool_scheduler;
mod transport;

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};
use windlass_api::queue_client::{QueueHttpClient, percent_encode};
use windlass_dispatch::{
    queue_client::QueueClient,
    reconcile_loop::{Dispatcher, Settings as Ways},
};
use windlass_model::{dispatch::ContainerNeeds, time::Span};
use windlass_server::{
    app::App,
    config::{Settings, SettingsSource},
    db::Db,
    encryption::Keyring,
    routes,
    services::bootstrap,
};

use self::{
    pool::Pool,
    pool_scheduler::PoolScheduler,
    transport::{Caller, FaultyTransport},
};
use crate::{invariants::Violation, rng::Rng, runs::Report};

const TOKEN: &str = "simulated-token-0123456789abcdef0123456789";
/// 2026-01-01, the start of every simulated history.
const EPOCH_US: i64 = 1_767_225_600_000_000;
const CONTAINERS: u64 = 200;
/// Duration of user actions and faults.
const FAULT_PERIOD: Duration = Duration::from_secs(15 * 60);
/// Maximum time without any progress, until everything has ended.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// Time limit for the cleanup after the last container has ended.
const EMPTY_TIMEOUT: Duration = Duration::from_secs(15 * 60);
const DISPATCH_INTERVAL: Duration = Duration::from_secs(5);
const CHECK_INTERVAL: Duration = Duration::from_secs(20);
const GIB: u64 = 1 << 30;

/// Shared state of all parts, which the checks read.
#[derive(Default)]
struct QueueState {
    pools: Vec<Pool>,
    /// Started programs, in order.
    started: Vec<ProgramStart>,
    /// Tokens of executors: container, attempt, token.
    tokens: Vec<(String, u64, String)>,
    /// Granted locks, with the containers for which the dispatcher still had jobs at that time.
    locks: Vec<LockRecord>,
    /// Start times of each dispatcher's recent rounds.
    rounds: Vec<Vec<Instant>>,
    /// Locks that failed without a fault of the queue: dispatcher, container, time.
    missed: Vec<(usize, String, Instant)>,
    fired: BTreeMap<&'static str, u64>,
    violations: Vec<Violation>,
    calls: u64,
    overloaded_until: Option<Instant>,
}

struct ProgramStart {
    uuid: String,
    attempt: u64,
}

struct LockRecord {
    dispatcher: usize,
    uuid: String,
    at: Instant,
    alive: Vec<String>,
}

type SharedQueueState = Arc<Mutex<QueueState>>;

impl QueueState {
    fn record_fault(&mut self, fault: &'static str) {
        *self.fired.entry(fault).or_default() += 1;
    }

    fn record_violation(&mut self, id: &'static str, what: String) {
        self.violations.push(Violation { id, what });
    }
}

/// A request of a user.
struct SimRequest {
    request: String,
    needs: ContainerNeeds,
    is_held: bool,
}

struct QueueSim {
    seed: u64,
    rng: Rng,
    state: SharedQueueState,
    router: axum::Router,
    users: QueueHttpClient,
    started: Instant,
    tokens: Vec<String>,
    dispatchers: Vec<Option<JoinHandle<()>>>,
    requested: Vec<SimRequest>,
}

/// Runs one seed from start to end.
pub fn simulate(seed: u64) -> Result<Report> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    runtime.block_on(async { QueueSim::begin(seed).await?.play().await })
}

impl QueueSim {
    async fn begin(seed: u64) -> Result<Self> {
        let mut rng = Rng::new(seed);
        let started = Instant::now();
        let clock = move || EPOCH_US + i64::try_from(started.elapsed().as_micros()).unwrap_or(i64::MAX);
        let db = Db::open_inline(Arc::new(clock), rng.draw())?;
        let given = SettingsSource {
            // Nothing is stored there.
            data_dir: Some(PathBuf::from("/nonexistent/windlass-simulation")),
            admin_token: Some(TOKEN.to_owned()),
            no_local: Some(true),
            ..SettingsSource::default()
        };
        let settings = Settings { pipelines: false, ..Settings::new(given, None)? };
        let app = App::new(db, settings, Keyring::ephemeral()?)?;
        bootstrap::ensure(&app).await?;
        let router = routes::all_routes().into_router(app);
        let state = SharedQueueState::default();
        let transport = FaultyTransport::new(router.clone(), state.clone(), rng.fork(), Caller::User);
        let users = QueueHttpClient::with_transport(Arc::new(transport), TOKEN);
        let mut play = Self {
            seed,
            state,
            router,
            users,
            started,
            tokens: Vec::new(),
            dispatchers: Vec::new(),
            requested: Vec::new(),
            rng,
        };
        play.prepare().await?;
        Ok(play)
    }

    async fn prepare(&mut self) -> Result<()> {
        for number in 0..CONTAINERS {
            self.submit_request(number).await?;
        }
        for _ in 0..self.rng.between(1, 2) {
            let body = json!({ "api_client_authorization": { "scopes": ["dispatch"] } });
            let made = self.users.post("api_client_authorizations", &body).await?;
            let part = |name: &str| made[name].as_str().unwrap_or_default().to_owned();
            self.tokens.push(format!("v2/{}/{}", part("uuid"), part("api_token")));
            let pool = Pool::new(self.rng.fork(), self.started);
            let mut state = self.state.lock();
            state.pools.push(pool);
            state.rounds.push(Vec::new());
        }
        for at in 0..self.tokens.len() {
            pool::add_orphan_jobs(&self.state, at);
            tokio::spawn(pool::run_scheduler(self.state.clone(), at));
            self.dispatchers.push(None);
            self.start_dispatcher(at);
        }
        Ok(())
    }

    async fn submit_request(&mut self, number: u64) -> Result<()> {
        let (cpus, memory) = (self.rng.between(1, 8), self.rng.between(1, 3) * GIB);
        let request = json!({
            "state": "Committed", "priority": number % 20 + 1, "container_image": "none",
            "command": ["true"], "output_path": "/out", "mounts": { "/out": { "kind": "tmp" } },
            "runtime_constraints": { "vcpus": cpus, "ram": memory }, "use_existing": false,
        });
        let made = self.users.post("container_requests", &json!({ "container_request": request })).await?;
        let request = made["uuid"].as_str().context("the request has no uuid")?.to_owned();
        let needs = ContainerNeeds { cpus: u32::try_from(cpus)?, memory, ..ContainerNeeds::default() };
        self.requested.push(SimRequest { request, needs, is_held: false });
        Ok(())
    }

    /// Starts a new process, without memory of the previous one.
    fn start_dispatcher(&mut self, at: usize) {
        let transport = FaultyTransport::new(
            self.router.clone(),
            self.state.clone(),
            self.rng.fork(),
            Caller::Dispatcher(at),
        );
        let executors =
            FaultyTransport::new(self.router.clone(), self.state.clone(), self.rng.fork(), Caller::Executor);
        let client = QueueHttpClient::with_transport(Arc::new(transport), &self.tokens[at]);
        let executors = QueueHttpClient::with_transport(Arc::new(executors), "");
        let begun = Instant::now();
        let pool = PoolScheduler::new(self.state.clone(), at, begun, executors);
        self.dispatchers[at] = Some(tokio::spawn(run_dispatcher(client, pool, begun)));
    }

    async fn play(mut self) -> Result<Report> {
        self.inject_faults().await?;
        self.release_held().await?;
        self.wait_until_empty().await?;
        for dispatcher in self.dispatchers.iter().flatten() {
            dispatcher.abort();
        }
        let history = self.history().await?;
        checks::check_tokens_revoked(&self.state, &self.users).await;
        let needs: BTreeMap<String, ContainerNeeds> =
            self.requested.iter().map(|one| (one.request.clone(), one.needs.clone())).collect();
        checks::check_history(&self.state, &history, &needs, self.started);
        let mut hasher = DefaultHasher::new();
        for row in &history {
            let change = &row["properties"];
            (row["object_uuid"].as_str(), row["event_at"].as_str()).hash(&mut hasher);
            change["new_attributes"]["state"].as_str().hash(&mut hasher);
            change["event"].as_str().hash(&mut hasher);
        }
        let mut state = self.state.lock();
        Ok(Report {
            seed: self.seed,
            violations: std::mem::take(&mut state.violations),
            trace: hasher.finish(),
            fired: state.fired.clone(),
            runs: self.requested.len(),
            preemptions: 0,
            managed_jobs: 0,
            outcomes: BTreeMap::new(),
            passes: state.rounds.iter().map(|rounds| rounds.len() as u64).sum(),
            calls: state.calls,
            virtual_secs: self.started.elapsed().as_secs(),
        })
    }

    /// Changes requests as users do, and kills dispatchers.
    async fn inject_faults(&mut self) -> Result<()> {
        let mut was_overloaded = false;
        while self.started.elapsed() < FAULT_PERIOD {
            sleep(self.rng.millis(2_000, 20_000)).await;
            if self.rng.chance(60) {
                self.change_random_priority().await?;
            } else {
                let at = self.rng.between(0, self.tokens.len() as u64 - 1) as usize;
                if let Some(dispatcher) = self.dispatchers[at].take() {
                    dispatcher.abort();
                    self.state.lock().record_fault("dispatcher killed");
                    sleep(self.rng.millis(100, 30_000)).await;
                }
                self.start_dispatcher(at);
            }
            if !was_overloaded && self.started.elapsed() > FAULT_PERIOD / 3 {
                was_overloaded = true;
                self.state.lock().overloaded_until = Some(Instant::now() + Duration::from_secs(45));
            }
        }
        Ok(())
    }

    async fn change_random_priority(&mut self) -> Result<()> {
        let at = self.rng.between(0, self.requested.len() as u64 - 1) as usize;
        let priority = if self.rng.chance(20) { 0 } else { self.rng.between(1, 20) };
        self.set_priority(at, priority).await
    }

    async fn set_priority(&mut self, at: usize, priority: u64) -> Result<()> {
        let requested = &mut self.requested[at];
        let change = json!({ "container_request": { "priority": priority } });
        match self.users.put(&format!("container_requests/{}", requested.request), &change).await {
            Ok(_) => requested.is_held = priority == 0,
            // The container has ended: there is nothing to change.
            Err(error) if error.is_refusal() => requested.is_held = false,
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Releases or cancels held requests.
    async fn release_held(&mut self) -> Result<()> {
        for at in 0..self.requested.len() {
            if !self.requested[at].is_held {
                continue;
            }
            if self.rng.chance(50) {
                self.set_priority(at, 5).await?;
            } else {
                let path = format!("container_requests/{}?_method=DELETE", self.requested[at].request);
                self.users.post(&path, &Value::Null).await?;
            }
        }
        Ok(())
    }

    async fn wait_until_empty(&mut self) -> Result<()> {
        let (mut moved, mut rows) = (Instant::now(), 0);
        let open = percent_encode(&json!([["state", "in", ["Queued", "Locked", "Running"]]]).to_string());
        loop {
            let page = self.users.get(&format!("containers?limit=0&filters={open}")).await?;
            if page["items_available"] == 0 {
                break;
            }
            let seen = self.users.get("logs?limit=0").await?["items_available"].as_u64().unwrap_or(0);
            if seen != rows {
                (moved, rows) = (Instant::now(), seen);
            }
            if moved.elapsed() > PROGRESS_TIMEOUT {
                let page = self.users.get(&format!("containers?limit=3&count=none&filters={open}")).await?;
                let reported = |one: &Value| {
                    let part = |name: &str| one[name].to_string();
                    ["uuid", "state", "priority", "attempt", "scheduling_status"].map(part).join(" ")
                };
                let left: Vec<String> =
                    page["items"].as_array().into_iter().flatten().map(reported).collect();
                let pools: Vec<String> =
                    self.state.lock().pools.iter().filter_map(Pool::describe_leftovers).collect();
                let what = format!("no progress of {left:?} while the pools have {pools:?}");
                self.state.lock().record_violation("progress", what);
                return Ok(());
            }
            sleep(CHECK_INTERVAL).await;
        }
        let deadline = Instant::now() + EMPTY_TIMEOUT;
        loop {
            let left: Vec<String> =
                self.state.lock().pools.iter().filter_map(Pool::describe_leftovers).collect();
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                self.state.lock().record_violation("left", left.join("; "));
                return Ok(());
            }
            sleep(CHECK_INTERVAL).await;
        }
    }

    async fn history(&self) -> Result<Vec<Value>> {
        let mut rows: Vec<Value> = Vec::new();
        loop {
            let last = rows.last().and_then(|row| row["id"].as_i64()).unwrap_or(0);
            let filters = percent_encode(&json!([["id", ">", last]]).to_string());
            let path = format!("logs?order=id&limit=1000&count=none&filters={filters}");
            let page = self.users.get(&path).await?;
            let more = page["items"].as_array().context("the response has no `items`")?;
            if more.is_empty() {
                return Ok(rows);
            }
            rows.extend(more.iter().cloned());
        }
    }
}

/// The loop of `windlass dispatch`.
async fn run_dispatcher(client: QueueHttpClient, pool: PoolScheduler, begun: Instant) {
    let listener = loop {
        match QueueClient::open(client.clone()).await {
            Ok(listener) => break listener,
            Err(_) => sleep(DISPATCH_INTERVAL).await,
        }
    };
    let lease = Duration::from_secs(15);
    let ways = Ways { begun, lost_after: Span::secs(20), environment: Vec::new(), lease };
    let mut dispatcher = Dispatcher::new(listener, pool, ways);
    loop {
        // Errors are retried in the next round.
        let _ = dispatcher.round().await;
        sleep(DISPATCH_INTERVAL).await;
    }
}
