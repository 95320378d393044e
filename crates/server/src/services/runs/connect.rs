//! Streams to ports of jobs, for their users.

use windlass_api::{operations::ConnectJob, runs::ConnectRequest};
use windlass_model::{id::SubmissionId, job::Status};

use crate::{
    agents::{AgentError, CallContext, PortStream},
    app::App,
    auth::ProjectScope,
    db::{
        jobs::{self, Job},
        runs,
    },
    error::{Error, Result},
};

/// Opens a stream. The submission must be one of that run, and the run one of this project. The stream gives access to
/// everything that the owner of the run sees, so it is limited to the owner and the managers of the project.
pub async fn connect(app: &App, scope: &ProjectScope, requested: &ConnectRequest) -> Result<PortStream> {
    let job = find(app, scope, requested).await?;
    let instance = job
        .instance_id
        .filter(|_| job.status == Status::Running)
        .ok_or_else(|| Error::refused(format!("the job is not running: it is {}", job.status.as_str())))?;
    let agents = app
        .agents()
        .ok_or_else(|| Error::refused("this replica of the server has no connections to hosts"))?;
    let call = CallContext { instance, submission: job.id, epoch: job.lock_epoch };
    agents.connect(call, requested.port).await.map_err(|error| refusal(&error))
}

/// Checks that the caller of an open stream still has the rights to it.
pub async fn check_connect(app: &App, scope: &ProjectScope, requested: &ConnectRequest) -> Result<()> {
    find(app, scope, requested).await.map(drop)
}

async fn find(app: &App, scope: &ProjectScope, requested: &ConnectRequest) -> Result<Job> {
    let absent = || Error::absent("Job submission");
    let job = jobs::find(app.db(), SubmissionId(requested.job_submission_id)).await?;
    let job = job.filter(|job| job.project_id == scope.project.id).ok_or_else(absent)?;
    let run = runs::find(app.db(), job.run_id).await?.filter(|run| run.run.name == requested.run_name);
    let run = run.ok_or_else(absent)?;
    scope.require_ownership::<ConnectJob>(Some(run.run.user_id), &format!("run `{}`", run.run.name))?;
    Ok(job)
}

fn refusal(error: &AgentError) -> Error {
    match error {
        AgentError::Conflict { reason } | AgentError::Refused { reason } => Error::refused(reason.clone()),
        AgentError::Unreachable { why, .. } => {
            Error::refused(format!("the agent of its instance is unreachable: {why}"))
        }
        AgentError::Barred { why, .. } => {
            Error::refused(format!("the agent of its instance cannot be trusted: {why}"))
        }
        AgentError::Fenced { .. }
        | AgentError::Unsigned { .. }
        | AgentError::UnknownTask { .. }
        | AgentError::Gone { .. } => Error::refused(error.to_string()),
    }
}
