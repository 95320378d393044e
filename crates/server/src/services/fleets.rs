//! Fleets: plan, apply, request deletion.
//!
//! Private keys of SSH fleets are received with the spec, sealed, and never returned: `spec` is what all members may
//! see, `spec_sealed` is the whole SSH part.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use windlass_api::{
    Document, Operation, fleets as wire,
    operations::{ApplyFleet, DeleteFleetInstances, DeleteFleets},
    runs::ApplyAction,
};
use windlass_model::{
    backend_kind::BackendType,
    config::{
        Configuration,
        fleet::{Blocks, Fleet as Config, Host},
    },
    event::{Entity, Event, EventCause},
    fleet,
    id::{FleetId, InstanceId, ProjectId},
    instance,
    plan::diff,
};

use super::{
    fleet_hosts, grants, instances as instance_service, names, offers,
    runs::{problems_error, visible_projects},
};
use crate::{
    app::App,
    auth::{Caller, ProjectScope},
    db::{
        Change, Page, Unit, WriteOutcome, backends,
        documents::FLEET_SPEC,
        fleets::{self, Fleet, NewFleet, Query},
        instances::{self, NamedProjects, NewInstance},
        projects,
    },
    encryption::AssociatedData,
    error::{Error, Result},
    events::{EventSubject, actor, note, record},
    hints::Hint,
    limits::{self, limit_hint},
    parsed_fleet_spec::ParsedFleetSpec,
};

const LIST_MAX: i64 = 100;
const NAME_ATTEMPTS_MAX: u8 = 10;
/// Maximum number of offers in one response.
const OFFERS_MAX: usize = 50;

pub async fn list(app: &App, caller: &Caller, requested: wire::ListRequest) -> Result<Vec<wire::Fleet>> {
    if !(0..=LIST_MAX).contains(&requested.limit) {
        return Err(Error::field("limit", "must be from 0 to 100"));
    }
    let Some(projects) = visible_projects(app, caller, requested.project_name.as_deref()).await? else {
        return Ok(Vec::new());
    };
    let page = Page {
        time: requested.prev_created_at,
        id: requested.prev_id,
        limit: requested.limit,
        ascending: requested.ascending,
        ..Page::default()
    };
    let include_imported = requested.include_imported;
    let query = Query { projects, include_imported, only_active: requested.only_active, page };
    to_wire(app, fleets::list(app.db(), &query).await?, query.projects.as_deref()).await
}

/// Fleets of the project, and those that others export to it.
pub async fn list_project(
    app: &App,
    scope: &ProjectScope,
    requested: &wire::ProjectListRequest,
) -> Result<Vec<wire::Fleet>> {
    let page = Page { limit: i64::from(i32::MAX), ascending: true, ..Page::default() };
    let include_imported = requested.include_imported;
    let projects = Some(vec![scope.project.id]);
    let query = Query { projects, include_imported, only_active: false, page };
    to_wire(app, fleets::list(app.db(), &query).await?, query.projects.as_deref()).await
}

pub async fn read(app: &App, scope: &ProjectScope, requested: &wire::ReadRequest) -> Result<wire::Fleet> {
    let found = match (requested.id, &requested.name) {
        (Some(id), _) => fleets::find(app.db(), FleetId(id)).await?,
        (None, Some(name)) => fleets::find_by_name(app.db(), scope.project.id, name).await?,
        (None, None) => return Err(Error::refused("name or id must be specified")),
    };
    let found = found.filter(|row| row.project_id == scope.project.id).ok_or_else(not_found)?;
    to_wire_one(app, found).await
}

fn not_found() -> Error {
    Error::absent("Fleet")
}

async fn to_wire_one(app: &App, row: Fleet) -> Result<wire::Fleet> {
    let project = row.project_id;
    to_wire(app, vec![row], Some(&[project])).await?.pop().ok_or_else(not_found)
}

async fn to_wire(app: &App, rows: Vec<Fleet>, named: NamedProjects<'_>) -> Result<Vec<wire::Fleet>> {
    let ids: Vec<FleetId> = rows.iter().map(|row| row.id).collect();
    let project_ids: Vec<ProjectId> = rows.iter().map(|row| row.project_id).collect();
    let names = projects::names(app.db(), &project_ids).await?;
    let mut members = BTreeMap::<Option<uuid::Uuid>, Vec<_>>::new();
    let found = instances::list_by_fleets(app.db(), &ids).await?;
    for instance in instance_service::to_wire(app, found, named).await? {
        members.entry(instance.fleet_id).or_default().push(instance);
    }
    rows.into_iter()
        .map(|row| {
            Ok(wire::Fleet {
                id: row.id.0,
                name: row.name,
                project_name: names.get(&row.project_id).cloned().unwrap_or_default(),
                spec: Document::new(&spec_to_wire(FLEET_SPEC.decode(row.id, &row.spec)?))?,
                created_at: row.created_at,
                status: row.status.as_str().to_owned(),
                status_message: row.status_message,
                instances: members.remove(&Some(row.id.0)).unwrap_or_default(),
            })
        })
        .collect()
}

/// Shows backends that clients do not know as `remote`.
fn spec_to_wire(mut spec: Value) -> Value {
    if let Some(backends) = spec["configuration"].get_mut("backends").and_then(Value::as_array_mut) {
        for backend in backends.iter_mut() {
            let known = backend.as_str().and_then(BackendType::parse);
            if let Some(known) = known {
                *backend = json!(known.client_type().as_str());
            }
        }
        backends.dedup();
    }
    spec
}

/// A fleet spec that a client sent: the public part, and the part that is sealed.
struct FleetSpec {
    open: Value,
    ssh_config: Option<Value>,
    configuration: Config,
}

impl FleetSpec {
    fn read(sent: &Document) -> Result<Self> {
        let mut open = sent.value()?;
        let missing = || Error::field("spec", "must be an object with a `configuration`");
        let configuration = open.get("configuration").ok_or_else(missing)?;
        let Configuration::Fleet(config) =
            Configuration::from_json(configuration).map_err(|problems| problems_error(&problems))?
        else {
            return Err(Error::field("spec", "the configuration is not a fleet"));
        };
        let ssh_config = configuration.get("ssh_config").filter(|ssh| !ssh.is_null()).cloned();
        hide_private_keys(&mut open);
        Ok(Self { open, ssh_config, configuration: *config })
    }

    fn name(&self) -> Option<&str> {
        self.open["configuration"]["name"].as_str()
    }

    fn backends(&self) -> impl Iterator<Item = &str> {
        let configuration = &self.open["configuration"];
        let listed = configuration["backends"].as_array().into_iter().flatten();
        listed.chain([&configuration["backend"]]).filter_map(Value::as_str)
    }

    fn hosts(&self) -> &[Host] {
        self.configuration.ssh_config.as_ref().map_or(&[], |ssh| &ssh.hosts)
    }
}

/// Removes every `ssh_key.private`, wherever it is.
fn hide_private_keys(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (key, value) in map.iter_mut() {
                if key == "ssh_key"
                    && let Some(pair) = value.as_object_mut()
                {
                    pair.insert("private".into(), Value::Null);
                }
                hide_private_keys(value);
            }
        }
        Value::Array(list) => list.iter_mut().for_each(hide_private_keys),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

pub async fn plan(app: &App, scope: &ProjectScope, requested: &wire::PlanRequest) -> Result<wire::FleetPlan> {
    let spec = FleetSpec::read(&requested.spec)?;
    app.check_backends(spec.backends())?;
    grants::check(app, scope, spec.backends()).await?;
    if let Some(ssh) = &spec.configuration.ssh_config {
        fleet_hosts::check_keys(ssh)?;
        fleet_hosts::check_addresses(app, ssh)?;
    }
    let mut current = None;
    let mut action = ApplyAction::Create;
    if let Some(name) = spec.name() {
        names::check_resource("name", name)?;
        if let Some(found) = fleets::find_by_name(app.db(), scope.project.id, name).await? {
            // A fleet that is being deleted is created again, once it is gone.
            if found.termination_asked_at.is_none() && can_update(&found, &spec)?.is_ok() {
                action = ApplyAction::Update;
            }
            current = Some(to_wire_one(app, found).await?);
        }
    }
    let shape = ParsedFleetSpec::parse(&spec.open);
    let offers = if shape.creates() {
        let granted = backends::list_granted(app.db(), scope.project.id).await?;
        let seen = app.market().seen().await.granted(&granted);
        offers::for_fleet(&seen.offers, &shape.own_limits(), shape.blocks())
    } else {
        Vec::new()
    };
    Ok(wire::FleetPlan {
        project_name: scope.project.name.clone(),
        user: scope.caller.user.name.clone(),
        // As it was sent, including keys, because it is returned to its sender: dstack's clients apply what they
        // receive here.
        spec: requested.spec.clone(),
        effective_spec: Some(Document::new(&spec.open)?),
        current_resource: current,
        total_offers: i64::try_from(offers.len()).unwrap_or(i64::MAX),
        max_offer_price: offers.iter().map(|offer| offer.price).reduce(f64::max),
        offers: offers.into_iter().take(OFFERS_MAX).collect(),
        action: Some(action),
    })
}

/// Checks an update. The inner result shows whether the change can be made in place.
fn can_update(found: &Fleet, spec: &FleetSpec) -> Result<Result<(), diff::ForbiddenChange>> {
    let stored: Value = FLEET_SPEC.decode(found.id, &found.spec)?;
    Ok(diff::diff_fleet(&stored["configuration"], &spec.open["configuration"]).map(|_| ()))
}

pub async fn apply(app: &App, scope: &ProjectScope, requested: &wire::ApplyRequest) -> Result<wire::Fleet> {
    let spec = FleetSpec::read(&requested.plan.spec)?;
    app.check_backends(spec.backends())?;
    grants::check(app, scope, spec.backends()).await?;
    if spec.ssh_config.is_some() && !scope.can_manage_ssh_fleets() {
        let name = &scope.project.name;
        let user = &scope.caller.user.name;
        return Err(Error::denied_with(format!(
            "only global admins and members with that right may manage SSH fleets; hint: a global admin can \
             grant it with `windlass project members {name} --allow-ssh-fleets {user}`"
        )));
    }
    let (hosts, most) = (spec.hosts().len(), app.settings().limits.fleet_hosts);
    if hosts > most {
        let more = limit_hint(limits::FLEET_HOSTS_MAX);
        return Err(Error::refused(format!(
            "the fleet has {hosts} hosts, but at most {most} are allowed; {more}"
        )));
    }
    let found = match spec.name() {
        Some(name) => {
            names::check_resource("name", name)?;
            fleets::find_by_name(app.db(), scope.project.id, name).await?
        }
        None => None,
    };
    if let Some(found) = &found {
        require_ownership::<ApplyFleet>(scope, found)?;
    }
    if let Some(name) =
        found.as_ref().filter(|found| found.termination_asked_at.is_some()).map(|found| &found.name)
    {
        return Err(Error::refused(format!(
            "fleet `{name}` is being deleted; apply again when it is deleted"
        )));
    }
    if let Some(ssh) = &spec.configuration.ssh_config {
        fleet_hosts::check_keys(ssh)?;
        fleet_hosts::check_addresses(app, ssh)?;
        fleet_hosts::check_not_taken(app, scope.project.id, ssh, found.as_ref().map(|found| found.id))
            .await?;
    }
    let id = match found {
        Some(found) => update(app, scope, spec, requested, &found).await?,
        None => create(app, scope, spec).await?,
    };
    app.wake(&[Hint::Fleets, Hint::Instances]);
    to_wire_one(app, fleets::find(app.db(), id).await?.ok_or_else(not_found)?).await
}

fn seal(app: &App, id: FleetId, ssh: Option<&Value>) -> Result<Option<Vec<u8>>> {
    let belongs = AssociatedData::row("fleets", "spec_sealed", id.0);
    ssh.map(|ssh| Ok(app.keys().seal(&belongs, ssh.to_string().as_bytes())?)).transpose()
}

async fn update(
    app: &App,
    scope: &ProjectScope,
    spec: FleetSpec,
    requested: &wire::ApplyRequest,
    found: &Fleet,
) -> Result<FleetId> {
    let changed =
        || Error::refused("Failed to apply plan. Resource has been changed. Try again or use force apply.");
    if !requested.force {
        let seen = requested.plan.current_resource.as_ref().ok_or_else(changed)?;
        let stored: Value = FLEET_SPEC.decode(found.id, &found.spec)?;
        let mut before = seen.spec.value()?;
        hide_private_keys(&mut before);
        if seen.id != found.id.0 || spec_to_wire(before) != spec_to_wire(stored) {
            return Err(changed());
        }
    }
    can_update(found, &spec)?.map_err(|why| Error::refused(why.to_string()))?;
    let sealed = seal(app, found.id, spec.ssh_config.as_ref())?;
    let by = scope.caller.user.id;
    let about = EventSubject {
        entity: Entity::Fleet,
        id: found.id.0,
        name: &found.name,
        project: Some(found.project_id),
    };
    let members = instances::list_by_fleets(app.db(), &[found.id]).await?;
    let wanted: BTreeSet<&str> = spec.hosts().iter().map(Host::hostname).collect();
    let live: Vec<_> = members.iter().filter(|member| !member.finished).collect();
    let mut unit = Unit::new().and([fleets::set_spec(found.id, &spec.open.to_string(), sealed)]);
    if spec.ssh_config.is_some() {
        // Ended instances are hidden, so that each host that failed before is tried once more.
        unit = unit.and([instances::hide_finished(found.id)]);
        let gone =
            live.iter().filter(|member| member.hostname.as_deref().is_none_or(|name| !wanted.contains(name)));
        unit = unit.and(gone.map(|member| instances::request_end(member.id)));
        let have: BTreeSet<&str> = live.iter().filter_map(|member| member.hostname.as_deref()).collect();
        let free = members.iter().map(|member| member.instance_num + 1).max().unwrap_or(0);
        let added = spec.hosts().iter().filter(|host| !have.contains(host.hostname()));
        for (num, host) in (free..).zip(added) {
            unit = unit.and(new_host(app, scope, found.id, &found.name, &spec, host, num)?);
        }
    }
    unit = unit.and(note(app.db(), Some(by), &about, "updated", "Fleet updated".into())?);
    match app.db().write(unit).await? {
        WriteOutcome::Done { .. } => Ok(found.id),
        WriteOutcome::Stale { .. } => {
            Err(Error::refused("the fleet is being deleted, or a host to remove is in use"))
        }
    }
}

async fn create(app: &App, scope: &ProjectScope, mut spec: FleetSpec) -> Result<FleetId> {
    let generated = spec.name().is_none();
    for attempt in 0..NAME_ATTEMPTS_MAX {
        if generated {
            spec.open["configuration"]["name"] = json!(names::generate(attempt)?);
        }
        let (id, unit) = new_fleet(app, scope, &spec)?;
        match app.db().write(unit).await {
            Ok(written) => {
                written.done()?;
                return Ok(id);
            }
            Err(error) if error.is_conflict_on("fleets_name_key") && generated => {}
            Err(error) if error.is_conflict_on("fleets_name_key") => return Err(Error::exists("Fleet")),
            Err(error) => return Err(error.into()),
        }
    }
    Err(Error::refused("no free name was found; set the `name` of the fleet"))
}

fn new_fleet(app: &App, scope: &ProjectScope, spec: &FleetSpec) -> Result<(FleetId, Unit)> {
    let (db, by) = (app.db(), scope.caller.user.id);
    let id = FleetId(db.new_id()?);
    let name = spec.name().unwrap_or_default();
    let row = NewFleet {
        id,
        project_id: scope.project.id,
        user_id: Some(by),
        name: name.to_owned(),
        spec: spec.open.to_string(),
        spec_sealed: seal(app, id, spec.ssh_config.as_ref())?,
        status: fleet::Status::Active,
        auto_created: false,
    };
    let because =
        EventCause { actor: actor(Some(by)), reason: "applied".into(), message: "Fleet created".into() };
    let about = EventSubject { entity: Entity::Fleet, id: id.0, name, project: Some(scope.project.id) };
    let created = Event::created::<fleet::FleetLifecycle>(id.0, fleet::Status::Active, because);
    let mut unit = Unit::new().and([fleets::insert(row)]).and(record(db, Some(by), &about, &created)?);
    for (num, host) in (0..).zip(spec.hosts()) {
        unit = unit.and(new_host(app, scope, id, name, spec, host, num)?);
    }
    Ok((id, unit))
}

/// A host of an SSH fleet is an instance from the start: pending, until its agent answers.
fn new_host(
    app: &App,
    scope: &ProjectScope,
    fleet: FleetId,
    fleet_name: &str,
    spec: &FleetSpec,
    host: &Host,
    num: i64,
) -> Result<Vec<Change>> {
    let (db, by) = (app.db(), scope.caller.user.id);
    let id = InstanceId(db.new_id()?);
    let name = format!("{fleet_name}-{num}");
    let own = json!(host);
    let own = if own.is_string() { json!({ "hostname": own }) } else { own };
    let mut open = own.clone();
    hide_private_keys(&mut open);
    let mut shared = spec.ssh_config.clone().unwrap_or_default();
    shared["hosts"] = json!([own]);
    let belongs = AssociatedData::row("instances", "ssh_sealed", id.0);
    let blocks = host.params().and_then(|params| params.blocks).unwrap_or(spec.configuration.blocks);
    let row = NewInstance {
        id,
        project_id: scope.project.id,
        fleet_id: Some(fleet),
        name: name.clone(),
        instance_num: num,
        backend: Some(BackendType::Remote.as_str().into()),
        region: Some(BackendType::Remote.as_str().into()),
        hostname: Some(host.hostname().to_owned()),
        price: Some(0.0),
        spot: false,
        instance_type: None,
        offer: None,
        provisioning: None,
        ssh: Some(open.to_string()),
        ssh_sealed: Some(app.keys().seal(&belongs, shared.to_string().as_bytes())?),
        requirements: None,
        profile: None,
        status: instance::Status::Pending,
        total_blocks: match blocks {
            Blocks::Auto => None,
            Blocks::Count(count) => Some(count.into()),
        },
        idle_seconds_max: None,
    };
    let because =
        EventCause { actor: actor(Some(by)), reason: "applied".into(), message: "Instance created".into() };
    let about =
        EventSubject { entity: Entity::Instance, id: id.0, name: &name, project: Some(scope.project.id) };
    let created = Event::created::<instance::InstanceLifecycle>(id.0, instance::Status::Pending, because);
    let mut changes = vec![instances::insert(row)];
    changes.extend(record(db, Some(by), &about, &created)?);
    Ok(changes)
}

/// Stores the request to delete, for all of them or none.
pub async fn delete(app: &App, scope: &ProjectScope, requested: &wire::DeleteRequest) -> Result<()> {
    let by = scope.caller.user.id;
    let mut unit = Unit::new();
    for name in requested.names.iter().collect::<BTreeSet<_>>() {
        // A deleted fleet is not an error.
        let Some(found) = fleets::find_by_name(app.db(), scope.project.id, name).await? else { continue };
        require_ownership::<DeleteFleets>(scope, &found)?;
        let about =
            EventSubject { entity: Entity::Fleet, id: found.id.0, name, project: Some(found.project_id) };
        unit = unit.and([fleets::request_delete(found.id)]).and(note(
            app.db(),
            Some(by),
            &about,
            "delete_asked",
            "Fleet deletion requested".into(),
        )?);
        if requested.force {
            unit = unit.and([instances::force_end(found.id)]);
        }
    }
    match app.db().write(unit).await? {
        WriteOutcome::Done { .. } => {
            app.wake(&[Hint::Fleets, Hint::Instances]);
            Ok(())
        }
        WriteOutcome::Stale { .. } => Err(Error::refused("a fleet with running jobs cannot be deleted")),
    }
}

/// Checks ownership. Deleting a fleet does not need the right to manage SSH fleets, because it adds no host.
fn require_ownership<O: Operation>(scope: &ProjectScope, found: &Fleet) -> Result<()> {
    scope.require_ownership::<O>(found.user_id, &format!("fleet `{}`", found.name))
}

/// Stores the request to end single instances, for all of them or none.
pub async fn delete_instances(
    app: &App,
    scope: &ProjectScope,
    requested: &wire::DeleteInstancesRequest,
) -> Result<()> {
    // Instances of a deleted fleet are not an error.
    let found = fleets::find_by_name(app.db(), scope.project.id, &requested.name).await?;
    let Some(found) = found else { return Ok(()) };
    require_ownership::<DeleteFleetInstances>(scope, &found)?;
    let by = scope.caller.user.id;
    let members = instances::list_by_fleets(app.db(), &[found.id]).await?;
    let mut unit = Unit::new();
    for num in requested.instance_nums.iter().collect::<BTreeSet<_>>() {
        let member = members.iter().find(|member| member.instance_num == *num && !member.finished);
        let member = member.ok_or_else(|| Error::absent("Instance"))?;
        let about = EventSubject {
            entity: Entity::Instance,
            id: member.id.0,
            name: &member.name,
            project: Some(member.project_id),
        };
        let reported =
            note(app.db(), Some(by), &about, "delete_asked", "Instance deletion requested".into())?;
        unit = unit.and([instances::request_end(member.id)]).and(reported);
    }
    match app.db().write(unit).await? {
        WriteOutcome::Done { .. } => {
            app.wake(&[Hint::Instances, Hint::Fleets]);
            Ok(())
        }
        WriteOutcome::Stale { .. } => Err(Error::refused("an instance with running jobs cannot be deleted")),
    }
}
