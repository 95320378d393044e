//! The hands: one file per pipeline, each the twin of a brain in `model/src/decide/`.

mod error;
mod instances;
mod inventory;
mod jobs_running;
mod jobs_submitted;
mod jobs_terminating;
mod runs;

use std::sync::Arc;

use windlass_engine::{BatchPipeline, Lease, Pipeline};
use windlass_model::event::{self, Actor, Because};

pub use self::error::PassError;
use crate::{agents::Agents, db::Db};

/// What every pipeline works with.
#[derive(Clone)]
pub struct Hands {
    pub db: Db,
    pub agents: Arc<dyn Agents>,
}

/// Whatever pipelines are put into: the engine, or the simulation's watch over it.
pub trait Install {
    fn add<P: Pipeline>(&mut self, pipeline: P);
    fn add_batch<P: BatchPipeline>(&mut self, pipeline: P);
}

/// The list. A new pipeline is one line here.
pub fn install(hands: &Hands, into: &mut impl Install) {
    into.add(runs::Runs(hands.clone()));
    into.add_batch(jobs_submitted::JobsSubmitted(hands.clone()));
    into.add(jobs_running::JobsRunning(hands.clone()));
    into.add(jobs_terminating::JobsTerminating(hands.clone()));
    into.add(instances::Instances(hands.clone()));
}

/// Who changes a row, and why, for its event.
fn because(name: event::Pipeline, lease: &Lease, reason: impl Into<String>, message: impl Into<String>) -> Because {
    let epoch = u64::try_from(lease.epoch).unwrap_or_default();
    Because { actor: Actor::Pipeline { name, epoch }, reason: reason.into(), message: message.into() }
}
