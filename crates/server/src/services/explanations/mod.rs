//! Explanations of the states of runs, managed jobs and instances, from what the server recorded.

mod deployments;
mod instances;
mod queue;
mod refusals;
mod runs;
mod timeline;
mod what_if;

pub(crate) use self::{
    deployments::{configuration_text, deployments},
    instances::explain as explain_instance,
    queue::list as queue,
    runs::{explain as explain_run, explain_managed_job},
    timeline::timeline,
    what_if::what_if,
};
