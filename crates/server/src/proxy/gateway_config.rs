//! The state that a gateway receives: the services that it publishes, and how to connect to the hosts of their
//! replicas.

use std::collections::{BTreeMap, BTreeSet};

use windlass_api::agent::port_pass::PortPass;
use windlass_backend::{AgentEndpoint, BackendInstance};
use windlass_gateway::{
    gateway_config::{AgentAddress, GatewayConfig, ReplicaHost, SshLogin},
    route::Service,
};
use windlass_model::id::{GatewayId, InstanceId, SubmissionId};

use super::route_builder::RouteBuilder;
use crate::{
    agents::{
        enrolment::{EnrolmentError, Signer},
        ssh_target,
    },
    app::App,
    db::{
        DbError, agents,
        documents::{INSTANCE_PROVISIONING, RUN_SERVICE},
        gateways, service_replicas as rows,
    },
    services::service_domains,
};

/// Builds the present state for a gateway, and lists the replicas to which it will send requests.
pub(crate) async fn build_gateway_config(
    app: &App,
    gateway: GatewayId,
) -> Result<(GatewayConfig, Vec<SubmissionId>), DbError> {
    let published = rows::published_services(app.db(), gateway).await?;
    let services: Vec<rows::Service> = published.iter().map(|one| one.service.clone()).collect();
    let mut ready = if services.is_empty() { Vec::new() } else { rows::ready_replicas(app.db()).await? };
    ready.retain(|replica| services.iter().any(|service| service.run == replica.run));
    let mut routes = RouteBuilder::default().routes(&services, &ready);
    for route in &mut routes {
        let of = |one: &&rows::PublishedService| {
            one.service.project == route.project && one.service.name == route.run
        };
        let Some(one) = published.iter().find(of) else { continue };
        route.domains = vec![one.domain.clone()];
        let place: serde_json::Value = RUN_SERVICE.decode(one.service.run, &one.place)?;
        route.https = place["url"].as_str().is_some_and(|url| url.starts_with("https:"));
    }
    let mut sites = BTreeMap::new();
    let passes = if ready.is_empty() { None } else { Some(HostPasses::new(app, &routes).await?) };
    for replica in &ready {
        let name = replica.instance.to_string();
        let Some(passes) = passes.as_ref().filter(|_| !sites.contains_key(&name)) else { continue };
        match replica_host(app, passes, replica.instance).await {
            Ok(site) => drop(sites.insert(name, site)),
            // The gateway cannot connect there and uses another replica.
            Err(why) => {
                tracing::warn!(instance = %replica.instance, %why, "failed to build a gateway's connection to a host")
            }
        }
    }
    let found = gateways::find(app.db(), gateway).await?;
    let reported = GatewayConfig {
        services: routes,
        sites,
        own: found.as_ref().and_then(service_domains::gateway_hostname),
        certificate: found.as_ref().map(service_domains::certificate).transpose()?.flatten(),
    };
    Ok((reported, ready.iter().map(|replica| replica.id).collect()))
}

/// A pass is valid for one to two of these. Times are rounded, so that the state changes only once per period.
const PASS_VALIDITY_SECS: i64 = 24 * 3600;

/// Passes with which a gateway authenticates at hosts. It never receives their credentials: with those it could run
/// anything there.
struct HostPasses {
    /// The signer, or the reason why there is none.
    signer: Result<Signer, String>,
    /// Ports of the services' replicas, by host.
    tasks: BTreeMap<InstanceId, BTreeMap<SubmissionId, BTreeSet<u16>>>,
    expires_at: i64,
}

impl HostPasses {
    async fn new(app: &App, routes: &[Service]) -> Result<Self, DbError> {
        let signer = match Signer::of(app.db(), app.keys()).await {
            Ok(signer) => Ok(signer),
            Err(EnrolmentError::Db(error)) => return Err(error),
            Err(error) => Err(error.to_string()),
        };
        let now = app.db().now().await?.0 / 1_000_000;
        let mut tasks: BTreeMap<InstanceId, BTreeMap<SubmissionId, BTreeSet<u16>>> = BTreeMap::new();
        for replica in routes.iter().flat_map(|route| &route.groups).flat_map(|group| &group.replicas) {
            let Some((call, port)) = super::parse_target(&replica.target) else { continue };
            tasks.entry(call.instance).or_default().entry(call.submission).or_default().insert(port);
        }
        Ok(Self { signer, tasks, expires_at: (now / PASS_VALIDITY_SECS + 2) * PASS_VALIDITY_SECS })
    }

    fn of(&self, instance: InstanceId) -> Result<String, String> {
        let tasks = self.tasks.get(&instance).cloned().unwrap_or_default();
        self.signer()?
            .pass(&PortPass { instance, tasks, expires_at: self.expires_at })
            .map_err(|error| error.to_string())
    }

    fn signer(&self) -> Result<&Signer, String> {
        self.signer.as_ref().map_err(Clone::clone)
    }

    /// Private SSH key that opens a connection to the agent and nothing else.
    fn ssh_key(&self, instance: InstanceId) -> Result<String, String> {
        let (_, private) = self.signer()?.gateway_key(instance).map_err(|error| error.to_string())?;
        Ok(private)
    }
}

/// Returns how to connect to a host. Errors name what is missing and contain no data of the host.
async fn replica_host(app: &App, passes: &HostPasses, instance: InstanceId) -> Result<ReplicaHost, String> {
    let words = |error: &dyn std::error::Error| error.to_string();
    let found = agents::find_machine(app.db(), instance).await.map_err(|error| words(&error))?;
    let machine = found.and_then(|(machine, _)| machine).ok_or("the instance is not created yet")?;
    let machine: BackendInstance =
        INSTANCE_PROVISIONING.decode(instance, &machine).map_err(|error| words(&error))?;
    let credential = passes.of(instance)?;
    let address = match machine.reach.ok_or("the address of its agent is not known")? {
        AgentEndpoint::Socket { path } => AgentAddress::Socket { path },
        AgentEndpoint::Ssh { .. } => {
            let login = ssh_target::load_login(app.db(), app.keys(), instance)
                .await
                .map_err(|error| words(&error))?;
            if login.via.is_some() {
                return Err("it is behind a jump host, whose key no gateway receives".to_owned());
            }
            AgentAddress::Relay { login: SshLogin { key: passes.ssh_key(instance)?, ..login } }
        }
        AgentEndpoint::Queue => {
            return Err("its jobs run in a queue, which accepts no connections".to_owned());
        }
        AgentEndpoint::Backend { backend } => {
            return Err(format!(
                "it is reached through backend `{backend}`, which gateways have no access to"
            ));
        }
    };
    Ok(ReplicaHost { credential, address })
}
