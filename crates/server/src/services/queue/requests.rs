//! Requests for containers: create, commit, update, delete.

use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use windlass_model::{
    container::Status,
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
    create_with_retry(app, asker, &uuid, patch, Some(&made)).await
}

/// Creates a request with this name. Of two calls with one name, one fails.
pub async fn create_named(
    app: &App,
    asker: &Requester,
    uuid: &str,
    patch: &Map<String, Value>,
) -> Result<ContainerRequest> {
    require_requester(asker)?;
    create_with_retry(app, asker, uuid, patch, None).await
}

async fn create_with_retry(
    app: &App,
    asker: &Requester,
    uuid: &str,
    patch: &Map<String, Value>,
    made: Option<&RequestOrigin>,
) -> Result<ContainerRequest> {
    let mut patch = patch.clone();
    let secrets = take_secrets(&mut patch)?;
    retry_on_conflict(|| try_create(app, asker, uuid, &patch, secrets.as_ref(), made)).await
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
    made: Option<&RequestOrigin>,
) -> Result<Option<ContainerRequest>> {
    let now = app.db().now().await?;
    let mut blank = ContainerRequest::new(uuid.to_owned(), &asker.user_uuid, now);
    if let QueueCaller::Inside { container, .. } = &asker.who {
        blank.requesting_container_uuid = Some(container.clone());
    }
    blank.secret_mounts_digest = secrets.map(|(digest, _)| digest.clone());
    let asked = request::update(&blank, patch)?;
    let beside = ExtraChanges {
        made: made.cloned(),
        secrets: secrets.map(|(_, text)| (uuid.to_owned(), text.clone())),
        ..ExtraChanges::default()
    };
    write_request(app, asker, LoadedQueue::default(), asked, beside).await
}

/// Writes a request, with a container if it was just committed.
async fn write_request(
    app: &App,
    asker: &Requester,
    before: LoadedQueue,
    mut asked: ContainerRequest,
    mut beside: ExtraChanges,
) -> Result<Option<ContainerRequest>> {
    let now = app.db().now().await?;
    let mut before = before;
    if asked.state == RequestState::Committed && asked.container_uuid.is_none() {
        let same = if asked.use_existing {
            let identity = work_identity(&asked.work, asked.secret_mounts_digest.as_deref());
            containers::find_reusable(app.db(), &asked.owner_uuid, &identity).await?
        } else {
            Vec::new()
        };
        let same: Vec<Container> = same.into_iter().map(|kept| kept.doc).collect();
        asked.container_count = 1;
        match reuse::pick_reusable(&same, &asked.work) {
            Some(found) => {
                asked.container_uuid = Some(found.uuid.clone());
                beside.relies_on.push(found.uuid.clone());
                before =
                    load_related(app, std::slice::from_ref(&found.uuid), std::slice::from_ref(&asked.uuid))
                        .await?;
                // It may have changed between two reads.
                let still =
                    before.world.containers.get(&found.uuid).is_some_and(|now| now.state == found.state);
                if !still {
                    return Ok(None);
                }
                before.world.parents.extend(parent_priorities(app, &asked).await?);
            }
            None => {
                let uuid = object_uuid("dz642", app.db().new_id()?.as_bytes());
                asked.container_uuid = Some(uuid.clone());
                let container = Container {
                    secret_mounts_digest: asked.secret_mounts_digest.clone(),
                    ..Container::new(uuid.clone(), asked.work.clone(), &asked.owner_uuid, now)
                };
                before.world.parents.extend(parent_priorities(app, &asked).await?);
                let mut world = before.world.clone();
                world.containers.insert(uuid, container);
                world.requests.insert(asked.uuid.clone(), asked.clone());
                return write_rows(app, asker, &before, world, &asked.uuid, beside, now).await;
            }
        }
    }
    let mut world = before.world.clone();
    let uuid = asked.uuid.clone();
    world.requests.insert(uuid.clone(), asked);
    write_rows(app, asker, &before, world, &uuid, beside, now).await
}

async fn parent_priorities(
    app: &App,
    asked: &ContainerRequest,
) -> Result<std::collections::BTreeMap<String, (bool, u64)>> {
    let uuids: Vec<String> = asked.requesting_container_uuid.iter().cloned().collect();
    let found = containers::containers(app.db(), &uuids).await?;
    Ok(found.into_iter().map(|one| (one.doc.uuid.clone(), (!one.doc.is_final(), one.doc.priority))).collect())
}

async fn write_rows(
    app: &App,
    asker: &Requester,
    before: &LoadedQueue,
    world: windlass_model::queue::propagate::QueueRows,
    uuid: &str,
    beside: ExtraChanges,
    now: windlass_model::time::Timestamp,
) -> Result<Option<ContainerRequest>> {
    let written = write(app, asker, before, world, beside, now).await?;
    Ok(written.and_then(|world| world.requests.get(uuid).cloned()))
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
    let Some(old) = before.world.requests.get(uuid) else { return Err(Error::Missing(uuid.to_owned())) };
    require_ownership(asker, old)?;
    let mut beside = ExtraChanges::default();
    let mut base = old.clone();
    if let Some((digest, text)) = secrets {
        if old.state != RequestState::Uncommitted {
            return Err(Error::invalid("attribute `secret_mounts` cannot be set now"));
        }
        base.secret_mounts_digest = Some(digest.clone());
        beside.secrets = Some((uuid.to_owned(), text.clone()));
    }
    let asked = request::update(&base, patch)?;
    let commits = asked.state == RequestState::Committed && old.state == RequestState::Uncommitted;
    if commits {
        asker.require_submit()?;
    }
    if commits && beside.secrets.is_none() && asked.secret_mounts_digest.is_some() {
        beside.secrets = open_request_secrets(app, uuid).await?.map(|text| (uuid.to_owned(), text));
    }
    // Its priority affects its container, which must not change in the meantime.
    beside.relies_on.extend(asked.container_uuid.clone());
    write_request(app, asker, before, asked, beside).await
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
        let Some(old) = before.world.requests.get(uuid).cloned() else {
            return Err(Error::Missing(uuid.to_owned()));
        };
        let mut world = before.world.clone();
        // Kept until the end, so that its container is found to have no request.
        if let Some(request) = world.requests.get_mut(uuid) {
            request.state = RequestState::Final;
        }
        let now = app.db().now().await?;
        let beside = ExtraChanges { deletes: vec![uuid.to_owned()], ..ExtraChanges::default() };
        Ok(write(app, asker, &before, world, beside, now).await?.map(|_| old))
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
    let asked = request::update(&blank, &patch)?;
    request::check(&asked.work)?;
    let uuid = object_uuid("dz642", app.db().new_id()?.as_bytes());
    let container = Container { priority, ..Container::new(uuid.clone(), asked.work, &asker.user_uuid, now) };
    let before = LoadedQueue::default();
    let mut world = before.world.clone();
    world.containers.insert(uuid, container.clone());
    write(app, asker, &before, world, ExtraChanges::default(), now).await?.ok_or(Error::Busy)?;
    Ok(container)
}

/// Deletes a container without a request that is not running.
pub async fn delete_container(app: &App, asker: &Requester, uuid: &str) -> Result<Container> {
    if !asker.is_admin {
        return Err(Error::denied("only an admin may delete containers"));
    }
    retry_on_conflict(|| async {
        let before = load_related(app, &[uuid.to_owned()], &[]).await?;
        let Some(old) = before.world.containers.get(uuid).cloned() else {
            return Err(Error::Missing(uuid.to_owned()));
        };
        let asked = before.world.requests.values().any(|one| one.container_uuid.as_deref() == Some(uuid));
        if asked || !(old.is_final() || old.state == Status::Queued) {
            return Err(Error::invalid("the container is in use, or requests refer to it"));
        }
        let now = app.db().now().await?;
        let beside = ExtraChanges { deletes: vec![uuid.to_owned()], ..ExtraChanges::default() };
        let world = before.world.clone();
        Ok(write(app, asker, &before, world, beside, now).await?.map(|_| old))
    })
    .await
}

/// Recomputes a container's priority; this changes something only if rows were written without these rules.
pub async fn recompute_priority(app: &App, asker: &Requester, uuid: &str) -> Result<Container> {
    records::container(app, asker, uuid).await?;
    retry_on_conflict(|| async {
        let before = load_related(app, &[uuid.to_owned()], &[]).await?;
        let world = before.world.clone();
        let now = app.db().now().await?;
        let written = write(app, asker, &before, world, ExtraChanges::default(), now).await?;
        match written {
            None => Ok(None),
            Some(world) => {
                let found = world.containers.get(uuid).cloned();
                found.map(Some).ok_or_else(|| Error::Missing(uuid.to_owned()))
            }
        }
    })
    .await
}
