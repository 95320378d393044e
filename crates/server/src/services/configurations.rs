//! Checks and plans of the text of a configuration, for the editor of the web UI.
//!
//! The problems are those of `windlass check`. What only a command line can add to a run (files and repositories of its
//! machine) is refused here, because a browser cannot.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use windlass_api::{
    Document,
    configurations::{
        CheckResult, ConfigurationPlan, ConfigurationProblem, ErrorPage, PlanTextRequest, PlanTextResult,
    },
    managed_jobs as jobs_wire,
    runs::{ApplyAction, ExpectedRun, JobPlan, PlanRequest, RunPlan},
    templates::Template,
};
use windlass_model::{
    config::{
        self, Configuration, ParsedConfiguration,
        error::{Code, Diagnosis, SourceSpan},
        references, unsupported,
    },
    error_pages,
    plan::diff,
    skypilot::{self, CommandLineValues, ServiceFile, ServiceSettings},
    yaml_text::to_yaml,
};

use super::{
    explanations::{Locations, RecordedRefusals},
    managed_jobs, runs,
};
use crate::{
    app::App,
    attempt_specs,
    auth::ProjectScope,
    db::{documents::RUN_SPEC, runs as rows},
    error::{Error, Result},
};

const TEXT_BYTES_MAX: usize = 1 << 20;
const OFFERS_MAX: i64 = 20;
/// Configurations that the editor offers: examples of the documentation that need nothing else.
const TEMPLATES: [(&str, &str, &str); 7] = [
    (
        "hello",
        "Hello",
        "type: task\nname: hello\ncommands:\n  - echo \"hello from windlass\"\nresources:\n  cpu: 1..\n  memory: 0..\n",
    ),
    ("gpu", "One GPU", include_str!("../../../../examples/gpu.yml")),
    ("nodes", "Several nodes", include_str!("../../../../examples/nodes.yml")),
    ("service", "Service", include_str!("../../../../examples/service.yml")),
    ("dev", "Development environment", include_str!("../../../../examples/dev.yml")),
    (
        "spot",
        "Spot instances",
        "type: task\nname: spot\ncommands:\n  - echo \"computing\"\nspot_policy: auto\nmax_price: 4\nretry:\n  \
         on_events: [no-capacity, interruption]\n  duration: 1d\nresources:\n  cpu: 1..\n  memory: 0..\n",
    ),
    (
        "pipeline",
        "Pipeline",
        "name: pipeline\n---\nname: prepare\nresources:\n  cpus: 1+\nrun: |\n  echo preparing\n---\nname: train\n\
         resources:\n  cpus: 1+\nrun: |\n  echo training\n",
    ),
];

/// A text without errors.
enum CheckedText {
    Configuration(Box<Configuration>),
    TaskFile,
    /// A task file with a service.
    ServiceFile(Box<ServiceFile>),
}

pub(crate) fn check(text: &str) -> Result<CheckResult> {
    Ok(CheckResult { problems: check_text(text, None)?.1 })
}

/// Checks a text and resolves its variables. `env`: values of variables; without them, those that are open are no error.
fn check_text(
    text: &str,
    env: Option<&BTreeMap<String, String>>,
) -> Result<(Option<CheckedText>, Vec<ConfigurationProblem>)> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(Error::field("text", format!("must be at most {TEXT_BYTES_MAX} bytes")));
    }
    let given =
        || CommandLineValues { envs: env.cloned().unwrap_or_default(), ..CommandLineValues::default() };
    let (errors, warnings, checked) = if skypilot::is_service_file(text) {
        match skypilot::parse_task_file(text, &given()).and_then(|parsed| parsed.into_service()) {
            Ok(service) => {
                let warnings = service.warnings.clone();
                (check_service(&service), warnings, Some(CheckedText::ServiceFile(Box::new(service))))
            }
            Err(problems) => (problems, Vec::new(), None),
        }
    } else if skypilot::is_task_file(text) {
        let given = given();
        match skypilot::parse_task_file(text, &given) {
            Ok(parsed) => (parsed.refusals, parsed.warnings, Some(CheckedText::TaskFile)),
            Err(problems) => (problems, Vec::new(), None),
        }
    } else {
        match config::parse(text) {
            Ok(parsed) => check_configuration(parsed, env),
            Err(problems) => (problems, Vec::new(), None),
        }
    };
    let is_valid = errors.is_empty();
    let all = errors.iter().map(|one| problem(one, "error"));
    let problems = all.chain(warnings.iter().map(|one| problem(one, "warning"))).collect();
    Ok((checked.filter(|_| is_valid), problems))
}

/// Problems of a service file that only a browser has, or that do not depend on the server.
fn check_service(service: &ServiceFile) -> Vec<Diagnosis> {
    let mut errors = service.check().err().unwrap_or_default();
    let mut refuse = |field: &str, message: &str, hint: &str| {
        errors.push(Diagnosis::new(Code::Unsupported, SourceSpan::NONE, message).at(field).hint(hint));
    };
    let with_command = "start the service with `windlass serve up FILE`";
    if !service.name.as_deref().is_some_and(config::name::is_resource_name) {
        let message = "a service needs a `name` of 2 to 41 lower-case letters, digits and dashes, starting with a letter";
        refuse("name", message, "add `name`");
    }
    if !service.secrets.is_empty() {
        let message = "values of `secrets` are stored for the service by the command line";
        refuse("secrets", message, with_command);
    }
    let settings = ServiceSettings { name: "service".to_owned(), ..ServiceSettings::default() };
    let site = skypilot::ServerContext { has_no_spot: true, ..skypilot::ServerContext::default() };
    let alternatives = service.configurations(&settings, &site).map(|found| found.all).unwrap_or_default();
    let uploads = |configuration: &Configuration| {
        configuration.run().is_some_and(|run| !run.files.is_empty() || !run.repos.is_empty())
    };
    if alternatives.iter().any(|one| uploads(&one.configuration)) {
        let message = "`workdir` and `file_mounts` are uploaded from a machine, which a browser cannot do";
        refuse("workdir", message, with_command);
    }
    errors
}

type CheckedConfiguration = (Vec<Diagnosis>, Vec<Diagnosis>, Option<CheckedText>);

fn check_configuration(
    parsed: ParsedConfiguration,
    env: Option<&BTreeMap<String, String>>,
) -> CheckedConfiguration {
    let ParsedConfiguration { mut configuration, node } = parsed;
    let context = unsupported::ReviewContext { node: Some(&node), ..unsupported::ReviewContext::default() };
    let unsupported::SupportReview { refusals: mut errors, warnings } =
        unsupported::review(&configuration, context);
    let at = |field: &str| node.entry(field).map_or(node.span, |entry| entry.key_span);
    match configuration.run() {
        None => {
            let message = format!(
                "a browser applies tasks, services, dev environments and task files, not a {}",
                configuration.kind()
            );
            let problem = Diagnosis::new(Code::Unsupported, at("type"), message).at("type");
            errors.push(problem.hint("apply the file with `windlass apply -f FILE`"));
        }
        Some(run) => {
            for (field, is_set) in [("files", !run.files.is_empty()), ("repos", !run.repos.is_empty())] {
                if is_set {
                    let message = format!("`{field}` are uploaded from a machine, which a browser cannot do");
                    let problem = Diagnosis::new(Code::Unsupported, at(field), message).at(field);
                    errors.push(problem.hint("apply the file with `windlass apply -f FILE`"));
                }
            }
        }
    }
    let value = |name: &str| match env {
        Some(env) => env.get(name).cloned(),
        None => Some(String::new()),
    };
    if let Err(error) = references::resolve_for_client(&mut configuration, &[], value) {
        let (field, hint) = match &error {
            references::Error::Unset { .. } => ("env", Some("enter their values below the editor")),
            references::Error::Reference { place, .. } => (*place, None),
            references::Error::MissingSecrets { .. } => ("env", None),
        };
        let problem = Diagnosis::new(Code::Interpolation, at(field), error.to_string()).at(field);
        errors.push(match hint {
            Some(hint) => problem.hint(hint),
            None => problem,
        });
    }
    (errors, warnings, Some(CheckedText::Configuration(Box::new(configuration))))
}

fn problem(diagnosis: &Diagnosis, severity: &str) -> ConfigurationProblem {
    let SourceSpan { start, end } = diagnosis.span;
    let line = start.line.max(1);
    ConfigurationProblem {
        code: diagnosis.code.id().to_owned(),
        severity: severity.to_owned(),
        message: diagnosis.message.clone(),
        line,
        column: start.column.max(1),
        end_line: end.line.max(line),
        end_column: end.column.max(1),
        hint: diagnosis.hint.clone(),
    }
}

pub(crate) async fn plan(
    app: &App,
    scope: &ProjectScope,
    requested: PlanTextRequest,
) -> Result<PlanTextResult> {
    let (checked, mut problems) = check_text(&requested.text, Some(&requested.env))?;
    let plan = match checked {
        None => None,
        Some(CheckedText::TaskFile) => Some(plan_task_file(app, scope, requested, &mut problems).await?),
        Some(CheckedText::ServiceFile(service)) => {
            Some(plan_service(app, scope, &service, &mut problems).await?)
        }
        Some(CheckedText::Configuration(configuration)) => {
            Some(plan_run(app, scope, &configuration, &mut problems).await?)
        }
    };
    Ok(PlanTextResult { problems, plan })
}

async fn plan_run(
    app: &App,
    scope: &ProjectScope,
    configuration: &Configuration,
    problems: &mut Vec<ConfigurationProblem>,
) -> Result<ConfigurationPlan> {
    let spec = json!({
        "run_name": configuration.name(),
        "repo_id": "none",
        "repo_data": { "repo_type": "virtual" },
        "configuration": configuration,
        "profile": { "name": "default" },
    });
    let planned = runs::plan(app, scope, offers_request(Document::new(&spec)?)).await?;
    let effective = planned.effective_run_spec.as_ref().unwrap_or(&planned.run_spec).value()?;
    let mut plan = plan_of(app, scope, planned, configuration.kind()).await?;
    plan.effective_text = configuration_text(&effective);
    let active = match configuration.name() {
        Some(name) => rows::find_by_name(app.db(), scope.project.id, name).await?,
        None => None,
    };
    let Some(active) = active.filter(|active| !active.run.finished) else { return Ok(plan) };
    let stored: Value = RUN_SPEC.decode(active.run.id, &active.run.spec)?;
    match diff::diff_run_spec(&stored, &effective) {
        Ok(_) => plan.action = ApplyAction::Update,
        Err(forbidden) => problems.push(ConfigurationProblem {
            code: Code::Conflict.id().to_owned(),
            severity: "error".to_owned(),
            message: format!(
                "run `{}` is active, and `{}` cannot be changed in place",
                plan.name, forbidden.path
            ),
            line: 1,
            column: 1,
            end_line: 1,
            end_column: 1,
            hint: Some("stop the run first, or choose another name".to_owned()),
        }),
    }
    plan.current_text = Some(configuration_text(&stored));
    let run_spec = Document::new(&stored)?;
    plan.current_resource = Some(ExpectedRun { id: active.run.id.0, run_spec });
    Ok(plan)
}

/// Plans a service file as `windlass serve up` does: the cheapest alternative with an offer, or the first if the file
/// orders them, or that of the active service while it is one of them.
async fn plan_service(
    app: &App,
    scope: &ProjectScope,
    service: &ServiceFile,
    problems: &mut Vec<ConfigurationProblem>,
) -> Result<ConfigurationPlan> {
    let name = service.name.clone().unwrap_or_default();
    let active = rows::find_by_name(app.db(), scope.project.id, &name).await?;
    let active: Option<Value> = match active.filter(|active| !active.run.finished) {
        Some(active) => Some(RUN_SPEC.decode(active.run.id, &active.run.spec)?),
        None => None,
    };
    // An active service keeps its authentication, which a file does not specify.
    let has_auth = active.as_ref().and_then(|spec| spec["configuration"]["auth"].as_bool()).unwrap_or(true);
    let settings = ServiceSettings { name, has_auth, ..ServiceSettings::default() };
    let has_infra = service.candidates.iter().any(|one| one.infra.is_some());
    let site = attempt_specs::infra_of(app.db(), app.backends(), scope.project.id, has_infra).await?;
    let found =
        service.configurations(&settings, &site).map_err(|error| Error::refused(error.to_string()))?;
    problems.extend(found.warnings.iter().map(|message| general_warning(message)));
    let mut best: Option<(ConfigurationPlan, Vec<ConfigurationProblem>)> = None;
    for alternative in &found.all {
        let mut own = Vec::new();
        let plan = plan_run(app, scope, &alternative.configuration, &mut own).await?;
        let is_active = active.as_ref().is_some_and(|spec| {
            resources_of(&json!(alternative.configuration)) == resources_of(&spec["configuration"])
        });
        let price = |plan: &ConfigurationPlan| plan.offers.first().map_or(f64::INFINITY, |offer| offer.price);
        let is_better = match &best {
            None => true,
            Some((best, _)) if service.is_cheapest_first => price(&plan) < price(best),
            Some((best, _)) => best.offers.is_empty() && !plan.offers.is_empty(),
        };
        if is_active || is_better {
            best = Some((plan, own));
        }
        if is_active {
            break;
        }
    }
    let (plan, own) = best.ok_or_else(|| Error::refused("the file has no alternative that can run here"))?;
    problems.extend(own);
    Ok(plan)
}

/// Resources of a service, or of its first group.
fn resources_of(configuration: &Value) -> &Value {
    let of_group = &configuration["groups"][0]["resources"];
    if of_group.is_null() { &configuration["resources"] } else { of_group }
}

fn general_warning(message: &str) -> ConfigurationProblem {
    ConfigurationProblem {
        code: Code::Unsupported.id().to_owned(),
        severity: "warning".to_owned(),
        message: message.to_owned(),
        line: 1,
        column: 1,
        end_line: 1,
        end_column: 1,
        hint: None,
    }
}

/// Plans the first attempt of the first task, which stands for the others.
async fn plan_task_file(
    app: &App,
    scope: &ProjectScope,
    requested: PlanTextRequest,
    problems: &mut Vec<ConfigurationProblem>,
) -> Result<ConfigurationPlan> {
    let request: jobs_wire::LaunchRequest =
        serde_json::from_value(json!({ "text": requested.text, "envs": requested.env }))?;
    let first = managed_jobs::first_attempt(app, scope, request).await?;
    problems.extend(first.warnings.iter().map(|message| general_warning(message)));
    let planned = runs::plan(app, scope, offers_request(first.run_spec)).await?;
    let plan = plan_of(app, scope, planned, "managed-job").await?;
    Ok(ConfigurationPlan {
        name: first.name,
        run_spec: Document::new(&json!({}))?,
        effective_text: first.plan_text,
        ..plan
    })
}

fn offers_request(run_spec: Document) -> PlanRequest {
    PlanRequest {
        run_spec,
        max_offers: Some(OFFERS_MAX),
        full_offers: false,
        unallocated_resources: false,
        reverse_offers: false,
        // Without lookups of images: the text is planned at every pause of the writer.
        for_offers_only: true,
    }
}

async fn plan_of(app: &App, scope: &ProjectScope, planned: RunPlan, kind: &str) -> Result<ConfigurationPlan> {
    let spec = planned.run_spec.value()?;
    let refused: Option<&JobPlan> = planned.job_plans.iter().find(|plan| plan.why.is_some());
    let starts_now = refused.is_none();
    let recorded = RecordedRefusals::of(refused.and_then(|plan| plan.why.as_ref()));
    let left_out = recorded.left_out;
    let locations = Locations::load(app, scope.project.id).await?;
    let refusals = recorded.refusals.into_iter().map(|one| locations.refusal(one)).collect();
    let first = planned.job_plans.into_iter().next();
    let (offers, total_offers, max_price, runs_in) = first
        .map_or((Vec::new(), 0, None, Vec::new()), |plan| {
            (plan.offers, plan.total_offers, plan.max_price, plan.runs_in)
        });
    Ok(ConfigurationPlan {
        r#type: kind.to_owned(),
        name: spec["run_name"].as_str().unwrap_or_default().to_owned(),
        action: ApplyAction::Create,
        run_spec: planned.run_spec,
        current_resource: None,
        offers,
        total_offers,
        max_price,
        starts_now,
        refusals,
        left_out,
        runs_in,
        current_text: None,
        effective_text: String::new(),
    })
}

/// The configuration of a specification as YAML, without fields that are not set.
pub(crate) fn configuration_text(spec: &Value) -> String {
    let mut configuration = spec["configuration"].clone();
    remove_unset(&mut configuration);
    let mut text = to_yaml(&in_usual_order(configuration));
    text.push('\n');
    text
}

/// Removes nulls, empty lists and empty maps.
pub(crate) fn remove_unset(value: &mut Value) {
    let is_unset = |value: &Value| match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    };
    match value {
        Value::Object(fields) => {
            fields.values_mut().for_each(remove_unset);
            fields.retain(|_, field| !is_unset(field));
        }
        Value::Array(items) => items.iter_mut().for_each(remove_unset),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Type and name first.
fn in_usual_order(configuration: Value) -> Value {
    let Value::Object(mut fields) = configuration else { return configuration };
    let mut ordered = serde_json::Map::new();
    for name in ["type", "name"] {
        if let Some(value) = fields.remove(name) {
            ordered.insert(name.to_owned(), value);
        }
    }
    ordered.extend(fields);
    Value::Object(ordered)
}

pub(crate) fn schema(name: &str) -> Result<Document> {
    let schema = match name {
        "windlass" => config::schema(),
        "profiles" => config::profiles_schema(),
        _ => return Err(Error::field("name", "must be `windlass` or `profiles`")),
    };
    Ok(Document::new(&schema)?)
}

pub(crate) fn error_page(code: &str) -> Result<ErrorPage> {
    let page = error_pages::ErrorPage::find(code).ok_or_else(|| Error::absent("Error code"))?;
    Ok(ErrorPage { code: page.code.to_owned(), title: page.name().to_owned(), text: page.text.to_owned() })
}

pub(crate) fn templates() -> Result<Vec<Template>> {
    let template = |(name, title, text): (&str, &str, &str)| {
        let configuration = match config::parse(text) {
            Ok(parsed) => serde_json::to_value(parsed.configuration)?,
            // A task file, which is no configuration.
            Err(_) => json!({}),
        };
        Ok(Template {
            // The word that dstack's client expects.
            r#type: "template".to_owned(),
            name: name.to_owned(),
            title: title.to_owned(),
            description: None,
            parameters: Vec::new(),
            configuration,
            text: text.to_owned(),
        })
    };
    TEMPLATES.into_iter().map(template).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str, env: Option<&[(&str, &str)]>) -> Vec<(String, u32, String)> {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let env: Option<BTreeMap<String, String>> = env.map(|env| env.iter().map(owned).collect());
        let (checked, problems) = check_text(text, env.as_ref()).unwrap();
        let errors = problems.iter().filter(|problem| problem.severity == "error").count();
        assert_eq!(checked.is_some(), errors == 0, "{problems:?}");
        problems.into_iter().map(|problem| (problem.severity, problem.line, problem.message)).collect()
    }

    #[test]
    fn problems_of_a_text_have_their_lines() {
        let found = problems("type: task\ntypo: 1\ncommands: [a]\n", None);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].0.as_str(), found[0].1), ("error", 2));
        assert!(problems("type: task\ncommands: [a]\n", None).is_empty());
    }

    #[test]
    fn a_browser_can_neither_upload_files_nor_apply_a_fleet() {
        let found = problems("type: task\nfiles:\n  - ./x:/x\ncommands: [a]\n", None);
        assert!(found.len() == 1 && found[0].1 == 2 && found[0].2.contains("`files`"), "{found:?}");
        let found = problems("type: fleet\nname: lab\nnodes: 1\nbackends: [aws]\n", None);
        assert!(found.iter().any(|(_, _, message)| message.contains("not a fleet")), "{found:?}");
    }

    #[test]
    fn open_variables_need_values_before_a_text_is_planned() {
        let text = "type: task\nenv:\n  - TOKEN\ncommands: [a]\n";
        assert!(problems(text, None).is_empty());
        assert!(problems(text, Some(&[("TOKEN", "x")])).is_empty());
        let found = problems(text, Some(&[]));
        assert!(found.len() == 1 && found[0].1 == 2 && found[0].2.contains("TOKEN"), "{found:?}");
    }

    #[test]
    fn a_service_file_is_a_service_and_not_a_managed_job() {
        let text = "name: web\nresources:\n  ports: 8000\nservice:\n  readiness_probe: /\n  replicas: 1\nrun: serve\n";
        let (checked, found) = check_text(text, None).unwrap();
        assert!(found.iter().all(|problem| problem.severity == "warning"), "{found:?}");
        assert!(matches!(checked, Some(CheckedText::ServiceFile(_))));
        let unnamed = problems(&text.replace("name: web\n", ""), None);
        assert!(unnamed.iter().any(|(_, _, message)| message.contains("needs a `name`")), "{unnamed:?}");
        let secret = problems(&format!("{text}secrets:\n  TOKEN: x\n"), None);
        assert!(secret.iter().any(|(_, _, message)| message.contains("`secrets`")), "{secret:?}");
        let upload = problems(&format!("{text}workdir: .\n"), None);
        assert!(upload.iter().any(|(_, _, message)| message.contains("`workdir`")), "{upload:?}");
        assert!(
            problems(&text.replace("replicas: 1", "replicas: x"), None)
                .iter()
                .any(|(severity, ..)| severity == "error")
        );
    }

    #[test]
    fn every_template_is_valid() {
        for template in templates().unwrap() {
            let found = problems(&template.text, None);
            assert!(found.iter().all(|(severity, ..)| severity == "warning"), "{}: {found:?}", template.name);
            assert_eq!(
                skypilot::is_task_file(&template.text),
                template.configuration == json!({}),
                "{}",
                template.name
            );
        }
    }

    #[test]
    fn the_text_of_a_configuration_has_only_what_is_set() {
        let spec = json!({ "configuration": {
            "image": null, "commands": ["a: b"], "name": "x", "env": {}, "type": "task", "resources": { "gpu": null, "cpu": 2 },
        } });
        let text = configuration_text(&spec);
        assert_eq!(text, "type: task\nname: x\ncommands:\n  - \"a: b\"\nresources:\n  cpu: 2\n");
    }
}
