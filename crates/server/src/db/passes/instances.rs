//! What the instance pipeline reads and writes.

use uuid::Uuid;
use windlass_engine::{Held, Lease};
use windlass_model::{event::Event, id::SubmissionId};

use super::told;
use crate::{
    db::{Db, DbError, Unit, Val, Values, Written, instances::Instance, record::statements},
    params,
};

statements! {
    LOAD = "SELECT {} FROM instances i WHERE i.id = $1 AND i.lock_token = $2", Instance::columns("i");
    KNOWN = "SELECT j.id, j.lock_epoch, j.finished FROM jobs j WHERE j.id IN \
             (SELECT value FROM json_each(CAST($1 AS TEXT))) AND j.instance_id = $2";
}

pub async fn load(db: &Db, lease: &Lease) -> Result<Option<Instance>, DbError> {
    db.query_opt(LOAD.as_str(), params![lease.id, lease.token])
        .await?
        .as_ref()
        .map(Instance::read)
        .transpose()
}

/// A task on the host, and the highest epoch its submission can have been seen with.
#[derive(Clone, Copy, Debug)]
pub struct Stray {
    pub submission: SubmissionId,
    pub epoch: i64,
}

/// Those of a host's tasks that belong to no living job there. Ask the host first and the database after:
/// a task is handed over only when its job's row says so, so one that is missing here is dead.
pub async fn strays(db: &Db, instance: Uuid, tasks: &[SubmissionId]) -> Result<Vec<Stray>, DbError> {
    if tasks.is_empty() {
        return Ok(Vec::new());
    }
    let rows = db.query(KNOWN.as_str(), vec![Val::list(tasks), instance.into()]).await?;
    let mut known = Vec::with_capacity(rows.len());
    for row in &rows {
        known.push((SubmissionId(row.uuid(0)?), row.int(1)?, row.bool(2)?));
    }
    let stray = |task: &SubmissionId| match known.iter().find(|(id, _, _)| id == task) {
        Some((_, _, false)) => None,
        Some((_, epoch, true)) => Some(Stray { submission: *task, epoch: *epoch }),
        None => Some(Stray { submission: *task, epoch: i64::MAX }),
    };
    Ok(tasks.iter().filter_map(stray).collect())
}

pub async fn apply(
    db: &Db,
    held: Held,
    instance: &Instance,
    set: Values,
    event: Option<&Event>,
    due_in_us: Option<i64>,
) -> Result<Written, DbError> {
    let mut unit = Unit::apply("instances", held, due_in_us, set);
    if let Some(event) = event {
        unit = unit.and(told(db, held, instance.project_id, event, &instance.name)?);
    }
    db.write(unit).await
}
