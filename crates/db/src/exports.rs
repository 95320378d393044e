//! Tables `exports` and `imports`: fleets, gateways and volumes that projects share.

use std::collections::BTreeMap;

use uuid::Uuid;
use windlass_model::id::{FleetId, GatewayId, ProjectId, VolumeId};

use super::{Change, Db, DbError, Expect, Row, Val, record::statements};
use crate::params;

statements! {
    LIST = "SELECT e.id, e.name, e.is_global, e.project_id FROM exports e WHERE e.project_id = $1 ORDER BY e.name";
    FIND = "SELECT e.id, e.name, e.is_global, e.project_id FROM exports e WHERE e.project_id = $1 AND e.name = $2";
    /// Those of other projects; the import of one for all projects has the export's id.
    IMPORTED = "SELECT e.id, e.name, e.is_global, e.project_id, coalesce(i.id, e.id), p.name \
                FROM exports e JOIN projects p ON p.id = e.project_id \
                LEFT JOIN imports i ON i.export_id = e.id AND i.project_id = $1 \
                WHERE e.project_id <> $1 AND (i.id IS NOT NULL OR e.is_global) ORDER BY p.name, e.name";
    FLEETS = "SELECT x.export_id, f.id, f.name FROM export_fleets x JOIN fleets f ON f.id = x.fleet_id \
              WHERE x.export_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT f.deleted ORDER BY f.name";
    GATEWAYS = "SELECT x.export_id, g.id, g.name FROM export_gateways x JOIN gateways g ON g.id = x.gateway_id \
                WHERE x.export_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT g.deleted ORDER BY g.name";
    VOLUMES = "SELECT x.export_id, v.id, v.name FROM export_volumes x JOIN volumes v ON v.id = x.volume_id \
               WHERE x.export_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT v.deleted ORDER BY v.name";
    IMPORTERS = "SELECT i.export_id, p.id, p.name FROM imports i JOIN projects p ON p.id = i.project_id \
                 WHERE i.export_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT p.deleted ORDER BY p.name";
    SET_GLOBAL = "UPDATE exports SET is_global = $2 WHERE id = $1";
    ADD_FLEET = "INSERT INTO export_fleets (export_id, fleet_id) VALUES ($1, $2) ON CONFLICT (export_id, fleet_id) DO NOTHING";
    REMOVE_FLEET = "DELETE FROM export_fleets WHERE export_id = $1 AND fleet_id = $2";
    ADD_GATEWAY = "INSERT INTO export_gateways (export_id, gateway_id) VALUES ($1, $2) \
                   ON CONFLICT (export_id, gateway_id) DO NOTHING";
    REMOVE_GATEWAY = "DELETE FROM export_gateways WHERE export_id = $1 AND gateway_id = $2";
    ADD_VOLUME = "INSERT INTO export_volumes (export_id, volume_id) VALUES ($1, $2) \
                  ON CONFLICT (export_id, volume_id) DO NOTHING";
    REMOVE_VOLUME = "DELETE FROM export_volumes WHERE export_id = $1 AND volume_id = $2";
    ADD_IMPORT = "INSERT INTO imports (id, export_id, project_id, created_at) VALUES ($1, $2, $3, now_us()) \
                  ON CONFLICT (export_id, project_id) DO NOTHING";
    REMOVE_IMPORT = "DELETE FROM imports WHERE export_id = $1 AND project_id = $2";
    CLEAR_FLEETS = "DELETE FROM export_fleets WHERE export_id = $1";
    CLEAR_GATEWAYS = "DELETE FROM export_gateways WHERE export_id = $1";
    CLEAR_VOLUMES = "DELETE FROM export_volumes WHERE export_id = $1";
    CLEAR_IMPORTS = "DELETE FROM imports WHERE export_id = $1";
    DELETE = "DELETE FROM exports WHERE id = $1";
    /// Jobs that may no longer use their instance or a volume are examined at once.
    MARK_REVOKED_DUE = "UPDATE jobs SET due_at = NULL WHERE id IN (SELECT j.id FROM jobs j \
                        JOIN instances i ON i.id = j.instance_id WHERE NOT j.finished AND j.project_id <> i.project_id \
                        AND NOT EXISTS (SELECT 1 FROM usable_fleets u WHERE u.fleet_id = i.fleet_id \
                        AND u.project_id = j.project_id)) OR id IN (SELECT j.id FROM volume_holds h \
                        JOIN jobs j ON j.id = h.job_id JOIN volumes v ON v.id = h.volume_id WHERE NOT j.finished \
                        AND v.project_id <> j.project_id AND NOT EXISTS (SELECT 1 FROM usable_volumes u \
                        WHERE u.volume_id = v.id AND u.project_id = j.project_id))";
    /// Jobs that wait for capacity may find it on fleets that are shared now.
    MARK_WAITING_DUE = "UPDATE jobs SET due_at = NULL WHERE NOT finished AND status = 'submitted' AND NOT parked \
                        AND instance_id IS NULL";
}

/// An export, or what is known of it before its parts are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    pub id: Uuid,
    pub name: String,
    pub is_global: bool,
    pub project: ProjectId,
}

/// An export of another project that a project may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Import {
    pub id: Uuid,
    pub export: Export,
    pub project_name: String,
}

/// Parts of exports, by export: id and name.
pub type NamedParts = BTreeMap<Uuid, Vec<(Uuid, String)>>;

pub fn insert(id: Uuid, project: ProjectId, name: &str, is_global: bool) -> Change {
    let values = vec![
        ("id", id.into()),
        ("project_id", project.into()),
        ("name", name.into()),
        ("is_global", is_global.into()),
        ("created_at", Val::Now),
    ];
    Change::Insert { table: "exports", values }
}

pub async fn list(db: &Db, project: ProjectId) -> Result<Vec<Export>, DbError> {
    db.query(LIST.as_str(), params![project]).await?.iter().map(read_export).collect()
}

pub async fn find(db: &Db, project: ProjectId, name: &str) -> Result<Option<Export>, DbError> {
    db.query_opt(FIND.as_str(), params![project, name]).await?.as_ref().map(read_export).transpose()
}

/// Exports of other projects that the project may use.
pub async fn list_imports(db: &Db, project: ProjectId) -> Result<Vec<Import>, DbError> {
    let rows = db.query(IMPORTED.as_str(), params![project]).await?;
    let each = rows
        .iter()
        .map(|row| Ok(Import { id: row.uuid(4)?, export: read_export(row)?, project_name: row.text(5)? }));
    each.collect()
}

fn read_export(row: &Row) -> Result<Export, DbError> {
    Ok(Export { id: row.uuid(0)?, name: row.text(1)?, is_global: row.bool(2)?, project: row.id(3)? })
}

pub async fn fleets(db: &Db, exports: &[Uuid]) -> Result<NamedParts, DbError> {
    parts(db, FLEETS.as_str(), exports).await
}

pub async fn gateways(db: &Db, exports: &[Uuid]) -> Result<NamedParts, DbError> {
    parts(db, GATEWAYS.as_str(), exports).await
}

pub async fn volumes(db: &Db, exports: &[Uuid]) -> Result<NamedParts, DbError> {
    parts(db, VOLUMES.as_str(), exports).await
}

/// Projects that the exports name.
pub async fn importers(db: &Db, exports: &[Uuid]) -> Result<NamedParts, DbError> {
    parts(db, IMPORTERS.as_str(), exports).await
}

async fn parts(db: &Db, sql: &'static str, exports: &[Uuid]) -> Result<NamedParts, DbError> {
    let mut found = NamedParts::new();
    for row in db.query(sql, vec![Val::list(exports.iter().copied())]).await? {
        found.entry(row.uuid(0)?).or_default().push((row.uuid(1)?, row.text(2)?));
    }
    Ok(found)
}

pub fn set_global(export: Uuid, is_global: bool) -> Change {
    exec(SET_GLOBAL.as_str(), params![export, is_global])
}

pub fn add_fleet(export: Uuid, fleet: FleetId) -> Change {
    exec(ADD_FLEET.as_str(), params![export, fleet])
}

pub fn remove_fleet(export: Uuid, fleet: FleetId) -> Change {
    exec(REMOVE_FLEET.as_str(), params![export, fleet])
}

pub fn add_gateway(export: Uuid, gateway: GatewayId) -> Change {
    exec(ADD_GATEWAY.as_str(), params![export, gateway])
}

pub fn remove_gateway(export: Uuid, gateway: GatewayId) -> Change {
    exec(REMOVE_GATEWAY.as_str(), params![export, gateway])
}

pub fn add_volume(export: Uuid, volume: VolumeId) -> Change {
    exec(ADD_VOLUME.as_str(), params![export, volume])
}

pub fn remove_volume(export: Uuid, volume: VolumeId) -> Change {
    exec(REMOVE_VOLUME.as_str(), params![export, volume])
}

pub fn add_import(id: Uuid, export: Uuid, project: ProjectId) -> Change {
    exec(ADD_IMPORT.as_str(), params![id, export, project])
}

/// Stale if the project does not import it.
pub fn remove_import(export: Uuid, project: ProjectId) -> Change {
    Change::Exec { sql: REMOVE_IMPORT.as_str().into(), params: params![export, project], expect: Expect::One }
}

pub fn delete(export: Uuid) -> [Change; 5] {
    [
        CLEAR_FLEETS.as_str(),
        CLEAR_GATEWAYS.as_str(),
        CLEAR_VOLUMES.as_str(),
        CLEAR_IMPORTS.as_str(),
        DELETE.as_str(),
    ]
    .map(|sql| exec(sql, params![export]))
}

/// Makes the jobs due that the change of an export concerns.
pub fn mark_jobs_due() -> [Change; 2] {
    [MARK_REVOKED_DUE.as_str(), MARK_WAITING_DUE.as_str()].map(|sql| exec(sql, Vec::new()))
}

fn exec(sql: &'static str, params: Vec<Val>) -> Change {
    Change::Exec { sql: sql.into(), params, expect: Expect::Any }
}
