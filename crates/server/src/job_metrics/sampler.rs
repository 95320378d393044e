//! Samples all running jobs, and deletes old samples.
//!
//! Every [`SAMPLE_INTERVAL`] each replica samples the jobs that have no sample that recent. Replicas that run at
//! different times share the work without coordination: the second one finds recent samples. Two that run at the same
//! time store two samples, which is harmless. Sampling is not part of the passes over a job, so that a slow response
//! delays no decision.

use std::{pin::pin, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, future::try_join, stream};
use tokio::time::timeout;
use windlass_model::{id::SubmissionId, time::Span};

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
/// Maximum number of samples in one statement.
const WRITTEN_MAX: usize = 1_000;
/// Number of rounds, one minute, after which old samples are thinned out.
const ROUNDS_PER_THINNING: usize = 6;
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
        for _ in 0..ROUNDS_PER_THINNING {
            rounds.tick().await;
            round(&db, &*agents, keep).await;
        }
        thin(&db).await;
    }
}

/// Thins out the older samples of all jobs.
pub async fn thin(db: &Db) {
    if let Err(error) = rows::thin(db, &THINNING).await {
        tracing::debug!(%error, "failed to thin out old samples");
    }
}

/// One round: samples every due job and deletes samples older than `keep`.
pub async fn round(db: &Db, agents: &dyn AgentApi, keep: Option<Span>) {
    let listed = try_join(db.now(), rows::list_due(db, RECENT_SAMPLE_AGE, JOBS_MAX)).await;
    let (now, due) = match listed {
        Ok(listed) => listed,
        Err(error) => {
            tracing::debug!(%error, "failed to list jobs due for sampling");
            return;
        }
    };
    let answers = stream::iter(due).map(|job| sample_job(agents, job)).buffer_unordered(CONCURRENCY);
    // Written together: a round costs the same number of statements with one job as with thousands. All have the time of
    // the round, so that a host that is slow to answer does not make the other jobs miss the next one.
    let mut samples = pin!(answers.filter_map(std::future::ready).chunks(WRITTEN_MAX));
    while let Some(samples) = samples.next().await {
        if let Err(error) = rows::insert_all(db, now, &samples).await {
            tracing::debug!(%error, "failed to store samples");
        }
    }
    if let Some(keep) = keep
        && let Err(error) = rows::expire(db, keep, EXPIRED_MAX).await
    {
        tracing::debug!(%error, "failed to delete old samples");
    }
}

/// Samples one job. A job that does not respond has no sample; its passes report the problem.
async fn sample_job(agents: &dyn AgentApi, job: rows::DueJob) -> Option<(SubmissionId, rows::Sample)> {
    let call = CallContext { instance: job.instance_id, submission: job.id, epoch: job.lock_epoch };
    let message = timeout(ANSWER_TIMEOUT, agents.metrics(call)).await.ok()?.ok()?;
    Some((job.id, sample(&message)))
}
