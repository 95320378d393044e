//! Rows of runs.

use std::collections::HashMap;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::Deserialize;
use serde_json::Value;
use windlass_api::{
    rows::{Rows, RowsRequest, RunRow},
    runs as wire,
};
use windlass_model::{
    id::{InstanceId, RunId},
    job, run,
    time::Timestamp,
};

use super::{RequestedPage, TOTAL_MAX, parse_sort, resource_words, visible_projects};
use crate::{
    app::App,
    auth::Caller,
    db::{
        Db,
        documents::{JOB_SPEC, RUN_SPEC},
        jobs::{self, Job},
        run_rows::{self, JobColumns, PageStart, RunFilter, RunPlace, RunSort},
        runs::{self, NamedRun},
    },
    error::Result,
    services::{explanations::InstanceQueue, runs::render_newest},
};

const SORTS: [(&str, RunSort); 6] = [
    ("submitted_at", RunSort::SubmittedAt),
    ("name", RunSort::Name),
    ("status", RunSort::Status),
    ("user", RunSort::User),
    ("cost", RunSort::Cost),
    ("duration", RunSort::Duration),
];

pub(crate) async fn list(app: &App, caller: &Caller, mut requested: RowsRequest) -> Result<Rows<RunRow>> {
    let (sort, descending) =
        parse_sort(requested.sort.as_deref(), &SORTS)?.unwrap_or((RunSort::SubmittedAt, true));
    let by_time = sort == RunSort::SubmittedAt;
    // In the order of time a page starts at a run, so that others which are added meanwhile do not move it.
    let start = requested.cursor.as_deref().filter(|_| by_time).and_then(decode_place);
    if start.is_some() {
        requested.cursor = None;
    }
    let page = RequestedPage::of(&requested)?;
    let filter = RunFilter {
        projects: visible_projects(app, caller, &requested.projects).await?,
        users: requested.users,
        statuses: requested.statuses,
        types: requested.types,
        fleets: requested.fleets,
        text: requested.text.filter(|text| !text.is_empty()),
        since: requested.since,
        until: requested.until,
    };
    let as_of = app.db().now().await?;
    let counts = run_rows::counts(app.db(), &filter).await?;
    let is_listed =
        |status: &str| filter.statuses.is_empty() || filter.statuses.iter().any(|listed| listed == status);
    let total: i64 = counts.iter().filter(|(status, _)| is_listed(status)).map(|(_, count)| count).sum();
    let (rows, next, prev) = if page.limit == 0 {
        (Vec::new(), None, page.cursors(total).1)
    } else if by_time && page.offset == 0 {
        let start = start.unwrap_or(PageStart::First);
        let (ids, next, prev) = page_by_time(app.db(), &filter, descending, start, page.limit).await?;
        (find(app, &ids).await?, next, prev)
    } else {
        let ids = run_rows::list(app.db(), &filter, sort, descending, (page.offset, page.limit)).await?;
        let (next, prev) = page.cursors(total);
        (find(app, &ids).await?, next, prev)
    };
    Ok(Rows {
        rows,
        next,
        prev,
        counts: counts.into_iter().collect(),
        total: total.min(TOTAL_MAX),
        more: total > TOTAL_MAX,
        as_of: as_of.0,
    })
}

/// A page in the order of submission, with the cursors of the pages after and before it.
async fn page_by_time(
    db: &Db,
    filter: &RunFilter,
    descending: bool,
    start: PageStart,
    limit: u32,
) -> Result<(Vec<RunId>, Option<String>, Option<String>)> {
    // One more tells whether there is another page in this direction.
    let mut places = run_rows::list_by_time(db, filter, descending, start, limit.saturating_add(1)).await?;
    let has_more = places.len() > limit as usize;
    let (has_next, has_prev) = match start {
        PageStart::First => (has_more, false),
        PageStart::After(_) => (has_more, true),
        PageStart::Before(_) => (true, has_more),
    };
    match start {
        PageStart::Before(_) if has_more => {
            places.remove(0);
        }
        PageStart::First | PageStart::After(_) | PageStart::Before(_) => places.truncate(limit as usize),
    }
    let (first, last) = (places.first().copied(), places.last().copied());
    let next = last.filter(|_| has_next).map(|last| encode_place("after", last));
    let prev = first.filter(|_| has_prev).map(|first| encode_place("before", first));
    Ok((places.into_iter().map(|place| place.id).collect(), next, prev))
}

fn encode_place(direction: &str, place: RunPlace) -> String {
    URL_SAFE_NO_PAD.encode(format!("{direction} {} {}", place.at.0, place.id))
}

fn decode_place(cursor: &str) -> Option<PageStart> {
    let text = String::from_utf8(URL_SAFE_NO_PAD.decode(cursor).ok()?).ok()?;
    let mut words = text.split(' ');
    let (direction, at, id) = (words.next()?, words.next()?, words.next()?);
    let place = RunPlace { at: Timestamp(at.parse().ok()?), id: RunId(id.parse().ok()?) };
    match direction {
        "after" => Some(PageStart::After(place)),
        "before" => Some(PageStart::Before(place)),
        _ => None,
    }
}

/// Rows of those of these runs that exist, in this order.
pub(crate) async fn find(app: &App, ids: &[RunId]) -> Result<Vec<RunRow>> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let named = runs::find_all(app.db(), ids).await?;
    let all_jobs = jobs::list_by_runs(app.db(), ids, Some(1)).await?;
    let mut columns = run_rows::job_columns(app.db(), ids).await?;
    let positions = if named.iter().any(|named| named.run.status == run::Status::Submitted) {
        InstanceQueue::load_positions(app.db()).await?
    } else {
        HashMap::new()
    };
    let on: Vec<InstanceId> = all_jobs.iter().filter_map(|job| job.instance_id).collect();
    let instances = run_rows::instance_names(app.db(), &on).await?;
    let mut jobs_of = HashMap::<RunId, Vec<Job>>::new();
    for job in all_jobs {
        jobs_of.entry(job.run_id).or_default().push(job);
    }
    let mut rows = HashMap::new();
    for named in named {
        let id = named.run.id;
        let jobs = jobs_of.remove(&id).unwrap_or_default();
        let placed = jobs.iter().filter_map(|job| instances.get(&job.instance_id?)).collect::<Vec<_>>();
        let instance = match placed.as_slice() {
            [] => None,
            [one] => Some((*one).clone()),
            [first, rest @ ..] => Some(format!("{first} +{}", rest.len())),
        };
        let mut built = row(named, jobs, columns.remove(&id))?;
        built.instance = instance;
        built.queue_position = positions.get(&id).copied();
        rows.insert(id, built);
    }
    Ok(ids.iter().filter_map(|id| rows.remove(id)).collect())
}

#[derive(Deserialize)]
struct SpecView {
    configuration: ConfigurationView,
}

#[derive(Deserialize)]
struct ConfigurationView {
    r#type: String,
}

fn row(named: NamedRun, jobs: Vec<Job>, columns: Option<JobColumns>) -> Result<RunRow> {
    let spec: SpecView = RUN_SPEC.decode(named.run.id, &named.run.spec)?;
    let kind = spec.configuration.r#type;
    let is_service = named.run.service.is_some();
    let finished = named.run.finished;
    let (finished_at, desired) = (named.run.finished_at, named.run.desired_replicas);
    let termination = named.run.termination_message.clone();
    let job_count = i64::try_from(jobs.len()).unwrap_or(i64::MAX);
    let is_ready = |job: &&Job| {
        job.status == job::Status::Running && (!is_service || (job.replica_registered && job.job_num == 0))
    };
    let ready = i64::try_from(jobs.iter().filter(is_ready).count()).unwrap_or(i64::MAX);
    let spec: Option<Value> = jobs.first().map(|job| JOB_SPEC.decode(job.id, &job.job_spec)).transpose()?;
    let resources = spec.map(|spec| resource_words::requested(&spec["requirements"]["resources"]));
    let resources = resources.unwrap_or_default();
    let submission_id = jobs.first().map(|job| job.id.0);
    let waits_because = jobs.iter().rev().filter(|job| job.status == job::Status::Submitted);
    let nearest_miss = waits_because.filter_map(|job| job.status_message.clone()).next();
    let shown = render_newest(named, jobs)?;
    let reason = if finished { end_reason(&shown, termination) } else { nearest_miss.or(shown.reason) };
    let message =
        Some(shown.status_message).filter(|message| !message.is_empty() && *message != shown.status);
    Ok(RunRow {
        id: shown.id,
        project: shown.project_name,
        name: shown
            .run_spec
            .value()
            .ok()
            .and_then(|spec| Some(spec["run_name"].as_str()?.to_owned()))
            .unwrap_or_default(),
        r#type: kind,
        user: shown.user,
        status: shown.status,
        message,
        reason,
        termination_reason: shown.termination_reason,
        queue_position: None,
        fleet: shown.fleet.map(|fleet| fleet.name),
        instance: None,
        resources: resources.words,
        gpu: resources.gpu,
        gpus: resources.gpus.saturating_mul(job_count.max(1)),
        ready,
        wanted: if is_service { desired } else { job_count.max(1) },
        attempts: columns.as_ref().map_or(0, |columns| columns.attempts),
        cost: columns.as_ref().map_or(0.0, |columns| columns.cost),
        price: columns.as_ref().map_or(0.0, |columns| columns.price),
        submission_id,
        managed_job: columns.as_ref().and_then(|columns| columns.managed_job),
        submitted_at: shown.submitted_at,
        started_at: columns.and_then(|columns| columns.started_at),
        finished_at,
    })
}

/// Reason of the end of a run that did not simply succeed.
fn end_reason(run: &wire::Run, message: Option<String>) -> Option<String> {
    if run.status == "done" {
        return None;
    }
    let of_job = |submission: &wire::JobSubmission| {
        let message = submission.termination_reason_message.clone().filter(|message| !message.is_empty());
        let exit = submission.exit_status.filter(|code| *code != 0).map(|code| format!("exit code {code}"));
        message.or(exit).or_else(|| submission.error.clone())
    };
    let mut submissions = run.jobs.iter().filter_map(|job| job.job_submissions.last());
    message
        .filter(|message| !message.is_empty())
        .or_else(|| submissions.find_map(of_job))
        .or_else(|| run.error.clone())
        .or_else(|| run.termination_reason.as_ref().map(|reason| reason.replace('_', " ")))
}
