//! What a service can answer instead of a result. `http` turns it into a status and a body.

use std::borrow::Cow;

use windlass_api::error::{ApiErrorCode, ValidationError};

use crate::{
    db::DbError,
    job_orders::node_key::NodeKeyError,
    limits::{STREAMS_MAX, UPLOADS_MAX, setting},
    logs::LogError,
    secrets::KeyError,
    ssh_keys::KeyPairError,
};

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request makes sense and cannot be done: 400.
    #[error("{msg}")]
    Refused { code: ApiErrorCode, msg: String },
    /// The request is not shaped as its schema says: 422.
    #[error("the request does not follow its schema")]
    Invalid(Vec<ValidationError>),
    /// No token at all: 401.
    #[error("Not authenticated")]
    Unauthenticated,
    /// No valid token, or not the role it takes: 403.
    #[error("{msg}")]
    Denied { msg: Cow<'static, str> },
    /// No such URL, or no such project in it: 404.
    #[error("{msg}")]
    Unknown { msg: &'static str },
    /// The same key was used for something else, or the thing changed meanwhile: 409.
    #[error("{msg}")]
    Conflict { msg: &'static str },
    /// The body is longer than allowed: 413.
    #[error("the body is larger than {limit} bytes; {}", setting(name))]
    TooLarge { limit: usize, name: &'static str },
    /// The user has stored as much as one may: 413.
    #[error(
        "one user may store {limit} bytes of uploads, and this is more; what no run names is deleted after a while \
         (`keep_uploads`); {}",
        setting(UPLOADS_MAX)
    )]
    UploadLimit { limit: u64 },
    /// The user follows as much as one may: 429.
    #[error("one user may have {limit} streams and logs open at once; close some; {}", setting(STREAMS_MAX))]
    StreamLimit { limit: usize },
    /// The client took too long to send its body: 408.
    #[error("the request took too long to arrive")]
    Slow,
    /// More than one caller may ask for in this time: 429.
    #[error("Too many requests; try again in a moment")]
    Fast,
    /// As many as this server takes: 503.
    #[error("{msg}")]
    Busy { msg: &'static str },
    #[error("use the database")]
    Db(#[from] DbError),
    #[error("use the keys")]
    Key(#[from] KeyError),
    #[error("read or write a stored document")]
    Document(#[from] serde_json::Error),
    #[error("draw random bytes")]
    Random(#[from] getrandom::Error),
    #[error("use the logs")]
    Logs(#[from] LogError),
    #[error("read an SSH key")]
    SshKey(#[from] ssh_key::Error),
    #[error("make an SSH key")]
    KeyPair(#[from] KeyPairError),
    #[error("make a key for the nodes of a replica")]
    NodeKey(#[from] NodeKeyError),
}

impl Error {
    pub fn refused(msg: impl Into<String>) -> Self {
        Self::Refused { code: ApiErrorCode::Error, msg: msg.into() }
    }

    /// A missing thing inside a project is a 400, never a 404: clients wait for it.
    pub fn absent(what: &str) -> Self {
        Self::Refused { code: ApiErrorCode::ResourceNotExists, msg: format!("{what} not found") }
    }

    pub fn exists(what: &str) -> Self {
        Self::Refused { code: ApiErrorCode::ResourceExists, msg: format!("{what} already exists") }
    }

    pub fn denied() -> Self {
        Self::Denied { msg: "Access denied".into() }
    }

    /// Refused for want of a right, in words that say who has it.
    pub fn denied_with(msg: String) -> Self {
        Self::Denied { msg: msg.into() }
    }

    /// One field of the body that its schema forbids.
    pub fn field(name: &str, msg: impl Into<String>) -> Self {
        Self::Invalid(vec![ValidationError {
            loc: vec!["body".into(), name.into()],
            msg: msg.into(),
            r#type: "value_error".into(),
        }])
    }
}
