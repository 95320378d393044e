//! Stored documents of waiting jobs. A job whose documents cannot be read fails alone; the round places the others.

use std::collections::BTreeMap;

use uuid::Uuid;
use windlass_engine::ApplyOutcome;
use windlass_model::{
    config::job_spec::JobSpec,
    error_chain::format_chain,
    id::{ProjectId, RunId},
    plan::offers::Location,
};

use super::{JobsSubmittedPipeline, LeasedReplica, wait_classes::QueuedReplica};
use crate::{
    attachments::mounts::VolumeCatalog,
    db::{
        DbError,
        documents::{INSTANCE_OFFER, JOB_SPEC, leave_out, of_run},
        jobs::Job,
        pipeline_rows::placement,
        runs::Run,
    },
    instance_documents::OfferAttempts,
    pass_error::PassError,
};

/// Specifications of the nodes of a replica.
pub(super) fn read_specs(nodes: &[Job]) -> Result<Vec<JobSpec>, DbError> {
    nodes.iter().map(|node| JOB_SPEC.decode(node.id, &node.job_spec)).collect()
}

/// Fails the passes of these jobs. The engine repeats them after growing delays.
pub(super) fn fail(
    error: &(dyn std::error::Error + 'static),
    outcomes: &mut BTreeMap<Uuid, ApplyOutcome>,
    jobs: impl IntoIterator<Item = Uuid>,
) {
    for job in jobs {
        tracing::warn!(%job, error = %format_chain(error), "failed to read a waiting job");
        outcomes.remove(&job);
    }
}

impl JobsSubmittedPipeline {
    pub(super) fn queued<'a>(
        &self,
        replica: &'a LeasedReplica,
        run: &'a Run,
        volumes: &BTreeMap<ProjectId, VolumeCatalog>,
        full: &[Location],
    ) -> Result<QueuedReplica<'a>, PassError> {
        let shape = self.context.shapes.of(run)?;
        QueuedReplica::new(replica, run, &shape, &volumes[&replica.project], full)
    }

    /// Regions in which a recent attempt found no capacity for all nodes of a replica.
    pub(super) async fn full(
        &self,
        replicas: &[LeasedReplica],
    ) -> Result<BTreeMap<(RunId, i64), Vec<Location>>, PassError> {
        let again = replicas.iter().filter(|one| one.nodes.len() > 1 && one.nodes[0].submission_num > 0);
        let runs: Vec<RunId> = again.map(|one| one.run).collect();
        let mut full: BTreeMap<(RunId, i64), Vec<Location>> = BTreeMap::new();
        for (replica, tries) in placement::failed_offers(&self.context.db, &runs).await? {
            let tries: OfferAttempts = match INSTANCE_OFFER.decode(of_run(replica.0), &tries) {
                Ok(tries) => tries,
                Err(error) => {
                    leave_out(&error);
                    continue;
                }
            };
            let Some(offer) = tries.offers.into_iter().next() else { continue };
            let place = Location { backend: offer.backend, region: offer.region, zone: None };
            let of_replica = full.entry(replica).or_default();
            if !of_replica.contains(&place) {
                of_replica.push(place);
            }
        }
        Ok(full)
    }
}
