//! Tables `managed_jobs` and `managed_job_tasks`, and the row under which slots are counted.

use uuid::Uuid;
use windlass_model::{
    id::{ManagedJobId, ProjectId, UserId},
    managed_job::{ScheduleState, Status},
    run,
    time::{Span, Timestamp},
};

use super::{
    Change, Db, DbError, Expect, Val,
    filter::Filter,
    pipeline_rows::wait_classes,
    record::{record, statements},
};
use crate::params;

record! {
    pub struct ManagedJob {
        pub id: ManagedJobId,
        pub number: i64,
        pub project_id: ProjectId,
        pub user_id: UserId,
        pub name: String,
        /// JSON: its tasks and their order.
        pub plan: String,
        /// JSON: the archives of each task.
        pub files: String,
        pub rank: i64,
        pub copies: i64,
        pub priority: i64,
        pub status: Status,
        pub schedule: ScheduleState,
        /// True while it holds an alive slot.
        pub claimed: bool,
        pub cancel_asked_at: Option<Timestamp>,
        pub cancel_graceful_us: Option<i64>,
        pub idempotency_hash: Option<String>,
        pub submitted_at: Timestamp,
        pub finished: bool,
        pub lock_epoch: i64,
    }
}

record! {
    pub struct NewManagedJob {
        pub id: ManagedJobId,
        pub project_id: ProjectId,
        pub user_id: UserId,
        pub name: String,
        pub plan: String,
        pub files: String,
        pub secrets_sealed: Option<Vec<u8>>,
        pub rank: i64,
        pub copies: i64,
        pub priority: i64,
        pub status: Status,
        pub schedule: ScheduleState,
        pub idempotency_key: Option<String>,
        pub idempotency_hash: Option<String>,
    }
}

record! {
    pub struct Task {
        pub id: Uuid,
        pub job_id: ManagedJobId,
        pub task: i64,
        pub status: Status,
        pub schedule: ScheduleState,
        /// JSON: its durable state.
        pub record: String,
        pub wants_slot: bool,
        pub granted: bool,
    }
}

/// A job with its tasks and the names that responses show, all from one snapshot.
#[derive(Clone, Debug, PartialEq)]
pub struct JobWithTasks {
    pub job: ManagedJob,
    /// In the order of their numbers.
    pub tasks: Vec<Task>,
    pub project_name: String,
    pub user_name: String,
}

const NAMES: &str = "p.name, u.name";
const JOINS: &str = "JOIN projects p ON p.id = m.project_id JOIN users u ON u.id = m.user_id \
                     JOIN managed_job_tasks t ON t.job_id = m.id";

statements! {
    /// Consecutive numbers for all copies of a call.
    TAKE_NUMBERS = "UPDATE managed_job_slots SET last_number = last_number + $1 WHERE id = 1 RETURNING last_number";
    INSERT = "INSERT INTO managed_jobs (id, project_id, user_id, name, plan, files, secrets_sealed, rank, copies, \
              priority, status, schedule, idempotency_key, idempotency_hash, number, submitted_at, last_processed_at) \
              VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, \
              (SELECT s.last_number - $9 + 1 + $8 FROM managed_job_slots s WHERE s.id = 1), now_us(), now_us())";
    FIND = "SELECT {}, {NAMES} FROM managed_jobs m {JOINS} WHERE m.project_id = $1 AND m.number = $2 ORDER BY t.task",
           columns();
    BY_KEY = "SELECT {}, {NAMES} FROM managed_jobs m {JOINS} WHERE m.project_id = $1 AND m.user_id = $2 \
              AND m.idempotency_key = $3 ORDER BY t.task", columns();
    COPIES = "SELECT m.id, m.number FROM managed_jobs m WHERE m.number >= $1 AND m.number < $2 ORDER BY m.number";
    /// One row for each submission of each node, the newest of a node last.
    ATTEMPT_STATES = "SELECT r.name, r.status, j.instance_id, j.status_message, j.shortfalls, \
                      CASE WHEN j.parked THEN j.wait_class END, CASE WHEN j.parked THEN j.job_spec END FROM runs r \
                      JOIN jobs j ON j.run_id = r.id WHERE r.managed_job_id IN \
                      (SELECT value FROM json_each(CAST($1 AS TEXT))) AND r.name IN \
                      (SELECT value FROM json_each(CAST($2 AS TEXT))) ORDER BY r.name, j.submission_num, j.job_num";
    RESUME = "UPDATE managed_jobs SET status = $2, schedule = 'INACTIVE', secrets_sealed = $3, claimed = FALSE, \
              finished = FALSE, finished_at = NULL, cancel_asked_at = NULL, cancel_by_user_id = NULL, \
              cancel_graceful_us = NULL, due_at = NULL WHERE id = $1 AND finished";
    RESUME_TASK = "UPDATE managed_job_tasks SET status = $3, schedule = $4, record = $5, wants_slot = FALSE, \
                   granted = FALSE WHERE job_id = $1 AND task = $2";
    SECRETS = "SELECT plan, secrets_sealed FROM managed_jobs WHERE id = $1 AND secrets_sealed IS NOT NULL";
}

/// Allocates numbers for the copies, before their `insert`. Returns the last of them.
pub fn allocate_numbers(copies: i64) -> Change {
    Change::Query { sql: TAKE_NUMBERS.as_str().into(), params: params![copies] }
}

/// Inserts only the job; its tasks and events go into the same unit. A repeated key is a conflict on
/// `managed_jobs_idempotency_key`.
pub fn insert(job: NewManagedJob) -> Change {
    let params = job.into_values().into_iter().map(|(_, value)| value).collect();
    Change::Exec { sql: INSERT.as_str().into(), params, expect: Expect::One }
}

pub fn insert_task(task: Task) -> Change {
    Change::Insert { table: "managed_job_tasks", values: task.into_values() }
}

/// Columns of a job next to each of its tasks, in one statement: two would return a job and tasks from different
/// snapshots. The long texts of the job are only in the row of its first task.
pub(crate) fn columns() -> String {
    let once = |columns: &str, name: &str| {
        columns.replace(&format!("m.{name}"), &format!("CASE WHEN t.task = 0 THEN m.{name} ELSE '' END"))
    };
    let job = once(&once(&ManagedJob::columns("m"), "plan"), "files");
    format!("{job}, {}", Task::columns("t"))
}

/// Index of the first column that a SELECT adds to [`columns`].
pub(crate) const WIDTH: usize = ManagedJob::WIDTH + Task::WIDTH;

/// Jobs with their tasks, from rows in which those of a job are adjacent and ordered by number. `rest` is read from the
/// row of the first task.
pub(crate) fn group_rows<T>(
    rows: Vec<super::Row>,
    rest: impl Fn(&super::Row) -> Result<T, DbError>,
) -> Result<Vec<(ManagedJob, Vec<Task>, T)>, DbError> {
    let mut all: Vec<(ManagedJob, Vec<Task>, T)> = Vec::new();
    for mut row in rows {
        let task = Task::read_from(&mut row, ManagedJob::WIDTH)?;
        match all.last_mut() {
            Some((job, tasks, _)) if job.id == task.job_id => tasks.push(task),
            Some(_) | None => {
                let rest = rest(&row)?;
                all.push((ManagedJob::read_from(&mut row, 0)?, vec![task], rest));
            }
        }
    }
    Ok(all)
}

fn jobs_from_rows(rows: Vec<super::Row>) -> Result<Vec<JobWithTasks>, DbError> {
    let all = group_rows(rows, |row| Ok((row.text(WIDTH)?, row.text(WIDTH + 1)?)))?;
    let named = all.into_iter().map(|(job, tasks, (project_name, user_name))| JobWithTasks {
        job,
        tasks,
        project_name,
        user_name,
    });
    Ok(named.collect())
}

pub async fn find(db: &Db, project: ProjectId, number: i64) -> Result<Option<JobWithTasks>, DbError> {
    Ok(jobs_from_rows(db.query(FIND.as_str(), params![project, number]).await?)?.pop())
}

/// First job that an earlier request with this key created.
pub async fn find_by_key(
    db: &Db,
    project: ProjectId,
    user: UserId,
    key: &str,
) -> Result<Option<JobWithTasks>, DbError> {
    Ok(jobs_from_rows(db.query(BY_KEY.as_str(), params![project, user, key]).await?)?.pop())
}

/// Ids and numbers of the copies of one call, from the number of the first.
pub async fn list_copies(db: &Db, first: i64, count: i64) -> Result<Vec<(ManagedJobId, i64)>, DbError> {
    let rows = db.query(COPIES.as_str(), params![first, first + count]).await?;
    rows.iter().map(|row| Ok((row.id(0)?, row.int(1)?))).collect()
}

/// State of a node of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptState {
    pub run_name: String,
    pub run_status: Option<run::Status>,
    pub has_instance: bool,
    pub message: Option<String>,
    /// JSON: the reasons why offers do not fit.
    pub shortfalls: Option<String>,
}

/// Nodes of those of these runs that are attempts of these jobs.
pub async fn attempt_states(
    db: &Db,
    jobs: &[ManagedJobId],
    names: &[String],
) -> Result<Vec<AttemptState>, DbError> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let rows = db.query(ATTEMPT_STATES.as_str(), vec![Val::list(jobs), Val::list(names)]).await?;
    let classes = rows.iter().map(|row| row.opt_text(5)).collect::<Result<Vec<_>, _>>()?;
    let reasons = wait_classes::reasons(db, &classes.iter().flatten().map(String::as_str).collect()).await?;
    let read = |row: &super::Row| -> Result<AttemptState, DbError> {
        if let (Some(class), Some(spec)) = (row.opt_text(5)?, row.opt_text(6)?) {
            let run_name = row.text(0)?;
            let row_name = format_args!("of run `{run_name}`");
            let reason = reasons.get(&class).map(|reason| reason.for_spec(row_name, &spec)).transpose()?;
            let reason = reason.unwrap_or_default();
            return Ok(AttemptState {
                run_name,
                run_status: row.text(1)?.parse().ok(),
                has_instance: false,
                message: reason.message,
                shortfalls: reason.shortfalls,
            });
        }
        Ok(AttemptState {
            run_name: row.text(0)?,
            run_status: row.text(1)?.parse().ok(),
            has_instance: row.opt_text(2)?.is_some(),
            message: row.opt_text(3)?,
            shortfalls: row.opt_text(4)?,
        })
    };
    rows.iter().map(read).collect()
}

/// Makes a finished job active again, with `resume_task` for each of its tasks in the same unit.
pub fn resume(id: ManagedJobId, status: Status, secrets_sealed: Option<Vec<u8>>) -> Change {
    let params = params![id, status, secrets_sealed];
    Change::Exec { sql: RESUME.as_str().into(), params, expect: Expect::One }
}

pub fn resume_task(task: &Task) -> Change {
    let params = params![task.job_id, task.task, task.status, task.schedule, task.record.clone()];
    Change::Exec { sql: RESUME_TASK.as_str().into(), params, expect: Expect::One }
}

/// Plan and sealed values, if there are any; never part of `ManagedJob`, so that no list or log contains them.
pub async fn secrets(db: &Db, id: ManagedJobId) -> Result<Option<(String, Vec<u8>)>, DbError> {
    let row = db.query_opt(SECRETS.as_str(), params![id]).await?;
    row.map(|row| Ok((row.text(0)?, row.bytes(1)?))).transpose()
}

/// Selection of jobs, newest first.
#[derive(Clone, Debug, Default)]
pub struct Query {
    pub project: Option<ProjectId>,
    /// Only jobs of these projects.
    pub projects: Option<Vec<ProjectId>>,
    pub user: Option<UserId>,
    pub name: Option<String>,
    pub statuses: Vec<Status>,
    pub numbers: Option<Vec<i64>>,
    pub skip_finished: bool,
    pub since: Option<Timestamp>,
    /// Only jobs with a lower number.
    pub before: Option<i64>,
    pub limit: i64,
}

impl Query {
    fn filter(&self) -> Filter {
        let mut filter = Filter::new();
        if let Some(project) = self.project {
            filter.is("m.project_id = ?", project);
        }
        if let Some(projects) = &self.projects {
            filter.and_in("m.project_id", projects);
        }
        if let Some(user) = self.user {
            filter.is("m.user_id = ?", user);
        }
        if let Some(name) = &self.name {
            filter.is("m.name = ?", name);
        }
        if !self.statuses.is_empty() {
            let words: Vec<&str> = self.statuses.iter().map(|status| status.as_str()).collect();
            filter.and_in("m.status", &words);
        }
        if let Some(numbers) = &self.numbers {
            filter.and_in("CAST(m.number AS TEXT)", numbers);
        }
        if self.skip_finished {
            filter.and("NOT m.finished");
        }
        if let Some(since) = self.since {
            filter.is("m.submitted_at >= ?", since);
        }
        if let Some(before) = self.before {
            filter.is("m.number < ?", before);
        }
        filter
    }
}

pub async fn list(db: &Db, query: &Query) -> Result<Vec<JobWithTasks>, DbError> {
    let (found, params) = query.filter().done();
    let (columns, limit) = (columns(), query.limit.max(0));
    let sql = format!(
        "SELECT {columns}, {NAMES} FROM (SELECT m.* FROM managed_jobs m{found} ORDER BY m.number DESC LIMIT {limit}) m \
         {JOINS} ORDER BY m.number DESC, t.task"
    );
    jobs_from_rows(db.query(sql, params).await?)
}

/// Stores the request to cancel on all of these, in one statement; returns the affected rows, by number.
pub fn request_cancel(query: &Query, by: UserId, graceful: Option<Span>) -> Change {
    let mut filter = query.filter();
    filter.and("NOT m.finished");
    let by = filter.bind(by);
    let graceful = filter.bind(graceful.map(|span| span.0));
    let (found, params) = filter.done();
    let sql = format!(
        "UPDATE managed_jobs SET cancel_asked_at = coalesce(cancel_asked_at, now_us()), \
         cancel_by_user_id = coalesce(cancel_by_user_id, CAST({by} AS TEXT)), \
         cancel_graceful_us = coalesce(CAST({graceful} AS BIGINT), cancel_graceful_us), due_at = NULL \
         WHERE id IN (SELECT m.id FROM managed_jobs m{found}) RETURNING id, number, name"
    );
    Change::Query { sql: sql.into(), params }
}
