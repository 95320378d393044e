//! Records as clients see them: lists and single records, limited to those that the caller may see.

use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use windlass_model::{
    queue::{Container, ContainerRequest, QueueCaller},
    time::Timestamp,
};

use super::{CLUSTER, Error, Requester, Result};
use crate::{
    app::App,
    db::{
        Row, containers,
        queue_list::{self, Condition, ListKind, ListQuery, QueueVisibility},
    },
};

/// Hash that changes when the record does.
pub fn etag(record: &Value) -> String {
    super::encode_letters(&Sha256::digest(record.to_string().as_bytes()), 22)
}

fn to_record(kind: &str, mut record: Value) -> Value {
    let etag = etag(&record);
    if let Some(record) = record.as_object_mut() {
        record.remove("last_call");
        record.remove("secret_mounts_digest");
        record.insert("kind".into(), format!("arvados#{kind}").into());
        record.insert("etag".into(), etag.into());
    }
    record
}

pub fn container_record(container: &Container) -> Result<Value> {
    Ok(to_record("container", serde_json::to_value(container)?))
}

pub fn request_record(request: &ContainerRequest) -> Result<Value> {
    Ok(to_record("containerRequest", serde_json::to_value(request)?))
}

fn log_record(row: &Row) -> Result<Value> {
    let doc: Value = row.json(0)?;
    let object = row.text(3)?;
    let at = row.time(6)?;
    let record = json!({
        "id": row.int(1)?, "uuid": row.text(2)?, "object_uuid": object, "object_kind": arvados_kind(&object),
        "object_owner_uuid": row.text(4)?, "owner_uuid": row.text(4)?, "event_type": row.text(5)?,
        "event_at": at, "created_at": at, "modified_at": at, "modified_by_user_uuid": null,
        "summary": row.text(7)?, "properties": doc.get("properties").cloned().unwrap_or_default(),
    });
    Ok(to_record("log", record))
}

fn arvados_kind(uuid: &str) -> Option<&'static str> {
    match uuid.split('-').nth(1)? {
        "dz642" => Some("arvados#container"),
        "xvhdp" => Some("arvados#containerRequest"),
        "gj3su" => Some("arvados#apiClientAuthorization"),
        "tpzed" => Some("arvados#user"),
        _ => None,
    }
}

/// A page of a list, and the total number if requested.
pub async fn list(
    app: &App,
    sight: &QueueVisibility,
    kind: ListKind,
    requested: &ListQuery,
) -> Result<(Vec<Value>, Option<i64>)> {
    let found = queue_list::list(app.db(), kind, sight, requested).await?;
    let items = found.rows.iter().map(|row| match kind {
        ListKind::Containers => Ok(to_record("container", row.json(0)?)),
        ListKind::Requests => Ok(to_record("containerRequest", row.json(0)?)),
        ListKind::Logs => log_record(row),
    });
    Ok((items.collect::<Result<_>>()?, found.available))
}

/// Record of this name, if the caller sees it.
pub async fn find_visible(app: &App, sight: &QueueVisibility, kind: ListKind, uuid: &str) -> Result<Value> {
    let condition = Condition { attribute: "uuid".into(), op: "=".into(), operand: uuid.into() };
    let requested = ListQuery { conditions: vec![condition], limit: 1, ..ListQuery::default() };
    let (items, _) = list(app, sight, kind, &requested).await?;
    items.into_iter().next().ok_or_else(|| Error::Missing(uuid.to_owned()))
}

pub async fn container(app: &App, asker: &Requester, uuid: &str) -> Result<Container> {
    // With the same rule as lists.
    find_visible(app, &asker.sight(), ListKind::Containers, uuid).await?;
    let found = containers::containers(app.db(), &[uuid.to_owned()]).await?;
    found.into_iter().next().map(|kept| kept.doc).ok_or_else(|| Error::Missing(uuid.to_owned()))
}

/// Container of the token, or those that a dispatcher holds.
pub enum CurrentContainers {
    One(Value),
    Held(ListQuery),
}

pub async fn current(
    app: &App,
    asker: &Requester,
    scope: Option<&str>,
    mut requested: ListQuery,
) -> Result<CurrentContainers> {
    let missing = || Error::Missing("container of this token".into());
    match (&asker.who, scope) {
        (
            QueueCaller::Inside { container, .. } | QueueCaller::Executor { container, .. },
            None | Some("container"),
        ) => find_visible(app, &QueueVisibility::One(container.clone()), ListKind::Containers, container)
            .await
            .map(CurrentContainers::One),
        // An admin's token that does not request `dispatch` has no container: clients rely on that.
        (QueueCaller::Dispatcher { .. }, None | Some("dispatch"))
        | (QueueCaller::Admin, Some("dispatch")) => {
            let held = |attribute: &str, op: &str, operand: Value| Condition {
                attribute: attribute.into(),
                op: op.into(),
                operand,
            };
            requested.conditions.push(held("locked_by_uuid", "=", asker.token_uuid.as_str().into()));
            requested.conditions.push(held("state", "in", json!(["Locked", "Running"])));
            Ok(CurrentContainers::Held(requested))
        }
        (
            QueueCaller::Admin
            | QueueCaller::User
            | QueueCaller::Inside { .. }
            | QueueCaller::Executor { .. }
            | QueueCaller::Dispatcher { .. },
            _,
        ) => Err(missing()),
    }
}

/// Shown fields of a token.
#[derive(Clone, Copy, Debug)]
pub struct TokenView<'a> {
    pub uuid: &'a str,
    pub secret: Option<&'a str>,
    pub scopes: &'a [&'a str],
    pub created_at: Option<Timestamp>,
    pub expires_at: Option<Timestamp>,
}

impl<'a> TokenView<'a> {
    /// A token for everything that its kind may do, with its secret.
    pub fn with_secret(uuid: &'a str, secret: &'a str) -> Self {
        Self { uuid, secret: Some(secret), scopes: &["all"], created_at: None, expires_at: None }
    }
}

/// A token as its owner sees it.
pub fn token_record(owner: &str, token: &TokenView<'_>) -> Value {
    let TokenView { uuid, secret, scopes, created_at: at, expires_at } = token;
    to_record(
        "apiClientAuthorization",
        json!({
            "uuid": uuid, "api_token": secret, "owner_uuid": owner, "scopes": scopes,
            "expires_at": expires_at,
            "created_at": at, "modified_at": at, "modified_by_user_uuid": owner, "user_id": null,
        }),
    )
}

pub fn user_record(user: &crate::db::users::User) -> Value {
    let uuid = super::auth::user_uuid(user.id);
    to_record(
        "user",
        json!({
            "uuid": uuid, "owner_uuid": format!("{CLUSTER}-tpzed-000000000000000"), "username": user.name,
            "email": user.email, "full_name": user.name, "first_name": user.name, "last_name": "",
            "is_admin": user.admin, "is_active": user.active, "is_invited": true, "prefs": {},
            "created_at": user.created_at, "modified_at": user.created_at, "modified_by_user_uuid": null,
        }),
    )
}

/// Reduces a record to the requested attributes, and those that every record has.
pub fn select_attributes(record: &mut Value, wanted: Option<&[String]>) {
    let (Some(wanted), Some(record)) = (wanted, record.as_object_mut()) else { return };
    let kept: Map<String, Value> = std::mem::take(record)
        .into_iter()
        .filter(|(name, _)| name == "kind" || name == "etag" || wanted.contains(name))
        .collect();
    *record = kept;
}
