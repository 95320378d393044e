//! Columns for clients, from the results of a pass.

use windlass_api::agent::{runner::JobStarted, shim::TaskInfo};
use windlass_model::{config::job_spec::JobSpec, job, time::Span};

use super::inputs::inactivity_duration;
use crate::{
    db::{
        Val, Values,
        documents::{JOB_RUNTIME, JOB_SPEC},
        pipeline_rows::jobs::JobInputs,
    },
    job_payload::{
        self,
        connection_info::{self, HostLogin, RuntimeData},
    },
    parsed_run_spec::ParsedRunSpec,
    pass_error::PassError,
};

/// Results of a pass besides the inputs of the decision.
#[derive(Debug, Default)]
pub(crate) struct JobFindings {
    pub(super) answered: bool,
    pub(super) task: Option<TaskInfo>,
    pub(super) started: Option<JobStarted>,
    /// Runtime of the submitted task, for display.
    pub(super) runs_in: Option<String>,
    pub(super) no_connections: Option<Span>,
    /// Reason for waiting, where the plan's message is too general.
    pub(super) waits: Option<String>,
}

/// Returns the columns that change. `entered` is the new status in this pass.
pub(super) fn columns(
    loaded: &JobInputs,
    shape: &ParsedRunSpec,
    findings: &JobFindings,
    entered: Option<job::Status>,
) -> Result<Values, PassError> {
    let (job, mut set) = (&loaded.job, Values::new());
    if findings.answered {
        set.push(("seen_at", Val::Now));
    }
    if let Some(progress) = findings.task.as_ref().and_then(|task| task.image_pull_progress.as_ref()) {
        set.push(("pull_progress", Val::json(progress)?));
    }
    // Stored only if inactivity can end the job.
    match (inactivity_duration(shape), findings.no_connections) {
        (Some(_), Some(idle)) if idle.0 > 0 => set.push(("inactive_since", Val::NowPlus(-idle.0))),
        (Some(_), None) => {}
        (Some(_), Some(_)) | (None, _) => {
            if job.inactive_since.is_some() {
                set.push(("inactive_since", Val::Null));
            }
        }
    }
    let Some(instance) = &loaded.instance else { return Ok(set) };
    let stored: Option<RuntimeData> = JOB_RUNTIME.decode_opt(job.id, job.runtime.as_deref())?;
    let mut runtime = match &stored {
        Some(stored) => stored.clone(),
        None => {
            let spec: JobSpec = JOB_SPEC.decode(job.id, &job.job_spec)?;
            RuntimeData::placed(job, &spec, instance)?
        }
    };
    if findings.runs_in.is_some() {
        runtime.runs_in.clone_from(&findings.runs_in);
    }
    if let Some(task) = &findings.task {
        runtime.seen(task);
    }
    if let Some(started) = &findings.started {
        runtime.started(started);
    }
    let is_new = stored.as_ref() != Some(&runtime);
    if is_new {
        set.push(("runtime", Val::json(&runtime)?));
    }
    if is_new || entered.is_some() || job.provisioning.is_none() {
        let fleet = job_payload::fleet_spec(loaded)?;
        let login = HostLogin::of(instance, fleet.as_ref())?;
        let shown = connection_info::provisioning(instance, login.as_ref(), Some(&runtime))?.to_string();
        if job.provisioning.as_ref() != Some(&shown) {
            set.push(("provisioning", shown.into()));
        }
    }
    if entered == Some(job::Status::Running) {
        let connection = connection_info::connection(
            &loaded.run.name,
            job,
            shape.configuration(),
            runtime.working_dir.as_deref(),
        );
        set.push(("connection_info", connection.to_string().into()));
        let spec: JobSpec = JOB_SPEC.decode(job.id, &job.job_spec)?;
        if let Some(secs) = spec.max_duration {
            // Placement expects the blocks to be free from then on.
            set.push(("run_deadline_at", Val::NowPlus(Span::secs(secs).0)));
        }
    }
    Ok(set)
}
