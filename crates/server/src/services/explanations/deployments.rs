//! Deployments of a service: what was applied, by whom, and when.

use windlass_api::explanations::{DeploymentList, DeploymentRequest, StoredDeployment};

use crate::{
    app::App,
    auth::ProjectScope,
    db::{documents::RUN_SPEC, runs as rows},
    error::{Error, Result},
    services::{configurations::configuration_text, runs},
};

pub(crate) async fn deployments(
    app: &App,
    scope: &ProjectScope,
    requested: DeploymentRequest,
) -> Result<DeploymentList> {
    let found = rows::find_by_name(app.db(), scope.project.id, &requested.run_name).await?;
    let found = found.ok_or_else(|| Error::absent("Run"))?;
    let (id, num) = (found.run.id, found.run.deployment_num);
    let mut stored = rows::deployments(app.db(), id).await?;
    if stored.iter().all(|one| one.num != num) {
        let current = rows::Deployment {
            num,
            at: found.run.submitted_at,
            user_name: Some(found.user_name.clone()),
            spec: found.run.spec.clone(),
        };
        stored.push(current);
        stored.sort_by_key(|one| std::cmp::Reverse(one.num));
    }
    let state = runs::render_newest(found, Vec::new())?.deployment;
    let word = state.as_ref().map_or("complete", |state| state.state.as_str()).to_owned();
    let rolled_back = state.as_ref().and_then(|state| state.rolled_back.as_ref());
    let deployment = |one: rows::Deployment| {
        let is_current = one.num == num;
        let failed = rolled_back.filter(|back| back.num == one.num);
        let (state, reason) = match (is_current, failed) {
            (true, _) => (word.clone(), state.as_ref().and_then(|state| state.message.clone())),
            (false, Some(failed)) => ("failed".to_owned(), Some(failed.message.clone())),
            (false, None) => ("superseded".to_owned(), None),
        };
        Ok(StoredDeployment {
            num: one.num,
            at: one.at,
            user: one.user_name,
            state,
            reason,
            text: configuration_text(
                &RUN_SPEC.decode(format_args!("{id}, deployment {}", one.num), &one.spec)?,
            ),
            current: is_current,
        })
    };
    let deployments = stored.into_iter().map(deployment).collect::<Result<_>>()?;
    Ok(DeploymentList { deployments, state })
}
