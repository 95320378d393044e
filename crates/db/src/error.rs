//! Database errors, classified by what the caller can do about them.

use std::{path::PathBuf, sync::Arc};

/// Shared, because one failed commit is the failure of every unit in it.
pub(super) type ErrorSource = Arc<dyn std::error::Error + Send + Sync>;

#[derive(Clone, Debug, thiserror::Error)]
pub enum DbError {
    /// Nothing was applied; a repeat is safe.
    #[error("failed to {what}: the database is unavailable")]
    Unavailable {
        what: &'static str,
        #[source]
        source: ErrorSource,
    },
    /// The connection broke during the commit: it may or may not have been applied.
    #[error("the connection was lost during the commit; the write may have been applied")]
    Unknown {
        #[source]
        source: ErrorSource,
    },
    /// A unique index rejected the row; `constraint` is the index's name on both databases.
    #[error("unique constraint `{constraint}` violated")]
    Conflict { constraint: String },
    /// A check, a reference or a NOT NULL rejected the row.
    #[error("constraint `{constraint}` violated")]
    ConstraintViolated { constraint: String },
    /// The row had changed (`Written::Stale`), where the caller could not expect that.
    #[error("the row was changed concurrently")]
    Stale { at: Option<usize> },
    #[error("failed to write: the disk is full")]
    Full {
        #[source]
        source: ErrorSource,
    },
    #[error("failed to write: the database is read-only")]
    ReadOnly {
        #[source]
        source: ErrorSource,
    },
    #[error("the database is damaged")]
    Corrupt {
        #[source]
        source: ErrorSource,
    },
    /// The statement is wrong: a bug in this program.
    #[error("failed to run `{sql}`")]
    Statement {
        sql: String,
        #[source]
        source: ErrorSource,
    },
    #[error("unexpected value in column {column}: expected {want}, found {have}")]
    Shape { column: usize, want: &'static str, have: &'static str },
    #[error("failed to read or write a JSON document")]
    Document {
        #[source]
        source: ErrorSource,
    },
    /// Another version of the server wrote it, or a person did. The text is in the source and may be secret.
    #[error("the document in column `{column}` of table `{table}`, row {row}, cannot be read")]
    StoredDocument {
        table: &'static str,
        column: &'static str,
        row: String,
        #[source]
        source: ErrorSource,
    },
    #[error("cannot open `{}`: another server (pid {pid}) is using it", path.display())]
    InUse { path: PathBuf, pid: String },
    #[error("failed to open {what}")]
    Open {
        what: String,
        #[source]
        source: ErrorSource,
    },
    #[error("unknown database URL `{url}`: expected `sqlite:PATH` or `postgres://…`")]
    Url { url: String },
    /// The database does not support TLS, which is required.
    #[error(
        "cannot connect to the database: it does not support TLS, and `sslmode={mode}` is {why}; hint: \
         enable TLS on the database server (`ssl = on`), or add `?sslmode=disable` to the URL if the network \
         is private"
    )]
    Plain {
        mode: &'static str,
        why: &'static str,
        #[source]
        source: ErrorSource,
    },
    #[error("failed to generate a random id")]
    Random {
        #[source]
        source: ErrorSource,
    },
    #[error("failed to migrate the database")]
    Migrate(#[from] super::migrate::MigrateError),
}

#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the database is closed")]
pub(super) struct DatabaseClosed;

impl DbError {
    pub(super) fn closed(what: &'static str) -> Self {
        Self::Unavailable { what, source: Arc::new(DatabaseClosed) }
    }

    pub(super) fn document(error: serde_json::Error) -> Self {
        Self::Document { source: Arc::new(error) }
    }

    pub(super) fn open(
        what: impl Into<String>,
        error: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self::Open { what: what.into(), source: Arc::new(error) }
    }

    /// Returns whether the database is unusable now but may recover.
    pub fn is_passing(&self) -> bool {
        matches!(
            self,
            Self::Unavailable { .. } | Self::Unknown { .. } | Self::Full { .. } | Self::ReadOnly { .. }
        )
    }

    /// Returns whether this unique index rejected the row.
    pub fn is_conflict_on(&self, index: &str) -> bool {
        matches!(self, Self::Conflict { constraint } if constraint == index)
    }
}
