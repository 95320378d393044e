//! Rows of managed jobs, one for each task.

use std::cmp::Ordering;

use windlass_api::{
    managed_jobs::ManagedJob,
    rows::{ManagedJobRow, Rows, RowsRequest},
};
use windlass_model::{
    deadline_policy::Market, id::ManagedJobId, managed_job::record::TaskRecord, time::Timestamp,
};

use super::{FilterFields, RequestedPage, directed, page_of, parse_sort, visible_projects};
use crate::{
    app::App,
    auth::Caller,
    db::{costs, documents::MANAGED_TASK_RECORD, managed_jobs::Task},
    error::Result,
    services::managed_jobs::list_in_projects,
};

/// Maximum number of jobs that are read for a list.
const READ_MAX: i64 = 2000;

#[derive(Clone, Copy)]
enum Column {
    SubmittedAt,
    Name,
    Status,
    User,
    Cost,
    Deadline,
}

const SORTS: [(&str, Column); 6] = [
    ("submitted_at", Column::SubmittedAt),
    ("name", Column::Name),
    ("status", Column::Status),
    ("user", Column::User),
    ("cost", Column::Cost),
    ("deadline", Column::Deadline),
];

pub(crate) async fn list(app: &App, caller: &Caller, requested: RowsRequest) -> Result<Rows<ManagedJobRow>> {
    let page = RequestedPage::of(&requested)?;
    let (column, descending) =
        parse_sort(requested.sort.as_deref(), &SORTS)?.unwrap_or((Column::SubmittedAt, true));
    let projects = visible_projects(app, caller, &requested.projects).await?;
    let as_of = app.db().now().await?;
    let found = list_in_projects(app, projects, None, READ_MAX).await?;
    let has_more = i64::try_from(found.len()).is_ok_and(|count| count >= READ_MAX);
    let all = to_rows(app, &found).await?;
    let order =
        |one: &ManagedJobRow, other: &ManagedJobRow| directed(descending, compare(column, one, other));
    Ok(page_of(all, &requested, page, fields, order, (has_more, as_of)))
}

/// Rows of the tasks of one job, if it exists.
pub(crate) async fn find(app: &App, number: i64) -> Result<Vec<ManagedJobRow>> {
    to_rows(app, &list_in_projects(app, None, Some(vec![number]), 1).await?).await
}

fn fields(row: &ManagedJobRow) -> FilterFields<'_> {
    FilterFields {
        status: &row.status,
        user: Some(&row.user),
        kind: Some(&row.schedule_state),
        fleet: None,
        at: row.submitted_at,
        texts: [Some(&row.name), Some(&row.user), row.reason.as_deref(), None],
        id: row.id.clone(),
    }
}

fn compare(column: Column, one: &ManagedJobRow, other: &ManagedJobRow) -> Ordering {
    // A task without a deadline is the least urgent one.
    let deadline = |row: &ManagedJobRow| row.deadline.unwrap_or(Timestamp(i64::MAX));
    match column {
        Column::SubmittedAt => (one.submitted_at, one.job_id).cmp(&(other.submitted_at, other.job_id)),
        Column::Name => one.name.cmp(&other.name),
        Column::Status => one.status.cmp(&other.status),
        Column::User => one.user.cmp(&other.user),
        Column::Cost => one.cost.total_cmp(&other.cost),
        Column::Deadline => deadline(one).cmp(&deadline(other)),
    }
}

async fn to_rows(app: &App, found: &[(ManagedJob, Vec<Task>)]) -> Result<Vec<ManagedJobRow>> {
    let ids: Vec<ManagedJobId> = found.iter().map(|(job, _)| ManagedJobId(job.id)).collect();
    let costs = costs::by_run_of_jobs(app.db(), &ids).await?;
    let mut rows = Vec::new();
    for (job, stored) in found {
        for (task, stored) in job.tasks.iter().zip(stored) {
            let market =
                MANAGED_TASK_RECORD.decode::<TaskRecord>(stored.id, &stored.record)?.market.map(|market| {
                    match market {
                        Market::Spot => "spot".to_owned(),
                        Market::OnDemand => "on-demand".to_owned(),
                    }
                });
            let cost = |run: &String| costs.get(&(ManagedJobId(job.id), run.clone()));
            rows.push(ManagedJobRow {
                id: format!("{}/{}", job.job_id, task.task_id),
                uuid: job.id,
                job_id: job.job_id,
                task_id: task.task_id,
                tasks: job.tasks.len(),
                project: job.project_name.clone(),
                name: job.name.clone(),
                task: task.name.clone(),
                user: job.user.clone(),
                status: task.status.clone(),
                schedule_state: task.schedule_state.clone(),
                reason: task.reason.clone(),
                attempt: task.attempt,
                recoveries: task.recovery_count,
                market,
                placement: task.placement.clone(),
                resources: task.resources.clone(),
                deadline: task.deadline.map(|deadline| deadline.due_at),
                slack_seconds: task.deadline.map(|deadline| deadline.spare),
                cost: task.runs.iter().filter_map(cost).sum(),
                submitted_at: job.created_at,
                started_at: task.start_at,
                finished_at: task.end_at,
            });
        }
    }
    Ok(rows)
}
