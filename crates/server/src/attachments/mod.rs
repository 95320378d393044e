//! Network volumes of jobs: attached before the task starts, detached before the job ends.
//!
//! The pipelines of jobs call this under the lease of the job. Every function may be repeated by the next holder of the
//! job: the rows record the progress.
//!
//! - Before a task is submitted to its host: [`attach`], until it is `Ready`.
//! - While the job terminates, once its container is gone: [`standing`] for the `volumes` of the decision, and
//!   [`detach`] for its `Step::Detach`.
//! - For placement: [`mounts::VolumeCatalog`].

pub mod mounts;

use windlass_api::agent::shim;
use windlass_backend::{
    BackendError, BackendInstance, Backends,
    volumes::{Attachment, AttachmentState, VolumeBackend},
};
use windlass_engine::Lease;
use windlass_model::{
    config::mounts::VolumeMount,
    decide::{jobs_submitted::ATTACH_TIMEOUT, jobs_terminating as ending},
    id::VolumeId,
    time::Timestamp,
};

use self::mounts::VolumeCatalog;
use crate::{
    db::{
        Db, Val, WriteOutcome,
        documents::{ATTACHMENT_DATA, INSTANCE_PROVISIONING},
        instances::{self, Instance},
        jobs::Job,
        pipeline_rows::volumes::{self as rows, VolumeClaim, VolumeHold},
        volumes::{self, Volume, VolumeAttachment as Fastening},
    },
    pass_error::PassError,
};

/// Progress of attaching the volumes of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttachProgress {
    /// All are attached (at once for a job without volumes): the mounts for the task.
    Ready(TaskMounts),
    /// Requested, or about to be: check again.
    Coming { message: String },
    /// Not possible: the job ends with `volume_error` and this message.
    Failed { message: String },
}

/// Part of a task's specification about network volumes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskMounts {
    pub volumes: Vec<shim::Volume>,
    pub volume_mounts: Vec<shim::VolumeMount>,
}

/// Attaches all network volumes of a job to its instance.
pub async fn attach(
    db: &Db,
    backends: &Backends,
    lease: &Lease,
    job: &Job,
    instance: &Instance,
) -> Result<AttachProgress, PassError> {
    let wanted = mounts::for_job(job)?;
    if wanted.is_empty() {
        return Ok(AttachProgress::Ready(TaskMounts::default()));
    }
    let Some(machine) = stored_machine(instance)? else {
        return Ok(AttachProgress::Coming { message: "its instance is not created yet".to_owned() });
    };
    let mut holds = rows::list_holds(db, job.id).await?;
    if holds.len() < wanted.len() {
        let now = Timestamp(lease.now());
        let taken = match choose(db, backends, job, instance, &wanted, now).await? {
            VolumeChoice::Claim(taken) => taken,
            VolumeChoice::Wait(message) => return Ok(AttachProgress::Coming { message }),
            VolumeChoice::Never(message) => return Ok(AttachProgress::Failed { message }),
        };
        match rows::claim(db, lease.key(), job.id, instance.id, taken).await? {
            WriteOutcome::Done { .. } => holds = rows::list_holds(db, job.id).await?,
            // The lease was lost, or another job was faster: the next check shows which.
            WriteOutcome::Stale { .. } => {
                return Ok(AttachProgress::Coming {
                    message: "another job claimed one of its volumes".to_owned(),
                });
            }
        }
    }
    attach_claimed(db, backends, lease, job, &holds, &machine).await
}

enum VolumeChoice {
    Claim(Vec<VolumeClaim>),
    Wait(String),
    Never(String),
}

/// Selects for each mount point the first of its volumes that is available.
async fn choose(
    db: &Db,
    backends: &Backends,
    job: &Job,
    instance: &Instance,
    wanted: &[VolumeMount],
    now: Timestamp,
) -> Result<VolumeChoice, PassError> {
    let catalogue = VolumeCatalog::of(db, job.project_id, wanted).await?;
    let mut taken: Vec<VolumeClaim> = Vec::new();
    for mount in wanted {
        let (mut refusals, mut waits) = (Vec::new(), None);
        let mut chosen = None;
        for name in mount.name.as_slice() {
            match availability(db, backends, &catalogue, name, instance, now).await? {
                Availability::Yes { volume, many } if taken.iter().all(|one| one.volume != volume) => {
                    chosen = Some(VolumeClaim { volume, path: mount.path.clone(), many });
                    break;
                }
                Availability::Yes { .. } => refusals.push(format!("volume `{name}` is mounted twice")),
                Availability::Pending(message) => waits = waits.or(Some(message)),
                Availability::Unavailable(message) => refusals.push(message),
            }
        }
        match (chosen, waits) {
            (Some(one), _) => taken.push(one),
            (None, Some(message)) => return Ok(VolumeChoice::Wait(message)),
            (None, None) => return Ok(VolumeChoice::Never(refusals.join("; "))),
        }
    }
    Ok(VolumeChoice::Claim(taken))
}

enum Availability {
    Yes { volume: VolumeId, many: bool },
    Pending(String),
    Unavailable(String),
}

async fn availability(
    db: &Db,
    backends: &Backends,
    catalogue: &VolumeCatalog,
    name: &str,
    instance: &Instance,
    now: Timestamp,
) -> Result<Availability, PassError> {
    let Some(volume) = catalogue.named(name) else {
        return Ok(Availability::Unavailable(format!("volume `{name}` does not exist")));
    };
    if let Some(message) = mounts::unusable_reason(volume) {
        return Ok(Availability::Unavailable(message));
    }
    let at = mounts::location(volume)?;
    if !mounts::is_reachable(&at, instance) {
        let zone = at.zone.map(|zone| format!(", {zone}")).unwrap_or_default();
        return Ok(Availability::Unavailable(format!(
            "volume `{name}` is in {} {}{zone}, but instance {} is not",
            at.backend, at.region, instance.name
        )));
    }
    let Some(backend) = backends.named(&at.backend).and_then(|backend| backend.volumes()) else {
        return Ok(Availability::Unavailable(no_volumes(&at.backend)));
    };
    let many = backend.many();
    for attachment in volumes::attachments(db, &[volume.id]).await? {
        let going = attachment.detach_asked_at.is_some();
        if attachment.instance_id == instance.id {
            if going {
                return Ok(Availability::Pending(format!(
                    "volume `{name}` is still being detached from this instance"
                )));
            }
            if is_stuck(&attachment, now) {
                // A sequence of jobs would keep it forever: the last job that releases it detaches it.
                return Ok(Availability::Pending(format!(
                    "attaching volume `{name}` to this instance timed out; it is detached first"
                )));
            }
        } else if !many {
            let other = instances::find(db, attachment.instance_id).await?;
            let other = other.map_or_else(|| attachment.instance_id.to_string(), |other| other.name);
            return Ok(match going {
                true => {
                    Availability::Pending(format!("volume `{name}` is still being detached from {other}"))
                }
                false => Availability::Unavailable(format!(
                    "volume `{name}` is attached to {other}; a volume is attached to one instance at a time"
                )),
            });
        }
    }
    Ok(Availability::Yes { volume: volume.id, many })
}

/// True if it was requested long ago and the backend has not reported it yet.
fn is_stuck(attachment: &Fastening, now: Timestamp) -> bool {
    attachment.data.is_none() && now.since(attachment.attached_at) >= ATTACH_TIMEOUT
}

fn no_volumes(backend: &str) -> String {
    format!("backend `{backend}` is not configured, or does not support volumes")
}

/// Requests from the backend the volumes that the job has claimed.
async fn attach_claimed(
    db: &Db,
    backends: &Backends,
    lease: &Lease,
    job: &Job,
    holds: &[VolumeHold],
    machine: &BackendInstance,
) -> Result<AttachProgress, PassError> {
    let ids: Vec<VolumeId> = holds.iter().map(|hold| hold.volume_id).collect();
    let known = volumes::by_ids(db, &ids).await?;
    let mut reported = TaskMounts::default();
    let mut coming = None;
    for attachment in rows::list_attachments(db, job.id).await? {
        let Some(volume) = known.iter().find(|volume| volume.id == attachment.volume_id) else { continue };
        let shown = match &attachment.data {
            Some(data) => ATTACHMENT_DATA.decode(volume.id, data)?,
            None => match attach_volume(backends, volume, machine).await? {
                AttachOutcome::Yes(shown) => {
                    let data = Val::json(&shown)?;
                    let Val::Text(data) = data else { continue };
                    rows::set_device(db, lease.key(), &attachment, &data).await?;
                    shown
                }
                AttachOutcome::Pending(message) if is_stuck(&attachment, Timestamp(lease.now())) => {
                    let message = format!("{message}; timed out after {} s", ATTACH_TIMEOUT.as_secs());
                    return Ok(AttachProgress::Failed { message });
                }
                AttachOutcome::Pending(message) => {
                    coming = Some(message);
                    continue;
                }
                AttachOutcome::Never(message) => return Ok(AttachProgress::Failed { message }),
            },
        };
        reported.volumes.push(shim::Volume {
            backend: mounts::backend(volume)?,
            name: volume.name.clone(),
            volume_id: volume.volume_id.clone().unwrap_or_default(),
            // A volume that a user supplied is never formatted.
            init_fs: !volume.external,
            device_name: shown.device_name,
        });
        let here = holds.iter().filter(|hold| hold.volume_id == volume.id);
        reported.volume_mounts.extend(
            here.map(|hold| shim::VolumeMount { name: volume.name.clone(), path: hold.path.clone() }),
        );
    }
    Ok(match coming {
        Some(message) => AttachProgress::Coming { message },
        None => AttachProgress::Ready(reported),
    })
}

enum AttachOutcome {
    Yes(Attachment),
    Pending(String),
    Never(String),
}

async fn attach_volume(
    backends: &Backends,
    volume: &Volume,
    machine: &BackendInstance,
) -> Result<AttachOutcome, PassError> {
    let (name, kind) = (&volume.name, mounts::backend(volume)?);
    let Some(id) = &volume.volume_id else {
        return Ok(AttachOutcome::Never(format!("volume `{name}` was never created")));
    };
    let Some(backend) = volume_backend(backends, &kind) else {
        return Ok(AttachOutcome::Never(no_volumes(&kind)));
    };
    Ok(match backend.attach(id, machine).await {
        Ok(AttachmentState::Yes(shown)) => AttachOutcome::Yes(shown),
        Ok(AttachmentState::Coming | AttachmentState::No) => {
            AttachOutcome::Pending(format!("volume `{name}` is being attached"))
        }
        Err(error @ (BackendError::Unavailable { .. } | BackendError::NoCapacity { .. })) => {
            AttachOutcome::Pending(format!("volume `{name}` is not attached yet: {error}"))
        }
        Err(error @ (BackendError::Refused { .. } | BackendError::HostKeyChanged { .. })) => {
            AttachOutcome::Never(format!("volume `{name}` could not be attached: {error}"))
        }
    })
}

fn volume_backend<'a>(backends: &'a Backends, kind: &str) -> Option<&'a dyn VolumeBackend> {
    backends.named(kind).and_then(|backend| backend.volumes())
}

fn stored_machine(instance: &Instance) -> Result<Option<BackendInstance>, PassError> {
    Ok(INSTANCE_PROVISIONING.decode_opt(instance.id, instance.provisioning.as_deref())?)
}

/// Volumes that a terminating job still has, as its decision needs them. Those that the backend reports as detached are
/// left out, and their rows are deleted.
pub async fn remaining_volumes(
    db: &Db,
    backends: &Backends,
    lease: &Lease,
    job: &Job,
    instance: Option<&Instance>,
) -> Result<Vec<ending::VolumeAttachment>, PassError> {
    let attachments = rows::list_attachments(db, job.id).await?;
    if attachments.is_empty() {
        return Ok(Vec::new());
    }
    let ids: Vec<VolumeId> = attachments.iter().map(|one| one.volume_id).collect();
    let known = volumes::by_ids(db, &ids).await?;
    let machine = instance.map(stored_machine).transpose()?.flatten();
    let mut left = Vec::new();
    for attachment in attachments {
        let volume = known.iter().find(|volume| volume.id == attachment.volume_id);
        let forced = attachment.detach_forced_at.is_some();
        if attachment.detach_asked_at.is_some()
            && is_detached(backends, volume, machine.as_ref(), forced).await?
        {
            rows::delete_attachment(db, lease.key(), job.id, &attachment).await?;
            continue;
        }
        left.push(ending::VolumeAttachment {
            id: attachment.volume_id,
            detach_requested_at: attachment.detach_asked_at,
            is_forced: forced,
            is_attached: true,
        });
    }
    Ok(left)
}

/// Returns whether the backend has detached it. If not, requests it again: the process that recorded the request may
/// have died before sending it.
async fn is_detached(
    backends: &Backends,
    volume: Option<&Volume>,
    machine: Option<&BackendInstance>,
    force: bool,
) -> Result<bool, PassError> {
    let (Some(volume), Some(machine)) = (volume, machine) else { return Ok(true) };
    let Some(id) = &volume.volume_id else { return Ok(true) };
    let Some(backend) = volume_backend(backends, &mounts::backend(volume)?) else { return Ok(false) };
    match backend.attached(id, machine).await {
        Ok(AttachmentState::No) => return Ok(true),
        Ok(AttachmentState::Yes(_) | AttachmentState::Coming) => {}
        Err(error) => {
            tracing::debug!(volume = %volume.id, %error, "failed to check whether volume is detached");
            return Ok(false);
        }
    }
    if let Err(error) = backend.detach(id, machine, force).await {
        tracing::debug!(volume = %volume.id, %error, "failed to detach volume");
        return Ok(false);
    }
    Ok(matches!(backend.attached(id, machine).await, Ok(AttachmentState::No)))
}

/// Detaches these volumes, gracefully or by force, and returns those that are left. A volume that another job on the
/// instance uses stays attached, and no longer belongs to this job.
pub async fn detach(
    db: &Db,
    backends: &Backends,
    lease: &Lease,
    job: &Job,
    instance: &Instance,
    volumes: &[VolumeId],
    force: bool,
) -> Result<Vec<ending::VolumeAttachment>, PassError> {
    let written = match force {
        false => rows::release(db, lease.key(), job, instance.id, volumes.to_vec()).await?,
        true => rows::force_detach(db, lease.key(), job, instance.id, volumes).await?,
    };
    match written {
        WriteOutcome::Done { .. } => remaining_volumes(db, backends, lease, job, Some(instance)).await,
        // The lease was lost: no decision made now is written.
        WriteOutcome::Stale { .. } => Ok(Vec::new()),
    }
}
