//! JSON documents that are passed through unchanged.
//!
//! Configurations, run and job specs are stored as text and returned byte for byte: clients compare them field by
//! field, where an absent key and a null differ.

use std::{borrow::Cow, marker::PhantomData, sync::Arc};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Value, value::RawValue};

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Document(Box<RawValue>);

impl Document {
    /// Wraps text that is JSON already, such as a column of the database.
    pub fn from_text(text: String) -> Result<Self, serde_json::Error> {
        RawValue::from_string(text).map(Self)
    }

    pub fn new<T: Serialize>(value: &T) -> Result<Self, serde_json::Error> {
        serde_json::value::to_raw_value(value).map(Self)
    }

    pub fn text(&self) -> &str {
        self.0.get()
    }

    /// Parses the document. It is valid JSON by construction, so only its depth can make this fail.
    pub fn value(&self) -> Result<Value, serde_json::Error> {
        serde_json::from_str(self.0.get())
    }
}

/// JSON text of a `T`, rendered once and returned many times.
#[derive(Debug)]
pub struct RenderedJson<T> {
    text: Arc<RawValue>,
    marker: PhantomData<fn() -> T>,
}

impl<T: Serialize> RenderedJson<T> {
    pub fn new(value: &T) -> Result<Self, serde_json::Error> {
        Ok(Self { text: Arc::from(serde_json::value::to_raw_value(value)?), marker: PhantomData })
    }
}

impl<T> RenderedJson<T> {
    pub fn text(&self) -> &str {
        self.text.get()
    }
}

impl<T> Clone for RenderedJson<T> {
    fn clone(&self) -> Self {
        Self { text: Arc::clone(&self.text), marker: PhantomData }
    }
}

impl<T> Serialize for RenderedJson<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.text.serialize(serializer)
    }
}

impl JsonSchema for Document {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Document".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "object" })
    }
}

/// Schema of a `Timestamp`: RFC 3339, UTC.
pub(crate) struct DateTime;

impl JsonSchema for DateTime {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "DateTime".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "date-time" })
    }
}
