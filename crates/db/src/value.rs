//! Values and rows with the same meaning on both databases.

use serde::de::DeserializeOwned;
use uuid::Uuid;
use windlass_model::id::{
    ContainerId, EventId, FleetId, GatewayId, InstanceId, ManagedJobId, ProjectId, RunId, SecretId,
    SubmissionId, UserId, VolumeId,
};

use super::error::DbError;

/// A parameter. Times are BIGINT microseconds, ids lower-case text, JSON text, flags BOOLEAN.
#[derive(Clone, Debug, PartialEq)]
pub enum Val {
    Null,
    Bool(bool),
    Int(i64),
    Real(f64),
    Text(String),
    Bytes(Vec<u8>),
    /// The database's time, the same for everything that one unit writes.
    Now,
    /// `Now` plus so many microseconds.
    NowPlus(i64),
}

impl Val {
    /// Replaces the placeholders for the database's time.
    pub(super) fn at(self, now: i64) -> Self {
        match self {
            Self::Now => Self::Int(now),
            Self::NowPlus(us) => Self::Int(now.saturating_add(us)),
            kept @ (Self::Null
            | Self::Bool(_)
            | Self::Int(_)
            | Self::Real(_)
            | Self::Text(_)
            | Self::Bytes(_)) => kept,
        }
    }

    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Int(_) => "an integer",
            Self::Real(_) => "a real number",
            Self::Text(_) => "text",
            Self::Bytes(_) => "bytes",
            Self::Now | Self::NowPlus(_) => "a time",
        }
    }

    /// Any serialisable document, as JSON text.
    pub fn json<T: serde::Serialize + ?Sized>(document: &T) -> Result<Self, DbError> {
        serde_json::to_string(document).map(Self::Text).map_err(DbError::document)
    }

    /// A list for `IN (SELECT value FROM json_each(CAST($n AS TEXT)))`, which both databases support.
    pub fn list<T: ToString>(items: impl IntoIterator<Item = T>) -> Self {
        let items: Vec<serde_json::Value> =
            items.into_iter().map(|item| serde_json::Value::String(item.to_string())).collect();
        Self::Text(serde_json::Value::Array(items).to_string())
    }
}

/// `params![id, "text", 7_i64, None::<String>, Val::Now]`.
#[macro_export]
macro_rules! params {
    ($($value:expr),* $(,)?) => { vec![$($crate::Val::from($value)),*] };
}

impl From<bool> for Val {
    fn from(flag: bool) -> Self {
        Self::Bool(flag)
    }
}

macro_rules! integers {
    ($($kind:ty),*) => {$(
        impl From<$kind> for Val {
            fn from(number: $kind) -> Self {
                Self::Int(i64::from(number))
            }
        }
    )*};
}
integers!(i64, i32, i16, u32, u16, u8);

impl From<usize> for Val {
    fn from(number: usize) -> Self {
        Self::Int(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<f64> for Val {
    fn from(number: f64) -> Self {
        Self::Real(number)
    }
}

impl From<String> for Val {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&String> for Val {
    fn from(text: &String) -> Self {
        Self::Text(text.clone())
    }
}

impl From<&str> for Val {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<Vec<u8>> for Val {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<&[u8]> for Val {
    fn from(bytes: &[u8]) -> Self {
        Self::Bytes(bytes.to_vec())
    }
}

impl<T: Into<Val>> From<Option<T>> for Val {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

impl From<Uuid> for Val {
    fn from(id: Uuid) -> Self {
        Self::Text(id.to_string())
    }
}

macro_rules! ids {
    ($($id:ty),*) => {$(
        impl From<$id> for Val {
            fn from(id: $id) -> Self {
                id.0.into()
            }
        }
    )*};
}
ids!(
    UserId,
    ProjectId,
    FleetId,
    InstanceId,
    RunId,
    SubmissionId,
    VolumeId,
    GatewayId,
    SecretId,
    EventId,
    ManagedJobId,
    ContainerId
);

/// One row of a result. Columns are read by position, in the order of the SELECT.
#[derive(Clone, Debug, PartialEq)]
pub struct Row(pub Vec<Val>);

impl Row {
    fn at(&self, column: usize, want: &'static str) -> Result<&Val, DbError> {
        self.0.get(column).ok_or(DbError::Shape { column, want, have: "no such column" })
    }

    /// Reads a value if it is not NULL.
    fn opt<'a, T>(
        &'a self,
        column: usize,
        want: &'static str,
        read: impl Fn(&'a Val) -> Option<T>,
    ) -> Result<Option<T>, DbError> {
        let value = self.at(column, want)?;
        if *value == Val::Null {
            return Ok(None);
        }
        read(value).map(Some).ok_or(DbError::Shape { column, want, have: value.kind() })
    }

    fn required<T>(column: usize, want: &'static str, value: Option<T>) -> Result<T, DbError> {
        value.ok_or(DbError::Shape { column, want, have: "null" })
    }

    pub fn is_null(&self, column: usize) -> bool {
        self.0.get(column) == Some(&Val::Null)
    }

    pub fn opt_str(&self, column: usize) -> Result<Option<&str>, DbError> {
        self.opt(column, "text", |value| if let Val::Text(text) = value { Some(text.as_str()) } else { None })
    }

    pub fn str(&self, column: usize) -> Result<&str, DbError> {
        Self::required(column, "text", self.opt_str(column)?)
    }

    pub fn opt_text(&self, column: usize) -> Result<Option<String>, DbError> {
        Ok(self.opt_str(column)?.map(str::to_owned))
    }

    pub fn text(&self, column: usize) -> Result<String, DbError> {
        self.str(column).map(str::to_owned)
    }

    /// Moves the text out of the row instead of copying it; the column is empty afterwards.
    pub(super) fn take_opt_text(&mut self, column: usize) -> Result<Option<String>, DbError> {
        if let Some(Val::Text(text)) = self.0.get_mut(column) {
            return Ok(Some(std::mem::take(text)));
        }
        self.opt_text(column)
    }

    pub(super) fn take_text(&mut self, column: usize) -> Result<String, DbError> {
        let text = self.take_opt_text(column)?;
        Self::required(column, "text", text)
    }

    pub fn opt_int(&self, column: usize) -> Result<Option<i64>, DbError> {
        self.opt(
            column,
            "an integer",
            |value| if let Val::Int(number) = value { Some(*number) } else { None },
        )
    }

    pub fn int(&self, column: usize) -> Result<i64, DbError> {
        Self::required(column, "an integer", self.opt_int(column)?)
    }

    /// SQLite has no booleans, it returns 0 and 1.
    pub fn opt_bool(&self, column: usize) -> Result<Option<bool>, DbError> {
        self.opt(column, "a boolean", |value| {
            if let Val::Bool(flag) = value {
                Some(*flag)
            } else if let Val::Int(number) = value {
                Some(*number != 0)
            } else {
                None
            }
        })
    }

    pub fn bool(&self, column: usize) -> Result<bool, DbError> {
        Self::required(column, "a boolean", self.opt_bool(column)?)
    }

    pub fn opt_real(&self, column: usize) -> Result<Option<f64>, DbError> {
        self.opt(column, "a real number", |value| {
            if let Val::Real(number) = value {
                Some(*number)
            } else if let Val::Int(number) = value {
                i32::try_from(*number).ok().map(f64::from)
            } else {
                None
            }
        })
    }

    pub fn real(&self, column: usize) -> Result<f64, DbError> {
        Self::required(column, "a real number", self.opt_real(column)?)
    }

    pub fn opt_bytes(&self, column: usize) -> Result<Option<Vec<u8>>, DbError> {
        self.opt(
            column,
            "bytes",
            |value| if let Val::Bytes(bytes) = value { Some(bytes.clone()) } else { None },
        )
    }

    pub fn bytes(&self, column: usize) -> Result<Vec<u8>, DbError> {
        Self::required(column, "bytes", self.opt_bytes(column)?)
    }

    pub fn opt_uuid(&self, column: usize) -> Result<Option<Uuid>, DbError> {
        self.opt(
            column,
            "an id",
            |value| if let Val::Text(text) = value { Uuid::try_parse(text).ok() } else { None },
        )
    }

    pub fn uuid(&self, column: usize) -> Result<Uuid, DbError> {
        Self::required(column, "an id", self.opt_uuid(column)?)
    }

    /// A typed id, or any other type made from a UUID.
    pub fn id<T: From<Uuid>>(&self, column: usize) -> Result<T, DbError> {
        self.uuid(column).map(T::from)
    }

    pub fn opt_id<T: From<Uuid>>(&self, column: usize) -> Result<Option<T>, DbError> {
        Ok(self.opt_uuid(column)?.map(T::from))
    }

    /// A document stored as JSON text.
    pub fn json<T: DeserializeOwned>(&self, column: usize) -> Result<T, DbError> {
        serde_json::from_str(self.str(column)?).map_err(DbError::document)
    }
}
