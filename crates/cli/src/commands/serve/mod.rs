//! `windlass serve`: services from SkyPilot files.

mod down;
mod status;
mod up;

use windlass_api::{
    operations::ListRuns,
    runs::{ListRequest, Run},
};

use super::logs;
use crate::{
    cli::{OutputArgs, ServerArgs},
    context::{self, Context},
    error::CliError,
    exit::Exit,
};

const EXAMPLES: &str = "\
Examples:
  windlass serve up -n web service.yaml     start a service, after a confirmation
  windlass serve status                     list services and their replicas
  windlass serve update -y web service.yaml
  windlass serve logs web 1                 follow the output of replica 1
  windlass serve down -y web

A file has the format of SkyPilot, with a section `service`. `windlass apply -f FILE` accepts it, too. The services are
those of `windlass ps`, so `windlass why`, `windlass metrics` and other commands apply to them.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Option<Action>,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// Start a service
    Up(up::Args),
    /// List services and their replicas
    Status(status::Args),
    /// Change a service, without an interruption
    Update(up::UpdateArgs),
    /// Stop services
    Down(down::Args),
    /// Follow the output of a service, or of one of its replicas
    Logs(LogsArgs),
}

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  windlass serve logs web                  all replicas\n  windlass serve logs --no-follow web 2    what replica 2 has written so far"
)]
pub(crate) struct LogsArgs {
    /// Name of the service
    #[arg(value_name = "SERVICE")]
    name: String,
    /// Number of the replica, as `serve status` shows it; defaults to all
    #[arg(value_name = "REPLICA", value_parser = clap::value_parser!(i64).range(1..))]
    replica: Option<i64>,
    /// Print the output that exists, and exit
    #[arg(long)]
    no_follow: bool,
    /// Number of lines to show from the end of each replica's output
    #[arg(long, value_name = "N")]
    tail: Option<usize>,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    match &args.action {
        None => context::with_context(&args.at, async |cx| {
            status::print(cx, &status::Args::default(), args.output.format).await
        }),
        Some(Action::Up(up)) => up::run(up, &args.at, args.output),
        Some(Action::Update(update)) => up::update(update, &args.at, args.output),
        Some(Action::Status(status)) => {
            context::with_context(&args.at, async |cx| status::print(cx, status, args.output.format).await)
        }
        Some(Action::Down(down)) => {
            context::with_context(&args.at, async |cx| down::down(cx, down, args.output.format).await)
        }
        Some(Action::Logs(of)) => logs::run(&logs::Args {
            follow: !of.no_follow,
            tail: of.tail,
            // Replicas are counted from 1 in these files, and from 0 elsewhere.
            replica: of.replica.map(|replica| replica - 1),
            ..logs::Args::plain(of.name.clone(), args.at.clone())
        }),
    }
}

/// Returns the active services of the project.
async fn active_services(cx: &Context) -> Result<Vec<Run>, CliError> {
    const PAGE: i64 = 100;
    let mut request = ListRequest {
        project_name: Some(cx.project.clone()),
        only_active: true,
        job_submissions_limit: Some(1),
        limit: PAGE,
        ..ListRequest::default()
    };
    let mut services = Vec::new();
    loop {
        let page = cx.call_with_retry::<ListRuns>(&request).await?;
        let is_full = i64::try_from(page.len()) == Ok(PAGE);
        let last = page.last().map(|last| (last.submitted_at, last.id));
        services.extend(page.into_iter().filter(is_service));
        let Some((time, id)) = last.filter(|_| is_full) else { return Ok(services) };
        (request.prev_submitted_at, request.prev_run_id) = (Some(time), Some(id));
    }
}

fn is_service(run: &Run) -> bool {
    run.run_spec.value().unwrap_or_default()["configuration"]["type"] == "service"
}
