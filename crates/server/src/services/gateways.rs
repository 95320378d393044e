//! Gateways: plan, apply, delete.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use windlass_api::{Document, gateways as wire, runs::ApplyAction};
use windlass_model::{
    config::{Configuration, unsupported},
    event::{Entity, Event, EventCause},
    gateway,
    id::GatewayId,
};

use super::{
    gateway_nodes, names,
    runs::{check_supported, problems_error},
};
use crate::{
    app::App,
    auth::{ProjectScope, Token},
    db::{
        Change, Unit, WriteOutcome,
        documents::GATEWAY_CONFIGURATION,
        gateways::{self, Gateway, GatewayNode, NewGateway},
        projects,
    },
    error::{Error, Result},
    events::{EventSubject, actor, note, record},
    hints::Hint,
    services::stored_document,
};

const NAME_ATTEMPTS_MAX: u8 = 10;
/// Fields that may change while a gateway exists.
const MUTABLE_FIELDS: [&str; 3] = ["domain", "default", "replicas"];

fn not_found() -> Error {
    Error::absent("Gateway")
}

/// Gateways of the project, and those that others export to it.
pub async fn list(
    app: &App,
    scope: &ProjectScope,
    requested: &wire::ListRequest,
) -> Result<Vec<wire::Gateway>> {
    let default = projects::default_gateway(app.db(), scope.project.id).await?;
    let mut all = Vec::new();
    for row in gateways::list(app.db(), scope.project.id).await? {
        let nodes = gateways::live_nodes(app.db(), row.id).await?;
        all.push(to_wire(&scope.project.name, default, row, &nodes)?);
    }
    if requested.include_imported {
        for (row, owner) in gateways::list_imported(app.db(), scope.project.id).await? {
            let nodes = gateways::live_nodes(app.db(), row.id).await?;
            all.push(to_wire(&owner, default, row, &nodes)?);
        }
    }
    Ok(all)
}

pub async fn read(app: &App, scope: &ProjectScope, name: &str) -> Result<wire::Gateway> {
    let found = gateways::find_by_name(app.db(), scope.project.id, name).await?.ok_or_else(not_found)?;
    to_wire_one(app, scope, found).await
}

async fn to_wire_one(app: &App, scope: &ProjectScope, row: Gateway) -> Result<wire::Gateway> {
    let default = projects::default_gateway(app.db(), scope.project.id).await?;
    let nodes = gateways::live_nodes(app.db(), row.id).await?;
    to_wire(&scope.project.name, default, row, &nodes)
}

fn to_wire(
    owner: &str,
    default: Option<GatewayId>,
    row: Gateway,
    nodes: &[GatewayNode],
) -> Result<wire::Gateway> {
    let wanted = gateway_nodes::expected_nodes(&row)?;
    let waits = (nodes.len() < wanted).then(|| {
        let name = &row.name;
        format!(
            "{} of {wanted} processes are running; start one with `windlass gateway serve {name}`",
            nodes.len()
        )
    });
    let replica = |(number, node): (i64, &GatewayNode)| wire::GatewayReplica {
        replica_num: number,
        hostname: node.address.clone(),
        backend: row.backend.clone(),
        region: row.region.clone(),
        status: gateway::ReplicaStatus::Running.as_str().to_owned(),
        status_message: None,
        created_at: row.created_at,
    };
    let replicas = (0..).zip(nodes).map(replica).collect();
    let address = nodes.iter().find_map(|node| node.address.clone());
    Ok(wire::Gateway {
        id: row.id.0,
        name: row.name,
        project_name: owner.to_owned(),
        configuration: stored_document(GATEWAY_CONFIGURATION, row.id, row.configuration)?,
        created_at: row.created_at,
        status: row.status.as_str().to_owned(),
        status_message: row.status_message.or(waits),
        default: default == Some(row.id),
        hostname: row.hostname.or(address),
        ip_address: row.ip_address,
        instance_id: row.instance_id,
        wildcard_domain: row.wildcard_domain,
        backend: row.backend,
        region: row.region,
        replicas,
    })
}

fn parse(document: &Document) -> Result<Value> {
    let value = document.value()?;
    let parsed = Configuration::from_json(&value).map_err(|problems| problems_error(&problems))?;
    check_supported(&unsupported::review(&parsed, unsupported::ReviewContext::default()))?;
    match parsed {
        Configuration::Gateway(_) => Ok(value),
        Configuration::Task(_)
        | Configuration::Service(_)
        | Configuration::DevEnvironment(_)
        | Configuration::Fleet(_)
        | Configuration::Volume(_) => {
            Err(Error::field("configuration", "the configuration is not a gateway"))
        }
    }
}

/// First field that cannot change in place.
fn immutable_change(old: &Value, new: &Value) -> Option<String> {
    let empty = serde_json::Map::new();
    let (old, new) = (old.as_object().unwrap_or(&empty), new.as_object().unwrap_or(&empty));
    let keys: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let field = |map: &serde_json::Map<String, Value>, key: &str| map.get(key).cloned().unwrap_or_default();
    keys.into_iter()
        .find(|key| !MUTABLE_FIELDS.contains(&key.as_str()) && field(old, key) != field(new, key))
        .cloned()
}

pub async fn plan(
    app: &App,
    scope: &ProjectScope,
    requested: wire::PlanRequest,
) -> Result<wire::GatewayPlan> {
    let configuration = parse(&requested.spec.configuration)?;
    let mut action = ApplyAction::Create;
    let mut current = None;
    if let Some(name) = configuration["name"].as_str() {
        names::check_resource("name", name)?;
        if let Some(found) = gateways::find_by_name(app.db(), scope.project.id, name).await? {
            if immutable_change(
                &GATEWAY_CONFIGURATION.decode(found.id, &found.configuration)?,
                &configuration,
            )
            .is_none()
            {
                action = ApplyAction::Update;
            }
            current = Some(to_wire_one(app, scope, found).await?);
        }
    }
    Ok(wire::GatewayPlan {
        project_name: scope.project.name.clone(),
        user: scope.caller.user.name.clone(),
        effective_spec: requested.spec.clone(),
        spec: requested.spec,
        current_resource: current,
        action,
    })
}

pub async fn apply(app: &App, scope: &ProjectScope, requested: &wire::ApplyRequest) -> Result<wire::Gateway> {
    let configuration = parse(&requested.plan.spec.configuration)?;
    let found = match configuration["name"].as_str() {
        Some(name) => gateways::find_by_name(app.db(), scope.project.id, name).await?,
        None => None,
    };
    let Some(found) = found else { return create(app, scope, configuration).await };
    let changed =
        || Error::refused("Failed to apply plan. Resource has been changed. Try again or use force apply.");
    let stored: Value = GATEWAY_CONFIGURATION.decode(found.id, &found.configuration)?;
    if !requested.force {
        let seen = requested.plan.current_resource.as_ref().ok_or_else(changed)?;
        if seen.id != found.id.0 || seen.configuration.value()? != stored {
            return Err(changed());
        }
    }
    if let Some(path) = immutable_change(&stored, &configuration) {
        return Err(Error::refused(format!(
            "`{path}` of a gateway cannot be changed; delete the gateway first"
        )));
    }
    let domain = configuration["domain"].as_str();
    let mut changes = vec![gateways::set_configuration(found.id, &configuration.to_string(), domain)];
    changes.extend(default_change(scope, found.id, &configuration));
    write(app, scope, &found, changes, "updated", "Gateway updated").await?;
    read(app, scope, &found.name).await
}

/// `true` makes it the default; if unset, it becomes the default if there is none.
fn default_change(scope: &ProjectScope, id: GatewayId, configuration: &Value) -> Option<Change> {
    match configuration["default"].as_bool() {
        Some(true) => Some(projects::set_default_gateway(scope.project.id, id)),
        Some(false) => None,
        None => Some(projects::set_first_default_gateway(scope.project.id, id)),
    }
}

pub async fn create_from(
    app: &App,
    scope: &ProjectScope,
    requested: &wire::CreateRequest,
) -> Result<wire::Gateway> {
    let configuration = parse(&requested.configuration)?;
    create(app, scope, configuration).await
}

async fn create(app: &App, scope: &ProjectScope, mut configuration: Value) -> Result<wire::Gateway> {
    let generated = configuration["name"].is_null();
    for attempt in 0..NAME_ATTEMPTS_MAX {
        if generated {
            configuration["name"] = json!(names::generate(attempt)?);
        }
        let (name, unit) = new_gateway(app, scope, &configuration)?;
        match app.db().write(unit).await {
            Ok(written) => {
                written.done()?;
                app.wake(&[Hint::Routes, Hint::Runs]);
                return read(app, scope, &name).await;
            }
            Err(error) if error.is_conflict_on("gateways_name_key") && generated => {}
            Err(error) if error.is_conflict_on("gateways_name_key") => return Err(Error::exists("Gateway")),
            Err(error) => return Err(error.into()),
        }
    }
    Err(Error::refused("no free name was found; set the `name` of the gateway"))
}

fn new_gateway(app: &App, scope: &ProjectScope, configuration: &Value) -> Result<(String, Unit)> {
    let (db, by) = (app.db(), scope.caller.user.id);
    let word = |key: &str| configuration[key].as_str().map(str::to_owned);
    let name = word("name").unwrap_or_default();
    names::check_resource("name", &name)?;
    app.check_backends(configuration["backend"].as_str())?;
    let id = GatewayId(db.new_id()?);
    let row = NewGateway {
        id,
        project_id: scope.project.id,
        name: name.clone(),
        backend: word("backend"),
        region: word("region"),
        configuration: configuration.to_string(),
        wildcard_domain: word("domain"),
        status: gateway::Status::Submitted,
    };
    let because =
        EventCause { actor: actor(Some(by)), reason: "applied".into(), message: "Gateway created".into() };
    let about =
        EventSubject { entity: Entity::Gateway, id: id.0, name: &name, project: Some(scope.project.id) };
    let created = Event::created::<gateway::GatewayLifecycle>(id.0, gateway::Status::Submitted, because);
    let unit = Unit::new()
        .and([gateways::insert(row)])
        .and(default_change(scope, id, configuration))
        .and(record(db, Some(by), &about, &created)?);
    Ok((name, unit))
}

async fn write(
    app: &App,
    scope: &ProjectScope,
    found: &Gateway,
    changes: Vec<Change>,
    reason: &str,
    message: &str,
) -> Result<()> {
    let about = EventSubject {
        entity: Entity::Gateway,
        id: found.id.0,
        name: &found.name,
        project: Some(found.project_id),
    };
    let reported = note(app.db(), Some(scope.caller.user.id), &about, reason, message.into())?;
    match app.db().write(Unit::new().and(changes).and(reported)).await? {
        WriteOutcome::Done { .. } => {
            app.wake(&[Hint::Routes, Hint::Runs]);
            Ok(())
        }
        WriteOutcome::Stale { .. } => {
            Err(Error::refused("the gateway was deleted, or a service uses it now"))
        }
    }
}

/// Deletes gateways. No resources need to be released: the processes find that their gateway is deleted, and stop
/// serving. If one does not exist or is in use, the request is rejected as a whole.
pub async fn delete(app: &App, scope: &ProjectScope, names: &[String]) -> Result<()> {
    let mut found = Vec::new();
    for name in names.iter().collect::<BTreeSet<_>>() {
        let one = gateways::find_by_name(app.db(), scope.project.id, name).await?.ok_or_else(not_found)?;
        let users = gateways::published_services(app.db(), one.id).await?;
        if !users.is_empty() {
            let users = users.join("`, `");
            return Err(Error::refused(format!(
                "gateway `{name}` is used by `{users}`; stop the services first"
            )));
        }
        found.push(one);
    }
    for gateway in &found {
        let change = vec![gateways::delete(gateway.id)];
        write(app, scope, gateway, change, "deleted", "Gateway deleted").await?;
    }
    Ok(())
}

/// Creates a new token for the processes of a gateway; the old one becomes invalid at once.
pub async fn create_token(app: &App, scope: &ProjectScope, name: &str) -> Result<wire::GatewayToken> {
    let found = gateways::find_by_name(app.db(), scope.project.id, name).await?.ok_or_else(not_found)?;
    let token = Token::draw()?;
    let change = vec![gateways::set_token(found.id, &token.hash())];
    write(app, scope, &found, change, "token_made", "Gateway token replaced").await?;
    Ok(wire::GatewayToken { token: token.text().to_owned() })
}

pub async fn set_default(app: &App, scope: &ProjectScope, requested: &wire::SetDefaultRequest) -> Result<()> {
    if requested.gateway_project.as_ref().is_some_and(|project| *project != scope.project.name) {
        return Err(Error::refused("a gateway of another project cannot be the default"));
    }
    let found =
        gateways::find_by_name(app.db(), scope.project.id, &requested.name).await?.ok_or_else(not_found)?;
    let change = vec![projects::set_default_gateway(scope.project.id, found.id)];
    write(app, scope, &found, change, "set_default", "Gateway set as default").await
}

pub async fn set_wildcard_domain(
    app: &App,
    scope: &ProjectScope,
    requested: &wire::SetWildcardDomainRequest,
) -> Result<wire::Gateway> {
    let found =
        gateways::find_by_name(app.db(), scope.project.id, &requested.name).await?.ok_or_else(not_found)?;
    let domain = requested.wildcard_domain.as_deref();
    let change = vec![gateways::set_wildcard_domain(found.id, domain)];
    write(app, scope, &found, change, "domain_set", "Gateway domain changed").await?;
    read(app, scope, &requested.name).await
}
