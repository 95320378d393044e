//! Errors of Postgres, classified by what the caller can do about them.

use std::sync::Arc;

use tokio_postgres::{Error, error::SqlState};

use crate::error::DbError;

/// Error of a statement that was not a COMMIT.
pub(super) fn classify(what: &'static str, sql: &str, error: Error) -> DbError {
    let Some(refusal) = error.as_db_error() else {
        return if is_lost(&error) {
            DbError::Unavailable { what, source: Arc::new(error) }
        } else {
            DbError::Statement { sql: sql.to_owned(), source: Arc::new(error) }
        };
    };
    let (code, constraint) = (refusal.code().clone(), refusal.constraint().unwrap_or_default().to_owned());
    if code == SqlState::UNIQUE_VIOLATION {
        return DbError::Conflict { constraint };
    }
    let source = Arc::new(error);
    match (&code.code()[..2], &code) {
        ("23", _) => DbError::ConstraintViolated { constraint },
        (_, code) if *code == SqlState::DISK_FULL => DbError::Full { source },
        (_, code) if *code == SqlState::READ_ONLY_SQL_TRANSACTION => DbError::ReadOnly { source },
        ("XX", code) if *code == SqlState::DATA_CORRUPTED || *code == SqlState::INDEX_CORRUPTED => {
            DbError::Corrupt { source }
        }
        // Connection failures, lack of resources, intervention of an operator, a transaction to be repeated.
        ("08" | "53" | "57" | "40" | "55", _) => DbError::Unavailable { what, source },
        _ => DbError::Statement { sql: sql.to_owned(), source },
    }
}

/// Returns whether a transaction lost a race, or was cancelled while waiting, and can be repeated.
pub(super) fn is_race(error: &Error) -> bool {
    const RACES: [SqlState; 4] = [
        SqlState::T_R_DEADLOCK_DETECTED,
        SqlState::T_R_SERIALIZATION_FAILURE,
        SqlState::QUERY_CANCELED,
        SqlState::LOCK_NOT_AVAILABLE,
    ];
    error.code().is_some_and(|code| RACES.contains(code))
}

/// Returns whether the connection, rather than the statement, failed.
pub(super) fn is_lost(error: &Error) -> bool {
    let by_io = std::error::Error::source(error).is_some_and(<dyn std::error::Error>::is::<std::io::Error>);
    let by_server = error.code().is_some_and(|code| {
        [SqlState::ADMIN_SHUTDOWN, SqlState::CRASH_SHUTDOWN, SqlState::CANNOT_CONNECT_NOW].contains(code)
            || code.code().starts_with("08")
    });
    error.is_closed() || by_io || by_server
}
