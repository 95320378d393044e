//! Requests and reports of gateway processes.

use std::{
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};

use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, timeout};
use windlass_api::{Access, Document, gateways as wire};
use windlass_model::{
    decide::replicas::Traffic,
    event::{self, Entity, EventCause},
    gateway,
    id::{GatewayId, SubmissionId},
};

use crate::{
    app::App,
    auth::{self, GatewayCaller},
    db::{
        DbError, Unit, WriteOutcome,
        documents::GATEWAY_CONFIGURATION,
        gateways::{self, Gateway},
        service_replicas as rows,
    },
    error::{Error, Result},
    events::{EventSubject, actor, record},
    hints::Hint,
    proxy,
};

/// Routes are read after each hint, and at this interval.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
const WAIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum sizes in one report.
const TRAFFIC_ENTRIES_MAX: usize = 10_000;
const RELEASED_SEATS_MAX: usize = 10_000;
const ADDRESS_MAX: usize = 255;

/// Id of a gateway's process. A process cannot use the id of another gateway's process, or of a server.
fn proxy_id(gateway: GatewayId, node: uuid::Uuid) -> String {
    format!("{gateway}/{node}")
}

fn check_address(address: Option<&str>) -> Result<Option<&str>> {
    match address {
        Some(address) if address.len() > ADDRESS_MAX || address.contains(char::is_control) => {
            Err(Error::field("address", "must be a valid address"))
        }
        address => Ok(address),
    }
}

/// Returns the routes, once they differ from those that the process has. The seats are recorded before the process
/// receives a replica.
pub async fn routes(
    app: &App,
    caller: &GatewayCaller,
    requested: wire::RoutesRequest,
) -> Result<wire::GatewayRoutes> {
    let gateway = caller.gateway;
    let address = check_address(requested.address.as_deref())?;
    let id = proxy_id(gateway, requested.node);
    let until = Instant::now() + Duration::from_millis(requested.wait_ms).min(WAIT_TIMEOUT);
    let hints = app.hints().subscribe(Hint::Routes.as_str());
    let mut is_first = true;
    loop {
        // A replaced token ends the request: the routes contain passes.
        let token = gateways::token_hash(app.db(), gateway).await?;
        if token.as_deref() != Some(caller.token_hash.as_str()) {
            return Err(Error::Denied { msg: "Invalid token".into() });
        }
        let (reported, replicas) = proxy::build_gateway_config(app, gateway).await?;
        let text = serde_json::to_string(&reported)?;
        let version = hex::encode(Sha256::digest(text.as_bytes()));
        let is_new = requested.version.as_ref() != Some(&version);
        if is_first || is_new {
            let seen = gateways::record_node(&id, gateway, address);
            rows::record_gateway_node(app.db(), seen, &id, &replicas).await?;
        }
        if is_first {
            mark_in_service(app, gateway).await?;
            is_first = false;
        }
        if is_new {
            return Ok(wire::GatewayRoutes { version, routes: Some(Document::from_text(text)?) });
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(wire::GatewayRoutes { version, routes: None });
        }
        tokio::select! {
            _ = timeout(left.min(POLL_INTERVAL), hints.wait()) => {}
            () = app.closed() => return Ok(wire::GatewayRoutes { version, routes: None }),
        }
    }
}

/// Marks the gateway as in service once all its processes are connected.
async fn mark_in_service(app: &App, id: GatewayId) -> Result<()> {
    let Some(found) = gateways::find(app.db(), id).await? else { return Ok(()) };
    let mut steps = match found.status {
        gateway::Status::Submitted => vec![gateway::Event::Created],
        gateway::Status::Provisioning => Vec::new(),
        gateway::Status::Running | gateway::Status::Failed => return Ok(()),
    };
    let (present, wanted) = (gateways::live_nodes(app.db(), id).await?.len(), expected_nodes(&found)?);
    if present >= wanted {
        steps.push(gateway::Event::Ready);
    }
    let about = EventSubject {
        entity: Entity::Gateway,
        id: id.0,
        name: &found.name,
        project: Some(found.project_id),
    };
    let (mut status, mut unit) = (found.status, Unit::new());
    for step in steps {
        let because = EventCause {
            actor: actor(None),
            reason: "processes".into(),
            message: format!("{present} of {wanted} processes of the gateway are running"),
        };
        // Cannot fail: both transitions are allowed from these statuses.
        let Ok(moved) = event::transition::<gateway::GatewayLifecycle>(id.0, status, step, because) else {
            break;
        };
        unit = unit.and([gateways::set_status(id, status, moved.status)]);
        for reported in moved.record.iter() {
            unit = unit.and(record(app.db(), None, &about, reported)?);
        }
        status = moved.status;
    }
    match app.db().write(unit).await? {
        // Another process connected at the same time and recorded it.
        WriteOutcome::Done { .. } | WriteOutcome::Stale { .. } => Ok(()),
    }
}

/// Number of processes that a gateway should have.
pub(super) fn expected_nodes(gateway: &Gateway) -> Result<usize, DbError> {
    let configuration: serde_json::Value =
        GATEWAY_CONFIGURATION.decode(gateway.id, &gateway.configuration)?;
    Ok(configuration["replicas"].as_u64().and_then(|count| usize::try_from(count).ok()).unwrap_or(1))
}

pub async fn report(app: &App, gateway: GatewayId, report: wire::GatewayReport) -> Result<()> {
    if report.came.len() > TRAFFIC_ENTRIES_MAX || report.left.len() > RELEASED_SEATS_MAX {
        return Err(Error::refused("the report has too many entries"));
    }
    let id = proxy_id(gateway, report.node);
    let seen = gateways::record_node(&id, gateway, check_address(report.address.as_deref())?);
    rows::record_gateway_node(app.db(), seen, &id, &[]).await?;
    let (mut came, mut asleep) = (Vec::new(), Vec::new());
    for one in &report.came {
        // Reports about services of other gateways are ignored.
        let Some(run) = rows::find_published_run(app.db(), gateway, &one.project, &one.run).await? else {
            continue;
        };
        let traffic =
            Traffic { requests: one.requests, in_flight_us: one.in_flight_us, waiting_us: one.waiting_us };
        let answers = one.answers.as_ref().map(serde_json::to_string).transpose()?;
        came.push(rows::ServiceTraffic { run, traffic, answers });
        if one.asleep {
            asleep.push(run);
        }
    }
    if !came.is_empty() {
        rows::record_traffic(app.db(), &id, &came, &asleep).await?;
    }
    if !asleep.is_empty() {
        app.wake(&[Hint::Runs]);
    }
    for job in &report.left {
        rows::release_seat(app.db(), &id, SubmissionId(*job)).await?;
    }
    if !report.left.is_empty() {
        app.wake(&[Hint::JobsTerminating]);
    }
    Ok(())
}

/// Only for projects that use the gateway: tokens of other projects must not be tested here.
pub async fn check(
    app: &App,
    gateway: GatewayId,
    requested: wire::TokenCheckRequest,
) -> Result<wire::TokenCheck> {
    // Guesses through a gateway are rate-limited like those from one address.
    let place = IpAddr::V6(Ipv6Addr::from(gateway.0.as_u128()));
    let known = auth::is_server_token(app, &requested.token, place).await?;
    let refused = Ok(wire::TokenCheck { allowed: false, known });
    if !known {
        return refused;
    }
    let authorization = format!("Bearer {}", requested.token);
    let caller = match auth::authenticate(app, Some(&authorization)).await {
        Ok(caller) => caller,
        Err(Error::Denied { .. }) => return refused,
        Err(error) => return Err(error),
    };
    if caller.require_services().is_err() {
        return refused;
    }
    let scope = match auth::project_scope(app, caller, &requested.project, Vec::new()).await {
        Ok(scope) => scope,
        Err(Error::Unknown { .. }) => return refused,
        Err(error) => return Err(error),
    };
    let is_usable = gateways::is_usable(app.db(), scope.project.id, gateway).await?;
    let allowed = is_usable && scope.must(Access::ProjectUser).is_ok();
    Ok(wire::TokenCheck { allowed, known })
}

pub async fn leave(app: &App, gateway: GatewayId, requested: wire::LeaveRequest) -> Result<()> {
    rows::remove_proxy(app.db(), &proxy_id(gateway, requested.node)).await?;
    app.wake(&[Hint::JobsTerminating]);
    Ok(())
}
