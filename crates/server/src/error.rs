//! Errors that services return. `http` converts them to a status and a body.

use std::borrow::Cow;

use windlass_api::error::{ApiErrorCode, ValidationError};

use crate::{
    db::DbError,
    encryption::KeyError,
    limits::{STREAMS_MAX, UPLOAD_TIMEOUT, UPLOADS_MAX, limit_hint},
    logs::LogError,
    node_keys::NodeKeyError,
    ssh_keys::KeyPairError,
};

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request is well-formed and cannot be fulfilled: 400.
    #[error("{msg}")]
    Refused { code: ApiErrorCode, msg: String },
    /// The request does not match its schema: 422.
    #[error("the request does not match its schema")]
    Invalid(Vec<ValidationError>),
    /// No token at all: 401.
    #[error("Not authenticated")]
    Unauthenticated,
    /// A token or code with which no session can be opened: 401.
    #[error("{msg}")]
    LoginRefused { msg: Cow<'static, str> },
    /// No valid token, or not the required role: 403.
    #[error("{msg}")]
    Denied { msg: Cow<'static, str> },
    /// No such URL, or no such project in it: 404.
    #[error("{msg}")]
    Unknown { msg: &'static str },
    /// The key was used for another request, or the object changed in the meantime: 409.
    #[error("{msg}")]
    Conflict { msg: &'static str },
    /// The body is longer than allowed: 413.
    #[error("the body is larger than {limit} bytes; {}", limit_hint(name))]
    TooLarge { limit: usize, name: &'static str },
    /// The user has reached the storage limit: 413.
    #[error(
        "the uploads of a user may not exceed {limit} bytes; uploads that no run uses are deleted after a \
         while (`keep_uploads`); {}",
        limit_hint(UPLOADS_MAX)
    )]
    UploadLimit { limit: u64 },
    /// The user has reached the limit of open streams: 429.
    #[error(
        "a user may have at most {limit} streams and logs open at once; close some; {}",
        limit_hint(STREAMS_MAX)
    )]
    StreamLimit { limit: usize },
    /// The client took too long to send its body: 408.
    #[error("timed out while receiving the request")]
    Slow,
    #[error("the upload took longer than {seconds} s; {}", limit_hint(UPLOAD_TIMEOUT))]
    SlowUpload { seconds: u64 },
    /// The caller exceeded its rate limit: 429.
    #[error("Too many requests; try again in a moment")]
    Fast,
    /// The server has reached its limit: 503.
    #[error("{msg}")]
    Busy { msg: &'static str },
    #[error("database error")]
    Db(#[from] DbError),
    #[error("encryption key error")]
    Key(#[from] KeyError),
    #[error("failed to read or write a stored document")]
    Document(#[from] serde_json::Error),
    #[error("failed to generate random bytes")]
    Random(#[from] getrandom::Error),
    #[error("log store error")]
    Logs(#[from] LogError),
    #[error("failed to read an SSH key")]
    SshKey(#[from] ssh_key::Error),
    #[error("failed to create an SSH key")]
    KeyPair(#[from] KeyPairError),
    #[error("failed to create a key for the nodes of a replica")]
    NodeKey(#[from] NodeKeyError),
}

impl Error {
    pub fn refused(msg: impl Into<String>) -> Self {
        Self::Refused { code: ApiErrorCode::Error, msg: msg.into() }
    }

    /// Error for a missing object inside a project: 400, never 404, because clients wait for it.
    pub fn absent(what: &str) -> Self {
        Self::Refused { code: ApiErrorCode::ResourceNotExists, msg: format!("{what} not found") }
    }

    pub fn exists(what: &str) -> Self {
        Self::Refused { code: ApiErrorCode::ResourceExists, msg: format!("{what} already exists") }
    }

    pub fn denied() -> Self {
        Self::Denied { msg: "Access denied".into() }
    }

    /// Denied, with a message that names who has the right.
    pub fn denied_with(msg: String) -> Self {
        Self::Denied { msg: msg.into() }
    }

    /// Error for one field of the body that violates its schema.
    pub fn field(name: &str, msg: impl Into<String>) -> Self {
        Self::Invalid(vec![ValidationError {
            loc: vec!["body".into(), name.into()],
            msg: msg.into(),
            r#type: "value_error".into(),
        }])
    }
}
