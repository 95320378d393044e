//! `windlass stop RUN…`: returns when the server has written it down, or with `--wait` when they have ended.

use std::time::Duration;

use windlass_api::{operations::StopRuns, runs};

use crate::{
    cli::StopArgs,
    context::{self, Context},
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
    let mut active = Vec::new();
    for name in &args.names {
        let run = cx.run(name).await?;
        if is_finished(&run.status) {
            output::say(&format!("`{name}` has already ended: {}.", run.status_message));
        } else {
            active.push((name.clone(), run.id));
        }
    }
    if active.is_empty() {
        return Ok(Exit::Done);
    }
    let names: Vec<String> = active.iter().map(|(name, _)| name.clone()).collect();
    let verb = if args.abort { "Abort" } else { "Stop" };
    if !args.yes && !confirm(&format!("{verb} {}?", names.join(", ")))? {
        output::say("Nothing was stopped.");
        return Ok(Exit::Failed);
    }
    cx.call::<StopRuns>(&runs::StopRequest { runs_names: names.clone(), abort: args.abort }).await?;
    for (name, id) in active {
        if !args.wait {
            output::say(&format!("`{name}` is stopping."));
            continue;
        }
        let run = wait_for_end(cx, id).await?;
        output::say(&format!("`{name}` has ended: {}.", run.status_message));
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
        let run = cx.call::<windlass_api::operations::ReadRun>(&request).await?;
        if is_finished(&run.status) {
            return Ok(run);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
