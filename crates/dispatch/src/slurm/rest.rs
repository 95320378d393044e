//! `slurmrestd`, where a site has one: jobs are handed over and changed without a program started for each.
//!
//! Lists stay with the commands: those of `slurmrestd` take many times as long.

use std::{path::PathBuf, time::Duration};

use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use serde_json::{Value, json};
use tokio::{net::UnixStream, time::timeout};
use windlass_api::wire::once;

use super::read::is_over_already;
use crate::scheduler::{SubmitError, Unknown};

const PROGRAM: &str = "slurmrestd";
const BASE: &str = "/slurm/v0.0.38";
/// Slurm's own errors: the controller has read the request. Others are of the way to it.
const BY_CONTROLLER: std::ops::Range<u64> = 2_000..3_000;
/// The request was not understood, and so not passed on.
const NOT_UNDERSTOOD: u64 = 9_001;

pub(super) struct Rest {
    pub(super) socket: PathBuf,
    pub(super) within: Duration,
}

/// What went wrong, as it was told.
struct Complaint {
    code: u64,
    said: String,
}

impl From<Complaint> for Unknown {
    fn from(complaint: Complaint) -> Self {
        Self::Failed { program: PROGRAM, said: complaint.said }
    }
}

impl Rest {
    /// The number of the new job.
    pub(super) async fn submit(&self, submission: &Value) -> Result<String, SubmitError> {
        let answer = self.post("job/submit", submission).await.map_err(SubmitError::Unclear)?;
        match answer {
            Ok(answer) => match answer["job_id"].as_u64() {
                Some(id) => Ok(id.to_string()),
                None => {
                    let line = answer.to_string();
                    Err(SubmitError::Unclear(Unknown::Garbled { program: PROGRAM, line }))
                }
            },
            Err(complaint) if BY_CONTROLLER.contains(&complaint.code) || complaint.code == NOT_UNDERSTOOD => {
                Err(SubmitError::Refused { why: complaint.said })
            }
            Err(complaint) => Err(SubmitError::Unclear(complaint.into())),
        }
    }

    /// For a job that is over there is nothing to change.
    pub(super) async fn renice(&self, job: &str, nice: i64) -> Result<(), Unknown> {
        match self.post(&format!("job/{job}"), &json!({ "nice": nice })).await? {
            Ok(_) => Ok(()),
            Err(complaint) if is_over_already(&complaint.said) => Ok(()),
            Err(complaint) => Err(complaint.into()),
        }
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Result<Value, Complaint>, Unknown> {
        let late = |_| Unknown::Late { program: PROGRAM, within: self.within };
        let (status, bytes) = timeout(self.within, self.exchange(path, body)).await.map_err(late)??;
        let garbled = |_| {
            let line = String::from_utf8_lossy(&bytes).chars().take(200).collect();
            Unknown::Garbled { program: PROGRAM, line }
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
        let said: Vec<String> = errors.iter().filter_map(words).collect();
        let said = if said.is_empty() { format!("it answered {status}") } else { said.join("; ") };
        Ok(Err(Complaint { code: errors.iter().find_map(code).unwrap_or_default(), said }))
    }

    async fn exchange(&self, path: &str, body: &Value) -> Result<(u16, Bytes), Unknown> {
        let start = |source| Unknown::Start { program: PROGRAM, source };
        let stream = UnixStream::connect(&self.socket).await.map_err(start)?;
        let request = Request::post(format!("{BASE}/{path}"))
            .header("host", "slurm")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.to_string())))
            .map_err(|error| start(std::io::Error::other(error)))?;
        let (status, bytes) =
            once(stream, request).await.map_err(|error| start(std::io::Error::other(error)))?;
        Ok((status.as_u16(), bytes))
    }
}
