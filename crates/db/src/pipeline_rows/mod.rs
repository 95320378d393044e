//! Reads and writes of the pipelines: one file per kind of row.
//!
//! Each write is one unit whose guard names the row and the lease's token. Code that stores a request on a row clears
//! its `due_at`, which makes it due again at once, regardless of a pass in progress.

pub mod fleets;
pub mod instances;
pub mod job_nodes;
pub mod jobs;
pub mod managed_jobs;
pub mod placement;
pub mod preemption;
pub mod runs;
pub mod volumes;
pub mod wait_classes;

/// All statements, for the test that prepares them on both databases.
pub(super) fn statements() -> Vec<&'static str> {
    let mut all = [
        fleets::statements(),
        instances::statements(),
        jobs::statements(),
        managed_jobs::statements(),
        job_nodes::statements(),
        placement::statements(),
        preemption::statements(),
        runs::statements(),
        volumes::statements(),
        wait_classes::statements(),
    ]
    .concat();
    all.extend([
        super::invariant_queries::EVENTS,
        super::invariant_queries::RUNS,
        super::invariant_queries::JOBS,
        super::invariant_queries::INSTANCES,
    ]);
    all.extend([
        super::invariant_queries::FLEETS,
        super::invariant_queries::VOLUMES,
        super::invariant_queries::ATTACHMENTS,
    ]);
    all.push(super::invariant_queries::HELD_BY_FINISHED);
    all.extend([super::invariant_queries::HEADLESS_CLASSES, super::invariant_queries::LEFT_IN_CLASS]);
    all
}

use windlass_engine::LeaseKey;
use windlass_model::{event::Event, id::ProjectId};

use super::{
    Change, Db, DbError, Expect, Val, Values,
    events::{self, EventContext, EventTarget},
    unit::assign,
};

/// Change of a second row under its own lease, with the same check as the unit's guard.
fn guarded_update(table: &'static str, held: LeaseKey, set: Values) -> Change {
    let mut params: Vec<Val> = vec![held.id.into(), held.token.into()];
    let columns: Vec<_> =
        set.iter().enumerate().map(|(n, (column, _))| assign(column, &format!("${}", n + 3))).collect();
    params.extend(set.into_iter().map(|(_, value)| value));
    let sql = format!("UPDATE {table} SET {} WHERE id = $1 AND lock_token = $2", columns.join(", "));
    Change::Exec { sql: sql.into(), params, expect: Expect::One }
}

/// Rows of one event about one row, written under its lease.
fn event_rows(
    db: &Db,
    held: LeaseKey,
    project: ProjectId,
    event: &Event,
    name: &str,
) -> Result<Vec<Change>, DbError> {
    let targets = [EventTarget { entity: event.entity, id: event.id, name }];
    let place =
        EventContext { project: Some(project), user: None, lock_token: Some(held.token), targets: &targets };
    events::append(db, event, &place)
}
