//! Client for the shim of a host: one HTTP/2 connection over any stream, with many concurrent calls.
//!
//! Each call has its own flow control, so a slow reader of one log does not delay other calls. Dropping a call cancels
//! it.

use std::time::Duration;

use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    client::conn::http2::{self, SendRequest},
    header,
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use serde::{Serialize, de::DeserializeOwned};
use tokio::io::{AsyncRead, AsyncWrite};
use windlass_model::id::SubmissionId;

use super::{
    EPOCH_HEADER, EPOCH_SEEN_HEADER, Health, LOG_COMPLETE_HEADER, LOG_END_HEADER, SIGNATURE_HEADER,
    events::ShimEvent,
    runner::{GroupHosts, JobRecord, JobStarted, Metrics, PullResponse, SubmitBody},
    shim::{HostInfo, InstanceHealth, InstanceInfo, TaskInfo, TaskList, TerminateRequest},
};

/// Interval of HTTP/2 pings on a silent connection. The connection is closed if a ping is not answered in time.
const PING_INTERVAL: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// Flow control windows: unread bytes of one call, and of all calls together.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 16 * 1024 * 1024;
/// Maximum size of a response that is read as a whole.
const ANSWER_MAX: usize = 8 * 1024 * 1024;
/// Maximum length of the error text that is kept from a refusal.
const ERROR_TEXT_MAX: usize = 4 * 1024;
/// Maximum length of a line of the event stream.
const EVENT_MAX: usize = 1024 * 1024;
/// Maximum number of consecutive lines that this version cannot parse. With more, the response is not an event stream.
const UNKNOWN_EVENTS_MAX: u32 = 1024;

#[derive(Debug, thiserror::Error)]
pub enum ShimError {
    /// No response. The request may or may not have been performed.
    #[error("request to the shim failed")]
    Exchange(#[source] hyper::Error),
    #[error("the shim rejected the credential: {why}")]
    Unauthorized { why: String },
    /// Rejected signature or policy: a retry does not help.
    #[error("the shim refused the request: {why}")]
    Forbidden { why: String },
    #[error("stale epoch: the shim has already seen epoch {seen}")]
    StaleEpoch { seen: i64 },
    #[error("the task does not exist on the shim")]
    TaskNotFound,
    /// The submission was on this host and was removed.
    #[error("the task was removed from the shim")]
    TaskRemoved,
    /// Not possible in the present state.
    #[error("the shim cannot do this in its current state: {why}")]
    Conflict { why: String },
    #[error("the shim responded with {status}: {why}")]
    Status { status: StatusCode, why: String },
    #[error("failed to encode the request")]
    Encode(#[source] serde_json::Error),
    #[error("failed to decode the response")]
    Decode(#[source] serde_json::Error),
    #[error("failed to build the request")]
    Build(#[source] hyper::http::Error),
    #[error("the response is longer than {ANSWER_MAX} bytes")]
    TooLong,
}

/// Signed task specification: exactly the bytes that were signed.
#[derive(Clone, PartialEq, Eq)]
pub struct SignedSpec {
    pub body: Vec<u8>,
    /// Base64.
    pub signature: String,
}

/// Part of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogPart {
    pub bytes: Bytes,
    /// Offset after the last byte that exists now.
    pub end: u64,
    /// True if nothing will be appended to the log.
    pub is_complete: bool,
}

/// Connection to a shim. Cheap to clone; the connection is closed with the last clone.
#[derive(Clone)]
pub struct ShimClient {
    send: SendRequest<BoxBody<Bytes, std::convert::Infallible>>,
    authorization: header::HeaderValue,
}

impl std::fmt::Debug for ShimClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shim").field("is_closed", &self.send.is_closed()).finish_non_exhaustive()
    }
}

impl ShimClient {
    /// Starts HTTP/2 over a stream to the shim's socket. A separate task drives the connection.
    pub async fn connect(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        credential: &str,
    ) -> Result<Self, ShimError> {
        let (send, connection) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(ShimError::Exchange)?;
        tokio::spawn(async move {
            // A caller with a call in flight receives the error from that call.
            let _ = connection.await;
        });
        let mut authorization = header::HeaderValue::try_from(format!("Bearer {credential}"))
            .map_err(|error| ShimError::Build(error.into()))?;
        authorization.set_sensitive(true);
        Ok(Self { send, authorization })
    }

    pub fn is_closed(&self) -> bool {
        self.send.is_closed()
    }

    pub async fn health(&self) -> Result<Health, ShimError> {
        self.get_json("/api/healthcheck").await
    }

    pub async fn tasks(&self) -> Result<TaskList, ShimError> {
        self.get_json("/api/tasks").await
    }

    pub async fn task(&self, id: SubmissionId) -> Result<TaskInfo, ShimError> {
        self.get_json(&format!("/api/tasks/{id}")).await
    }

    pub async fn submit(&self, spec: &SignedSpec, epoch: i64) -> Result<(), ShimError> {
        let request = self.post_request("/api/tasks", Some(epoch)).header(SIGNATURE_HEADER, &spec.signature);
        self.exchange(request.body(full_body(spec.body.clone()))).await.map(drop)
    }

    pub async fn terminate(
        &self,
        id: SubmissionId,
        how: &TerminateRequest,
        epoch: i64,
    ) -> Result<TaskInfo, ShimError> {
        self.post_json(&format!("/api/tasks/{id}/terminate"), how, epoch).await
    }

    pub async fn remove(&self, id: SubmissionId, epoch: i64) -> Result<(), ShimError> {
        let request = self.post_request(&format!("/api/tasks/{id}/remove"), Some(epoch));
        self.exchange(request.body(full_body(Vec::new()))).await.map(drop)
    }

    /// Returns the job's states and the length of its log, also after its runner has exited.
    pub async fn job(&self, id: SubmissionId) -> Result<JobRecord, ShimError> {
        self.get_json(&format!("/api/tasks/{id}/job")).await
    }

    /// Returns bytes of a log from an offset on. Waits up to `wait` for the first byte.
    pub async fn log(
        &self,
        id: SubmissionId,
        stream: &str,
        offset: u64,
        limit: usize,
        wait: Duration,
    ) -> Result<LogPart, ShimError> {
        let wait = wait.as_millis();
        let path =
            format!("/api/tasks/{id}/logs?stream={stream}&offset={offset}&limit={limit}&wait_ms={wait}");
        let answer = self.send(self.request(Method::GET, &path, None).body(full_body(Vec::new()))).await?;
        let message =
            |name| answer.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let end = message(LOG_END_HEADER).parse().unwrap_or(offset);
        let is_complete = message(LOG_COMPLETE_HEADER) == "true";
        Ok(LogPart { bytes: read_body(answer).await?, end, is_complete })
    }

    /// Streams the events of the host, from now on or after the event at which a reader stopped.
    pub async fn events(&self, after: Option<(&str, u64)>) -> Result<ShimEvents, ShimError> {
        let path = match after {
            Some((boot, seq)) => format!("/api/events?boot={boot}&after={seq}"),
            None => "/api/events".to_owned(),
        };
        let answer = self.send(self.request(Method::GET, &path, None).body(full_body(Vec::new()))).await?;
        Ok(ShimEvents { body: answer.into_body(), buffer: Vec::new(), unknown_lines: 0 })
    }

    pub async fn host(&self) -> Result<HostInfo, ShimError> {
        self.get_json("/api/instance/host").await
    }

    pub async fn instance_info(&self) -> Result<InstanceInfo, ShimError> {
        self.get_json("/api/instance/info").await
    }

    pub async fn instance_health(&self) -> Result<InstanceHealth, ShimError> {
        self.get_json("/api/instance/health").await
    }

    /// Submits the job to the task's runner.
    pub async fn submit_job(&self, id: SubmissionId, job: &SubmitBody, epoch: i64) -> Result<(), ShimError> {
        let body = serde_json::to_vec(job).map_err(ShimError::Encode)?;
        let request = self.post_request(&runner_path(id, "submit"), Some(epoch));
        self.exchange(request.body(full_body(body))).await.map(drop)
    }

    /// Uploads the code: a git diff or a tar, depending on the job's repository.
    pub async fn upload_code(&self, id: SubmissionId, code: Vec<u8>, epoch: i64) -> Result<(), ShimError> {
        let request = self.request(Method::POST, &runner_path(id, "upload_code"), Some(epoch));
        let request = request.header(header::CONTENT_TYPE, "application/octet-stream");
        self.exchange(request.body(full_body(code))).await.map(drop)
    }

    pub async fn upload_archive(
        &self,
        id: SubmissionId,
        archive: &str,
        tar: &[u8],
        epoch: i64,
    ) -> Result<(), ShimError> {
        const BOUNDARY: &str = "windlass-archive-7b1d5f2c9e";
        let head = format!(
            "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"archive\"; filename=\"{archive}\"\r\n\
             Content-Type: application/octet-stream\r\n\r\n"
        );
        let body = [head.as_bytes(), tar, format!("\r\n--{BOUNDARY}--\r\n").as_bytes()].concat();
        let request = self.request(Method::POST, &runner_path(id, "upload_archive"), Some(epoch));
        let request =
            request.header(header::CONTENT_TYPE, format!("multipart/form-data; boundary={BOUNDARY}"));
        self.exchange(request.body(full_body(body))).await.map(drop)
    }

    /// Starts the job's commands. `None`: the runner does not report the user and the working directory.
    pub async fn run_job(&self, id: SubmissionId, epoch: i64) -> Result<Option<JobStarted>, ShimError> {
        let request = self.post_request(&runner_path(id, "run"), Some(epoch));
        let answer = self.exchange(request.body(full_body(Vec::new()))).await?;
        if answer.is_empty() {
            return Ok(None);
        }
        serde_json::from_slice(&answer).map(Some).map_err(ShimError::Decode)
    }

    /// `grace_secs`: time for the commands to exit; without it, the job's own setting applies. `is_preempted`: the job
    /// finds a notice in its preemption file.
    pub async fn stop_job(
        &self,
        id: SubmissionId,
        epoch: i64,
        grace_secs: Option<u64>,
        is_preempted: bool,
    ) -> Result<(), ShimError> {
        let mut path = runner_path(id, &format!("stop?is_preempted={is_preempted}"));
        if let Some(secs) = grace_secs {
            path.push_str(&format!("&grace_secs={secs}"));
        }
        let request = self.post_request(&path, Some(epoch));
        self.exchange(request.body(full_body(Vec::new()))).await.map(drop)
    }

    pub async fn open_gate(&self, id: SubmissionId, epoch: i64) -> Result<(), ShimError> {
        let request = self.post_request(&runner_path(id, "gate"), Some(epoch));
        self.exchange(request.body(full_body(Vec::new()))).await.map(drop)
    }

    pub async fn send_hosts(
        &self,
        id: SubmissionId,
        epoch: i64,
        hosts: &GroupHosts,
    ) -> Result<(), ShimError> {
        let request = self.post_request(&runner_path(id, "hosts"), Some(epoch));
        let body = serde_json::to_vec(hosts).map_err(ShimError::Encode)?;
        self.exchange(request.body(full_body(body))).await.map(drop)
    }

    pub async fn job_metrics(&self, id: SubmissionId) -> Result<Metrics, ShimError> {
        self.get_json(&runner_path(id, "metrics")).await
    }

    /// Returns the seconds since the last user connection to the job, as counted by its runner.
    pub async fn idle_seconds(&self, id: SubmissionId) -> Result<i64, ShimError> {
        // Later than any output, so that the response contains no logs.
        const NEVER: i64 = 1 << 52;
        let pull: PullResponse = self.get_json(&runner_path(id, &format!("pull?timestamp={NEVER}"))).await?;
        Ok(pull.no_connections_secs)
    }

    /// Acknowledges to the runner that everything before `offset` is stored elsewhere.
    pub async fn acknowledge_log(
        &self,
        id: SubmissionId,
        stream: &str,
        offset: u64,
    ) -> Result<(), ShimError> {
        let path = runner_path(id, &format!("logs/read?stream={stream}&offset={offset}"));
        self.exchange(self.post_request(&path, None).body(full_body(Vec::new()))).await.map(drop)
    }

    async fn get_json<T: DeserializeOwned>(&self, path: &str) -> Result<T, ShimError> {
        let answer = self.exchange(self.request(Method::GET, path, None).body(full_body(Vec::new()))).await?;
        serde_json::from_slice(&answer).map_err(ShimError::Decode)
    }

    async fn post_json<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        epoch: i64,
    ) -> Result<T, ShimError> {
        let body = serde_json::to_vec(body).map_err(ShimError::Encode)?;
        let answer = self.exchange(self.post_request(path, Some(epoch)).body(full_body(body))).await?;
        serde_json::from_slice(&answer).map_err(ShimError::Decode)
    }

    fn request(&self, method: Method, path: &str, epoch: Option<i64>) -> hyper::http::request::Builder {
        let request = Request::builder().method(method).uri(format!("http://shim{path}"));
        let request = request.header(header::AUTHORIZATION, self.authorization.clone());
        match epoch {
            Some(epoch) => request.header(EPOCH_HEADER, epoch),
            None => request,
        }
    }

    fn post_request(&self, path: &str, epoch: Option<i64>) -> hyper::http::request::Builder {
        self.request(Method::POST, path, epoch).header(header::CONTENT_TYPE, "application/json")
    }

    async fn exchange(&self, request: BuiltRequest) -> Result<Bytes, ShimError> {
        read_body(self.send(request).await?).await
    }

    async fn send(&self, request: BuiltRequest) -> Result<Response<Incoming>, ShimError> {
        let request = request.map_err(ShimError::Build)?;
        let answer = self.send.clone().send_request(request).await.map_err(ShimError::Exchange)?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let seen =
            answer.headers().get(EPOCH_SEEN_HEADER).and_then(|value| value.to_str().ok()?.parse().ok());
        let why = read_body(answer).await.unwrap_or_default();
        let why = String::from_utf8_lossy(&why[..why.len().min(ERROR_TEXT_MAX)]).trim().to_owned();
        Err(error_for_status(status, seen, why))
    }
}

type BuiltRequest = Result<Request<BoxBody<Bytes, std::convert::Infallible>>, hyper::http::Error>;

fn runner_path(id: SubmissionId, call: &str) -> String {
    format!("/api/tasks/{id}/runner/api/{call}")
}

pub(super) fn error_for_status(status: StatusCode, seen: Option<i64>, why: String) -> ShimError {
    match (status, seen) {
        (StatusCode::PRECONDITION_FAILED, Some(seen)) => ShimError::StaleEpoch { seen },
        (StatusCode::UNAUTHORIZED, _) => ShimError::Unauthorized { why },
        (StatusCode::FORBIDDEN, _) => ShimError::Forbidden { why },
        (StatusCode::NOT_FOUND, _) => ShimError::TaskNotFound,
        (StatusCode::GONE, _) => ShimError::TaskRemoved,
        (StatusCode::CONFLICT, _) => ShimError::Conflict { why },
        (status, _) => ShimError::Status { status, why },
    }
}

fn full_body(body: Vec<u8>) -> BoxBody<Bytes, std::convert::Infallible> {
    Full::new(Bytes::from(body)).boxed()
}

/// Reads the body, up to a maximum size.
async fn read_body(answer: Response<Incoming>) -> Result<Bytes, ShimError> {
    let limited = http_body_util::Limited::new(answer.into_body(), ANSWER_MAX);
    match limited.collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) => match error.downcast::<hyper::Error>() {
            Ok(error) => Err(ShimError::Exchange(*error)),
            Err(_) => Err(ShimError::TooLong),
        },
    }
}

/// Reader of an event stream, line by line.
#[derive(Debug)]
pub struct ShimEvents {
    body: Incoming,
    buffer: Vec<u8>,
    /// Consecutive lines that could not be parsed.
    unknown_lines: u32,
}

impl ShimEvents {
    /// Returns the next event; `None` when the shim ended the stream. Event kinds unknown to this version are skipped.
    pub async fn next(&mut self) -> Result<Option<ShimEvent>, ShimError> {
        loop {
            while let Some(at) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=at).collect();
                if let Ok(event) = serde_json::from_slice(&line) {
                    self.unknown_lines = 0;
                    return Ok(Some(event));
                }
                self.unknown_lines += 1;
            }
            if self.buffer.len() > EVENT_MAX || self.unknown_lines > UNKNOWN_EVENTS_MAX {
                return Err(ShimError::TooLong);
            }
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            if let Some(data) = frame.map_err(ShimError::Exchange)?.data_ref() {
                self.buffer.extend_from_slice(data);
            }
        }
    }
}
