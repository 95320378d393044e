//! Applies a SkyPilot file with a `service`: as a service of this project, with one of the alternatives of the file.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use windlass_api::{
    fleets,
    operations::{DeleteSecrets, ListFleets, PlanRun, ReadProject, ReadRun, ReadSecret, SetSecret},
    runs::{self, Run, RunPlan},
    secrets::{DeleteRequest, NameRequest, SecretGroup, SecretUsers, SetRequest},
    server::EmptyRequest,
};
use windlass_model::{
    backend_kind::BackendKind,
    config,
    skypilot::{
        self, CommandLineValues, SECRETS_VERSION, SecretValue, ServerContext, ServiceAlternative,
        ServiceFile, ServiceSettings, UpdateMode,
    },
};

use super::{
    Args,
    config_source::{ConfigSource, with_overrides},
    run::{build_run_spec, to_document},
};
use crate::{
    commands::is_finished,
    context::Context,
    error::{CliError, ErrorCode},
    output,
};

/// Maximum length of the name of a service.
const NAME_MAX: usize = 41;

/// A valid service file, and the choices of the command line.
#[derive(Debug)]
pub(crate) struct ServiceSource {
    pub(crate) file: String,
    pub(crate) name: String,
    pub(crate) mode: UpdateMode,
    pub(crate) has_auth: bool,
    /// Fail if the active service would have to be stopped first.
    pub(crate) is_update_only: bool,
    service: ServiceFile,
}

/// Values of the command line for a service file.
#[derive(Debug, Default)]
pub(crate) struct ServiceValues {
    pub(crate) name: Option<String>,
    pub(crate) envs: BTreeMap<String, String>,
    pub(crate) secrets: BTreeMap<String, String>,
}

impl ServiceSource {
    /// Parses a file, and prints its problems and warnings.
    pub(crate) fn parse(file: &str, text: &str, values: ServiceValues) -> Result<Self, CliError> {
        let secrets = values.secrets.into_iter().map(|(name, value)| (name, SecretValue(value)));
        let given = CommandLineValues { envs: values.envs, secrets: secrets.collect() };
        let service = skypilot::parse_task_file(text, &given)
            .and_then(skypilot::ParsedTaskFile::into_service)
            .map_err(|problems| {
                output::print_message(output::printable(&config::render(&problems, file, text)).trim_end());
                CliError::reported()
            })?;
        for warning in &service.warnings {
            let line = warning.span.start.line;
            output::print_message(&output::printable(&format!(
                "warning: {file}:{line}: {}",
                warning.message
            )));
        }
        let name = match (values.name, &service.name) {
            (Some(name), _) => {
                if !config::name::is_resource_name(&name) {
                    return Err(CliError::usage(format!("invalid name `{name}`"))
                        .hint("use 2 to 41 lower-case letters, digits and dashes, starting with a letter"));
                }
                name
            }
            (None, Some(name)) => service_name(name),
            (None, None) => generate_name()?,
        };
        if service.name.as_ref().is_some_and(|own| *own != name) {
            output::print_message(&output::printable(&format!("The name of the service is `{name}`.")));
        }
        Ok(Self {
            file: file.to_owned(),
            name,
            mode: UpdateMode::default(),
            has_auth: true,
            is_update_only: false,
            service,
        })
    }

    /// Returns the configuration of the alternative that fits best here, and the secrets to store for it.
    pub(super) async fn resolve(&self, cx: &Context, args: &Args) -> Result<ConfigSource, CliError> {
        let active = self.active_run(cx).await?;
        let (secrets_version, secrets) = self.new_secrets(cx, active.as_ref()).await?;
        // An active service keeps its authentication, which a file does not specify.
        let has_auth = active.as_ref().and_then(|run| {
            let spec = run.run_spec.value().unwrap_or_default();
            spec["configuration"]["auth"].as_bool()
        });
        let settings = ServiceSettings {
            name: self.name.clone(),
            mode: self.mode,
            has_auth: has_auth.unwrap_or(self.has_auth),
            secrets_version,
        };
        let site = server_context(cx).await?;
        let found = self.service.configurations(&settings, &site).map_err(|error| {
            CliError::from_error(&format!("cannot run the service of `{}`", self.file), &error)
        })?;
        for warning in &found.warnings {
            output::print_message(&output::printable(&format!("warning: {warning}")));
        }
        // The relative paths of a file refer to the current directory, as in SkyPilot.
        let complete = |one: &ServiceAlternative| {
            with_overrides(args, self.file.clone(), ".".into(), one.configuration.clone())
        };
        let number = self.choose(cx, &found.all, active.as_ref(), complete).await?;
        let mut source = complete(&found.all[number])?;
        source.secrets = secrets;
        source.is_update_only = self.is_update_only;
        Ok(source)
    }

    async fn active_run(&self, cx: &Context) -> Result<Option<Run>, CliError> {
        let request = runs::ReadRequest { run_name: Some(self.name.clone()), id: None };
        match cx.try_call::<ReadRun>(&request).await {
            Ok(run) => Ok(Some(run).filter(|run| !is_finished(&run.status))),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(cx.explain(&error).await),
        }
    }

    /// Returns the secrets to store, and their version, which changes with their values.
    async fn new_secrets(
        &self,
        cx: &Context,
        active: Option<&Run>,
    ) -> Result<(Option<u64>, Vec<SetRequest>), CliError> {
        let wanted = self.service.stored_secrets(&self.name);
        if wanted.is_empty() {
            return Ok((None, Vec::new()));
        }
        let mut changed = Vec::new();
        for (name, SecretValue(value)) in wanted {
            let stored = match cx.try_call::<ReadSecret>(&NameRequest { name: name.clone() }).await {
                Ok(secret) => secret.value,
                Err(error) if error.is_not_found() => None,
                Err(error) => {
                    let names: Vec<&str> = self.service.secrets.keys().map(String::as_str).collect();
                    return Err(cx
                        .explain(&error)
                        .await
                        .why("only managers of the project can store the value of a secret for a service")
                        .hint(format!(
                            "ask a manager to run `windlass secret set {0}`, and leave the value out: `secrets: {{{0}: null}}`",
                            names.first().copied().unwrap_or("NAME")
                        )));
                }
            };
            if stored.as_ref() != Some(&value) {
                let users = Some(SecretUsers::Group(SecretGroup::Managers));
                changed.push(SetRequest { name, value, users });
            }
        }
        let before = active.and_then(|run| {
            let spec = run.run_spec.value().unwrap_or_default();
            spec["configuration"]["env"][SECRETS_VERSION].as_str()?.parse::<u64>().ok()
        });
        let version = match before {
            Some(before) if changed.is_empty() => before,
            before => before.unwrap_or(0) + 1,
        };
        Ok((Some(version), changed))
    }

    /// Returns the alternative to use: that of the active run, or else the first or the cheapest with an offer.
    async fn choose(
        &self,
        cx: &Context,
        all: &[ServiceAlternative],
        active: Option<&Run>,
        complete: impl Fn(&ServiceAlternative) -> Result<ConfigSource, CliError>,
    ) -> Result<usize, CliError> {
        if all.len() < 2 {
            return Ok(0);
        }
        let resources = |configuration: &Value| {
            let of_group = &configuration["groups"][0]["resources"];
            if of_group.is_null() { configuration["resources"].clone() } else { of_group.clone() }
        };
        if let Some(run) = active {
            let spec = run.run_spec.value().unwrap_or_default();
            let current = resources(&spec["configuration"]);
            let is_current = |one: &ServiceAlternative| {
                serde_json::to_value(&one.configuration).is_ok_and(|value| resources(&value) == current)
            };
            if let Some(number) = all.iter().position(is_current) {
                return Ok(number);
            }
        }
        let mut offers = Vec::new();
        for one in all {
            offers.push(cheapest_offer(cx, &complete(one)?).await?);
        }
        let with_offer = offers.iter().enumerate().filter_map(|(number, price)| Some((number, (*price)?)));
        let chosen = match self.service.is_cheapest_first {
            true => with_offer.min_by(|left, right| left.1.total_cmp(&right.1)),
            false => with_offer.min_by_key(|(number, _)| *number),
        };
        let number = chosen.map_or(0, |(number, _)| number);
        let what = &all[number].description;
        let others = all.len() - 1;
        output::print_message(&output::printable(&match chosen {
            Some(_) => {
                format!("Using {what}; the file has {others} other alternatives, and a service uses one.")
            }
            None => format!("No alternative of the file has an offer now; using the first: {what}."),
        }));
        Ok(number)
    }
}

/// Price of the cheapest offer for a configuration.
async fn cheapest_offer(cx: &Context, source: &ConfigSource) -> Result<Option<f64>, CliError> {
    let request = runs::PlanRequest {
        run_spec: to_document(&build_run_spec(source, None, &[]))?,
        max_offers: Some(20),
        full_offers: false,
        unallocated_resources: false,
        reverse_offers: false,
        for_offers_only: false,
    };
    let plan: RunPlan = cx.call::<PlanRun>(&request).await?;
    let usable = |availability: &str| matches!(availability, "available" | "idle" | "unknown" | "busy");
    let offers = plan.job_plans.iter().flat_map(|job| &job.offers);
    let prices = offers.filter(|offer| usable(&offer.availability)).map(|offer| offer.price);
    Ok(prices.min_by(f64::total_cmp))
}

/// Reads where services can run.
async fn server_context(cx: &Context) -> Result<ServerContext, CliError> {
    let project = cx.call::<ReadProject>(&EmptyRequest {}).await?;
    let is_rented = |name: &String| BackendKind::of(name).is_rented();
    let backends: Vec<String> = project.granted_backends.into_iter().filter(is_rented).collect();
    let request = fleets::ListRequest {
        project_name: Some(cx.project.clone()),
        only_active: true,
        include_imported: true,
        ..fleets::ListRequest::default()
    };
    let fleets = cx.client.call::<ListFleets>(&[], &request).await;
    let fleets = match fleets {
        Ok(fleets) => fleets.into_iter().map(|fleet| fleet.name).collect(),
        Err(error) => return Err(cx.explain(&error).await),
    };
    Ok(ServerContext { fleets, has_no_spot: backends.is_empty(), backends, ..ServerContext::default() })
}

/// Stores the values of secrets.
pub(super) async fn store_secrets(cx: &Context, secrets: &[SetRequest]) -> Result<(), CliError> {
    for secret in secrets {
        cx.call::<SetSecret>(secret).await?;
    }
    Ok(())
}

/// Deletes the stored secrets that only the given services refer to.
pub(crate) async fn delete_secrets(cx: &Context, services: &[Run]) -> Result<(), CliError> {
    let mut names = BTreeSet::new();
    for run in services {
        let spec = run.run_spec.value().unwrap_or_default();
        let prefix = skypilot::stored_secret_prefix(spec["run_name"].as_str().unwrap_or_default());
        let env = spec["configuration"]["env"].as_object().cloned().unwrap_or_default();
        names.extend(env.values().filter_map(|value| stored_name(value.as_str()?, &prefix)));
    }
    // One that does not exist anymore would be an error.
    let mut existing = Vec::new();
    for name in names {
        match cx.try_call::<ReadSecret>(&NameRequest { name: name.clone() }).await {
            Ok(_) => existing.push(name),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(cx.explain(&error).await),
        }
    }
    if existing.is_empty() {
        return Ok(());
    }
    cx.call::<DeleteSecrets>(&DeleteRequest { secrets_names: existing }).await
}

/// Returns the name of the stored secret that a variable refers to.
fn stored_name(value: &str, prefix: &str) -> Option<String> {
    let name = value.strip_prefix("${{ secrets.")?.strip_suffix(" }}")?;
    name.starts_with(prefix).then(|| name.to_owned())
}

/// Converts the name of a file to one that is valid here.
fn service_name(name: &str) -> String {
    let mut plain = String::new();
    for letter in name.to_ascii_lowercase().chars() {
        if letter.is_ascii_alphanumeric() {
            plain.push(letter);
        } else if !plain.ends_with('-') {
            plain.push('-');
        }
    }
    let plain = plain.trim_matches('-');
    let plain = if plain.starts_with(|letter: char| letter.is_ascii_lowercase()) {
        plain.to_owned()
    } else {
        format!("s-{plain}")
    };
    let plain: String = plain.chars().take(NAME_MAX).collect();
    let plain = plain.trim_end_matches('-').to_owned();
    if plain.len() < 2 { format!("{plain}-service") } else { plain }
}

fn generate_name() -> Result<String, CliError> {
    let mut bytes = [0_u8; 2];
    getrandom::fill(&mut bytes)
        .map_err(|error| CliError::from_error("failed to generate a name for the service", &error))?;
    Ok(format!("sky-service-{}", hex::encode(bytes)))
}

/// Returns an error for a name that is not the name of an active service.
pub(crate) fn not_active(name: &str) -> CliError {
    CliError::new(format!("no active service named `{name}`"))
        .code(ErrorCode::UnknownName)
        .hint("run `windlass serve status` to list services")
}

#[cfg(test)]
mod tests {
    use super::{service_name, stored_name};

    #[test]
    fn names_of_files_become_valid_names_of_services() {
        for (own, want) in [
            ("http-server", "http-server"),
            ("My_Service.v2", "my-service-v2"),
            ("__x__", "x-service"),
            ("3d", "s-3d"),
            ("_", "s-"),
        ] {
            let found = service_name(own);
            assert!(windlass_model::config::name::is_resource_name(&found), "{own}: {found}");
            assert!(found.starts_with(want.trim_end_matches('-')), "{own}: {found}");
        }
        assert!(service_name(&"a".repeat(60)).len() <= 41);
    }

    #[test]
    fn only_secrets_of_the_service_itself_are_recognized() {
        let prefix = windlass_model::skypilot::stored_secret_prefix("web-1");
        let own = windlass_model::skypilot::stored_secret_name("web-1", "TOKEN");
        assert_eq!(stored_name(&format!("${{{{ secrets.{own} }}}}"), &prefix), Some(own));
        assert_eq!(stored_name("${{ secrets.TOKEN }}", &prefix), None);
        assert_eq!(stored_name("plain", &prefix), None);
    }
}
