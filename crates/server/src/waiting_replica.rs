//! A replica that waits for an instance, as placement sees it: for the pipeline that places it, and for explanations.

use std::sync::Arc;

use windlass_model::{
    config::job_spec::JobSpec,
    plan::{
        offers::{InstanceNeeds, Location},
        place::{FleetChoice, WaitingNode, WaitingReplica},
    },
    time::Span,
};

use crate::{
    attachments::mounts::{self, VolumeCatalog},
    attempt_specs::PlacementPreferences,
    db::{jobs::Job, runs::Run},
    parsed_run_spec::ParsedRunSpec,
    pass_error::PassError,
    queue_rank::QueueRank,
};

/// All nodes of a replica, of which there is at least one, with their specifications in the same order.
pub(crate) fn waiting_replica(
    run: &Run,
    jobs: &[Job],
    specs: &[JobSpec],
    shape: &ParsedRunSpec,
    volumes: &VolumeCatalog,
) -> Result<WaitingReplica, PassError> {
    let first = &jobs[0];
    let choice = match run.fleet_id {
        Some(fleet) => FleetChoice::Chosen(fleet),
        None if first.job_num == 0 && first.replica_num == 0 => FleetChoice::Choose,
        None => FleetChoice::Follow,
    };
    let mut nodes = Vec::with_capacity(jobs.len());
    let placing = PlacementPreferences::of(run)?;
    let (avoided, sought) = (placing.avoided(), placing.sought());
    for (job, spec) in jobs.iter().zip(specs) {
        let volumes = volumes.locations(&mounts::for_spec(spec))?;
        let (avoid, avoid_instances) = avoided.clone();
        let mut needs =
            InstanceNeeds { volumes, avoid_locations: avoid, avoid_instances, ..shape.needs_of(spec) };
        if let Some(Location { backend, region, zone }) = sought.clone() {
            (needs.backends, needs.regions) = (Some(vec![backend]), Some(vec![region]));
            needs.zones = zone.map(|zone| vec![zone]).or(needs.zones);
        }
        nodes.push(WaitingNode { job: job.id, needs: Arc::new(needs) });
    }
    let rank = QueueRank::from_stored(run.priority);
    Ok(WaitingReplica {
        project: first.project_id,
        user: run.user_id,
        run: run.id,
        replica_num: u32::try_from(first.replica_num).unwrap_or_default(),
        class: rank.class,
        priority: rank.priority,
        since: jobs.iter().map(|job| job.queued_at.unwrap_or(job.submitted_at)).min().unwrap_or_default(),
        nodes,
        fleet_choice: choice,
        usable_fleets: None,
        fleets: None,
        missing_fleets: Vec::new(),
        creation: shape.creation(),
        max_duration: specs[0].max_duration.map(Span::secs),
        resubmitted_at: first.queued_at.map(|_| first.submitted_at),
    })
}
