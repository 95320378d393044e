//! Benchmarks of managed jobs: time to run, time to detect an end and a loss, and the cost of thousands.
//!
//! There are two environments. On a mock cloud jobs are real processes on machines that are preempted: the end of a
//! program and the loss of its machine are known to the millisecond. Simulated hosts, which do everything but the work,
//! have capacity for thousands of jobs at once.

mod cloud;
mod many_jobs;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use windlass_api::managed_jobs::{LaunchResponse, ManagedJob};

use super::{flags::Flags, open_loop::ConnectionPool, postgres_url, results::BenchResults, runs::Binaries};
use windlass_testkit::temp_dir;

/// Polling interval for a job.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// A job that takes longer is a failure.
const TIMEOUT: Duration = Duration::from_secs(120);

pub struct JobsPlan {
    /// Number of repetitions of single measurements.
    pub times: usize,
    /// Number of jobs of one second that are launched at once, for the rate.
    pub burst: usize,
    /// Numbers of running jobs for measuring the memory of each: few, and many.
    pub live: usize,
    pub most: usize,
    /// Number of them that are cancelled at once.
    pub cancel: usize,
    pub postgres: Option<String>,
}

impl JobsPlan {
    pub fn read(flags: &mut Flags, postgres: Option<String>) -> Result<Self> {
        let most = flags.value("--most")?.unwrap_or(10_000);
        let live = flags.value("--live")?.unwrap_or(most / 5);
        let plan = Self {
            times: flags.value("--times")?.unwrap_or(20),
            burst: flags.value("--burst")?.unwrap_or(1_000),
            live,
            most,
            cancel: flags.value("--cancel")?.unwrap_or(most / 2),
            postgres: postgres_url(flags, postgres)?,
        };
        ensure!(
            plan.times > 0 && plan.burst > 0 && plan.live > 0,
            "`--times`, `--burst` and `--live` must be above 0"
        );
        ensure!(
            plan.live + plan.cancel <= plan.most,
            "`--live` and `--cancel` together are more than `--most`"
        );
        Ok(plan)
    }
}

pub async fn run(binaries: &Binaries<'_>, plan: &JobsPlan) -> Result<()> {
    let scratch = temp_dir("jobs")?;
    let mut sheet = BenchResults::new("jobs")?;
    cloud::run(binaries, &scratch.path().join("cloud"), plan, &mut sheet).await?;
    many_jobs::run(binaries, &scratch.path().join("crowd"), plan, &mut sheet).await?;
    sheet.save()?;
    Ok(())
}

/// Client for a server's managed jobs.
struct JobsClient {
    pool: Arc<ConnectionPool>,
}

impl JobsClient {
    async fn call(&self, path: &str, body: &Value) -> Result<Value> {
        self.pool.post(&format!("/api/project/main/{path}"), body).await
    }

    /// Launches copies of a file in one call, and returns their numbers.
    async fn launch(&self, name: &str, text: &str, copies: usize) -> Result<Vec<i64>> {
        let answer =
            self.call("jobs/launch", &json!({"name": name, "text": text, "num_jobs": copies})).await?;
        let launched: LaunchResponse = serde_json::from_value(answer)?;
        Ok(launched.jobs.iter().map(|job| job.job_id).collect())
    }

    async fn read(&self, id: i64) -> Result<ManagedJob> {
        Ok(serde_json::from_value(self.call("jobs/get", &json!({"job_id": id})).await?)?)
    }

    /// Waits until a condition holds for a job.
    async fn wait_until(
        &self,
        id: i64,
        what: &str,
        holds: impl Fn(&ManagedJob) -> bool,
    ) -> Result<ManagedJob> {
        let began = Instant::now();
        loop {
            let job = self.read(id).await?;
            if holds(&job) {
                return Ok(job);
            }
            ensure!(job.schedule_state != "DONE", "not {what}: job {id} ended as {}", job.status);
            ensure!(began.elapsed() < TIMEOUT, "not {what}: job {id} is still {}", job.status);
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until no job of this name has one of these statuses, or, without statuses, until all have ended.
    async fn wait_until_none(&self, name: &str, statuses: &[&str], within: Duration) -> Result<()> {
        // Requests one job, because the cost of a list depends on its length.
        let body = json!({"name": name, "statuses": statuses, "skip_finished": true, "limit": 1});
        let began = Instant::now();
        loop {
            let list = self.call("jobs/list", &body).await?;
            let Some(one) = list.as_array().context("no list")?.first() else { return Ok(()) };
            ensure!(began.elapsed() < within, "jobs `{name}` take longer than {within:?}: {one}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// All jobs of this name, newest first.
    async fn all(&self, name: &str) -> Result<Vec<ManagedJob>> {
        let mut all: Vec<ManagedJob> = Vec::new();
        loop {
            let before = all.last().map(|job| job.job_id);
            let page =
                self.call("jobs/list", &json!({"name": name, "limit": 1_000, "prev_job_id": before})).await?;
            let page: Vec<ManagedJob> = serde_json::from_value(page)?;
            if page.is_empty() {
                return Ok(all);
            }
            all.extend(page);
        }
    }

    async fn cancel(&self, name: &str) -> Result<()> {
        self.call("jobs/cancel", &json!({"name": name})).await.map(drop)
    }
}
