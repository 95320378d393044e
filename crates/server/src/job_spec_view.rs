//! Parts of a stored job specification that the pipelines use.

use serde::Deserialize;
use windlass_model::{
    config::job_spec::JobSpec,
    decide::{jobs_running::StartupOrder, readiness},
};

use crate::{
    db::{
        DbError,
        documents::{JOB_PROBES, JOB_SPEC},
        jobs::Job,
    },
    pass_error::PassError,
};

/// Fields on which decisions about a placed job depend; the rest is passed on unchanged.
#[derive(Clone, Debug)]
pub struct JobSpecView {
    pub jobs_per_replica: u32,
    pub image_name: String,
    pub max_duration: Option<i64>,
    pub stop_duration: Option<i64>,
    pub inactivity_duration: Option<i64>,
    pub startup_order: StartupOrder,
    pub utilization: Option<Utilization>,
}

/// Minimum utilization of its GPUs: percent, and seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Utilization {
    pub min_gpu_utilization: u32,
    pub time_window: i64,
}

#[derive(Deserialize)]
struct Document {
    #[serde(default = "one")]
    jobs_per_replica: u32,
    #[serde(default)]
    image_name: String,
    max_duration: Option<i64>,
    stop_duration: Option<i64>,
    inactivity_duration: Option<i64>,
    startup_order: Option<String>,
    utilization_policy: Option<Utilization>,
}

fn one() -> u32 {
    1
}

impl JobSpecView {
    pub fn of(job: &Job) -> Result<Self, PassError> {
        let document: Document = JOB_SPEC.decode(job.id, &job.job_spec)?;
        Ok(Self {
            jobs_per_replica: document.jobs_per_replica,
            image_name: document.image_name,
            max_duration: document.max_duration,
            stop_duration: document.stop_duration,
            utilization: document.utilization_policy,
            inactivity_duration: document.inactivity_duration,
            startup_order: match document.startup_order.as_deref() {
                Some("master-first") => StartupOrder::MasterFirst,
                Some("workers-first") => StartupOrder::WorkersFirst,
                _ => StartupOrder::Any,
            },
        })
    }
}

/// Probe for which a replica of a service waits before it receives requests.
pub(crate) fn readiness_wait(job: &Job) -> Result<Option<String>, DbError> {
    let spec: JobSpec = JOB_SPEC.decode(job.id, &job.job_spec)?;
    let states: Option<Vec<readiness::ProbeState>> = JOB_PROBES.decode_opt(job.id, job.probes.as_deref())?;
    Ok(readiness::waiting_message(&spec.probes, &states.unwrap_or_default()))
}
