//! Logs, metrics and offers; and empty lists for features that do not exist yet.

use axum::{
    body::Body,
    http::{HeaderName, header},
};
use windlass_api::{gpus, logs, metrics, operations::*, server::EmptyRequest, templates};

use crate::{
    app::App,
    auth::ProjectScope,
    error::Result,
    http::{ApiRoutes, ResponseHeaders},
    services::{SseStream, configurations, log_search, observability},
};

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .project::<PollLogs, _, _>(poll_logs)
        .project_events::<StreamLogs, _, _>(stream_logs)
        .project_bytes::<ReadRawLog, _, _>(raw_log)
        .project_events::<SearchLog, _, _>(search_log)
        .project::<ReadLogMarks, _, _>(log_marks)
        .project::<ReadJobMetrics, _, _>(job_metrics)
        .project::<ReadServiceMetrics, _, _>(service_metrics)
        .project::<ListGpus, _, _>(list_gpus)
        .project::<ListTemplates, _, _>(list_templates)
}

async fn poll_logs(app: App, scope: ProjectScope, requested: logs::PollRequest) -> Result<logs::Page> {
    observability::poll_logs(&app, &scope, &requested).await
}

async fn stream_logs(
    app: App,
    scope: ProjectScope,
    requested: logs::StreamRequest,
    last: Option<u64>,
) -> Result<SseStream<logs::StreamEvent>> {
    observability::stream_logs(&app, &scope, &requested, last).await
}

async fn raw_log(
    app: App,
    scope: ProjectScope,
    requested: logs::RawRequest,
) -> Result<(Body, ResponseHeaders)> {
    let raw = log_search::read_raw(&app, &scope, requested).await?;
    let mut headers = vec![
        (HeaderName::from_static("x-log-size"), raw.size.to_string()),
        (HeaderName::from_static("x-log-first"), "0".to_owned()),
    ];
    headers.extend(
        raw.file_name.map(|name| (header::CONTENT_DISPOSITION, format!("attachment; filename=\"{name}\""))),
    );
    Ok((raw.body, headers))
}

async fn search_log(
    app: App,
    scope: ProjectScope,
    requested: logs::SearchRequest,
    _: Option<u64>,
) -> Result<SseStream<logs::SearchEvent>> {
    log_search::search(&app, &scope, requested).await
}

async fn log_marks(app: App, scope: ProjectScope, requested: logs::MarksRequest) -> Result<logs::LogMarks> {
    log_search::marks(&app, &scope, requested).await
}

async fn job_metrics(
    app: App,
    scope: ProjectScope,
    requested: metrics::Query,
) -> Result<metrics::JobMetrics> {
    observability::job_metrics(&app, &scope, &requested).await
}

async fn service_metrics(
    app: App,
    scope: ProjectScope,
    requested: metrics::ServiceQuery,
) -> Result<metrics::ServiceMetrics> {
    observability::service_metrics(&app, &scope, &requested).await
}

async fn list_gpus(app: App, scope: ProjectScope, requested: gpus::ListRequest) -> Result<gpus::GpuList> {
    observability::list_gpus(&app, &scope, &requested).await
}

async fn list_templates(_: App, _: ProjectScope, _: EmptyRequest) -> Result<Vec<templates::Template>> {
    configurations::templates()
}
