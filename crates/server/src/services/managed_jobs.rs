//! Managed jobs: launch from a file, list, cancel, resume.
//!
//! The API never changes the status of an active job: it inserts rows, stores requests in columns that no pipeline writes,
//! and hints the pipeline that reads them. No pipeline holds a finished job, so a resumed one is written here.

mod new_jobs;
mod render;
mod resume;
mod savings;

use std::collections::{BTreeMap, BTreeSet};

use sha2::{Digest as _, Sha256};
use uuid::Uuid;
use windlass_api::{
    Document, managed_jobs as wire, operations::CancelManagedJobs, projects::ProjectRole, runs::ImageReport,
};
use windlass_model::{
    event::Entity,
    id::{ManagedJobId, ProjectId},
    managed_job::{
        Status,
        plan::{COPIES_MAX, Candidate, ManagedJobPlan, PRIORITY, TaskBody, WORKDIR, Workdir},
    },
    resources::CpuArch,
    skypilot::{
        self, CommandLineValues, Infra, JobIdentity, LaunchableJob, SecretValue, ServerContext, TaskSecrets,
    },
    time::{Span, Timestamp},
};

pub(crate) use self::savings::savings;
pub use self::{new_jobs::NewJobs, resume::resume};
use super::{
    names,
    runs::{check_images, problems_error},
};
use crate::{
    app::App,
    attempt_specs::{self, Attempt, AttemptSpecBuilder, AttemptSpecError, FileArchive, TaskArchives},
    auth::ProjectScope,
    db::{
        Unit, WriteOutcome,
        managed_jobs::{self as rows, JobWithTasks, Query},
        repos,
    },
    error::{Error, Result},
    events::{EventSubject, note},
    hints::Hint,
};

const TEXT_BYTES_MAX: usize = 1 << 20;
const NAME_MAX: usize = 120;
const LIST_MAX: i64 = 1000;
const LIST_DEFAULT: i64 = 100;
const IDS_MAX: usize = 10_000;
/// Time for which a graceful cancel waits for output if no limit is set.
const GRACEFUL_DEFAULT: Span = Span::hours(1);

/// A request that can be launched.
struct LaunchPlan {
    plan: ManagedJobPlan,
    name: String,
    copies: u32,
    files: TaskArchives,
    /// One entry per task.
    secrets: Vec<TaskSecrets>,
    warnings: Vec<String>,
}

/// Reads a request, and rejects one that can never become a run.
async fn prepare_launch(
    app: &App,
    scope: &ProjectScope,
    requested: wire::LaunchRequest,
) -> Result<LaunchPlan> {
    let LaunchableJob { mut plan, secrets, warnings } = read(&requested)?;
    let mut warnings: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    let site = attempt_specs::allowed_infra(app.db(), app.backends(), scope.project.id, &plan).await?;
    map_infra(&mut plan, &site, &mut warnings)?;
    let name = match requested.name.or(plan.name.take()) {
        Some(name) => job_name(name)?,
        None => names::generate(0)?,
    };
    plan.name = Some(name.clone());
    if let Some(priority) = requested.priority {
        plan.priority = priority;
    }
    if !PRIORITY.contains(&i64::from(plan.priority)) {
        return Err(Error::field("priority", "must be from -1000 to 1000"));
    }
    let copies = requested.num_jobs.unwrap_or(1);
    if !(1..=COPIES_MAX).contains(&copies) {
        return Err(Error::field("num_jobs", format!("must be from 1 to {COPIES_MAX}")));
    }
    let files = task_archives(app, scope, &plan, requested.files).await?;
    // A run may only name a registered repository.
    for url in repositories(&plan) {
        super::repos::register_remote(app, scope, url).await?;
    }
    let images = check(app, scope, &plan, &files, site).await?;
    plan.image_architectures = images.architectures;
    warnings.extend(images.warnings);
    Ok(LaunchPlan { plan, name, copies, files, secrets, warnings })
}

/// The plan of a task file, and the run of its first attempt.
pub(crate) struct FirstAttempt {
    /// Empty if the file has no name.
    pub(crate) name: String,
    pub(crate) run_spec: Document,
    pub(crate) plan_text: String,
    pub(crate) warnings: Vec<String>,
}

/// Plans the first attempt of the first task, without looking up its image.
pub(crate) async fn first_attempt(
    app: &App,
    scope: &ProjectScope,
    requested: wire::LaunchRequest,
) -> Result<FirstAttempt> {
    let LaunchableJob { mut plan, warnings, .. } = read(&requested)?;
    let mut warnings: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    let site = attempt_specs::allowed_infra(app.db(), app.backends(), scope.project.id, &plan).await?;
    map_infra(&mut plan, &site, &mut warnings)?;
    let files = TaskArchives::default();
    let user = &scope.caller.user;
    let builder = AttemptSpecBuilder {
        id: Uuid::nil(),
        plan: &plan,
        files: &files,
        identity: check_identity(&user.name),
        priority: i64::from(plan.priority),
        ssh_key: user.ssh_public_key.as_deref(),
        site,
        images: &scope.default_images(app),
    };
    let attempt = Attempt { task: 0, number: 1, candidate: 0, market: None };
    let spec = builder.spec(&attempt).map_err(attempt_error)?;
    Ok(FirstAttempt {
        name: plan.name.clone().unwrap_or_default(),
        run_spec: Document::new(&spec.value)?,
        plan_text: render::plan_text(&plan)?,
        warnings,
    })
}

/// Identity of a job that is only checked.
fn check_identity(user: &str) -> JobIdentity {
    JobIdentity {
        job_id: "0".to_owned(),
        submitted_at: Timestamp(0),
        user: user.to_owned(),
        rank: 0,
        copies: 1,
    }
}

fn attempt_error(error: AttemptSpecError) -> Error {
    match error {
        AttemptSpecError::Run(error) => error,
        AttemptSpecError::Task(_) | AttemptSpecError::Document(_) => Error::refused(error.to_string()),
    }
}

/// Checks what would be rejected, and what would have no effect.
pub async fn check_only(
    app: &App,
    scope: &ProjectScope,
    requested: wire::LaunchRequest,
) -> Result<wire::LaunchResponse> {
    let warnings = prepare_launch(app, scope, requested).await?.warnings;
    Ok(wire::LaunchResponse { jobs: Vec::new(), warnings })
}

/// Launches the requested number of jobs, all or none.
pub async fn launch(
    app: &App,
    scope: &ProjectScope,
    requested: wire::LaunchRequest,
) -> Result<wire::LaunchResponse> {
    let hash = request_hash(&requested)?;
    if let Some(first) = find_repeated(app, scope, &hash).await? {
        let warnings = read(&requested)?.warnings.iter().map(ToString::to_string).collect();
        return launch_response(app, &first, warnings).await;
    }
    let LaunchPlan { plan, name, copies, files, secrets, warnings } =
        prepare_launch(app, scope, requested).await?;
    let made = NewJobs {
        db: app.db(),
        keys: app.keys(),
        project: scope.project.id,
        user: scope.caller.user.id,
        name: &name,
        plan: &plan,
        files: serde_json::to_string(&files)?,
        secrets: &secrets,
        copies,
        key: scope.idempotency_key.clone().map(|key| (key, hash.clone())),
    };
    let (ids, unit) = made.unit()?;
    let rows = match app.db().write(unit).await {
        Ok(written) => written.done()?.1,
        Err(error) if error.is_conflict_on("managed_jobs_idempotency_key") => {
            let first =
                find_repeated(app, scope, &hash).await?.ok_or_else(|| Error::exists("Managed job"))?;
            return launch_response(app, &first, warnings).await;
        }
        Err(error) => return Err(error.into()),
    };
    app.wake(&[Hint::ManagedJobs]);
    let last = rows.first().and_then(|rows| rows.first()).map_or(Ok(0), |row| row.int(0))?;
    let first = last - i64::from(copies) + 1;
    let jobs = ids.into_iter().zip(first..);
    let jobs = jobs.map(|(id, job_id)| wire::LaunchedJob { id: id.0, job_id, name: name.clone() }).collect();
    Ok(wire::LaunchResponse { jobs, warnings })
}

/// URLs of the repositories that the tasks of a job clone.
fn repositories(plan: &ManagedJobPlan) -> BTreeSet<&str> {
    plan.tasks.iter().filter_map(|task| repository(&task.body)).collect()
}

fn repository(body: &TaskBody) -> Option<&str> {
    match body {
        TaskBody::Script(script) => match &script.workdir {
            Some(Workdir::Git { url, .. }) => Some(url),
            Some(Workdir::Local(_)) | None => None,
        },
        TaskBody::Configuration(task) => task.run.repos.first().and_then(|repo| repo.0.url.as_deref()),
    }
}

/// Hash of the request, for distinguishing a repeat from another request with the same key.
fn request_hash(requested: &wire::LaunchRequest) -> Result<String> {
    Ok(hex::encode(Sha256::digest(serde_json::to_vec(requested)?)))
}

/// First job that the same request created before.
async fn find_repeated(app: &App, scope: &ProjectScope, hash: &str) -> Result<Option<JobWithTasks>> {
    let Some(key) = &scope.idempotency_key else { return Ok(None) };
    let found = rows::find_by_key(app.db(), scope.project.id, scope.caller.user.id, key).await?;
    match found {
        Some(found) if found.job.idempotency_hash.as_deref() == Some(hash) => Ok(Some(found)),
        Some(_) => {
            Err(Error::Conflict { msg: "this `Idempotency-Key` was already used for another request" })
        }
        None => Ok(None),
    }
}

async fn launch_response(
    app: &App,
    first: &JobWithTasks,
    warnings: Vec<String>,
) -> Result<wire::LaunchResponse> {
    let copies = rows::list_copies(app.db(), first.job.number, first.job.copies).await?;
    let name = &first.job.name;
    let jobs = copies.into_iter();
    let jobs = jobs.map(|(id, job_id)| wire::LaunchedJob { id: id.0, job_id, name: name.clone() }).collect();
    Ok(wire::LaunchResponse { jobs, warnings })
}

fn read(requested: &wire::LaunchRequest) -> Result<LaunchableJob> {
    if requested.text.len() > TEXT_BYTES_MAX {
        return Err(Error::field("text", format!("must be at most {TEXT_BYTES_MAX} bytes")));
    }
    let secrets = requested.secrets.iter().map(|(name, value)| (name.clone(), SecretValue(value.clone())));
    let given = CommandLineValues { envs: requested.envs.clone(), secrets: secrets.collect() };
    let parsed =
        skypilot::parse_task_file(&requested.text, &given).map_err(|problems| problems_error(&problems))?;
    let mut job = parsed.into_launchable().map_err(|problems| {
        let reported = problems.iter().map(|one| match &one.hint {
            Some(hint) => format!("{one}; hint: {hint}"),
            None => one.to_string(),
        });
        Error::refused(reported.collect::<Vec<_>>().join("; "))
    })?;
    let overrides = skypilot::Overrides::from(requested.overrides.clone());
    overrides.apply(&mut job.plan).map_err(|problems| problems_error(&problems))?;
    for (task, secrets) in job.plan.tasks.iter().zip(&job.secrets) {
        let unset = task.body.secrets().iter().find(|name| !secrets.contains_key(*name));
        if let Some(name) = unset {
            return Err(Error::refused(format!(
                "secret `{name}` has no value; hint: pass `--secret {name}=…`"
            )));
        }
    }
    Ok(job)
}

/// Resolves the location of each candidate. One that can run nowhere is left out, unless it is the last.
fn map_infra(plan: &mut ManagedJobPlan, site: &ServerContext, warnings: &mut Vec<String>) -> Result<()> {
    let mut warn = |text: String| {
        if !warnings.contains(&text) {
            warnings.push(text);
        }
    };
    for task in &mut plan.tasks {
        let infra = |candidate: &Candidate| {
            candidate.infra.as_deref().map(|text| (text.to_owned(), site.resolve_infra(text)))
        };
        let is_unknown = |candidate: &Candidate| matches!(infra(candidate), Some((_, Infra::Unknown)));
        for (text, found) in task.candidates.iter().filter_map(infra) {
            match found {
                Infra::Unknown if task.candidates.iter().all(is_unknown) => {
                    return Err(Error::refused(format!(
                        "`infra: {text}` is neither a fleet of the project nor a backend of the server; hint: {}",
                        known_infra_hint(site)
                    )));
                }
                Infra::Unknown => warn(format!(
                    "`infra: {text}` is ignored: it is neither a fleet of the project nor a backend of the server"
                )),
                Infra::OwnInstances => warn(format!(
                    "`infra: {text}` has no effect: the server has no cloud backend and uses its own \
                     instances for every cloud"
                )),
                Infra::Anywhere | Infra::Fleet(_) | Infra::Place { .. } => {}
            }
        }
        let candidates = std::mem::take(&mut task.candidates);
        task.candidates = candidates.into_iter().filter(|candidate| !is_unknown(candidate)).collect();
    }
    Ok(())
}

fn known_infra_hint(site: &ServerContext) -> String {
    let named: Vec<String> =
        site.backends.iter().chain(&site.fleets).map(|name| format!("`{name}`")).collect();
    format!("use one of {}, or remove `infra` to run the job anywhere", named.join(", "))
}

fn job_name(name: String) -> Result<String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ' ');
    if (1..=NAME_MAX).contains(&name.len()) && name.chars().all(is_plain) {
        return Ok(name);
    }
    Err(Error::field("name", format!("must be 1 to {NAME_MAX} letters, digits, spaces, `-`, `_` or `.`")))
}

/// Archives of the tasks, which must belong to the caller.
async fn task_archives(
    app: &App,
    scope: &ProjectScope,
    plan: &ManagedJobPlan,
    sent: Vec<wire::TaskFile>,
) -> Result<TaskArchives> {
    let mut files = TaskArchives(BTreeMap::new());
    for file in sent {
        if usize::try_from(file.task).is_ok_and(|task| task >= plan.tasks.len()) {
            return Err(Error::field("files", format!("task {} does not exist", file.task)));
        }
        let archive = FileArchive { id: file.archive_id, path: file.path };
        files.0.entry(file.task).or_default().push(archive);
    }
    // Unpacking to a path replaces what is there: the directory comes before the files in it.
    files.0.values_mut().for_each(|archives| archives.sort_by_key(|archive| archive.path != WORKDIR));
    if !repos::owns_archives(app.db(), scope.caller.user.id, &files.ids()).await? {
        return Err(Error::absent("File archive"));
    }
    Ok(files)
}

/// Maximum number of tasks whose images are looked up: a user waits for the answer.
const LOOKED_UP_TASKS_MAX: usize = 32;

/// Reports of registries about the images of a job.
#[derive(Default)]
struct ImageFindings {
    architectures: BTreeMap<String, Vec<CpuArch>>,
    warnings: BTreeSet<String>,
}

/// Rejects what can never become a run, with the same messages as `windlass apply`.
async fn check(
    app: &App,
    scope: &ProjectScope,
    plan: &ManagedJobPlan,
    files: &TaskArchives,
    site: ServerContext,
) -> Result<ImageFindings> {
    let mut images = ImageFindings::default();
    let user = &scope.caller.user;
    let identity = check_identity(&user.name);
    let builder = AttemptSpecBuilder {
        id: Uuid::nil(),
        plan,
        files,
        identity,
        priority: i64::from(plan.priority),
        ssh_key: user.ssh_public_key.as_deref(),
        site,
        images: &scope.default_images(app),
    };
    for (task, of) in (0..).zip(&plan.tasks) {
        for candidate in (0..).take(of.candidates.len().max(1)) {
            let attempt = Attempt { task, number: 1, candidate, market: None };
            let mut spec = builder.spec(&attempt).map_err(attempt_error)?;
            if candidate == 0 {
                spec.check_references(app, scope).await?;
                if usize::try_from(task).is_ok_and(|task: usize| task < LOOKED_UP_TASKS_MAX) {
                    let reports = check_images(app, scope, &mut spec).await?;
                    images.architectures.append(&mut spec.image_architectures()?);
                    let reported = |report: &ImageReport| {
                        let reason = report.not_checked.as_ref()?;
                        Some(format!("image {} was not checked: {reason}", report.name))
                    };
                    images.warnings.extend(reports.iter().filter_map(reported));
                }
            }
        }
    }
    Ok(images)
}

pub async fn list(
    app: &App,
    scope: &ProjectScope,
    requested: wire::ListRequest,
) -> Result<Vec<wire::ManagedJob>> {
    let limit = requested.limit.unwrap_or(LIST_DEFAULT);
    if !(0..=LIST_MAX).contains(&limit) {
        return Err(Error::field("limit", format!("must be from 0 to {LIST_MAX}")));
    }
    let statuses = requested.statuses.iter().map(|word| {
        let known = || Error::field("statuses", format!("unknown status `{}`", word.escape_debug()));
        word.parse::<Status>().map_err(|_| known())
    });
    let query = Query {
        project: Some(scope.project.id),
        projects: None,
        user: (!requested.all_users && requested.job_ids.is_none()).then_some(scope.caller.user.id),
        name: requested.name,
        statuses: statuses.collect::<Result<_>>()?,
        numbers: requested.job_ids,
        skip_finished: requested.skip_finished,
        since: requested.since,
        before: requested.prev_job_id,
        limit,
    };
    render::jobs(app, rows::list(app.db(), &query).await?, false).await
}

/// Jobs in the projects, newest first, with their stored tasks.
pub(crate) async fn list_in_projects(
    app: &App,
    projects: Option<Vec<ProjectId>>,
    numbers: Option<Vec<i64>>,
    limit: i64,
) -> Result<Vec<(wire::ManagedJob, Vec<rows::Task>)>> {
    let query = Query { projects, numbers, limit, ..Query::default() };
    let found = rows::list(app.db(), &query).await?;
    let tasks: Vec<Vec<rows::Task>> = found.iter().map(|job| job.tasks.clone()).collect();
    Ok(render::jobs(app, found, false).await?.into_iter().zip(tasks).collect())
}

pub async fn read_one(app: &App, scope: &ProjectScope, number: i64) -> Result<wire::ManagedJob> {
    let found = rows::find(app.db(), scope.project.id, number).await?;
    let found = found.ok_or_else(|| Error::absent("Managed job"))?;
    render::jobs(app, vec![found], true).await?.pop().ok_or_else(|| Error::absent("Managed job"))
}

/// Stores the request to cancel for all selected jobs, in one statement.
pub async fn cancel(
    app: &App,
    scope: &ProjectScope,
    requested: wire::CancelRequest,
) -> Result<wire::CancelResponse> {
    let given = [requested.job_ids.is_some(), requested.name.is_some(), requested.all, requested.all_users]
        .iter()
        .filter(|g| **g)
        .count();
    if given != 1 {
        let msg = "exactly one of `job_ids`, `name`, `all` and `all_users` must be set";
        return Err(Error::field("job_ids", msg));
    }
    if requested.job_ids.as_ref().is_some_and(|ids| ids.len() > IDS_MAX) {
        return Err(Error::field("job_ids", "too many ids"));
    }
    if requested.graceful_timeout.is_some_and(|secs| secs < 0) {
        return Err(Error::field("graceful_timeout", "must not be negative"));
    }
    let user = &scope.caller.user;
    // Managers of the project may cancel jobs of other users.
    let manages = scope.role() >= Some(ProjectRole::Manager);
    if requested.all_users && !manages {
        return Err(Error::denied());
    }
    if let Some(numbers) = &requested.job_ids {
        let query = Query {
            project: Some(scope.project.id),
            numbers: Some(numbers.clone()),
            limit: i64::try_from(IDS_MAX).unwrap_or(i64::MAX),
            ..Query::default()
        };
        for JobWithTasks { job, .. } in rows::list(app.db(), &query).await? {
            scope.require_ownership::<CancelManagedJobs>(
                Some(job.user_id),
                &format!("managed job {}", job.number),
            )?;
        }
    }
    let own = requested.all || requested.name.is_some() || !manages;
    let query = Query {
        project: Some(scope.project.id),
        user: own.then_some(user.id),
        name: requested.name,
        numbers: requested.job_ids,
        ..Query::default()
    };
    let graceful = (requested.graceful || requested.graceful_timeout.is_some())
        .then(|| requested.graceful_timeout.map_or(GRACEFUL_DEFAULT, Span::secs));
    let unit = Unit::new().and([rows::request_cancel(&query, user.id, graceful)]);
    let WriteOutcome::Done { rows: answers, .. } = app.db().write(unit).await? else {
        return Ok(wire::CancelResponse { job_ids: Vec::new() });
    };
    app.wake(&[Hint::ManagedJobs]);
    let mut numbers = Vec::new();
    let mut notes = Unit::new();
    for row in answers.iter().flatten() {
        let (id, name): (ManagedJobId, String) = (row.id(0)?, row.text(2)?);
        numbers.push(row.int(1)?);
        let about = EventSubject {
            entity: Entity::ManagedJob,
            id: id.0,
            name: &name,
            project: Some(scope.project.id),
        };
        let message = "Managed job cancel requested".to_owned();
        notes = notes.and(note(app.db(), Some(user.id), &about, "cancel_asked", message)?);
    }
    app.db().write(notes).await?;
    numbers.sort_unstable();
    Ok(wire::CancelResponse { job_ids: numbers })
}
