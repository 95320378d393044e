//! All changes of containers and requests: load the related rows, apply a rule, settle, write all of them with their
//! log rows in one unit, or start again if another write was faster.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;
use windlass_model::{
    container::Status,
    id::SubmissionId,
    queue::{
        Container, ContainerRequest, ContainerSpec, JOB_VARIABLE,
        propagate::{QueueRows, propagate},
        reuse,
    },
    time::Timestamp,
};

use super::{Error, Requester, Result, WRITE_ATTEMPTS_MAX, object_uuid};
use crate::{
    app::App,
    db::{
        Change, Unit, Val, WriteOutcome,
        containers::{self, RequestOrigin, Versioned},
        jobs, queue_tokens, queue_usage,
    },
    encryption::AssociatedData,
    hints::Hint,
};

/// Maximum number of related rows. A larger tree is not changed at once.
const ROWS_MAX: usize = 5000;

/// Rows as they were read.
#[derive(Default)]
pub(super) struct LoadedQueue {
    pub(super) rows: QueueRows,
    containers: BTreeMap<String, (Uuid, i64)>,
    requests: BTreeMap<String, (Uuid, i64)>,
}

impl LoadedQueue {
    fn add_containers(&mut self, kept: Vec<Versioned<Container>>) {
        for one in kept {
            self.containers.insert(one.doc.uuid.clone(), (one.id, one.revision));
            self.rows.containers.insert(one.doc.uuid.clone(), one.doc);
        }
    }

    fn add_requests(&mut self, kept: Vec<Versioned<ContainerRequest>>) -> BTreeSet<String> {
        let mut theirs = BTreeSet::new();
        for one in kept {
            theirs.extend(one.doc.container_uuid.clone());
            self.requests.insert(one.doc.uuid.clone(), (one.id, one.revision));
            self.rows.requests.insert(one.doc.uuid.clone(), one.doc);
        }
        theirs
    }
}

/// Loads one container, without related rows.
pub(super) async fn load_one(app: &App, uuid: &str) -> Result<LoadedQueue> {
    let mut loaded = LoadedQueue::default();
    loaded.add_containers(containers::containers(app.db(), &[uuid.to_owned()]).await?);
    if loaded.containers.is_empty() { Err(Error::Missing(uuid.to_owned())) } else { Ok(loaded) }
}

/// Loads containers and requests, all requests of those containers, and everything below them.
pub(super) async fn load_related(app: &App, seeds: &[String], requests: &[String]) -> Result<LoadedQueue> {
    let mut loaded = LoadedQueue::default();
    let mut next: BTreeSet<String> = seeds.iter().cloned().collect();
    if !requests.is_empty() {
        next.extend(loaded.add_requests(containers::requests(app.db(), requests).await?));
    }
    while !next.is_empty() {
        let batch: Vec<String> = std::mem::take(&mut next).into_iter().collect();
        loaded.add_containers(containers::containers(app.db(), &batch).await?);
        let mut found = loaded.add_requests(containers::requests_for(app.db(), &batch).await?);
        found.extend(loaded.add_requests(containers::requests_made_in(app.db(), &batch).await?));
        next = found.into_iter().filter(|uuid| !loaded.containers.contains_key(uuid)).collect();
        // A container whose row is deleted is not searched for again.
        next.retain(|uuid| !batch.contains(uuid));
        if loaded.containers.len() + loaded.requests.len() > ROWS_MAX {
            return Err(Error::invalid(format!(
                "more than {ROWS_MAX} containers and requests depend on each other"
            )));
        }
    }
    let above: Vec<String> = loaded
        .rows
        .requests
        .values()
        .filter_map(|request| request.requesting_container_uuid.clone())
        .filter(|uuid| !loaded.containers.contains_key(uuid))
        .collect();
    if !above.is_empty() {
        for parent in containers::containers(app.db(), &above).await? {
            let doc = parent.doc;
            loaded.rows.parents.insert(doc.uuid.clone(), (!doc.is_final(), doc.priority));
        }
    }
    Ok(loaded)
}

/// Changes that a rule adds to the rows that it changed.
#[derive(Default)]
pub(super) struct ExtraChanges {
    pub(super) changes: Vec<Change>,
    /// Rows that others must not have changed in the meantime, although this write leaves them unchanged.
    pub(super) relies_on: Vec<String>,
    /// Call that creates the new request here.
    pub(super) made: Option<RequestOrigin>,
    /// Job of a run that the new container is.
    pub(super) job: Option<SubmissionId>,
    /// Mounts of a request, in plain text.
    pub(super) secrets: Option<(String, String)>,
    pub(super) deletes: Vec<String>,
}

/// Settles, and writes all rows that differ. `None`: another write was faster.
pub(super) async fn write(
    app: &App,
    asker: &Requester,
    before: &LoadedQueue,
    mut rows: QueueRows,
    extra: ExtraChanges,
    now: Timestamp,
) -> Result<Option<QueueRows>> {
    let mut ids: BTreeMap<String, Uuid> = BTreeMap::new();
    // Generated in advance, so that a rule that needs one cannot fail.
    let mut spare: Vec<Uuid> = Vec::new();
    for _ in 0..=rows.containers.len() {
        spare.push(app.db().new_id()?);
    }
    propagate(&mut rows, now, &mut || {
        let id = spare.pop().unwrap_or_default();
        let uuid = object_uuid("dz642", id.as_bytes());
        ids.insert(uuid.clone(), id);
        uuid
    });
    let mut writer = QueueWriter { app, asker, now, first: Vec::new(), rows: Vec::new(), logs: Vec::new() };
    for container in rows.containers.values_mut() {
        writer.container(before, container, &ids, &extra).await?;
    }
    for request in rows.requests.values_mut() {
        writer.request(before, request, &extra)?;
    }
    for uuid in &extra.deletes {
        writer.delete(before, uuid)?;
    }
    let unit = Unit::new().and(writer.first).and(extra.changes).and(writer.rows).and(writer.logs);
    match app.db().write(unit).await? {
        WriteOutcome::Done { .. } => {
            app.notify_queue_changed();
            if rows.containers.values().any(|one| job_submission(one).is_some()) {
                app.wake(&JOB_PIPELINES);
            }
            Ok(Some(rows))
        }
        WriteOutcome::Stale { .. } => Ok(None),
    }
}

/// Pipelines of placed jobs.
const JOB_PIPELINES: [Hint; 2] = [Hint::JobsRunning, Hint::JobsTerminating];

/// Job of a run that a container represents. A user who sets the variable in another container only makes that job due.
pub(super) fn job_submission(container: &Container) -> Option<SubmissionId> {
    container.work.environment.get(JOB_VARIABLE)?.parse().ok()
}

struct QueueWriter<'a> {
    app: &'a App,
    asker: &'a Requester,
    now: Timestamp,
    first: Vec<Change>,
    rows: Vec<Change>,
    logs: Vec<Change>,
}

impl QueueWriter<'_> {
    async fn container(
        &mut self,
        before: &LoadedQueue,
        container: &mut Container,
        ids: &BTreeMap<String, Uuid>,
        extra: &ExtraChanges,
    ) -> Result<()> {
        let Some(old) = before.rows.containers.get(&container.uuid) else {
            return self.new_container(before, container, ids, extra).await;
        };
        let Some((_, revision)) = before.containers.get(&container.uuid) else { return Ok(()) };
        if old == container {
            if extra.relies_on.contains(&container.uuid) {
                self.first.push(containers::bump_container(&container.uuid, *revision));
            }
            return Ok(());
        }
        container.modified_at = self.now;
        container.modified_by_user_uuid = Some(self.asker.user_uuid.clone());
        self.first.push(containers::update_container(container, *revision)?);
        self.count_use(old, container);
        if old.is_held() && !container.is_held() {
            self.first.push(queue_tokens::revoke_for_container(&container.uuid));
        }
        if container.is_final() && !old.is_final() {
            self.first.push(containers::erase_container_secrets(&container.uuid));
        }
        if let Some(job) = job_submission(container) {
            self.first.push(jobs::mark_due(job));
        }
        let (old, new) = (serde_json::to_value(old)?, serde_json::to_value(&*container)?);
        self.log(&container.uuid, &container.owner_uuid, "update", Some(&old), Some(&new))
    }

    /// Counts what a container holds from its lock to its release, and as used while it runs.
    fn count_use(&mut self, old: &Container, new: &Container) {
        let units = new.work.milli_units();
        match (old.state, new.state) {
            (before, after) if before == after => {}
            (_, Status::Locked) => self.first.push(queue_usage::lock(&new.uuid, units)),
            (_, Status::Running) => self.first.extend(queue_usage::start(&new.uuid, units, self.now)),
            (Status::Locked | Status::Running, Status::Queued | Status::Complete | Status::Cancelled) => {
                self.first.extend(queue_usage::release(&new.uuid, self.now));
            }
            (
                Status::Queued | Status::Complete | Status::Cancelled,
                Status::Queued | Status::Complete | Status::Cancelled,
            ) => {}
        }
    }

    async fn new_container(
        &mut self,
        before: &LoadedQueue,
        container: &mut Container,
        ids: &BTreeMap<String, Uuid>,
        extra: &ExtraChanges,
    ) -> Result<()> {
        let id = match ids.get(&container.uuid) {
            Some(id) => *id,
            None => self.app.db().new_id()?,
        };
        let secrets = match &container.secret_mounts_digest {
            None => None,
            Some(_) => self.secrets_for(before, container, extra).await?,
        };
        let sealed = secrets
            .map(|text| {
                self.app
                    .keys()
                    .seal(&AssociatedData::row("containers", "secrets_sealed", id), text.as_bytes())
            })
            .transpose()?;
        let identity = work_identity(&container.work, container.secret_mounts_digest.as_deref());
        self.rows.push(containers::insert_container(id, container, &identity, extra.job, sealed)?);
        self.rows.extend(extra.job.map(queue_usage::job_waits));
        let new = serde_json::to_value(&*container)?;
        self.log(&container.uuid, &container.owner_uuid, "create", None, Some(&new))
    }

    /// From the call that creates it, or from the container that it replaces.
    async fn secrets_for(
        &self,
        before: &LoadedQueue,
        container: &Container,
        extra: &ExtraChanges,
    ) -> Result<Option<String>> {
        if let Some((_, text)) = &extra.secrets {
            return Ok(Some(text.clone()));
        }
        let alike =
            |old: &&Container| old.secret_mounts_digest == container.secret_mounts_digest && !old.is_final();
        let Some(old) = before.rows.containers.values().find(alike) else { return Ok(None) };
        open_secrets(self.app, &old.uuid).await
    }

    fn request(
        &mut self,
        before: &LoadedQueue,
        request: &mut ContainerRequest,
        extra: &ExtraChanges,
    ) -> Result<()> {
        if extra.deletes.contains(&request.uuid) {
            return Ok(());
        }
        let seal = |app: &App, id: Uuid, text: &str| {
            app.keys().seal(&AssociatedData::row("container_requests", "secrets_sealed", id), text.as_bytes())
        };
        let keeps = request.container_uuid.is_none();
        let own = extra.secrets.as_ref().filter(|(uuid, _)| *uuid == request.uuid && keeps);
        let Some((id, revision)) = before.requests.get(&request.uuid) else {
            let id = self.app.db().new_id()?;
            let sealed = own.map(|(_, text)| seal(self.app, id, text)).transpose()?;
            self.rows.push(containers::insert_request(id, request, extra.made.as_ref(), sealed)?);
            let new = serde_json::to_value(&*request)?;
            return self.log(&request.uuid, &request.owner_uuid, "create", None, Some(&new));
        };
        if let Some((_, text)) = own {
            self.first.push(containers::set_request_secrets(&request.uuid, seal(self.app, *id, text)?));
        }
        let old = before.rows.requests.get(&request.uuid);
        if old == Some(request) {
            return Ok(());
        }
        request.modified_at = self.now;
        request.modified_by_user_uuid = Some(self.asker.user_uuid.clone());
        self.first.push(containers::update_request(request, *revision)?);
        if !keeps && old.is_some_and(|old| old.container_uuid.is_none()) {
            self.first.push(containers::erase_request_secrets(&request.uuid));
        }
        let (old, new) = (serde_json::to_value(old)?, serde_json::to_value(&*request)?);
        self.log(&request.uuid, &request.owner_uuid, "update", Some(&old), Some(&new))
    }

    fn delete(&mut self, before: &LoadedQueue, uuid: &str) -> Result<()> {
        if let (Some((_, revision)), Some(old)) = (before.requests.get(uuid), before.rows.requests.get(uuid))
        {
            self.first.push(containers::delete_request(uuid, *revision));
            let old_doc = serde_json::to_value(old)?;
            self.log(uuid, &old.owner_uuid, "delete", Some(&old_doc), None)?;
        }
        if let (Some((_, revision)), Some(old)) =
            (before.containers.get(uuid), before.rows.containers.get(uuid))
        {
            self.first.push(containers::delete_container(uuid, *revision));
            let old_doc = serde_json::to_value(old)?;
            self.log(uuid, &old.owner_uuid, "delete", Some(&old_doc), None)?;
        }
        Ok(())
    }

    fn log(
        &mut self,
        uuid: &str,
        owner: &str,
        event: &str,
        old: Option<&Value>,
        new: Option<&Value>,
    ) -> Result<()> {
        let properties = json!({
            "old_attributes": old.map(event_properties), "new_attributes": new.map(event_properties),
            "old_etag": old.map(super::records::etag), "new_etag": new.map(super::records::etag),
        });
        self.logs.push(log_row(self.app, uuid, owner, event, &properties)?.1);
        Ok(())
    }
}

/// Fields of a row in the events to listeners. The specification itself is only in the row.
fn event_properties(row: &Value) -> Map<String, Value> {
    const REPORTED: [&str; 14] = [
        "uuid",
        "name",
        "state",
        "priority",
        "owner_uuid",
        "locked_by_uuid",
        "attempt",
        "exit_code",
        "runtime_status",
        "scheduling_status",
        "container_uuid",
        "container_count",
        "progress",
        "output",
    ];
    let all = row.as_object().into_iter().flatten();
    let kept = all.filter(|(name, _)| REPORTED.contains(&name.as_str()));
    kept.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// A row of the log.
pub(super) fn log_row(
    app: &App,
    object: &str,
    owner: &str,
    event: &str,
    properties: &Value,
) -> Result<(String, Change)> {
    let uuid = object_uuid("57u5n", app.db().new_id()?.as_bytes());
    let summary = properties.get("text").and_then(Value::as_str).unwrap_or_default().to_owned();
    let row = Change::Insert {
        table: "queue_logs",
        values: vec![
            ("uuid", uuid.as_str().into()),
            ("object_uuid", object.into()),
            ("object_owner_uuid", owner.into()),
            ("event_type", event.into()),
            ("created_at", Val::Now),
            ("summary", summary.into()),
            ("doc", Val::json(&json!({ "properties": properties }))?),
        ],
    };
    Ok((uuid, row))
}

/// Hash that is equal for the same work.
pub(super) fn work_identity(work: &ContainerSpec, secrets: Option<&str>) -> String {
    hex::encode(Sha256::digest(reuse::reuse_key(work, secrets).as_bytes()))
}

/// Secret mounts of a container.
pub(super) async fn open_secrets(app: &App, uuid: &str) -> Result<Option<String>> {
    let Some((id, sealed)) = containers::container_secrets(app.db(), uuid).await? else { return Ok(None) };
    let text = app.keys().open_sealed(&AssociatedData::row("containers", "secrets_sealed", id), &sealed)?;
    Ok(Some(String::from_utf8_lossy(&text).into_owned()))
}

/// Secret mounts of a request that is not committed yet.
pub(super) async fn open_request_secrets(app: &App, uuid: &str) -> Result<Option<String>> {
    let Some((id, sealed)) = containers::request_secrets(app.db(), uuid).await? else { return Ok(None) };
    let text =
        app.keys().open_sealed(&AssociatedData::row("container_requests", "secrets_sealed", id), &sealed)?;
    Ok(Some(String::from_utf8_lossy(&text).into_owned()))
}

/// Repeats an attempt while other writes are faster, up to `WRITE_ATTEMPTS_MAX` times.
pub(super) async fn retry_on_conflict<T, F, R>(mut attempt: F) -> Result<T>
where
    F: FnMut() -> R,
    R: Future<Output = Result<Option<T>>>,
{
    for _ in 0..WRITE_ATTEMPTS_MAX {
        if let Some(done) = attempt().await? {
            return Ok(done);
        }
    }
    Err(Error::Busy)
}
