//! Errors that end a pass. The engine logs them once and retries the row later.

use windlass_model::event::TransitionError;

use crate::{db::DbError, encryption::KeyError, node_keys::NodeKeyError, parsed_run_spec::RunSpecError};

#[derive(Debug, thiserror::Error)]
pub enum PassError {
    #[error(transparent)]
    Db(#[from] DbError),
    /// The state machine does not permit this transition: the plan and the row disagree.
    #[error(transparent)]
    TransitionError(#[from] TransitionError),
    #[error("failed to write a document")]
    Document {
        #[source]
        source: serde_json::Error,
    },
    #[error(transparent)]
    Shape(#[from] RunSpecError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error(transparent)]
    NodeKey(#[from] NodeKeyError),
    #[error("the job has no instance")]
    NoInstance,
    #[error("cannot end a job with status {status}")]
    NoTransition { status: &'static str },
}

impl PassError {
    pub(crate) fn document(source: serde_json::Error) -> Self {
        Self::Document { source }
    }
}
