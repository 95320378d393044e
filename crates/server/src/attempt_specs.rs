//! Conversion of a managed job's task to the specification of the run that is one attempt of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::json;
use uuid::Uuid;
use windlass_api::Document;
use windlass_backend::Backends;
use windlass_model::{
    backend_kind::BackendKind,
    config::{
        job_spec_builder::DefaultImages,
        mounts::{RepoSpec, repository_name},
    },
    deadline_policy::Market,
    id::{InstanceId, ProjectId},
    managed_job::{
        plan::{ManagedJobPlan, run_priority},
        record::NodeLocation,
    },
    plan::offers::Location,
    skypilot::{AttemptRunSpec, JobIdentity, ServerContext},
};

use crate::{
    db::{Db, DbError, Page, documents::RUN_PLACES, fleets, runs::Run},
    services::{repos, runs::ResolvedRunSpec},
};

/// Inputs that all attempts of a job share.
pub(crate) struct AttemptSpecBuilder<'a> {
    pub(crate) id: Uuid,
    pub(crate) plan: &'a ManagedJobPlan,
    pub(crate) files: &'a TaskArchives,
    pub(crate) identity: JobIdentity,
    pub(crate) priority: i64,
    pub(crate) ssh_key: Option<&'a str>,
    pub(crate) site: ServerContext,
    pub(crate) images: &'a DefaultImages,
}

/// Locations where the attempts of a job may run. The names of fleets are read only if the plan names a location.
///
/// If no backend rents instances, no node is ever reclaimed: a request for spot nodes gets the others.
pub(crate) async fn allowed_infra(
    db: &Db,
    backends: &Backends,
    project: ProjectId,
    plan: &ManagedJobPlan,
) -> Result<ServerContext, DbError> {
    let has_infra = plan.tasks.iter().flat_map(|task| &task.candidates).any(|one| one.infra.is_some());
    infra_of(db, backends, project, has_infra).await
}

/// Locations where the project may run something. `with_fleets`: reads the names of its fleets.
pub(crate) async fn infra_of(
    db: &Db,
    backends: &Backends,
    project: ProjectId,
    with_fleets: bool,
) -> Result<ServerContext, DbError> {
    let rented = backends.all().map(|backend| backend.name());
    let rented = rented.filter(|name| BackendKind::of(name).is_rented());
    let rented: Vec<String> = rented.map(str::to_owned).collect();
    let fleets = if with_fleets {
        let page = Page { limit: i64::from(i32::MAX), ..Page::default() };
        let projects = Some(vec![project]);
        let query = fleets::Query { projects, include_imported: true, only_active: true, page };
        fleets::list(db, &query).await?.into_iter().map(|fleet| fleet.name).collect()
    } else {
        Vec::new()
    };
    Ok(ServerContext { has_no_spot: rented.is_empty(), backends: rented, fleets, ..ServerContext::default() })
}

/// One attempt of one task.
pub(crate) struct Attempt {
    pub(crate) task: u32,
    pub(crate) number: u32,
    pub(crate) candidate: u32,
    pub(crate) market: Option<Market>,
}

/// Reason why an attempt cannot be created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttemptSpecError {
    #[error(transparent)]
    Task(#[from] windlass_model::skypilot::Error),
    #[error("failed to encode the run specification")]
    Document(#[from] serde_json::Error),
    #[error(transparent)]
    Run(#[from] crate::error::Error),
}

impl AttemptSpecBuilder<'_> {
    pub(crate) fn run_name(&self, task: u32, attempt: u32) -> String {
        self.plan.run_name(&self.id.to_string(), task, attempt)
    }

    pub(crate) fn spec(&self, attempt: &Attempt) -> Result<ResolvedRunSpec, AttemptSpecError> {
        let Attempt { task, number, candidate, market } = *attempt;
        let spot = market.map(|market| market == Market::Spot);
        let made = AttemptRunSpec::for_attempt(self.plan, task, candidate, spot, &self.identity, &self.site)?;
        let mut configuration = serde_json::to_value(&made.configuration)?;
        if configuration["priority"].is_null() {
            configuration["priority"] = run_priority(self.priority).into();
        }
        let mut spec = json!({
            "run_name": self.run_name(task, number),
            "configuration": configuration,
            "profile": { "name": "default" },
            "file_archives": self.files.of(task),
        });
        let repo = made.configuration.run().and_then(|run| run.repos.first());
        if let Some(RepoSpec { url: Some(url), branch, hash, .. }) = repo.map(|repo| &repo.0) {
            spec["repo_id"] = repos::remote_id(url).into();
            spec["repo_data"] = json!({
                "repo_type": "remote", "repo_name": repository_name(url), "repo_branch": branch, "repo_hash": hash,
            });
        }
        let mut spec = ResolvedRunSpec::read(&Document::new(&spec)?, self.ssh_key, self.images)?;
        spec.set_image_architectures(&self.plan.image_architectures)?;
        Ok(spec)
    }
}

/// An archive and the path of its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileArchive {
    pub(crate) id: Uuid,
    pub(crate) path: String,
}

/// Archives of each task, by the task's number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct TaskArchives(pub(crate) BTreeMap<u32, Vec<FileArchive>>);

impl TaskArchives {
    pub(crate) fn of(&self, task: u32) -> &[FileArchive] {
        self.0.get(&task).map(Vec::as_slice).unwrap_or_default()
    }

    pub(crate) fn ids(&self) -> Vec<Uuid> {
        self.0.values().flatten().map(|archive| archive.id).collect()
    }
}

/// Locations that an attempt avoids, and the one that it tries first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PlacementPreferences {
    pub(crate) avoid: Vec<NodeLocation>,
    pub(crate) prefer: Option<NodeLocation>,
}

impl PlacementPreferences {
    /// Preferences stored in a run; empty if there are none.
    pub(crate) fn of(run: &Run) -> Result<Self, DbError> {
        Ok(RUN_PLACES.decode_opt(run.id, run.places.as_deref())?.unwrap_or_default())
    }

    /// Instances to avoid, and regions or zones to avoid where instances are rented. Within the preferred location only
    /// instances are avoided.
    pub(crate) fn avoided(&self) -> (Vec<Location>, Vec<InstanceId>) {
        let instances = self.avoid.iter().filter_map(|one| one.instance.as_ref()?.parse().ok()).collect();
        let sought = self.sought();
        let places =
            self.avoid.iter().filter_map(rented_location).filter(|place| Some(place) != sought.as_ref());
        (places.collect(), instances)
    }

    /// Location that is required, where instances are rented. Instances that users own have no such location, and a
    /// lost one is not worth waiting for.
    pub(crate) fn sought(&self) -> Option<Location> {
        rented_location(self.prefer.as_ref()?)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.avoid.is_empty() && self.prefer.is_none()
    }
}

/// Location of rented instances.
fn rented_location(of: &NodeLocation) -> Option<Location> {
    let mut parts = of.place.splitn(3, '/').map(str::to_owned);
    let (backend, region) = (parts.next()?, parts.next()?);
    let rented = !BackendKind::of(&backend).has_permanent_instances();
    rented.then(|| Location { backend, region, zone: parts.next() })
}

#[cfg(test)]
mod tests {
    use windlass_model::managed_job::record::NodeLocation;

    use super::PlacementPreferences;

    fn at(place: &str) -> NodeLocation {
        NodeLocation { place: place.to_owned(), instance: None }
    }

    #[test]
    fn only_cloud_locations_are_avoided_or_preferred() {
        let placing = PlacementPreferences {
            avoid: vec![at("aws/us-east-1/us-east-1a"), at("remote/host-1"), at("gcp/europe")],
            prefer: Some(at("aws/us-west-2")),
        };
        let avoided: Vec<String> = placing.avoided().0.iter().map(ToString::to_string).collect();
        assert_eq!(avoided, ["aws/us-east-1/us-east-1a", "gcp/europe"]);
        assert_eq!(placing.sought().unwrap().to_string(), "aws/us-west-2");
        let nearby = PlacementPreferences { prefer: Some(at("gcp/europe")), ..placing };
        let avoided: Vec<String> = nearby.avoided().0.iter().map(ToString::to_string).collect();
        assert_eq!(avoided, ["aws/us-east-1/us-east-1a"]);
        let own = PlacementPreferences { avoid: vec![], prefer: Some(at("local/this")) };
        assert_eq!(own.sought(), None);
    }
}
