//! Applying a task, a service or a dev environment.

use serde_json::{Value, json};
use windlass_api::{
    Document,
    operations::{ApplyRun, PlanRun, StopRuns, UploadCode},
    repos,
    runs::{self, ApplyAction, Run, RunPlan},
};
use windlass_model::plan::diff;

use super::{
    Args, agreed,
    archive::{self, Brought},
    changes, git, plan, secrets,
    source::Source,
};
use crate::{
    cli::Format,
    commands::{is_finished, wait_for_end},
    context::{Context, name_of},
    exit::Exit,
    follow::{self, Events, Forwards, How, Login, Manner, Voices, rollout, ssh},
    output,
    problem::Problem,
};

/// Whose ports are forwarded, and where people log in.
const FIRST: ssh::Place = ssh::Place { replica: 0, job: 0 };

pub(super) async fn apply(cx: &Context, args: &Args, source: &Source) -> Result<Exit, Problem> {
    let code = git::find(cx, args, source).await?;
    secrets::check(cx, &source.configuration).await?;
    let archives = archive::upload(cx, source).await?;
    if let Some(code) = &code {
        cx.call::<windlass_api::operations::InitRepo>(&code.init).await?;
    }
    let spec = document(&spec(source, code.as_ref(), &archives))?;
    let request = runs::PlanRequest {
        run_spec: spec.clone(),
        max_offers: Some(args.max_offers.into()),
        full_offers: false,
        unallocated_resources: false,
        reverse_offers: false,
        for_offers_only: false,
    };
    let planned = cx.call::<PlanRun>(&request).await?;
    let step = step(&planned, args.force)?;
    let as_events = args.output.format == Format::Jsonl && !args.detach;
    if as_events {
        Events::plan(&planned, step.word());
    } else {
        plan::show(&planned);
        step.tell(&planned);
    }
    // A port of this machine that is taken is found before anything is started.
    let forwards = if args.detach { None } else { Some(Forwards::bind(args.ports(&planned)?).await?) };
    if let Step::Nothing(run) = &step {
        output::say(&format!("`{}` runs already and nothing changed.", name_of(run)));
        return finish(cx, args, run, forwards, false).await;
    }
    if !agreed(args, &step.question())? {
        return Ok(Exit::RunFailed);
    }
    if let Step::Replace(run, _) = &step {
        let name = name_of(run);
        output::say(&format!("Stopping `{name}`…"));
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
        Events::submitted(&run);
    }
    // What ran before this command goes on after it.
    let is_ours = matches!(step, Step::New | Step::Replace(..));
    finish(cx, args, &run, forwards, is_ours).await
}

fn document(value: &Value) -> Result<Document, Problem> {
    Document::new(value).map_err(|error| Problem::caused("write the configuration", &error))
}

fn spec(source: &Source, code: Option<&git::Code>, archives: &[Brought]) -> Value {
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

/// What applying comes to.
enum Step<'a> {
    New,
    /// An active run takes the changes as it runs.
    Update(&'a Run, Vec<String>),
    /// An active run has to go first; perhaps because this field cannot change.
    Replace(&'a Run, Option<String>),
    Nothing(&'a Run),
}

impl Step<'_> {
    /// For machines.
    fn word(&self) -> &'static str {
        match self {
            Self::New => "create",
            Self::Update(..) => "update",
            Self::Replace(..) => "replace",
            Self::Nothing(_) => "none",
        }
    }

    /// What differs from what runs, and what that means.
    fn tell(&self, plan: &RunPlan) {
        let (run, means) = match self {
            Self::New | Self::Nothing(_) => return,
            Self::Update(run, _) => (run, "it takes the changes as it runs".to_owned()),
            Self::Replace(run, Some(path)) => {
                (run, format!("`{path}` cannot change while it is: it has to stop first"))
            }
            Self::Replace(run, None) => (run, "it has to stop first".to_owned()),
        };
        output::say(&format!("`{}` is active, and {means}.", name_of(run)));
        let wanted = plan.effective_run_spec.as_ref().unwrap_or(&plan.run_spec).value().unwrap_or_default();
        let stored = run.run_spec.value().unwrap_or_default();
        let full = |spec: &Value| diff::in_full(&spec["configuration"]);
        for line in changes::lines(&full(&stored), &full(&wanted)) {
            output::say(&output::printable(&format!("  {line}")));
        }
        if stored["repo_code_hash"] != wanted["repo_code_hash"] || stored["repo_data"] != wanted["repo_data"]
        {
            output::say("  ~ the code");
        }
        output::say("");
    }

    fn question(&self) -> String {
        match self {
            Self::New | Self::Nothing(_) => "Submit the run?".to_owned(),
            Self::Update(run, paths) => format!("Update `{}` in place ({})?", name_of(run), paths.join(", ")),
            Self::Replace(run, _) => format!("Stop `{}` and start it anew?", name_of(run)),
        }
    }
}

/// The server says whether it can update; which field forbids it is the same pure rule here and there.
fn step(plan: &RunPlan, force: bool) -> Result<Step<'_>, Problem> {
    let Some(current) = plan.current_resource.as_ref().filter(|run| !is_finished(&run.status)) else {
        return Ok(Step::New);
    };
    let value =
        |document: &Document| document.value().map_err(|error| Problem::caused("read the plan", &error));
    let stored = value(&current.run_spec)?;
    let wanted = value(plan.effective_run_spec.as_ref().unwrap_or(&plan.run_spec))?;
    let changes = diff::run_spec(&stored, &wanted);
    match (plan.action, changes) {
        (ApplyAction::Update, Ok(changes)) if changes.is_empty() && !force => Ok(Step::Nothing(current)),
        (ApplyAction::Update, Ok(changes)) if !changes.is_empty() => {
            Ok(Step::Update(current, changes.into_iter().map(|change| change.path).collect()))
        }
        (_, Err(forbidden)) => Ok(Step::Replace(current, Some(forbidden.path))),
        (ApplyAction::Create | ApplyAction::Update, Ok(_)) => Ok(Step::Replace(current, None)),
    }
}

/// Sent under a key, so an answer that got lost does not start a second run.
async fn submit(cx: &Context, plan: &RunPlan, spec: Document, force: bool) -> Result<Run, Problem> {
    let seen = plan
        .current_resource
        .as_ref()
        .map(|run| runs::SeenRun { id: run.id, run_spec: run.run_spec.clone() });
    let request =
        runs::ApplyRequest { plan: runs::ApplyInput { run_spec: spec, current_resource: seen }, force };
    let mut key = [0_u8; 16];
    getrandom::fill(&mut key).map_err(|error| Problem::caused("draw a key", &error))?;
    let key = hex::encode(key);
    match cx.client.call_once::<ApplyRun>(&[&cx.project], &request, &key).await {
        Ok(run) => Ok(run),
        Err(error) => Err(cx.explain(&error).await),
    }
}

/// `may_stop`: whether an interrupted command takes the run with it.
async fn finish(
    cx: &Context,
    args: &Args,
    run: &Run,
    forwards: Option<Forwards>,
    may_stop: bool,
) -> Result<Exit, Problem> {
    let name = name_of(run);
    if !args.detach {
        let spec = run.run_spec.value().unwrap_or_default();
        let is_dev = spec["configuration"]["type"] == "dev-environment";
        let as_events = args.output.format == Format::Jsonl;
        let login = Login { at: args.at.clone(), place: FIRST, identity: None };
        let how = How {
            output: Some(if as_events {
                Manner::Events
            } else {
                Manner::Text(Voices::new(args.raw, false, None))
            }),
            since: None,
            forwards,
            may_stop,
            login: (is_dev && !as_events).then_some(login),
        };
        return follow::follow(cx, run, how).await;
    }
    output::one(args.output.format, run, &name, |_| {
        output::data(&name);
        output::say(&format!("`{name}` is {}. `windlass logs -f {name}` follows it.", run.status));
        if let Some(next) = rollout::next_start(run, output::words::now()) {
            output::say(&format!("It starts next at {next}."));
        }
        if let Some(address) = rollout::address(run, &cx.url) {
            output::say(&output::printable(&format!("It answers at {address}")));
        }
    })?;
    Ok(Exit::Done)
}
