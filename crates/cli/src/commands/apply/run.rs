//! Applies a task, a service or a dev environment.

use serde_json::{Value, json};
use windlass_api::{
    Document,
    operations::{ApplyRun, PlanRun, StopRuns, UploadCode},
    repos,
    runs::{self, ApplyAction, Run, RunPlan},
};
use windlass_model::plan::diff;

use super::{
    Args,
    archive::{self, UploadedArchive},
    config_diff,
    config_source::ConfigSource,
    confirm_apply, git, plan, secrets, service,
};
use crate::{
    cli::Format,
    commands::{is_finished, wait_for_end},
    context::{Context, run_name},
    error::CliError,
    exit::Exit,
    follow::{
        self, EventWriter, FollowOptions, LogPrinter, OutputMode, PortForwards, SshLogin, deployment_status,
        ssh,
    },
    output,
};

/// The job whose ports are forwarded and that SSH logs in to.
const FIRST_JOB: ssh::LoginTarget = ssh::LoginTarget { replica: 0, job: 0 };

pub(super) async fn apply(cx: &Context, args: &Args, source: &ConfigSource) -> Result<Exit, CliError> {
    let code = git::find_code(cx, args, source).await?;
    secrets::check_secrets_exist(cx, source).await?;
    let archives = archive::upload(cx, source).await?;
    if let Some(code) = &code {
        cx.call::<windlass_api::operations::InitRepo>(&code.init).await?;
    }
    let spec = to_document(&build_run_spec(source, code.as_ref(), &archives))?;
    let request = runs::PlanRequest {
        run_spec: spec.clone(),
        max_offers: Some(args.max_offers.into()),
        full_offers: false,
        unallocated_resources: false,
        reverse_offers: false,
        for_offers_only: false,
    };
    let planned = cx.call::<PlanRun>(&request).await?;
    let step = decide_action(&planned, args.force)?;
    let as_events = args.output.format == Format::Jsonl && !args.detach;
    if as_events {
        EventWriter::plan(&planned, step.as_str());
    } else {
        plan::print_plan(&planned);
        step.print_plan(&planned);
    }
    // Bind local ports first, so that a port in use is reported before anything is started.
    let forwards =
        if args.detach { None } else { Some(PortForwards::bind(args.merge_ports(&planned)?).await?) };
    if let PlannedAction::Nothing(run) = &step {
        output::print_message(&format!("`{}` is already active and unchanged.", run_name(run)));
        return print_and_follow(cx, args, run, forwards, false).await;
    }
    if let PlannedAction::Replace(run, why) = &step
        && source.is_update_only
    {
        let name = run_name(run);
        let why = why.as_deref().unwrap_or("it");
        return Err(CliError::new(format!("cannot update `{name}` without an interruption"))
            .why(format!("`{why}` cannot be changed in place"))
            .hint(format!("run `windlass apply -f {}` to stop it and start it again", source.file)));
    }
    if !confirm_apply(args, &step.question())? {
        return Ok(Exit::RunFailed);
    }
    service::store_secrets(cx, &source.secrets).await?;
    if let PlannedAction::Replace(run, _) = &step {
        let name = run_name(run);
        output::print_message(&format!("Stopping `{name}`…"));
        cx.call::<StopRuns>(&runs::StopRequest { runs_names: vec![name], abort: false }).await?;
        wait_for_end(cx, run.id).await?;
    }
    if let Some(code) = code.as_ref().filter(|code| !code.content.is_empty()) {
        let query = repos::UploadCodeQuery { repo_id: code.init.repo_id.clone() };
        let uploaded =
            cx.client.upload::<UploadCode>(&[&cx.project], &query, &code.hash, &code.content).await;
        if let Err(error) = uploaded {
            return Err(cx.explain(&error).await);
        }
    }
    let run = submit(cx, &planned, spec, args.force).await?;
    if as_events {
        EventWriter::submitted(&run);
    }
    // A run that was active before this command continues after it.
    let is_ours = matches!(step, PlannedAction::Create | PlannedAction::Replace(..));
    print_and_follow(cx, args, &run, forwards, is_ours).await
}

pub(super) fn to_document(value: &Value) -> Result<Document, CliError> {
    Document::new(value).map_err(|error| CliError::from_error("failed to encode the configuration", &error))
}

pub(super) fn build_run_spec(
    source: &ConfigSource,
    code: Option<&git::CodeUpload>,
    archives: &[UploadedArchive],
) -> Value {
    json!({
        "run_name": source.configuration.name(),
        "repo_id": code.map_or("none", |code| code.init.repo_id.as_str()),
        "repo_data": code.map_or_else(|| json!({ "repo_type": "virtual" }), |code| code.data.clone()),
        "repo_code_hash": code.filter(|code| !code.content.is_empty()).map(|code| code.hash.as_str()),
        "file_archives": archives.iter().map(|one| json!({ "id": one.id, "path": one.path })).collect::<Vec<_>>(),
        "configuration_path": source.file,
        "configuration": source.configuration,
        "profile": source.profile,
        "ssh_key_pub": null,
    })
}

/// The effect of applying a plan.
enum PlannedAction<'a> {
    Create,
    /// An active run is updated in place.
    Update(&'a Run, Vec<String>),
    /// An active run is stopped first, possibly because the named field cannot be updated.
    Replace(&'a Run, Option<String>),
    Nothing(&'a Run),
}

impl PlannedAction<'_> {
    /// Name in machine-readable output.
    fn as_str(&self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update(..) => "update",
            Self::Replace(..) => "replace",
            Self::Nothing(_) => "none",
        }
    }

    /// Prints the differences from the active run and their effect.
    fn print_plan(&self, plan: &RunPlan) {
        let (run, means) = match self {
            Self::Create | Self::Nothing(_) => return,
            Self::Update(run, _) => (run, "can be updated in place".to_owned()),
            Self::Replace(run, Some(path)) => {
                (run, format!("must be stopped first, because `{path}` cannot be changed in place"))
            }
            Self::Replace(run, None) => (run, "must be stopped first".to_owned()),
        };
        output::print_message(&format!("`{}` is active and {means}.", run_name(run)));
        let wanted = plan.effective_run_spec.as_ref().unwrap_or(&plan.run_spec).value().unwrap_or_default();
        let stored = run.run_spec.value().unwrap_or_default();
        let full = |spec: &Value| diff::with_defaults(&spec["configuration"]);
        for line in config_diff::render_changes(&full(&stored), &full(&wanted)) {
            output::print_message(&output::printable(&format!("  {line}")));
        }
        if stored["repo_code_hash"] != wanted["repo_code_hash"] || stored["repo_data"] != wanted["repo_data"]
        {
            output::print_message("  ~ code");
        }
        output::print_message("");
    }

    fn question(&self) -> String {
        match self {
            Self::Create | Self::Nothing(_) => "Submit the run?".to_owned(),
            Self::Update(run, paths) => {
                format!("Update `{}` in place ({})?", run_name(run), paths.join(", "))
            }
            Self::Replace(run, _) => format!("Stop `{}` and start it again?", run_name(run)),
        }
    }
}

/// Chooses the action. The server decides whether an update is possible; client and server use the same pure rule to
/// find the field that prevents it.
fn decide_action(plan: &RunPlan, force: bool) -> Result<PlannedAction<'_>, CliError> {
    let Some(current) = plan.current_resource.as_ref().filter(|run| !is_finished(&run.status)) else {
        return Ok(PlannedAction::Create);
    };
    let value = |document: &Document| {
        document.value().map_err(|error| CliError::from_error("failed to read the plan", &error))
    };
    let stored = value(&current.run_spec)?;
    let wanted = value(plan.effective_run_spec.as_ref().unwrap_or(&plan.run_spec))?;
    let changes = diff::diff_run_spec(&stored, &wanted);
    match (plan.action, changes) {
        (ApplyAction::Update, Ok(changes)) if changes.is_empty() && !force => {
            Ok(PlannedAction::Nothing(current))
        }
        (ApplyAction::Update, Ok(changes)) if !changes.is_empty() => {
            Ok(PlannedAction::Update(current, changes.into_iter().map(|change| change.path).collect()))
        }
        (_, Err(forbidden)) => Ok(PlannedAction::Replace(current, Some(forbidden.path))),
        (ApplyAction::Create | ApplyAction::Update, Ok(_)) => Ok(PlannedAction::Replace(current, None)),
    }
}

/// Submits the plan with an idempotency key, so that a lost response does not start a second run.
async fn submit(cx: &Context, plan: &RunPlan, spec: Document, force: bool) -> Result<Run, CliError> {
    let seen = plan
        .current_resource
        .as_ref()
        .map(|run| runs::ExpectedRun { id: run.id, run_spec: run.run_spec.clone() });
    let request =
        runs::ApplyRequest { plan: runs::ApplyInput { run_spec: spec, current_resource: seen }, force };
    let mut key = [0_u8; 16];
    getrandom::fill(&mut key)
        .map_err(|error| CliError::from_error("failed to generate an idempotency key", &error))?;
    let key = hex::encode(key);
    match cx.client.call_once::<ApplyRun>(&[&cx.project], &request, &key).await {
        Ok(run) => Ok(run),
        Err(error) => Err(cx.explain(&error).await),
    }
}

/// `may_stop`: whether interrupting the command may stop the run.
async fn print_and_follow(
    cx: &Context,
    args: &Args,
    run: &Run,
    forwards: Option<PortForwards>,
    may_stop: bool,
) -> Result<Exit, CliError> {
    let name = run_name(run);
    if !args.detach {
        let spec = run.run_spec.value().unwrap_or_default();
        let is_dev = spec["configuration"]["type"] == "dev-environment";
        let as_events = args.output.format == Format::Jsonl;
        let login = SshLogin { at: args.at.clone(), place: FIRST_JOB, identity: None };
        let how = FollowOptions {
            output: Some(if as_events {
                OutputMode::Events
            } else {
                OutputMode::Text(LogPrinter::new(args.raw, false, None))
            }),
            since: None,
            forwards,
            may_stop,
            login: (is_dev && !as_events).then_some(login),
        };
        return follow::follow(cx, run, how).await;
    }
    output::print_one(args.output.format, run, &name, |_| {
        output::print_data(&name);
        output::print_message(&format!(
            "`{name}` is {}. Run `windlass logs -f {name}` to follow it.",
            run.status
        ));
        if let Some(next) = deployment_status::next_start(run, output::format::now()) {
            output::print_message(&format!("Next start: {next}."));
        }
        if let Some(address) = deployment_status::format_address(run, &cx.url) {
            output::print_message(&output::printable(&format!("It is available at {address}")));
        }
    })?;
    Ok(Exit::Done)
}
