//! Controllers: one file per pipeline, with the same name as its decision in `model/src/decide/`.

mod fleets;
mod instances;
mod jobs_running;
mod jobs_submitted;
mod jobs_terminating;
mod managed_jobs;
mod runs;
mod volumes;

use std::sync::Arc;

use windlass_api::agent::shim::ProcessMode;
use windlass_backend::Backends;
use windlass_engine::{ApplyOutcome, BatchPipeline, Lease, Pipeline};
use windlass_model::{
    config::job_spec_builder::DefaultImages,
    decide::managed_jobs::slots::SlotLimits,
    event::{self, Actor, EventCause},
    time::{Span, Timestamp},
};

use crate::{
    agents::AgentApi,
    db::{Db, WriteOutcome},
    encryption::Keyring,
    logs::notifying_store::NotifyingLogStore,
    offer_cache::OfferCache,
    parsed_run_spec::RunSpecCache,
};

/// Dependencies of all pipelines.
#[derive(Clone)]
pub struct PipelineContext {
    pub db: Db,
    pub agents: Arc<dyn AgentApi>,
    pub backends: Backends,
    pub logs: Arc<NotifyingLogStore>,
    pub keys: Arc<Keyring>,
    pub shapes: RunSpecCache,
    /// Silence of an agent after which its jobs are lost.
    pub lost_after: Span,
    /// Delay of a run's first retry; later delays grow from it.
    pub retry_delay: Span,
    /// Maximum number of managed jobs that launch, and that are alive, at once.
    pub job_limits: SlotLimits,
    /// Images of runs that name none.
    pub images: DefaultImages,
    /// Mode of plain processes on this machine.
    pub local_processes: ProcessMode,
    /// Limits for users.
    pub limits: crate::limits::Limits,
}

/// Registry of pipelines: the engine, or the simulation that observes it.
pub trait PipelineRegistry {
    fn add<P: Pipeline>(&mut self, pipeline: P);
    fn add_batch<P: BatchPipeline>(&mut self, pipeline: P);
}

/// The list of all pipelines. A new pipeline is one line here.
pub fn register_all(context: &PipelineContext, into: &mut impl PipelineRegistry) {
    let market = OfferCache::new(context.backends.clone());
    into.add(runs::RunsPipeline(context.clone()));
    into.add_batch(jobs_submitted::JobsSubmittedPipeline {
        context: context.clone(),
        market: market.clone(),
        recent_waits: jobs_submitted::RecentWaits::default(),
    });
    into.add(jobs_running::JobsRunningPipeline(context.clone()));
    into.add(jobs_terminating::JobsTerminatingPipeline(context.clone()));
    into.add(managed_jobs::ManagedJobsPipeline { context: context.clone(), market: market.clone() });
    into.add(instances::InstancesPipeline(context.clone()));
    into.add(fleets::FleetsPipeline { context: context.clone(), market: market.clone() });
    into.add(volumes::VolumesPipeline(context.clone()));
}

/// Time until a row is due, in microseconds, by the database's clock.
fn due_in(lease: &Lease, due: Timestamp) -> i64 {
    (due.0 - lease.now()).max(0)
}

/// Result of an apply in which only the guard can fail.
fn apply_outcome(written: &WriteOutcome, due_in_us: Option<i64>, wake: Vec<&'static str>) -> ApplyOutcome {
    match written {
        WriteOutcome::Done { .. } => ApplyOutcome::Written { due_in_us, wake },
        WriteOutcome::Stale { .. } => ApplyOutcome::LeaseLost,
    }
}

/// Actor and reason of a change, for its event.
fn pipeline_cause(
    name: event::Pipeline,
    lease: &Lease,
    reason: impl Into<String>,
    message: impl Into<String>,
) -> EventCause {
    let epoch = u64::try_from(lease.epoch).unwrap_or_default();
    EventCause { actor: Actor::Pipeline { name, epoch }, reason: reason.into(), message: message.into() }
}
