//! Requests to the API: JSON over a Unix socket, or over HTTPS with a client certificate.

use std::{path::PathBuf, time::Duration};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Request, body::Bytes, client::conn::http1::handshake, header};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::time::timeout;
use windlass_api::unix;
use windlass_dial::{ServerUrl, Stream};

use super::settings::{Settings, SettingsError};
use crate::BackendError;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for which an operation of LXD, such as a creation, may take.
const OPERATION_MAX: Duration = Duration::from_secs(300);
const BODY_MAX: usize = 16 << 20;
/// Sockets of LXD and Incus by their usual packages.
const USUAL_SOCKETS: [&str; 4] = [
    "/var/lib/incus/unix.socket",
    "/run/incus/unix.socket",
    "/var/lib/lxd/unix.socket",
    "/var/snap/lxd/common/lxd/unix.socket",
];

#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    /// The request may or may not have been performed.
    #[error("{endpoint}: {message}")]
    Transport { endpoint: String, message: String },
    #[error("{message}")]
    Answer { status: u16, message: String },
}

impl ApiError {
    pub(super) fn is_transport(&self) -> bool {
        matches!(self, Self::Transport { .. })
    }

    /// LXD understood the request and rejected it.
    pub(super) fn is_answer(&self) -> bool {
        !self.is_transport()
    }

    pub(super) fn is_not_found(&self) -> bool {
        self.says(&["not found"]) || matches!(self, Self::Answer { status: 404, .. })
    }

    /// Something with this name exists already, or is being created.
    pub(super) fn is_conflict(&self) -> bool {
        self.says(&["already exists", "unique constraint"])
            || matches!(self, Self::Answer { status: 409, .. })
    }

    /// Another operation on the same thing is in progress.
    pub(super) fn is_busy(&self) -> bool {
        self.says(&["busy", "in progress", "create operation", "still running"])
    }

    fn is_forbidden(&self) -> bool {
        matches!(self, Self::Answer { status: 401 | 403, .. })
    }

    fn says(&self, words: &[&str]) -> bool {
        let Self::Answer { message, .. } = self else { return false };
        let message = message.to_lowercase();
        words.iter().any(|word| message.contains(word))
    }

    pub(super) fn to_backend(&self, what: &'static str) -> BackendError {
        let message = match self.is_forbidden() {
            true => format!(
                "{self}. Check that LXD trusts the client certificate, and that it may use the project"
            ),
            false => self.to_string(),
        };
        match self {
            Self::Answer { status: 500.., .. } | Self::Transport { .. } => {
                BackendError::Unavailable { what, message }
            }
            Self::Answer { .. } if self.is_busy() => BackendError::Unavailable { what, message },
            Self::Answer { .. } => BackendError::Refused { what, message },
        }
    }
}

#[derive(Debug)]
enum Target {
    /// `None`: the first of the usual ones that exists at the time of the request.
    Socket(Option<PathBuf>),
    Https(ServerUrl),
}

#[derive(Debug)]
pub(super) struct Client {
    target: Target,
    project: String,
}

impl Client {
    pub(super) fn new(settings: &Settings) -> Result<Self, SettingsError> {
        let target = match settings.url.as_deref() {
            None => Target::Socket(None),
            Some(url) => match url.strip_prefix("unix://").or_else(|| url.strip_prefix("unix:")) {
                Some(path) => Target::Socket(Some(path.into())),
                None => Target::Https(settings.https(url)?),
            },
        };
        Ok(Self { target, project: settings.project.clone() })
    }

    /// Returns the `metadata` of a response.
    pub(super) async fn get(&self, path: &str) -> Result<Value, ApiError> {
        let (_, body) = self.request("GET", path, None, RESPONSE_TIMEOUT).await?;
        Ok(body["metadata"].clone())
    }

    /// Returns a file as text.
    pub(super) async fn read(&self, path: &str) -> Result<String, ApiError> {
        let (status, bytes) = self.exchange("GET", path, None, RESPONSE_TIMEOUT).await?;
        if status >= 400 {
            return Err(answer_error(status, &parse_body(&bytes)));
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Sends a change, and waits until LXD has performed it.
    pub(super) async fn change(&self, method: &str, path: &str, body: &Value) -> Result<(), ApiError> {
        let (_, answer) = self.request(method, path, Some(body), RESPONSE_TIMEOUT).await?;
        if answer["type"] != "async" {
            return Ok(());
        }
        let Some(operation) = answer["operation"].as_str() else {
            return Err(self.broken("the response names no operation"));
        };
        let operation = operation.split('?').next().unwrap_or_default();
        let path = format!("{operation}/wait?timeout={}", OPERATION_MAX.as_secs());
        let (_, done) = self.request("GET", &path, None, OPERATION_MAX + RESPONSE_TIMEOUT).await?;
        let done = &done["metadata"];
        match done["status_code"].as_u64() {
            Some(200) => Ok(()),
            Some(100..=199) => Err(ApiError::Answer {
                status: 504,
                message: format!("the operation is still running after {} s", OPERATION_MAX.as_secs()),
            }),
            _ => {
                let message = done["err"].as_str().unwrap_or("the operation failed").to_owned();
                Err(ApiError::Answer { status: operation_status(&message), message })
            }
        }
    }

    async fn request(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
        limit: Duration,
    ) -> Result<(u16, Value), ApiError> {
        let (status, bytes) = self.exchange(method, path, body, limit).await?;
        let answer = parse_body(&bytes);
        if status >= 400 || answer["type"] == "error" {
            return Err(answer_error(status, &answer));
        }
        Ok((status, answer))
    }

    async fn exchange(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
        limit: Duration,
    ) -> Result<(u16, Bytes), ApiError> {
        let mark = if path.contains('?') { '&' } else { '?' };
        let path = format!("{path}{mark}project={}", percent_encode(&self.project));
        let text = body.filter(|body| !body.is_null()).map(Value::to_string).unwrap_or_default();
        let request = Request::builder()
            .method(method)
            .uri(&path)
            .header(header::HOST, "lxd")
            .header(header::USER_AGENT, concat!("windlass/", env!("CARGO_PKG_VERSION")))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(text)))
            .map_err(|error| self.broken(&error.to_string()))?;
        let answered = timeout(limit, async {
            let stream = self.connect().await?;
            let failed = |error: hyper::Error| self.broken(&error.to_string());
            let (mut sender, connection) = handshake(TokioIo::new(stream)).await.map_err(failed)?;
            // Ends with the response.
            tokio::spawn(connection);
            let response = sender.send_request(request).await.map_err(failed)?;
            let status = response.status().as_u16();
            let body = Limited::new(response.into_body(), BODY_MAX).collect().await;
            let body = body.map_err(|error| self.broken(&error.to_string()))?;
            Ok::<_, ApiError>((status, body.to_bytes()))
        });
        answered
            .await
            .unwrap_or_else(|_| Err(self.broken(&format!("no response within {} s", limit.as_secs()))))
    }

    async fn connect(&self) -> Result<Stream, ApiError> {
        match &self.target {
            Target::Https(server) => {
                let connected = server.endpoint.connect(CONNECT_TIMEOUT).await;
                connected.map_err(|error| self.broken(&std::io::Error::from(error).to_string()))
            }
            Target::Socket(given) => {
                let path = given.clone().or_else(usual_socket).ok_or_else(|| {
                    self.broken(&format!("none of the usual sockets exists: {}", USUAL_SOCKETS.join(", ")))
                })?;
                let connected = unix::connect(&path).await;
                let stream = connected.map_err(|error| {
                    self.broken(&format!("failed to connect to {}: {error}", path.display()))
                })?;
                Ok(Box::new(stream))
            }
        }
    }

    fn broken(&self, message: &str) -> ApiError {
        let endpoint = match &self.target {
            Target::Socket(None) => "LXD".to_owned(),
            Target::Socket(Some(path)) => path.display().to_string(),
            Target::Https(server) => server.endpoint.name(),
        };
        ApiError::Transport { endpoint, message: message.to_owned() }
    }
}

fn usual_socket() -> Option<PathBuf> {
    USUAL_SOCKETS.iter().map(PathBuf::from).find(|path| path.exists())
}

fn parse_body(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap_or_default()
}

fn answer_error(status: u16, answer: &Value) -> ApiError {
    let message = answer["error"].as_str().filter(|message| !message.is_empty());
    let message = message.map_or_else(|| format!("HTTP status {status}"), str::to_owned);
    // LXD answers with 500 to what a request got wrong as well, such as a profile that does not exist.
    let status = if status == 500 { operation_status(&message) } else { status.max(400) };
    ApiError::Answer { status, message }
}

/// Status for the failure of an operation, which has only a text. What the request itself got wrong does not get better
/// with a repetition; other failures may.
fn operation_status(message: &str) -> u16 {
    let lower = message.to_lowercase();
    let of_request =
        ["invalid", "unknown", "not supported", "not allowed", "alias", "doesn't exist", "not found"];
    if of_request.iter().any(|word| lower.contains(word)) { 400 } else { 500 }
}

/// Percent-encodes a query value.
pub(super) fn percent_encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, message: &str) -> ApiError {
        ApiError::Answer { status, message: message.to_owned() }
    }

    #[test]
    fn errors_of_lxd_are_classified_by_status_and_text() {
        assert!(answer(500, r#"This "instances" entry already exists"#).is_conflict());
        assert!(answer(404, "Instance not found").is_not_found());
        assert!(answer(400, "Instance is busy running a \"create\" operation").is_busy());
        let refused = answer(400, "Invalid devices").to_backend("create the machine");
        assert!(matches!(refused, BackendError::Refused { .. }), "{refused}");
        let later = answer(500, "database is locked").to_backend("create the machine");
        assert!(matches!(later, BackendError::Unavailable { .. }), "{later}");
        let hint = answer(403, "not authorized").to_backend("list the instances").to_string();
        assert!(hint.contains("trusts the client certificate"), "{hint}");
        assert_eq!((operation_status("Image alias not found"), operation_status("no such disk")), (400, 500));
    }

    #[test]
    fn query_values_are_percent_encoded() {
        assert_eq!(percent_encode("/etc/a b&c"), "/etc/a%20b%26c");
    }

    #[tokio::test]
    async fn a_missing_socket_is_named() {
        let settings = Settings { url: Some("unix:///nonexistent/lxd.socket".into()), ..Settings::default() };
        let client = Client::new(&settings).unwrap();
        let error = client.get("/1.0").await.unwrap_err();
        assert!(error.is_transport() && error.to_string().contains("/nonexistent/lxd.socket"), "{error}");
    }
}
