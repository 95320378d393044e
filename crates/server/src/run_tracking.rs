//! What the pipeline of runs remembers of a run between passes, beside the columns. Others may read it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use windlass_model::{
    decide::replicas::{Rollout, ScalingState},
    time::Timestamp,
};

use crate::db::runs::Run;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct RunTracking {
    /// The cron slot that fired last.
    pub(crate) fired: Option<Timestamp>,
    /// How many replicas each group of a service shall have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) groups: BTreeMap<String, ScalingState>,
    /// How the newest deployment of a service stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rollout: Option<Rollout>,
    /// What a run that waits for its next try waits after.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) retry: Option<RetryWait>,
}

/// A failure that is followed by another try.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RetryWait {
    /// How many attempts failed in a row.
    pub(crate) failures: u32,
    pub(crate) cause: String,
    /// When the next attempt begins.
    pub(crate) at: Option<Timestamp>,
}

impl RunTracking {
    pub(crate) fn of(run: &Run) -> Result<Self, serde_json::Error> {
        run.tracking.as_deref().map_or_else(|| Ok(Self::default()), serde_json::from_str)
    }
}
