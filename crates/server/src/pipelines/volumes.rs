//! Pipeline `volumes`: creates or registers, checks and deletes storage.
//!
//! Claims   volumes in Submitted, Provisioning, Active, Failed.
//! Owns     volumes.status, volumes.finished, volumes.finished_at, volumes.status_message, volumes.volume_id,
//!          volumes.provisioning, volumes.deleted, volumes.deleted_at.
//! Wakes    on hint (a volume was created, is to be deleted, was detached), else every 5 s to 1 min.
//! Shares   volumes.delete_asked_at with the API: both only request.
//! Why not  attach here? A job waits for its volumes; the pipeline that holds the job attaches them, so that nothing
//!          has to be handed over. Rows in `volume_attachments` keep this pipeline from deleting.

use serde_json::{Value, json};
use windlass_backend::{
    BackendError,
    volumes::{BackendVolume, VolumeBackend as Storage, VolumeRequest},
};
use windlass_engine::{ApplyOutcome, DbTime, Lease, Pipeline, Queue};
use windlass_model::{
    config::volume::Volume as Configuration,
    decide::volumes::{self as brain, Action, Plan, VolumeObservation},
    event,
    time::{Span, Timestamp},
    volume,
};

use super::{PipelineContext, apply_outcome, due_in, pipeline_cause};
use crate::{
    attachments::mounts::configuration,
    db::{
        Val, Values, WriteOutcome,
        pipeline_rows::volumes::{self as rows, VolumeInputs, VolumeUpdate},
        volumes::Volume,
    },
    hints::Hint,
    pass_error::PassError,
};

pub(super) struct VolumesPipeline(pub(super) PipelineContext);

pub(crate) const QUEUE: Queue = Queue {
    pipeline: Hint::Volumes.as_str(),
    table: "volumes",
    statuses: &["submitted", "provisioning", "active", "failed"],
};

pub(crate) struct Row {
    loaded: VolumeInputs,
    order: VolumeRequest,
    backend: String,
    view: brain::VolumeView,
}

/// The plan, and the volume that the backend reported.
pub(crate) struct VolumePassPlan {
    plan: Plan,
    made: Option<BackendVolume>,
}

impl Pipeline for VolumesPipeline {
    type Row = Row;
    type Observation = ();
    type Plan = VolumePassPlan;
    type Error = PassError;

    fn queue(&self) -> Queue {
        QUEUE
    }

    async fn load(&self, lease: &Lease) -> Result<Option<Row>, PassError> {
        let Some(loaded) = rows::load(&self.0.db, lease).await? else { return Ok(None) };
        let wanted = configuration(&loaded.volume)?;
        let backend = wanted.backend().to_owned();
        let (order, view) = (volume_request(&loaded.volume, &wanted), view(&loaded, &wanted));
        Ok(Some(Row { loaded, order, backend, view }))
    }

    /// Nothing to observe: the action of the pass queries the backend.
    async fn observe(&self, _lease: &Lease, _row: &Row) -> Result<(), PassError> {
        Ok(())
    }

    fn decide(row: &Row, (): (), now: DbTime) -> VolumePassPlan {
        VolumePassPlan {
            plan: brain::decide(&row.view, &VolumeObservation::NotRequested, Timestamp(now)),
            made: None,
        }
    }

    async fn act(&self, lease: &Lease, row: &Row, next: &mut VolumePassPlan) -> Result<(), PassError> {
        let Some(action) = next.plan.action else { return Ok(()) };
        let storage = self.0.backends.named(&row.backend).and_then(|backend| backend.volumes());
        let seen = match storage {
            Some(storage) => self.perform_action(storage, row, action, &mut next.made).await,
            None => missing_backend(&row.backend, action, row.loaded.volume.volume_id.as_deref()),
        };
        next.plan = brain::decide(&row.view, &seen, Timestamp(lease.now()));
        if next.plan.action.is_some() {
            // The backend was queried and reported nothing new.
            next.plan.due = next.plan.due.max(Timestamp(lease.now()) + brain::POLL_STARTING);
        }
        Ok(())
    }

    async fn apply(&self, lease: &Lease, row: Row, next: VolumePassPlan) -> Result<ApplyOutcome, PassError> {
        let (plan, volume) = (next.plan, &row.loaded.volume);
        let mut set: Values = Vec::new();
        if let Some(made) = &next.made {
            set.push(("volume_id", made.id.as_str().into()));
            set.push(("provisioning", Val::json(&provisioning_document(&row.backend, made))?));
        }
        let mut record = None;
        let mut clean_up = false;
        if let Some(change) = &plan.change {
            let why = pipeline_cause(event::Pipeline::Volume, lease, change.reason, &change.message);
            clean_up = change.event == volume::Event::DeleteRequested;
            let moved = event::transition::<volume::VolumeLifecycle>(
                volume.id,
                volume.status,
                change.event,
                why.clone(),
            )?;
            set.push(("status", moved.status.into()));
            set.push(("status_message", status_message(&change.message, moved.status).into()));
            record = moved
                .record
                .or_else(|| clean_up.then(|| event::Event::note(event::Entity::Volume, volume.id, why)));
        } else if let Some(note) = &plan.note {
            // Recorded once, however often the deletion is retried.
            if volume.status_message.as_deref() != Some(note) {
                let why = pipeline_cause(event::Pipeline::Volume, lease, "delete", note);
                record = Some(event::Event::note(event::Entity::Volume, volume.id, why));
                set.push(("status_message", note.as_str().into()));
            }
        }
        if plan.is_removed {
            set.extend([
                ("deleted", true.into()),
                ("deleted_at", Val::Now),
                ("finished", true.into()),
                ("finished_at", Val::Now),
            ]);
        }
        let due_in_us = Some(due_in(lease, plan.due));
        let moved = VolumeUpdate { set, event: record, due_in_us, clean_up };
        let written = rows::apply(&self.0.db, lease.key(), volume, moved).await?;
        if let WriteOutcome::Stale { at: Some(_) } = written {
            // A job claimed the volume at the same moment: it is not deleted, and the next pass sees the reason.
            return Ok(ApplyOutcome::Unchanged { due_in: None });
        }
        Ok(apply_outcome(&written, due_in_us, vec![]))
    }
}

impl VolumesPipeline {
    async fn perform_action(
        &self,
        storage: &dyn Storage,
        row: &Row,
        action: Action,
        made: &mut Option<BackendVolume>,
    ) -> VolumeObservation {
        let known = row.loaded.volume.volume_id.as_deref();
        match (action, known) {
            (Action::Create | Action::Register, _) | (Action::Check, None) => {
                to_observation(storage.make(&row.order).await.map(Some), made)
            }
            (Action::Check, Some(id)) => to_observation(storage.get(&row.order, id).await, made),
            (Action::Delete, known) => match self.delete(storage, row, known).await {
                Ok(()) => VolumeObservation::Deleted,
                Err(error) => VolumeObservation::NotDeleted { message: error.to_string() },
            },
        }
    }

    async fn delete(
        &self,
        storage: &dyn Storage,
        row: &Row,
        known: Option<&str>,
    ) -> Result<(), BackendError> {
        let id = match known {
            Some(id) => id.to_owned(),
            // A server that died before it stored the id may have created the volume. Creation is idempotent by the
            // order, so this returns that volume.
            None => match storage.make(&row.order).await {
                Ok(made) => made.id,
                Err(BackendError::Refused { .. } | BackendError::HostKeyChanged { .. }) => return Ok(()),
                Err(error @ (BackendError::NoCapacity { .. } | BackendError::Unavailable { .. })) => {
                    return Err(error);
                }
            },
        };
        storage.remove(&row.order, &id).await
    }
}

fn to_observation(
    answer: Result<Option<BackendVolume>, BackendError>,
    made: &mut Option<BackendVolume>,
) -> VolumeObservation {
    match answer {
        Ok(Some(one)) => {
            let ready = one.ready;
            *made = Some(one);
            if ready { VolumeObservation::Ready } else { VolumeObservation::Creating }
        }
        Ok(None) => VolumeObservation::Broken { message: "it does not exist in the backend".to_owned() },
        Err(error @ (BackendError::Refused { .. } | BackendError::HostKeyChanged { .. })) => {
            VolumeObservation::Broken { message: error.to_string() }
        }
        // The outcome is unknown; the next pass queries again, until the time limit.
        Err(BackendError::NoCapacity { .. } | BackendError::Unavailable { .. }) => {
            VolumeObservation::NotRequested
        }
    }
}

/// Result when the backend is not configured. A volume that was never created counts as deleted when its deletion is
/// requested; one with an id waits for its backend.
fn missing_backend(backend: &str, action: Action, known: Option<&str>) -> VolumeObservation {
    let message = format!("backend `{backend}` is not configured, or does not support volumes");
    match (action, known) {
        (Action::Create | Action::Register | Action::Check, _) => VolumeObservation::Broken { message },
        (Action::Delete, Some(_)) => VolumeObservation::NotDeleted { message },
        (Action::Delete, None) => VolumeObservation::Deleted,
    }
}

/// Message for users beside the status; none for an active volume.
fn status_message(message: &str, status: volume::Status) -> Option<&str> {
    match status {
        volume::Status::Active => None,
        volume::Status::Submitted | volume::Status::Provisioning | volume::Status::Failed => Some(message),
    }
}

/// Provisioning data in the format of clients.
fn provisioning_document(backend: &str, made: &BackendVolume) -> Value {
    json!({
        "backend": backend,
        "volume_id": made.id,
        "size_gb": made.size_gb,
        "availability_zone": made.zone,
        "price": made.price,
        "attachable": true,
        "detachable": true,
    })
}

fn volume_request(volume: &Volume, wanted: &Configuration) -> VolumeRequest {
    VolumeRequest {
        volume: volume.id,
        name: volume.name.clone(),
        region: wanted.region().to_owned(),
        zone: wanted.zone().map(str::to_owned),
        size_gb: wanted.size_gb(),
        external: wanted.external_id().map(str::to_owned),
    }
}

fn view(loaded: &VolumeInputs, wanted: &Configuration) -> brain::VolumeView {
    let volume = &loaded.volume;
    brain::VolumeView {
        status: volume.status,
        created_at: volume.created_at,
        is_external: volume.external,
        is_delete_requested: volume.delete_asked_at.is_some(),
        is_attached: loaded.attached,
        unattached_since: Some(volume.last_job_processed_at.unwrap_or(volume.created_at)),
        cleanup_after: wanted.cleanup_after_secs().map(Span::secs),
    }
}
