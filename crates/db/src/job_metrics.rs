//! Table `job_metrics`: samples of the resource usage of jobs.

use windlass_model::{
    id::{InstanceId, SubmissionId},
    time::{Span, Timestamp},
};

use super::{
    Db, DbError, Unit, Val,
    record::{record, statements},
};
use crate::params;

record! {
    pub struct Sample {
        pub at: Timestamp,
        /// By the host's clock.
        pub host_at: Timestamp,
        /// CPU time of all processors together, since the start of the job.
        pub cpu_us: i64,
        pub memory_bytes: i64,
        pub working_set_bytes: i64,
        /// JSON: `[[bytes of memory, percent], …]`.
        pub gpus: String,
    }
}

record! {
    /// A job that is due to be sampled.
    pub struct DueJob {
        pub id: SubmissionId,
        pub instance_id: InstanceId,
        pub lock_epoch: i64,
    }
}

record! {
    /// Last sample of a running job, with the names of the job.
    pub struct ActiveSample {
        pub project: String,
        pub run: String,
        pub replica_num: i64,
        pub job_num: i64,
        pub cpu_us: i64,
        pub memory_bytes: i64,
        pub working_set_bytes: i64,
        pub gpus: String,
    }
}

statements! {
    DUE = "SELECT {} FROM jobs j WHERE j.status = 'running' AND NOT j.finished AND j.instance_id IS NOT NULL \
           AND NOT EXISTS (SELECT 1 FROM job_metrics m WHERE m.job_id = j.id AND m.at > now_us() - $1) \
           ORDER BY j.id LIMIT $2", DueJob::columns("j");
    /// Duplicates are ignored: two replicas may sample at the same time.
    INSERT = "INSERT INTO job_metrics (job_id, at, host_at, cpu_us, memory_bytes, working_set_bytes, gpus) \
              VALUES ($1, now_us(), $2, $3, $4, $5, $6) ON CONFLICT (job_id, at) DO NOTHING";
    /// Deletes samples between two ages if an earlier one of the same step is kept.
    THIN = "DELETE FROM job_metrics WHERE job_id = $1 AND at < now_us() - $2 AND at >= now_us() - $2 - $4 \
            AND EXISTS (SELECT 1 FROM job_metrics o WHERE o.job_id = $1 AND o.at < job_metrics.at \
            AND o.at >= job_metrics.at - job_metrics.at % $3)";
    EXPIRE = "DELETE FROM job_metrics WHERE (job_id, at) IN \
              (SELECT m.job_id, m.at FROM job_metrics m WHERE m.at < now_us() - $1 ORDER BY m.at LIMIT $2)";
    RECENT = "SELECT {} FROM job_metrics m WHERE m.job_id = $1 AND m.at > $2 AND m.at < $3 \
              ORDER BY m.at DESC LIMIT $4", Sample::columns("m");
    ACTIVE = "SELECT p.name, r.name, j.replica_num, j.job_num, m.cpu_us, m.memory_bytes, m.working_set_bytes, m.gpus \
              FROM jobs j JOIN runs r ON r.id = j.run_id JOIN projects p ON p.id = j.project_id \
              JOIN job_metrics m ON m.job_id = j.id \
              AND m.at = (SELECT max(n.at) FROM job_metrics n WHERE n.job_id = j.id) \
              WHERE j.status = 'running' AND NOT j.finished AND m.at > now_us() - $1 \
              ORDER BY j.submitted_at, j.id LIMIT $2";
}

/// Running jobs without a sample as recent as `younger`.
pub async fn list_due(db: &Db, younger: Span, limit: usize) -> Result<Vec<DueJob>, DbError> {
    db.query(DUE.as_str(), params![younger.0, limit]).await?.into_iter().map(DueJob::read).collect()
}

/// Age from which one sample of each step is kept.
#[derive(Clone, Copy, Debug)]
pub struct Thinning {
    pub after: Span,
    pub step: Span,
}

/// Stores a sample taken now, and thins out those of the job that have just become older than these ages.
pub async fn insert(
    db: &Db,
    job: SubmissionId,
    sample: Sample,
    thinning: &[Thinning],
) -> Result<(), DbError> {
    let values = params![
        job,
        sample.host_at,
        sample.cpu_us,
        sample.memory_bytes,
        sample.working_set_bytes,
        sample.gpus
    ];
    let mut unit = Unit::new();
    for Thinning { after, step } in thinning {
        // Three steps: those that were thinned out before are not looked at again.
        unit = unit.exec(THIN.as_str(), params![job, after.0, step.0, step.0.saturating_mul(3)]);
    }
    db.write(unit.exec(INSERT.as_str(), values)).await?.done().map(drop)
}

/// Deletes up to `limit` samples older than `keep`, regardless of the state of their jobs.
pub async fn expire(db: &Db, keep: Span, limit: usize) -> Result<(), DbError> {
    db.write(Unit::new().exec(EXPIRE.as_str(), params![keep.0, limit])).await?.done().map(drop)
}

/// Samples of a job between two times, both exclusive; newest first.
pub async fn recent(
    db: &Db,
    job: SubmissionId,
    after: Option<Timestamp>,
    before: Option<Timestamp>,
    limit: i64,
) -> Result<Vec<Sample>, DbError> {
    let (after, before) = (after.unwrap_or(Timestamp(i64::MIN)), before.unwrap_or(Timestamp(i64::MAX)));
    let params: Vec<Val> = params![job, after, before, limit];
    db.query(RECENT.as_str(), params).await?.into_iter().map(Sample::read).collect()
}

/// Last samples of running jobs, if no older than `younger`.
pub async fn list_active(db: &Db, younger: Span, limit: usize) -> Result<Vec<ActiveSample>, DbError> {
    db.query(ACTIVE.as_str(), params![younger.0, limit]).await?.into_iter().map(ActiveSample::read).collect()
}
