//! OpenAPI 3.1 document, generated from the operation table.

use schemars::{JsonSchema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use crate::{
    error,
    operation::{Access, Body, Entry},
    operations,
};

/// Operations that are open to all callers and reject some.
const LOGINS: [&str; 3] = ["open_session", "start_oidc_login", "finish_oidc_login"];

/// Returns the whole document. Deterministic: the same input results in the same bytes.
pub fn document() -> Value {
    let mut settings = SchemaSettings::draft2020_12();
    settings.definitions_path = "/components/schemas".into();
    settings.meta_schema = None;
    // Types of different modules share names (`ListRequest`), so the types of each operation are inlined, and those
    // that they share are inlined too.
    settings.inline_subschemas = true;
    let mut schemas = settings.into_generator();
    let mut paths = Map::new();
    for entry in operations::table() {
        let path = paths.entry(entry.path).or_insert_with(|| json!({}));
        path[entry.method.name().to_ascii_lowercase()] = operation(&entry, &mut schemas);
    }
    json!({
        "openapi": "3.1.0",
        "info": { "title": "windlass", "version": env!("CARGO_PKG_VERSION") },
        "paths": paths,
        "components": {
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
            "responses": refusals(&mut schemas),
        },
    })
}

/// Returns the document as it is stored in the repository.
pub fn render() -> String {
    format!("{:#}\n", document())
}

fn operation(entry: &Entry, schemas: &mut SchemaGenerator) -> Value {
    let mut parameters: Vec<Value> = entry
        .parameters()
        .map(|name| json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } }))
        .collect();
    let request = (entry.request)(schemas).to_value();
    let mut operation = json!({
        "operationId": entry.id,
        "summary": entry.summary.trim(),
        "x-access": entry.access.name(),
        "security": if entry.access == Access::Open { json!([]) } else { json!([{ "token": [] }]) },
        "responses": responses(entry, schemas),
    });
    match entry.body {
        Body::Json => {
            operation["requestBody"] = json!({
                "required": request.get("required").is_some(),
                "content": { "application/json": { "schema": request } },
            });
        }
        Body::File => {
            parameters.extend(query_parameters(&request));
            operation["requestBody"] = json!({
                "required": true,
                "content": { "multipart/form-data": { "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": { "file": { "type": "string", "contentMediaType": "application/octet-stream" } },
                } } },
            });
        }
        Body::Query | Body::Text | Body::Bytes | Body::Events | Body::Stream => {
            parameters.extend(query_parameters(&request))
        }
    }
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    operation
}

fn query_parameters(request: &Value) -> Vec<Value> {
    let Some(properties) = request["properties"].as_object() else { return Vec::new() };
    let required =
        |name: &str| request["required"].as_array().is_some_and(|all| all.iter().any(|n| n == name));
    properties
        .iter()
        .map(|(name, schema)| json!({ "name": name, "in": "query", "required": required(name), "schema": schema }))
        .collect()
}

fn responses(entry: &Entry, schemas: &mut SchemaGenerator) -> Value {
    let answer = (entry.response)(schemas).to_value();
    let kind = match entry.body {
        Body::Json | Body::File | Body::Query => "application/json",
        Body::Text => "text/plain",
        Body::Bytes => "application/octet-stream",
        Body::Events => "text/event-stream",
        Body::Stream => "",
    };
    let answer = if entry.body == Body::Events { event_schema(answer) } else { answer };
    let mut responses = if entry.body == Body::Stream {
        json!({ "101": { "description": "Switching protocols: from here on, the connection carries bytes in both directions." } })
    } else {
        json!({ "200": { "description": "Done.", "content": { kind: { "schema": answer } } } })
    };
    let mut refusals = vec!["400", "422", "503"];
    if matches!(entry.body, Body::Json | Body::File) {
        refusals.extend(["408", "409", "413"]);
    }
    if entry.access != Access::Open || LOGINS.contains(&entry.id) {
        refusals.extend(["401", "403", "429"]);
    }
    if entry.access.in_project() {
        refusals.push("404");
    }
    refusals.sort_unstable();
    for status in refusals {
        responses[status] = json!({ "$ref": format!("#/components/responses/{status}") });
    }
    responses
}

/// Schema of one event of a stream, whose data is the JSON text of `data`.
fn event_schema(data: Value) -> Value {
    json!({
        "type": "object",
        "description": "One event. Comments, which keep the connection open, may come between events.",
        "required": ["event", "data"],
        "properties": {
            "event": { "type": "string", "description": "Name of the event." },
            "data": { "type": "string", "contentMediaType": "application/json", "contentSchema": data },
            "id": { "type": "string", "description": "Position in the stream, for `Last-Event-ID` of a later request." },
        },
    })
}

fn refusals(schemas: &mut SchemaGenerator) -> Value {
    fn refusal<T: JsonSchema>(schemas: &mut SchemaGenerator, description: &str) -> Value {
        let schema = schemas.subschema_for::<error::ErrorBody<T>>().to_value();
        json!({ "description": description, "content": { "application/json": { "schema": schema } } })
    }
    json!({
        "400": refusal::<Vec<error::BadRequest>>(schemas, "Refused; the only entry gives the reason. Also returned if an object does not exist."),
        "401": refusal::<error::ErrorDetail>(schemas, "The request has no token."),
        "403": refusal::<error::ErrorDetail>(schemas, "The token is invalid, or its user does not have the required role."),
        "404": refusal::<error::ErrorDetail>(schemas, "The path or the project does not exist."),
        "408": refusal::<error::ErrorDetail>(schemas, "The body did not arrive in time."),
        "409": refusal::<error::ErrorDetail>(schemas, "The key was used for another request, or the object was changed in the meantime."),
        "413": refusal::<error::ErrorDetail>(schemas, "The body is larger than allowed."),
        "429": refusal::<error::ErrorDetail>(schemas, "Too many requests; retry after the time in `Retry-After`."),
        "503": refusal::<error::ErrorDetail>(schemas, "The server is at its limit, or its database is not available; try again later."),
        "422": refusal::<Vec<error::ValidationError>>(schemas, "The request does not match its schema."),
    })
}

#[cfg(test)]
mod tests {
    use super::document;

    #[test]
    fn every_operation_declares_its_access_and_operation_id() {
        let document = document();
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                assert!(operation["x-access"].is_string(), "{method} {path}");
                assert!(operation["operationId"].is_string(), "{method} {path}");
            }
        }
    }
}
