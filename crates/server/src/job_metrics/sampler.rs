//! Samples all running jobs, and deletes old samples.
//!
//! Every [`SAMPLE_INTERVAL`] each replica samples the jobs that have no sample that recent. Replicas that run at
//! different times share the work without coordination: the second one finds recent samples. Two that run at the same
//! time store two samples, which is harmless. Sampling is not part of the passes over a job, so that a slow response
//! delays no decision.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream};
use tokio::time::timeout;
use windlass_model::time::Span;

use super::{SAMPLE_INTERVAL, THINNING, sample};
use crate::{
    agents::{AgentApi, CallContext},
    db::{Db, job_metrics as rows},
};

/// Maximum number of jobs sampled in one round.
const JOBS_MAX: usize = 20_000;
/// Maximum number of hosts queried at once.
const CONCURRENCY: usize = 64;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// A job with a sample this recent is not due: a little less than [`SAMPLE_INTERVAL`], because rounds do not start
/// exactly on time.
const RECENT_SAMPLE_AGE: Span = Span::millis(9_500);
/// Maximum number of old samples deleted in one round.
const EXPIRED_MAX: usize = 10_000;

/// Samples until the future is dropped.
pub async fn run(db: Db, agents: Arc<dyn AgentApi>, keep: Option<Span>) {
    // Replicas that were started together must not sample at the same time.
    let jitter = getrandom::u32().unwrap_or(0) % u32::try_from(SAMPLE_INTERVAL.as_millis()).unwrap_or(1);
    tokio::time::sleep(Duration::from_millis(jitter.into())).await;
    let mut rounds = tokio::time::interval(SAMPLE_INTERVAL);
    rounds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        rounds.tick().await;
        round(&db, &*agents, keep).await;
    }
}

/// One round: samples every due job and deletes samples older than `keep`.
pub async fn round(db: &Db, agents: &dyn AgentApi, keep: Option<Span>) {
    let due = match rows::list_due(db, RECENT_SAMPLE_AGE, JOBS_MAX).await {
        Ok(due) => due,
        Err(error) => {
            tracing::debug!(%error, "failed to list jobs due for sampling");
            return;
        }
    };
    stream::iter(due).for_each_concurrent(CONCURRENCY, |job| sample_job(db, agents, job)).await;
    if let Some(keep) = keep
        && let Err(error) = rows::expire(db, keep, EXPIRED_MAX).await
    {
        tracing::debug!(%error, "failed to delete old samples");
    }
}

/// Samples one job. A job that does not respond has no sample; its passes report the problem.
async fn sample_job(db: &Db, agents: &dyn AgentApi, job: rows::DueJob) {
    let call = CallContext { instance: job.instance_id, submission: job.id, epoch: job.lock_epoch };
    let Ok(Ok(message)) = timeout(ANSWER_TIMEOUT, agents.metrics(call)).await else { return };
    if let Err(error) = rows::insert(db, job.id, sample(&message), &THINNING).await {
        tracing::debug!(%error, job = %job.id, "failed to store sample");
    }
}
