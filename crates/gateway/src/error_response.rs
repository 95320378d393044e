//! Responses of the proxy itself: a status, one plain sentence and an optional `Retry-After`.

use std::time::Duration;

use bytes::Bytes;
use hyper::{
    Response, StatusCode,
    header::{self, HeaderValue},
};

use crate::response_body::ResponseBody;

/// Error response that the proxy generates.
pub(crate) struct ErrorResponse {
    pub(crate) status: StatusCode,
    pub(crate) text: String,
    pub(crate) retry_after: Option<Duration>,
}

impl ErrorResponse {
    pub(crate) fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, text: text.into(), retry_after: None }
    }

    pub(crate) fn with_retry_after(status: StatusCode, text: impl Into<String>, after: Duration) -> Self {
        Self { status, text: text.into(), retry_after: Some(after) }
    }

    pub(crate) fn into_response(self) -> Response<ResponseBody> {
        let mut text = self.text;
        text.push('\n');
        let mut response = Response::new(ResponseBody::text(Bytes::from(text)));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
        if let Some(after) = self.retry_after {
            // Rounded up, so that the client does not retry too early.
            let seconds = after.as_millis().div_ceil(1000).max(1);
            if let Ok(value) = HeaderValue::from_str(&seconds.to_string()) {
                headers.insert(header::RETRY_AFTER, value);
            }
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
