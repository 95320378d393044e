//! Last samples of running jobs, as text for Prometheus.
//!
//! Names of projects and runs are labels here. The number of series is limited: only running jobs have any, and only up
//! to a maximum number of jobs.

use std::fmt::Write as _;

use windlass_model::time::Span;

use crate::db::{Db, DbError, job_metrics as rows};

/// Maximum number of jobs with series.
const JOBS_MAX: usize = 5_000;
/// Maximum age of a sample that describes the present.
const SAMPLE_AGE_MAX: Span = Span::mins(1);

/// Values, each with the index of its GPU if it belongs to one.
type Values = Vec<(Option<usize>, f64)>;

struct Series {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    values: fn(&rows::ActiveSample) -> Values,
}

const SERIES: &[Series] = &[
    Series {
        name: "windlass_job_cpu_seconds",
        kind: "counter",
        help: "CPU time used by the job",
        values: |job| vec![(None, job.cpu_us as f64 / 1e6)],
    },
    Series {
        name: "windlass_job_memory_bytes",
        kind: "gauge",
        help: "Memory used by the job",
        values: |job| vec![(None, job.memory_bytes as f64)],
    },
    Series {
        name: "windlass_job_memory_working_set_bytes",
        kind: "gauge",
        help: "Memory used by the job that cannot be reclaimed",
        values: |job| vec![(None, job.working_set_bytes as f64)],
    },
    Series {
        name: "windlass_job_gpu_memory_bytes",
        kind: "gauge",
        help: "Memory used on each GPU",
        values: |job| job.gpus.iter().enumerate().map(|(at, gpu)| (Some(at), gpu.0 as f64)).collect(),
    },
    Series {
        name: "windlass_job_gpu_usage_ratio",
        kind: "gauge",
        help: "Utilization of each GPU",
        values: |job| job.gpus.iter().enumerate().map(|(at, gpu)| (Some(at), gpu.1 as f64 / 100.0)).collect(),
    },
];

/// All series, without the end mark.
pub async fn text(db: &Db) -> Result<String, DbError> {
    Ok(write(&rows::list_active(db, SAMPLE_AGE_MAX, JOBS_MAX).await?))
}

fn write(jobs: &[rows::ActiveSample]) -> String {
    let mut out = String::new();
    for series in SERIES {
        let Series { name, kind, help, values } = series;
        // Writing to a string cannot fail.
        let _ = writeln!(out, "# HELP {name} {help}.\n# TYPE {name} {kind}");
        let total = if *kind == "counter" { "_total" } else { "" };
        for job in jobs {
            for (gpu, value) in values(job) {
                let _ = write!(
                    out,
                    "{name}{total}{{project=\"{}\",run=\"{}\",replica=\"{}\",job=\"{}\"",
                    Label(&job.project),
                    Label(&job.run),
                    job.replica_num,
                    job.job_num
                );
                if let Some(gpu) = gpu {
                    let _ = write!(out, ",gpu=\"{gpu}\"");
                }
                let _ = writeln!(out, "}} {value}");
            }
        }
    }
    out
}

/// Value of a label, with special characters escaped.
struct Label<'a>(&'a str);

impl std::fmt::Display for Label<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                other => f.write_char(other)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::write;
    use crate::db::job_metrics::ActiveSample;

    #[test]
    fn each_gpu_is_a_series_and_names_are_escaped() {
        let job = ActiveSample {
            project: "ma\"in\n".into(),
            run: "train\\1".into(),
            replica_num: 0,
            job_num: 2,
            cpu_us: 1_500_000,
            memory_bytes: 7,
            working_set_bytes: 5,
            gpus: vec![(11, 50), (12, 100)],
        };
        let text = write(&[job]);
        let labels = "project=\"ma\\\"in\\n\",run=\"train\\\\1\",replica=\"0\",job=\"2\"";
        assert!(text.contains(&format!("windlass_job_cpu_seconds_total{{{labels}}} 1.5\n")), "{text}");
        assert!(
            text.contains(&format!("windlass_job_gpu_usage_ratio{{{labels},gpu=\"0\"}} 0.5\n")),
            "{text}"
        );
        assert!(
            text.contains(&format!("windlass_job_gpu_memory_bytes{{{labels},gpu=\"1\"}} 12\n")),
            "{text}"
        );
        assert_eq!(write(&[]).lines().filter(|line| !line.starts_with('#')).count(), 0);
    }
}
