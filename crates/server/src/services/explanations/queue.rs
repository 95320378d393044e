//! The queue for instances.

use std::collections::HashSet;

use serde_json::Value;
use windlass_api::explanations::{ExpectedEndAt, NearestMiss, QueueEntry, QueueList, Slots};
use windlass_model::id::ProjectId;

use super::refusals::RecordedRefusals;
use crate::{
    app::App,
    auth::Caller,
    db::{
        explanations::{self as rows, WaitingJob},
        pipeline_rows::managed_jobs as passes,
        projects,
    },
    error::Result,
    services::rows::requested_resources,
};

const WAITING_MAX: i64 = 2000;
const ENDING_MAX: i64 = 5;

pub(crate) async fn list(app: &App, caller: &Caller) -> Result<QueueList> {
    let user = &caller.user;
    let visible = projects::visible(app.db(), user.id, user.admin).await?;
    let ids: Vec<ProjectId> = visible.into_iter().map(|(id, ..)| id).collect();
    let as_of = app.db().now().await?.0;
    let mut seen = HashSet::new();
    let mut entries = Vec::new();
    for job in rows::waiting_jobs(app.db(), &ids, WAITING_MAX).await? {
        if seen.insert(job.run_id) {
            entries.push(entry(job, i64::try_from(entries.len()).unwrap_or(i64::MAX), caller));
        }
    }
    let ending = rows::ending_jobs(app.db(), &ids, ENDING_MAX).await?;
    let next_free = ending.into_iter().map(|job| ExpectedEndAt {
        project: Some(job.project),
        run: Some(job.run),
        place: job.place,
        ends_at: Some(job.ends_at),
    });
    let (limits, used) = (app.settings().job_limits, passes::slots_in_use(app.db()).await?);
    Ok(QueueList {
        as_of,
        entries,
        slots: Slots {
            launching: used.launching,
            launching_max: limits.max_launching,
            alive: used.alive,
            alive_max: limits.max_alive,
        },
        next_free: next_free.collect(),
    })
}

fn entry(job: WaitingJob, position: i64, caller: &Caller) -> QueueEntry {
    let recorded = RecordedRefusals::parse(job.shortfalls.as_deref());
    let passes = recorded.refusals.is_empty()
        || recorded.refusals.iter().any(|one| one.shortfalls.iter().all(|short| short.passes));
    let nearest = recorded.refusals.into_iter().next().map(|one| {
        let join = |texts: Vec<String>| {
            texts.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ")
        };
        NearestMiss {
            message: join(one.shortfalls.iter().map(|short| short.message.clone()).collect()),
            cure: join(one.shortfalls.iter().map(|short| short.cure.clone()).collect()),
            place: one.place,
        }
    });
    let spec: Value = serde_json::from_str(&job.spec).unwrap_or_default();
    let job_spec: Value = serde_json::from_str(&job.job_spec).unwrap_or_default();
    QueueEntry {
        position,
        project: Some(job.project),
        run: Some(job.run),
        run_id: Some(job.run_id.0),
        mine: job.user_id == caller.user.id,
        user: Some(job.user_name),
        r#type: spec["configuration"]["type"].as_str().map(str::to_owned),
        requested: requested_resources(&job_spec["requirements"]["resources"]),
        waits_since: job.submitted_at,
        nearest,
        passes,
        blocked_by: Vec::new(),
    }
}
