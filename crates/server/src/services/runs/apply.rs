//! Applying a plan: a new run, or a changed one.

use serde_json::Value;
use sha2::{Digest as _, Sha256};
use windlass_api::{operations::ApplyRun, runs as wire};
use windlass_model::{
    config::Configuration,
    event::Entity,
    id::RunId,
    plan::diff::{self, UpdateMode},
    time::Timestamp,
};

use super::{ResolvedRunSpec, check_images, submit, to_wire_one};
use crate::{
    app::App,
    auth::ProjectScope,
    db::{
        Unit, WriteOutcome,
        documents::RUN_SPEC,
        gateways, jobs,
        runs::{self, NamedRun, Run},
    },
    error::{Error, Result},
    events::{EventSubject, actor, note},
    hints::Hint,
    services::{names, service_domains, stored_document},
};

/// Number of generated names that may be in use before that is an error.
const NAME_ATTEMPTS_MAX: u8 = 10;
/// Field of a service.
const GATEWAY: &str = "configuration.gateway";

pub async fn apply(app: &App, scope: &ProjectScope, requested: wire::ApplyRequest) -> Result<wire::Run> {
    let hash = request_hash(&requested);
    if let Some(done) = find_repeated(app, scope, &hash).await? {
        return to_wire_one(app, done).await;
    }
    let refused = match try_apply(app, scope, &requested, &hash).await {
        Err(refused @ (Error::Refused { .. } | Error::Conflict { .. })) => refused,
        outcome => return outcome,
    };
    // A retry while the first attempt is still in progress finds the run of that attempt: its name is in use, or it is
    // already active. That is no reason to reject it.
    match find_repeated(app, scope, &hash).await? {
        Some(done) => to_wire_one(app, done).await,
        None => Err(refused),
    }
}

async fn try_apply(
    app: &App,
    scope: &ProjectScope,
    requested: &wire::ApplyRequest,
    hash: &str,
) -> Result<wire::Run> {
    let ssh_key = scope.caller.user.ssh_public_key.as_deref();
    let mut spec = ResolvedRunSpec::read(&requested.plan.run_spec, ssh_key, &scope.default_images(app))?;
    spec.seal(app, scope).await?;
    if let Some(name) = spec.name() {
        names::check_resource("run_name", name)?;
    }
    spec.check_references(app, scope).await?;
    check_images(app, scope, &mut spec).await?;
    let current = match spec.name() {
        Some(name) => runs::find_by_name(app.db(), scope.project.id, name).await?,
        None => None,
    };
    if let Some(NamedRun { run, .. }) = &current {
        // A finished run of that name would be hidden, which also requires ownership.
        let what = format!("run `{}` already exists; it", run.name);
        scope.require_ownership::<ApplyRun>(Some(run.user_id), &what)?;
    }
    let id = match current {
        Some(current) if !current.run.finished => {
            let id = update(app, scope, &spec, requested, &current).await?;
            app.wake(&[Hint::Runs, Hint::JobsSubmitted, Hint::JobsRunning, Hint::Routes]);
            id
        }
        finished => {
            // A schedule, or a service at zero replicas, is handled by the run's pipeline; everything else begins with
            // the jobs.
            let is_service = matches!(spec.shape.configuration(), Configuration::Service(_));
            let hints: &[_] = match is_service || spec.shape.crons().is_some() {
                true => &[Hint::Runs, Hint::JobsSubmitted, Hint::Routes],
                false => &[Hint::JobsSubmitted],
            };
            let id = create(app, scope, spec, finished.as_ref(), hash).await?;
            app.wake(hints);
            id
        }
    };
    let run = runs::find(app.db(), id).await?.ok_or_else(|| Error::absent("Run"))?;
    to_wire_one(app, run).await
}

/// Hash of the request, for distinguishing a repeat from another request with the same key.
fn request_hash(requested: &wire::ApplyRequest) -> String {
    let mut hash = Sha256::new();
    hash.update(requested.plan.run_spec.text());
    hash.update([u8::from(requested.force)]);
    hex::encode(hash.finalize())
}

/// Run that the same request created before.
async fn find_repeated(app: &App, scope: &ProjectScope, hash: &str) -> Result<Option<NamedRun>> {
    let Some(key) = &scope.idempotency_key else { return Ok(None) };
    let found = runs::find_by_key(app.db(), scope.project.id, scope.caller.user.id, key).await?;
    match found {
        Some(found) if found.run.idempotency_hash.as_deref() == Some(hash) => Ok(Some(found)),
        Some(_) => {
            Err(Error::Conflict { msg: "this `Idempotency-Key` was already used for another request" })
        }
        None => Ok(None),
    }
}

/// Updates an active run of that name: in place, or not at all.
async fn update(
    app: &App,
    scope: &ProjectScope,
    spec: &ResolvedRunSpec,
    requested: &wire::ApplyRequest,
    current: &NamedRun,
) -> Result<RunId> {
    let changed =
        || Error::refused("Failed to apply plan. Resource has been changed. Try again or use force apply.");
    let stored: Value = RUN_SPEC.decode(current.run.id, &current.run.spec)?;
    if !requested.force {
        let seen = requested.plan.current_resource.as_ref().ok_or_else(changed)?;
        if seen.id != current.run.id.0 || seen.run_spec.value()? != stored {
            return Err(changed());
        }
    }
    let changes = diff::diff_run_spec(&stored, &spec.value)
        .map_err(|why| Error::refused(format!("Cannot override active run {}: {why}", current.run.name)))?;
    if changes.is_empty() {
        return Ok(current.run.id);
    }
    // The run still belongs to its creator, who has access to it, so the rights of the creator count.
    spec.check_secrets(app, current.run.project_id, current.run.user_id).await?;
    let rolls = changes.iter().any(|change| change.mode == UpdateMode::Rolling);
    let run = &current.run;
    let paths: Vec<&str> = changes.iter().map(|change| change.path.as_str()).collect();
    let by = scope.caller.user.id;
    let about =
        EventSubject { entity: Entity::Run, id: run.id.0, name: &run.name, project: Some(run.project_id) };
    let change = runs::update_spec(run.id, &run.spec, &spec.value.to_string(), spec.rank(), rolls);
    let waiting = jobs::set_priority(run.id, spec.rank());
    let unit = Unit::new().keep_deployment(run.id).and([change, waiting]).record_deployment(run.id, Some(by));
    let unit = unit.and(note(
        app.db(),
        Some(by),
        &about,
        "updated",
        format!("Run updated. Changed fields: {}", paths.join(", ")),
    )?);
    let unit = if paths.contains(&GATEWAY) { move_service(app, scope, spec, run, unit).await? } else { unit };
    match app.db().write(unit).await {
        Ok(WriteOutcome::Done { .. }) => Ok(run.id),
        Ok(WriteOutcome::Stale { .. }) => Err(changed()),
        Err(error) if error.is_conflict_on("service_domains_domain_key") => Err(changed()),
        Err(error) => Err(error.into()),
    }
}

/// Applies the specification of an earlier deployment of a service as a new deployment.
pub(crate) async fn redeploy(app: &App, scope: &ProjectScope, name: &str, num: i64) -> Result<()> {
    let current = runs::find_by_name(app.db(), scope.project.id, name).await?;
    let current = current.filter(|current| !current.run.finished).ok_or_else(|| Error::absent("Run"))?;
    scope.require_ownership::<ApplyRun>(Some(current.run.user_id), &format!("run `{name}`"))?;
    let stored = runs::deployments(app.db(), current.run.id).await?.into_iter().find(|one| one.num == num);
    let stored = stored.ok_or_else(|| Error::absent("Deployment"))?;
    let seen = wire::ExpectedRun {
        id: current.run.id.0,
        run_spec: stored_document(RUN_SPEC, current.run.id, current.run.spec)?,
    };
    let run_spec = stored_document(RUN_SPEC, current.run.id, stored.spec)?;
    let plan = wire::ApplyInput { run_spec, current_resource: Some(seen) };
    apply(app, scope, wire::ApplyRequest { plan, force: false }).await.map(drop)
}

/// Moves the service to another gateway, or to none.
async fn move_service(
    app: &App,
    scope: &ProjectScope,
    spec: &ResolvedRunSpec,
    run: &Run,
    unit: Unit,
) -> Result<Unit> {
    let at = service_domains::for_service(app, run.project_id, spec, &run.name, Some(run.id)).await?;
    let service =
        spec.service(&scope.project.name, &run.name, at.as_ref()).map(|service| service.to_string());
    let gateway = at.as_ref().map(|at| at.gateway);
    let unit =
        unit.and([runs::set_service(run.id, service.as_deref(), gateway), gateways::release_domains(run.id)]);
    Ok(match &at {
        Some(at) => unit.and(gateways::claim_domain(&at.domain, run.id)),
        None => unit,
    })
}

/// Creates a run; a finished one of that name is hidden in the same unit.
async fn create(
    app: &App,
    scope: &ProjectScope,
    mut spec: ResolvedRunSpec,
    finished: Option<&NamedRun>,
    hash: &str,
) -> Result<RunId> {
    let generated = spec.name().is_none();
    for attempt in 0..NAME_ATTEMPTS_MAX {
        if generated {
            spec.set_name(&names::generate(attempt)?);
        }
        let (id, mut unit) = new_run(app, scope, &spec, hash).await?;
        if let Some(NamedRun { run, .. }) = finished {
            let mut first = Unit::new().and([runs::delete(run.id)]);
            first.changes.append(&mut unit.changes);
            unit = first;
        }
        match app.db().write(unit).await {
            Ok(WriteOutcome::Done { .. }) => return Ok(id),
            // The finished run was hidden by another request, which is about to use its name.
            Ok(WriteOutcome::Stale { .. }) => return Err(Error::exists("Run")),
            Err(error) if error.is_conflict_on("runs_name_key") && generated => {}
            Err(error)
                if error.is_conflict_on("runs_name_key") || error.is_conflict_on("runs_idempotency_key") =>
            {
                return Err(Error::exists("Run"));
            }
            Err(error) if error.is_conflict_on("service_domains_domain_key") => {
                let name = spec.name().unwrap_or_default();
                return Err(
                    match service_domains::for_service(app, scope.project.id, &spec, name, None).await {
                        Err(taken) => taken,
                        // The name was in use a moment ago and is free again.
                        Ok(_) => Error::exists("Run"),
                    },
                );
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(Error::refused("no free name was found; set the `name` of the run"))
}

async fn new_run(
    app: &App,
    scope: &ProjectScope,
    spec: &ResolvedRunSpec,
    hash: &str,
) -> Result<(RunId, Unit)> {
    let by = scope.caller.user.id;
    let key = scope.idempotency_key.clone();
    let published =
        service_domains::for_service(app, scope.project.id, spec, spec.name().unwrap_or_default(), None)
            .await?;
    let requested = submit::RunRequest {
        project: scope.project.id,
        project_name: &scope.project.name,
        user: by,
        actor: actor(Some(by)),
        idempotency_hash: key.as_ref().map(|_| hash.to_owned()),
        idempotency_key: key,
        managed_job: None,
        places: None,
        published,
        history: submit::PreemptionHistory::default(),
        jobs_max: app.settings().limits.run_jobs,
    };
    submit::unit(app.db(), app.keys(), requested, spec, next_slot(app, spec).await?)
}

/// First slot of a scheduled run.
async fn next_slot(app: &App, spec: &ResolvedRunSpec) -> Result<Option<Timestamp>> {
    let Some(crons) = spec.shape.crons() else { return Ok(None) };
    let now = app.db().now().await?;
    crons.next_after(now).map(Some).ok_or_else(|| Error::refused("the schedule has no future start"))
}
