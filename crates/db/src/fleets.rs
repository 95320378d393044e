//! Table `fleets`.

use std::collections::HashMap;

use windlass_model::{
    fleet::Status,
    id::{FleetId, ProjectId, UserId},
    time::Timestamp,
};

use super::{
    Change, Db, DbError, Expect, Val,
    filter::{Filter, Page},
    record::{record, statements},
};
use crate::params;

record! {
    pub struct Fleet {
        pub id: FleetId,
        pub project_id: ProjectId,
        /// Creator; absent if the server created it.
        pub user_id: Option<UserId>,
        pub name: String,
        /// JSON, without private keys: those are in `spec_sealed`.
        pub spec: String,
        pub status: Status,
        pub finished: bool,
        pub status_message: Option<String>,
        pub deleted: bool,
        pub auto_created: bool,
        pub consolidation_attempt: i64,
        pub last_consolidated_at: Option<Timestamp>,
        pub termination_asked_at: Option<Timestamp>,
        pub created_at: Timestamp,
        pub last_processed_at: Timestamp,
        pub tracking: Option<String>,
        pub lock_epoch: i64,
    }
}

record! {
    pub struct NewFleet {
        pub id: FleetId,
        pub project_id: ProjectId,
        pub user_id: Option<UserId>,
        pub name: String,
        pub spec: String,
        pub spec_sealed: Option<Vec<u8>>,
        pub status: Status,
        pub auto_created: bool,
    }
}

statements! {
    FIND = "SELECT {} FROM fleets f WHERE f.id = $1", Fleet::columns("f");
    FIND_BY_NAME = "SELECT {} FROM fleets f WHERE f.project_id = $1 AND f.name = $2 AND NOT f.deleted",
                   Fleet::columns("f");
    USABLE_NAMES = "SELECT p.name, f.name FROM usable_fleets u JOIN fleets f ON f.id = u.fleet_id \
                    JOIN projects p ON p.id = f.project_id WHERE u.project_id = $1 AND NOT f.finished AND NOT f.deleted \
                    ORDER BY p.id <> $1, p.name, f.name";
    NAMES = "SELECT id, name FROM fleets WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    WAS_GIVEN = "SELECT 1 FROM fleets WHERE project_id = $1 AND name = $2 AND (auto_created OR NOT deleted) LIMIT 1";
    SEALED = "SELECT spec_sealed FROM fleets WHERE id = $1";
    /// A request that the pipeline reads; rejected while a job runs there.
    REQUEST_DELETE = "UPDATE fleets SET termination_asked_at = coalesce(termination_asked_at, now_us()), due_at = NULL \
                  WHERE id = $1 AND NOT deleted AND NOT EXISTS (SELECT 1 FROM jobs j JOIN instances i \
                  ON i.id = j.instance_id WHERE i.fleet_id = $1 AND NOT j.finished)";
    /// Failed attempts were for the previous specification.
    SET_SPEC = "UPDATE fleets SET spec = $2, spec_sealed = $3, consolidation_attempt = 0, due_at = NULL WHERE id = $1 AND NOT deleted \
                AND termination_asked_at IS NULL";
}

/// A name in use is a conflict on `fleets_name_key`.
pub fn insert(fleet: NewFleet) -> Change {
    let mut values = fleet.into_values();
    values.extend([("created_at", Val::Now), ("last_processed_at", Val::Now)]);
    Change::Insert { table: "fleets", values }
}

pub async fn find(db: &Db, id: FleetId) -> Result<Option<Fleet>, DbError> {
    db.query_opt(FIND.as_str(), params![id]).await?.map(Fleet::read).transpose()
}

pub async fn find_by_name(db: &Db, project: ProjectId, name: &str) -> Result<Option<Fleet>, DbError> {
    db.query_opt(FIND_BY_NAME.as_str(), params![project, name]).await?.map(Fleet::read).transpose()
}

/// Returns whether the server ever created a fleet of this name, or a fleet has it now.
pub async fn is_name_used(db: &Db, project: ProjectId, name: &str) -> Result<bool, DbError> {
    Ok(db.query_opt(WAS_GIVEN.as_str(), params![project, name]).await?.is_some())
}

/// Names of fleets, including deleted ones.
pub async fn names(db: &Db, ids: &[FleetId]) -> Result<HashMap<FleetId, String>, DbError> {
    let rows = db.query(NAMES.as_str(), vec![Val::list(ids)]).await?;
    rows.iter().map(|row| Ok((row.id(0)?, row.text(1)?))).collect()
}

/// Project and name of each fleet that a project may use: first its own.
pub async fn usable_names(db: &Db, project: ProjectId) -> Result<Vec<(String, String)>, DbError> {
    let rows = db.query(USABLE_NAMES.as_str(), params![project]).await?;
    rows.iter().map(|row| Ok((row.text(0)?, row.text(1)?))).collect()
}

pub async fn sealed_column(db: &Db, id: FleetId) -> Result<Option<Vec<u8>>, DbError> {
    Ok(db.query_opt(SEALED.as_str(), params![id]).await?.map(|row| row.opt_bytes(0)).transpose()?.flatten())
}

/// Selection of fleets: newest first unless the page specifies otherwise, ties by id.
#[derive(Clone, Debug, Default)]
pub struct Query {
    pub projects: Option<Vec<ProjectId>>,
    /// Also those that other projects export to these.
    pub include_imported: bool,
    pub only_active: bool,
    pub page: Page,
}

/// Fleets that are not deleted.
pub async fn list(db: &Db, query: &Query) -> Result<Vec<Fleet>, DbError> {
    let mut filter = Filter::new();
    filter.and("NOT f.deleted");
    if let Some(projects) = &query.projects {
        match query.include_imported {
            true => filter.is(
                "f.id IN (SELECT u.fleet_id FROM usable_fleets u WHERE u.project_id IN \
                 (SELECT value FROM json_each(CAST(? AS TEXT))))",
                Val::list(projects),
            ),
            false => filter.and_in("f.project_id", projects),
        }
    }
    if query.only_active {
        filter.and("NOT f.finished");
    }
    filter.after("f.created_at", "f.id", &query.page);
    let (found, params) = filter.done();
    let order = query.page.order("f.created_at", "f.id");
    let sql = format!("SELECT {} FROM fleets f{found}{order}", Fleet::columns("f"));
    db.query(sql, params).await?.into_iter().map(Fleet::read).collect()
}

/// Stores the request to delete; the fleet's pipeline performs it. Stale while a job runs there.
pub fn request_delete(id: FleetId) -> Change {
    Change::Exec { sql: REQUEST_DELETE.as_str().into(), params: params![id], expect: Expect::One }
}

/// Stale if the fleet is being deleted.
pub fn set_spec(id: FleetId, spec: &str, sealed: Option<Vec<u8>>) -> Change {
    Change::Exec { sql: SET_SPEC.as_str().into(), params: params![id, spec, sealed], expect: Expect::One }
}
