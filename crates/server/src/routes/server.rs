//! The server itself, and operations outside of projects.

use windlass_api::{
    auth,
    backends::BackendType,
    operations::*,
    server::{EmptyRequest, Health, Info, Pipeline, SettingList},
};

use windlass_engine::status::Snapshot;

use crate::{
    app::App,
    auth::Caller,
    error::Result,
    http::ApiRoutes,
    services::{observability, settings},
};

/// API version, which clients compare with their own.
const API_VERSION: &str = "0.22.5";

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .open::<CheckHealth, _, _>(health)
        .token::<ReadMetrics, _, _, _>(metrics)
        .open::<ReadServerInfo, _, _>(info)
        .token::<ListPipelines, _, _, _>(pipelines)
        .token::<ListSettings, _, _, _>(list_settings)
        .open::<ListAuthProviders, _, _>(providers)
        .open::<ReadNextRedirect, _, _>(next_redirect)
        .open::<ListBackendTypes, _, _>(backend_types)
}

async fn health(_: App, _: EmptyRequest) -> Result<Health> {
    Ok(Health { status: "running".into() })
}

async fn metrics(app: App, _: Caller, _: EmptyRequest) -> Result<String> {
    Ok(observability::prometheus(&app).await)
}

async fn pipelines(app: App, _: Caller, _: EmptyRequest) -> Result<Vec<Pipeline>> {
    let one = |snapshot: Snapshot| Pipeline {
        name: snapshot.pipeline.to_owned(),
        queued: snapshot.queued as u64,
        in_work: snapshot.in_work as u64,
        oldest_seconds: snapshot.oldest_age.map(|age| age.as_secs_f64()),
        applied_last_minute: snapshot.applied_last_minute,
        claimed: snapshot.totals.claimed,
        applied: snapshot.totals.applied,
        stale: snapshot.totals.stale,
        reset: snapshot.totals.reset,
        lost: snapshot.totals.lost,
        errors: snapshot.totals.errors,
    };
    Ok(app.metrics().pipelines().into_iter().map(one).collect())
}

async fn list_settings(app: App, _: Caller, _: EmptyRequest) -> Result<SettingList> {
    Ok(settings::list(&app))
}

async fn info(app: App, _: EmptyRequest) -> Result<Info> {
    Ok(Info {
        server_version: Some(API_VERSION.into()),
        windlass_version: Some(env!("CARGO_PKG_VERSION").into()),
        upload_bytes_max: Some(app.settings().limits.upload_bytes as u64),
    })
}

async fn providers(_: App, _: EmptyRequest) -> Result<Vec<auth::Provider>> {
    Ok(Vec::new())
}

async fn next_redirect(_: App, _: auth::NextRedirectRequest) -> Result<auth::NextRedirect> {
    Ok(auth::NextRedirect { redirect_url: None })
}

async fn backend_types(_: App, _: EmptyRequest) -> Result<Vec<BackendType>> {
    Ok(vec![BackendType::Remote])
}
