//! `windlass serve down SERVICE…`: stops services, and deletes the secrets that were stored for them.

use windlass_api::{
    operations::StopRuns,
    runs::{Run, StopRequest},
};

use super::{active_services, is_service};
use crate::{
    cli::Format,
    commands::{
        apply::service::{delete_secrets, not_active},
        is_finished, wait_for_end,
    },
    context::{Context, run_name},
    error::CliError,
    exit::Exit,
    output::{self, ListView, table::Table},
};

const EXAMPLES: &str = "\
Examples:
  windlass serve down web chat    stop two services, after a confirmation
  windlass serve down -y --all    stop all services of the project";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Names of the services
    #[arg(value_name = "SERVICE")]
    names: Vec<String>,
    /// Stop all services of the project
    #[arg(short, long)]
    all: bool,
    /// Skip the confirmation prompt
    #[arg(short, long)]
    yes: bool,
}

pub(super) async fn down(cx: &Context, args: &Args, format: Format) -> Result<Exit, CliError> {
    if args.names.is_empty() != args.all {
        return Err(CliError::usage("expected either names of services or `--all`")
            .hint("run `windlass serve status` to list services"));
    }
    let mut services = Vec::new();
    if args.all {
        services = active_services(cx).await?;
    }
    // All names are checked first, so that a typo stops nothing.
    for name in &args.names {
        let run = cx.run(name).await.map_err(|problem| problem.why("nothing was stopped"))?;
        if !is_service(&run) {
            return Err(not_active(name).why("it is not a service; nothing was stopped"));
        }
        services.push(run);
    }
    let active: Vec<String> = services.iter().filter(|run| !is_finished(&run.status)).map(run_name).collect();
    if !active.is_empty() {
        if !output::confirm(args.yes, &format!("Stop {}?", active.join(", ")))? {
            output::print_message("Nothing was stopped.");
            return Ok(Exit::Failed);
        }
        cx.call::<StopRuns>(&StopRequest { runs_names: active, abort: false }).await?;
    }
    let mut ended: Vec<Run> = Vec::new();
    for run in services {
        ended.push(if is_finished(&run.status) { run } else { wait_for_end(cx, run.id).await? });
    }
    // Only now: a replica that is replaced meanwhile still reads them.
    delete_secrets(cx, &ended).await?;
    for run in &ended {
        output::print_message(&format!("`{}` has ended.", run_name(run)));
    }
    if !matches!(format, Format::Table | Format::Wide) {
        let list = ListView { project: Some(&cx.project), kind: "runs", name: run_name, none: "" };
        list.print(&ended, format, |_| Table::new([]))?;
    }
    Ok(Exit::Done)
}
