//! Volumes: create, list, request deletion.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Value, json};
use windlass_api::{operations::DeleteVolumes, volumes as wire};
use windlass_model::{
    backend_kind::BackendType,
    config::{Configuration, job_spec::JobSpec},
    event::{Entity, Event, EventCause},
    id::{ProjectId, UserId, VolumeId},
    volume,
};

use super::{
    grants, names,
    runs::{problems_error, visible_projects},
};
use crate::{
    app::App,
    attachments::mounts,
    auth::{Caller, ProjectScope},
    db::{
        Page, Unit, WriteOutcome,
        documents::{ATTACHMENT_DATA, VOLUME_CONFIGURATION, VOLUME_PROVISIONING},
        instances, projects, users,
        volumes::{self, NewVolume, Query, Volume},
    },
    error::{Error, Result},
    events::{EventSubject, actor, note, record},
    hints::Hint,
    services::stored_document,
};

const LIST_MAX: i64 = 100;
const NAME_ATTEMPTS_MAX: u8 = 10;

pub async fn list(app: &App, caller: &Caller, requested: wire::ListRequest) -> Result<Vec<wire::Volume>> {
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
    let query = Query { projects, only_active: requested.only_active, page };
    to_wire(app, volumes::list(app.db(), &query).await?).await
}

pub async fn list_project(app: &App, scope: &ProjectScope) -> Result<Vec<wire::Volume>> {
    let page = Page { limit: i64::from(i32::MAX), ascending: true, ..Page::default() };
    let query = Query { projects: Some(vec![scope.project.id]), only_active: false, page };
    to_wire(app, volumes::list(app.db(), &query).await?).await
}

pub async fn read(app: &App, scope: &ProjectScope, name: &str) -> Result<wire::Volume> {
    let found = volumes::find_by_name(app.db(), scope.project.id, name).await?.ok_or_else(not_found)?;
    to_wire_one(app, found).await
}

fn not_found() -> Error {
    Error::absent("Volume")
}

async fn to_wire_one(app: &App, row: Volume) -> Result<wire::Volume> {
    to_wire(app, vec![row]).await?.pop().ok_or_else(not_found)
}

async fn to_wire(app: &App, rows: Vec<Volume>) -> Result<Vec<wire::Volume>> {
    let ids: Vec<VolumeId> = rows.iter().map(|row| row.id).collect();
    let project_ids: Vec<ProjectId> = rows.iter().map(|row| row.project_id).collect();
    let user_ids: Vec<UserId> = rows.iter().map(|row| row.user_id).collect();
    let projects = projects::names(app.db(), &project_ids).await?;
    let users: HashMap<UserId, String> =
        users::by_ids(app.db(), &user_ids).await?.into_iter().map(|user| (user.id, user.name)).collect();
    let mut attached = attachments(app, &ids).await?;
    rows.into_iter()
        .map(|row| {
            Ok(wire::Volume {
                id: row.id.0,
                name: row.name,
                user: users.get(&row.user_id).cloned().unwrap_or_default(),
                project_name: projects.get(&row.project_id).cloned().unwrap_or_default(),
                configuration: stored_document(VOLUME_CONFIGURATION, row.id, row.configuration)?,
                external: row.external,
                created_at: row.created_at,
                last_processed_at: row.last_processed_at,
                status: row.status.as_str().to_owned(),
                status_message: row.status_message,
                deleted: row.deleted,
                deleted_at: row.deleted_at,
                volume_id: row.volume_id,
                provisioning_data: VOLUME_PROVISIONING.decode_opt(row.id, row.provisioning.as_deref())?,
                cost: 0.0,
                attachments: Some(attached.remove(&row.id).unwrap_or_default()),
                attachment_data: None,
            })
        })
        .collect()
}

async fn attachments(app: &App, ids: &[VolumeId]) -> Result<BTreeMap<VolumeId, Vec<wire::Attachment>>> {
    let mut all = BTreeMap::<_, Vec<_>>::new();
    for attachment in volumes::attachments(app.db(), ids).await? {
        // Few volumes are attached at all, and each to few instances.
        let Some(instance) = instances::find(app.db(), attachment.instance_id).await? else { continue };
        all.entry(attachment.volume_id).or_default().push(wire::Attachment {
            instance: wire::VolumeInstance {
                name: instance.name,
                fleet_name: None,
                instance_num: instance.instance_num,
                instance_id: Some(instance.id.to_string()),
            },
            attachment_data: ATTACHMENT_DATA.decode_opt(attachment.volume_id, attachment.data.as_deref())?,
        });
    }
    Ok(all)
}

pub async fn create(
    app: &App,
    scope: &ProjectScope,
    requested: &wire::CreateRequest,
) -> Result<wire::Volume> {
    let mut configuration = requested.configuration.value()?;
    let parsed = Configuration::from_json(&configuration).map_err(|problems| problems_error(&problems))?;
    let Configuration::Volume(wanted) = parsed else {
        return Err(Error::field("configuration", "the configuration is not a volume"));
    };
    app.check_backends([wanted.backend()])?;
    grants::check(app, scope, [wanted.backend()]).await?;
    if let Some(disk) = wanted.external_id() {
        check_disk(app, scope, wanted.backend(), disk).await?;
    }
    let generated = configuration["name"].is_null();
    for attempt in 0..NAME_ATTEMPTS_MAX {
        if generated {
            configuration["name"] = json!(names::generate(attempt)?);
        }
        let (id, unit) = new_volume(app, scope, &configuration)?;
        match app.db().write(unit).await {
            Ok(written) => {
                written.done()?;
                app.wake(&[Hint::Volumes]);
                return to_wire_one(app, volumes::find(app.db(), id).await?.ok_or_else(not_found)?).await;
            }
            Err(error) if error.is_conflict_on("volumes_name_key") && generated => {}
            Err(error) if error.is_conflict_on("volumes_name_key") => return Err(Error::exists("Volume")),
            Err(error) => return Err(error.into()),
        }
    }
    Err(Error::refused("no free name was found; set the `name` of the volume"))
}

/// Rejects a disk that a volume of another project has, unless the caller is a global admin: projects share the accounts
/// of the server's backends, and their disks have ids that can be guessed.
async fn check_disk(app: &App, scope: &ProjectScope, backend: &str, disk: &str) -> Result<()> {
    if scope.caller.user.admin {
        return Ok(());
    }
    for volume in volumes::with_disk_elsewhere(app.db(), scope.project.id, disk).await? {
        let configuration: Value = VOLUME_CONFIGURATION.decode(volume.id, &volume.configuration)?;
        if configuration["backend"] == backend {
            return Err(Error::refused(format!(
                "disk `{disk}` of backend `{backend}` may not be registered in this project; hint: a global admin can \
                 register it"
            )));
        }
    }
    Ok(())
}

fn new_volume(app: &App, scope: &ProjectScope, configuration: &Value) -> Result<(VolumeId, Unit)> {
    let (db, by) = (app.db(), scope.caller.user.id);
    let name = configuration["name"].as_str().unwrap_or_default();
    names::check_resource("name", name)?;
    let id = VolumeId(db.new_id()?);
    let row = NewVolume {
        id,
        project_id: scope.project.id,
        user_id: by,
        name: name.to_owned(),
        configuration: configuration.to_string(),
        external: !configuration["volume_id"].is_null() || !configuration["claim_name"].is_null(),
        status: volume::Status::Submitted,
    };
    let because =
        EventCause { actor: actor(Some(by)), reason: "applied".into(), message: "Volume created".into() };
    let about = EventSubject { entity: Entity::Volume, id: id.0, name, project: Some(scope.project.id) };
    let created = Event::created::<volume::VolumeLifecycle>(id.0, volume::Status::Submitted, because);
    let unit = Unit::new().and([volumes::insert(row)]).and(record(db, Some(by), &about, &created)?);
    Ok((id, unit))
}

/// Checks that the volumes that a run's jobs name exist and fit together.
pub(crate) async fn check_mounts(app: &App, project: ProjectId, jobs: &[JobSpec]) -> Result<()> {
    let mounts: Vec<_> = jobs.iter().map(mounts::for_spec).collect();
    let catalogue = mounts::VolumeCatalog::of(app.db(), project, mounts.iter().flatten()).await?;
    let refusal = catalogue
        .refuse(&mounts, |backend| {
            !BackendType::parse(backend).is_some_and(BackendType::attaches_to_one_instance)
        })
        .map_err(|error| Error::refused(error.to_string()))?;
    refusal.map_or(Ok(()), |why| Err(Error::refused(why)))
}

/// Stores the request to delete, for all of them or none.
pub async fn delete(app: &App, scope: &ProjectScope, names: &[String]) -> Result<()> {
    let by = scope.caller.user.id;
    let mut unit = Unit::new();
    for name in names.iter().collect::<BTreeSet<_>>() {
        let found = volumes::find_by_name(app.db(), scope.project.id, name).await?.ok_or_else(not_found)?;
        scope.require_ownership::<DeleteVolumes>(Some(found.user_id), &format!("volume `{name}`"))?;
        let about =
            EventSubject { entity: Entity::Volume, id: found.id.0, name, project: Some(found.project_id) };
        unit = unit.and(volumes::request_delete(found.id)).and(note(
            app.db(),
            Some(by),
            &about,
            "delete_asked",
            "Volume deletion requested".into(),
        )?);
    }
    match app.db().write(unit).await? {
        WriteOutcome::Done { .. } => {
            app.wake(&[Hint::Volumes]);
            Ok(())
        }
        WriteOutcome::Stale { .. } => Err(Error::refused("an attached volume cannot be deleted")),
    }
}
