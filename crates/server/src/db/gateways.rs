//! Table `gateways`.

use windlass_model::{
    gateway::Status,
    id::{GatewayId, ProjectId},
    time::Timestamp,
};

use super::{
    Change, Db, DbError, Expect, Val,
    record::{record, statements},
};
use crate::params;

record! {
    pub struct Gateway {
        pub id: GatewayId,
        pub project_id: ProjectId,
        pub name: String,
        pub backend: Option<String>,
        pub region: Option<String>,
        /// JSON.
        pub configuration: String,
        pub wildcard_domain: Option<String>,
        pub status: Status,
        pub finished: bool,
        pub status_message: Option<String>,
        /// The provider's own id.
        pub instance_id: Option<String>,
        pub hostname: Option<String>,
        pub ip_address: Option<String>,
        pub provisioning: Option<String>,
        pub delete_asked_at: Option<Timestamp>,
        pub created_at: Timestamp,
        pub last_processed_at: Timestamp,
        pub deleted: bool,
        pub tracking: Option<String>,
        pub lock_epoch: i64,
    }
}

record! {
    pub struct NewGateway {
        pub id: GatewayId,
        pub project_id: ProjectId,
        pub name: String,
        pub backend: Option<String>,
        pub region: Option<String>,
        pub configuration: String,
        pub wildcard_domain: Option<String>,
        pub status: Status,
    }
}

statements! {
    FIND = "SELECT {} FROM gateways g WHERE g.id = $1", Gateway::columns("g");
    FIND_BY_NAME = "SELECT {} FROM gateways g WHERE g.project_id = $1 AND g.name = $2 AND NOT g.deleted",
                   Gateway::columns("g");
    LIST = "SELECT {} FROM gateways g WHERE g.project_id = $1 AND NOT g.deleted \
            ORDER BY g.created_at DESC, g.id", Gateway::columns("g");
    SET_WILDCARD_DOMAIN = "UPDATE gateways SET wildcard_domain = $2 WHERE id = $1 AND NOT deleted";
    SET_CONFIGURATION = "UPDATE gateways SET configuration = $2, wildcard_domain = $3, due_at = NULL \
                         WHERE id = $1 AND NOT deleted AND delete_asked_at IS NULL";
    ASK_DELETE = "UPDATE gateways SET delete_asked_at = coalesce(delete_asked_at, now_us()), due_at = NULL \
                  WHERE id = $1 AND NOT deleted";
}

/// A name in use is a conflict on `gateways_name_key`.
pub fn insert(gateway: NewGateway) -> Change {
    let mut values = gateway.into_values();
    values.extend([("created_at", Val::Now), ("last_processed_at", Val::Now)]);
    Change::Insert { table: "gateways", values }
}

pub async fn find(db: &Db, id: GatewayId) -> Result<Option<Gateway>, DbError> {
    db.query_opt(FIND.as_str(), params![id]).await?.map(Gateway::read).transpose()
}

pub async fn find_by_name(db: &Db, project: ProjectId, name: &str) -> Result<Option<Gateway>, DbError> {
    db.query_opt(FIND_BY_NAME.as_str(), params![project, name]).await?.map(Gateway::read).transpose()
}

pub async fn list(db: &Db, project: ProjectId) -> Result<Vec<Gateway>, DbError> {
    db.query(LIST.as_str(), params![project]).await?.into_iter().map(Gateway::read).collect()
}

pub fn set_wildcard_domain(id: GatewayId, domain: Option<&str>) -> Change {
    exec(&SET_WILDCARD_DOMAIN, params![id, domain])
}

/// Stale when the gateway is on its way out.
pub fn set_configuration(id: GatewayId, configuration: &str, domain: Option<&str>) -> Change {
    exec(&SET_CONFIGURATION, params![id, configuration, domain])
}

/// Stores the wish to delete; the gateway's pipeline does it.
pub fn ask_delete(id: GatewayId) -> Change {
    exec(&ASK_DELETE, params![id])
}

fn exec(sql: &'static str, params: Vec<Val>) -> Change {
    Change::Exec { sql: sql.into(), params, expect: Expect::One }
}
