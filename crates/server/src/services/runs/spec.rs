//! A run spec that a client sent, parsed and completed.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use windlass_api::{Document, error::ApiErrorCode, projects::ProjectRole};
use windlass_model::{
    config::{
        Configuration,
        effective::effective_run_spec,
        error::Diagnosis,
        job_spec::JobSpec,
        job_spec_builder::DefaultImages,
        name::ResourceReference,
        references,
        run::RunClass,
        unsupported::{self, ImportedResources, SupportReview},
    },
    id::{ProjectId, UserId},
    plan::preemption::Preemptibility,
    resources::CpuArch,
};

use crate::{
    app::App,
    auth::ProjectScope,
    db::{fleets, repos},
    error::{Error, Result},
    parsed_run_spec::{ParsedRunSpec, RunSpecError, read_part},
    registry_passwords,
    services::{budgets, exports, quotas, secrets, service_domains::GatewayPublication, volumes},
};

/// Name of a job in a plan for a run without a name.
const UNNAMED_JOB: &str = "dry-run";
const ARCHIVES_MAX: usize = 100;
/// Field of a run specification with the server's default images.
const DEFAULT_IMAGES: &str = "default_images";
/// Field of a run specification with the architectures of its images that have only one.
const IMAGE_ARCHITECTURES: &str = "image_architectures";

/// A run spec with the server's defaults, and its parsed form.
#[derive(Debug)]
pub(crate) struct ResolvedRunSpec {
    /// Effective spec, as it is stored and shown.
    pub(crate) value: Value,
    pub(crate) shape: ParsedRunSpec,
}

impl ResolvedRunSpec {
    /// Parses a spec. `ssh_key` is the caller's public key, `images` the server's setting: a run keeps the default
    /// images with which it was submitted.
    pub(crate) fn read(sent: &Document, ssh_key: Option<&str>, images: &DefaultImages) -> Result<Self> {
        let sent = sent.value()?;
        let missing = || Error::field("run_spec", "must be an object with a `configuration`");
        let configuration = Configuration::from_json(sent.get("configuration").ok_or_else(missing)?)
            .map_err(|problems| problems_error(&problems))?;
        let mut value = effective_run_spec(&sent);
        let spec = value.as_object_mut().ok_or_else(missing)?;
        if is_unset(spec.get("ssh_key_pub")) {
            spec.insert("ssh_key_pub".into(), json!(ssh_key));
        }
        if is_unset(spec.get("run_name")) {
            spec.insert("run_name".into(), json!(configuration.name()));
        }
        spec.remove(DEFAULT_IMAGES);
        spec.remove(IMAGE_ARCHITECTURES);
        if *images != DefaultImages::default() {
            spec.insert(DEFAULT_IMAGES.into(), json!(images));
        }
        check_archives(spec.get("file_archives"))?;
        let name = spec.get("run_name").and_then(Value::as_str).unwrap_or(UNNAMED_JOB).to_owned();
        let shape = ParsedRunSpec::read(&name, &value).map_err(spec_error)?;
        Ok(Self { value, shape })
    }

    /// Seals a registry's password, before any part of the spec is stored or shown.
    pub(crate) async fn seal(&mut self, app: &App, scope: &ProjectScope) -> Result<()> {
        let (project, user) = (scope.project.id, scope.caller.user.id);
        if registry_passwords::seal_document(app, project, user, &mut self.value["configuration"]).await? {
            let name = self.name().unwrap_or(UNNAMED_JOB).to_owned();
            self.shape = ParsedRunSpec::read(&name, &self.value).map_err(spec_error)?;
        }
        Ok(())
    }

    /// Stores the architectures of images, which restrict the choice of instances.
    pub(crate) fn set_image_architectures(&mut self, known: &BTreeMap<String, Vec<CpuArch>>) -> Result<()> {
        if known.is_empty() {
            return Ok(());
        }
        self.value[IMAGE_ARCHITECTURES] = json!(known);
        let name = self.name().unwrap_or(UNNAMED_JOB).to_owned();
        self.shape = ParsedRunSpec::read(&name, &self.value).map_err(spec_error)?;
        Ok(())
    }

    pub(crate) fn image_architectures(&self) -> Result<BTreeMap<String, Vec<CpuArch>>> {
        read_part(&self.value, IMAGE_ARCHITECTURES).map_err(spec_error)
    }

    pub(crate) fn name(&self) -> Option<&str> {
        self.value["run_name"].as_str()
    }

    pub(crate) fn set_name(&mut self, name: &str) {
        self.value["run_name"] = json!(name);
        self.shape.set_name(name);
    }

    pub(crate) fn repo_id(&self) -> Option<&str> {
        self.value["repo_id"].as_str()
    }

    /// See `QueueRank`.
    pub(crate) fn rank(&self) -> i64 {
        self.shape.rank().to_stored()
    }

    /// Returns whether the scheduler may end its jobs.
    pub(crate) fn preemptibility(&self, is_managed: bool) -> Preemptibility {
        self.shape.preemptibility(is_managed)
    }

    /// Jobs with which a run starts.
    pub(crate) fn jobs(&self) -> Result<Vec<JobSpec>> {
        self.shape.jobs().map_err(spec_error)
    }

    /// Jobs of one replica of each group.
    pub(crate) fn plan(&self) -> Result<Vec<JobSpec>> {
        self.shape.plan().map_err(spec_error)
    }

    /// URL of a service: at its gateway, or through the server.
    pub(crate) fn service(&self, project: &str, run: &str, at: Option<&GatewayPublication>) -> Option<Value> {
        let Configuration::Service(_) = self.shape.configuration() else { return None };
        let model = &self.value["configuration"]["model"];
        let models = at.map_or("/proxy/models", |at| at.models.as_str());
        let model = model["name"]
            .as_str()
            .or_else(|| model.as_str())
            .map(|name| json!({ "name": name, "base_url": format!("{models}/{project}"), "type": "chat" }));
        let url = at.map_or_else(|| format!("/proxy/services/{project}/{run}/"), |at| at.url.clone());
        Some(json!({ "url": url, "model": model, "options": {} }))
    }

    /// Unsupported parts of the spec, including its profile.
    fn review(&self, project: &str, imports: Option<&ImportedResources>) -> SupportReview {
        let properties = Some(self.shape.properties());
        let context = unsupported::ReviewContext { project: Some(project), properties, node: None, imports };
        unsupported::review(self.shape.configuration(), context)
    }

    /// Checks that runs of this user may use the secrets that the spec names.
    pub(crate) async fn check_secrets(&self, app: &App, project: ProjectId, user: UserId) -> Result<()> {
        secrets::check_use(app, project, user, &secret_names(&self.plan()?)).await
    }

    /// Rejects a run if none of the fleets that it names exists. One that names several uses those that exist.
    async fn check_fleets(&self, app: &App, scope: &ProjectScope) -> Result<()> {
        let Some(named) = self.shape.fleet_names().filter(|named| !named.is_empty()) else { return Ok(()) };
        let known = fleets::usable_names(app.db(), scope.project.id).await?;
        let is_known = |reference: &ResourceReference| {
            known.iter().any(|(owner, name)| {
                *name == reference.name && reference.project.as_ref().is_none_or(|project| project == owner)
            })
        };
        if named.iter().any(is_known) {
            return Ok(());
        }
        let project = &scope.project.name;
        let quoted = |names: &[String]| format!("`{}`", names.join("`, `"));
        let missing: Vec<String> = named.iter().map(ToString::to_string).collect();
        let known: Vec<String> = known
            .into_iter()
            .map(|(owner, name)| if owner == *project { name } else { format!("{owner}/{name}") })
            .collect();
        let hint = match known.is_empty() {
            true => "the project has no fleet: create one with `windlass apply -f FLEET.yml`".to_owned(),
            false => format!("use one of {}, or remove `fleets` to use any", quoted(&known)),
        };
        let noun = if missing.len() == 1 { "fleet" } else { "fleets" };
        Err(Error::refused(format!("project `{project}` has no {noun} {}; hint: {hint}", quoted(&missing))))
    }

    /// Rejects a run if the server has none of the backends that it names.
    fn check_backends(&self, app: &App) -> Result<()> {
        let Some(named) = &self.shape.properties().provisioning.backends else { return Ok(()) };
        let has = |name: &&str| app.missing_backend([*name]).is_none();
        let names: Vec<&str> = named.iter().map(|backend| backend.as_str()).collect();
        if names.is_empty() || names.iter().any(has) {
            return Ok(());
        }
        let other = "name one of these in `backends`, or remove `backends` to allow all";
        app.missing_backend(names).map_or(Ok(()), |missing| Err(missing.refusal(Some(other))))
    }

    /// Checks that everything to which the spec refers exists and belongs to the caller or the project.
    pub(crate) async fn check_references(&self, app: &App, scope: &ProjectScope) -> Result<()> {
        let mut review = self.review(&scope.project.name, None);
        if !review.refusals.is_empty() {
            // It may name something of another project, which is rare.
            let imports = exports::imported_resources(app, scope.project.id).await?;
            review = self.review(&scope.project.name, Some(&imports));
        }
        check_supported(&review)?;
        self.check_fleets(app, scope).await?;
        self.check_backends(app)?;
        let kind = self.value["repo_data"]["repo_type"].as_str().unwrap_or("virtual");
        if kind != "virtual" {
            let id = self.repo_id().unwrap_or_default();
            if repos::find(app.db(), scope.project.id, id).await?.is_none() {
                let code = ApiErrorCode::RepoDoesNotExist;
                return Err(Error::Refused { code, msg: format!("Repo {id} does not exist") });
            }
        }
        let ids: Vec<uuid::Uuid> = self.shape.file_archives().iter().map(|archive| archive.id).collect();
        if !repos::owns_archives(app.db(), scope.caller.user.id, &ids).await? {
            return Err(Error::absent("File archive"));
        }
        let jobs = self.plan()?;
        check_variables(&jobs)?;
        secrets::check_use(app, scope.project.id, scope.caller.user.id, &secret_names(&jobs)).await?;
        check_class(scope, self.shape.rank().class)?;
        check_preemptible(&self.shape)?;
        let owner = (scope.project.id, scope.caller.user.id);
        quotas::check_jobs(app, owner, &self.shape, &jobs).await?;
        budgets::check_jobs(app, scope.project.id, scope.caller.user.id, &jobs).await?;
        volumes::check_mounts(app, scope.project.id, &jobs).await
    }
}

/// Rejects a service that may be preempted and would fail with the first replica.
fn check_preemptible(shape: &ParsedRunSpec) -> Result<()> {
    let is_service = matches!(shape.configuration(), Configuration::Service(_));
    let is_requested = shape.configuration().run().and_then(|run| run.preemptible) == Some(true);
    if is_service && is_requested && shape.preemptibility(false) == Preemptibility::Never {
        return Err(Error::refused(
            "a service with `preemptible: true` would fail with the first replica that is preempted; hint: add \
             `retry: {on_events: [interruption]}`",
        ));
    }
    Ok(())
}

/// Rejects `class: urgent` for those who may not get ahead of other projects.
fn check_class(scope: &ProjectScope, class: RunClass) -> Result<()> {
    if class == RunClass::Urgent && scope.role() < Some(ProjectRole::Manager) {
        return Err(Error::refused(
            "only managers of the project may run in class `urgent`; hint: omit `class`, or have a manager apply the run",
        ));
    }
    Ok(())
}

/// Secrets that the jobs of this specification name.
fn secret_names(jobs: &[JobSpec]) -> BTreeSet<String> {
    jobs.iter().flat_map(references::secret_names).collect()
}

/// Rejects variables that no program can have, now instead of on a host.
fn check_variables(jobs: &[JobSpec]) -> Result<()> {
    for (name, value) in jobs.iter().flat_map(|job| &job.env) {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(Error::refused(format!(
                "invalid environment variable name `{}`",
                name.escape_debug()
            )));
        }
        if value.contains('\0') {
            return Err(Error::refused(format!(
                "the value of environment variable `{name}` contains a NUL byte"
            )));
        }
    }
    Ok(())
}

fn is_unset(value: Option<&Value>) -> bool {
    value.is_none_or(Value::is_null)
}

fn check_archives(sent: Option<&Value>) -> Result<()> {
    let wrong = || Error::field("file_archives", "must be a list of archives with `id` and `path`");
    let Some(list) = sent.filter(|sent| !sent.is_null()) else { return Ok(()) };
    let list = list.as_array().filter(|list| list.len() <= ARCHIVES_MAX).ok_or_else(wrong)?;
    for archive in list {
        let id = archive["id"].as_str().and_then(|id| id.parse::<uuid::Uuid>().ok());
        if id.is_none() || !archive["path"].is_string() {
            return Err(wrong());
        }
    }
    Ok(())
}

fn spec_error(error: RunSpecError) -> Error {
    match error {
        RunSpecError::Specification(problems) => problems_error(&problems),
        RunSpecError::Stored(error) => error.into(),
        RunSpecError::Document(_)
        | RunSpecError::NotARun { .. }
        | RunSpecError::Derive(_)
        | RunSpecError::Cron(_)
        | RunSpecError::NoSuchJob { .. } => Error::refused(error.to_string()),
    }
}

/// Rejects unsupported parts, with a hint; clients report those that have no effect.
pub(crate) fn check_supported(review: &SupportReview) -> Result<()> {
    let reported: Vec<String> = review
        .refusals
        .iter()
        .map(|one| match &one.hint {
            Some(hint) => format!("{one}; hint: {hint}"),
            None => one.to_string(),
        })
        .collect();
    if reported.is_empty() { Ok(()) } else { Err(Error::refused(reported.join("; "))) }
}

/// All problems in one message: clients show exactly one.
pub(crate) fn problems_error(problems: &[Diagnosis]) -> Error {
    let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
    Error::refused(format!("invalid configuration: {}", all.join("; ")))
}
