//! Instances that are created for a job: their rows, and the job while it waits for one.

use windlass_engine::{ApplyOutcome, Lease};
use windlass_model::{
    config::job_spec::JobSpec,
    decide::jobs_submitted::{self as brain, AssignmentStage, Plan, SubmittedJobObservation},
    event::{self, Event},
    id::{FleetId, InstanceId},
    instance, job,
    plan::{offers::Offer, place::NodePlacement, quota::HeldResources},
    time::Timestamp,
};

use super::{JobEnding, JobsSubmittedPipeline, PlacementContext, apply_outcome, pipeline_cause};
use crate::{
    db::{
        Val,
        documents::JOB_SPEC,
        instances::{Instance, NewInstance},
        jobs::Job,
        pipeline_rows::{
            jobs::{self as rows, JobUpdate},
            placement::SeatTarget,
        },
        quotas,
        runs::Run,
    },
    inventory, parsed_fleet_spec,
    pass_error::PassError,
};

impl JobsSubmittedPipeline {
    /// A row for the instance that is to be created for a job.
    pub(super) fn new_placeholder<'a>(
        &self,
        lease: &Lease,
        job: &Job,
        run: &Run,
        (fleet, seat): (FleetId, &NodePlacement),
        message: &str,
        site: &PlacementContext<'_>,
    ) -> Result<Option<SeatTarget<'a>>, PassError> {
        let NodePlacement::New { instance_num, offers, .. } = seat else { return Ok(None) };
        let (Some(fleet), Some(first)) = (site.fleet(fleet), offers.first()) else { return Ok(None) };
        let (shape, run) = (parsed_fleet_spec::for_fleet(fleet)?, self.context.shapes.of(run)?);
        // The job already holds its blocks, so every offer must provide the same number.
        let alike = offers.iter().filter(|new| new.blocks == first.blocks);
        let offers: Vec<Offer> = alike
            .filter_map(|new| {
                let offer = site.inventory.offers.get(new.offer)?;
                Some(Offer { total_blocks: new.total_blocks, ..offer.clone() })
            })
            .collect();
        let id = InstanceId(self.context.db.new_id()?);
        let why = format!("required by job {}", job.job_name);
        let why = pipeline_cause(event::Pipeline::JobSubmitted, lease, "job", why);
        let created = Event::created::<instance::InstanceLifecycle>(id, instance::Status::Pending, why);
        let request = super::super::fleets::new_instance(id, &offers, shape.tags(run.tags()))?;
        let instance = NewInstance {
            project_id: fleet.project_id,
            fleet_id: Some(fleet.id),
            name: format!("{}-{instance_num}", fleet.name),
            instance_num: (*instance_num).into(),
            idle_seconds_max: shape.run_idle_secs(run.idle_duration()),
            ..request
        };
        let blocks = first.blocks.into();
        Ok(Some(SeatTarget::New {
            instance: Box::new(instance),
            created,
            blocks,
            message: message.to_owned(),
        }))
    }

    /// Observes the creation of a job's instance.
    pub(super) async fn check_placeholder(
        &self,
        lease: &Lease,
        job: &Job,
        instance: Option<&Instance>,
    ) -> Result<ApplyOutcome, PassError> {
        let since = instance.map_or(job.submitted_at, |instance| instance.created_at);
        let view = brain::SubmittedJobView {
            submitted_at: job.submitted_at,
            stage: AssignmentStage::Placeholder { since },
            has_volumes: false,
        };
        match brain::decide(&view, placeholder_observation(instance), Timestamp(lease.now())) {
            Plan::Provision { change, .. } => {
                let why =
                    pipeline_cause(event::Pipeline::JobSubmitted, lease, change.reason, &change.message);
                let step = event::transition::<job::JobLifecycle>(job.id, job.status, change.event, why)?;
                let mut set = vec![
                    ("status", step.status.into()),
                    ("provisioned_at", Val::Now),
                    ("status_message", Val::Null),
                ];
                // Until now the largest of the offers counted.
                let granted = instance.map(|instance| granted_resources(instance, job)).transpose()?;
                if let Some(held) = granted.flatten() {
                    set.extend(quotas::held_columns(&held, Timestamp(lease.now())));
                }
                let moved =
                    JobUpdate { set, events: step.record.into_iter().collect(), ..JobUpdate::default() };
                let written = rows::apply(&self.context.db, lease.key(), job, moved).await?;
                let wake =
                    vec![super::super::runs::QUEUE.pipeline, super::super::jobs_running::QUEUE.pipeline];
                Ok(apply_outcome(&written, None, wake))
            }
            Plan::End { ending, change } => {
                let spec: JobSpec = JOB_SPEC.decode(job.id, &job.job_spec)?;
                let is_full = ending.reason() == job::TerminationReason::FailedToStartDueToNoCapacity
                    && spec.jobs_per_replica > 1;
                let ending =
                    if is_full { ending.with_detail(job::TerminationDetail::RegionFull) } else { ending };
                self.end(lease, job, JobEnding::new(&ending, change.event)).await
            }
            Plan::Assign { due, .. }
            | Plan::Attach { due }
            | Plan::Wait { due, .. }
            | Plan::Recheck { due } => {
                let message = instance.and_then(|instance| instance.status_message.clone());
                let set = message.map(|message| ("status_message", message.into())).into_iter().collect();
                self.wait(lease, job, JobUpdate { set, ..JobUpdate::default() }, due).await
            }
        }
    }
}

/// Resources that a job holds of the instance that was created for it; `None` while its hardware is not known.
fn granted_resources(instance: &Instance, job: &Job) -> Result<Option<HeldResources>, PassError> {
    let offer = inventory::offer(instance)?;
    let blocks = u32::try_from(job.blocks).ok().filter(|_| offer.host.cpus > 0);
    Ok(blocks.map(|blocks| HeldResources::of(&offer, blocks, offer.total_blocks)))
}

/// State of the creation of an instance, for the job that requested it.
fn placeholder_observation(instance: Option<&Instance>) -> SubmittedJobObservation {
    let Some(instance) = instance else {
        return SubmittedJobObservation::Refused { message: "its instance no longer exists".to_owned() };
    };
    match instance.status {
        instance::Status::Pending => SubmittedJobObservation::Creating,
        instance::Status::Provisioning | instance::Status::Idle | instance::Status::Busy => {
            SubmittedJobObservation::Created
        }
        instance::Status::Terminating | instance::Status::Terminated => {
            let message = instance.termination_message.clone();
            SubmittedJobObservation::Refused {
                message: message.unwrap_or_else(|| "its instance was terminated".to_owned()),
            }
        }
    }
}
