//! JSON Schema of every configuration, generated from the tables that also decode them.

use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings};
use serde::Serialize;
use serde_json::{Value, json};

use super::decode::{Fields, SchemaProperties};

/// Adds the doc comment of a field or type. A reference may not have siblings in draft-07, so it is wrapped.
pub(crate) fn describe(schema: &mut Schema, doc: &str) {
    let text = doc.lines().map(str::trim).collect::<Vec<_>>().join("\n").trim().to_owned();
    if text.is_empty() {
        return;
    }
    unwrap_reference(schema);
    schema.insert("description".to_owned(), Value::String(text));
}

/// Adds the default, unless it is null, which carries no information.
pub(crate) fn default<T: Serialize>(schema: &mut Schema, value: &T) {
    match serde_json::to_value(value) {
        Ok(Value::Null) | Err(_) => {}
        Ok(value) => {
            unwrap_reference(schema);
            schema.insert("default".to_owned(), value);
        }
    }
}

fn unwrap_reference(schema: &mut Schema) {
    if let Some(reference) = schema.remove("$ref") {
        schema.insert("allOf".to_owned(), json!([{ "$ref": reference }]));
    }
}

/// Returns the schema of a set of fields that stands alone.
pub(crate) fn object<T: Fields>(generator: &mut SchemaGenerator, doc: &str) -> Schema {
    let mut found = SchemaProperties::default();
    T::properties(generator, &mut found);
    let mut schema = schemars::json_schema!({
        "type": "object",
        "properties": found.properties,
        "additionalProperties": false,
    });
    if !found.required.is_empty() {
        schema.insert("required".to_owned(), json!(found.required));
    }
    describe(&mut schema, doc);
    schema
}

/// Returns `anyOf` of several types.
pub(crate) fn any_of(options: Vec<Schema>) -> Schema {
    schemars::json_schema!({ "anyOf": options })
}

/// Returns one draft-07 document for all configurations: one kind, selected by `type`.
pub fn schema() -> Value {
    let mut generator = SchemaSettings::draft07().into_generator();
    let kinds = vec![
        generator.subschema_for::<super::task::Task>(),
        generator.subschema_for::<super::service::Service>(),
        generator.subschema_for::<super::dev_environment::DevEnvironment>(),
        generator.subschema_for::<super::fleet::Fleet>(),
        generator.subschema_for::<super::gateway::Gateway>(),
        generator.subschema_for::<super::volume::Volume>(),
    ];
    let definitions = generator.take_definitions(true);
    json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "windlass configuration",
        "oneOf": kinds,
        "definitions": definitions,
    })
}

/// Returns the schema of `profiles.yml`.
pub fn profiles_schema() -> Value {
    let generator = SchemaSettings::draft07().into_generator();
    generator.into_root_schema_for::<super::profile::Profiles>().to_value()
}

pub(crate) fn subschema<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}
