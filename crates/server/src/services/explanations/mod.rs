//! Explanations of the states of runs, managed jobs and instances, from what the server recorded.

mod deployments;
mod instance_queue;
mod instances;
mod preempted;
mod queue;
mod refusals;
mod runs;
mod timeline;
mod turns;
mod what_if;

pub(crate) use self::{
    deployments::deployments,
    instance_queue::InstanceQueue,
    instances::explain as explain_instance,
    queue::list as queue,
    refusals::{Locations, RecordedRefusals},
    runs::{explain as explain_run, explain_managed_job},
    timeline::timeline,
    turns::planned_turn,
    what_if::what_if,
};
