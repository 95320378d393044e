//! Calls about the host and the shim.

use axum::{Json as Answer, extract::State};
use serde::Deserialize;
use windlass_api::agent::{
    Health,
    shim::{self as wire, Component, Components, HostInfo, InstanceHealth, InstanceInfo},
};
use windlass_model::error_chain::format_chain;

use super::{ApiState, COMPAT_VERSION, Transport};
use crate::{
    host,
    http::{ErrorResponse, Json},
};

const RUNNER_SERVICE: &str = "dstack-runner";

/// Returns the agent's version to a windlass server, and to a dstack server a version that it never replaces.
fn reported_version(gate: &ApiState) -> String {
    match gate.listener {
        Transport::Socket => env!("CARGO_PKG_VERSION").to_owned(),
        Transport::Compat => COMPAT_VERSION.to_owned(),
    }
}

pub(super) async fn healthcheck(State(gate): State<ApiState>) -> Answer<Health> {
    Answer(Health { service: wire::SERVICE.to_owned(), version: reported_version(&gate) })
}

pub(super) async fn health(State(gate): State<ApiState>) -> Answer<InstanceHealth> {
    let problems = gate.shim.problems.lock().clone();
    let engine = crate::shim::boot::engine_problem(&gate.shim).await;
    Answer(InstanceHealth { dcgm: host::health::dcgm().await, problems, engine })
}

pub(super) async fn info(State(gate): State<ApiState>) -> Answer<InstanceInfo> {
    Answer(host::info::instance_info(&gate.shim.gpus))
}

pub(super) async fn host(State(gate): State<ApiState>) -> Result<Answer<HostInfo>, ErrorResponse> {
    let shim = gate.shim;
    let gathered = tokio::task::spawn_blocking(move || {
        host::info::gather(&shim.data, &shim.gpus, shim.processes.clone())
    })
    .await;
    match gathered {
        Ok(Ok(info)) => Ok(Answer(info)),
        Ok(Err(error)) => {
            Err(ErrorResponse::internal(format!("cannot inspect the host: {}", format_chain(&error))))
        }
        Err(error) => Err(ErrorResponse::internal(format!("cannot inspect the host: {error}"))),
    }
}

/// Lists shim and runner as installed: one binary contains both.
pub(super) async fn components(State(gate): State<ApiState>) -> Answer<Components> {
    let components = [RUNNER_SERVICE, wire::SERVICE].map(|name| Component {
        name: name.to_owned(),
        version: reported_version(&gate),
        status: "installed".to_owned(),
    });
    Answer(Components { components: components.into() })
}

#[derive(Debug, Deserialize)]
pub(super) struct InstallRequest {
    #[serde(default)]
    name: String,
    #[serde(default)]
    url: String,
}

/// Always refuses: a server that could choose a binary for the agent to run would control the host.
pub(super) async fn install(Json(install): Json<InstallRequest>) -> ErrorResponse {
    if install.url.is_empty() || ![RUNNER_SERVICE, wire::SERVICE].contains(&install.name.as_str()) {
        return ErrorResponse::bad_request("expected the `name` of a component and a `url`");
    }
    ErrorResponse::forbidden(
        "this agent does not accept binaries from a server; replace its binary on the host instead",
    )
}

#[derive(Debug, Deserialize)]
pub(super) struct ShutdownRequest {
    #[serde(default)]
    force: bool,
}

/// Ends this process. Tasks continue, and the next shim adopts them.
pub(super) async fn shutdown(State(gate): State<ApiState>, Json(shutdown): Json<ShutdownRequest>) {
    tracing::info!(force = shutdown.force, "shutdown requested; tasks continue");
    gate.shim.stop.cancel();
}
