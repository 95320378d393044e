//! Conversion of values to and from Postgres's types.

use tokio_postgres::types::{IsNull, ToSql, Type, private::BytesMut, to_sql_checked};

use crate::{
    error::DbError,
    value::{Row, Val},
};

type BindError = Box<dyn std::error::Error + Sync + Send>;

#[derive(Debug, thiserror::Error)]
#[error("cannot bind {have} to a parameter of type {want}")]
struct Mismatch {
    have: &'static str,
    want: String,
}

/// A parameter; the statement defines its type.
#[derive(Debug)]
pub(super) struct Bind<'a>(pub(super) &'a Val);

impl ToSql for Bind<'_> {
    fn to_sql(&self, ty: &Type, out: &mut BytesMut) -> Result<IsNull, BindError> {
        let mismatch = || Mismatch { have: self.0.kind(), want: ty.to_string() };
        match self.0 {
            Val::Null => Ok(IsNull::Yes),
            Val::Bool(flag) if *ty == Type::BOOL => flag.to_sql(ty, out),
            Val::Int(number) if *ty == Type::INT8 => number.to_sql(ty, out),
            Val::Int(number) if *ty == Type::INT4 => {
                i32::try_from(*number).map_err(|_| mismatch())?.to_sql(ty, out)
            }
            Val::Real(number) if *ty == Type::FLOAT8 => number.to_sql(ty, out),
            Val::Text(text) if <&str as ToSql>::accepts(ty) => text.to_sql(ty, out),
            Val::Bytes(bytes) if *ty == Type::BYTEA => bytes.to_sql(ty, out),
            // Times are filled in before a unit is sent; a plain read uses `now_us()`.
            Val::Bool(_)
            | Val::Int(_)
            | Val::Real(_)
            | Val::Text(_)
            | Val::Bytes(_)
            | Val::Now
            | Val::NowPlus(_) => Err(Box::new(mismatch())),
        }
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}

/// One column of many rows, for `unnest`.
#[derive(Debug)]
pub(super) enum Array {
    Bool(Vec<Option<bool>>),
    Int(Vec<Option<i64>>),
    Real(Vec<Option<f64>>),
    Text(Vec<Option<String>>),
    Bytes(Vec<Option<Vec<u8>>>),
}

impl Array {
    /// `udt` is the column's type by its Postgres name.
    pub(super) fn new(udt: &str) -> Option<Self> {
        match udt {
            "bool" => Some(Self::Bool(Vec::new())),
            "int8" => Some(Self::Int(Vec::new())),
            "float8" => Some(Self::Real(Vec::new())),
            "text" => Some(Self::Text(Vec::new())),
            "bytea" => Some(Self::Bytes(Vec::new())),
            _ => None,
        }
    }

    pub(super) fn push(&mut self, value: Val) -> Result<(), DbError> {
        match (self, value) {
            (Self::Bool(column), Val::Bool(flag)) => column.push(Some(flag)),
            (Self::Bool(column), Val::Null) => column.push(None),
            (Self::Int(column), Val::Int(number)) => column.push(Some(number)),
            (Self::Int(column), Val::Null) => column.push(None),
            (Self::Real(column), Val::Real(number)) => column.push(Some(number)),
            (Self::Real(column), Val::Null) => column.push(None),
            (Self::Text(column), Val::Text(text)) => column.push(Some(text)),
            (Self::Text(column), Val::Null) => column.push(None),
            (Self::Bytes(column), Val::Bytes(bytes)) => column.push(Some(bytes)),
            (Self::Bytes(column), Val::Null) => column.push(None),
            (array, value) => {
                let want = array.kind();
                return Err(DbError::Shape { column: 0, want, have: value.kind() });
            }
        }
        Ok(())
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Bool(_) => "a boolean",
            Self::Int(_) => "an integer",
            Self::Real(_) => "a real number",
            Self::Text(_) => "text",
            Self::Bytes(_) => "bytes",
        }
    }

    pub(super) fn param(&self) -> &(dyn ToSql + Sync) {
        match self {
            Self::Bool(column) => column,
            Self::Int(column) => column,
            Self::Real(column) => column,
            Self::Text(column) => column,
            Self::Bytes(column) => column,
        }
    }
}

pub(super) fn read_row(row: &tokio_postgres::Row) -> Result<Row, DbError> {
    (0..row.len()).map(|column| read_value(row, column)).collect::<Result<_, _>>().map(Row)
}

fn read_value(row: &tokio_postgres::Row, column: usize) -> Result<Val, DbError> {
    let wrong = |_| DbError::Shape { column, want: "a value of the column's type", have: "another value" };
    let ty = row.columns()[column].type_();
    let value = match *ty {
        Type::BOOL => row.try_get::<_, Option<bool>>(column).map_err(wrong)?.map(Val::Bool),
        Type::INT8 => row.try_get::<_, Option<i64>>(column).map_err(wrong)?.map(Val::Int),
        Type::INT4 => row.try_get::<_, Option<i32>>(column).map_err(wrong)?.map(Val::from),
        Type::INT2 => row.try_get::<_, Option<i16>>(column).map_err(wrong)?.map(Val::from),
        Type::FLOAT8 => row.try_get::<_, Option<f64>>(column).map_err(wrong)?.map(Val::Real),
        Type::TEXT | Type::VARCHAR | Type::NAME => {
            row.try_get::<_, Option<String>>(column).map_err(wrong)?.map(Val::Text)
        }
        Type::BYTEA => row.try_get::<_, Option<Vec<u8>>>(column).map_err(wrong)?.map(Val::Bytes),
        _ => {
            let want = "BOOLEAN, BIGINT, DOUBLE PRECISION, TEXT or BYTEA";
            return Err(DbError::Shape { column, want, have: "another type; add a cast" });
        }
    };
    Ok(value.unwrap_or(Val::Null))
}
