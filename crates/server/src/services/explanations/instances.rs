//! Explanations of instances.

use windlass_api::explanations::Explanation;
use windlass_model::{
    id::InstanceId,
    instance,
    time::{Span, Timestamp},
};

use crate::{
    app::App,
    auth::ProjectScope,
    db::instances::{self, Instance, PlacedJob},
    error::{Error, Result},
};

pub(crate) async fn explain(app: &App, scope: &ProjectScope, id: InstanceId) -> Result<Explanation> {
    let found = instances::find(app.db(), id).await?.filter(|row| row.project_id == scope.project.id);
    let row = found.ok_or_else(|| Error::absent("Instance"))?;
    let jobs = instances::list_jobs(app.db(), &[id], Some(&[scope.project.id])).await?;
    let ends_at = idle_end(&row);
    Ok(Explanation {
        sentence: sentence(&row, &jobs, ends_at),
        reasons: reasons(&row),
        jobs: Vec::new(),
        cures: Vec::new(),
        deployment: None,
        scaling: Vec::new(),
        probes: Vec::new(),
        next_look_at: ends_at,
        expected: None,
        hint: row.unreachable.then(|| "Check that the host is up and that its agent runs.".to_owned()),
        command: format!("windlass instance get {}", row.name),
        turn: None,
        preempted: None,
    })
}

/// Time at which an idle instance is terminated.
fn idle_end(row: &Instance) -> Option<Timestamp> {
    let (since, seconds) = (row.idle_since?, row.idle_seconds_max.filter(|seconds| *seconds >= 0)?);
    (row.status == instance::Status::Idle).then(|| since + Span::secs(seconds))
}

fn sentence(row: &Instance, jobs: &[PlacedJob], ends_at: Option<Timestamp>) -> String {
    if let Some(since) = row.unreachable_since.filter(|_| row.unreachable && !row.finished) {
        return format!("Its agent does not respond since {since}; jobs on it are lost if that lasts.");
    }
    if row.termination_asked_at.is_some() && !row.finished {
        return "It accepts no new jobs and is terminated when it is free.".to_owned();
    }
    match row.status {
        instance::Status::Pending => "It waits to be created.".to_owned(),
        instance::Status::Provisioning => {
            let message = row.status_message.as_deref().unwrap_or("it is being prepared");
            format!("It is not ready yet: {message}.")
        }
        instance::Status::Idle => match ends_at {
            Some(at) => format!("It is free, and is terminated at {at} if no job needs it."),
            None => "It is free, and is kept until it is deleted.".to_owned(),
        },
        instance::Status::Busy => {
            let runs = jobs.iter().map(|job| format!("`{}`", job.run_name)).collect::<Vec<_>>().join(", ");
            if runs.is_empty() {
                "It is reserved for a job.".to_owned()
            } else {
                format!("It runs jobs of {runs}.")
            }
        }
        instance::Status::Terminating | instance::Status::Terminated => {
            let reason = row.termination_message.clone().or_else(|| row.termination_reason.clone());
            let reason =
                reason.map(|reason| reason.replace('_', " ")).unwrap_or_else(|| "requested".to_owned());
            let verb = if row.finished { "was" } else { "is being" };
            format!("It {verb} terminated: {reason}.")
        }
    }
}

fn reasons(row: &Instance) -> Vec<String> {
    let mut all = Vec::new();
    if row.health != "healthy" {
        let problem = row.health_message.clone().unwrap_or_else(|| "no details reported".to_owned());
        all.push(format!("Health: {} ({problem}).", row.health));
    }
    all.extend(row.status_message.clone());
    let total = row.total_blocks.unwrap_or(1);
    if total > 1 && !row.finished {
        all.push(format!("{} of its {total} blocks are taken.", row.busy_blocks));
    }
    all
}
