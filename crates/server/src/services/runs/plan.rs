//! What applying would do.

use windlass_api::{Document, runs as wire};
use windlass_model::plan::diff;

use super::{Spec, one};
use crate::{app::App, auth::Scope, db::runs, error::Result};

pub async fn plan(app: &App, scope: &Scope, asked: wire::PlanRequest) -> Result<wire::RunPlan> {
    let user = &scope.caller.user;
    let spec = Spec::read(&asked.run_spec, user.ssh_public_key.as_deref())?;
    if let Some(name) = spec.name() {
        crate::services::names::resource("run_name", name)?;
    }
    spec.check_references(app, scope).await?;
    let found = match spec.name() {
        Some(name) if !asked.for_offers_only => runs::find_by_name(app.db(), scope.project.id, name).await?,
        Some(_) | None => None,
    };
    let mut action = wire::ApplyAction::Create;
    let mut current = None;
    if let Some(found) = found {
        let stored = serde_json::from_str(&found.run.spec)?;
        if !found.run.finished && diff::run_spec(&stored, &spec.value).is_ok() {
            action = wire::ApplyAction::Update;
        }
        current = Some(one(app, found).await?);
    }
    let jobs = spec.plan()?;
    let job_plans = jobs
        .iter()
        .map(|job| {
            Ok(wire::JobPlan {
                job_spec: Document::new(job)?,
                offers: Vec::new(),
                total_offers: 0,
                max_price: None,
            })
        })
        .collect::<Result<_>>()?;
    Ok(wire::RunPlan {
        project_name: scope.project.name.clone(),
        user: user.name.clone(),
        run_spec: asked.run_spec,
        effective_run_spec: Some(Document::new(&spec.value)?),
        job_plans,
        current_resource: current,
        action,
    })
}
