//! State of everything that the caller may see, and the search for names.

use std::collections::BTreeMap;

use windlass_api::overview as wire;
use windlass_model::{
    id::ProjectId,
    instance,
    time::{Span, Timestamp},
};

use super::{queue::auth::user_uuid, rows::installed_gpus};
use crate::{
    app::App,
    auth::Caller,
    db::{
        Page,
        instances::{self, Instance},
        overview, projects,
    },
    error::{Error, Result},
};

const ATTENTION_MAX: usize = 10;
const HITS_MAX: u32 = 50;
const HITS_DEFAULT: u32 = 12;
const INSTANCES_MAX: i64 = 10_000;
/// Age of the oldest row of a pipeline that lags, in seconds.
const LAG_SECONDS: f64 = 5.0;
/// Steps of the history of runs, and the length of each.
const HISTORY_STEPS: usize = 30;
const HISTORY_STEP: Span = Span::mins(2);
const DAY_US: i64 = 86_400_000_000;

/// Ids and names of the requested projects that the caller may see.
async fn visible(app: &App, caller: &Caller, names: &[String]) -> Result<Vec<(ProjectId, String)>> {
    let visible = projects::visible(app.db(), caller.user.id, caller.user.admin).await?;
    let is_requested = |name: &String| names.is_empty() || names.contains(name);
    Ok(visible
        .into_iter()
        .filter(|(_, name, _)| is_requested(name))
        .map(|(id, name, _)| (id, name))
        .collect())
}

/// `detailed`: with the objects that need attention.
pub(crate) async fn summary(
    app: &App,
    caller: &Caller,
    requested: &wire::SummaryRequest,
    detailed: bool,
) -> Result<wire::Summary> {
    let visible = visible(app, caller, &requested.projects).await?;
    let ids: Vec<ProjectId> = visible.iter().map(|(id, _)| *id).collect();
    let (db, now) = (app.db(), app.db().now().await?);
    let owner = if caller.user.admin { String::new() } else { user_uuid(caller.user.id) };
    let mut counts = BTreeMap::<String, BTreeMap<String, i64>>::new();
    let found = overview::counts(db, &ids).await?.into_iter();
    for count in found.chain(overview::container_counts(db, &owner).await?) {
        *counts.entry(count.kind).or_default().entry(count.status).or_default() += count.count;
    }
    let mut of_kind = |kind: &str| counts.remove(kind).unwrap_or_default();
    let query = instances::Query {
        projects: Some(ids.clone()),
        only_active: true,
        page: Page { limit: INSTANCES_MAX, ..Page::default() },
        ..instances::Query::default()
    };
    let active = instances::list(db, &query).await?;
    let (blocks, gpus, per_hour) = capacity(&active)?;
    let (length, oldest) = overview::queue(db, &ids).await?;
    let failures = overview::failures(db, &ids).await?;
    let midnight = Timestamp(now.0 - now.0.rem_euclid(DAY_US));
    let cost = wire::CostSummary {
        today: overview::cost(db, &ids, midnight).await?,
        week: overview::cost(db, &ids, Timestamp(now.0 - 7 * DAY_US)).await?,
        per_hour,
    };
    let attention = if detailed { Some(attention(app, &visible, &ids, &active).await?) } else { None };
    let runs = of_kind("runs");
    let history = if detailed { Some(run_history(app, &ids, &runs, now).await?) } else { None };
    Ok(wire::Summary {
        as_of: now.0,
        runs,
        managed_jobs: of_kind("managed_jobs"),
        instances: of_kind("instances"),
        containers: of_kind("containers"),
        fleets: of_kind("fleets"),
        volumes: of_kind("volumes"),
        gateways: of_kind("gateways"),
        blocks,
        gpus,
        queue: wire::QueueSummary { length, oldest },
        failures: failures.into_iter().map(|(reason, count)| wire::FailureCount { reason, count }).collect(),
        cost,
        attention,
        pipelines: (detailed && caller.user.admin).then(|| lagging_pipelines(app)),
        history,
    })
}

/// Blocks, GPUs and price of the instances that are idle or busy. GPUs are taken in proportion to the blocks.
fn capacity(active: &[Instance]) -> Result<(wire::Capacity, wire::Capacity, f64)> {
    let (mut blocks, mut gpus, mut price) = (wire::Capacity::default(), wire::Capacity::default(), 0.0);
    for one in active {
        if !matches!(one.status, instance::Status::Idle | instance::Status::Busy) {
            continue;
        }
        let (total, busy) = (one.total_blocks.unwrap_or(1).max(1), one.busy_blocks);
        blocks.total += total;
        blocks.taken += busy;
        let installed = installed_gpus(one)?;
        gpus.total += installed;
        gpus.taken += installed.saturating_mul(busy) / total;
        price += one.price.unwrap_or(0.0);
    }
    Ok((blocks, gpus, price))
}

/// Counts of the last hour, from those of now and the changes since.
async fn run_history(
    app: &App,
    ids: &[ProjectId],
    counts: &BTreeMap<String, i64>,
    now: Timestamp,
) -> Result<wire::RunHistory> {
    let steps = i64::try_from(HISTORY_STEPS).unwrap_or(i64::MAX);
    let since = now - Span(HISTORY_STEP.0.saturating_mul(steps));
    let changes = overview::run_changes(app.db(), ids, since, HISTORY_STEP.0).await?;
    Ok(history_of(counts, &changes))
}

fn history_of(counts: &BTreeMap<String, i64>, changes: &[overview::RunChanges]) -> wire::RunHistory {
    let changed = |status: &str, step: usize| {
        let of_step = changes.iter().filter(|change| usize::try_from(change.step) == Ok(step));
        let of_step = of_step.filter(|change| change.from.as_deref() != Some(change.to.as_str()));
        of_step.fold((0, 0), |(entered, left), change| {
            let entered = entered + if change.to == status { change.count } else { 0 };
            (entered, left + if change.from.as_deref() == Some(status) { change.count } else { 0 })
        })
    };
    let at_ends = |status: &str| {
        let mut count = counts.get(status).copied().unwrap_or_default();
        let mut found = vec![0; HISTORY_STEPS];
        for step in (0..HISTORY_STEPS).rev() {
            found[step] = count.max(0);
            let (entered, left) = changed(status, step);
            count += left - entered;
        }
        found
    };
    wire::RunHistory {
        step_seconds: HISTORY_STEP.as_secs(),
        running: at_ends("running"),
        waiting: at_ends("submitted"),
        failed: (0..HISTORY_STEPS).map(|step| changed("failed", step).0).collect(),
    }
}

async fn attention(
    app: &App,
    visible: &[(ProjectId, String)],
    ids: &[ProjectId],
    active: &[Instance],
) -> Result<Vec<wire::Attention>> {
    let project = |id: ProjectId| visible.iter().find(|(one, _)| *one == id).map(|(_, name)| name.clone());
    let of_instance = |one: &Instance| {
        let silent = one.unreachable_since.filter(|_| one.unreachable);
        let (what, since, reason) = match silent {
            Some(since) => ("unreachable", since, "its agent does not respond".to_owned()),
            None if one.health == "failure" => {
                let problem = one.health_message.clone().unwrap_or_else(|| "it reports a failure".to_owned());
                ("unhealthy", one.last_processed_at, problem)
            }
            None => return None,
        };
        Some(wire::Attention {
            what: what.to_owned(),
            kind: "instance".to_owned(),
            id: one.id.to_string(),
            project: project(one.project_id),
            name: one.name.clone(),
            reason,
            since,
        })
    };
    let of_run = |what: &str, run: overview::NotableRun, otherwise: &str| wire::Attention {
        what: what.to_owned(),
        kind: "run".to_owned(),
        id: run.id.to_string(),
        project: Some(run.project),
        name: run.name,
        reason: run.message.filter(|message| !message.is_empty()).unwrap_or_else(|| otherwise.to_owned()),
        since: run.since,
    };
    let mut all: Vec<wire::Attention> = active.iter().filter_map(of_instance).collect();
    let waiting = overview::waiting_runs(app.db(), ids).await?;
    all.extend(waiting.into_iter().map(|run| of_run("waiting", run, "it waits for an instance")));
    let failed = overview::failed_runs(app.db(), ids).await?;
    all.extend(failed.into_iter().map(|run| of_run("failed", run, "it failed")));
    all.truncate(ATTENTION_MAX);
    Ok(all)
}

fn lagging_pipelines(app: &App) -> Vec<wire::LaggingPipeline> {
    let lag = |one: windlass_engine::status::Snapshot| {
        let lag_seconds = one.oldest_age?.as_secs_f64();
        (lag_seconds > LAG_SECONDS)
            .then(|| wire::LaggingPipeline { name: one.pipeline.to_owned(), lag_seconds })
    };
    app.metrics().pipelines().into_iter().filter_map(lag).collect()
}

pub(crate) async fn search(
    app: &App,
    caller: &Caller,
    requested: &wire::SearchRequest,
) -> Result<wire::SearchResult> {
    let limit = requested.limit.unwrap_or(HITS_DEFAULT);
    if limit > HITS_MAX {
        return Err(Error::field("limit", format!("must be from 0 to {HITS_MAX}")));
    }
    let text = requested.text.trim();
    if text.is_empty() || limit == 0 {
        return Ok(wire::SearchResult { hits: Vec::new() });
    }
    let ids: Vec<ProjectId> = visible(app, caller, &[]).await?.into_iter().map(|(id, _)| id).collect();
    let found = overview::search(app.db(), &ids, text, i64::from(limit)).await?;
    let hit = |hit: overview::Hit| wire::Hit {
        kind: hit.kind,
        id: hit.id,
        project: hit.project,
        name: hit.name,
        status: hit.status,
        hint: hit.hint,
    };
    Ok(wire::SearchResult { hits: found.into_iter().map(hit).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_history_of_runs_is_computed_back_from_their_counts() {
        let change = |step, from: Option<&str>, to: &str, count| overview::RunChanges {
            step,
            from: from.map(str::to_owned),
            to: to.to_owned(),
            count,
        };
        let counts = BTreeMap::from([("running".to_owned(), 2), ("failed".to_owned(), 9)]);
        // Three were submitted in step 10, started in step 20, and one of them failed in the last one, to whose end a change
        // belongs that was made while this was read.
        let changes = [
            change(10, None, "submitted", 3),
            change(20, Some("submitted"), "running", 3),
            change(20, Some("running"), "running", 5),
            change(29, Some("running"), "failed", 1),
            change(30, None, "submitted", 4),
        ];
        let history = history_of(&counts, &changes);
        let of = |list: &[i64]| [list[9], list[10], list[19], list[20], list[28], list[29]];
        assert_eq!(history.running.len(), HISTORY_STEPS);
        assert_eq!(of(&history.running), [0, 0, 0, 3, 3, 2]);
        assert_eq!(of(&history.waiting), [0, 3, 3, 0, 0, 0]);
        assert_eq!(
            (history.failed.iter().sum::<i64>(), history.failed[29], history.step_seconds),
            (1, 1, 120)
        );
    }
}
