//! Requests for containers: create, commit, update, delete.

use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use windlass_model::{
    container::Status,
    id::SubmissionId,
    queue::{Container, ContainerRequest, QueueCaller, RequestState, request, reuse},
};

use super::{
    Error, Requester, Result, object_uuid, records,
    transaction::{
        ExtraChanges, LoadedQueue, load_related, open_request_secrets, retry_on_conflict, work_identity,
        write,
    },
};
use crate::{
    app::App,
    db::{
        containers::{self, RequestOrigin},
        queue_list::QueueVisibility,
    },
};

fn require_requester(asker: &Requester) -> Result<()> {
    match &asker.who {
        QueueCaller::Admin | QueueCaller::User | QueueCaller::Inside { .. } => Ok(()),
        QueueCaller::Dispatcher { .. } | QueueCaller::Executor { .. } => {
            Err(Error::denied("this token may run containers, but not request them"))
        }
    }
}

/// Removes the mounts from the input, and returns them with their digest.
fn take_secrets(patch: &mut Map<String, Value>) -> Result<Option<(String, String)>> {
    match patch.remove("secret_mounts") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(mounts)) if mounts.is_empty() => Ok(None),
        Some(mounts @ Value::Object(_)) => {
            let text = mounts.to_string();
            Ok(Some((hex::encode(Sha256::digest(text.as_bytes())), text)))
        }
        Some(_) => Err(Error::invalid("`secret_mounts` must be an object")),
    }
}

pub async fn create(app: &App, asker: &Requester, patch: &Map<String, Value>) -> Result<ContainerRequest> {
    require_requester(asker)?;
    asker.require_submit()?;
    let made = RequestOrigin {
        by: format!("{} {}", asker.token_uuid, asker.request),
        of: hex::encode(Sha256::digest(Value::Object(patch.clone()).to_string().as_bytes())),
    };
    if !asker.request.is_empty()
        && let Some(request) = find_replayed(app, &made).await?
    {
        return Ok(request);
    }
    let uuid = object_uuid("xvhdp", app.db().new_id()?.as_bytes());
    let source = RequestSource { call: Some(made), job: None };
    create_with_retry(app, asker, &uuid, patch, &source).await
}

/// Creates the request for a job of a run, with this name. Of two calls with one name, one fails.
pub async fn create_for_job(
    app: &App,
    asker: &Requester,
    uuid: &str,
    job: SubmissionId,
    patch: &Map<String, Value>,
) -> Result<ContainerRequest> {
    require_requester(asker)?;
    let source = RequestSource { call: None, job: Some(job) };
    create_with_retry(app, asker, uuid, patch, &source).await
}

/// Origin of a new request.
struct RequestSource {
    /// Call of a client.
    call: Option<RequestOrigin>,
    /// Job of a run.
    job: Option<SubmissionId>,
}

async fn create_with_retry(
    app: &App,
    asker: &Requester,
    uuid: &str,
    patch: &Map<String, Value>,
    source: &RequestSource,
) -> Result<ContainerRequest> {
    let mut patch = patch.clone();
    let secrets = take_secrets(&mut patch)?;
    retry_on_conflict(|| try_create(app, asker, uuid, &patch, secrets.as_ref(), source)).await
}

/// Request that the same call already created. One id for several different calls is ignored.
async fn find_replayed(app: &App, made: &RequestOrigin) -> Result<Option<ContainerRequest>> {
    let earlier = containers::requests_by_call(app.db(), &made.by).await?;
    let Some((uuid, _)) = earlier.first() else { return Ok(None) };
    if earlier.iter().any(|(_, of)| *of != made.of) {
        return Ok(None);
    }
    let found = containers::requests(app.db(), std::slice::from_ref(uuid)).await?;
    Ok(found.into_iter().next().map(|kept| kept.doc))
}

async fn try_create(
    app: &App,
    asker: &Requester,
    uuid: &str,
    patch: &Map<String, Value>,
    secrets: Option<&(String, String)>,
    source: &RequestSource,
) -> Result<Option<ContainerRequest>> {
    let now = app.db().now().await?;
    let mut blank = ContainerRequest::new(uuid.to_owned(), &asker.user_uuid, now);
    if let QueueCaller::Inside { container, .. } = &asker.who {
        blank.requesting_container_uuid = Some(container.clone());
    }
    blank.secret_mounts_digest = secrets.map(|(digest, _)| digest.clone());
    let requested = request::update(&blank, patch)?;
    let extra = ExtraChanges {
        made: source.call.clone(),
        job: source.job,
        secrets: secrets.map(|(_, text)| (uuid.to_owned(), text.clone())),
        ..ExtraChanges::default()
    };
    write_request(app, asker, LoadedQueue::default(), requested, extra).await
}

/// Writes a request, with a container if it was just committed.
async fn write_request(
    app: &App,
    asker: &Requester,
    before: LoadedQueue,
    mut requested: ContainerRequest,
    mut extra: ExtraChanges,
) -> Result<Option<ContainerRequest>> {
    let now = app.db().now().await?;
    let mut before = before;
    if requested.state == RequestState::Committed && requested.container_uuid.is_none() {
        let same = if requested.use_existing {
            let identity = work_identity(&requested.work, requested.secret_mounts_digest.as_deref());
            containers::find_reusable(app.db(), &requested.owner_uuid, &identity).await?
        } else {
            Vec::new()
        };
        let same: Vec<Container> = same.into_iter().map(|kept| kept.doc).collect();
        requested.container_count = 1;
        match reuse::pick_reusable(&same, &requested.work) {
            Some(found) => {
                requested.container_uuid = Some(found.uuid.clone());
                extra.relies_on.push(found.uuid.clone());
                before = load_related(
                    app,
                    std::slice::from_ref(&found.uuid),
                    std::slice::from_ref(&requested.uuid),
                )
                .await?;
                // It may have changed between two reads.
                let still =
                    before.rows.containers.get(&found.uuid).is_some_and(|now| now.state == found.state);
                if !still {
                    return Ok(None);
                }
                before.rows.parents.extend(parent_priorities(app, &requested).await?);
            }
            None => {
                let uuid = object_uuid("dz642", app.db().new_id()?.as_bytes());
                requested.container_uuid = Some(uuid.clone());
                let container = Container {
                    secret_mounts_digest: requested.secret_mounts_digest.clone(),
                    ..Container::new(uuid.clone(), requested.work.clone(), &requested.owner_uuid, now)
                };
                before.rows.parents.extend(parent_priorities(app, &requested).await?);
                let mut rows = before.rows.clone();
                rows.containers.insert(uuid, container);
                rows.requests.insert(requested.uuid.clone(), requested.clone());
                return write_rows(app, asker, &before, rows, &requested.uuid, extra, now).await;
            }
        }
    }
    let mut rows = before.rows.clone();
    let uuid = requested.uuid.clone();
    rows.requests.insert(uuid.clone(), requested);
    write_rows(app, asker, &before, rows, &uuid, extra, now).await
}

async fn parent_priorities(
    app: &App,
    requested: &ContainerRequest,
) -> Result<std::collections::BTreeMap<String, (bool, u64)>> {
    let uuids: Vec<String> = requested.requesting_container_uuid.iter().cloned().collect();
    let found = containers::containers(app.db(), &uuids).await?;
    Ok(found.into_iter().map(|one| (one.doc.uuid.clone(), (!one.doc.is_final(), one.doc.priority))).collect())
}

async fn write_rows(
    app: &App,
    asker: &Requester,
    before: &LoadedQueue,
    rows: windlass_model::queue::propagate::QueueRows,
    uuid: &str,
    extra: ExtraChanges,
    now: windlass_model::time::Timestamp,
) -> Result<Option<ContainerRequest>> {
    let written = write(app, asker, before, rows, extra, now).await?;
    Ok(written.and_then(|rows| rows.requests.get(uuid).cloned()))
}

fn require_ownership(asker: &Requester, request: &ContainerRequest) -> Result<()> {
    match asker.request_visibility() {
        QueueVisibility::All => Ok(()),
        QueueVisibility::Owner(owner) if owner == request.owner_uuid => Ok(()),
        // The request for which the program itself runs can be changed only by its owner.
        QueueVisibility::Inside(container)
            if request.requesting_container_uuid.as_ref() == Some(&container) =>
        {
            Ok(())
        }
        QueueVisibility::Owner(_) | QueueVisibility::One(_) | QueueVisibility::Inside(_) => {
            Err(Error::Missing(request.uuid.clone()))
        }
    }
}

pub async fn update(
    app: &App,
    asker: &Requester,
    uuid: &str,
    patch: &Map<String, Value>,
) -> Result<ContainerRequest> {
    require_requester(asker)?;
    let mut patch = patch.clone();
    let secrets = take_secrets(&mut patch)?;
    retry_on_conflict(|| try_update(app, asker, uuid, &patch, secrets.as_ref())).await
}

async fn try_update(
    app: &App,
    asker: &Requester,
    uuid: &str,
    patch: &Map<String, Value>,
    secrets: Option<&(String, String)>,
) -> Result<Option<ContainerRequest>> {
    let before = load_related(app, &[], &[uuid.to_owned()]).await?;
    let Some(old) = before.rows.requests.get(uuid) else { return Err(Error::Missing(uuid.to_owned())) };
    require_ownership(asker, old)?;
    let mut extra = ExtraChanges::default();
    let mut base = old.clone();
    if let Some((digest, text)) = secrets {
        if old.state != RequestState::Uncommitted {
            return Err(Error::invalid("attribute `secret_mounts` cannot be set now"));
        }
        base.secret_mounts_digest = Some(digest.clone());
        extra.secrets = Some((uuid.to_owned(), text.clone()));
    }
    let requested = request::update(&base, patch)?;
    let commits = requested.state == RequestState::Committed && old.state == RequestState::Uncommitted;
    if commits {
        asker.require_submit()?;
    }
    if commits && extra.secrets.is_none() && requested.secret_mounts_digest.is_some() {
        extra.secrets = open_request_secrets(app, uuid).await?.map(|text| (uuid.to_owned(), text));
    }
    // Its priority affects its container, which must not change in the meantime.
    extra.relies_on.extend(requested.container_uuid.clone());
    write_request(app, asker, before, requested, extra).await
}

/// Deletes a request: a container that runs only for it is stopped first.
pub async fn delete(app: &App, asker: &Requester, uuid: &str) -> Result<ContainerRequest> {
    let mut none = Map::new();
    none.insert("priority".to_owned(), json!(0));
    let found = containers::requests(app.db(), &[uuid.to_owned()]).await?;
    let Some(old) = found.into_iter().next() else { return Err(Error::Missing(uuid.to_owned())) };
    require_ownership(asker, &old.doc)?;
    require_requester(asker)?;
    if old.doc.state == RequestState::Committed {
        update(app, asker, uuid, &none).await?;
    }
    retry_on_conflict(|| async {
        let before = load_related(app, &[], &[uuid.to_owned()]).await?;
        let Some(old) = before.rows.requests.get(uuid).cloned() else {
            return Err(Error::Missing(uuid.to_owned()));
        };
        let mut rows = before.rows.clone();
        // Kept until the end, so that its container is found to have no request.
        if let Some(request) = rows.requests.get_mut(uuid) {
            request.state = RequestState::Final;
        }
        let now = app.db().now().await?;
        let extra = ExtraChanges { deletes: vec![uuid.to_owned()], ..ExtraChanges::default() };
        Ok(write(app, asker, &before, rows, extra, now).await?.map(|_| old))
    })
    .await
}

/// Creates a container without a request, for an admin of the queue.
pub async fn create_container(app: &App, asker: &Requester, patch: &Map<String, Value>) -> Result<Container> {
    if !asker.is_admin {
        return Err(Error::denied("only an admin may create containers without a request"));
    }
    let mut patch = patch.clone();
    let priority = patch.remove("priority").and_then(|value| value.as_u64()).unwrap_or(0);
    patch.remove("state");
    let now = app.db().now().await?;
    let blank = ContainerRequest::new(String::new(), &asker.user_uuid, now);
    let requested = request::update(&blank, &patch)?;
    request::check(&requested.work)?;
    let uuid = object_uuid("dz642", app.db().new_id()?.as_bytes());
    let container =
        Container { priority, ..Container::new(uuid.clone(), requested.work, &asker.user_uuid, now) };
    let before = LoadedQueue::default();
    let mut rows = before.rows.clone();
    rows.containers.insert(uuid, container.clone());
    write(app, asker, &before, rows, ExtraChanges::default(), now).await?.ok_or(Error::Busy)?;
    Ok(container)
}

/// Deletes a container without a request that is not running.
pub async fn delete_container(app: &App, asker: &Requester, uuid: &str) -> Result<Container> {
    if !asker.is_admin {
        return Err(Error::denied("only an admin may delete containers"));
    }
    retry_on_conflict(|| async {
        let before = load_related(app, &[uuid.to_owned()], &[]).await?;
        let Some(old) = before.rows.containers.get(uuid).cloned() else {
            return Err(Error::Missing(uuid.to_owned()));
        };
        let requested = before.rows.requests.values().any(|one| one.container_uuid.as_deref() == Some(uuid));
        if requested || !(old.is_final() || old.state == Status::Queued) {
            return Err(Error::invalid("the container is in use, or requests refer to it"));
        }
        let now = app.db().now().await?;
        let extra = ExtraChanges { deletes: vec![uuid.to_owned()], ..ExtraChanges::default() };
        let rows = before.rows.clone();
        Ok(write(app, asker, &before, rows, extra, now).await?.map(|_| old))
    })
    .await
}

/// Recomputes a container's priority; this changes something only if rows were written without these rules.
pub async fn recompute_priority(app: &App, asker: &Requester, uuid: &str) -> Result<Container> {
    records::container(app, asker, uuid).await?;
    retry_on_conflict(|| async {
        let before = load_related(app, &[uuid.to_owned()], &[]).await?;
        let rows = before.rows.clone();
        let now = app.db().now().await?;
        let written = write(app, asker, &before, rows, ExtraChanges::default(), now).await?;
        match written {
            None => Ok(None),
            Some(rows) => {
                let found = rows.containers.get(uuid).cloned();
                found.map(Some).ok_or_else(|| Error::Missing(uuid.to_owned()))
            }
        }
    })
    .await
}
