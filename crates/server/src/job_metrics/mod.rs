//! Resource usage of jobs: sampled while they run, shown as series, and evaluated by the utilization policy.
//!
//! A sample is taken every [`SAMPLE_INTERVAL`]. All samples of the last hour of a running job are kept, one of each minute
//! for a day, and one of every ten minutes until `keep_metrics` ends. CPU time is a sum, so its mean stays exact.

pub mod prometheus;
pub mod sampler;
mod series;

pub use series::series;
pub(crate) use series::{JobResources, cpu_cores};

use std::time::Duration;

use windlass_api::agent::runner::Metrics;
use windlass_model::{
    decide::utilization,
    id::SubmissionId,
    time::{Span, Timestamp},
};

use crate::db::{
    Db, DbError,
    job_metrics::{self as rows, Thinning},
};

pub const SAMPLE_INTERVAL: Duration = Duration::from_secs(10);
/// Samples that are kept for longer.
pub const THINNING: [Thinning; 2] = [
    Thinning { after: Span::hours(1), step: Span::mins(1) },
    Thinning { after: Span::hours(24), step: Span::mins(10) },
];
/// Maximum number of sampled GPUs per job.
const GPUS_MAX: usize = 64;
/// Maximum number of samples of one window: an hour of them, and as many again for replicas that sampled at the same
/// time.
const WINDOW_SAMPLES_MAX: i64 = 720;

/// Converts a host's report to a sample. The host may report anything: values are clamped to the possible range.
fn sample(message: &Metrics) -> rows::Sample {
    let gpus: Vec<(i64, i64)> = message
        .gpus
        .iter()
        .take(GPUS_MAX)
        .map(|gpu| (gpu.gpu_memory_usage_bytes.max(0), gpu.gpu_util_percent.clamp(0, 100)))
        .collect();
    rows::Sample {
        at: Timestamp::default(),
        host_at: Timestamp(message.timestamp_micro.max(0)),
        cpu_us: message.cpu_usage_micro.max(0),
        memory_bytes: message.memory_usage_bytes.max(0),
        working_set_bytes: message.memory_working_set_bytes.max(0),
        gpus,
    }
}

/// Returns whether a GPU of the job was below `percent_min` for the whole window that ends now.
pub async fn is_gpu_idle(
    db: &Db,
    job: SubmissionId,
    percent_min: u32,
    window: Span,
    now: Timestamp,
) -> Result<bool, DbError> {
    // One microsecond more, so that a sample exactly at the start counts.
    let start = Timestamp((now - window).0 - 1);
    let samples: Vec<utilization::Sample> = rows::recent(db, job, Some(start), None, WINDOW_SAMPLES_MAX)
        .await?
        .iter()
        .map(|sample| utilization::Sample {
            at: sample.at,
            gpu_percent: sample
                .gpus
                .iter()
                .map(|(_, percent)| u32::try_from(*percent).unwrap_or(0))
                .collect(),
        })
        .collect();
    Ok(utilization::is_gpu_idle(&samples, percent_min, window, now))
}

#[cfg(test)]
mod tests {
    use windlass_api::agent::runner::{GpuMetrics, Metrics};

    use super::sample;

    #[test]
    fn impossible_metric_values_are_clamped() {
        let gpu = GpuMetrics { gpu_memory_usage_bytes: -5, gpu_util_percent: 900 };
        let message = Metrics {
            timestamp_micro: i64::MIN,
            cpu_usage_micro: -1,
            memory_usage_bytes: i64::MIN,
            memory_working_set_bytes: 3,
            gpus: vec![gpu; 1000],
        };
        let kept = sample(&message);
        assert_eq!((kept.host_at.0, kept.cpu_us, kept.memory_bytes, kept.working_set_bytes), (0, 0, 0, 3));
        assert_eq!(kept.gpus, vec![(0, 100); 64]);
    }
}
