//! Tables `volumes` and `volume_attachments`.

use windlass_model::{
    id::{InstanceId, ProjectId, SubmissionId, UserId, VolumeId},
    time::Timestamp,
    volume::Status,
};

use super::{
    Change, Db, DbError, Expect, Val,
    filter::{Filter, Page},
    record::{record, statements},
};
use crate::params;

record! {
    pub struct Volume {
        pub id: VolumeId,
        pub project_id: ProjectId,
        pub user_id: UserId,
        pub name: String,
        /// JSON.
        pub configuration: String,
        pub external: bool,
        pub status: Status,
        pub finished: bool,
        pub status_message: Option<String>,
        /// The provider's own id.
        pub volume_id: Option<String>,
        pub provisioning: Option<String>,
        pub delete_asked_at: Option<Timestamp>,
        /// Time when a job last claimed or released it.
        pub last_job_processed_at: Option<Timestamp>,
        pub created_at: Timestamp,
        pub last_processed_at: Timestamp,
        pub deleted: bool,
        pub deleted_at: Option<Timestamp>,
        pub tracking: Option<String>,
        pub lock_epoch: i64,
    }
}

record! {
    pub struct NewVolume {
        pub id: VolumeId,
        pub project_id: ProjectId,
        pub user_id: UserId,
        pub name: String,
        pub configuration: String,
        pub external: bool,
        pub status: Status,
    }
}

record! {
    pub struct VolumeAttachment {
        pub volume_id: VolumeId,
        pub instance_id: InstanceId,
        /// JSON: its device on the instance; `None` until the backend has reported it.
        pub data: Option<String>,
        pub attached_at: Timestamp,
        pub detach_asked_at: Option<Timestamp>,
        pub detach_forced_at: Option<Timestamp>,
        /// Job that waits for the end of the attachment.
        pub ends_for: Option<SubmissionId>,
    }
}

statements! {
    FIND = "SELECT {} FROM volumes v WHERE v.id = $1", Volume::columns("v");
    FIND_BY_NAME = "SELECT {} FROM volumes v WHERE v.project_id = $1 AND v.name = $2 AND NOT v.deleted",
                   Volume::columns("v");
    /// Own volumes first.
    NAMED = "SELECT {}, p.name FROM usable_volumes u JOIN volumes v ON v.id = u.volume_id \
             JOIN projects p ON p.id = v.project_id WHERE u.project_id = $1 AND NOT v.deleted AND v.name IN \
             (SELECT value FROM json_each(CAST($2 AS TEXT))) ORDER BY v.project_id <> $1, p.name, v.id",
            Volume::columns("v");
    BY_IDS = "SELECT {} FROM volumes v WHERE v.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))",
             Volume::columns("v");
    ATTACHMENTS = "SELECT {} FROM volume_attachments a WHERE a.volume_id IN \
                   (SELECT value FROM json_each(CAST($1 AS TEXT))) ORDER BY a.volume_id, a.attached_at",
                  VolumeAttachment::columns("a");
    DISK_ELSEWHERE = "SELECT {} FROM volumes v WHERE v.project_id <> $1 AND v.volume_id = $2 AND NOT v.deleted",
                     Volume::columns("v");
    /// Waits for a transaction that is attaching the volume, so that the next statement sees its result.
    QUEUE_UP = "UPDATE volumes SET due_at = NULL WHERE id = $1";
    /// A request that the pipeline reads; rejected while the volume is attached.
    REQUEST_DELETE = "UPDATE volumes SET delete_asked_at = coalesce(delete_asked_at, now_us()), due_at = NULL \
                  WHERE id = $1 AND NOT deleted \
                  AND NOT EXISTS (SELECT 1 FROM volume_attachments a WHERE a.volume_id = $1)";
}

/// A name in use is a conflict on `volumes_name_key`.
pub fn insert(volume: NewVolume) -> Change {
    let mut values = volume.into_values();
    values.extend([("created_at", Val::Now), ("last_processed_at", Val::Now)]);
    Change::Insert { table: "volumes", values }
}

pub async fn find(db: &Db, id: VolumeId) -> Result<Option<Volume>, DbError> {
    db.query_opt(FIND.as_str(), params![id]).await?.map(Volume::read).transpose()
}

pub async fn find_by_name(db: &Db, project: ProjectId, name: &str) -> Result<Option<Volume>, DbError> {
    db.query_opt(FIND_BY_NAME.as_str(), params![project, name]).await?.map(Volume::read).transpose()
}

/// Volumes of other projects with this id of a provider.
pub async fn with_disk_elsewhere(db: &Db, project: ProjectId, disk: &str) -> Result<Vec<Volume>, DbError> {
    let rows = db.query(DISK_ELSEWHERE.as_str(), params![project, disk]).await?;
    rows.into_iter().map(Volume::read).collect()
}

/// Selection of volumes: newest first unless the page specifies otherwise, ties by id.
#[derive(Clone, Debug, Default)]
pub struct Query {
    pub projects: Option<Vec<ProjectId>>,
    pub only_active: bool,
    pub page: Page,
}

pub async fn list(db: &Db, query: &Query) -> Result<Vec<Volume>, DbError> {
    let mut filter = Filter::new();
    filter.and("NOT v.deleted");
    if let Some(projects) = &query.projects {
        filter.and_in("v.project_id", projects);
    }
    if query.only_active {
        filter.and("NOT v.finished");
    }
    filter.after("v.created_at", "v.id", &query.page);
    let (found, params) = filter.done();
    let order = query.page.order("v.created_at", "v.id");
    let sql = format!("SELECT {} FROM volumes v{found}{order}", Volume::columns("v"));
    db.query(sql, params).await?.into_iter().map(Volume::read).collect()
}

pub async fn attachments(db: &Db, volumes: &[VolumeId]) -> Result<Vec<VolumeAttachment>, DbError> {
    db.query(ATTACHMENTS.as_str(), vec![Val::list(volumes)])
        .await?
        .into_iter()
        .map(VolumeAttachment::read)
        .collect()
}

/// Volumes with one of these names that jobs of a project may mount, its own first, each with the name of the project
/// to which it belongs.
pub async fn find_named(
    db: &Db,
    project: ProjectId,
    names: &[&str],
) -> Result<Vec<(Volume, String)>, DbError> {
    let rows = db.query(NAMED.as_str(), vec![project.into(), Val::list(names)]).await?;
    let each = rows.into_iter().map(|mut row| {
        let owner = row.text(Volume::WIDTH)?;
        Ok((Volume::read_from(&mut row, 0)?, owner))
    });
    each.collect()
}

pub async fn by_ids(db: &Db, ids: &[VolumeId]) -> Result<Vec<Volume>, DbError> {
    db.query(BY_IDS.as_str(), vec![Val::list(ids)]).await?.into_iter().map(Volume::read).collect()
}

/// Stores the request to delete; the volume's pipeline performs it. Stale while the volume is attached.
pub fn request_delete(id: VolumeId) -> [Change; 2] {
    [exec(&QUEUE_UP, params![id], Expect::Any), exec(&REQUEST_DELETE, params![id], Expect::One)]
}

fn exec(sql: &'static str, params: Vec<Val>, expect: Expect) -> Change {
    Change::Exec { sql: sql.into(), params, expect }
}
