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
    attach, git, plan,
    source::Source,
};
use crate::{
    commands::{is_finished, wait_for_end},
    context::{Context, name_of},
    exit::Exit,
    output,
    problem::Problem,
};

pub(super) async fn apply(cx: &Context, args: &Args, source: &Source) -> Result<Exit, Problem> {
    let code = git::find(args, source)?;
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
    plan::show(&planned);
    let step = step(&planned, args.force)?;
    if let Step::Nothing(run) = &step {
        output::say(&format!("`{}` runs already and nothing changed.", name_of(run)));
        return finish(cx, args, run).await;
    }
    if !agreed(args, &step.question())? {
        return Ok(Exit::RunFailed);
    }
    if let Step::Replace(run) = &step {
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
    finish(cx, args, &run).await
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
    /// An active run has to go first.
    Replace(&'a Run),
    Nothing(&'a Run),
}

impl Step<'_> {
    fn question(&self) -> String {
        match self {
            Self::New | Self::Nothing(_) => "Submit the run?".to_owned(),
            Self::Update(run, paths) => format!("Update `{}` in place ({})?", name_of(run), paths.join(", ")),
            Self::Replace(run) => format!("Stop `{}` and start it anew?", name_of(run)),
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
            let paths: Vec<String> = changes.into_iter().map(|change| change.path).collect();
            output::say(&format!("`{}` is active; changed: {}.", name_of(current), paths.join(", ")));
            Ok(Step::Update(current, paths))
        }
        (_, Err(forbidden)) => {
            output::say(&format!(
                "`{}` is active, and `{}` cannot change while it is: it has to stop first.",
                name_of(current),
                forbidden.path
            ));
            Ok(Step::Replace(current))
        }
        (ApplyAction::Create | ApplyAction::Update, Ok(_)) => {
            output::say(&format!("`{}` is active: it has to stop first.", name_of(current)));
            Ok(Step::Replace(current))
        }
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
    let key = crate::local::hex(&key);
    match cx.client.call_once::<ApplyRun>(&[&cx.project], &request, &key).await {
        Ok(run) => Ok(run),
        Err(error) => Err(cx.explain(&error).await),
    }
}

async fn finish(cx: &Context, args: &Args, run: &Run) -> Result<Exit, Problem> {
    let name = name_of(run);
    if !args.detach {
        return attach::follow(cx, run).await;
    }
    output::one(args.output.format, run, &name, |_| {
        output::data(&name);
        output::say(&format!("`{name}` is {}. `windlass logs -f {name}` follows it.", run.status));
    })?;
    Ok(Exit::Done)
}
