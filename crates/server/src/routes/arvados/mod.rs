//! The container queue in the API of Arvados: discovery document, records over REST, events over a WebSocket. Statuses
//! follow the behaviour of its clients: what can never succeed is 422, because 409 and 423 would be retried for
//! minutes.

mod call;
mod discovery;
mod socket;

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::Response,
    routing::{any, get},
};
use serde_json::{Map, Value, json};
use windlass_model::{
    queue::{QueueCaller, QueueRefusal},
    time::Timestamp,
};

use self::call::ApiCall;
use crate::{
    app::App,
    db::{
        queue_list::{ListKind, ListQuery},
        queue_tokens, users,
    },
    services::queue::{
        Error, Requester, Result, auth, dispatchers, execution, output,
        records::{self, CurrentContainers, TokenView},
        requests, usage,
    },
};

pub(crate) fn router() -> Router<App> {
    Router::new()
        .route("/discovery/v1/apis/arvados/v1/rest", get(discovery::respond))
        .route("/arvados/v1/{*rest}", any(handle_call))
        .route("/websocket", get(socket::respond))
}

/// Response of a call.
enum CallResponse {
    Json(Value),
    Bytes(Vec<u8>),
}

async fn handle_call(State(app): State<App>, request: Request) -> Response {
    let id = call::request_id(&request).unwrap_or_else(|| app.next_request_id());
    let mut response = match respond(&app, request).await {
        Ok(CallResponse::Json(value)) => body(StatusCode::OK, &value),
        Ok(CallResponse::Bytes(bytes)) => {
            let mut response = Response::new(Body::from(bytes));
            let kind = HeaderValue::from_static("application/octet-stream");
            response.headers_mut().insert(header::CONTENT_TYPE, kind);
            response
        }
        Err(error) => refusal(&error, &id),
    };
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(HeaderName::from_static("x-request-id"), id);
    }
    response
}

fn body(status: StatusCode, value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Builds the response for an error. Internal errors are logged only here.
fn refusal(error: &Error, id: &str) -> Response {
    let (status, text) = match error {
        Error::Unauthenticated => (StatusCode::UNAUTHORIZED, error.to_string()),
        Error::Refused(QueueRefusal::Denied(why)) => (StatusCode::FORBIDDEN, why.clone()),
        Error::Refused(QueueRefusal::Invalid(why)) => (StatusCode::UNPROCESSABLE_ENTITY, why.clone()),
        Error::Missing(_) => (StatusCode::NOT_FOUND, error.to_string()),
        Error::Busy => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
        Error::Inner(crate::error::Error::Db(cause)) if cause.is_passing() => {
            tracing::warn!(request = %id, %error, "failed to answer request to container queue");
            (StatusCode::SERVICE_UNAVAILABLE, "the database is unavailable".to_owned())
        }
        Error::Inner(inner @ crate::error::Error::TooLarge { .. }) => {
            (StatusCode::PAYLOAD_TOO_LARGE, inner.to_string())
        }
        Error::TooMany(_) => (StatusCode::TOO_MANY_REQUESTS, error.to_string()),
        Error::Inner(crate::error::Error::Fast) => (StatusCode::TOO_MANY_REQUESTS, error.to_string()),
        Error::Inner(inner) => {
            tracing::error!(request = %id, error = ?inner, "failed to answer request to container queue");
            (StatusCode::INTERNAL_SERVER_ERROR, "internal server error".to_owned())
        }
    };
    let mut response = body(status, &json!({ "errors": [format!("{text} ({id})")], "error_token": id }));
    if status == StatusCode::SERVICE_UNAVAILABLE {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

async fn respond(app: &App, request: Request) -> Result<CallResponse> {
    let token = call::token(&request).ok_or(Error::Unauthenticated)?;
    let asker = call::RequestSender::from_request(&request, token).authenticate(app).await?;
    let call = ApiCall::read(app, request).await?;
    if call.is_write() {
        check_rate(app, &asker)?;
    }
    let select = call.words("select")?;
    let parts: Vec<&str> = call.path.split('/').collect();
    let mut answer = match parts.as_slice() {
        ["containers", rest @ ..] => containers(app, &asker, &call, rest).await?,
        ["container_requests", rest @ ..] => CallResponse::Json(requests(app, &asker, &call, rest).await?),
        ["logs", rest @ ..] => CallResponse::Json(logs(app, &asker, &call, rest).await?),
        ["api_client_authorizations", rest @ ..] => {
            CallResponse::Json(tokens(app, &asker, &call, rest).await?)
        }
        ["users", rest @ ..] => CallResponse::Json(users(app, &asker, &call, rest).await?),
        ["dispatchers", name] if call.method == "PUT" => {
            let reported = call.attributes("dispatcher")?;
            CallResponse::Json(dispatchers::record_heartbeat(app, &asker, name, &reported).await?)
        }
        ["dispatchers", "current", "lease"] if call.method == "PUT" => {
            CallResponse::Json(dispatchers::claim_lease(app, &asker, &call.attributes("lease")?).await?)
        }
        ["config"] => CallResponse::Json(json!({ "ClusterID": crate::services::queue::CLUSTER })),
        _ => return Err(Error::Missing(format!("/arvados/v1/{}", call.path))),
    };
    if let CallResponse::Json(value) = &mut answer {
        match value.get_mut("items").and_then(Value::as_array_mut) {
            Some(items) => {
                items.iter_mut().for_each(|item| records::select_attributes(item, select.as_deref()))
            }
            None => records::select_attributes(value, select.as_deref()),
        }
    }
    Ok(answer)
}

/// Applies the rate limit. Processes that run containers write as often as these need it; all other callers have the
/// limit of submissions.
fn check_rate(app: &App, asker: &Requester) -> Result<()> {
    match asker.who {
        QueueCaller::Admin | QueueCaller::User | QueueCaller::Inside { .. } => {
            Ok(app.paces().submits(asker.user.0)?)
        }
        QueueCaller::Dispatcher { .. } | QueueCaller::Executor { .. } => Ok(()),
    }
}

fn not_found(call: &ApiCall) -> Error {
    Error::Missing(format!("{} /arvados/v1/{}", call.method, call.path))
}

/// Envelope of a list.
fn page(kind: &str, requested: &ListQuery, items: Vec<Value>, available: Option<i64>) -> Value {
    let mut page = json!({
        "kind": format!("arvados#{kind}List"), "etag": "", "self_link": "",
        "offset": requested.offset, "limit": requested.limit, "items": items,
    });
    if let (Some(page), Some(available)) = (page.as_object_mut(), available) {
        page.insert("items_available".into(), available.into());
    }
    page
}

async fn containers(app: &App, asker: &Requester, call: &ApiCall, rest: &[&str]) -> Result<CallResponse> {
    let value = match (call.method.as_str(), rest) {
        ("GET", []) => {
            let requested = call.requested()?;
            let (items, available) =
                records::list(app, &asker.sight(), ListKind::Containers, &requested).await?;
            let usage = usage::for_list(app, asker, &requested, &items).await?;
            let mut page = page("container", &requested, items, available);
            if let (Some(usage), Some(page)) = (usage, page.as_object_mut()) {
                page.insert("usage".into(), usage);
            }
            page
        }
        ("POST", []) => records::container_record(
            &requests::create_container(app, asker, &call.attributes("container")?).await?,
        )?,
        ("GET", ["current"]) => {
            match records::current(app, asker, call.text("scope"), call.requested()?).await? {
                CurrentContainers::One(record) => record,
                CurrentContainers::Held(requested) => {
                    let (items, available) =
                        records::list(app, &asker.sight(), ListKind::Containers, &requested).await?;
                    page("container", &requested, items, available)
                }
            }
        }
        ("GET", [uuid]) => records::find_visible(app, &asker.sight(), ListKind::Containers, uuid).await?,
        ("PUT" | "PATCH", [uuid]) => {
            let patch = call.attributes("container")?;
            records::container_record(&execution::update(app, asker, uuid, &patch).await?)?
        }
        ("DELETE", [uuid]) => {
            records::container_record(&requests::delete_container(app, asker, uuid).await?)?
        }
        ("POST", [uuid, "lock"]) => {
            let taken = execution::lock(app, asker, uuid).await?;
            let mut record = records::container_record(&taken.container)?;
            if let (Some(executor), Some(record)) = (taken.executor, record.as_object_mut()) {
                record.insert("executor_token".into(), executor.text().into());
            }
            record
        }
        ("POST", [uuid, "unlock"]) => {
            let attempt = call.number("attempt")?.and_then(|number| u64::try_from(number).ok());
            let release = call.text("release") == Some("true");
            records::container_record(&execution::unlock(app, asker, uuid, attempt, release).await?)?
        }
        ("GET", [uuid, "auth"]) => {
            let made = auth::container_token(app, asker, uuid).await?;
            records::token_record(&asker.user_uuid, &TokenView::with_secret(&made.uuid, &made.secret))
        }
        ("GET", [uuid, "secret_mounts"]) => {
            json!({ "secret_mounts": execution::secret_mounts(app, asker, uuid).await? })
        }
        ("POST", [uuid, "update_priority"]) => {
            records::container_record(&requests::recompute_priority(app, asker, uuid).await?)?
        }
        ("POST", [uuid, "output"]) => {
            let at = call.number("offset")?.unwrap_or(0);
            let stream = call.text("stream").unwrap_or("stdout");
            let end = output::append(app, asker, uuid, stream, at, call.raw.to_vec()).await?;
            json!({ "known": end })
        }
        ("GET", [uuid, "output"]) => {
            let from = call.number("offset")?.unwrap_or(0);
            let stream = call.text("stream").unwrap_or("stdout");
            return output::read(app, asker, uuid, stream, from).await.map(CallResponse::Bytes);
        }
        _ => return Err(not_found(call)),
    };
    Ok(CallResponse::Json(value))
}

async fn requests(app: &App, asker: &Requester, call: &ApiCall, rest: &[&str]) -> Result<Value> {
    let sight = asker.request_visibility();
    match (call.method.as_str(), rest) {
        ("GET", []) => {
            let requested = call.requested()?;
            let (items, available) = records::list(app, &sight, ListKind::Requests, &requested).await?;
            Ok(page("containerRequest", &requested, items, available))
        }
        ("POST", []) => {
            let patch = call.attributes("container_request")?;
            records::request_record(&requests::create(app, asker, &patch).await?)
        }
        ("GET", [uuid]) => records::find_visible(app, &sight, ListKind::Requests, uuid).await,
        ("PUT" | "PATCH", [uuid]) => {
            let patch = call.attributes("container_request")?;
            records::request_record(&requests::update(app, asker, uuid, &patch).await?)
        }
        ("DELETE", [uuid]) => records::request_record(&requests::delete(app, asker, uuid).await?),
        ("GET", [uuid, "container_status"]) => {
            let request = records::find_visible(app, &sight, ListKind::Requests, uuid).await?;
            let uuid = request.get("container_uuid").and_then(Value::as_str).map(str::to_owned);
            let Some(uuid) = uuid else {
                return Ok(json!({ "uuid": null, "container_state": null, "scheduling_status": "" }));
            };
            let container = records::find_visible(app, &asker.sight(), ListKind::Containers, &uuid).await?;
            let activity = &container["runtime_status"]["activity"];
            let status = if activity.is_string() { activity } else { &container["scheduling_status"] };
            Ok(json!({
                "uuid": uuid, "container_state": container["state"], "scheduling_status": status,
            }))
        }
        _ => Err(not_found(call)),
    }
}

async fn logs(app: &App, asker: &Requester, call: &ApiCall, rest: &[&str]) -> Result<Value> {
    match (call.method.as_str(), rest) {
        ("GET", []) => {
            let requested = call.requested()?;
            let (items, available) = records::list(app, &asker.sight(), ListKind::Logs, &requested).await?;
            Ok(page("log", &requested, items, available))
        }
        ("GET", [uuid]) => records::find_visible(app, &asker.sight(), ListKind::Logs, uuid).await,
        ("POST", []) => {
            let log = call.attributes("log")?;
            let text = |name: &str| log.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
            let properties = log.get("properties").and_then(Value::as_object).cloned().unwrap_or_default();
            let (object, event) = (text("object_uuid"), text("event_type"));
            if object.is_empty() || event.is_empty() {
                return Err(Error::invalid("`object_uuid` and `event_type` are required"));
            }
            let uuid = execution::record_message(app, asker, &object, &event, &properties).await?;
            records::find_visible(app, &asker.sight(), ListKind::Logs, &uuid).await
        }
        _ => Err(not_found(call)),
    }
}

async fn tokens(app: &App, asker: &Requester, call: &ApiCall, rest: &[&str]) -> Result<Value> {
    let owner = asker.user_uuid.as_str();
    let scopes = |kind: &str| if kind == "dispatcher" { &["dispatch"] } else { &["all"] };
    match (call.method.as_str(), rest) {
        ("GET", []) => {
            asker.require_token_management()?;
            let all = queue_tokens::list_by_user(app.db(), asker.user).await?;
            let record = |one: &queue_tokens::QueueToken| {
                let shown = TokenView {
                    uuid: &one.uuid,
                    secret: None,
                    scopes: scopes(&one.kind),
                    created_at: Some(one.created_at),
                    expires_at: one.expires_at,
                };
                records::token_record(owner, &shown)
            };
            let items: Vec<Value> = all.iter().map(record).collect();
            let count = i64::try_from(items.len()).unwrap_or(i64::MAX);
            Ok(page("apiClientAuthorization", &call.requested()?, items, Some(count)))
        }
        ("POST", []) => {
            let created =
                auth::create(app, asker, &token_request(&call.attributes("api_client_authorization")?)?)
                    .await?;
            let shown = TokenView {
                uuid: &created.made.uuid,
                secret: Some(&created.made.secret),
                scopes: scopes(created.kind),
                created_at: Some(created.created_at),
                expires_at: created.expires_at,
            };
            Ok(records::token_record(owner, &shown))
        }
        ("GET", ["current"]) => {
            let shown = TokenView::with_secret(&asker.token_uuid, &asker.secret);
            Ok(records::token_record(owner, &TokenView { expires_at: asker.expires_at, ..shown }))
        }
        ("GET", [uuid]) => {
            let made = auth::token_by_uuid(app, asker, uuid).await?;
            Ok(records::token_record(owner, &TokenView::with_secret(&made.uuid, &made.secret)))
        }
        ("DELETE", [uuid]) => {
            auth::revoke(app, asker, uuid).await?;
            let shown = TokenView { secret: None, ..TokenView::with_secret(uuid, "") };
            Ok(records::token_record(owner, &shown))
        }
        _ => Err(not_found(call)),
    }
}

/// Parses the request for a token. Without scopes it may do everything that its owner may, as in Arvados.
fn token_request(requested: &Map<String, Value>) -> Result<auth::TokenRequest> {
    let scopes = match requested.get("scopes") {
        None | Some(Value::Null) => vec!["all".to_owned()],
        Some(given) => serde_json::from_value(given.clone())
            .map_err(|_| Error::invalid("`scopes` must be a list of strings"))?,
    };
    let expires_at = match requested.get("expires_at") {
        None | Some(Value::Null) => None,
        Some(given) => {
            let time = given.as_str().and_then(|text| Timestamp::parse(text).ok());
            Some(time.ok_or_else(|| {
                Error::invalid("`expires_at` must be a time such as `2030-01-31T12:00:00Z`")
            })?)
        }
    };
    Ok(auth::TokenRequest { scopes, expires_at })
}

async fn users(app: &App, asker: &Requester, call: &ApiCall, rest: &[&str]) -> Result<Value> {
    let own = users::by_ids(app.db(), &[asker.user]).await?;
    match (call.method.as_str(), rest) {
        ("GET", ["current"]) => own.first().map(records::user_record).ok_or(Error::Unauthenticated),
        ("GET", [uuid]) if *uuid == asker.user_uuid => {
            own.first().map(records::user_record).ok_or(Error::Unauthenticated)
        }
        ("GET", [uuid]) if asker.is_admin => {
            let id = auth::user_by_uuid(app, uuid).await?;
            let found = users::by_ids(app.db(), &[id]).await?;
            found.first().map(records::user_record).ok_or_else(|| Error::Missing((*uuid).to_owned()))
        }
        ("GET", []) => {
            let all = if asker.is_admin {
                users::by_ids(app.db(), &users::all_ids(app.db()).await?).await?
            } else {
                own
            };
            let requested = call.requested()?;
            let limit = usize::try_from(requested.limit).unwrap_or(0);
            let count = i64::try_from(all.len()).unwrap_or(i64::MAX);
            let items = all.iter().take(limit).map(records::user_record).collect();
            Ok(page("user", &requested, items, Some(count)))
        }
        _ => Err(not_found(call)),
    }
}
