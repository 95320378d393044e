//! Calls about tasks: list, submit, inspect, terminate, remove.

use axum::{
    Json as Answer,
    body::Bytes,
    extract::{Path, State},
    http::HeaderMap,
};
use windlass_api::agent::{
    SIGNATURE_HEADER,
    shim::{TaskInfo, TaskList, TaskSpec, TerminateRequest},
};
use windlass_model::id::SubmissionId;

use super::{ApiState, Transport, parse_task_id, task_not_found};
use crate::{
    clock,
    http::{self, ErrorResponse, Json, RawJson},
    shim::enrolment::{self, PresentedSpec},
};

/// Maximum length of the name of a task or an image.
const NAME_BYTES_MAX: usize = 1024;

pub(super) async fn list(State(gate): State<ApiState>) -> Answer<TaskList> {
    Answer(TaskList { tasks: gate.shim.tasks.list() })
}

pub(super) async fn info(
    State(gate): State<ApiState>,
    Path(id): Path<String>,
) -> Result<Answer<TaskInfo>, ErrorResponse> {
    let id = parse_task_id(&id)?;
    gate.shim.tasks.info(id).map(|info| Answer(gate.reported(info))).ok_or_else(|| task_not_found(id))
}

impl ApiState {
    /// Escapes the message for a dstack server: it logs the message, its logger interprets `[/…]` as markup, and the
    /// worker that logs it dies.
    fn reported(&self, mut info: TaskInfo) -> TaskInfo {
        if self.listener == Transport::Compat {
            info.termination_message = info.termination_message.replace("[/", "[ /");
        }
        info
    }
}

pub(super) async fn submit(
    State(gate): State<ApiState>,
    headers: HeaderMap,
    RawJson(body): RawJson,
) -> Result<(), ErrorResponse> {
    let spec: TaskSpec = http::parse_json(&body)?;
    let mut epoch = gate.epoch(&headers)?;
    if gate.listener == Transport::Socket {
        epoch = Some(verify_spec(&gate, &spec, epoch, &headers, &body).await?);
    }
    validate_spec(&spec)?;
    if let Some(why) = refusal_reason(&gate, &spec).await {
        let refusal = refuse_spec(&gate, spec.id, epoch, why).await;
        // A dstack server repeats a refused submission without limit. It does handle a task that ends with a reason, so
        // the task is accepted and ends before anything is prepared for it.
        if gate.listener == Transport::Socket {
            return Err(refusal);
        }
    }
    Ok(gate.shim.tasks.submit(spec, epoch).await?)
}

/// Returns the reason why this host does not run such a task, if any: it cannot, or its policy forbids it.
async fn refusal_reason(gate: &ApiState, spec: &TaskSpec) -> Option<String> {
    if let Some(why) = gate.shim.runtime.refusal(spec) {
        return Some(why);
    }
    let host_resources = gate.shim.host_resources.as_ref()?;
    host_resources.check(spec).await.err().map(|refused| refused.to_string())
}

/// Verifies that the server of this host made this specification for this host; returns the epoch of the specification.
async fn verify_spec(
    gate: &ApiState,
    spec: &TaskSpec,
    epoch: Option<i64>,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<i64, ErrorResponse> {
    let signature = headers.get(SIGNATURE_HEADER).and_then(|value| value.to_str().ok());
    let Some(enrolment) = gate.shim.enrolment.enrolment() else {
        return Err(ErrorResponse::unauthorized("this host is not enrolled"));
    };
    let presented = PresentedSpec { body, signature, claims: spec.claims, epoch };
    match enrolment::check(&enrolment, presented, clock::now_us() / 1_000_000) {
        Ok(claims) => Ok(claims.epoch),
        Err(unsound) => Err(refuse_spec(gate, spec.id, epoch, unsound.to_string()).await),
    }
}

/// Returns 403 and records the refusal in the journal.
async fn refuse_spec(gate: &ApiState, id: SubmissionId, epoch: Option<i64>, why: String) -> ErrorResponse {
    tracing::warn!(%id, why, "refused a task specification");
    gate.shim.tasks.record_refused_spec(id, epoch, &why).await;
    ErrorResponse::forbidden(why)
}

fn validate_spec(spec: &TaskSpec) -> Result<(), ErrorResponse> {
    for (field, value) in [("name", &spec.name), ("image_name", &spec.image_name)] {
        if value.is_empty() {
            return Err(ErrorResponse::bad_request(format!("`{field}` must not be empty")));
        }
        if value.len() > NAME_BYTES_MAX || value.contains(|c: char| c.is_control()) {
            return Err(ErrorResponse::bad_request(format!("invalid `{field}`: too long or not printable")));
        }
    }
    if spec.gpu < -1 || spec.cpu < 0.0 || !spec.cpu.is_finite() || spec.memory < 0 || spec.shm_size < 0 {
        return Err(ErrorResponse::bad_request("invalid `gpu`, `cpu`, `memory` or `shm_size`"));
    }
    Ok(())
}

pub(super) async fn terminate(
    State(gate): State<ApiState>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Json(terminate): Json<TerminateRequest>,
) -> Result<Answer<TaskInfo>, ErrorResponse> {
    let (id, epoch) = (parse_task_id(&id)?, gate.epoch(&headers)?);
    Ok(Answer(gate.reported(gate.shim.tasks.terminate(id, terminate, epoch).await?)))
}

pub(super) async fn remove(
    State(gate): State<ApiState>,
    Path(id): Path<String>,
    headers: HeaderMap,
    // The body has no content but is read: a connection with an unread body is closed while the caller still writes.
    _: Bytes,
) -> Result<(), ErrorResponse> {
    let (id, epoch) = (parse_task_id(&id)?, gate.epoch(&headers)?);
    Ok(gate.shim.tasks.remove(id, epoch).await?)
}
