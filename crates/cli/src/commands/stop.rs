//! `windlass stop RUN…`: returns when the server has written it down, or with `--wait` when they have ended.

use std::time::Duration;

use serde_json::json;
use windlass_api::{
    operations::{ReadRun, StopRuns},
    runs,
};

use crate::{
    cli::{Format, StopArgs},
    context::{self, Context, name_of},
    exit::Exit,
    output,
    problem::Problem,
};

const LOOK_EVERY: Duration = Duration::from_millis(100);

pub(crate) fn run(args: &StopArgs) -> Result<Exit, Problem> {
    context::with(&args.at, async |cx| stop(cx, args).await)
}

async fn stop(cx: &Context, args: &StopArgs) -> Result<Exit, Problem> {
    // Every name is looked at first: a typo stops nothing.
    let (mut runs, mut active) = (Vec::new(), Vec::new());
    for name in &args.names {
        let run = cx.run(name).await?;
        if is_finished(&run.status) {
            output::say(&format!("`{name}` has already ended: {}.", run.status_message));
        } else {
            active.push(name.clone());
        }
        runs.push(run);
    }
    if !active.is_empty() {
        let verb = if args.abort { "Abort" } else { "Stop" };
        if !args.yes && !confirm(&format!("{verb} {}?", active.join(", ")))? {
            output::say("Nothing was stopped.");
            return Ok(Exit::Failed);
        }
        cx.call::<StopRuns>(&runs::StopRequest { runs_names: active, abort: args.abort }).await?;
    }
    for run in runs.iter_mut().filter(|run| !is_finished(&run.status)) {
        let name = name_of(run);
        if args.wait {
            *run = wait_for_end(cx, run.id).await?;
            output::say(&format!("`{name}` has ended: {}.", run.status_message));
        } else {
            *run = cx.call::<ReadRun>(&runs::ReadRequest { run_name: None, id: Some(run.id) }).await?;
            output::say(&format!("`{name}` is stopping."));
        }
    }
    match args.output.format {
        Format::Json => output::json(&json!({ "project": cx.project, "runs": runs }))?,
        Format::Jsonl => output::jsonl(&runs)?,
        Format::Name => runs.iter().for_each(|run| output::data(&name_of(run))),
        Format::Table | Format::Wide => {}
    }
    Ok(Exit::Done)
}

/// Asks, or says which flag answers.
pub(crate) fn confirm(question: &str) -> Result<bool, Problem> {
    if !output::can_ask() {
        return Err(Problem::misuse("nobody is there to answer").why(question).hint("`-y` says yes"));
    }
    Ok(output::ask(question))
}

pub(crate) fn is_finished(status: &str) -> bool {
    matches!(status, "terminated" | "failed" | "done")
}

pub(crate) async fn wait_for_end(cx: &Context, id: uuid::Uuid) -> Result<runs::Run, Problem> {
    let request = runs::ReadRequest { run_name: None, id: Some(id) };
    loop {
        let run = cx.patiently::<ReadRun>(&request).await?;
        if is_finished(&run.status) {
            return Ok(run);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
