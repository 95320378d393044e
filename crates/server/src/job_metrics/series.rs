//! Conversion of samples to the series that clients plot.

use serde_json::Value;
use windlass_api::metrics::{JobMetrics, Metric};
use windlass_model::{id::SubmissionId, time::Timestamp};

use crate::db::{
    DbError,
    documents::{JOB_PROVISIONING, JOB_RUNTIME},
    job_metrics::{GpuUses, Sample},
    jobs::Job,
};

/// Resources that the job has.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct JobResources {
    pub(crate) cpus: Option<i64>,
    pub(crate) memory_bytes: Option<i64>,
    pub(crate) gpu_memory_bytes: Option<i64>,
}

impl JobResources {
    /// Resources of a job. If it has only a part of its instance, they are in the job's own document.
    pub(crate) fn of(
        job: SubmissionId,
        runtime: Option<&str>,
        provisioning: Option<&str>,
    ) -> Result<Self, DbError> {
        let runtime: Value = JOB_RUNTIME.decode_opt(job, runtime)?.unwrap_or_default();
        let provisioning: Value = JOB_PROVISIONING.decode_opt(job, provisioning)?.unwrap_or_default();
        let own = &runtime["offer"]["instance"]["resources"];
        let resources = if own.is_object() { own } else { &provisioning["instance_type"]["resources"] };
        let bytes = |mib: &Value| mib.as_i64().and_then(|mib| mib.checked_mul(1 << 20));
        Ok(Self {
            cpus: resources["cpus"].as_i64(),
            memory_bytes: bytes(&resources["memory_mib"]),
            gpu_memory_bytes: bytes(&resources["gpus"][0]["memory_mib"]),
        })
    }
}

/// Builds the series, newest first. Each point needs the previous sample, so there is one point fewer than samples.
pub fn series(job: &Job, samples: &[Sample]) -> Result<JobMetrics, DbError> {
    let points: Vec<(&Sample, &Sample)> = samples.iter().zip(samples.iter().skip(1)).collect();
    if points.is_empty() {
        return Ok(JobMetrics { metrics: Vec::new() });
    }
    let timestamps: Vec<Timestamp> = points.iter().map(|(point, _)| point.at).collect();
    let mut metrics = Vec::new();
    let mut add = |name: String, values: Vec<Value>| {
        metrics.push(Metric { name, timestamps: timestamps.clone(), values });
    };
    let of = |value: fn(&Sample) -> i64| points.iter().map(|(point, _)| value(point).into()).collect();
    let cpu = points.iter().map(|(point, before)| cpu_percent(point, before).into()).collect();
    add("cpu_usage_percent".into(), cpu);
    add("memory_usage_bytes".into(), of(|sample| sample.memory_bytes));
    add("memory_working_set_bytes".into(), of(|sample| sample.working_set_bytes));
    let given = JobResources::of(job.id, job.runtime.as_deref(), job.provisioning.as_deref())?;
    let read: Vec<&GpuUses> = points.iter().map(|(point, _)| &point.gpus).collect();
    // A GPU missing from a sample has no value to plot: only GPUs that are in all samples are shown.
    let count = read.iter().map(|gpus| gpus.len()).min().unwrap_or(0);
    let constants = [
        ("cpus_detected_num", given.cpus),
        ("memory_total_bytes", given.memory_bytes),
        ("gpus_detected_num", i64::try_from(count).ok()),
        ("gpu_memory_total_bytes", given.gpu_memory_bytes),
    ];
    for (name, value) in constants {
        if let Some(value) = value {
            add(name.into(), vec![value.into(); points.len()]);
        }
    }
    for gpu in 0..count {
        add(format!("gpu_memory_usage_bytes_gpu{gpu}"), read.iter().map(|g| g[gpu].0.into()).collect());
        add(format!("gpu_util_percent_gpu{gpu}"), read.iter().map(|g| g[gpu].1.into()).collect());
    }
    Ok(JobMetrics { metrics })
}

/// Percent of one processor: a job that uses four fully is at 400. Based on the host's clock, which may jump: then the
/// result is 0.
fn cpu_percent(point: &Sample, before: &Sample) -> i64 {
    let cores = cpu_cores((point.host_at, point.cpu_us), (before.host_at, before.cpu_us));
    (cores * 100.0).round() as i64
}

/// Processors used between two samples: each is the host's time and the CPU time until then.
pub(crate) fn cpu_cores(point: (Timestamp, i64), before: (Timestamp, i64)) -> f64 {
    let took = point.0.0.saturating_sub(before.0.0);
    let used = point.1.saturating_sub(before.1);
    if took <= 0 || used < 0 { 0.0 } else { used as f64 / took as f64 }
}

#[cfg(test)]
mod tests {
    use super::cpu_percent;
    use crate::db::job_metrics::Sample;
    use windlass_model::time::Timestamp;

    fn at(host_at: i64, cpu_us: i64) -> Sample {
        Sample {
            at: Timestamp(0),
            host_at: Timestamp(host_at),
            cpu_us,
            memory_bytes: 0,
            working_set_bytes: 0,
            gpus: Vec::new(),
        }
    }

    #[test]
    fn cpu_usage_is_computed_between_two_samples() {
        assert_eq!(cpu_percent(&at(20_000_000, 15_000_000), &at(10_000_000, 5_000_000)), 100);
        assert_eq!(cpu_percent(&at(20_000_000, 45_000_000), &at(10_000_000, 5_000_000)), 400);
        // A clock that jumped, a counter that restarted.
        assert_eq!(cpu_percent(&at(10, 15), &at(20, 5)), 0);
        assert_eq!(cpu_percent(&at(20, 5), &at(10, 15)), 0);
        assert_eq!(cpu_percent(&at(i64::MAX, i64::MAX), &at(0, 0)), 100);
    }
}
