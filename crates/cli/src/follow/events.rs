//! Events of a run as JSON lines: `windlass apply -o jsonl`. `docs/apply-events.md` documents the formats.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use uuid::Uuid;
use windlass_api::runs::{Deployment, Run, RunPlan};

use super::{
    deployment_status,
    log_tail::LogChunk,
    progress::{JobProgress, job_progress},
};
use crate::{
    context::run_name,
    exit::Exit,
    output::{self, format},
};

/// Emits each change once.
#[derive(Default)]
pub(crate) struct EventWriter {
    status: Option<(String, String)>,
    jobs: Vec<JobProgress>,
    deployment: Option<Deployment>,
}

impl EventWriter {
    pub(crate) fn plan(plan: &RunPlan, action: &str) {
        emit("plan", json!({ "action": action, "plan": plan }));
    }

    pub(crate) fn submitted(run: &Run) {
        emit("submitted", json!({ "id": run.id, "name": run_name(run), "project": run.project_name }));
    }

    /// Emits the changes since the last call.
    pub(crate) fn update(&mut self, run: &Run) {
        let status = (run.status.clone(), run.status_message.clone());
        if self.status.as_ref() != Some(&status) {
            emit("run", json!({ "status": status.0, "message": status.1 }));
            self.status = Some(status);
        }
        if let Some(deployment) = deployment_status::deployment(run)
            && self.deployment.as_ref() != Some(deployment)
        {
            emit("deployment", serde_json::to_value(deployment).unwrap_or_default());
            self.deployment = Some(deployment.clone());
        }
        for job in job_progress(run) {
            if !self.jobs.contains(&job) {
                emit("job", serde_json::to_value(&job).unwrap_or_default());
                self.jobs.retain(|known| known.submission != job.submission);
                self.jobs.push(job);
            }
        }
    }

    pub(crate) fn log(place: (i64, i64), submission: Uuid, piece: &LogChunk) {
        emit(
            "log",
            json!({
                "replica": place.0, "job": place.1, "submission": submission, "offset": piece.offset,
                "timestamp": piece.at.to_string(), "message": STANDARD.encode(&piece.bytes),
            }),
        );
    }

    /// Emits a forwarded port with its local address.
    pub(crate) fn port(port: u16, address: &str) {
        emit("port", json!({ "port": port, "address": address }));
    }

    pub(crate) fn end(run: &Run, reasons: &[String], exit: Exit) {
        let reason = &run.termination_reason;
        let value = json!({
            "status": run.status, "termination_reason": reason, "reasons": reasons, "exit_code": exit.code(),
        });
        emit("end", value);
    }

    /// Emits that the run continues after the command ends.
    pub(crate) fn detached() {
        emit("detached", json!({}));
    }
}

fn emit(kind: &str, mut value: Value) {
    if let Some(fields) = value.as_object_mut() {
        fields.insert("type".to_owned(), kind.into());
        fields.insert("time".to_owned(), format::now().to_string().into());
    }
    // Serialisation of these values cannot fail.
    let _ = output::print_jsonl(&[value]);
}
