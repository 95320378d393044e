//! Requests as they arrive: headers, bodies and uploads.

use std::{net::IpAddr, time::Duration};

use axum::{
    body::{Body, Bytes},
    extract::{FromRequest, Multipart, Query, Request},
    http::{StatusCode, header},
};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use windlass_api::{Body as Kind, Operation, error::ValidationError};

use super::depth;
use crate::{
    app::App,
    error::{Error, Result},
    limits,
    peer::Peer,
    services::Upload,
};

/// Bytes that a multipart frame may add to the file in it.
const FRAME_BYTES_MAX: usize = 64 * 1024;

/// A request whose caller is not known yet.
pub(super) struct IncomingRequest {
    pub(super) request: Request,
    /// Values of the path's parameters, in order.
    pub(super) path: Vec<String>,
}

impl IncomingRequest {
    /// Address of the other end of the connection, which may be a proxy's.
    pub(super) fn peer(&self) -> Option<IpAddr> {
        self.request.extensions().get::<Peer>().map(|peer| peer.0)
    }

    pub(super) fn authorization(&self) -> Option<&str> {
        self.request.headers().get(header::AUTHORIZATION)?.to_str().ok()
    }

    /// Idempotency key: 1 to 200 printable characters.
    pub(super) fn idempotency_key(&self) -> Result<Option<String>> {
        let Some(key) = self.request.headers().get("idempotency-key") else { return Ok(None) };
        let key = key.to_str().ok().filter(|key| (1..=200).contains(&key.len()));
        key.map(|key| Some(key.to_owned())).ok_or_else(|| {
            Error::refused("invalid `Idempotency-Key` header: expected 1 to 200 printable characters")
        })
    }

    pub(super) fn last_event_id(&self) -> Result<Option<u64>> {
        let Some(id) = self.request.headers().get("last-event-id") else { return Ok(None) };
        let id = id.to_str().ok().and_then(|id| id.parse().ok());
        id.map(Some).ok_or_else(|| Error::refused("invalid `Last-Event-ID` header: expected a number"))
    }

    pub(super) async fn read<O: Operation>(self, app: &App) -> Result<O::Request> {
        match O::BODY {
            Kind::Json => {
                let limit = app.settings().limits.request_bytes;
                let body = collect(self.request.into_body(), limit, app.settings().body_timeout).await?;
                decode(if body.is_empty() || &body[..] == b"null" { b"{}" } else { &body })
            }
            Kind::Query | Kind::Text | Kind::Bytes | Kind::File | Kind::Events | Kind::Stream => {
                query(&self.request)
            }
        }
    }

    pub(super) async fn read_file<O: Operation>(self, app: &App) -> Result<(O::Request, Upload)> {
        let parsed = query(&self.request)?;
        let limits::Limits { upload_bytes: limit, upload_timeout: time, .. } = app.settings().limits;
        let (parts, body) = self.request.into_parts();
        let body = Body::new(Limited::new(body, limit.saturating_add(FRAME_BYTES_MAX)));
        let reading = read_upload(Request::from_parts(parts, body), limit);
        let upload =
            timeout(time, reading).await.map_err(|_| Error::SlowUpload { seconds: time.as_secs() })??;
        Ok((parsed, upload))
    }
}

pub(crate) async fn collect(body: Body, limit: usize, within: Duration) -> Result<Bytes> {
    let reading = Limited::new(body, limit).collect();
    match timeout(within, reading).await {
        Err(_) => Err(Error::Slow),
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            Err(Error::TooLarge { limit, name: limits::REQUEST_MAX })
        }
        Ok(Err(_)) => Err(invalid_body("the request body is incomplete")),
    }
}

async fn read_upload(request: Request, limit: usize) -> Result<Upload> {
    let unreadable = |_| invalid_body("expected multipart/form-data with a part `file`");
    let mut parts = Multipart::from_request(request, &())
        .await
        .map_err(|_| invalid_body("expected multipart/form-data with a part `file`"))?;
    while let Some(mut part) = parts.next_field().await.map_err(unreadable)? {
        if part.name() != Some("file") {
            continue;
        }
        let name = part.file_name().unwrap_or_default().to_owned();
        let mut content = Vec::new();
        while let Some(chunk) = part.chunk().await.map_err(|error| too_large_or_broken(&error, limit))? {
            if content.len() + chunk.len() > limit {
                return Err(Error::TooLarge { limit, name: limits::UPLOAD_MAX });
            }
            content.extend_from_slice(&chunk);
        }
        return Ok(Upload { name, content });
    }
    Err(Error::Invalid(vec![violation(&["body", "file"], "field required".into(), "missing")]))
}

fn too_large_or_broken(error: &axum::extract::multipart::MultipartError, limit: usize) -> Error {
    if error.status() == StatusCode::PAYLOAD_TOO_LARGE {
        Error::TooLarge { limit, name: limits::UPLOAD_MAX }
    } else {
        invalid_body("the uploaded file is incomplete")
    }
}

fn invalid_body(msg: &str) -> Error {
    Error::Invalid(vec![violation(&["body"], msg.to_owned(), "value_error")])
}

fn query<T: DeserializeOwned>(request: &Request) -> Result<T> {
    if request.uri().query().is_some_and(|query| query.contains("%00")) {
        return Err(Error::Invalid(vec![violation(&["query"], NUL.into(), "value_error")]));
    }
    Query::try_from_uri(request.uri())
        .map(|Query(parsed)| parsed)
        .map_err(|error| Error::Invalid(vec![violation(&["query"], error.body_text(), "value_error")]))
}

/// No stored or queried text contains NUL, and Postgres rejects it.
const NUL: &str = "text must not contain NUL";

/// Returns whether a JSON text contains the escape for NUL: after an odd number of backslashes.
pub(crate) fn has_nul(body: &[u8]) -> bool {
    body.windows(6).enumerate().any(|(at, window)| {
        window == br"\u0000" && body[..at].iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 0
    })
}

/// Decodes a body. Unknown fields are ignored, so that newer clients work.
fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    if has_nul(body) {
        return Err(invalid_body(NUL));
    }
    if depth::is_too_deep(body) {
        return Err(invalid_body(depth::TOO_DEEP));
    }
    let mut reader = serde_json::Deserializer::from_slice(body);
    let parsed = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let mut loc = vec!["body".to_owned()];
        loc.extend(error.path().iter().filter_map(segment_name));
        let msg = error.inner().to_string();
        // The missing field is part of the location, as in every other violation.
        if let Some(rest) = msg.strip_prefix("missing field `")
            && let Some((field, _)) = rest.split_once('`')
        {
            loc.push(field.to_owned());
            return ValidationError { loc, msg: "field required".into(), r#type: "missing".into() };
        }
        let kind = if error.inner().is_data() { "value_error" } else { "json_invalid" };
        ValidationError { loc, msg, r#type: kind.into() }
    });
    let ended = reader.end();
    match (parsed, ended) {
        (Ok(parsed), Ok(())) => Ok(parsed),
        (Ok(_), Err(error)) => {
            Err(Error::Invalid(vec![violation(&["body"], error.to_string(), "json_invalid")]))
        }
        (Err(violation), _) => Err(Error::Invalid(vec![violation])),
    }
}

fn segment_name(segment: &serde_path_to_error::Segment) -> Option<String> {
    use serde_path_to_error::Segment;
    match segment {
        Segment::Seq { index } => Some(index.to_string()),
        Segment::Map { key } => Some(key.clone()),
        Segment::Enum { variant } => Some(variant.clone()),
        Segment::Unknown => None,
    }
}

fn violation(loc: &[&str], msg: String, kind: &str) -> ValidationError {
    ValidationError { loc: loc.iter().map(|part| (*part).to_owned()).collect(), msg, r#type: kind.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::has_nul;

    #[test]
    fn escaped_nul_is_detected_without_false_positives() {
        assert!(has_nul(br#"{"a":"\u0000"}"#));
        assert!(has_nul(br#"{"a":"x\\\u0000"}"#));
        assert!(!has_nul(br#"{"a":"\\u0000"}"#), "a backslash and five letters");
        assert!(!has_nul(br#"{"a":"u0000"}"#));
    }
}
