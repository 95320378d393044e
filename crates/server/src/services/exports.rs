//! Exports: fleets, gateways and volumes that a project shares with others, and the imports of those.
//!
//! An import needs the consent of both sides, because jobs of one project run on machines of the other: the caller is
//! an admin of each project that the export names. Only a global admin exports to all projects.

use uuid::Uuid;
use windlass_api::{exports as wire, projects::ProjectRole};
use windlass_model::{
    config::{name::ResourceReference, unsupported::ImportedResources},
    event::Entity,
    id::{FleetId, GatewayId, ProjectId, VolumeId},
};

use super::{names, projects::parse_role};
use crate::{
    app::App,
    auth::ProjectScope,
    db::{
        Change, Unit, WriteOutcome,
        exports::{self, Export, NamedParts},
        fleets, gateways, projects, volumes,
    },
    error::{Error, Result},
    events::{EventSubject, note},
    hints::Hint,
};

/// Pipelines with work after the change of an export.
const WOKEN: [Hint; 2] = [Hint::JobsSubmitted, Hint::JobsRunning];

fn not_found() -> Error {
    Error::absent("Export")
}

pub async fn list(app: &App, scope: &ProjectScope) -> Result<wire::Exports> {
    let found = exports::list(app.db(), scope.project.id).await?;
    Ok(wire::Exports { exports: to_wire(app, found).await?, warnings: Vec::new() })
}

pub async fn list_imports(app: &App, scope: &ProjectScope) -> Result<wire::Imports> {
    let found = exports::list_imports(app.db(), scope.project.id).await?;
    let ids: Vec<Uuid> = found.iter().map(|import| import.export.id).collect();
    let mut fleets = exports::fleets(app.db(), &ids).await?;
    let mut gateways = exports::gateways(app.db(), &ids).await?;
    let mut volumes = exports::volumes(app.db(), &ids).await?;
    let imports = found.into_iter().map(|import| wire::Import {
        id: import.id,
        export: wire::ImportedExport {
            exported_fleets: named(&mut fleets, import.export.id),
            exported_gateways: named(&mut gateways, import.export.id),
            exported_volumes: named(&mut volumes, import.export.id),
            id: import.export.id,
            name: import.export.name,
            project_name: import.project_name,
        },
    });
    Ok(wire::Imports { imports: imports.collect(), warnings: Vec::new() })
}

/// Fleets and gateways of other projects that the project may use, by name.
pub(crate) async fn imported_resources(app: &App, project: ProjectId) -> Result<ImportedResources> {
    let mut imported = ImportedResources::default();
    let found = exports::list_imports(app.db(), project).await?;
    let ids: Vec<Uuid> = found.iter().map(|import| import.export.id).collect();
    let mut fleets = exports::fleets(app.db(), &ids).await?;
    let mut gateways = exports::gateways(app.db(), &ids).await?;
    for import in found {
        let owner = Some(import.project_name);
        let references = |parts: &mut NamedParts| {
            let parts = parts.remove(&import.export.id).unwrap_or_default();
            let named = parts.into_iter().map(|(_, name)| ResourceReference { project: owner.clone(), name });
            named.collect::<Vec<_>>()
        };
        imported.fleets.extend(references(&mut fleets));
        imported.gateways.extend(references(&mut gateways));
    }
    Ok(imported)
}

pub async fn create(app: &App, scope: &ProjectScope, sent: &wire::CreateRequest) -> Result<wire::Export> {
    names::check_resource("name", &sent.name)?;
    require_global_admin(scope, sent.is_global)?;
    let id = app.db().new_id()?;
    let mut changes = vec![exports::insert(id, scope.project.id, &sent.name, sent.is_global)];
    for name in &sent.exported_fleets {
        changes.push(exports::add_fleet(id, own_fleet(app, scope, name).await?));
    }
    for name in &sent.exported_gateways {
        changes.push(exports::add_gateway(id, own_gateway(app, scope, name).await?));
    }
    for name in &sent.exported_volumes {
        changes.push(exports::add_volume(id, own_volume(app, scope, name).await?));
    }
    for name in &sent.importer_projects {
        changes.push(exports::add_import(app.db().new_id()?, id, importer(app, scope, name).await?));
    }
    let message = format!("Export {} created", sent.name);
    write(app, scope, changes, "export_created", message).await?;
    read(app, scope, &sent.name).await
}

pub async fn update(app: &App, scope: &ProjectScope, sent: &wire::UpdateRequest) -> Result<wire::Export> {
    if sent.set_global && sent.unset_global {
        return Err(Error::refused("set_global and unset_global exclude each other"));
    }
    let found = find(app, scope, &sent.name).await?;
    // Whatever it contains, every project uses it.
    require_global_admin(scope, found.is_global || sent.set_global || sent.unset_global)?;
    let mut changes = Vec::new();
    if sent.set_global || sent.unset_global {
        changes.push(exports::set_global(found.id, sent.set_global));
    }
    for name in &sent.add_exported_fleets {
        changes.push(exports::add_fleet(found.id, own_fleet(app, scope, name).await?));
    }
    for name in &sent.remove_exported_fleets {
        changes.push(exports::remove_fleet(found.id, own_fleet(app, scope, name).await?));
    }
    for name in &sent.add_exported_gateways {
        changes.push(exports::add_gateway(found.id, own_gateway(app, scope, name).await?));
    }
    for name in &sent.remove_exported_gateways {
        changes.push(exports::remove_gateway(found.id, own_gateway(app, scope, name).await?));
    }
    for name in &sent.add_exported_volumes {
        changes.push(exports::add_volume(found.id, own_volume(app, scope, name).await?));
    }
    for name in &sent.remove_exported_volumes {
        changes.push(exports::remove_volume(found.id, own_volume(app, scope, name).await?));
    }
    for name in &sent.add_importer_projects {
        changes.push(exports::add_import(app.db().new_id()?, found.id, importer(app, scope, name).await?));
    }
    let mut importers = exports::importers(app.db(), &[found.id]).await?;
    let importers = importers.remove(&found.id).unwrap_or_default();
    for name in &sent.remove_importer_projects {
        let known = importers.iter().find(|(_, importer)| importer == name);
        let (project, _) =
            known.ok_or_else(|| Error::refused(format!("Project {name} does not import it")))?;
        changes.push(exports::remove_import(found.id, ProjectId(*project)));
    }
    let message = format!("Export {} changed", found.name);
    write(app, scope, changes, "export_changed", message).await?;
    read(app, scope, &sent.name).await
}

pub async fn delete(app: &App, scope: &ProjectScope, name: &str) -> Result<()> {
    let found = find(app, scope, name).await?;
    require_global_admin(scope, found.is_global)?;
    let message = format!("Export {} deleted", found.name);
    write(app, scope, exports::delete(found.id).into(), "export_deleted", message).await.map(drop)
}

pub async fn delete_import(app: &App, scope: &ProjectScope, sent: &wire::DeleteImportRequest) -> Result<()> {
    let imports = exports::list_imports(app.db(), scope.project.id).await?;
    let is_named = |name: &str, export: &str| name == sent.export_project_name && export == sent.export_name;
    let found = imports.into_iter().find(|import| is_named(&import.project_name, &import.export.name));
    let export = found.ok_or_else(|| Error::absent("Import"))?.export;
    let message = format!("Import of {}/{} deleted", sent.export_project_name, sent.export_name);
    let changes = vec![exports::remove_import(export.id, scope.project.id)];
    match write(app, scope, changes, "import_deleted", message).await? {
        WriteOutcome::Done { .. } => Ok(()),
        WriteOutcome::Stale { .. } => Err(Error::refused(
            "the export is for all projects; hint: a global admin can change it with `windlass export update`",
        )),
    }
}

fn require_global_admin(scope: &ProjectScope, is_needed: bool) -> Result<()> {
    if is_needed && !scope.caller.user.admin {
        return Err(Error::refused(
            "only a global admin can export to all projects and change such an export",
        ));
    }
    Ok(())
}

async fn find(app: &App, scope: &ProjectScope, name: &str) -> Result<Export> {
    exports::find(app.db(), scope.project.id, name).await?.ok_or_else(not_found)
}

async fn read(app: &App, scope: &ProjectScope, name: &str) -> Result<wire::Export> {
    let found = find(app, scope, name).await?;
    to_wire(app, vec![found]).await?.pop().ok_or_else(not_found)
}

async fn own_fleet(app: &App, scope: &ProjectScope, name: &str) -> Result<FleetId> {
    let found = fleets::find_by_name(app.db(), scope.project.id, name).await?;
    found.map(|fleet| fleet.id).ok_or_else(|| Error::refused(format!("fleet `{name}` does not exist")))
}

async fn own_gateway(app: &App, scope: &ProjectScope, name: &str) -> Result<GatewayId> {
    let found = gateways::find_by_name(app.db(), scope.project.id, name).await?;
    found.map(|gateway| gateway.id).ok_or_else(|| Error::refused(format!("gateway `{name}` does not exist")))
}

async fn own_volume(app: &App, scope: &ProjectScope, name: &str) -> Result<VolumeId> {
    let found = volumes::find_by_name(app.db(), scope.project.id, name).await?;
    found.map(|volume| volume.id).ok_or_else(|| Error::refused(format!("volume `{name}` does not exist")))
}

/// A project to export to, of which the caller is an admin. One that the caller cannot see does not exist for it.
async fn importer(app: &App, scope: &ProjectScope, name: &str) -> Result<ProjectId> {
    let caller = &scope.caller.user;
    let absent = || Error::refused(format!("project `{name}` does not exist"));
    let (project, membership) = projects::find(app.db(), name, caller.id).await?.ok_or_else(absent)?;
    if project.id == scope.project.id {
        return Err(Error::refused("a project cannot import its own exports"));
    }
    if caller.admin {
        return Ok(project.id);
    }
    match membership.as_ref().map(|membership| parse_role(&membership.role)) {
        Some(ProjectRole::Admin) => Ok(project.id),
        Some(ProjectRole::Manager | ProjectRole::User) => Err(Error::refused(format!(
            "only an admin of project `{name}` can let it import; hint: its admin must also be an admin here"
        ))),
        None if project.is_public => Err(Error::refused(format!(
            "only an admin of project `{name}` can let it import; hint: its admin must also be an admin here"
        ))),
        None => Err(absent()),
    }
}

async fn write(
    app: &App,
    scope: &ProjectScope,
    changes: Vec<Change>,
    reason: &str,
    message: String,
) -> Result<WriteOutcome> {
    let project = &scope.project;
    let about = EventSubject {
        entity: Entity::Project,
        id: project.id.0,
        name: &project.name,
        project: Some(project.id),
    };
    let reported = note(app.db(), Some(scope.caller.user.id), &about, reason, message)?;
    let unit = Unit::new().and(changes).and(exports::mark_jobs_due()).and(reported);
    match app.db().write(unit).await {
        Ok(written) => {
            app.wake(&WOKEN);
            Ok(written)
        }
        Err(error) if error.is_conflict_on("exports_name_key") => Err(Error::exists("Export")),
        Err(error) => Err(error.into()),
    }
}

async fn to_wire(app: &App, found: Vec<Export>) -> Result<Vec<wire::Export>> {
    let ids: Vec<Uuid> = found.iter().map(|export| export.id).collect();
    let mut fleets = exports::fleets(app.db(), &ids).await?;
    let mut gateways = exports::gateways(app.db(), &ids).await?;
    let mut volumes = exports::volumes(app.db(), &ids).await?;
    let mut importers = exports::importers(app.db(), &ids).await?;
    let each = found.into_iter().map(|export| {
        let imports = importers.remove(&export.id).unwrap_or_default().into_iter();
        wire::Export {
            imports: imports.map(|(_, project_name)| wire::Importer { project_name }).collect(),
            exported_fleets: named(&mut fleets, export.id),
            exported_gateways: named(&mut gateways, export.id),
            exported_volumes: named(&mut volumes, export.id),
            id: export.id,
            name: export.name,
            is_global: export.is_global,
        }
    });
    Ok(each.collect())
}

fn named(parts: &mut NamedParts, export: Uuid) -> Vec<wire::ExportedResource> {
    let parts = parts.remove(&export).unwrap_or_default().into_iter();
    parts.map(|(id, name)| wire::ExportedResource { id, name }).collect()
}
