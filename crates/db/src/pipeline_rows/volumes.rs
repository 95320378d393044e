//! Reads and writes of the volume pipeline, and how jobs claim and release volumes.
//!
//! The row of an attachment is written before the backend is called: it is inserted under a condition, then the backend
//! is called. A unit that adds or ends an attachment updates the volume's own row first, so that two of them on one
//! volume see each other's writes.

use windlass_engine::{Lease, LeaseKey};
use windlass_model::{
    event::Event,
    id::{InstanceId, SubmissionId, VolumeId},
};

use super::event_rows;
use crate::{
    Db, DbError, Unit, Values, WriteOutcome,
    jobs::Job,
    params,
    record::{record, statements},
    volumes::{Volume, VolumeAttachment},
};

record! {
    /// One mount point of one job.
    pub struct VolumeHold {
        pub path: String,
        pub volume_id: VolumeId,
        pub instance_id: InstanceId,
    }
}

statements! {
    LOAD = "SELECT {} FROM volumes v WHERE v.id = $1 AND v.lock_token = $2", Volume::columns("v");
    ATTACHED = "SELECT 1 FROM volume_attachments a WHERE a.volume_id = $1 LIMIT 1";
    /// Only while it is unused: a job may have claimed it since the row was read.
    CLEAN_UP = "UPDATE volumes SET delete_asked_at = coalesce(delete_asked_at, now_us()) WHERE id = $1 \
                AND NOT EXISTS (SELECT 1 FROM volume_attachments a WHERE a.volume_id = $1)";
    HOLDS = "SELECT {} FROM volume_holds h WHERE h.job_id = $1 ORDER BY h.path", VolumeHold::columns("h");
    /// A volume that is being deleted accepts no new job.
    USE = "UPDATE volumes SET last_job_processed_at = now_us() WHERE id = $1 AND status = 'active' \
           AND NOT deleted AND delete_asked_at IS NULL";
    TAKE = "INSERT INTO volume_attachments (volume_id, instance_id, attached_at) \
            SELECT CAST($1 AS TEXT), CAST($2 AS TEXT), now_us() WHERE $3 OR NOT EXISTS \
            (SELECT 1 FROM volume_attachments a WHERE a.volume_id = $1 AND a.instance_id <> $2) \
            ON CONFLICT (volume_id, instance_id) DO NOTHING";
    HOLD = "INSERT INTO volume_holds (job_id, path, volume_id, instance_id) \
            SELECT CAST($1 AS TEXT), CAST($2 AS TEXT), a.volume_id, a.instance_id FROM volume_attachments a \
            WHERE a.volume_id = $3 AND a.instance_id = $4 AND a.detach_asked_at IS NULL";
    SHOWN_AS = "UPDATE volume_attachments SET data = $3 WHERE volume_id = $1 AND instance_id = $2";
    TOUCH = "UPDATE volumes SET last_job_processed_at = now_us(), due_at = NULL WHERE id = $1";
    LET_GO = "DELETE FROM volume_holds WHERE job_id = $1 AND volume_id = $2";
    /// The last job that releases it ends the attachment, and waits for that.
    END = "UPDATE volume_attachments SET detach_asked_at = now_us(), ends_for = CAST($1 AS TEXT) \
           WHERE volume_id = $2 AND instance_id = $3 AND detach_asked_at IS NULL AND NOT EXISTS \
           (SELECT 1 FROM volume_holds h WHERE h.volume_id = $2 AND h.instance_id = $3)";
    FORCE = "UPDATE volume_attachments SET detach_forced_at = now_us() WHERE volume_id = $1 AND instance_id = $2 \
             AND ends_for = $3";
    PHASE = "SELECT {} FROM volume_attachments a WHERE a.ends_for = $1 OR EXISTS (SELECT 1 FROM volume_holds h \
                WHERE h.job_id = $1 AND h.volume_id = a.volume_id AND h.instance_id = a.instance_id) \
                ORDER BY a.volume_id",
               VolumeAttachment::columns("a");
    GONE = "DELETE FROM volume_attachments WHERE volume_id = $1 AND instance_id = $2 AND ends_for = $3";
}

#[derive(Clone, Debug)]
pub struct VolumeInputs {
    pub volume: Volume,
    pub attached: bool,
}

pub async fn load(db: &Db, lease: &Lease) -> Result<Option<VolumeInputs>, DbError> {
    let Some(row) = db.query_opt(LOAD.as_str(), params![lease.id, lease.token]).await? else {
        return Ok(None);
    };
    let attached = db.query_opt(ATTACHED.as_str(), params![lease.id]).await?.is_some();
    Ok(Some(VolumeInputs { volume: Volume::read(row)?, attached }))
}

/// Result of one pass.
pub struct VolumeUpdate {
    pub set: Values,
    pub event: Option<Event>,
    pub due_in_us: Option<i64>,
    /// It was unused for as long as its configuration permits: its deletion is requested, unless a job just claimed it.
    pub clean_up: bool,
}

pub async fn apply(
    db: &Db,
    held: LeaseKey,
    volume: &Volume,
    moved: VolumeUpdate,
) -> Result<WriteOutcome, DbError> {
    let mut unit = Unit::apply("volumes", held, moved.due_in_us, moved.set);
    if moved.clean_up {
        unit = unit.expect_one(CLEAN_UP.as_str(), params![volume.id]);
    }
    if let Some(event) = &moved.event {
        unit = unit.and(event_rows(db, held, volume.project_id, event, &volume.name)?);
    }
    db.write(unit).await
}

pub async fn list_holds(db: &Db, job: SubmissionId) -> Result<Vec<VolumeHold>, DbError> {
    db.query(HOLDS.as_str(), params![job]).await?.into_iter().map(VolumeHold::read).collect()
}

/// One mount point to fill.
#[derive(Clone, Debug)]
pub struct VolumeClaim {
    pub volume: VolumeId,
    pub path: String,
    /// True if the backend attaches it to several instances at once.
    pub many: bool,
}

/// Claims the volumes of all mount points of a job, or none. Stale at a position: a volume is being deleted, or is
/// attached to another instance.
pub async fn claim(
    db: &Db,
    held: LeaseKey,
    job: SubmissionId,
    instance: InstanceId,
    mut taken: Vec<VolumeClaim>,
) -> Result<WriteOutcome, DbError> {
    // The same order in all units, so that they cannot deadlock.
    taken.sort_by_key(|one| one.volume);
    let mut unit = Unit::guarded("jobs", held, Vec::new());
    for one in taken {
        unit = unit
            .expect_one(USE.as_str(), params![one.volume])
            .exec(TAKE.as_str(), params![one.volume, instance, one.many])
            .expect_one(HOLD.as_str(), params![job, one.path, one.volume, instance]);
    }
    db.write(unit).await
}

/// Stores the device of an attached volume, as the backend reports it.
pub async fn set_device(
    db: &Db,
    held: LeaseKey,
    at: &VolumeAttachment,
    data: &str,
) -> Result<WriteOutcome, DbError> {
    let unit = Unit::guarded("jobs", held, Vec::new());
    db.write(unit.exec(SHOWN_AS.as_str(), params![at.volume_id, at.instance_id, data])).await
}

/// Releases these volumes. Those that no other job uses are to be detached, and the job waits for it.
pub async fn release(
    db: &Db,
    held: LeaseKey,
    job: &Job,
    instance: InstanceId,
    mut volumes: Vec<VolumeId>,
) -> Result<WriteOutcome, DbError> {
    volumes.sort();
    let mut unit = Unit::guarded("jobs", held, Vec::new());
    for volume in volumes {
        unit = unit
            .exec(TOUCH.as_str(), params![volume])
            .exec(LET_GO.as_str(), params![job.id, volume])
            .exec(END.as_str(), params![job.id, volume, instance]);
    }
    db.write(unit).await
}

pub async fn force_detach(
    db: &Db,
    held: LeaseKey,
    job: &Job,
    instance: InstanceId,
    volumes: &[VolumeId],
) -> Result<WriteOutcome, DbError> {
    let mut unit = Unit::guarded("jobs", held, Vec::new());
    for volume in volumes {
        unit = unit.exec(FORCE.as_str(), params![*volume, instance, job.id]);
    }
    db.write(unit).await
}

/// Attachments that this job uses, or whose end it waits for.
pub async fn list_attachments(db: &Db, job: SubmissionId) -> Result<Vec<VolumeAttachment>, DbError> {
    db.query(PHASE.as_str(), params![job]).await?.into_iter().map(VolumeAttachment::read).collect()
}

/// Deletes the row of an attachment that the backend reports as detached.
pub async fn delete_attachment(
    db: &Db,
    held: LeaseKey,
    job: SubmissionId,
    at: &VolumeAttachment,
) -> Result<WriteOutcome, DbError> {
    let unit = Unit::guarded("jobs", held, Vec::new())
        .exec(TOUCH.as_str(), params![at.volume_id])
        .exec(GONE.as_str(), params![at.volume_id, at.instance_id, job]);
    db.write(unit).await
}
