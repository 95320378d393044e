//! Tables `volumes` and `volume_attachments`.

use windlass_model::{
    id::{InstanceId, ProjectId, UserId, VolumeId},
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
    pub struct Attachment {
        pub volume_id: VolumeId,
        pub instance_id: InstanceId,
        pub data: Option<String>,
        pub attached_at: Timestamp,
    }
}

statements! {
    FIND = "SELECT {} FROM volumes v WHERE v.id = $1", Volume::columns("v");
    FIND_BY_NAME = "SELECT {} FROM volumes v WHERE v.project_id = $1 AND v.name = $2 AND NOT v.deleted",
                   Volume::columns("v");
    ATTACHMENTS = "SELECT {} FROM volume_attachments a WHERE a.volume_id IN \
                   (SELECT value FROM json_each(CAST($1 AS TEXT))) ORDER BY a.volume_id, a.attached_at",
                  Attachment::columns("a");
    ATTACH = "INSERT INTO volume_attachments (volume_id, instance_id, data, attached_at) \
              VALUES ($1, $2, $3, now_us()) ON CONFLICT (volume_id, instance_id) DO UPDATE SET data = excluded.data";
    DETACH = "DELETE FROM volume_attachments WHERE volume_id = $1 AND instance_id = $2";
    /// A request that the pipeline reads; refused while the volume is attached.
    ASK_DELETE = "UPDATE volumes SET delete_asked_at = coalesce(delete_asked_at, now_us()), due_at = NULL \
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
    db.query_opt(FIND.as_str(), params![id]).await?.as_ref().map(Volume::read).transpose()
}

pub async fn find_by_name(db: &Db, project: ProjectId, name: &str) -> Result<Option<Volume>, DbError> {
    db.query_opt(FIND_BY_NAME.as_str(), params![project, name]).await?.as_ref().map(Volume::read).transpose()
}

/// Which volumes: newest first unless the page says otherwise, ties by id.
#[derive(Clone, Debug, Default)]
pub struct Query {
    pub projects: Option<Vec<ProjectId>>,
    pub only_active: bool,
    pub page: Page,
}

pub async fn list(db: &Db, query: &Query) -> Result<Vec<Volume>, DbError> {
    let mut filter = Filter::new();
    filter.when("NOT v.deleted");
    if let Some(projects) = &query.projects {
        filter.is_in("v.project_id", projects);
    }
    if query.only_active {
        filter.when("NOT v.finished");
    }
    filter.after("v.created_at", "v.id", &query.page);
    let (found, params) = filter.done();
    let order = query.page.order("v.created_at", "v.id");
    let sql = format!("SELECT {} FROM volumes v{found}{order}", Volume::columns("v"));
    db.query(sql, params).await?.iter().map(Volume::read).collect()
}

pub async fn attachments(db: &Db, volumes: &[VolumeId]) -> Result<Vec<Attachment>, DbError> {
    db.query(ATTACHMENTS.as_str(), vec![Val::list(volumes)]).await?.iter().map(Attachment::read).collect()
}

pub fn attach(volume: VolumeId, instance: InstanceId, data: Option<&str>) -> Change {
    exec(&ATTACH, params![volume, instance, data], Expect::Any)
}

pub fn detach(volume: VolumeId, instance: InstanceId) -> Change {
    exec(&DETACH, params![volume, instance], Expect::Any)
}

/// Stores the wish to delete; the volume's pipeline does it. Stale while it is attached.
pub fn ask_delete(id: VolumeId) -> Change {
    exec(&ASK_DELETE, params![id], Expect::One)
}

fn exec(sql: &'static str, params: Vec<Val>, expect: Expect) -> Change {
    Change::Exec { sql: sql.into(), params, expect }
}
