//! `windlass metrics RUN`: the resource usage of its jobs during the last hour, or the recent requests of a service.

use serde::Serialize;
use windlass_api::{
    metrics::{JobMetrics, Metric, Query, ServiceMetrics, ServiceQuery},
    operations::{ReadJobMetrics, ReadServiceMetrics},
    runs::Run,
};
use windlass_model::time::{Span, Timestamp};

use crate::{
    cli::{OutputArgs, ServerArgs},
    context::{self, Context},
    error::CliError,
    exit::Exit,
    output::{self, ListView, format, sparkline, style::Style, table::Table, watch},
};

/// Retention of the server for running jobs.
const PERIOD: Span = Span::hours(1);
/// Maximum number of points in that period.
const POINTS_MAX: i64 = 1000;
const CHART_WIDTH: usize = 30;
/// Minimum width of a chart on a narrow terminal.
const CHART_WIDTH_MIN: usize = 8;
/// Width of a line without charts and without the name of the run: `-0-0  gpu=0  … 100%  … 100.0GB/141.0GB`.
const TEXT_WIDTH: usize = 36;

const EXAMPLES: &str = "\
Examples:
  windlass metrics train             CPU, memory and GPU usage as small charts, with the last values
  windlass metrics train -w          update the charts when they change
  windlass metrics train --job 1     only one node
  windlass metrics train -o jsonl    every data point
  windlass metrics page --requests   request rate, latency and responses of a service in the last minute

CPU usage is relative to all CPUs of the job. Data points are ten seconds apart; the charts show the last hour.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the run
    #[arg(value_name = "RUN")]
    pub(crate) name: String,
    /// Replica to show
    #[arg(long, value_name = "N")]
    pub(crate) replica: Option<i64>,
    /// Job of each replica to show: the rank of the node
    #[arg(long, value_name = "N")]
    pub(crate) job: Option<i64>,
    /// Show the requests of a service during the last minute, over all servers and gateways
    #[arg(long, conflicts_with_all = ["replica", "job"])]
    pub(crate) requests: bool,
    /// Update the output when it changes
    #[arg(short, long)]
    pub(crate) watch: bool,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Metrics of one job; newest first.
#[derive(Serialize)]
struct JobUsage {
    run: String,
    replica_num: i64,
    job_num: i64,
    metrics: Vec<Metric>,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    context::with_context(&args.at, async |cx| {
        let run = cx.run(&args.name).await?;
        if args.requests {
            return show_requests(cx, args).await;
        }
        let jobs = jobs(&run, args)?;
        if args.watch {
            return watch::watch_table(args.output.format, async |_| {
                Ok(table(&fetch_usage(cx, args, &jobs).await?, format::now()))
            })
            .await;
        }
        let used = fetch_usage(cx, args, &jobs).await?;
        let known: Vec<JobUsage> = used.into_iter().filter(|one| !one.metrics.is_empty()).collect();
        let none = format!(
            "No metrics of `{}` yet (status: {}). The first data point requires two samples, ten seconds apart.",
            args.name, run.status
        );
        let name = |one: &JobUsage| format!("{}-{}-{}", one.run, one.job_num, one.replica_num);
        ListView { project: Some(&cx.project), kind: "metrics", name, none: &none }.print(
            &known,
            args.output.format,
            |_| table(&known, format::now()),
        )?;
        Ok(Exit::Done)
    })
}

/// Prints the metrics of the service as a whole.
async fn show_requests(cx: &Context, args: &Args) -> Result<Exit, CliError> {
    let query = ServiceQuery { seconds: 60 };
    let request =
        async || match cx.client.call::<ReadServiceMetrics>(&[&cx.project, &args.name], &query).await {
            Ok(requested) => Ok(requested),
            Err(error) => Err(cx.explain(&error).await),
        };
    if args.watch {
        return watch::watch_table(args.output.format, async |_| {
            Ok(requests_table(&args.name, &request().await?))
        })
        .await;
    }
    let requested = request().await?;
    output::print_one(args.output.format, &requested, &args.name, |_| {
        let lines = requests_table(&args.name, &requested).lines(Style::stdout());
        lines.iter().for_each(|line| output::print_data(line));
    })?;
    Ok(Exit::Done)
}

fn requests_table(name: &str, requested: &ServiceMetrics) -> Table {
    let mut table = Table::new([
        "SERVICE",
        "PER SECOND",
        "IN FLIGHT",
        "WAITING",
        "P50",
        "P99",
        "AVERAGE",
        "2XX",
        "3XX",
        "4XX",
        "5XX",
    ]);
    let ms = |time: Option<f64>| time.map_or_else(String::new, |ms| format!("{ms:.1} ms"));
    let class = |at: usize| requested.classes.get(at).copied().unwrap_or_default().to_string();
    table.row(vec![
        name.into(),
        format!("{:.2}", requested.requests_per_second).into(),
        format!("{:.2}", requested.in_flight).into(),
        format!("{:.2}", requested.waiting).into(),
        ms(requested.p50_ms).into(),
        ms(requested.p99_ms).into(),
        ms(requested.average_ms).into(),
        class(1).into(),
        class(2).into(),
        class(3).into(),
        class(4).into(),
    ]);
    table
}

/// Replica and job numbers of the selected jobs.
fn jobs(run: &Run, args: &Args) -> Result<Vec<(i64, i64)>, CliError> {
    let number = |spec: &serde_json::Value, key: &str| spec[key].as_i64().unwrap_or(0);
    let all = run.jobs.iter().map(|job| {
        let spec = job.job_spec.value().unwrap_or_default();
        (number(&spec, "replica_num"), number(&spec, "job_num"))
    });
    let wanted = |(replica, job): &(i64, i64)| {
        args.replica.is_none_or(|wanted| wanted == *replica) && args.job.is_none_or(|wanted| wanted == *job)
    };
    let found: Vec<(i64, i64)> = all.filter(wanted).collect();
    if found.is_empty() {
        let problem = CliError::new(format!("no such job in run `{}`", args.name));
        return Err(
            problem.hint(format!("run `windlass ps` to list its {}", format::count(run.jobs.len(), "job")))
        );
    }
    Ok(found)
}

async fn fetch_usage(cx: &Context, args: &Args, jobs: &[(i64, i64)]) -> Result<Vec<JobUsage>, CliError> {
    let mut all = Vec::new();
    for (replica_num, job_num) in jobs.iter().copied() {
        let query =
            Query { replica_num, job_num, limit: POINTS_MAX, after: None, before: None, run_id: None };
        let answer = cx.client.call::<ReadJobMetrics>(&[&cx.project, &args.name], &query).await;
        let JobMetrics { metrics } = match answer {
            Ok(metrics) => metrics,
            Err(error) => return Err(cx.explain(&error).await),
        };
        all.push(JobUsage { run: args.name.clone(), replica_num, job_num, metrics });
    }
    Ok(all)
}

/// The hour that ends with the newest point: for a finished run, its last hour.
fn period(used: &[JobUsage], now: Timestamp) -> (i64, i64) {
    let newest =
        used.iter().flat_map(|one| &one.metrics).filter_map(|metric| metric.timestamps.first()).max();
    let until = newest.copied().unwrap_or(now);
    ((until - PERIOD).0, until.0)
}

fn series<'a>(metrics: &'a [Metric], name: &str) -> Option<&'a Metric> {
    metrics.iter().find(|metric| metric.name == name)
}

fn latest_value(metrics: &[Metric], name: &str) -> Option<f64> {
    series(metrics, name)?.values.first()?.as_f64()
}

/// Period of a chart in microseconds, and its width in characters.
type Frame = (i64, i64, usize);

/// Chart of one series relative to its full scale.
fn chart(metric: &Metric, full: f64, (from, until, width): Frame) -> String {
    let points = metric.timestamps.iter().zip(&metric.values);
    let points: Vec<(i64, f64)> = points.filter_map(|(at, value)| Some((at.0, value.as_f64()?))).collect();
    sparkline::sparkline(&points, from, until, width, full)
}

/// Maximum of the series, as the scale if the capacity is unknown.
fn max_value(metric: &Metric) -> f64 {
    metric.values.iter().filter_map(serde_json::Value::as_f64).fold(0.0, f64::max)
}

fn format_memory(metrics: &[Metric], name: &str, total: &str, period: Frame) -> String {
    let Some(metric) = series(metrics, name) else { return String::new() };
    let used = metric.values.first().and_then(serde_json::Value::as_f64).unwrap_or(0.0);
    match latest_value(metrics, total) {
        Some(total) => {
            format!("{} {}/{}", chart(metric, total, period), format_bytes(used), format_bytes(total))
        }
        None => format!("{} {}", chart(metric, max_value(metric), period), format_bytes(used)),
    }
}

/// Returns the width of charts with which a line of two fits the terminal.
fn chart_width(used: &[JobUsage], columns: Option<usize>) -> usize {
    let Some(columns) = columns else { return CHART_WIDTH };
    let name = used.iter().map(|one| one.run.chars().count()).max().unwrap_or(0);
    let charts = columns.saturating_sub(name + TEXT_WIDTH) / 2;
    charts.clamp(CHART_WIDTH_MIN, CHART_WIDTH)
}

fn table(used: &[JobUsage], now: Timestamp) -> Table {
    let (from, until) = period(used, now);
    let period = (from, until, chart_width(used, output::columns(&std::io::stdout())));
    let mut table = Table::new(["JOB", "OF", "UTILIZATION", "MEMORY"]);
    for one in used {
        let metrics = &one.metrics;
        let name = format!("{}-{}-{}", one.run, one.job_num, one.replica_num);
        // Stored as a percentage of one CPU.
        let cpus = latest_value(metrics, "cpus_detected_num").filter(|cpus| *cpus > 0.0).unwrap_or(1.0);
        let cpu = series(metrics, "cpu_usage_percent").map(|metric| {
            let now = metric.values.first().and_then(serde_json::Value::as_f64).unwrap_or(0.0) / cpus;
            format!("{} {now:.0}%", chart(metric, cpus * 100.0, period))
        });
        let memory_used = format_memory(metrics, "memory_working_set_bytes", "memory_total_bytes", period);
        table.row(vec![name.into(), "cpu".into(), cpu.unwrap_or_default().into(), memory_used.into()]);
        for gpu in 0.. {
            let Some(busy) = series(metrics, &format!("gpu_util_percent_gpu{gpu}")) else { break };
            let now = busy.values.first().and_then(serde_json::Value::as_f64).unwrap_or(0.0);
            let used = format!("gpu_memory_usage_bytes_gpu{gpu}");
            table.row(vec![
                "".into(),
                format!("gpu={gpu}").into(),
                format!("{} {now:.0}%", chart(busy, 100.0, period)).into(),
                format_memory(metrics, &used, "gpu_memory_total_bytes", period).into(),
            ]);
        }
    }
    table
}

/// `512MB`, `2.1GB`.
fn format_bytes(count: f64) -> String {
    let mb = count / f64::from(1 << 20);
    if mb < 1024.0 { format!("{mb:.0}MB") } else { format!("{:.1}GB", mb / 1024.0) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use windlass_api::metrics::Metric;
    use windlass_model::time::Timestamp;

    use super::{JobUsage, chart_width, format_bytes, table};
    use crate::output::style::Style;

    fn metric(name: &str, values: &[i64]) -> Metric {
        let minute = |at: usize| Timestamp::from_secs(10_000 - 60 * i64::try_from(at).unwrap());
        Metric {
            name: name.to_owned(),
            timestamps: (0..values.len()).map(minute).collect(),
            values: values.iter().map(|value| json!(value)).collect(),
        }
    }

    #[test]
    fn charts_are_as_wide_as_the_terminal_allows() {
        let used = [JobUsage { run: "train".to_owned(), replica_num: 0, job_num: 0, metrics: Vec::new() }];
        for (columns, expected) in [(None, 30), (Some(200), 30), (Some(80), 19), (Some(40), 8)] {
            assert_eq!(chart_width(&used, columns), expected, "{columns:?}");
        }
    }

    #[test]
    fn each_job_has_a_cpu_row_and_a_row_per_gpu() {
        let gb = 1 << 30;
        let used = JobUsage {
            run: "train".to_owned(),
            replica_num: 0,
            job_num: 1,
            metrics: vec![
                metric("cpu_usage_percent", &[400, 0, 0, 0]),
                metric("cpus_detected_num", &[4, 4, 4, 4]),
                metric("memory_working_set_bytes", &[2 * gb, gb, gb, gb]),
                metric("memory_total_bytes", &[4 * gb, 4 * gb, 4 * gb, 4 * gb]),
                metric("gpu_util_percent_gpu0", &[50, 100, 100, 100]),
                metric("gpu_memory_usage_bytes_gpu0", &[gb, gb, gb, gb]),
                metric("gpu_memory_total_bytes", &[8 * gb, 8 * gb, 8 * gb, 8 * gb]),
            ],
        };
        let lines = table(&[used], Timestamp(0)).lines(Style::plain());
        let blank = " ".repeat(28);
        assert_eq!(lines[1], format!("train-1-0  cpu    {blank}▁▃ 100%  {blank}▃▃ 2.0GB/4.0GB"));
        assert_eq!(lines[2], format!("-          gpu=0  {blank}█▇ 50%   {blank}▂▂ 1.0GB/8.0GB"));
    }

    #[test]
    fn byte_counts_are_formatted_in_mb_or_gb() {
        assert_eq!([format_bytes(0.0), format_bytes(5e8), format_bytes(3e9)], ["0MB", "477MB", "2.8GB"]);
    }
}
