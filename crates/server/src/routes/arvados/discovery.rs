//! Discovery document, from which clients generate their calls: one entry for each call.

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use serde_json::{Map, Value, json};

use crate::{
    peer::EncryptedConnection,
    services::queue::{CLUSTER, records::etag},
};

/// Resource, its record in the body, the kind, and its methods.
const RESOURCES: [(&str, &str, &str, &[&str]); 5] = [
    (
        "containers",
        "container",
        "Container",
        &[
            "list",
            "get",
            "create",
            "update",
            "delete",
            "lock",
            "unlock",
            "auth",
            "current",
            "secret_mounts",
            "update_priority",
        ],
    ),
    (
        "container_requests",
        "container_request",
        "ContainerRequest",
        &["list", "get", "create", "update", "delete", "container_status"],
    ),
    ("logs", "log", "Log", &["list", "get", "create"]),
    (
        "api_client_authorizations",
        "api_client_authorization",
        "ApiClientAuthorization",
        &["list", "get", "create", "delete", "current"],
    ),
    ("users", "user", "User", &["list", "get", "current"]),
];

fn parameter(kind: &str, location: &str) -> Value {
    json!({ "type": kind, "location": location, "required": location == "path" })
}

fn method(resource: &str, record: &str, kind: &str, name: &str) -> Value {
    let (http, path) = match name {
        "list" => ("GET", resource.to_owned()),
        "create" => ("POST", resource.to_owned()),
        "get" => ("GET", format!("{resource}/{{uuid}}")),
        "update" => ("PUT", format!("{resource}/{{uuid}}")),
        "delete" => ("DELETE", format!("{resource}/{{uuid}}")),
        "current" => ("GET", format!("{resource}/current")),
        "lock" | "unlock" | "update_priority" => ("POST", format!("{resource}/{{uuid}}/{name}")),
        other => ("GET", format!("{resource}/{{uuid}}/{other}")),
    };
    let mut parameters = Map::new();
    if path.contains("{uuid}") {
        parameters.insert("uuid".into(), parameter("string", "path"));
    }
    let lists = name == "list" || (name == "current" && resource == "containers");
    if lists {
        for (name, kind) in [
            ("filters", "array"),
            ("order", "array"),
            ("distinct", "boolean"),
            ("limit", "integer"),
            ("offset", "integer"),
            ("count", "string"),
        ] {
            parameters.insert(name.into(), parameter(kind, "query"));
        }
    }
    parameters.insert("select".into(), parameter("array", "query"));
    if name == "unlock" {
        parameters.insert("attempt".into(), parameter("integer", "query"));
        parameters.insert("release".into(), parameter("boolean", "query"));
    }
    if name == "current" && resource == "containers" {
        parameters.insert("scope".into(), parameter("string", "query"));
    }
    let answer = if name == "list" { format!("{kind}List") } else { kind.to_owned() };
    let mut method = json!({
        "id": format!("arvados.{resource}.{name}"), "path": path, "httpMethod": http,
        "description": format!("{name} {resource}"), "parameters": parameters, "response": { "$ref": answer },
    });
    if matches!(name, "create" | "update")
        && let Some(method) = method.as_object_mut()
    {
        let properties = json!({ record: { "$ref": kind } });
        method.insert("request".into(), json!({ "required": true, "properties": properties }));
    }
    method
}

fn document(root: &str, socket: &str) -> Value {
    let mut schemas = Map::new();
    let mut resources = Map::new();
    for (resource, record, kind, methods) in RESOURCES {
        for id in [kind.to_owned(), format!("{kind}List")] {
            schemas.insert(id.clone(), json!({ "id": id, "type": "object", "properties": {} }));
        }
        let methods: Map<String, Value> =
            methods.iter().map(|name| ((*name).to_owned(), method(resource, record, kind, name))).collect();
        resources.insert(resource.into(), json!({ "methods": methods }));
    }
    json!({
        "kind": "discovery#restDescription", "discoveryVersion": "v1", "id": "arvados:v1", "name": "arvados",
        "version": "v1", "revision": "20261115", "title": "Container queue",
        "description": "Containers, requests for them, and their log", "generatedAt": "2026-11-15T00:00:00Z",
        "rootUrl": format!("{root}/"), "servicePath": "arvados/v1/", "baseUrl": format!("{root}/arvados/v1/"),
        "basePath": "/arvados/v1/", "uuidPrefix": CLUSTER, "websocketUrl": socket, "maxItemsPerResponse": 1000,
        "parameters": {}, "protocol": "rest", "schemas": schemas, "resources": resources,
    })
}

/// Returns the document, without authentication. It names the server as the client does.
pub(super) async fn respond(request: Request) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    let host = host.unwrap_or("localhost").to_owned();
    let secure = request.extensions().get::<EncryptedConnection>().is_some();
    let (http, ws) = if secure { ("https", "wss") } else { ("http", "ws") };
    let document = document(&format!("{http}://{host}"), &format!("{ws}://{host}/websocket"));
    let tag = format!("\"{}\"", etag(&document));
    let same = request.headers().get(header::IF_NONE_MATCH).is_some_and(|have| have == tag.as_str());
    let mut response = Response::new(if same { Body::empty() } else { Body::from(document.to_string()) });
    if same {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    }
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        headers.insert(header::ETAG, tag);
    }
    response
}
