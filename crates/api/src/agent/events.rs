//! What a shim tells without being asked: one JSON object per line, over one long answer.
//!
//! The stream is a convenience. A reader that missed some is told so by `Reset` and starts from the full state;
//! one that never reads it learns the same by asking.

use serde::{Deserialize, Serialize};

use windlass_model::id::SubmissionId;

use super::{runner::JobState, shim::TaskInfo};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShimEvent {
    /// Grows by one with each event of this start of the shim.
    pub seq: u64,
    /// Microseconds since 1970, by the host's clock; for people.
    pub at: i64,
    #[serde(flatten)]
    pub kind: ShimEventKind,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ShimEventKind {
    /// First on every stream that cannot go on where the reader stopped. Every task there is follows.
    Reset { boot: String },
    /// A task changed, the pull's progress apart.
    Task { info: TaskInfo },
    /// A task was removed.
    Gone { id: SubmissionId },
    /// The job of a task changed its state.
    Job { id: SubmissionId, state: JobState },
    /// Output grew to `end`. Many writes become one event.
    Log { id: SubmissionId, stream: String, end: u64 },
    /// What is wrong with the host; empty means well.
    Health { problems: Vec<String> },
    /// Nothing happened for a while: the stream lives.
    Alive,
}
