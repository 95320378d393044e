//! Gateway and domain under which a service is published.

use windlass_api::error::ApiErrorCode;
use windlass_gateway::gateway_config::CertificateSource;
use windlass_model::{
    config::{
        Configuration,
        error::summary,
        gateway::Certificate,
        traffic::{GatewayChoice, Https},
    },
    id::{GatewayId, ProjectId, RunId},
};

use super::runs::ResolvedRunSpec;
use crate::{
    app::App,
    db::{
        DbError,
        documents::GATEWAY_CONFIGURATION,
        gateways::{self, Gateway},
        projects,
    },
    error::{Error, Result},
};

/// A service at a gateway.
pub(crate) struct GatewayPublication {
    pub(crate) gateway: GatewayId,
    pub(crate) domain: String,
    pub(crate) url: String,
    /// URL of the gateway for the models of all projects.
    pub(crate) models: String,
}

/// Name of the gateway itself, which services cannot have.
const OWN_LABEL: &str = "gateway";

/// Domain below which a gateway has its names.
fn domain(gateway: &Gateway) -> Option<&str> {
    gateway.wildcard_domain.as_deref().map(|domain| domain.trim_start_matches("*."))
}

/// Hostname of the gateway itself.
pub(crate) fn gateway_hostname(gateway: &Gateway) -> Option<String> {
    domain(gateway).map(|domain| format!("{OWN_LABEL}.{domain}").to_ascii_lowercase())
}

#[derive(Debug, thiserror::Error)]
#[error("invalid configuration: {0}")]
struct InvalidConfiguration(String);

/// Source of the certificates of its processes; `None` if they need none.
pub(crate) fn certificate(gateway: &Gateway) -> Result<Option<CertificateSource>, DbError> {
    let document: serde_json::Value = GATEWAY_CONFIGURATION.decode(gateway.id, &gateway.configuration)?;
    let configuration = Configuration::from_json(&document).map_err(|problems| {
        GATEWAY_CONFIGURATION.invalid(gateway.id, InvalidConfiguration(summary(&problems)))
    })?;
    Ok(match configuration {
        Configuration::Gateway(found) => match found.certificate {
            Some(Certificate::LetsEncrypt) => Some(CertificateSource::Acme),
            Some(Certificate::Files { chain, key }) => {
                Some(CertificateSource::Files { chain: chain.into(), key: key.into() })
            }
            // These belong to the load balancer of the cloud.
            Some(Certificate::Acm { .. } | Certificate::GcpCm { .. }) | None => None,
        },
        Configuration::Task(_)
        | Configuration::Service(_)
        | Configuration::DevEnvironment(_)
        | Configuration::Fleet(_)
        | Configuration::Volume(_) => None,
    })
}

fn refused(msg: String) -> Error {
    Error::Refused { code: ApiErrorCode::GatewayError, msg }
}

/// Returns where a service of this name will be published; `None` if it is reached only through the server. Rejects
/// what could not work. `run` is the service itself, if it exists.
pub(crate) async fn for_service(
    app: &App,
    project: ProjectId,
    spec: &ResolvedRunSpec,
    name: &str,
    run: Option<RunId>,
) -> Result<Option<GatewayPublication>> {
    let Configuration::Service(service) = spec.shape.configuration() else { return Ok(None) };
    let Some(gateway) = select_gateway(app, project, service.gateway.as_ref()).await? else {
        return Ok(None);
    };
    let Gateway { id, name: gateway_name, .. } = &gateway;
    let Some(domain) = domain(&gateway) else {
        return Err(refused(format!(
            "gateway `{gateway_name}` has no domain; set one with `windlass gateway update {gateway_name} \
             --domain DOMAIN`, or set `gateway: false`"
        )));
    };
    if gateways::live_nodes(app.db(), *id).await?.is_empty() {
        return Err(refused(format!(
            "gateway `{gateway_name}` is offline: none of its processes reported recently; run `windlass \
             gateway serve {gateway_name}` on its host, or set `gateway: false`"
        )));
    }
    if name == OWN_LABEL {
        return Err(refused(format!(
            "`{OWN_LABEL}.{domain}` is the name of gateway `{gateway_name}` itself; give the service another \
             name, or set `gateway: false`"
        )));
    }
    let (domain, own) = (format!("{name}.{domain}").to_ascii_lowercase(), format!("{OWN_LABEL}.{domain}"));
    if let Some((project, run)) = gateways::domain_owner(app.db(), &domain, run).await? {
        let msg = format!("the domain `{domain}` is taken by service `{run}` of project `{project}`");
        return Err(refused(msg));
    }
    let scheme = if uses_tls(&gateway, service.https)? { "https" } else { "http" };
    let models = format!("{scheme}://{}/proxy/models", own.to_ascii_lowercase());
    Ok(Some(GatewayPublication { gateway: *id, url: format!("{scheme}://{domain}/"), domain, models }))
}

async fn select_gateway(
    app: &App,
    project: ProjectId,
    choice: Option<&GatewayChoice>,
) -> Result<Option<Gateway>> {
    let is_requested = match choice {
        Some(GatewayChoice::Flag(false)) => return Ok(None),
        Some(GatewayChoice::Named(reference)) => {
            let name = &reference.name;
            let found = match &reference.project {
                Some(owner) => gateways::find_usable(app.db(), project, owner, name).await?,
                None => gateways::find_by_name(app.db(), project, name).await?,
            };
            return found.map(Some).ok_or_else(|| refused(format!("gateway `{name}` does not exist")));
        }
        Some(GatewayChoice::Flag(true)) => true,
        None => false,
    };
    let default = match projects::default_gateway(app.db(), project).await? {
        Some(id) => gateways::find(app.db(), id).await?.filter(|found| !found.deleted),
        None => None,
    };
    if is_requested && default.is_none() {
        return Err(refused("the project has no default gateway".to_owned()));
    }
    Ok(default)
}

fn uses_tls(gateway: &Gateway, wanted: Option<Https>) -> Result<bool, DbError> {
    let configuration: serde_json::Value =
        GATEWAY_CONFIGURATION.decode(gateway.id, &gateway.configuration)?;
    // Absent is the default certificate; null is none.
    let has_certificate = configuration.get("certificate").is_none_or(|certificate| !certificate.is_null());
    Ok(has_certificate && wanted != Some(Https::Flag(false)))
}
