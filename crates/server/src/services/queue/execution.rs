//! Operations of dispatchers and executors on containers.

use serde_json::{Map, Value};
use windlass_model::{
    container::Status,
    queue::{Container, LastCall, QueueCaller, QueueRefusal, change},
    time::Timestamp,
};

use super::{
    Error, Requester, Result,
    auth::{self, TokenSecret},
    transaction::{ExtraChanges, load_one, load_related, log_row, open_secrets, retry_on_conflict, write},
};
use crate::{
    app::App,
    db::{Unit, documents::CONTAINER_SECRETS, queue_list::QueueVisibility},
};

/// A container and, for the caller that just locked it, its executor's token.
#[derive(Debug)]
pub struct ContainerWithToken {
    pub container: Container,
    pub executor: Option<TokenSecret>,
}

pub async fn lock(app: &App, asker: &Requester, uuid: &str) -> Result<ContainerWithToken> {
    require_visible(asker, uuid)?;
    retry_on_conflict(|| try_lock(app, asker, uuid)).await
}

/// Role of the caller for a container. An admin may lock one, as in Arvados, and then holds it by the presented token.
fn acting_as(asker: &Requester, container: &Container) -> QueueCaller {
    let holds = container.is_held() && container.locked_by_uuid.as_ref() == Some(&asker.token_uuid);
    if holds { asker.as_dispatcher() } else { asker.who.clone() }
}

async fn try_lock(app: &App, asker: &Requester, uuid: &str) -> Result<Option<ContainerWithToken>> {
    let before = load_one(app, uuid).await?;
    let container = find_container(&before.rows.containers, uuid)?;
    let now = app.db().now().await?;
    let mut locked = match change::lock(&container, &asker.as_dispatcher(), "") {
        Ok(locked) => locked,
        Err(refusal) => return replay_or_refuse(app, asker, container, "lock", refusal).await.map(Some),
    };
    let user = auth::user_by_uuid(app, &container.runtime_user_uuid).await?;
    let (inside, first) = auth::issue_attempt_token(app, "container", user, &locked, now)?;
    let (executor, second) = auth::issue_attempt_token(app, "executor", asker.user, &locked, now)?;
    locked.auth_uuid = Some(inside.uuid);
    locked.last_call = Some(call_record(asker, &format!("lock {}", executor.uuid)));
    let mut rows = before.rows.clone();
    rows.containers.insert(uuid.to_owned(), locked);
    let extra = ExtraChanges { changes: vec![first, second], ..ExtraChanges::default() };
    let Some(rows) = write(app, asker, &before, rows, extra, now).await? else { return Ok(None) };
    Ok(Some(ContainerWithToken {
        container: find_container(&rows.containers, uuid)?,
        executor: Some(executor),
    }))
}

fn call_record(asker: &Requester, what: &str) -> LastCall {
    LastCall { token: asker.token_uuid.clone(), request: asker.request.clone(), what: what.to_owned() }
}

/// Returns the earlier result of the same call, if nothing happened since; else the refusal.
async fn replay_or_refuse(
    app: &App,
    asker: &Requester,
    container: Container,
    what: &str,
    no: QueueRefusal,
) -> Result<ContainerWithToken> {
    let Some(last) = &container.last_call else { return Err(no.into()) };
    let same = last.token == asker.token_uuid && last.request == asker.request && !asker.request.is_empty();
    let (kind, executor) = last.what.split_once(' ').unwrap_or((&last.what, ""));
    if !same || kind != what {
        return Err(no.into());
    }
    let executor = if executor.is_empty() { None } else { auth::executor_token(app, executor).await? };
    Ok(ContainerWithToken { container, executor })
}

pub async fn unlock(
    app: &App,
    asker: &Requester,
    uuid: &str,
    attempt: Option<u64>,
    release: bool,
) -> Result<Container> {
    let rule = |container: &Container, now| {
        change::unlock(container, &acting_as(asker, container), attempt, release, now)
    };
    apply(app, asker, uuid, "unlock", &rule).await
}

pub async fn update(
    app: &App,
    asker: &Requester,
    uuid: &str,
    patch: &Map<String, Value>,
) -> Result<Container> {
    let what = patch.get("state").and_then(Value::as_str).unwrap_or("update").to_owned();
    let rule =
        |container: &Container, now| change::update(container, &acting_as(asker, container), patch, now);
    apply(app, asker, uuid, &what, &rule).await
}

/// Sets the time that a container has to exit once it is stopped.
pub async fn set_stop_duration(app: &App, uuid: &str, secs: u64) -> Result<Container> {
    let rule = |container: &Container, _: Timestamp| Ok(change::with_stop_duration(container, secs));
    apply(app, &Requester::server(), uuid, "stop_duration", &rule).await
}

type Rule<'a> = dyn Fn(&Container, Timestamp) -> Result<Container, QueueRefusal> + Sync + 'a;

async fn apply(app: &App, asker: &Requester, uuid: &str, what: &str, rule: &Rule<'_>) -> Result<Container> {
    require_visible(asker, uuid)?;
    retry_on_conflict(|| try_apply(app, asker, uuid, what, rule)).await
}

async fn try_apply(
    app: &App,
    asker: &Requester,
    uuid: &str,
    what: &str,
    rule: &Rule<'_>,
) -> Result<Option<Container>> {
    let now = app.db().now().await?;
    let mut before = load_one(app, uuid).await?;
    let mut container = find_container(&before.rows.containers, uuid)?;
    require_ownership(asker, &container)?;
    let mut next = match rule(&container, now) {
        Ok(next) => next,
        Err(refusal) => {
            return replay_or_refuse(app, asker, container, what, refusal)
                .await
                .map(|taken| Some(taken.container));
        }
    };
    if next.is_final() || next.priority != container.priority {
        // Related rows depend on this one and change with it.
        before = load_related(app, &[uuid.to_owned()], &[]).await?;
        container = find_container(&before.rows.containers, uuid)?;
        next = match rule(&container, now) {
            Ok(next) => next,
            // It changed between two reads.
            Err(_) => return Ok(None),
        };
    }
    if next.state != container.state {
        next.last_call = Some(call_record(asker, what));
    }
    let mut rows = before.rows.clone();
    rows.containers.insert(uuid.to_owned(), next);
    let written = write(app, asker, &before, rows, ExtraChanges::default(), now).await?;
    written.map(|rows| find_container(&rows.containers, uuid)).transpose()
}

fn find_container(all: &std::collections::BTreeMap<String, Container>, uuid: &str) -> Result<Container> {
    all.get(uuid).cloned().ok_or_else(|| Error::Missing(uuid.to_owned()))
}

/// An executor, and the program inside, may change only one container.
fn require_visible(asker: &Requester, uuid: &str) -> Result<()> {
    match asker.sight() {
        QueueVisibility::One(own) | QueueVisibility::Inside(own) if own != uuid => {
            Err(Error::Missing(uuid.to_owned()))
        }
        QueueVisibility::One(_)
        | QueueVisibility::Inside(_)
        | QueueVisibility::All
        | QueueVisibility::Owner(_) => Ok(()),
    }
}

fn require_ownership(asker: &Requester, container: &Container) -> Result<()> {
    match asker.sight() {
        QueueVisibility::Owner(owner) if owner != container.owner_uuid => {
            Err(Error::Missing(container.uuid.clone()))
        }
        QueueVisibility::Owner(_)
        | QueueVisibility::All
        | QueueVisibility::One(_)
        | QueueVisibility::Inside(_) => Ok(()),
    }
}

/// Mounts that only the program inside may see, and the executor that provides them.
pub async fn secret_mounts(app: &App, asker: &Requester, uuid: &str) -> Result<Value> {
    let is_theirs = match &asker.who {
        QueueCaller::Inside { container, .. } | QueueCaller::Executor { container, .. } => container == uuid,
        QueueCaller::Admin | QueueCaller::User | QueueCaller::Dispatcher { .. } => false,
    };
    if !is_theirs {
        return Err(Error::denied("only the container itself may read its secret mounts"));
    }
    match open_secrets(app, uuid).await? {
        Some(text) => Ok(CONTAINER_SECRETS.decode(uuid, &text)?),
        None => Ok(Value::Object(Map::new())),
    }
}

/// Records a message about a container. A dispatcher that releases it gives the reason, which the container shows.
pub async fn record_message(
    app: &App,
    asker: &Requester,
    uuid: &str,
    event: &str,
    properties: &Map<String, Value>,
) -> Result<String> {
    require_visible(asker, uuid)?;
    let before = load_one(app, uuid).await?;
    let container = find_container(&before.rows.containers, uuid)?;
    require_ownership(asker, &container)?;
    let message = Value::Object(properties.clone());
    let (name, row) = log_row(app, uuid, &container.owner_uuid, event, &message)?;
    let text = |name: &str| properties.get(name).and_then(Value::as_str).unwrap_or_default();
    let leaves = text("event") == "decided_not_to_run"
        && matches!(asker.as_dispatcher(), QueueCaller::Dispatcher { .. });
    if event == "dispatch" && leaves && container.state == Status::Queued {
        let why = if text("reason").is_empty() { text("text") } else { text("reason") };
        let next = Container { scheduling_status: why.to_owned(), ..container.clone() };
        let mut rows = before.rows.clone();
        rows.containers.insert(uuid.to_owned(), next);
        let now = app.db().now().await?;
        // A conflict is ignored: a concurrent change sets a more recent reason.
        write(app, asker, &before, rows, ExtraChanges::default(), now).await?;
    }
    app.db().write(Unit::new().and([row])).await?;
    app.notify_queue_changed();
    Ok(name)
}
