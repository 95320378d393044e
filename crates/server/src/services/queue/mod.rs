//! The container queue: callers, their rights, and writes that update all related rows.

pub mod auth;
pub mod dispatchers;
pub mod execution;
pub mod output;
pub mod records;
pub mod requests;
mod transaction;
pub mod usage;

use sha2::{Digest as _, Sha256};
use windlass_model::queue::{QueueCaller, QueueRefusal};

use crate::{
    db::{
        DbError,
        queue_list::{ListError, QueueVisibility},
    },
    encryption::KeyError,
    error::Error as Inner,
};

/// Prefix of all names here.
pub const CLUSTER: &str = "wlass";
const LETTERS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
/// Length of the secret part of a token: more than 256 bits.
const SECRET_LETTERS: usize = 50;
/// Maximum number of attempts of a write that lost a race.
const WRITE_ATTEMPTS_MAX: usize = 50;

/// Error of a call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("missing or invalid token")]
    Unauthenticated,
    #[error(transparent)]
    Refused(#[from] QueueRefusal),
    #[error("{0} not found")]
    Missing(String),
    #[error("too many concurrent changes; try again")]
    Busy,
    /// More at once than one caller may have.
    #[error("{0}")]
    TooMany(String),
    #[error(transparent)]
    Inner(#[from] Inner),
}

impl From<DbError> for Error {
    fn from(error: DbError) -> Self {
        Self::Inner(error.into())
    }
}

impl From<KeyError> for Error {
    fn from(error: KeyError) -> Self {
        Self::Inner(error.into())
    }
}

impl From<serde_json::Error> for Error {
    fn from(error: serde_json::Error) -> Self {
        Self::Inner(error.into())
    }
}

impl From<getrandom::Error> for Error {
    fn from(error: getrandom::Error) -> Self {
        Self::Inner(error.into())
    }
}

impl From<ListError> for Error {
    fn from(error: ListError) -> Self {
        match error {
            ListError::Requested(why) => Self::invalid(why),
            ListError::Db(error) => error.into(),
        }
    }
}

impl Error {
    pub fn invalid(why: impl Into<String>) -> Self {
        Self::Refused(QueueRefusal::Invalid(why.into()))
    }

    pub fn denied(why: impl Into<String>) -> Self {
        Self::Refused(QueueRefusal::Denied(why.into()))
    }
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A caller with a token.
#[derive(Clone, Debug)]
pub struct Requester {
    pub who: QueueCaller,
    pub user: windlass_model::id::UserId,
    pub user_uuid: String,
    pub is_admin: bool,
    pub token_uuid: String,
    /// True if the caller may request containers.
    pub may_submit: bool,
    /// Hash of the user's token behind the presented one; `None` for tokens that end with an attempt.
    pub made_with: Option<String>,
    /// Expiry of the presented token.
    pub expires_at: Option<windlass_model::time::Timestamp>,
    /// Secret part of the presented token.
    pub secret: String,
    /// Client's id of this call; the same when the client sends it again.
    pub request: String,
}

impl Requester {
    /// The server itself, for its own jobs.
    pub fn server() -> Self {
        Self {
            who: QueueCaller::Admin,
            is_admin: true,
            ..Self::for_user(windlass_model::id::UserId(uuid::Uuid::nil()))
        }
    }

    /// The server on behalf of the user of a job.
    pub fn for_user(user: windlass_model::id::UserId) -> Self {
        Self {
            who: QueueCaller::User,
            user,
            user_uuid: auth::user_uuid(user),
            is_admin: false,
            token_uuid: String::new(),
            may_submit: true,
            made_with: None,
            expires_at: None,
            secret: String::new(),
            request: String::new(),
        }
    }

    /// The caller as a dispatcher: an admin acts as one with the presented token.
    pub fn as_dispatcher(&self) -> QueueCaller {
        match &self.who {
            QueueCaller::Admin => QueueCaller::Dispatcher { token: self.token_uuid.clone() },
            QueueCaller::User
            | QueueCaller::Dispatcher { .. }
            | QueueCaller::Executor { .. }
            | QueueCaller::Inside { .. } => self.who.clone(),
        }
    }

    /// Containers and logs that the caller sees.
    pub fn sight(&self) -> QueueVisibility {
        match &self.who {
            QueueCaller::Admin | QueueCaller::Dispatcher { .. } => QueueVisibility::All,
            QueueCaller::User => QueueVisibility::Owner(self.user_uuid.clone()),
            QueueCaller::Inside { container, .. } => QueueVisibility::Inside(container.clone()),
            QueueCaller::Executor { container, .. } => QueueVisibility::One(container.clone()),
        }
    }

    /// Requests that the caller sees. A dispatcher sees only those of its user.
    pub fn request_visibility(&self) -> QueueVisibility {
        match &self.who {
            QueueCaller::Admin => QueueVisibility::All,
            QueueCaller::User | QueueCaller::Dispatcher { .. } => {
                QueueVisibility::Owner(self.user_uuid.clone())
            }
            QueueCaller::Inside { container, .. } => QueueVisibility::Inside(container.clone()),
            QueueCaller::Executor { container, .. } => QueueVisibility::One(container.clone()),
        }
    }

    /// Checks that the caller may manage tokens: users may, programs that run or hold containers may not.
    pub fn require_token_management(&self) -> Result<()> {
        match self.who {
            QueueCaller::Admin | QueueCaller::User => Ok(()),
            QueueCaller::Dispatcher { .. } | QueueCaller::Executor { .. } | QueueCaller::Inside { .. } => {
                Err(Error::denied("this token may run containers, but not manage tokens"))
            }
        }
    }

    /// Checks that the caller may request containers.
    pub fn require_submit(&self) -> Result<()> {
        if self.may_submit {
            return Ok(());
        }
        Err(Error::denied(
            "you may not use the container queue; an admin can grant it with `windlass user grant NAME queue`",
        ))
    }
}

/// Deterministic name of an object.
pub fn object_uuid(infix: &str, of: &[u8]) -> String {
    format!("{CLUSTER}-{infix}-{}", encode_letters(&Sha256::digest(of), 15))
}

fn encode_letters(bytes: &[u8], count: usize) -> String {
    bytes.iter().take(count).map(|byte| char::from(LETTERS[usize::from(*byte) % LETTERS.len()])).collect()
}

/// Generates the secret part of a token.
fn generate_secret() -> Result<String, getrandom::Error> {
    let mut text = String::new();
    while text.len() < SECRET_LETTERS {
        let mut bytes = [0_u8; 64];
        getrandom::fill(&mut bytes)?;
        // Bytes beyond a multiple of the number of letters would make some letters more likely.
        let fair: Vec<u8> = bytes.into_iter().filter(|byte| *byte < 252).collect();
        text.push_str(&encode_letters(&fair, SECRET_LETTERS - text.len()));
    }
    Ok(text)
}

fn hash_secret(secret: &str) -> String {
    hex::encode(Sha256::digest(secret.as_bytes()))
}
