//! `slurmrestd`, if a site has one: jobs are submitted and changed without starting a command for each.
//!
//! Lists are still read with the commands: those of `slurmrestd` take many times as long.

use std::{path::PathBuf, time::Duration};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, http::request::Builder};
use serde_json::{Value, json};
use tokio::{net::UnixStream, sync::OnceCell, time::timeout};
use windlass_api::http_pool::send_once;

use super::parse::is_already_finished;
use crate::scheduler::{SchedulerError, SubmitError};

const PROGRAM: &str = "slurmrestd";
/// Supported versions of its API, the best first. From 0.0.39 on jobs have another format.
const SUPPORTED_VERSIONS: [&str; 3] = ["v0.0.38", "v0.0.37", "v0.0.36"];
/// Path that lists the versions it offers.
const OPENAPI_PATH: &str = "/openapi/v3";
const BASE_PATH: &str = "/slurm/";
/// Slurm's own error codes: the controller has read the request. Others are errors on the path to it.
const CONTROLLER_ERROR_CODES: std::ops::Range<u64> = 2_000..3_000;
/// Error code of a request that was not understood, and therefore not passed on.
const INVALID_REQUEST_CODE: u64 = 9_001;

pub(super) struct RestClient {
    socket: PathBuf,
    within: Duration,
    version: OnceCell<Option<&'static str>>,
}

/// Error as reported by the daemon.
struct RestError {
    code: u64,
    message: String,
}

impl From<RestError> for SchedulerError {
    fn from(complaint: RestError) -> Self {
        Self::Failed { program: PROGRAM, message: complaint.message, code: None }
    }
}

impl RestClient {
    pub(super) fn new(socket: PathBuf, within: Duration) -> Self {
        Self { socket, within, version: OnceCell::new() }
    }

    /// Returns the best version of its API that both sides support. `None` if there is none, and jobs go through the
    /// commands.
    pub(super) async fn version(&self) -> Result<Option<&'static str>, SchedulerError> {
        let agree = || async {
            let offered = self.offered().await?;
            let chosen = choose_version(&offered);
            if chosen.is_none() {
                let offered = offered.join(", ");
                tracing::warn!(
                    offered,
                    "slurmrestd supports no API version known here; using the commands instead"
                );
            }
            Ok(chosen)
        };
        self.version.get_or_try_init(agree).await.copied()
    }

    /// Returns the versions that it offers; empty if it does not list them.
    async fn offered(&self) -> Result<Vec<String>, SchedulerError> {
        let late = |_| SchedulerError::Late { program: PROGRAM, within: self.within };
        let request = Request::get(OPENAPI_PATH);
        let (_, bytes) = timeout(self.within, self.exchange(request, Bytes::new())).await.map_err(late)??;
        let described: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let paths = described["paths"].as_object().into_iter().flatten().map(|(path, _)| path);
        let mut versions: Vec<String> = paths
            .filter_map(|path| path.strip_prefix(BASE_PATH)?.split('/').next())
            .map(str::to_owned)
            .collect();
        versions.sort();
        versions.dedup();
        Ok(versions)
    }

    /// Submits a job and returns its number.
    pub(super) async fn submit(&self, submission: &Value) -> Result<String, SubmitError> {
        let answer = self.post("job/submit", submission).await.map_err(SubmitError::Unclear)?;
        match answer {
            Ok(answer) => match answer["job_id"].as_u64() {
                Some(id) => Ok(id.to_string()),
                None => {
                    let line = answer.to_string();
                    Err(SubmitError::Unclear(SchedulerError::InvalidOutput { program: PROGRAM, line }))
                }
            },
            Err(complaint)
                if CONTROLLER_ERROR_CODES.contains(&complaint.code)
                    || complaint.code == INVALID_REQUEST_CODE =>
            {
                Err(SubmitError::Refused { why: complaint.message })
            }
            Err(complaint) => Err(SubmitError::Unclear(complaint.into())),
        }
    }

    /// Changes the priority. A job that has ended is not an error.
    pub(super) async fn renice(&self, job: &str, nice: i64) -> Result<(), SchedulerError> {
        match self.post(&format!("job/{job}"), &json!({ "nice": nice })).await? {
            Ok(_) => Ok(()),
            Err(complaint) if is_already_finished(&complaint.message) => Ok(()),
            Err(complaint) => Err(complaint.into()),
        }
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Result<Value, RestError>, SchedulerError> {
        let late = |_| SchedulerError::Late { program: PROGRAM, within: self.within };
        let version = self.version().await?.unwrap_or(SUPPORTED_VERSIONS[0]);
        let request =
            Request::post(format!("{BASE_PATH}{version}/{path}")).header("content-type", "application/json");
        let sent = self.exchange(request, Bytes::from(body.to_string()));
        let (status, bytes) = timeout(self.within, sent).await.map_err(late)??;
        let garbled = |_| {
            let line = String::from_utf8_lossy(&bytes).chars().take(200).collect();
            SchedulerError::InvalidOutput { program: PROGRAM, line }
        };
        let answer: Value = serde_json::from_slice(&bytes).map_err(garbled)?;
        let errors = answer["errors"].as_array().cloned().unwrap_or_default();
        if status == 200 && errors.is_empty() {
            return Ok(Ok(answer));
        }
        let code = |error: &Value| error["error_code"].as_u64().or_else(|| error["error_number"].as_u64());
        let words = |error: &Value| {
            ["error", "description"].iter().find_map(|name| error[*name].as_str()).map(str::to_owned)
        };
        let message: Vec<String> = errors.iter().filter_map(words).collect();
        let message =
            if message.is_empty() { format!("it responded with {status}") } else { message.join("; ") };
        Ok(Err(RestError { code: errors.iter().find_map(code).unwrap_or_default(), message }))
    }

    async fn exchange(&self, request: Builder, body: Bytes) -> Result<(u16, Bytes), SchedulerError> {
        let start = |source| SchedulerError::Start { program: PROGRAM, source };
        let stream = UnixStream::connect(&self.socket).await.map_err(start)?;
        let request = request
            .header("host", "slurm")
            .header("accept", "application/json")
            .body(Full::new(body))
            .map_err(|error| start(std::io::Error::other(error)))?;
        let (status, bytes) =
            send_once(stream, request).await.map_err(|error| start(std::io::Error::other(error)))?;
        Ok((status.as_u16(), bytes))
    }
}

/// Chooses a version. A daemon that lists none is assumed to support the newest known one.
fn choose_version(offered: &[String]) -> Option<&'static str> {
    let is_offered = |spoken: &&str| offered.is_empty() || offered.iter().any(|one| one == *spoken);
    SUPPORTED_VERSIONS.into_iter().find(is_offered)
}

#[cfg(test)]
mod tests {
    use super::choose_version;

    #[test]
    fn the_newest_api_version_that_both_sides_support_is_chosen() {
        let of = |offered: &[&str]| {
            choose_version(&offered.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(of(&["v0.0.36", "v0.0.37", "v0.0.38"]), Some("v0.0.38"));
        assert_eq!(of(&["v0.0.36", "v0.0.37"]), Some("v0.0.37"));
        assert_eq!(of(&["v0.0.38", "v0.0.39", "v0.0.40"]), Some("v0.0.38"));
        assert_eq!(of(&["v0.0.41", "v0.0.42"]), None, "the commands are used");
        assert_eq!(of(&[]), Some("v0.0.38"), "it does not tell");
    }
}
