//! Rows as structs: the field names are the column names, and the field types define how they are read.

use uuid::Uuid;
use windlass_model::{
    fleet, gateway,
    id::{
        EventId, FleetId, GatewayId, InstanceId, ManagedJobId, ProjectId, RunId, SecretId, SubmissionId,
        UserId, VolumeId,
    },
    instance, job, managed_job, run,
    time::Timestamp,
    volume,
};

use super::{
    error::DbError,
    value::{Row, Val},
};

/// A type that a column can be read into. Text is moved out of the row: documents are long, and so are lists of them.
pub(super) trait Column: Sized {
    fn read(row: &mut Row, at: usize) -> Result<Self, DbError>;
}

macro_rules! columns {
    ($($kind:ty: $read:ident, $opt:ident;)*) => {$(
        impl Column for $kind {
            fn read(row: &mut Row, at: usize) -> Result<Self, DbError> {
                row.$read(at)
            }
        }
        impl Column for Option<$kind> {
            fn read(row: &mut Row, at: usize) -> Result<Self, DbError> {
                row.$opt(at)
            }
        }
    )*};
}

columns! {
    String: take_text, take_opt_text;
    i64: int, opt_int;
    bool: bool, opt_bool;
    f64: real, opt_real;
    Vec<u8>: bytes, opt_bytes;
    Uuid: uuid, opt_uuid;
    UserId: id, opt_id;
    ProjectId: id, opt_id;
    FleetId: id, opt_id;
    InstanceId: id, opt_id;
    RunId: id, opt_id;
    SubmissionId: id, opt_id;
    VolumeId: id, opt_id;
    GatewayId: id, opt_id;
    SecretId: id, opt_id;
    EventId: id, opt_id;
    ManagedJobId: id, opt_id;
    Timestamp: time, opt_time;
}

impl Row {
    pub fn opt_time(&self, column: usize) -> Result<Option<Timestamp>, DbError> {
        Ok(self.opt_int(column)?.map(Timestamp))
    }

    pub fn time(&self, column: usize) -> Result<Timestamp, DbError> {
        self.int(column).map(Timestamp)
    }
}

impl From<Timestamp> for Val {
    fn from(time: Timestamp) -> Self {
        Self::Int(time.0)
    }
}

/// Enums that are stored as words.
macro_rules! words {
    ($($kind:ty),* $(,)?) => {$(
        impl Column for $kind {
            fn read(row: &mut Row, at: usize) -> Result<Self, DbError> {
                row.str(at)?.parse().map_err(|_| DbError::Shape { column: at, want: stringify!($kind), have: "an unknown word" })
            }
        }
        impl From<$kind> for Val {
            fn from(word: $kind) -> Self {
                word.as_str().into()
            }
        }
    )*};
}

words!(
    run::Status,
    job::Status,
    instance::Status,
    fleet::Status,
    volume::Status,
    gateway::Status,
    managed_job::Status,
    managed_job::ScheduleState,
);

/// Declares a struct that is read from a row, written to one, or both.
macro_rules! record {
    (
        $(#[$doc:meta])*
        pub struct $name:ident {
            $($(#[$field_doc:meta])* pub $field:ident: $kind:ty,)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $kind,)*
        }

        impl $name {
            /// Number of columns; those that a SELECT adds come after them.
            pub const WIDTH: usize = [$(stringify!($field)),*].len();

            /// Columns, for a SELECT from the table under this alias.
            pub fn columns(alias: &str) -> String {
                [$(stringify!($field)),*].map(|field| format!("{alias}.{field}")).join(", ")
            }

            pub fn read(mut row: $crate::Row) -> Result<Self, $crate::DbError> {
                Self::read_from(&mut row, 0)
            }

            /// Reads a record that begins at this column, from a row with several records. Moves its texts out of the
            /// row.
            pub fn read_from(row: &mut $crate::Row, first: usize) -> Result<Self, $crate::DbError> {
                let mut at = first..;
                let mut next = || at.next().unwrap_or_default();
                Ok(Self { $($field: <$kind as $crate::record::Column>::read(row, next())?),* })
            }

            /// Columns and values for an insert.
            pub fn into_values(self) -> $crate::Values {
                vec![$((stringify!($field), $crate::Val::from(self.$field))),*]
            }
        }
    };
}

/// Declares the statements of a table, each formatted once, and the list that a test prepares on both databases.
macro_rules! statements {
    ($($(#[$doc:meta])* $name:ident = $text:literal $(, $part:expr)*;)*) => {
        $($(#[$doc])*
        static $name: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| format!($text $(, $part)*));)*

        pub(super) fn statements() -> Vec<&'static str> {
            vec![$($name.as_str()),*]
        }
    };
}

pub(super) use {record, statements};
