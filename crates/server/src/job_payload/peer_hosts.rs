//! Names and current addresses of the tasks of a group.

use windlass_api::agent::runner::{GroupHosts, HostName};
use windlass_model::{managed_job::plan::ManagedJobPlan, skypilot::HOSTS_FILE};

use super::address;
use crate::{
    db::{
        DbError,
        documents::MANAGED_JOB_PLAN,
        pipeline_rows::jobs::{self as rows, JobInputs, ManagedNode},
    },
    pass_error::PassError,
    pipelines::PipelineContext,
};

/// Returns whether a job needs the addresses of the other tasks of its group.
pub fn is_requested(loaded: &JobInputs) -> bool {
    loaded.run.managed_job_id.is_some() && loaded.job.job_spec.contains(HOSTS_FILE)
}

/// All nodes of the group that have an address; `None` for a job that does not need them.
pub async fn for_job(context: &PipelineContext, loaded: &JobInputs) -> Result<Option<GroupHosts>, PassError> {
    let Some(job) = loaded.run.managed_job_id.filter(|_| is_requested(loaded)) else { return Ok(None) };
    let Some((plan, members)) = rows::managed_group(&context.db, job).await? else { return Ok(None) };
    let plan: ManagedJobPlan = MANAGED_JOB_PLAN.decode(job, &plan)?;
    let hosts =
        members.iter().filter_map(|member| host(&plan, member).transpose()).collect::<Result<_, _>>()?;
    Ok(Some(GroupHosts { hosts }))
}

fn host(plan: &ManagedJobPlan, member: &ManagedNode) -> Result<Option<HostName>, DbError> {
    let row = format_args!("of run `{}`", member.run);
    let address = address::from_machine(row, member.machine.as_deref(), member.hostname.as_deref())?;
    let task = plan.task_index_of_run(&member.run).and_then(|task| u32::try_from(task).ok());
    let name = task.and_then(|task| plan.host_name(task, member.node));
    Ok(address.zip(name).map(|(address, name)| HostName { address, name }))
}
