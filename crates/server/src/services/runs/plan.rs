//! Plan: the effects of applying a configuration.

use windlass_api::{Document, explanations::QueueTurn, runs as wire};
use windlass_model::{config::job_spec::JobSpec, plan::diff};

use super::{ResolvedRunSpec, check_images, to_wire_one};
use crate::{
    app::App,
    auth::ProjectScope,
    db::{documents::RUN_SPEC, runs},
    error::Result,
    services::{explanations::planned_turn, offers},
};

/// Default and maximum number of offers in one response.
const OFFERS_DEFAULT: usize = 50;
const OFFERS_MAX: usize = 1000;

pub async fn plan(app: &App, scope: &ProjectScope, requested: wire::PlanRequest) -> Result<wire::RunPlan> {
    let user = &scope.caller.user;
    let mut spec = ResolvedRunSpec::read(
        &requested.run_spec,
        user.ssh_public_key.as_deref(),
        &scope.default_images(app),
    )?;
    spec.seal(app, scope).await?;
    if let Some(name) = spec.name() {
        crate::services::names::check_resource("run_name", name)?;
    }
    spec.check_references(app, scope).await?;
    let images =
        if requested.for_offers_only { Vec::new() } else { check_images(app, scope, &mut spec).await? };
    let found = match spec.name() {
        Some(name) if !requested.for_offers_only => {
            runs::find_by_name(app.db(), scope.project.id, name).await?
        }
        Some(_) | None => None,
    };
    let mut action = wire::ApplyAction::Create;
    let mut current = None;
    if let Some(found) = found {
        let stored = RUN_SPEC.decode(found.run.id, &found.run.spec)?;
        if !found.run.finished && diff::diff_run_spec(&stored, &spec.value).is_ok() {
            action = wire::ApplyAction::Update;
        }
        current = Some(to_wire_one(app, found).await?);
    }
    let supply = offers::load_supply(app, scope.project.id).await?;
    let shown_max = requested
        .max_offers
        .and_then(|max| usize::try_from(max).ok())
        .unwrap_or(OFFERS_DEFAULT)
        .min(OFFERS_MAX);
    let jobs = spec.plan()?;
    let job_plans = jobs
        .iter()
        .map(|job| {
            let mut offers = offers::for_job(&supply, &spec.shape, job);
            // Nodes of one replica start together or not at all.
            let together: Vec<_> = jobs.iter().filter(|other| other.replica_num == job.replica_num).collect();
            let planned = offers::planned_replica(&supply, scope.caller.user.id, &spec.shape, &together);
            let why = offers::wait_reasons(&supply, planned);
            let why = why.map(|why| Document::new(&*why)).transpose()?;
            let misfits = offers::rejected_offers(&supply, &spec.shape, job);
            let misfits = (!misfits.refusals.is_empty()).then(|| Document::new(&misfits)).transpose()?;
            let total_offers = i64::try_from(offers.len()).unwrap_or(i64::MAX);
            let max_price = offers.iter().map(|offer| offer.price).reduce(f64::max);
            if requested.reverse_offers {
                offers.reverse();
            }
            offers.truncate(shown_max);
            Ok(wire::JobPlan {
                job_spec: Document::new(job)?,
                offers,
                total_offers,
                max_price,
                why,
                misfits,
                runs_in: offers::runs_in(&supply, &spec.shape, job),
            })
        })
        .collect::<Result<Vec<wire::JobPlan>>>()?;
    let waits = job_plans.iter().any(|plan| plan.why.is_some()) && action == wire::ApplyAction::Create;
    let turn = match waits && !requested.for_offers_only {
        true => first_turn(app, scope, &supply, &spec, &jobs).await?,
        false => None,
    };
    Ok(wire::RunPlan {
        project_name: scope.project.name.clone(),
        user: user.name.clone(),
        run_spec: without_password(requested.run_spec, &spec)?,
        effective_run_spec: Some(Document::new(&spec.value)?),
        job_plans,
        images,
        current_resource: current,
        action,
        turn,
    })
}

/// Place that the first replica would have in the queue.
async fn first_turn(
    app: &App,
    scope: &ProjectScope,
    supply: &offers::OfferSupply,
    spec: &ResolvedRunSpec,
    jobs: &[JobSpec],
) -> Result<Option<QueueTurn>> {
    let first: Vec<&JobSpec> = jobs.iter().filter(|job| job.replica_num == 0).collect();
    if first.is_empty() {
        return Ok(None);
    }
    let planned = offers::planned_replica(supply, scope.caller.user.id, &spec.shape, &first);
    planned_turn(app, &scope.caller, planned).await
}

/// The sent spec, without the password of a registry. Clients apply what they receive here.
fn without_password(sent: Document, spec: &ResolvedRunSpec) -> Result<Document> {
    const PASSWORD: &str = "/configuration/registry_auth/password";
    let Some(sealed) = spec.value.pointer(PASSWORD) else { return Ok(sent) };
    let mut value = sent.value()?;
    match value.pointer_mut(PASSWORD) {
        Some(password) if password != sealed => *password = sealed.clone(),
        Some(_) | None => return Ok(sent),
    }
    Ok(Document::new(&value)?)
}
