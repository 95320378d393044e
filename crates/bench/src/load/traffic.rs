//! Client behaviour during build-up, full load and cancellation.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use windlass_testkit::rng::Rng;

use super::LoadPlan;
use crate::{
    open_loop::{ArrivalPlan, ConnectionPool, LatencyCounts, StreamLimit},
    results::BenchResults,
};
use windlass_testenv::server::submission;

/// Minimum polling interval of a followed run. A poll is a request like any other, so the interval grows with the age
/// of the run: to the age divided by the share below. Otherwise polling would dominate the load.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
const POLL_INTERVAL_SHARE: u32 = 20;
/// One in this number of submitted runs is followed, and stopped.
const FOLLOW_EVERY: usize = 5;
/// A run that takes longer is a failure.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit until the whole population runs.
const FILL_TIMEOUT: Duration = Duration::from_secs(600);
/// Duration of a run that ends by itself.
const SHORT_MS: u64 = 10_000;
/// Time after its submission at which a followed run is stopped.
const STOP_AFTER: Duration = Duration::from_secs(5);
const LONG_MS: u64 = 24 * 3600 * 1000;
/// The population writes a line every half minute.
const LONG_LINES: u64 = LONG_MS / 30_000;
/// Number of names in one stop request.
const STOP_BATCH: usize = 100;
const PAGE: usize = 100;
const SEED: u64 = 20_261_115;

pub(super) struct LoadTraffic {
    pool: Arc<ConnectionPool>,
    /// Submission of each run of the population, for its log.
    submissions: Mutex<Vec<Option<String>>>,
    tallies: TrafficTallies,
}

#[derive(Default)]
struct TrafficTallies {
    fill_submit: LatencyCounts,
    fill_running: LatencyCounts,
    submit: LatencyCounts,
    running: LatencyCounts,
    get: LatencyCounts,
    list: LatencyCounts,
    logs: LatencyCounts,
    stop: LatencyCounts,
    stopped: LatencyCounts,
    late: LatencyCounts,
}

impl LoadTraffic {
    pub(super) fn new(pool: Arc<ConnectionPool>, runs: usize) -> Self {
        Self { pool, submissions: Mutex::new(vec![None; runs]), tallies: TrafficTallies::default() }
    }

    /// Submits the population and waits until all of it runs.
    pub(super) async fn fill(self: &Arc<Self>, plan: &LoadPlan, sheet: &mut BenchResults) -> Result<()> {
        let began = Instant::now();
        let runs = plan.runs;
        let arrivals = ArrivalPlan {
            begin: began,
            until: StreamLimit::Number(runs),
            per_second: plan.fill_per_second,
            rng: Rng::new(SEED),
        };
        let call = |number, planned| {
            let this = Arc::clone(self);
            async move { this.submit_long_run(number, planned).await }
        };
        arrivals.run(&self.tallies.late, call).await?;
        let submitted = began.elapsed();
        loop {
            let running = self.count("running").await?;
            if running >= runs {
                break;
            }
            ensure!(began.elapsed() < FILL_TIMEOUT, "only {running} of {runs} runs are running");
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        let took = began.elapsed();
        sheet.say(&format!("{runs} submitted at {} per second", plan.fill_per_second))?;
        sheet.spread("fill_submit", "submit", &mut self.tallies.fill_submit.taken())?;
        sheet.spread("fill_running", "submit to running", &mut self.tallies.fill_running.taken())?;
        sheet.figure("fill_submitted_s", "all submitted after", submitted.as_secs_f64(), "s")?;
        sheet.figure("fill_running_s", "all running after", took.as_secs_f64(), "s")
    }

    async fn submit_long_run(&self, number: usize, planned: Instant) {
        let tallies = &self.tallies;
        let name = format!("long-{number}");
        let body = submission(&job(&name, LONG_MS, LONG_LINES));
        let run = tallies.fill_submit.keep(self.pool.post("/api/project/main/runs/apply", &body).await);
        let Some(run) = run else { return };
        tallies.fill_submit.took(planned);
        let id = run["jobs"][0]["job_submissions"][0]["id"].as_str().map(str::to_owned);
        self.submissions.lock()[number] = id;
        if number.is_multiple_of(FOLLOW_EVERY * 4)
            && tallies.fill_running.keep(self.wait_for_status(&name, &["running"]).await).is_some()
        {
            tallies.fill_running.took(planned);
        }
    }

    /// Sends all kinds of requests concurrently.
    pub(super) async fn hold(self: &Arc<Self>, plan: &LoadPlan) -> Result<()> {
        let mut rng = Rng::new(SEED + 1);
        let begin = Instant::now();
        let mut arrivals = |part: f64| ArrivalPlan {
            begin,
            until: StreamLimit::Time(plan.hold),
            per_second: plan.per_second * part,
            rng: rng.fork(),
        };
        let (submits, gets, lists, logs) = (arrivals(1.0), arrivals(4.0), arrivals(0.2), arrivals(1.0));
        let mut pick = rng.fork();
        let mut pick_log = rng.fork();
        let last = plan.runs as u64 - 1;
        let late = &self.tallies.late;
        let results = tokio::join!(
            submits.run(late, |number, planned| Arc::clone(self).submit_short_run(number, planned)),
            gets.run(late, |_, planned| Arc::clone(self).get_run(pick.between(0, last), planned)),
            lists.run(late, |_, planned| Arc::clone(self).list(planned)),
            logs.run(late, |_, planned| Arc::clone(self).read(pick_log.between(0, last), planned)),
        );
        results.0.and(results.1).and(results.2).and(results.3)
    }

    async fn submit_short_run(self: Arc<Self>, number: usize, planned: Instant) {
        let tallies = &self.tallies;
        let followed = number.is_multiple_of(FOLLOW_EVERY);
        let name = format!("short-{number}");
        let body = submission(&job(&name, if followed { LONG_MS } else { SHORT_MS }, 1));
        let sent = self.pool.post("/api/project/main/runs/apply", &body).await;
        if tallies.submit.keep(sent).is_none() {
            return;
        }
        tallies.submit.took(planned);
        if !followed || tallies.running.keep(self.wait_for_status(&name, &["running"]).await).is_none() {
            return;
        }
        tallies.running.took(planned);
        // Not before it runs, even if that took longer.
        let requested = (planned + STOP_AFTER).max(Instant::now());
        tokio::time::sleep_until(requested.into()).await;
        let body = json!({"runs_names": [name], "abort": false});
        if tallies.stop.keep(self.pool.post("/api/project/main/runs/stop", &body).await).is_none() {
            return;
        }
        tallies.stop.took(requested);
        if tallies.stopped.keep(self.wait_for_status(&name, &["terminated"]).await).is_some() {
            tallies.stopped.took(requested);
        }
    }

    async fn get_run(self: Arc<Self>, number: u64, planned: Instant) {
        let body = json!({"run_name": format!("long-{number}")});
        if self.tallies.get.keep(self.pool.post("/api/project/main/runs/get", &body).await).is_some() {
            self.tallies.get.took(planned);
        }
    }

    async fn list(self: Arc<Self>, planned: Instant) {
        let body =
            json!({"project_name": "main", "only_active": false, "limit": PAGE, "job_submissions_limit": 1});
        if self.tallies.list.keep(self.pool.post("/api/runs/list", &body).await).is_some() {
            self.tallies.list.took(planned);
        }
    }

    async fn read(self: Arc<Self>, number: u64, planned: Instant) {
        let id = usize::try_from(number).ok().and_then(|n| self.submissions.lock().get(n).cloned().flatten());
        let body = json!({"run_name": format!("long-{number}"), "job_submission_id": id, "limit": 100});
        if self.tallies.logs.keep(self.pool.post("/api/project/main/logs/poll", &body).await).is_some() {
            self.tallies.logs.took(planned);
        }
    }

    /// Stops the oldest runs of the population at once, and waits until all of them have ended.
    pub(super) async fn cancel(&self, count: usize, sheet: &mut BenchResults) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let names: Vec<String> = (0..count).map(|number| format!("long-{number}")).collect();
        let began = Instant::now();
        let mut calls = JoinSet::new();
        for names in names.chunks(STOP_BATCH) {
            let (pool, body) = (Arc::clone(&self.pool), json!({"runs_names": names, "abort": false}));
            calls.spawn(async move { pool.post("/api/project/main/runs/stop", &body).await });
        }
        while let Some(stopped) = calls.join_next().await {
            stopped?.context("failed to stop the runs")?;
        }
        let requested = began.elapsed();
        let names: BTreeSet<String> = names.into_iter().collect();
        // The first page is enough; the complete count is done at the end.
        while self.page(&Value::Null, true).await?.iter().any(|run| is_one_of(run, &names)) {
            ensure!(began.elapsed() < FILL_TIMEOUT, "timed out waiting for {count} cancelled runs to end");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let took = began.elapsed();
        let left = self.all().await?.iter().filter(|run| is_one_of(run, &names)).count();
        ensure!(left == 0, "{left} cancelled runs are still active after {took:?}");
        sheet.say(&format!("{count} runs cancelled at once"))?;
        sheet.figure("cancel_asked_s", "all requests answered after", requested.as_secs_f64(), "s")?;
        sheet.figure("cancel_final_s", "all final after", took.as_secs_f64(), "s")
    }

    pub(super) fn report(&self, sheet: &mut BenchResults) -> Result<()> {
        let tallies = &self.tallies;
        sheet.spread("submit", "submit", &mut tallies.submit.taken())?;
        sheet.spread("running", "submit to running", &mut tallies.running.taken())?;
        sheet.spread("get", "get a run", &mut tallies.get.taken())?;
        sheet.spread("list", "list 100 runs", &mut tallies.list.taken())?;
        sheet.spread("logs", "poll a log", &mut tallies.logs.taken())?;
        sheet.spread("stop", "stop", &mut tallies.stop.taken())?;
        sheet.spread("stopped", "stop to final", &mut tallies.stopped.taken())?;
        sheet.spread("late", "delay of the load generator", &mut tallies.late.taken())
    }

    pub(super) fn errors(&self, sheet: &mut BenchResults) -> Result<()> {
        let t = &self.tallies;
        let all = [
            ("submit, filling", &t.fill_submit),
            ("running, filling", &t.fill_running),
            ("submit", &t.submit),
            ("running", &t.running),
            ("get", &t.get),
            ("list", &t.list),
            ("logs", &t.logs),
            ("stop", &t.stop),
            ("stop to final", &t.stopped),
        ];
        let mut count = 0;
        for (what, latencies) in all {
            for (error, times) in latencies.errors() {
                count += times;
                sheet.say(&format!("  {what}: {times} times: {error}"))?;
            }
        }
        sheet.figure("errors", "failed requests", count as f64, "")
    }

    /// Waits for one of these statuses.
    async fn wait_for_status(&self, name: &str, wanted: &[&str]) -> Result<()> {
        let start = Instant::now();
        let body = json!({"run_name": name});
        loop {
            let run = self.pool.post("/api/project/main/runs/get", &body).await?;
            let status = run["status"].as_str().unwrap_or_default();
            if wanted.contains(&status) {
                return Ok(());
            }
            ensure!(!matches!(status, "failed" | "done" | "terminated"), "{name} ended as {status}");
            ensure!(start.elapsed() < TIMEOUT, "{name} is still {status}");
            tokio::time::sleep(POLL_INTERVAL.max(start.elapsed() / POLL_INTERVAL_SHARE)).await;
        }
    }

    /// Number of active runs.
    pub(super) async fn active(&self) -> Result<usize> {
        Ok(self.all().await?.len())
    }

    async fn count(&self, status: &str) -> Result<usize> {
        Ok(self.all().await?.iter().filter(|run| run["status"] == status).count())
    }

    async fn all(&self) -> Result<Vec<Value>> {
        let mut all: Vec<Value> = Vec::new();
        loop {
            let page = self.page(all.last().unwrap_or(&Value::Null), true).await?;
            let full = page.len() == PAGE;
            all.extend(page);
            if !full {
                return Ok(all);
            }
        }
    }

    async fn page(&self, after: &Value, ascending: bool) -> Result<Vec<Value>> {
        let body = json!({"project_name": "main", "only_active": true, "limit": PAGE, "include_jobs": false,
            "job_submissions_limit": 1, "prev_submitted_at": after["submitted_at"], "prev_run_id": after["id"],
            "ascending": ascending});
        let page = self.pool.post("/api/runs/list", &body).await?;
        let runs = page.as_array().context("no list")?.iter();
        Ok(runs
            .map(|run| {
                json!({"id": run["id"], "submitted_at": run["submitted_at"], "status": run["status"],
                "name": run["run_spec"]["run_name"]})
            })
            .collect())
    }
}

fn is_one_of(run: &Value, names: &BTreeSet<String>) -> bool {
    run["name"].as_str().is_some_and(|name| names.contains(name))
}

fn job(name: &str, run_ms: u64, lines: u64) -> Value {
    json!({"type": "task", "name": name, "image": "busybox", "user": "root", "commands": ["true"],
        "env": {"SIMULATED_RUN_MS": run_ms.to_string(), "SIMULATED_LOG_LINES": lines.to_string()},
        "resources": {"cpu": {"arch": "x86", "count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null}})
}
