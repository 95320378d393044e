//! Converts stored rows and responses of agents to the inputs of the decision.

use windlass_api::agent::shim::{TaskInfo, TaskStatus};
use windlass_model::{
    backend_kind::provisioning_timeout, config::Configuration, decide::jobs_running as brain, instance,
    time::Span,
};

use crate::{
    agents::{AgentError, JobProgress},
    db::{DbError, instances::Instance, pipeline_rows::jobs::JobInputs},
    instance_documents::OfferAttempts,
    job_payload::address,
    job_spec_view::JobSpecView,
    parsed_run_spec::ParsedRunSpec,
};

pub(super) fn view(
    loaded: &JobInputs,
    facts: &JobSpecView,
    shape: &ParsedRunSpec,
    addresses_known: bool,
) -> Result<brain::RunningJobView, DbError> {
    let JobInputs { job, instance, siblings, .. } = loaded;
    let since = job.provisioned_at.unwrap_or(job.submitted_at);
    let backend = instance.as_ref().and_then(|i| i.backend.as_deref()).unwrap_or_default();
    let tries = match instance {
        Some(instance) => OfferAttempts::of(instance)?,
        None => None,
    };
    let kind = tries.as_ref().and_then(OfferAttempts::current).map(|offer| offer.instance_type.as_str());
    let nodes = i64::from(facts.jobs_per_replica);
    let all_here = nodes == 1 || siblings.len() as i64 + 1 >= nodes;
    let mut have_addresses = true;
    for sibling in siblings {
        let row = format_args!("of node {} of run {}", sibling.job_num, job.run_id);
        let address = address::from_machine(row, sibling.machine.as_deref(), sibling.hostname.as_deref())?;
        have_addresses &= address.is_some();
    }
    Ok(brain::RunningJobView {
        status: job.status,
        provisioning_since: since,
        provisioning_max: provisioning_timeout(backend, kind.unwrap_or_default()),
        pulling_since: job.pulling_at,
        running_since: job.running_at,
        disconnected_at: job.disconnected_at,
        instance_was_ready: instance.as_ref().is_some_and(is_ready),
        has_shim: true,
        is_spot: instance.as_ref().is_some_and(|i| i.spot),
        has_siblings: nodes > 1,
        is_master: job.job_num == 0,
        gate: brain::Gate::from_stored(job.gate.as_deref()),
        startup_order: facts.startup_order,
        siblings: brain::Siblings {
            all_have_ips: all_here && addresses_known && have_addresses,
            is_master_running: siblings.iter().any(|s| s.job_num == 0 && s.ran),
            are_workers_running: siblings.iter().filter(|s| s.job_num != 0).all(|s| s.ran),
            all_at_gate: all_here && siblings.iter().all(|s| s.at_gate),
        },
        max_duration: facts.max_duration.map(Span::secs),
        inactivity_duration: inactivity_duration(shape).map(Span::secs),
        unreachable_timeout: brain::UNREACHABLE_GRACE,
        pulling_timeout: brain::PULLING_TIMEOUT,
    })
}

/// Inactivity limit of the present run specification: it may change while the environment runs.
pub(super) fn inactivity_duration(shape: &ParsedRunSpec) -> Option<i64> {
    match shape.configuration() {
        Configuration::DevEnvironment(dev) => dev.inactivity_duration.0,
        Configuration::Task(_)
        | Configuration::Service(_)
        | Configuration::Fleet(_)
        | Configuration::Gateway(_)
        | Configuration::Volume(_) => None,
    }
}

pub(super) fn is_ready(instance: &Instance) -> bool {
    match instance.status {
        instance::Status::Idle | instance::Status::Busy => true,
        instance::Status::Pending
        | instance::Status::Provisioning
        | instance::Status::Terminating
        | instance::Status::Terminated => false,
    }
}

/// Returns whether the instance can have an agent: one that is being created has none yet.
pub(super) fn may_have_agent(instance: &Instance) -> bool {
    match instance.status {
        instance::Status::Pending | instance::Status::Provisioning => false,
        instance::Status::Idle
        | instance::Status::Busy
        | instance::Status::Terminating
        | instance::Status::Terminated => true,
    }
}

pub(super) fn host_state(loaded: &JobInputs) -> brain::HostState {
    let Some(instance) = &loaded.instance else { return brain::HostState::Gone };
    if !loaded.may_use_instance {
        return brain::HostState::AccessRevoked;
    }
    match instance.status {
        instance::Status::Terminated => lost_host_state(instance),
        instance::Status::Pending
        | instance::Status::Provisioning
        | instance::Status::Idle
        | instance::Status::Busy
        | instance::Status::Terminating => brain::HostState::Fine,
    }
}

/// Distinguishes an instance that was never created from one that was lost.
fn lost_host_state(instance: &Instance) -> brain::HostState {
    match instance.termination_reason.as_deref().and_then(|word| word.parse().ok()) {
        Some(instance::TerminationReason::NoOffers | instance::TerminationReason::NoBalance) => {
            brain::HostState::CreateFailed
        }
        Some(instance::TerminationReason::ProvisioningTimeout) => brain::HostState::ProvisionTimeout,
        Some(_) | None => brain::HostState::Gone,
    }
}

pub(super) fn shim_state(answer: &Result<TaskInfo, AgentError>) -> brain::ShimState {
    let info = match answer {
        Ok(info) => info,
        Err(AgentError::UnknownTask { .. } | AgentError::Gone { .. }) => return brain::ShimState::NoTask,
        Err(
            AgentError::Unreachable { .. }
            | AgentError::Barred { .. }
            | AgentError::Fenced { .. }
            | AgentError::Conflict { .. }
            | AgentError::Unsigned { .. }
            | AgentError::Refused { .. },
        ) => return brain::ShimState::Silent,
    };
    brain::ShimState::Task(match info.status {
        TaskStatus::Queued => brain::TaskState::Queued,
        TaskStatus::Pending => brain::TaskState::Pending,
        TaskStatus::Preparing => brain::TaskState::Preparing,
        TaskStatus::Pulling => brain::TaskState::Pulling,
        TaskStatus::Creating => brain::TaskState::Creating,
        TaskStatus::Running => brain::TaskState::Running { ports_known: info.ports.is_some() },
        TaskStatus::Terminated => brain::TaskState::Terminated(brain::ReportedEnd {
            kind: brain::EndKind::Failed,
            reason: info.termination_reason.clone(),
            message: info.termination_message.clone(),
            detail: info.detail.clone(),
            exit_status: info.exit_status,
        }),
    })
}

pub(super) fn runner_state(answer: Result<JobProgress, AgentError>) -> brain::RunnerState {
    let Ok(pulled) = answer else { return brain::RunnerState::Silent };
    let at_gate = pulled.record.states.iter().any(|state| state.state == "ready");
    let Some(state) = pulled.record.states.into_iter().next_back() else { return brain::RunnerState::Ready };
    let how = match state.state.as_str() {
        "done" => Some(brain::EndKind::Done),
        "failed" => Some(brain::EndKind::Failed),
        "terminated" => Some(brain::EndKind::Terminated),
        _ => None,
    };
    brain::RunnerState::Pulled(brain::RunnerReport {
        end: how.map(|how| brain::ReportedEnd {
            kind: how,
            reason: state.termination_reason,
            message: state.termination_message,
            detail: state.detail,
            exit_status: state.exit_status,
        }),
        disconnected_for: pulled.no_connections_secs.map(Span::secs),
        is_at_gate: at_gate,
    })
}
