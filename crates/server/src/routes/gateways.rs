//! Gateways.

use windlass_api::{gateways::*, operations::*};

use crate::{
    app::App,
    auth::{GatewayCaller, ProjectScope},
    error::Result,
    http,
    services::{gateway_nodes, gateways},
};

pub(super) fn mount(routes: http::ApiRoutes) -> http::ApiRoutes {
    routes
        .project::<ListGateways, _, _>(list)
        .project::<ReadGateway, _, _>(read)
        .project::<PlanGateway, _, _>(plan)
        .project::<ApplyGateway, _, _>(apply)
        .project::<CreateGateway, _, _>(create)
        .project::<DeleteGateways, _, _>(delete)
        .project::<SetDefaultGateway, _, _>(set_default)
        .project::<SetWildcardDomain, _, _>(set_wildcard_domain)
        .project::<CreateGatewayToken, _, _>(create_token)
        .gateway::<ReadGatewayRoutes, _, _>(read_routes)
        .gateway::<ReportGateway, _, _>(report)
        .gateway::<CheckServiceToken, _, _>(check)
        .gateway::<LeaveGateway, _, _>(leave)
}

async fn list(app: App, scope: ProjectScope, requested: ListRequest) -> Result<Vec<Gateway>> {
    gateways::list(&app, &scope, &requested).await
}

async fn read(app: App, scope: ProjectScope, requested: NameRequest) -> Result<Gateway> {
    gateways::read(&app, &scope, &requested.name).await
}

async fn plan(app: App, scope: ProjectScope, requested: PlanRequest) -> Result<GatewayPlan> {
    gateways::plan(&app, &scope, requested).await
}

async fn apply(app: App, scope: ProjectScope, requested: ApplyRequest) -> Result<Gateway> {
    gateways::apply(&app, &scope, &requested).await
}

async fn create(app: App, scope: ProjectScope, requested: CreateRequest) -> Result<Gateway> {
    gateways::create_from(&app, &scope, &requested).await
}

async fn delete(app: App, scope: ProjectScope, requested: DeleteRequest) -> Result<()> {
    gateways::delete(&app, &scope, &requested.names).await
}

async fn set_default(app: App, scope: ProjectScope, requested: SetDefaultRequest) -> Result<()> {
    gateways::set_default(&app, &scope, &requested).await
}

async fn set_wildcard_domain(
    app: App,
    scope: ProjectScope,
    requested: SetWildcardDomainRequest,
) -> Result<Gateway> {
    gateways::set_wildcard_domain(&app, &scope, &requested).await
}

async fn create_token(app: App, scope: ProjectScope, requested: NameRequest) -> Result<GatewayToken> {
    gateways::create_token(&app, &scope, &requested.name).await
}

async fn read_routes(app: App, caller: GatewayCaller, requested: RoutesRequest) -> Result<GatewayRoutes> {
    gateway_nodes::routes(&app, &caller, requested).await
}

async fn report(app: App, caller: GatewayCaller, requested: GatewayReport) -> Result<()> {
    gateway_nodes::report(&app, caller.gateway, requested).await
}

async fn check(app: App, caller: GatewayCaller, requested: TokenCheckRequest) -> Result<TokenCheck> {
    gateway_nodes::check(&app, caller.gateway, requested).await
}

async fn leave(app: App, caller: GatewayCaller, requested: LeaveRequest) -> Result<()> {
    gateway_nodes::leave(&app, caller.gateway, requested).await
}
