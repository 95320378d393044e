//! Events that a shim pushes: one JSON object per line, in one long response.
//!
//! The stream is an optimisation. A reader that missed events receives `Reset` and starts from the full state; a client
//! that never reads the stream obtains the same information from the other calls.

use serde::{Deserialize, Serialize};

use windlass_model::id::SubmissionId;

use super::{runner::JobState, shim::TaskInfo};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShimEvent {
    /// Increases by one with each event since the shim started.
    pub seq: u64,
    /// Microseconds since 1970, by the host's clock. Informative only.
    pub at: i64,
    #[serde(flatten)]
    pub kind: ShimEventKind,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ShimEventKind {
    /// First event of every stream that cannot resume after the reader's last event. All existing tasks follow.
    Reset { boot: String },
    /// A task changed, other than in its pull progress.
    Task { info: TaskInfo },
    /// A task was removed.
    Gone { id: SubmissionId },
    /// The job of a task changed its state.
    Job { id: SubmissionId, state: JobState },
    /// The output grew to `end`. Several writes are merged into one event.
    Log { id: SubmissionId, stream: String, end: u64 },
    /// Problems of the host; empty if it is healthy.
    Health { problems: Vec<String> },
    /// Keep-alive, sent when nothing has happened for a while.
    Alive,
}
