//! CORS: the proxy answers browsers on behalf of the service.

use bytes::Bytes;
use hyper::{
    HeaderMap, Method, Response, StatusCode,
    header::{self, HeaderValue},
    http::request::Parts,
};

use crate::{response_body::ResponseBody, route::Cors};

const METHODS: HeaderValue = HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");
const ANY: HeaderValue = HeaderValue::from_static("*");

/// Answers a preflight request. Browsers send it without credentials, so this precedes authentication.
pub(crate) fn preflight(cors: &Cors, parts: &Parts) -> Option<Response<ResponseBody>> {
    if parts.method != Method::OPTIONS || !parts.headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD) {
        return None;
    }
    let origin = parts.headers.get(header::ORIGIN)?;
    let mut response = Response::new(ResponseBody::text(Bytes::new()));
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    if !set_allow_origin(cors, origin, headers) {
        *response.status_mut() = StatusCode::FORBIDDEN;
        return Some(response);
    }
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
    if let Some(requested) = parts.headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, requested.clone());
    }
    if let Ok(age) = HeaderValue::from_str(&cors.max_age_s.to_string()) {
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, age);
    }
    Some(response)
}

/// Sets the CORS headers of a response. Replaces those of the replica: duplicate headers would be invalid.
pub(crate) fn set_headers(cors: &Cors, origin: Option<&HeaderValue>, headers: &mut HeaderMap) {
    headers.remove(header::ACCESS_CONTROL_ALLOW_ORIGIN);
    headers.remove(header::ACCESS_CONTROL_ALLOW_CREDENTIALS);
    if let Some(origin) = origin {
        set_allow_origin(cors, origin, headers);
    }
}

fn set_allow_origin(cors: &Cors, origin: &HeaderValue, headers: &mut HeaderMap) -> bool {
    if cors.origins.is_empty() {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, ANY);
        return true;
    }
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    if !cors.origins.iter().any(|listed| listed.as_bytes() == origin.as_bytes()) {
        return false;
    }
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
    if cors.credentials {
        headers.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
    }
    true
}
