//! Images of a run, checked at their registries before the run is placed.

use std::collections::BTreeMap;

use windlass_api::runs::ImageReport;
use windlass_model::{
    config::{job_spec::JobSpec, references},
    plan::execution_mode::{OFFERS_ONLY_IMAGE, PLAIN_PROCESS_IMAGE},
    resources::CpuArch,
};
use windlass_registry::Credentials;

use super::ResolvedRunSpec;
use crate::{
    app::App,
    auth::ProjectScope,
    db::secrets as secret_rows,
    error::{Error, Result},
    image_lookup::{ImageAnswer, ImageFacts},
    job_payload, sealed_passwords,
    services::secrets,
};

/// Start of a reference, whose value is not known yet.
const REFERENCE: &str = "${{";

/// Looks up the images of the run. A missing image, missing rights, and a job without commands whose image has none are
/// refused; architectures become part of the specification.
pub(crate) async fn check_images(
    app: &App,
    scope: &ProjectScope,
    spec: &mut ResolvedRunSpec,
) -> Result<Vec<ImageReport>> {
    if !app.images().is_enabled() {
        return Ok(Vec::new());
    }
    let jobs = spec.plan()?;
    let mut reports: Vec<ImageReport> = Vec::new();
    let mut architectures: BTreeMap<String, Vec<CpuArch>> = BTreeMap::new();
    for job in &jobs {
        let name = job.image_name.as_str();
        if ["", PLAIN_PROCESS_IMAGE, OFFERS_ONLY_IMAGE].contains(&name) || name.contains(REFERENCE) {
            continue;
        }
        if reports.iter().any(|report| report.name == name && has_command(report, job)) {
            continue;
        }
        let report = match open_credentials(app, scope, job).await? {
            CredentialState::Unknown { reason } => not_checked(name, reason),
            CredentialState::Known(credentials) => {
                match app.images().find(name, credentials.as_ref()).await {
                    None => continue,
                    Some(ImageAnswer::Refused { reason }) => return Err(Error::refused(reason)),
                    Some(ImageAnswer::NotChecked { reason }) => not_checked(name, reason),
                    Some(ImageAnswer::Found(facts)) => {
                        if !facts.architectures.is_empty() {
                            architectures.insert(name.to_owned(), facts.architectures.clone());
                        }
                        describe(name, &facts)
                    }
                }
            }
        };
        if !has_command(&report, job) {
            return Err(Error::refused(format!(
                "nothing to run: image {name} has neither an entry point nor a command; set `commands` or \
                 `entrypoint`"
            )));
        }
        reports.push(report);
    }
    spec.set_image_architectures(&architectures)?;
    Ok(reports)
}

fn has_command(report: &ImageReport, job: &JobSpec) -> bool {
    let is_unknown = report.not_checked.is_some();
    is_unknown || !(job.commands.is_empty() && report.entrypoint.is_empty() && report.command.is_empty())
}

fn not_checked(name: &str, reason: String) -> ImageReport {
    ImageReport { name: name.to_owned(), not_checked: Some(reason), ..ImageReport::default() }
}

fn describe(name: &str, facts: &ImageFacts) -> ImageReport {
    let text = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    ImageReport {
        name: name.to_owned(),
        not_checked: None,
        digest: Some(facts.digest.clone()),
        platforms: facts.platforms.clone(),
        entrypoint: facts.entrypoint.clone(),
        command: facts.command.clone(),
        user: text(&facts.user),
        working_dir: text(&facts.working_dir),
        environment: facts.environment.clone(),
    }
}

enum CredentialState {
    Known(Option<Credentials>),
    /// They contain something that only exists once the job starts.
    Unknown {
        reason: String,
    },
}

/// Credentials for the registry as the job will have them. The caller's runs may use the secrets that they name; that
/// was checked before.
async fn open_credentials(app: &App, scope: &ProjectScope, job: &JobSpec) -> Result<CredentialState> {
    let mut job = job.clone();
    let Some(auth) = &mut job.registry_auth else { return Ok(CredentialState::Known(None)) };
    let unknown = |reason: &str| Ok(CredentialState::Unknown { reason: reason.to_owned() });
    if let Some(id) = sealed_passwords::parse_reference(&auth.password) {
        let opened = sealed_passwords::open_password(app.db(), app.keys(), scope.project.id, id).await;
        let opened = opened.map_err(|error| match error {
            sealed_passwords::OpenPasswordError::Db(error) => Error::from(error),
            sealed_passwords::OpenPasswordError::Keys(error) => Error::from(error),
        })?;
        let Some(opened) = opened else { return unknown("the password of its registry is no longer stored") };
        auth.password = opened;
    }
    let mut values = BTreeMap::new();
    for name in references::secret_names(&job) {
        if let Some(secret) = secret_rows::find(app.db(), scope.project.id, &name).await? {
            values.insert(name, secrets::open(app, &secret)?);
        }
    }
    // A missing secret of another field does not matter here.
    let _ = references::insert_secrets(&mut job, |name| values.get(name).cloned());
    let (username, password) = job_payload::registry_credentials(&job);
    if username.contains(REFERENCE) || password.contains(REFERENCE) {
        return unknown("the credentials of its registry are not known before the job starts");
    }
    if username.is_empty() && password.is_empty() {
        return Ok(CredentialState::Known(None));
    }
    Ok(CredentialState::Known(Some(Credentials { username, password })))
}
