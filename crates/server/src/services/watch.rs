//! Logs, metrics and what is on offer. Pipelines fill these; until then the answers are empty, and
//! still only for those who may ask.

use windlass_api::{gpus, logs, metrics};
use windlass_model::id::{RunId, SubmissionId};

use super::{offers, runs::Spec};
use crate::{
    app::App,
    auth::Scope,
    db::{jobs, runs},
    error::{Error, Result},
};

const LIMIT_MAX: i64 = 1000;

/// The submission must be one of that run, and the run one of this project (O5).
pub async fn poll_logs(app: &App, scope: &Scope, asked: &logs::PollRequest) -> Result<logs::Page> {
    if !(0..=LIMIT_MAX).contains(&asked.limit) {
        return Err(Error::field("limit", "must be from 0 to 1000"));
    }
    let job = jobs::find(app.db(), SubmissionId(asked.job_submission_id)).await?;
    let job = job
        .filter(|job| job.project_id == scope.project.id)
        .ok_or_else(|| Error::absent("Job submission"))?;
    let run = runs::find(app.db(), job.run_id).await?;
    if run.is_none_or(|run| run.run.name != asked.run_name) {
        return Err(Error::absent("Job submission"));
    }
    Ok(logs::Page { logs: Vec::new(), external_url: None, next_token: None })
}

pub async fn job_metrics(app: &App, scope: &Scope, asked: &metrics::Query) -> Result<metrics::JobMetrics> {
    let name = scope.path.first().map(String::as_str).unwrap_or_default();
    let found = match asked.run_id {
        Some(id) => runs::find(app.db(), RunId(id)).await?,
        None => runs::find_by_name(app.db(), scope.project.id, name).await?,
    };
    let found = found.filter(|found| found.run.project_id == scope.project.id && found.run.name == name);
    found.ok_or_else(|| Error::absent("Run"))?;
    Ok(metrics::JobMetrics { metrics: Vec::new() })
}

/// Offers of the first job, by GPU.
pub async fn list_gpus(app: &App, scope: &Scope, asked: &gpus::ListRequest) -> Result<gpus::Listing> {
    let jobs = Spec::read(&asked.run_spec, None)?.plan()?;
    let existing = offers::existing(app, scope.project.id).await?;
    let found = jobs.first().map(|job| offers::for_job(&existing, job)).unwrap_or_default();
    Ok(gpus::Listing { gpus: offers::by_gpu(&found), cpus: None })
}
