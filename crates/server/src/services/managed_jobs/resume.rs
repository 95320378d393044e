//! Resumes a finished managed job under its number.

use windlass_api::{managed_jobs as wire, operations::ResumeManagedJob};
use windlass_model::{
    event::Entity,
    managed_job::{
        Status,
        plan::ManagedJobPlan,
        record::{TaskRecord, job_status},
    },
    skypilot::{SecretValue, TaskSecrets},
};

use super::read_one;
use crate::{
    app::App,
    auth::ProjectScope,
    db::{
        Unit, WriteOutcome,
        documents::{MANAGED_JOB_PLAN, MANAGED_TASK_RECORD},
        managed_jobs::{self as rows, JobWithTasks, Task},
    },
    encryption::AssociatedData,
    error::{Error, Result},
    events::{EventSubject, note},
    hints::Hint,
};

/// Starts again every task that did not succeed. Its earlier attempts stay, and their logs with them.
pub async fn resume(
    app: &App,
    scope: &ProjectScope,
    requested: &wire::ResumeRequest,
) -> Result<wire::ManagedJob> {
    let number = requested.job_id;
    let JobWithTasks { job, tasks, .. } =
        rows::find(app.db(), scope.project.id, number).await?.ok_or_else(|| Error::absent("Managed job"))?;
    scope.require_ownership::<ResumeManagedJob>(Some(job.user_id), &format!("managed job {number}"))?;
    if !job.finished {
        return Err(not_ended(number, job.status));
    }
    if job.status == Status::Succeeded {
        return Err(Error::refused(format!("managed job {number} succeeded; launch it again instead")));
    }
    let plan: ManagedJobPlan = MANAGED_JOB_PLAN.decode(job.id, &job.plan)?;
    let resumed = resumed_tasks(tasks)?;
    let secrets = task_secrets(number, &plan, &resumed, requested)?;
    let belongs = AssociatedData::row("managed_jobs", "secrets_sealed", job.id.0);
    let has_secrets = secrets.iter().any(|of_task| !of_task.is_empty());
    let plain = has_secrets.then(|| serde_json::to_vec(&secrets)).transpose()?;
    let sealed = plain.map(|plain| app.keys().seal(&belongs, &plain)).transpose()?;
    let is_primary = |task: &Task| u32::try_from(task.task).is_ok_and(|task| plan.is_primary(task));
    let status = job_status(resumed.iter().filter(|task| is_primary(task)).map(|task| task.status));
    let about = EventSubject {
        entity: Entity::ManagedJob,
        id: job.id.0,
        name: &job.name,
        project: Some(scope.project.id),
    };
    let by = Some(scope.caller.user.id);
    let unit = Unit::new()
        .and([rows::resume(job.id, status, sealed)])
        .and(resumed.iter().map(rows::resume_task))
        .and(note(app.db(), by, &about, "resumed", "Managed job resumed".to_owned())?);
    match app.db().write(unit).await? {
        WriteOutcome::Done { .. } => {}
        // Another request has resumed it.
        WriteOutcome::Stale { .. } => return Err(not_ended(number, status)),
    }
    app.wake(&[Hint::ManagedJobs]);
    read_one(app, scope, number).await
}

fn not_ended(number: i64, status: Status) -> Error {
    Error::refused(format!("managed job {number} has not ended: its status is {status}"))
}

fn resumed_tasks(tasks: Vec<Task>) -> Result<Vec<Task>> {
    let resume = |task: Task| {
        let record = MANAGED_TASK_RECORD.decode::<TaskRecord>(task.id, &task.record)?.resumed();
        Ok(Task {
            status: record.status,
            schedule: record.schedule,
            record: serde_json::to_string(&record)?,
            ..task
        })
    };
    tasks.into_iter().map(resume).collect()
}

/// Returns the secrets of each task. Those of tasks that run again are required, because the stored ones were deleted.
fn task_secrets(
    number: i64,
    plan: &ManagedJobPlan,
    tasks: &[Task],
    requested: &wire::ResumeRequest,
) -> Result<Vec<TaskSecrets>> {
    let known = |name: &String| plan.tasks.iter().any(|task| task.body.secrets().contains(name));
    if let Some(name) = requested.secrets.keys().find(|name| !known(name)) {
        return Err(Error::field("secrets", format!("managed job {number} has no secret `{name}`")));
    }
    let mut all = Vec::with_capacity(plan.tasks.len());
    for (task, row) in plan.tasks.iter().zip(tasks) {
        let mut secrets = TaskSecrets::new();
        for name in task.body.secrets() {
            match requested.secrets.get(name) {
                Some(value) => {
                    secrets.insert(name.clone(), SecretValue(value.clone()));
                }
                None if row.status == Status::Succeeded => {}
                None => {
                    return Err(Error::refused(format!(
                        "secret `{name}` has no value, because secrets are deleted when a job ends; hint: pass \
                         `--secret {name}=…`"
                    )));
                }
            }
        }
        all.push(secrets);
    }
    Ok(all)
}
