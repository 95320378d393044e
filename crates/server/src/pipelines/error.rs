//! What stops a pass. The engine says it once and tries the row again later.

use windlass_model::{config::derive, event::Refused, schedule::CronProblem};

use crate::db::DbError;

#[derive(Debug, thiserror::Error)]
pub enum PassError {
    #[error(transparent)]
    Db(#[from] DbError),
    /// The machine does not know this move: the plan and the row disagree.
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("read a stored document")]
    Document {
        #[source]
        source: serde_json::Error,
    },
    #[error("read the run's specification: {problems}")]
    Specification { problems: String },
    #[error("a {kind} is not a run")]
    NotARun { kind: &'static str },
    #[error("describe the run's jobs")]
    Derive(#[from] derive::Error),
    #[error("read the run's schedule")]
    Cron(#[source] CronProblem),
    #[error("the run has no job {job} in replica {replica}")]
    NoSuchJob { replica: u32, job: u32 },
    #[error("end a job that is {status}: it does not move")]
    NoMove { status: &'static str },
}

impl PassError {
    pub(crate) fn document(source: serde_json::Error) -> Self {
        Self::Document { source }
    }
}
