//! Table `runs`. Columns that only a pipeline writes are written by its guarded apply (`Unit::apply`).

use windlass_model::{
    id::{FleetId, GatewayId, ManagedJobId, ProjectId, RunId, UserId},
    run::Status,
    time::{Span, Timestamp},
};

use super::{
    Change, Db, DbError, Expect, Unit, Val,
    filter::{Filter, Page},
    record::{record, statements},
};
use crate::params;

record! {
    pub struct Run {
        pub id: RunId,
        pub project_id: ProjectId,
        pub user_id: UserId,
        pub repo_id: Option<String>,
        pub fleet_id: Option<FleetId>,
        pub gateway_id: Option<GatewayId>,
        pub name: String,
        /// JSON: the effective run spec.
        pub spec: String,
        /// JSON: url and model of a service.
        pub service: Option<String>,
        pub status: Status,
        pub finished: bool,
        pub status_message: Option<String>,
        pub termination_reason: Option<String>,
        pub termination_message: Option<String>,
        pub stop_asked_at: Option<Timestamp>,
        pub abort_asked: bool,
        pub deployment_num: i64,
        pub desired_replicas: i64,
        pub scaled_at: Option<Timestamp>,
        pub priority: i64,
        pub submitted_at: Timestamp,
        pub last_processed_at: Timestamp,
        pub next_triggered_at: Option<Timestamp>,
        pub retry_since: Option<Timestamp>,
        pub retry_count: i64,
        pub finished_at: Option<Timestamp>,
        pub deleted: bool,
        pub idempotency_hash: Option<String>,
        /// JSON: state that the run's pipeline keeps between passes.
        pub tracking: Option<String>,
        /// JSON: the specification of the last completed deployment.
        pub settled_spec: Option<String>,
        /// Managed job of which it is an attempt.
        pub managed_job_id: Option<ManagedJobId>,
        /// JSON: the locations that it avoids or prefers.
        pub places: Option<String>,
        pub lock_epoch: i64,
    }
}

record! {
    pub struct NewRun {
        pub id: RunId,
        pub project_id: ProjectId,
        pub user_id: UserId,
        pub repo_id: Option<String>,
        pub name: String,
        pub spec: String,
        pub service: Option<String>,
        pub gateway_id: Option<GatewayId>,
        pub status: Status,
        pub desired_replicas: i64,
        pub priority: i64,
        pub next_triggered_at: Option<Timestamp>,
        pub idempotency_key: Option<String>,
        pub idempotency_hash: Option<String>,
        pub managed_job_id: Option<ManagedJobId>,
        pub places: Option<String>,
    }
}

/// A run with the names that responses show.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedRun {
    pub run: Run,
    pub project_name: String,
    pub user_name: String,
    pub fleet_name: Option<String>,
}

const NAMES: &str = "p.name, u.name, f.name";
const JOINS: &str = "JOIN projects p ON p.id = r.project_id JOIN users u ON u.id = r.user_id \
                     LEFT JOIN fleets f ON f.id = r.fleet_id";

statements! {
    OLD_LOGS = "SELECT {} FROM runs r WHERE r.finished AND NOT r.logs_removed AND (r.finished_at < now_us() - $1 \
                OR r.deleted AND r.finished_at < now_us() - $2) ORDER BY r.finished_at LIMIT $3", RunWithLogs::columns("r");
    LOGS_REMOVED = "UPDATE runs SET logs_removed = TRUE WHERE id = $1 AND finished";
    FIND = "SELECT {}, {NAMES} FROM runs r {JOINS} WHERE r.id = $1", Run::columns("r");
    FIND_BY_NAME = "SELECT {}, {NAMES} FROM runs r {JOINS} WHERE r.project_id = $1 AND r.name = $2 \
                    AND NOT r.deleted", Run::columns("r");
    FIND_ALL = "SELECT {}, {NAMES} FROM runs r {JOINS} \
                WHERE r.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))", Run::columns("r");
    FIND_BY_KEY = "SELECT {}, {NAMES} FROM runs r {JOINS} WHERE r.project_id = $1 AND r.user_id = $2 \
                   AND r.idempotency_key = $3", Run::columns("r");
    /// Not guarded by the lock: it is a request that the pipeline reads, in columns that no pipeline writes.
    REQUEST_STOP = "UPDATE runs SET stop_asked_at = coalesce(stop_asked_at, now_us()), \
                stop_by_user_id = coalesce(stop_by_user_id, $3), abort_asked = (abort_asked OR $2), \
                due_at = NULL WHERE id = $1 AND NOT finished";
    MARK_DUE = "UPDATE runs SET due_at = NULL WHERE id = $1 AND NOT finished";
    MARK_SOON_DUE = "UPDATE runs SET due_at = {DUE_SOON} WHERE id = $1 AND NOT finished";
    /// Hides a finished run, so that its name is free again.
    DELETE = "UPDATE runs SET deleted = TRUE WHERE id = $1 AND finished AND NOT deleted";
    /// Only if the spec is unchanged and no stop was requested. A pipeline writes these columns only to roll back, also
    /// only if they are unchanged.
    UPDATE_SPEC = "UPDATE runs SET spec = $3, priority = $4, deployment_num = deployment_num + $5, due_at = NULL \
                   WHERE id = $1 AND spec = $2 AND NOT finished AND stop_asked_at IS NULL";
    /// The current deployment of a service, as it was before an update.
    KEEP_DEPLOYMENT = "INSERT INTO deployments (run_id, num, at, user_id, spec) \
                       SELECT r.id, r.deployment_num, r.submitted_at, r.user_id, r.spec FROM runs r \
                       WHERE r.id = $1 AND r.service IS NOT NULL ON CONFLICT (run_id, num) DO NOTHING";
    /// The current deployment, after an update. One that changes in place keeps its number.
    RECORD_DEPLOYMENT = "INSERT INTO deployments (run_id, num, at, user_id, spec) \
                         SELECT r.id, r.deployment_num, now_us(), CAST($2 AS TEXT), r.spec FROM runs r \
                         WHERE r.id = $1 AND r.service IS NOT NULL \
                         ON CONFLICT (run_id, num) DO UPDATE SET spec = excluded.spec";
    TRIM_DEPLOYMENTS = "DELETE FROM deployments WHERE run_id = $1 AND num < (SELECT max(d.num) - 50 FROM deployments d \
                        WHERE d.run_id = $1)";
    DEPLOYMENTS = "SELECT d.num, d.at, u.name, d.spec FROM deployments d LEFT JOIN users u ON u.id = d.user_id \
                   WHERE d.run_id = $1 ORDER BY d.num DESC LIMIT 100";
    SET_SERVICE = "UPDATE runs SET service = $2, gateway_id = $3 WHERE id = $1 AND NOT finished";
    COUNT_ACTIVE = "SELECT count(*) FROM runs WHERE project_id = $1 AND NOT finished";
}

impl NamedRun {
    fn read(mut row: super::Row) -> Result<Self, DbError> {
        Ok(Self {
            run: Run::read_from(&mut row, 0)?,
            project_name: row.text(Run::WIDTH)?,
            user_name: row.text(Run::WIDTH + 1)?,
            fleet_name: row.opt_text(Run::WIDTH + 2)?,
        })
    }
}

/// Delay of the first pass, in case no job makes the run due earlier.
const FIRST_PASS_DELAY_US: i64 = 5_000_000;

/// Inserts only the run; its jobs (`jobs::insert`) and events (`events::append`) go into the same unit. A name in use
/// is a conflict on `runs_name_key`, a repeated idempotency key one on `runs_idempotency_key`.
pub fn insert(run: NewRun) -> Change {
    let starts = run.status == Status::Submitted;
    let mut values = run.into_values();
    if starts {
        // Its jobs are inserted in the same unit, and there is nothing to do until one of them changes, which makes the
        // run due.
        values.push(("due_at", Val::NowPlus(FIRST_PASS_DELAY_US)));
    }
    values.extend([("submitted_at", Val::Now), ("last_processed_at", Val::Now)]);
    Change::Insert { table: "runs", values }
}

/// Finds a run by id, including deleted ones.
pub async fn find(db: &Db, id: RunId) -> Result<Option<NamedRun>, DbError> {
    db.query_opt(FIND.as_str(), params![id]).await?.map(NamedRun::read).transpose()
}

pub async fn find_by_name(db: &Db, project: ProjectId, name: &str) -> Result<Option<NamedRun>, DbError> {
    db.query_opt(FIND_BY_NAME.as_str(), params![project, name]).await?.map(NamedRun::read).transpose()
}

/// Run that an earlier request with this key created; `idempotency_hash` shows whether it was the same request.
pub async fn find_by_key(
    db: &Db,
    project: ProjectId,
    user: UserId,
    key: &str,
) -> Result<Option<NamedRun>, DbError> {
    let rows = db.query_opt(FIND_BY_KEY.as_str(), params![project, user, key]).await?;
    rows.map(NamedRun::read).transpose()
}

/// Selection of runs: newest first unless the page specifies otherwise, ties by id.
#[derive(Clone, Debug, Default)]
pub struct Query {
    /// `None`: all projects (an administrator). One project uses the index of its runs.
    pub projects: Option<Vec<ProjectId>>,
    pub user: Option<UserId>,
    pub repo_id: Option<String>,
    pub only_active: bool,
    pub page: Page,
}

record! {
    /// A row of a list, before the run itself is read.
    pub struct RunListEntry {
        pub id: RunId,
        pub submitted_at: Timestamp,
        pub finished: bool,
    }
}

pub async fn list(db: &Db, query: &Query) -> Result<Vec<RunListEntry>, DbError> {
    let (sql, params) = list_sql(query);
    db.query(sql, params).await?.into_iter().map(RunListEntry::read).collect()
}

/// Existing runs among these, in no order.
pub async fn find_all(db: &Db, ids: &[RunId]) -> Result<Vec<NamedRun>, DbError> {
    db.query(FIND_ALL.as_str(), params![Val::list(ids)]).await?.into_iter().map(NamedRun::read).collect()
}

fn list_sql(query: &Query) -> (String, Vec<Val>) {
    let mut filter = Filter::new();
    filter.and("NOT r.deleted");
    match query.projects.as_deref() {
        None => {}
        Some([one]) => filter.is("r.project_id = ?", *one),
        Some(many) => filter.and_in("r.project_id", many),
    }
    if query.only_active {
        filter.and("NOT r.finished");
    }
    if let Some(user) = query.user {
        filter.is("r.user_id = ?", user);
    }
    if let Some(repo) = &query.repo_id {
        filter.is("r.repo_id = ?", repo);
    }
    filter.after("r.submitted_at", "r.id", &query.page);
    let (found, params) = filter.done();
    let page = query.page.order("r.submitted_at", "r.id");
    (format!("SELECT {} FROM runs r{found}{page}", RunListEntry::columns("r")), params)
}

/// Stores the request to stop and makes the run due; the run's pipeline performs it. Stale if the run is finished.
pub fn request_stop(id: RunId, abort: bool, by: UserId) -> Change {
    exec(&REQUEST_STOP, params![id, abort, by])
}

/// As [`request_stop`], without an effect on a finished run.
pub(super) fn request_stop_if_active(id: RunId, abort: bool, by: UserId) -> Change {
    Change::Exec { sql: REQUEST_STOP.as_str().into(), params: params![id, abort, by], expect: Expect::Any }
}

/// Makes the run due at once, unless it is finished.
pub(super) fn mark_due(id: RunId) -> Change {
    Change::Exec { sql: MARK_DUE.as_str().into(), params: params![id], expect: Expect::Any }
}

/// Due within half a second: further changes usually follow within that time. A run that is already due stays due. A
/// pass in progress would overwrite a time, but not that the run was marked due.
pub(super) const DUE_SOON: &str = "CASE WHEN lock_token IS NOT NULL THEN NULL \
    WHEN due_at > now_us() + 500000 THEN now_us() + 500000 ELSE due_at END";

/// Makes the run due shortly. A placed job is usually running, and an ending one finished, by then, so that one pass
/// handles both changes.
pub(super) fn mark_due_soon(id: RunId) -> Change {
    Change::Exec { sql: MARK_SOON_DUE.as_str().into(), params: params![id], expect: Expect::Any }
}

/// Replaces the spec of an active run. Stale if the spec has changed, or the run is ending.
pub fn update_spec(id: RunId, old: &str, new: &str, priority: i64, new_deployment: bool) -> Change {
    exec(&UPDATE_SPEC, params![id, old, new, priority, i64::from(new_deployment)])
}

record! {
    /// A deployment of a service that was applied.
    pub struct Deployment {
        pub num: i64,
        pub at: Timestamp,
        /// `None`: the server rolled back to it.
        pub user_name: Option<String>,
        pub spec: String,
    }
}

/// Deployments of a service, newest first.
pub async fn deployments(db: &Db, run: RunId) -> Result<Vec<Deployment>, DbError> {
    db.query(DEPLOYMENTS.as_str(), params![run]).await?.into_iter().map(Deployment::read).collect()
}

impl Unit {
    /// Stores the deployment of a service that an update is about to replace.
    #[must_use]
    pub fn keep_deployment(self, run: RunId) -> Self {
        self.exec(KEEP_DEPLOYMENT.as_str(), params![run])
    }

    /// Stores the deployment of a service that an update has set. `by`: `None` for the server.
    #[must_use]
    pub fn record_deployment(self, run: RunId, by: Option<UserId>) -> Self {
        self.exec(RECORD_DEPLOYMENT.as_str(), params![run, by]).exec(TRIM_DEPLOYMENTS.as_str(), params![run])
    }
}

/// Sets the URL of a service. Stale if the run is finished.
pub fn set_service(id: RunId, service: Option<&str>, gateway: Option<GatewayId>) -> Change {
    exec(&SET_SERVICE, params![id, service, gateway])
}

/// Stale unless the run is finished.
pub fn delete(id: RunId) -> Change {
    exec(&DELETE, params![id])
}

record! {
    /// A run with logs.
    pub struct RunWithLogs {
        pub id: RunId,
        pub project_id: ProjectId,
    }
}

/// Runs that ended longer ago than `keep` (`keep_deleted` for deleted ones) and may still have logs; oldest first.
pub async fn list_with_old_logs(
    db: &Db,
    keep: Span,
    keep_deleted: Span,
    limit: usize,
) -> Result<Vec<RunWithLogs>, DbError> {
    let rows = db.query(OLD_LOGS.as_str(), params![keep.0, keep_deleted.0, limit]).await?;
    rows.into_iter().map(RunWithLogs::read).collect()
}

/// Records that the logs of this run are deleted.
pub async fn mark_logs_removed(db: &Db, id: RunId) -> Result<(), DbError> {
    db.write(Unit::new().exec(LOGS_REMOVED.as_str(), params![id])).await?.done().map(drop)
}

pub async fn count_active(db: &Db, project: ProjectId) -> Result<i64, DbError> {
    db.query(COUNT_ACTIVE.as_str(), params![project]).await?.first().map_or(Ok(0), |row| row.int(0))
}

fn exec(sql: &'static str, params: Vec<Val>) -> Change {
    Change::Exec { sql: sql.into(), params, expect: Expect::One }
}

/// For tests of query plans: the query of `list`.
pub async fn explain_list(db: &Db, query: &Query) -> Result<String, DbError> {
    let (sql, params) = list_sql(query);
    db.explain(&sql, params).await
}
