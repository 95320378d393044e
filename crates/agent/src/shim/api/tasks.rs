//! Calls about tasks: list, submit, look, terminate, remove.

use axum::{
    Json as Answer,
    body::Bytes,
    extract::{Path, State},
    http::HeaderMap,
};
use windlass_api::agent::{
    SIGNATURE,
    shim::{TaskInfo, TaskList, TaskSpec, Terminate},
};
use windlass_model::id::SubmissionId;

use super::{Door, Gate, no_task, task_id};
use crate::{
    clock,
    http::{self, Json, Raw, Refusal},
    shim::enrolment::{self, Presented},
};

/// Longest name of a task or an image.
const NAME_BYTES_MAX: usize = 1024;

pub(super) async fn list(State(gate): State<Gate>) -> Answer<TaskList> {
    Answer(TaskList { tasks: gate.shim.tasks.list() })
}

pub(super) async fn info(
    State(gate): State<Gate>,
    Path(id): Path<String>,
) -> Result<Answer<TaskInfo>, Refusal> {
    let id = task_id(&id)?;
    gate.shim.tasks.info(id).map(|info| Answer(gate.told(info))).ok_or_else(|| no_task(id))
}

impl Gate {
    /// A dstack server logs what it is told, and its log takes `[/…]` for markup: a worker that meets one dies.
    fn told(&self, mut info: TaskInfo) -> TaskInfo {
        if self.door == Door::Compat {
            info.termination_message = info.termination_message.replace("[/", "[ /");
        }
        info
    }
}

pub(super) async fn submit(
    State(gate): State<Gate>,
    headers: HeaderMap,
    Raw(body): Raw,
) -> Result<(), Refusal> {
    let spec: TaskSpec = http::parse(&body)?;
    let mut epoch = gate.epoch(&headers)?;
    if gate.door == Door::Socket {
        epoch = Some(sound(&gate, &spec, epoch, &headers, &body).await?);
    }
    check_names(&spec)?;
    if let Some(why) = forbidden(&gate, &spec).await {
        let refusal = refuse(&gate, spec.id, epoch, why).await;
        // A dstack server repeats a submission that is refused, for ever. It does understand a task that ends with a
        // reason, and so the task is taken, and ends before anything is prepared for it.
        if gate.door == Door::Socket {
            return Err(refusal);
        }
    }
    Ok(gate.shim.tasks.submit(spec, epoch).await?)
}

/// Why this host does not run such a task, if it does not: it cannot, or its policy says so.
async fn forbidden(gate: &Gate, spec: &TaskSpec) -> Option<String> {
    if let Some(why) = gate.shim.runtime.refusal(spec) {
        return Some(why);
    }
    let premises = gate.shim.premises.as_ref()?;
    premises.check(spec).await.err().map(|refused| refused.to_string())
}

/// Checks that our server made this specification for this host; says the epoch it made it under.
async fn sound(
    gate: &Gate,
    spec: &TaskSpec,
    epoch: Option<i64>,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<i64, Refusal> {
    let signature = headers.get(SIGNATURE).and_then(|value| value.to_str().ok());
    let Some(enrolment) = gate.shim.enrolment.enrolment() else {
        return Err(Refusal::unauthorized("this host is not enrolled"));
    };
    let presented = Presented { body, signature, claims: spec.claims, epoch };
    match enrolment::check(&enrolment, presented, clock::now_us() / 1_000_000) {
        Ok(claims) => Ok(claims.epoch),
        Err(unsound) => Err(refuse(gate, spec.id, epoch, unsound.to_string()).await),
    }
}

/// 403, and a line in the journal.
async fn refuse(gate: &Gate, id: SubmissionId, epoch: Option<i64>, why: String) -> Refusal {
    tracing::warn!(%id, why, "refused a task specification");
    gate.shim.tasks.refused_spec(id, epoch, &why).await;
    Refusal::forbidden(why)
}

fn check_names(spec: &TaskSpec) -> Result<(), Refusal> {
    for (field, value) in [("name", &spec.name), ("image_name", &spec.image_name)] {
        if value.is_empty() {
            return Err(Refusal::bad_request(format!("`{field}` is empty")));
        }
        if value.len() > NAME_BYTES_MAX || value.contains(|c: char| c.is_control()) {
            return Err(Refusal::bad_request(format!("`{field}` is no name")));
        }
    }
    if spec.gpu < -1 || spec.cpu < 0.0 || !spec.cpu.is_finite() || spec.memory < 0 || spec.shm_size < 0 {
        return Err(Refusal::bad_request("`gpu`, `cpu`, `memory` and `shm_size` are amounts"));
    }
    Ok(())
}

pub(super) async fn terminate(
    State(gate): State<Gate>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Json(terminate): Json<Terminate>,
) -> Result<Answer<TaskInfo>, Refusal> {
    let (id, epoch) = (task_id(&id)?, gate.epoch(&headers)?);
    Ok(Answer(gate.told(gate.shim.tasks.terminate(id, terminate, epoch).await?)))
}

pub(super) async fn remove(
    State(gate): State<Gate>,
    Path(id): Path<String>,
    headers: HeaderMap,
    // Says nothing, and is read: a connection whose body is left over is closed while the caller still writes.
    _: Bytes,
) -> Result<(), Refusal> {
    let (id, epoch) = (task_id(&id)?, gate.epoch(&headers)?);
    Ok(gate.shim.tasks.remove(id, epoch).await?)
}
