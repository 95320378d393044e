//! Tables `containers`, `container_requests` and `container_output`: the queue from which dispatchers pull.
//!
//! A record is stored as a whole document. Columns next to it repeat the fields that are searched for; only this module
//! writes them.

use uuid::Uuid;
use windlass_model::{
    id::SubmissionId,
    queue::{Container, ContainerRequest},
    time::Timestamp,
};

use super::{Change, Db, DbError, Expect, Row, Val, record::statements};
use crate::params;

/// A document with the revision that guards its next write.
#[derive(Clone, Debug)]
pub struct Versioned<T> {
    pub id: Uuid,
    pub revision: i64,
    pub doc: T,
}

statements! {
    CONTAINERS = "SELECT c.id, c.revision, c.doc FROM containers c \
                  WHERE c.uuid IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    NEWEST = "SELECT c.doc FROM containers c ORDER BY c.created_at DESC, c.uuid DESC LIMIT $1";
    NEWEST_OF = "SELECT c.doc FROM containers c WHERE c.owner_uuid = $2 ORDER BY c.created_at DESC LIMIT $1";
    REQUESTS = "SELECT r.id, r.revision, r.doc FROM container_requests r \
                WHERE r.uuid IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    REQUESTS_OF = "SELECT r.id, r.revision, r.doc FROM container_requests r \
                   WHERE r.container_uuid IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    REQUESTS_BY = "SELECT r.id, r.revision, r.doc FROM container_requests r \
                   WHERE r.state = 'Committed' \
                   AND r.requesting_container_uuid IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    ALIKE = "SELECT c.id, c.revision, c.doc FROM containers c WHERE c.owner_uuid = $1 AND c.identity = $2 \
             AND c.state <> 'Cancelled' ORDER BY c.created_at, c.uuid LIMIT 100";
    MADE_BY = "SELECT r.uuid, r.made_of FROM container_requests r \
               WHERE r.made_by = $1 AND r.created_at > now_us() - 60000000 ORDER BY r.created_at DESC LIMIT 20";
    UPDATE_CONTAINER = "UPDATE containers SET revision = revision + 1, state = $3, priority = $4, modified_at = $5, \
                        locked_by_uuid = $6, doc = $7 WHERE uuid = $1 AND revision = $2";
    UPDATE_REQUEST = "UPDATE container_requests SET revision = revision + 1, state = $3, priority = $4, \
                      modified_at = $5, container_uuid = $6, doc = $7 WHERE uuid = $1 AND revision = $2";
    /// Another write depends on this row being unchanged.
    TOUCH_CONTAINER = "UPDATE containers SET revision = revision + 1 WHERE uuid = $1 AND revision = $2";
    ERASE_CONTAINER = "UPDATE containers SET secrets_sealed = NULL WHERE uuid = $1";
    ERASE_REQUEST = "UPDATE container_requests SET secrets_sealed = NULL WHERE uuid = $1";
    SEAL_REQUEST = "UPDATE container_requests SET secrets_sealed = $2 WHERE uuid = $1";
    CONTAINER_SECRETS = "SELECT c.id, c.secrets_sealed FROM containers c WHERE c.uuid = $1";
    REQUEST_SECRETS = "SELECT r.id, r.secrets_sealed FROM container_requests r WHERE r.uuid = $1";
    DELETE_REQUEST = "DELETE FROM container_requests WHERE uuid = $1 AND revision = $2";
    DELETE_CONTAINER = "DELETE FROM containers WHERE uuid = $1 AND revision = $2";
    OUTPUT_END = "SELECT CAST(coalesce(max(o.ends_at), 0) AS BIGINT) FROM container_output o \
                  WHERE o.container_uuid = $1 AND o.attempt = $2 AND o.stream = $3";
    OUTPUT = "SELECT o.starts_at, o.bytes FROM container_output o \
              WHERE o.container_uuid = $1 AND o.attempt = $2 AND o.stream = $3 AND o.ends_at > $4 \
              ORDER BY o.starts_at LIMIT 64";
    OUTPUT_ATTEMPT = "SELECT CAST(max(o.attempt) AS BIGINT) FROM container_output o WHERE o.container_uuid = $1";
    OLD_OUTPUT = "DELETE FROM container_output WHERE container_uuid IN (\
                  SELECT c.uuid FROM containers c WHERE c.state IN ('Complete', 'Cancelled') AND c.modified_at < $1 \
                  AND EXISTS (SELECT 1 FROM container_output o WHERE o.container_uuid = c.uuid) \
                  ORDER BY c.modified_at LIMIT 200)";
    OLD_LOGS = "DELETE FROM queue_logs WHERE id IN (\
                SELECT l.id FROM queue_logs l WHERE l.created_at < $1 ORDER BY l.created_at, l.id LIMIT 5000)";
    APPEND = "INSERT INTO container_output (container_uuid, attempt, stream, starts_at, ends_at, bytes) \
              VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (container_uuid, attempt, stream, starts_at) DO NOTHING";
}

fn read<T: serde::de::DeserializeOwned>(row: &Row) -> Result<Versioned<T>, DbError> {
    Ok(Versioned { id: row.uuid(0)?, revision: row.int(1)?, doc: row.json(2)? })
}

async fn query_versioned<T: serde::de::DeserializeOwned>(
    db: &Db,
    sql: &'static str,
    params: Vec<Val>,
) -> Result<Vec<Versioned<T>>, DbError> {
    db.query(sql, params).await?.iter().map(read).collect()
}

pub async fn containers(db: &Db, uuids: &[String]) -> Result<Vec<Versioned<Container>>, DbError> {
    query_versioned(db, CONTAINERS.as_str(), params![Val::list(uuids)]).await
}

/// Containers, newest first; of one owner if it is named.
pub async fn list_newest(db: &Db, owner: Option<&str>, limit: i64) -> Result<Vec<Container>, DbError> {
    let rows = match owner {
        None => db.query(NEWEST.as_str(), params![limit]).await?,
        Some(owner) => db.query(NEWEST_OF.as_str(), params![limit, owner]).await?,
    };
    rows.iter().map(|row| row.json(0)).collect()
}

pub async fn requests(db: &Db, uuids: &[String]) -> Result<Vec<Versioned<ContainerRequest>>, DbError> {
    query_versioned(db, REQUESTS.as_str(), params![Val::list(uuids)]).await
}

/// Requests that wait, or waited, for these containers.
pub async fn requests_for(
    db: &Db,
    containers: &[String],
) -> Result<Vec<Versioned<ContainerRequest>>, DbError> {
    query_versioned(db, REQUESTS_OF.as_str(), params![Val::list(containers)]).await
}

/// Active requests that programs in these containers made.
pub async fn requests_made_in(
    db: &Db,
    containers: &[String],
) -> Result<Vec<Versioned<ContainerRequest>>, DbError> {
    query_versioned(db, REQUESTS_BY.as_str(), params![Val::list(containers)]).await
}

/// Containers of this user for the same work.
pub async fn find_reusable(
    db: &Db,
    owner: &str,
    identity: &str,
) -> Result<Vec<Versioned<Container>>, DbError> {
    query_versioned(db, ALIKE.as_str(), params![owner, identity]).await
}

/// Requests that a call of this name created in the last minute: their uuid, and their input.
pub async fn requests_by_call(db: &Db, call: &str) -> Result<Vec<(String, String)>, DbError> {
    let rows = db.query(MADE_BY.as_str(), params![call]).await?;
    rows.iter().map(|row| Ok((row.text(0)?, row.opt_text(1)?.unwrap_or_default()))).collect()
}

fn priority(priority: u64) -> i64 {
    i64::try_from(priority).unwrap_or(i64::MAX)
}

pub fn insert_container(
    id: Uuid,
    container: &Container,
    identity: &str,
    job: Option<SubmissionId>,
    secrets: Option<Vec<u8>>,
) -> Result<Change, DbError> {
    Ok(Change::Insert {
        table: "containers",
        values: vec![
            ("id", id.into()),
            ("uuid", container.uuid.as_str().into()),
            ("revision", 1_i64.into()),
            ("owner_uuid", container.owner_uuid.as_str().into()),
            ("state", container.state.as_str().into()),
            ("priority", priority(container.priority).into()),
            ("created_at", container.created_at.into()),
            ("modified_at", container.modified_at.into()),
            ("identity", identity.into()),
            ("job_id", job.into()),
            ("doc", Val::json(container)?),
            ("secrets_sealed", secrets.into()),
        ],
    })
}

/// Call that created a request, and its input.
#[derive(Clone, Debug)]
pub struct RequestOrigin {
    pub by: String,
    pub of: String,
}

pub fn insert_request(
    id: Uuid,
    request: &ContainerRequest,
    made: Option<&RequestOrigin>,
    secrets: Option<Vec<u8>>,
) -> Result<Change, DbError> {
    Ok(Change::Insert {
        table: "container_requests",
        values: vec![
            ("id", id.into()),
            ("uuid", request.uuid.as_str().into()),
            ("revision", 1_i64.into()),
            ("owner_uuid", request.owner_uuid.as_str().into()),
            ("state", request.state.as_str().into()),
            ("priority", priority(request.priority).into()),
            ("created_at", request.created_at.into()),
            ("modified_at", request.modified_at.into()),
            ("container_uuid", request.container_uuid.as_deref().into()),
            ("requesting_container_uuid", request.requesting_container_uuid.as_deref().into()),
            ("made_by", made.map(|made| made.by.as_str()).into()),
            ("made_of", made.map(|made| made.of.as_str()).into()),
            ("doc", Val::json(request)?),
            ("secrets_sealed", secrets.into()),
        ],
    })
}

fn exec_one(sql: &'static str, params: Vec<Val>) -> Change {
    Change::Exec { sql: sql.into(), params, expect: Expect::One }
}

fn exec_any(sql: &'static str, params: Vec<Val>) -> Change {
    Change::Exec { sql: sql.into(), params, expect: Expect::Any }
}

/// Stale if the row was written since it was read.
pub fn update_container(container: &Container, revision: i64) -> Result<Change, DbError> {
    let params = params![
        container.uuid.as_str(),
        revision,
        container.state.as_str(),
        priority(container.priority),
        container.modified_at,
        container.locked_by_uuid.as_deref(),
        Val::json(container)?,
    ];
    Ok(exec_one(UPDATE_CONTAINER.as_str(), params))
}

pub fn update_request(request: &ContainerRequest, revision: i64) -> Result<Change, DbError> {
    let params = params![
        request.uuid.as_str(),
        revision,
        request.state.as_str(),
        priority(request.priority),
        request.modified_at,
        request.container_uuid.as_deref(),
        Val::json(request)?,
    ];
    Ok(exec_one(UPDATE_REQUEST.as_str(), params))
}

pub fn bump_container(uuid: &str, revision: i64) -> Change {
    exec_one(TOUCH_CONTAINER.as_str(), params![uuid, revision])
}

pub fn erase_container_secrets(uuid: &str) -> Change {
    exec_any(ERASE_CONTAINER.as_str(), params![uuid])
}

pub fn erase_request_secrets(uuid: &str) -> Change {
    exec_any(ERASE_REQUEST.as_str(), params![uuid])
}

pub fn set_request_secrets(uuid: &str, secrets: Vec<u8>) -> Change {
    exec_any(SEAL_REQUEST.as_str(), params![uuid, secrets])
}

pub fn delete_request(uuid: &str, revision: i64) -> Change {
    exec_one(DELETE_REQUEST.as_str(), params![uuid, revision])
}

pub fn delete_container(uuid: &str, revision: i64) -> Change {
    exec_one(DELETE_CONTAINER.as_str(), params![uuid, revision])
}

async fn secrets(db: &Db, sql: &'static str, uuid: &str) -> Result<Option<(Uuid, Vec<u8>)>, DbError> {
    let Some(row) = db.query_opt(sql, params![uuid]).await? else { return Ok(None) };
    row.opt_bytes(1)?.map(|sealed| row.uuid(0).map(|id| (id, sealed))).transpose()
}

/// Id of the row and its sealed mounts, if it has any.
pub async fn container_secrets(db: &Db, uuid: &str) -> Result<Option<(Uuid, Vec<u8>)>, DbError> {
    secrets(db, CONTAINER_SECRETS.as_str(), uuid).await
}

pub async fn request_secrets(db: &Db, uuid: &str) -> Result<Option<(Uuid, Vec<u8>)>, DbError> {
    secrets(db, REQUEST_SECRETS.as_str(), uuid).await
}

/// End offset of the stored output of a stream of this attempt.
pub async fn output_end(db: &Db, container: &str, attempt: i64, stream: &str) -> Result<i64, DbError> {
    let row = db.query_opt(OUTPUT_END.as_str(), params![container, attempt, stream]).await?;
    row.map_or(Ok(0), |row| row.int(0))
}

/// Last attempt that wrote output.
pub async fn output_attempt(db: &Db, container: &str) -> Result<Option<i64>, DbError> {
    let row = db.query_opt(OUTPUT_ATTEMPT.as_str(), params![container]).await?;
    row.map_or(Ok(None), |row| row.opt_int(0))
}

/// Chunks from an offset on: the start of each, and its bytes.
pub async fn output(
    db: &Db,
    container: &str,
    attempt: i64,
    stream: &str,
    from: i64,
) -> Result<Vec<(i64, Vec<u8>)>, DbError> {
    let rows = db.query(OUTPUT.as_str(), params![container, attempt, stream, from]).await?;
    rows.iter().map(|row| Ok((row.int(0)?, row.bytes(1)?))).collect()
}

/// Stores a chunk at its offset; an existing one is left unchanged.
pub fn append_output(container: &str, attempt: i64, stream: &str, at: i64, bytes: Vec<u8>) -> Change {
    let end = at.saturating_add(i64::try_from(bytes.len()).unwrap_or(i64::MAX));
    exec_any(APPEND.as_str(), params![container, attempt, stream, at, end, bytes])
}

/// Deletes a batch of the output and log rows of containers that ended before that time. Call again for more.
pub fn expire(before: Timestamp) -> [Change; 2] {
    [exec_any(OLD_OUTPUT.as_str(), params![before]), exec_any(OLD_LOGS.as_str(), params![before])]
}
