//! Takes samples of all jobs that run, and forgets old ones.
//!
//! Each replica looks every [`SAMPLE_INTERVAL`] for jobs that nobody has sampled for so long. Replicas that look at different
//! moments share the work without a word: whoever comes second finds young samples. Two that look at once take two
//! samples, which harms nobody. It is not part of the passes over a job, so that a slow answer delays no decision.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream};
use tokio::time::timeout;
use windlass_model::time::Span;

use super::{KEEP_FINISHED, KEEP_RUNNING, SAMPLE_INTERVAL, sample};
use crate::{
    agents::{AgentApi, CallContext},
    db::{Db, job_metrics as rows},
};

/// Jobs that are sampled in one round.
const JOBS_MAX: usize = 20_000;
/// Hosts that are asked at once.
const CONCURRENCY: usize = 64;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// A job with a sample this young is not due: a little less than [`SAMPLE_INTERVAL`], as rounds do not begin on the dot.
const RECENT_SAMPLE_AGE: Span = Span::millis(9_500);
/// Old samples that are forgotten in one round.
const EXPIRED_MAX: usize = 10_000;

/// Samples for ever; ends when it is dropped.
pub async fn run(db: Db, agents: Arc<dyn AgentApi>) {
    // Replicas that were started together must not ask in step.
    let jitter = getrandom::u32().unwrap_or(0) % u32::try_from(SAMPLE_INTERVAL.as_millis()).unwrap_or(1);
    tokio::time::sleep(Duration::from_millis(jitter.into())).await;
    let mut rounds = tokio::time::interval(SAMPLE_INTERVAL);
    rounds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        rounds.tick().await;
        round(&db, &*agents).await;
    }
}

/// One round: every job that is due, and what is too old.
pub async fn round(db: &Db, agents: &dyn AgentApi) {
    let due = match rows::list_due(db, RECENT_SAMPLE_AGE, JOBS_MAX).await {
        Ok(due) => due,
        Err(error) => {
            tracing::debug!(%error, "look which jobs are to be sampled");
            return;
        }
    };
    stream::iter(due).for_each_concurrent(CONCURRENCY, |job| take(db, agents, job)).await;
    if let Err(error) = rows::expire(db, KEEP_FINISHED, EXPIRED_MAX).await {
        tracing::debug!(%error, "forget old samples");
    }
}

/// A job that cannot be asked has no sample; the passes over it say what is wrong.
async fn take(db: &Db, agents: &dyn AgentApi, job: rows::DueJob) {
    let call = CallContext { instance: job.instance_id, submission: job.id, epoch: job.lock_epoch };
    let Ok(Ok(said)) = timeout(ANSWER_TIMEOUT, agents.metrics(call)).await else { return };
    if let Err(error) = rows::insert(db, job.id, sample(&said), KEEP_RUNNING).await {
        tracing::debug!(%error, job = %job.id, "keep a sample");
    }
}
