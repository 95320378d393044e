//! Runs: list, plan, apply, stop, delete.
//!
//! The API never changes a run's status: it creates runs, stores requests in columns that no pipeline writes
//! (`stop_asked_at`, `spec`, …) and hints the pipelines that read them.

mod apply;
mod connect;
mod end_reasons;
mod images;
mod plan;
mod render;
mod rendered_cache;
mod spec;
pub(crate) mod submit;
mod terminal;

use std::collections::HashMap;

use futures_util::future::try_join_all;
use windlass_api::{
    Document, RenderedJson,
    error::ApiErrorCode,
    operation::Access,
    operations::{DeleteRuns, StopRuns},
    runs as wire,
};
use windlass_model::{event::Entity, id::RunId};

pub use self::{
    apply::apply,
    connect::{check_connect, connect},
    plan::plan,
};
pub(crate) use self::{
    apply::redeploy,
    terminal::{OpenedShell, check_terminal, open_terminal},
};
pub(crate) use self::{
    end_reasons::end_in_words,
    images::check_images,
    rendered_cache::RenderedRunCache,
    spec::{ResolvedRunSpec, check_supported, problems_error},
};
use crate::{
    app::App,
    auth::{self, Caller, ProjectScope},
    db::{
        Page, Unit, jobs, projects, repos,
        runs::{self, NamedRun, Query, RunListEntry},
        users,
    },
    error::{Error, Result},
    events::{EventSubject, note},
    hints::Hint,
    services::{configurations::configuration_text, explanations::InstanceQueue},
};

const LIST_MAX: i64 = 100;
const SUBMISSIONS_MAX: i64 = 10;
/// Repository of runs that have none.
const NO_REPO: &str = "none";
const NAMES_MAX: usize = 1000;

pub async fn list(
    app: &App,
    caller: &Caller,
    requested: wire::ListRequest,
) -> Result<Vec<RenderedJson<wire::Run>>> {
    if !(0..=LIST_MAX).contains(&requested.limit) {
        return Err(Error::field("limit", "must be from 0 to 100"));
    }
    if requested.job_submissions_limit.is_some_and(|limit| !(0..=SUBMISSIONS_MAX).contains(&limit)) {
        return Err(Error::field("job_submissions_limit", "must be from 0 to 10"));
    }
    let Some(projects) = visible_projects(app, caller, requested.project_name.as_deref()).await? else {
        return Ok(Vec::new());
    };
    let user = match &requested.username {
        None => None,
        Some(name) => match users::by_name(app.db(), name).await? {
            Some(user) => Some(user.id),
            None => return Err(Error::absent("User")),
        },
    };
    if let (Some(repo), Some([project])) = (requested.repo_id.as_deref(), projects.as_deref())
        && repo != NO_REPO
        && repos::find(app.db(), *project, repo).await?.is_none()
    {
        let code = ApiErrorCode::RepoDoesNotExist;
        return Err(Error::Refused { code, msg: format!("Repo {repo} does not exist") });
    }
    let query = Query {
        projects,
        user,
        repo_id: requested.repo_id,
        only_active: requested.only_active,
        page: Page {
            time: requested.prev_submitted_at,
            id: requested.prev_run_id,
            limit: requested.limit,
            ascending: requested.ascending,
            ..Page::default()
        },
    };
    let lines = runs::list(app.db(), &query).await?;
    let jobs = if requested.include_jobs {
        render::IncludedJobs::Newest(requested.job_submissions_limit)
    } else {
        render::IncludedJobs::None
    };
    render_cached(app, &lines, jobs, requested.queue_positions).await
}

/// Renders runs: finished ones from the cache if possible; the others are read.
async fn render_cached(
    app: &App,
    lines: &[RunListEntry],
    jobs: render::IncludedJobs,
    with_positions: bool,
) -> Result<Vec<RenderedJson<wire::Run>>> {
    let mut found: HashMap<RunId, _> = HashMap::with_capacity(lines.len());
    for line in lines.iter().filter(|line| line.finished) {
        found.extend(app.finished_runs().find(line.id, jobs).map(|shown| (line.id, shown)));
    }
    let missing: Vec<RunId> = lines.iter().map(|line| line.id).filter(|id| !found.contains_key(id)).collect();
    if !missing.is_empty() {
        let rows = runs::find_all(app.db(), &missing).await?;
        // Not from the list: a run may have finished after it was listed, and before its jobs are read.
        let finished: Vec<bool> = rows.iter().map(|row| row.run.finished).collect();
        let mut runs = to_wire(app, rows, jobs).await?;
        if with_positions {
            add_queue_positions(app, &mut runs).await?;
        }
        for (mut run, finished) in runs.into_iter().zip(finished) {
            strip_reasons(&mut run);
            let (id, shown) = (RunId(run.id), RenderedJson::new(&run)?);
            if finished {
                app.finished_runs().keep(id, jobs, shown.clone());
            }
            found.insert(id, shown);
        }
    }
    Ok(lines.iter().filter_map(|line| found.remove(&line.id)).collect())
}

/// Removes reasons, which are long and not needed in a list.
fn strip_reasons(run: &mut wire::Run) {
    let of_jobs = run.jobs.iter_mut().flat_map(|job| &mut job.job_submissions);
    of_jobs.chain(&mut run.latest_job_submission).for_each(|submission| submission.why = None);
}

/// Projects that a list covers: one that the caller may see, or all of the caller's. `None` if there are none;
/// `Some(None)` is all projects.
pub(super) async fn visible_projects(
    app: &App,
    caller: &Caller,
    name: Option<&str>,
) -> Result<Option<Option<Vec<windlass_model::id::ProjectId>>>> {
    if let Some(name) = name {
        return match auth::project_scope(app, caller.clone(), name, Vec::new()).await {
            Ok(scope) if scope.must(Access::ProjectUser).is_ok() => Ok(Some(Some(vec![scope.project.id]))),
            Ok(_) | Err(Error::Unknown { .. }) => Ok(None),
            Err(error) => Err(error),
        };
    }
    if caller.user.admin {
        return Ok(Some(None));
    }
    let joined = projects::list_joined(app.db(), caller.user.id).await?;
    Ok((!joined.is_empty()).then_some(Some(joined)))
}

pub async fn read(app: &App, scope: &ProjectScope, requested: wire::ReadRequest) -> Result<wire::Run> {
    let found = match (requested.id, &requested.run_name) {
        (Some(id), _) => runs::find(app.db(), RunId(id)).await?,
        (None, Some(name)) => runs::find_by_name(app.db(), scope.project.id, name).await?,
        (None, None) => return Err(Error::refused("run_name or id must be specified")),
    };
    // The project of the row counts, not the one that the caller names.
    let found = found.filter(|run| run.run.project_id == scope.project.id);
    let mut run = to_wire_one(app, found.ok_or_else(not_found)?).await?;
    add_queue_positions(app, std::slice::from_mut(&mut run)).await?;
    if scope.caller.session().is_some() {
        let mut spec = run.run_spec.value()?;
        spec["configuration_text"] = configuration_text(&spec).into();
        run.run_spec = Document::new(&spec)?;
        run.as_of = Some(app.db().now().await?.0);
        run.row = super::rows::find_runs(app, &[RunId(run.id)]).await?.pop().map(Box::new);
    }
    Ok(run)
}

/// Adds the position in the queue to each run that waits for an instance. The queue is read once for all of them, and only
/// if one of them waits.
async fn add_queue_positions(app: &App, runs: &mut [wire::Run]) -> Result<()> {
    let waits = |run: &wire::Run| {
        run.jobs.iter().filter_map(|job| job.job_submissions.last()).any(|last| last.status == "submitted")
    };
    if !runs.iter().any(waits) {
        return Ok(());
    }
    let positions = InstanceQueue::load_positions(app.db()).await?;
    for run in runs.iter_mut() {
        let position = positions.get(&RunId(run.id)).copied();
        let of_jobs = run.jobs.iter_mut().filter_map(|job| job.job_submissions.last_mut());
        let waiting =
            of_jobs.chain(run.latest_job_submission.as_mut()).filter(|last| last.status == "submitted");
        waiting.for_each(|last| last.queue_position = position);
    }
    Ok(())
}

fn not_found() -> Error {
    Error::absent("Run")
}

async fn to_wire_one(app: &App, run: NamedRun) -> Result<wire::Run> {
    to_wire(app, vec![run], render::IncludedJobs::Newest(None)).await?.pop().ok_or_else(not_found)
}

/// Converts runs, with one query for the jobs of all of them.
async fn to_wire(app: &App, rows: Vec<NamedRun>, wanted: render::IncludedJobs) -> Result<Vec<wire::Run>> {
    let ids: Vec<RunId> = rows.iter().map(|row| row.run.id).collect();
    let jobs = match wanted {
        render::IncludedJobs::None => Vec::new(),
        render::IncludedJobs::Newest(limit) => {
            jobs::list_by_runs(app.db(), &ids, limit.map(|limit| limit.max(1))).await?
        }
    };
    render::runs(rows, jobs, wanted)
}

/// Converts a run with the newest submission of each of its jobs.
pub(crate) fn render_newest(run: NamedRun, jobs: Vec<jobs::Job>) -> Result<wire::Run> {
    let wanted = render::IncludedJobs::Newest(Some(1));
    render::runs(vec![run], jobs, wanted)?.pop().ok_or_else(not_found)
}

/// Stores the request to stop. Names of finished and unknown runs are skipped.
pub async fn stop(app: &App, scope: &ProjectScope, requested: &wire::StopRequest) -> Result<()> {
    check_names(&requested.runs_names)?;
    let by = scope.caller.user.id;
    let message = if requested.abort { "Run abort requested" } else { "Run stop requested" };
    let mut requests = Vec::new();
    for name in &requested.runs_names {
        let found = runs::find_by_name(app.db(), scope.project.id, name).await?;
        let Some(NamedRun { run, .. }) = found.filter(|found| !found.run.finished) else { continue };
        scope.require_ownership::<StopRuns>(Some(run.user_id), &format!("run `{name}`"))?;
        let about = EventSubject { entity: Entity::Run, id: run.id.0, name, project: Some(run.project_id) };
        let unit = Unit::new().and([runs::request_stop(run.id, requested.abort, by)]).and(note(
            app.db(),
            Some(by),
            &about,
            "stop_asked",
            message.into(),
        )?);
        requests.push(app.db().write(unit));
    }
    // Sent together: the writer commits them as one group, instead of one after the other. Stale: the run finished by
    // itself, which is the requested result.
    try_join_all(requests).await?;
    app.wake(&[Hint::Runs]);
    Ok(())
}

/// Hides finished runs. If one is active, the request is rejected as a whole.
pub async fn delete(app: &App, scope: &ProjectScope, names: &[String]) -> Result<()> {
    check_names(names)?;
    let by = scope.caller.user.id;
    let mut found = Vec::new();
    for name in names.iter().collect::<std::collections::BTreeSet<_>>() {
        found.extend(runs::find_by_name(app.db(), scope.project.id, name).await?);
    }
    for NamedRun { run, .. } in &found {
        scope.require_ownership::<DeleteRuns>(Some(run.user_id), &format!("run `{}`", run.name))?;
    }
    if found.iter().any(|found| !found.run.finished) {
        return Err(Error::refused("active runs cannot be deleted; stop them first"));
    }
    let mut unit = Unit::new();
    for NamedRun { run, .. } in &found {
        let about = EventSubject {
            entity: Entity::Run,
            id: run.id.0,
            name: &run.name,
            project: Some(run.project_id),
        };
        unit = unit.and([runs::delete(run.id)]).and(note(
            app.db(),
            Some(by),
            &about,
            "deleted",
            "Run deleted".into(),
        )?);
    }
    // Stale: another request hid one of them at the same time.
    app.db().write(unit).await?;
    Ok(())
}

fn check_names(names: &[String]) -> Result<()> {
    if names.len() > NAMES_MAX { Err(Error::field("runs_names", "too many names")) } else { Ok(()) }
}
