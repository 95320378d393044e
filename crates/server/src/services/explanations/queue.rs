//! The queue for instances.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use windlass_api::explanations::{ExpectedEndAt, NearestMiss, QueueEntry, QueueList, Refusal, Slots};
use windlass_model::{
    id::{ProjectId, RunId},
    plan::queue_order::OrderRule,
    time::Timestamp,
};

use super::{
    instance_queue::InstanceQueue,
    refusals::{Locations, RecordedRefusal, RecordedRefusals, cures},
    turns::{FORECAST_MAX, QueueForecast, turn},
};
use crate::{
    app::App,
    auth::Caller,
    db::{
        documents::{JOB_SHORTFALLS, JOB_SPEC, RUN_SPEC, of_run},
        explanations::{self as rows, PlacedJob, WaitingJob},
        pipeline_rows::managed_jobs as passes,
        projects,
    },
    error::Result,
    services::rows::requested_resources,
};

const WAITING_MAX: i64 = 20_000;
const ENDING_MAX: i64 = 5;
const PLACED_MAX: i64 = 20_000;
const BLOCKED_BY_MAX: usize = 3;

pub(crate) async fn list(app: &App, caller: &Caller) -> Result<QueueList> {
    let user = &caller.user;
    let visible = projects::visible(app.db(), user.id, user.admin).await?;
    let ids: Vec<ProjectId> = visible.into_iter().map(|(id, ..)| id).collect();
    let visible: BTreeSet<ProjectId> = ids.iter().copied().collect();
    let as_of = app.db().now().await?.0;
    let placed = rows::placed_jobs(app.db(), &ids, PLACED_MAX).await?;
    let queue = InstanceQueue::load(app.db()).await?;
    let pools: BTreeSet<usize> = ids.iter().filter_map(|id| queue.pool(*id)).collect();
    let listed: Vec<(RunId, Option<OrderRule>)> = queue
        .order
        .iter()
        .copied()
        .filter(|(run, _)| queue.pool_of(*run).is_some_and(|pool| pools.contains(&pool)))
        .collect();
    let runs: Vec<RunId> = listed.iter().map(|(run, _)| *run).collect();
    let forecast = if runs.is_empty() {
        QueueForecast::default()
    } else {
        QueueForecast::load(app, &runs, None).await?
    };
    let mut waiting: BTreeMap<RunId, WaitingJob> = BTreeMap::new();
    for job in rows::waiting_jobs(app.db(), &ids, WAITING_MAX).await? {
        waiting.entry(job.run_id).or_insert(job);
    }
    let positions = queue.positions();
    let mut entries = Vec::with_capacity(listed.len());
    let mut numbers: BTreeMap<Option<usize>, u32> = BTreeMap::new();
    for (run, rule) in listed.into_iter().take(usize::try_from(WAITING_MAX).unwrap_or(usize::MAX)) {
        let position = positions.get(&run).copied().unwrap_or_default();
        let mut entry = match waiting.remove(&run) {
            Some(job) => entry(job, caller, &placed)?,
            None => queued_entry(&queue, run, &visible)?,
        };
        let next = u32::try_from(numbers.len()).unwrap_or(u32::MAX);
        entry.queue = *numbers.entry(queue.pool_of(run)).or_insert(next);
        entry.position = position;
        // The first of a queue comes after nothing.
        entry.rule = rule.filter(|_| position > 0).map(|rule| rule.as_str().to_owned());
        let is_visible = entry.run.is_some();
        if let Some(replica) = queue.replica(run) {
            entry.class = replica.class.as_str().to_owned();
        }
        if is_visible && entries.len() < FORECAST_MAX {
            entry.turn = turn(&queue, &forecast, run, &visible, false);
        }
        entries.push(entry);
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

/// A run of a project that the caller may not see, or one that was placed since the queue was read.
fn queued_entry(queue: &InstanceQueue, run: RunId, visible: &BTreeSet<ProjectId>) -> Result<QueueEntry> {
    let job = queue.jobs.get(&run);
    let named = job.filter(|job| visible.contains(&job.project_id));
    let spec: Option<Value> = job.map(|job| JOB_SPEC.decode(of_run(run), &job.job_spec)).transpose()?;
    let spec = spec.unwrap_or_default();
    Ok(QueueEntry {
        queue: 0,
        position: 0,
        project: named.map(|job| job.project.clone()),
        run: named.map(|job| job.run.clone()),
        run_id: named.map(|job| job.run_id.0),
        mine: false,
        user: None,
        r#type: None,
        requested: requested_resources(&spec["requirements"]["resources"]),
        waits_since: job.map_or(Timestamp(0), |job| job.submitted_at),
        nearest: None,
        passes: true,
        blocked_by: Vec::new(),
        class: String::new(),
        rule: None,
        turn: None,
    })
}

fn entry(job: WaitingJob, caller: &Caller, placed: &[PlacedJob]) -> Result<QueueEntry> {
    let row = || of_run(job.run_id);
    let recorded: RecordedRefusals =
        JOB_SHORTFALLS.decode_opt(row(), job.shortfalls.as_deref())?.unwrap_or_default();
    let passes = recorded.refusals.is_empty()
        || recorded.refusals.iter().any(|one| one.shortfalls.iter().all(|short| short.passes));
    let nearest = recorded.refusals.into_iter().next().map(|one| {
        let join = |texts: Vec<String>| {
            texts.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ")
        };
        let one = refusal(one);
        NearestMiss {
            message: join(one.shortfalls.iter().map(|short| short.message.clone()).collect()),
            cure: join(one.shortfalls.iter().map(|short| short.cure.clone()).collect()),
            patch: cures([&one]).into_iter().next().and_then(|cure| cure.patch),
            place: one.place,
        }
    });
    let blocked_by = nearest.as_ref().map(|miss| blocked_by(&miss.place, placed)).unwrap_or_default();
    let spec: Value = RUN_SPEC.decode(job.run_id, &job.spec)?;
    let job_spec: Value = JOB_SPEC.decode(row(), &job.job_spec)?;
    Ok(QueueEntry {
        queue: 0,
        position: 0,
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
        blocked_by,
        class: String::new(),
        rule: None,
        turn: None,
    })
}

/// A refusal whose location is not looked up.
fn refusal(recorded: RecordedRefusal) -> Refusal {
    Locations::default().refusal(recorded)
}

/// Jobs on the location that the run needs, the first to end first.
fn blocked_by(place: &str, placed: &[PlacedJob]) -> Vec<ExpectedEndAt> {
    let is_there = |job: &&PlacedJob| {
        job.instance == place || job.fleet.as_ref().is_some_and(|fleet| place == format!("fleet {fleet}"))
    };
    let end = |job: &PlacedJob| ExpectedEndAt {
        project: Some(job.project.clone()),
        run: Some(job.run.clone()),
        place: job.instance.clone(),
        ends_at: job.ends_at,
    };
    placed.iter().filter(is_there).take(BLOCKED_BY_MAX).map(end).collect()
}
