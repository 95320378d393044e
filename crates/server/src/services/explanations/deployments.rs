//! Deployments of a service. The server keeps the specification of the current one and of the last complete one.

use serde_json::Value;
use windlass_api::explanations::{DeploymentList, DeploymentRequest, StoredDeployment};

use crate::{
    app::App,
    auth::ProjectScope,
    db::runs as rows,
    error::{Error, Result},
    services::runs,
};

pub(crate) async fn deployments(
    app: &App,
    scope: &ProjectScope,
    requested: DeploymentRequest,
) -> Result<DeploymentList> {
    let found = rows::find_by_name(app.db(), scope.project.id, &requested.run_name).await?;
    let found = found.ok_or_else(|| Error::absent("Run"))?;
    let (spec, complete) = (found.run.spec.clone(), found.run.settled_spec.clone());
    let (num, at, user) = (found.run.deployment_num, found.run.submitted_at, found.user_name.clone());
    let state = runs::render_newest(found, Vec::new())?.deployment;
    let word = state.as_ref().map_or("complete", |state| state.state.as_str()).to_owned();
    let mut deployments = vec![StoredDeployment {
        num,
        at,
        user: Some(user.clone()),
        state: word,
        reason: state.as_ref().and_then(|state| state.message.clone()),
        text: configuration_text(&spec)?,
        current: true,
    }];
    if let Some(complete) = complete.filter(|complete| *complete != spec) {
        deployments.push(StoredDeployment {
            num: num.saturating_sub(1),
            at,
            user: Some(user),
            state: "superseded".to_owned(),
            reason: None,
            text: configuration_text(&complete)?,
            current: false,
        });
    }
    Ok(DeploymentList { deployments, state })
}

/// The configuration of a specification as text. JSON is YAML.
pub(crate) fn configuration_text(spec: &str) -> Result<String> {
    let spec: Value = serde_json::from_str(spec)?;
    Ok(serde_json::to_string_pretty(&spec["configuration"])?)
}
