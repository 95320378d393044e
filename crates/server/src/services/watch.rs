//! Logs, metrics and what is on offer. Only for those who may ask.

use windlass_api::{gpus, logs, metrics};
use windlass_model::id::{RunId, SubmissionId};

use super::{offers, runs::Spec};
use crate::{
    app::App,
    auth::Scope,
    db::{jobs, runs},
    error::{Error, Result},
    logs::{Log, Stream, page},
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
    let range = page::range(asked).map_err(|error| Error::field("next_token", error.to_string()))?;
    let stream = if asked.diagnose { Stream::Runner } else { Stream::Job };
    let log = Log { project: job.project_id, run: job.run_id, submission: job.id, stream };
    Ok(page::read(app.logs().as_ref(), &log, range).await?)
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
