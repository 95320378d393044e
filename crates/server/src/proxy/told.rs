//! What a gateway is told: services that it publishes, and the way to the hosts of their replicas.

use std::collections::BTreeMap;

use windlass_backend::{Machine, Reach};
use windlass_gateway::way::{Site, Told, Way};
use windlass_model::id::{GatewayId, InstanceId, SubmissionId};

use super::table::Known;
use crate::{
    agents::{enrol, site},
    app::App,
    db::{DbError, agents, gateways, replicas as rows},
    services::publishing,
};

/// Everything that the gateway may know now, and the replicas that it will send requests to.
pub(crate) async fn told(app: &App, gateway: GatewayId) -> Result<(Told, Vec<SubmissionId>), DbError> {
    let published = rows::published(app.db(), gateway).await?;
    let services: Vec<rows::Service> = published.iter().map(|one| one.service.clone()).collect();
    let mut ready = if services.is_empty() { Vec::new() } else { rows::ready(app.db()).await? };
    ready.retain(|replica| services.iter().any(|service| service.run == replica.run));
    let mut routes = Known::default().routes(&services, &ready);
    for route in &mut routes {
        let of =
            |one: &&rows::Published| one.service.project == route.project && one.service.name == route.run;
        let Some(one) = published.iter().find(of) else { continue };
        route.domains = vec![one.domain.clone()];
        route.https = serde_json::from_str::<serde_json::Value>(&one.place)
            .is_ok_and(|place| place["url"].as_str().is_some_and(|url| url.starts_with("https:")));
    }
    let mut sites = BTreeMap::new();
    for replica in &ready {
        let name = replica.instance.to_string();
        if sites.contains_key(&name) {
            continue;
        }
        match way(app, replica.instance).await {
            Ok(site) => drop(sites.insert(name, site)),
            // The gateway finds nobody there and asks another replica.
            Err(why) => {
                tracing::warn!(instance = %replica.instance, %why, "tell a gateway the way to a host")
            }
        }
    }
    let found = gateways::find(app.db(), gateway).await?;
    let told = Told {
        services: routes,
        sites,
        own: found.as_ref().and_then(publishing::own_name),
        certificate: found.as_ref().and_then(publishing::certificate),
    };
    Ok((told, ready.iter().map(|replica| replica.id).collect()))
}

/// The words say what is missing, and nothing of what is there.
async fn way(app: &App, instance: InstanceId) -> Result<Site, String> {
    let words = |error: &dyn std::error::Error| error.to_string();
    let found = agents::reach(app.db(), instance).await.map_err(|error| words(&error))?;
    let machine = found.and_then(|(machine, _)| machine).ok_or("it has no machine")?;
    let machine: Machine = serde_json::from_str(&machine).map_err(|error| words(&error))?;
    let credential =
        enrol::credential(app.db(), app.keys(), instance).await.map_err(|error| words(&error))?;
    let way = match machine.reach.ok_or("the way to its agent is not known")? {
        Reach::Socket { path } => Way::Socket { path },
        Reach::Ssh { socket } => {
            let login = site::login(app.db(), app.keys(), instance).await.map_err(|error| words(&error))?;
            Way::Ssh { socket, login }
        }
        Reach::Queue => return Err("its jobs run behind a queue, which has no way in".to_owned()),
    };
    Ok(Site { credential, way })
}
