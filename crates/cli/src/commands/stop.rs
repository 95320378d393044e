//! `windlass stop RUN…`: returns when the server has recorded the request, or with `--wait` when the runs have ended.

use std::time::Duration;

use windlass_api::{
    operations::{ReadRun, StopRuns},
    runs,
};

use crate::{
    cli::{Format, OutputArgs, ServerArgs},
    context::{self, Context, run_name},
    error::CliError,
    exit::Exit,
    output::{self, ListView, table::Table},
};

const EXAMPLES: &str = "\
Examples:
  windlass stop train             stop a run gracefully, after a confirmation
  windlass stop -y -w train eval  skip the confirmation, and wait until both have ended
  windlass stop -x -y train       abort it without a grace period";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Names of the runs
    #[arg(required = true, value_name = "RUN")]
    pub(crate) names: Vec<String>,
    /// Kill the jobs immediately, without a grace period
    #[arg(short = 'x', long)]
    pub(crate) abort: bool,
    /// Skip the confirmation prompt
    #[arg(short, long)]
    pub(crate) yes: bool,
    /// Wait until the runs have ended
    #[arg(short, long)]
    pub(crate) wait: bool,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

const POLL_INTERVAL: Duration = Duration::from_millis(100);

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    context::with_context(&args.at, async |cx| stop(cx, args).await)
}

async fn stop(cx: &Context, args: &Args) -> Result<Exit, CliError> {
    // All names are checked first, so that a typo stops nothing.
    let (mut runs, mut active) = (Vec::new(), Vec::new());
    for name in &args.names {
        let run = cx.run(name).await.map_err(|problem| problem.why("nothing was stopped"))?;
        if is_finished(&run.status) {
            output::print_message(&format!("`{name}` has already ended: {}.", run.status_message));
        } else {
            active.push(name.clone());
        }
        runs.push(run);
    }
    if !active.is_empty() {
        let verb = if args.abort { "Abort" } else { "Stop" };
        if !output::confirm(args.yes, &format!("{verb} {}?", active.join(", ")))? {
            output::print_message("Nothing was stopped.");
            return Ok(Exit::Failed);
        }
        cx.call::<StopRuns>(&runs::StopRequest { runs_names: active, abort: args.abort }).await?;
    }
    for run in runs.iter_mut().filter(|run| !is_finished(&run.status)) {
        let name = run_name(run);
        if args.wait {
            *run = wait_for_end(cx, run.id).await?;
            output::print_message(&format!("`{name}` has ended: {}.", run.status_message));
        } else {
            *run = cx.call::<ReadRun>(&runs::ReadRequest { run_name: None, id: Some(run.id) }).await?;
            output::print_message(&format!("`{name}` is stopping."));
        }
    }
    if !matches!(args.output.format, Format::Table | Format::Wide) {
        let list = ListView { project: Some(&cx.project), kind: "runs", name: run_name, none: "" };
        list.print(&runs, args.output.format, |_| Table::new([]))?;
    }
    Ok(Exit::Done)
}

pub(crate) fn is_finished(status: &str) -> bool {
    matches!(status, "terminated" | "failed" | "done")
}

pub(crate) async fn wait_for_end(cx: &Context, id: uuid::Uuid) -> Result<runs::Run, CliError> {
    let request = runs::ReadRequest { run_name: None, id: Some(id) };
    loop {
        let run = cx.call_with_retry::<ReadRun>(&request).await?;
        if is_finished(&run.status) {
            return Ok(run);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
