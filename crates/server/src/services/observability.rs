//! Logs, metrics and offers, for authorized callers.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use futures_util::{StreamExt as _, stream};
use uuid::Uuid;
use windlass_api::{gpus, logs, metrics};
use windlass_gateway::stats::quantile_us;
use windlass_model::{
    id::{RunId, SubmissionId},
    time::{Span, Timestamp},
};

use super::{SseEvent, SseStream, offers, runs::ResolvedRunSpec};
use crate::{
    app::App,
    auth::ProjectScope,
    db::{documents::SERVICE_ANSWERS, job_metrics::recent, jobs, runs, service_replicas},
    error::{Error, Result},
    job_metrics::{prometheus, series},
    logs::{
        Log, LogSource, page,
        readers::{LogReader, ReadEvent, ReadStart},
    },
};

const LIMIT_MAX: i64 = 1000;

pub async fn poll_logs(app: &App, scope: &ProjectScope, requested: &logs::PollRequest) -> Result<logs::Page> {
    if !(0..=LIMIT_MAX).contains(&requested.limit) {
        return Err(Error::field("limit", "must be from 0 to 1000"));
    }
    let range =
        page::requested_range(requested).map_err(|error| Error::field("next_token", error.to_string()))?;
    let log =
        find_log(app, scope, requested.job_submission_id, &requested.run_name, requested.diagnose).await?;
    let mask = app.masks().of(&log).await?;
    let page = page::read_page(app.logs().as_ref(), &log, range, mask.as_deref()).await?;
    Ok(if requested.raw { page } else { page::strip_terminal_codes(page, requested.descending) })
}

/// Streams logs. `resume` is the position of a client that reconnects.
pub async fn stream_logs(
    app: &App,
    scope: &ProjectScope,
    requested: &logs::StreamRequest,
    resume: Option<u64>,
) -> Result<SseStream<logs::StreamEvent>> {
    let log =
        find_log(app, scope, requested.job_submission_id, &requested.run_name, requested.diagnose).await?;
    let start = ReadStart {
        offset: resume.unwrap_or(requested.offset),
        after: requested.start_time.map(|time| time.0),
        follow: requested.follow,
    };
    let reader = app.tails().read(log, start).ok_or(Error::Busy { msg: "Too many streams are open" })?;
    Ok(log_events(reader))
}

/// Everything that a reader reads, as events.
fn log_events(reader: LogReader) -> SseStream<logs::StreamEvent> {
    stream::unfold(Some(reader), |reader| async move {
        let mut reader = reader?;
        let batch = reader.next_with_retries().await?;
        let end = reader.offset();
        let data = match batch {
            ReadEvent::Quiet => return Some((SseEvent::Alive, Some(reader))),
            ReadEvent::Piece(piece) => logs::StreamEvent::Log {
                offset: piece.offset,
                timestamp: Timestamp(piece.at),
                message: STANDARD.encode(&piece.bytes),
            },
            ReadEvent::End(over) => {
                let data = logs::StreamEvent::End {
                    offset: end,
                    status: over.status.to_owned(),
                    exit_status: over.exit_status,
                    termination_reason: over.termination_reason,
                };
                return Some((SseEvent::Event { id: end, name: data.name(), data }, None));
            }
        };
        Some((SseEvent::Event { id: end, name: data.name(), data }, Some(reader)))
    })
    .boxed()
}

/// Finds a log. The submission must be one of that run, and the run one of this project (O5).
pub(super) async fn find_log(
    app: &App,
    scope: &ProjectScope,
    submission: Uuid,
    run_name: &str,
    diagnose: bool,
) -> Result<Log> {
    let job = jobs::find(app.db(), SubmissionId(submission)).await?;
    let job = job
        .filter(|job| job.project_id == scope.project.id)
        .ok_or_else(|| Error::absent("Job submission"))?;
    let run = runs::find(app.db(), job.run_id).await?;
    if run.is_none_or(|run| run.run.name != run_name) {
        return Err(Error::absent("Job submission"));
    }
    let stream = if diagnose { LogSource::Runner } else { LogSource::Job };
    Ok(Log { project: job.project_id, run: job.run_id, submission: job.id, stream })
}

/// Metrics of the newest submission of a job.
pub async fn job_metrics(
    app: &App,
    scope: &ProjectScope,
    requested: &metrics::Query,
) -> Result<metrics::JobMetrics> {
    if !(1..=LIMIT_MAX).contains(&requested.limit) {
        return Err(Error::field("limit", "must be from 1 to 1000"));
    }
    let name = scope.path.first().map(String::as_str).unwrap_or_default();
    let found = match requested.run_id {
        Some(id) => runs::find(app.db(), RunId(id)).await?,
        None => runs::find_by_name(app.db(), scope.project.id, name).await?,
    };
    let found = found.filter(|found| found.run.project_id == scope.project.id && found.run.name == name);
    let run = found.ok_or_else(|| Error::absent("Run"))?.run.id;
    let jobs = jobs::list_by_runs(app.db(), &[run], Some(1)).await?;
    let job =
        jobs.iter().find(|job| job.replica_num == requested.replica_num && job.job_num == requested.job_num);
    let job = job.ok_or_else(|| Error::absent("Job"))?;
    // A point needs the previous sample.
    let samples = recent(app.db(), job.id, requested.after, requested.before, requested.limit + 1).await?;
    Ok(series(job, &samples)?)
}

/// Recent requests of a service, over all proxies.
pub async fn service_metrics(
    app: &App,
    scope: &ProjectScope,
    requested: &metrics::ServiceQuery,
) -> Result<metrics::ServiceMetrics> {
    if !(5..=300).contains(&requested.seconds) {
        return Err(Error::field("seconds", "must be from 5 to 300"));
    }
    let name = scope.path.first().map(String::as_str).unwrap_or_default();
    let found = runs::find_by_name(app.db(), scope.project.id, name).await?;
    let run = found.ok_or_else(|| Error::absent("Run"))?.run;
    if run.service.is_none() {
        return Err(Error::refused(format!("run `{name}` is not a service")));
    }
    let window = Span::secs(requested.seconds);
    let traffic = service_replicas::traffic(app.db(), run.id, None, window).await?.unwrap_or_default();
    let mut sum = metrics::ResponseCounts::default();
    for reported in service_replicas::recent_answers(app.db(), run.id, window).await? {
        let one: metrics::ResponseCounts = SERVICE_ANSWERS.decode(run.id, &reported)?;
        sum.latency_us += one.latency_us;
        for (all, one) in [(&mut sum.classes, one.classes), (&mut sum.buckets, one.buckets)] {
            all.resize(all.len().max(one.len()), 0);
            all.iter_mut().zip(one).for_each(|(sum, count)| *sum += count);
        }
    }
    let answered: u64 = sum.buckets.iter().sum();
    let ms = |part| quantile_us(&sum.buckets, part).map(|us| us / 1e3);
    let seconds = requested.seconds as f64;
    Ok(metrics::ServiceMetrics {
        seconds: requested.seconds,
        requests_per_second: traffic.requests as f64 / seconds,
        in_flight: traffic.in_flight_us as f64 / 1e6 / seconds,
        waiting: traffic.waiting_us as f64 / 1e6 / seconds,
        average_ms: (answered > 0).then(|| sum.latency_us as f64 / 1e3 / answered as f64),
        p50_ms: ms(0.5),
        p99_ms: ms(0.99),
        classes: sum.classes,
    })
}

/// Metrics of the server, and the resource usage of running jobs.
pub async fn prometheus(app: &App) -> String {
    let jobs = prometheus::text(app.db()).await.unwrap_or_else(|error| {
        // Metrics of the server are needed most when its database has problems.
        tracing::warn!(%error, "failed to read job metrics");
        String::new()
    });
    let database = app.db().counts().prometheus();
    app.metrics().text(&(jobs + &crate::proxy::metrics(app.routes()) + &database))
}

/// Offers of the first job, by GPU.
pub async fn list_gpus(
    app: &App,
    scope: &ProjectScope,
    requested: &gpus::ListRequest,
) -> Result<gpus::GpuList> {
    let by = offers::GpuGrouping::read(requested.group_by.as_deref().unwrap_or_default())?;
    let spec = ResolvedRunSpec::read(&requested.run_spec, None, &scope.default_images(app))?;
    let supply = offers::load_supply(app, scope.project.id).await?;
    let jobs = spec.plan()?;
    let found = jobs.first().map(|job| offers::for_job(&supply, &spec.shape, job)).unwrap_or_default();
    let mut gpus = offers::by_gpu(&found, by);
    if requested.reverse {
        gpus.reverse();
    }
    Ok(gpus::GpuList { gpus, cpus: None })
}
