//! Table `gateways`.

use windlass_model::{
    gateway::Status,
    id::{GatewayId, ProjectId, RunId},
    time::Timestamp,
};

use super::{
    Change, Db, DbError, Expect, Val,
    record::{record, statements},
    service_replicas::PROXY_LOST_AFTER,
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
    /// A gateway of a project by name, if another project may use it.
    FIND_USABLE = "SELECT {} FROM gateways g JOIN projects p ON p.id = g.project_id WHERE p.name = $2 \
                   AND NOT p.deleted AND g.name = $3 AND NOT g.deleted AND EXISTS (SELECT 1 FROM usable_gateways u \
                   WHERE u.project_id = $1 AND u.gateway_id = g.id)", Gateway::columns("g");
    IS_USABLE = "SELECT u.gateway_id FROM usable_gateways u WHERE u.project_id = $1 AND u.gateway_id = $2";
    /// Gateways of other projects that the project may use.
    LIST_IMPORTED = "SELECT {}, p.name FROM gateways g JOIN projects p ON p.id = g.project_id WHERE g.id IN \
                     (SELECT u.gateway_id FROM usable_gateways u WHERE u.project_id = $1) AND g.project_id <> $1 \
                     AND NOT g.deleted ORDER BY p.name, g.name", Gateway::columns("g");
    LIST = "SELECT {} FROM gateways g WHERE g.project_id = $1 AND NOT g.deleted \
            ORDER BY g.created_at DESC, g.id", Gateway::columns("g");
    SET_WILDCARD_DOMAIN = "UPDATE gateways SET wildcard_domain = $2 WHERE id = $1 AND NOT deleted";
    SET_CONFIGURATION = "UPDATE gateways SET configuration = $2, wildcard_domain = $3, due_at = NULL \
                         WHERE id = $1 AND NOT deleted AND delete_asked_at IS NULL";
    /// Only if no service is published through it.
    DELETE = "UPDATE gateways SET delete_asked_at = now_us(), deleted = TRUE, finished = TRUE, finished_at = now_us() \
              WHERE id = $1 AND NOT deleted AND NOT EXISTS \
              (SELECT 1 FROM runs r WHERE r.gateway_id = gateways.id AND NOT r.finished)";
    USERS = "SELECT r.name FROM runs r WHERE r.gateway_id = $1 AND NOT r.finished ORDER BY r.name LIMIT 10";
    FIND_BY_TOKEN = "SELECT g.id, g.token_hash FROM gateways g WHERE g.token_hash = $1 AND NOT g.deleted";
    TOKEN_HASH = "SELECT g.token_hash FROM gateways g WHERE g.id = $1 AND NOT g.deleted";
    SET_TOKEN = "UPDATE gateways SET token_hash = $2 WHERE id = $1 AND NOT deleted";
    SET_STATUS = "UPDATE gateways SET status = $3 WHERE id = $1 AND status = $2 AND NOT deleted";
    /// Recently seen processes of the gateway.
    NODES = "SELECT x.id, x.address FROM proxies x WHERE x.gateway_id = $1 AND x.seen_at >= now_us() - $2 ORDER BY x.id";
    SEEN_NODE = "INSERT INTO proxies (id, seen_at, gateway_id, address) VALUES ($1, now_us(), $2, $3) \
                 ON CONFLICT (id) DO UPDATE SET seen_at = now_us(), gateway_id = excluded.gateway_id, \
                 address = excluded.address";
    FREE_DOMAIN = "DELETE FROM service_domains WHERE domain = $1 AND NOT EXISTS \
                   (SELECT 1 FROM runs r WHERE r.id = service_domains.run_id AND NOT r.finished)";
    TAKEN_BY = "SELECT p.name, r.name FROM service_domains d JOIN runs r ON r.id = d.run_id \
                JOIN projects p ON p.id = r.project_id WHERE d.domain = $1 AND NOT r.finished AND r.id <> $2";
    LEAVE_DOMAINS = "DELETE FROM service_domains WHERE run_id = $1";
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

/// Gateway `owner/name`, if services of the project may use it.
pub async fn find_usable(
    db: &Db,
    project: ProjectId,
    owner: &str,
    name: &str,
) -> Result<Option<Gateway>, DbError> {
    db.query_opt(FIND_USABLE.as_str(), params![project, owner, name]).await?.map(Gateway::read).transpose()
}

/// Returns whether services of the project may use the gateway: it is its own, or exported to it.
pub async fn is_usable(db: &Db, project: ProjectId, gateway: GatewayId) -> Result<bool, DbError> {
    Ok(db.query_opt(IS_USABLE.as_str(), params![project, gateway]).await?.is_some())
}

/// Gateways of other projects that services of the project may use, with the names of those projects.
pub async fn list_imported(db: &Db, project: ProjectId) -> Result<Vec<(Gateway, String)>, DbError> {
    let rows = db.query(LIST_IMPORTED.as_str(), params![project]).await?;
    let each = rows.into_iter().map(|mut row| {
        let owner = row.text(Gateway::WIDTH)?;
        Ok((Gateway::read_from(&mut row, 0)?, owner))
    });
    each.collect()
}

pub async fn list(db: &Db, project: ProjectId) -> Result<Vec<Gateway>, DbError> {
    db.query(LIST.as_str(), params![project]).await?.into_iter().map(Gateway::read).collect()
}

pub fn set_wildcard_domain(id: GatewayId, domain: Option<&str>) -> Change {
    exec(&SET_WILDCARD_DOMAIN, params![id, domain])
}

/// Stale if the gateway is being deleted.
pub fn set_configuration(id: GatewayId, configuration: &str, domain: Option<&str>) -> Change {
    exec(&SET_CONFIGURATION, params![id, configuration, domain])
}

/// Stale while a service is published through it.
pub fn delete(id: GatewayId) -> Change {
    exec(&DELETE, params![id])
}

/// First few services that are published through it.
pub async fn published_services(db: &Db, id: GatewayId) -> Result<Vec<String>, DbError> {
    db.query(USERS.as_str(), params![id]).await?.iter().map(|row| row.text(0)).collect()
}

/// Gateway whose processes present a token with this hash, and the hash.
pub async fn find_by_token(db: &Db, hash: &str) -> Result<Option<(GatewayId, String)>, DbError> {
    let row = db.query_opt(FIND_BY_TOKEN.as_str(), params![hash]).await?;
    row.map(|row| Ok((row.id(0)?, row.text(1)?))).transpose()
}

/// Hash of the present token. `None`: there is no such gateway, or it has no token.
pub async fn token_hash(db: &Db, id: GatewayId) -> Result<Option<String>, DbError> {
    db.query_opt(TOKEN_HASH.as_str(), params![id]).await?.map_or(Ok(None), |row| row.opt_text(0))
}

pub fn set_token(id: GatewayId, hash: &str) -> Change {
    exec(&SET_TOKEN, params![id, hash])
}

/// Stale if the status has changed.
pub fn set_status(id: GatewayId, from: Status, to: Status) -> Change {
    exec(&SET_STATUS, params![id, from.as_str(), to.as_str()])
}

/// A process of a gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayNode {
    pub id: String,
    pub address: Option<String>,
}

/// Recently seen processes of the gateway.
pub async fn live_nodes(db: &Db, id: GatewayId) -> Result<Vec<GatewayNode>, DbError> {
    let rows = db.query(NODES.as_str(), params![id, PROXY_LOST_AFTER.0]).await?;
    rows.iter().map(|row| Ok(GatewayNode { id: row.text(0)?, address: row.opt_text(1)? })).collect()
}

/// Records that a process of a gateway is alive.
pub fn record_node(node: &str, gateway: GatewayId, address: Option<&str>) -> Change {
    Change::Exec {
        sql: SEEN_NODE.as_str().into(),
        params: params![node, gateway, address],
        expect: Expect::Any,
    }
}

/// Assigns a domain to a run. A domain in use is a conflict on `service_domains_domain_key`.
pub fn claim_domain(domain: &str, run: RunId) -> [Change; 2] {
    let free =
        Change::Exec { sql: FREE_DOMAIN.as_str().into(), params: params![domain], expect: Expect::Any };
    let values = vec![("domain", domain.into()), ("run_id", run.into())];
    [free, Change::Insert { table: "service_domains", values }]
}

/// Releases the domains of a run.
pub fn release_domains(run: RunId) -> Change {
    Change::Exec { sql: LEAVE_DOMAINS.as_str().into(), params: params![run], expect: Expect::Any }
}

/// Project and run that have this domain, if it is not this run.
pub async fn domain_owner(
    db: &Db,
    domain: &str,
    but: Option<RunId>,
) -> Result<Option<(String, String)>, DbError> {
    let but = but.map(|run| run.to_string()).unwrap_or_default();
    let row = db.query_opt(TAKEN_BY.as_str(), params![domain, but]).await?;
    row.map(|row| Ok((row.text(0)?, row.text(1)?))).transpose()
}

fn exec(sql: &'static str, params: Vec<Val>) -> Change {
    Change::Exec { sql: sql.into(), params, expect: Expect::One }
}
