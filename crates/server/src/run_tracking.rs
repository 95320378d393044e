//! State of a run that the `runs` pipeline keeps between passes besides the columns. Other modules may read it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use windlass_model::{
    decide::replicas::{Rollout, ScalingState},
    time::Timestamp,
};

use crate::db::{DbError, documents::RUN_TRACKING, runs::Run};

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct RunTracking {
    /// The last cron slot that started an execution.
    pub(crate) fired: Option<Timestamp>,
    /// Desired number of replicas of each group of a service.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) groups: BTreeMap<String, ScalingState>,
    /// Progress of the newest deployment of a service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rollout: Option<Rollout>,
    /// The failure after which a waiting run is retried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) retry: Option<RetryWait>,
}

/// A failure that is followed by a retry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RetryWait {
    /// Number of consecutive failed attempts.
    pub(crate) failures: u32,
    pub(crate) cause: String,
    /// Time of the next attempt.
    pub(crate) at: Option<Timestamp>,
}

impl RunTracking {
    pub(crate) fn of(run: &Run) -> Result<Self, DbError> {
        Ok(RUN_TRACKING.decode_opt(run.id, run.tracking.as_deref())?.unwrap_or_default())
    }
}
