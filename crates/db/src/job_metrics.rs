//! Table `job_metrics`: samples of the resource usage of jobs.

use serde_json::{Value, json};
use windlass_model::{
    id::{InstanceId, SubmissionId},
    time::{Span, Timestamp},
};

use super::{
    Db, DbError, Dialect, Row, Unit, Val,
    documents::{METRICS_GPUS, leave_out},
    record::{Column, record, statements},
};
use crate::params;

/// Bytes of memory in use and percent of utilization of each GPU.
pub type GpuUses = Vec<(i64, i64)>;

impl Column for GpuUses {
    fn read(row: &mut Row, at: usize) -> Result<Self, DbError> {
        METRICS_GPUS.decode(first_value(row), row.str(at)?)
    }
}

impl Column for Option<GpuUses> {
    fn read(row: &mut Row, at: usize) -> Result<Self, DbError> {
        METRICS_GPUS.decode_opt(first_value(row), row.opt_str(at)?)
    }
}

/// Names a row of samples: its first column is its job, its instance, its project or its time.
fn first_value(row: &Row) -> String {
    row.text(0).or_else(|_| row.int(0).map(|number| number.to_string())).unwrap_or_default()
}

impl From<GpuUses> for Val {
    fn from(gpus: GpuUses) -> Self {
        let devices = gpus.iter().map(|(bytes, percent)| format!("[{bytes},{percent}]"));
        Self::Text(format!("[{}]", devices.collect::<Vec<_>>().join(",")))
    }
}

record! {
    pub struct Sample {
        pub at: Timestamp,
        /// By the host's clock.
        pub host_at: Timestamp,
        /// CPU time of all processors together, since the start of the job.
        pub cpu_us: i64,
        pub memory_bytes: i64,
        pub working_set_bytes: i64,
        pub gpus: GpuUses,
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
        pub gpus: GpuUses,
    }
}

statements! {
    DUE = "SELECT {} FROM jobs j WHERE j.status = 'running' AND NOT j.finished AND j.instance_id IS NOT NULL \
           AND NOT EXISTS (SELECT 1 FROM job_metrics m WHERE m.job_id = j.id AND m.at > now_us() - $1) \
           ORDER BY j.id LIMIT $2", DueJob::columns("j");
    /// Deletes samples between two ages if an earlier one of the same step is kept.
    THIN = "DELETE FROM job_metrics WHERE at < now_us() - $1 AND at >= now_us() - $1 - $3 \
            AND EXISTS (SELECT 1 FROM job_metrics o WHERE o.job_id = job_metrics.job_id AND o.at < job_metrics.at \
            AND o.at >= job_metrics.at - job_metrics.at % $2)";
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

/// Stores the samples of a round with one statement, however many they are. Jobs that were deleted meanwhile are left out,
/// and so are duplicates: two replicas may sample at the same time.
pub async fn insert_all(db: &Db, at: Timestamp, samples: &[(SubmissionId, Sample)]) -> Result<(), DbError> {
    if samples.is_empty() {
        return Ok(());
    }
    let rows = samples.iter().map(|(job, sample)| {
        let Sample { host_at, cpu_us, memory_bytes, working_set_bytes, gpus, .. } = sample;
        json!([job.to_string(), host_at.0, cpu_us, memory_bytes, working_set_bytes, gpus])
    });
    let rows = Value::Array(rows.collect()).to_string();
    let unit = Unit::new().exec(insert_sql(db.dialect()), params![rows, at]);
    db.write(unit).await?.done().map(drop)
}

fn insert_sql(dialect: Dialect) -> String {
    let field = |at: usize| match dialect {
        Dialect::Sqlite => format!("s.value ->> {at}"),
        Dialect::Postgres => format!("CAST(s.value AS JSON) ->> {at}"),
    };
    let number = |at: usize| format!("CAST({} AS BIGINT)", field(at));
    format!(
        "INSERT INTO job_metrics (job_id, at, host_at, cpu_us, memory_bytes, working_set_bytes, gpus) \
         SELECT j.id, CAST($2 AS BIGINT), {}, {}, {}, {}, {} FROM json_each(CAST($1 AS TEXT)) s JOIN jobs j ON j.id = {} \
         WHERE TRUE ON CONFLICT (job_id, at) DO NOTHING",
        number(1),
        number(2),
        number(3),
        number(4),
        field(5),
        field(0),
    )
}

/// Age beyond that of a rule at which samples are still thinned out: several times the interval between two calls.
const THINNING_WINDOW: Span = Span::mins(5);

/// Thins out the samples of all jobs that have just become older than these ages.
pub async fn thin(db: &Db, thinning: &[Thinning]) -> Result<(), DbError> {
    let mut unit = Unit::new();
    for Thinning { after, step } in thinning {
        unit = unit.exec(THIN.as_str(), params![after.0, step.0, THINNING_WINDOW.0]);
    }
    db.write(unit).await?.done().map(drop)
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
    let mut samples = Vec::new();
    for row in db.query(ACTIVE.as_str(), params![younger.0, limit]).await? {
        match ActiveSample::read(row) {
            Ok(sample) => samples.push(sample),
            Err(error @ DbError::StoredDocument { .. }) => leave_out(&error),
            Err(error) => return Err(error),
        }
    }
    Ok(samples)
}
