//! A client that submits runs to several servers and tries another one when refused; and queries of the database.

#![expect(clippy::unwrap_used, reason = "a row that cannot go on should stop")]

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use serde_json::Value;
use tokio::task::JoinHandle;

use windlass_testenv::server::{call_api_idempotent, submission};
use windlass_testkit::postgres::Postgres;

/// Timeout of a response; a frozen server is abandoned after it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(8);
/// Time limit for one submission with all its attempts.
const SUBMIT_TIMEOUT: Duration = Duration::from_secs(120);

/// Submits a number of runs, one after the other.
pub(super) struct SubmitLoad {
    shared: Arc<LoadState>,
    task: JoinHandle<BTreeSet<String>>,
}

struct LoadState {
    addresses: Mutex<Vec<String>>,
    refused: AtomicU64,
    acknowledged: AtomicU64,
    /// Longest time until a refusal, in milliseconds.
    slowest_refusal: AtomicU64,
    /// Refusals without `Retry-After`.
    silent: AtomicU64,
    over: AtomicBool,
    /// Reason for which it gave up.
    gave_up: Mutex<Option<String>>,
}

impl SubmitLoad {
    pub(super) fn start(addresses: Vec<String>, runs: usize, job: fn(&str) -> Value) -> Self {
        let shared = Arc::new(LoadState {
            addresses: Mutex::new(addresses),
            refused: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
            slowest_refusal: AtomicU64::new(0),
            silent: AtomicU64::new(0),
            over: AtomicBool::new(false),
            gave_up: Mutex::new(None),
        });
        let task = tokio::spawn(submit(Arc::clone(&shared), runs, job));
        Self { shared, task }
    }

    /// Sets the addresses of the running servers.
    pub(super) fn use_addresses(&self, addresses: Vec<String>) {
        *self.shared.addresses.lock() = addresses;
    }

    /// Number of responses with status 503 or 507.
    pub(super) fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }

    /// Number of acknowledged submissions. Panics if there will be no more.
    pub(super) fn acknowledged(&self) -> u64 {
        if let Some(why) = &*self.shared.gave_up.lock() {
            panic!("submits do not go on: {why}");
        }
        self.shared.acknowledged.load(Ordering::Relaxed)
    }

    pub(super) fn slowest_refusal(&self) -> Duration {
        Duration::from_millis(self.shared.slowest_refusal.load(Ordering::Relaxed))
    }

    /// Number of refusals without `Retry-After`.
    pub(super) fn silent(&self) -> u64 {
        self.shared.silent.load(Ordering::Relaxed)
    }

    /// Stops submitting, and returns the names of the acknowledged runs.
    pub(super) async fn stop(self) -> BTreeSet<String> {
        self.shared.over.store(true, Ordering::Relaxed);
        self.end().await
    }

    /// Waits until all are acknowledged, and returns their names.
    pub(super) async fn end(self) -> BTreeSet<String> {
        self.task.await.unwrap()
    }
}

impl LoadState {
    fn fail(&self, why: String) -> ! {
        *self.gave_up.lock() = Some(why.clone());
        panic!("{why}");
    }
}

async fn submit(shared: Arc<LoadState>, runs: usize, job: fn(&str) -> Value) -> BTreeSet<String> {
    let mut acknowledged = BTreeSet::new();
    for number in 0..runs {
        if shared.over.load(Ordering::Relaxed) {
            break;
        }
        let name = format!("load-{number}");
        let (body, began) = (submission(&job(&name)), Instant::now());
        for attempt in number.. {
            if began.elapsed() > SUBMIT_TIMEOUT {
                shared.fail(format!("{name} is taken by nobody"));
            }
            let address = {
                let all = shared.addresses.lock();
                all[attempt % all.len()].clone()
            };
            let start = Instant::now();
            // An earlier attempt may have succeeded with a lost response.
            let call = call_api_idempotent(&address, "/api/project/main/runs/apply", &body, Some(&name));
            match tokio::time::timeout(ANSWER_TIMEOUT, call).await {
                Ok(Ok(answer)) if answer.status == 200 => break,
                Ok(Ok(answer)) => {
                    // A rate limit is not a refusal.
                    if answer.status == 429 {
                        tokio::time::sleep(Duration::from_millis(200)).await;
                        continue;
                    }
                    if !matches!(answer.status, 503 | 507) {
                        shared.fail(format!("{name}: {answer:?}"));
                    }
                    let took = start.elapsed().as_millis() as u64;
                    shared.slowest_refusal.fetch_max(took, Ordering::Relaxed);
                    shared.refused.fetch_add(1, Ordering::Relaxed);
                    shared.silent.fetch_add(u64::from(answer.retry_after.is_none()), Ordering::Relaxed);
                }
                // Not running, disconnected, or frozen.
                Ok(Err(_)) | Err(_) => {}
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        shared.acknowledged.fetch_add(1, Ordering::Relaxed);
        acknowledged.insert(name);
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    acknowledged
}

/// Tokens of held locks.
pub(super) async fn held_lock_tokens(postgres: &Postgres) -> BTreeSet<String> {
    let tables = ["runs", "jobs", "instances", "fleets"];
    let each = tables.map(|table| format!("SELECT lock_token FROM {table} WHERE lock_token IS NOT NULL"));
    postgres.run(&each.join(" UNION ALL ")).await.unwrap().into_iter().flatten().collect()
}

/// Names of successful runs.
pub(super) async fn done_runs(postgres: &Postgres) -> BTreeSet<String> {
    let rows = postgres.run("SELECT name FROM runs WHERE status = 'done'").await.unwrap();
    rows.into_iter().flatten().collect()
}
