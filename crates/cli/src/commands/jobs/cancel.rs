//! `windlass jobs cancel`: returns when the server has recorded the request.

use windlass_api::{
    managed_jobs::{CancelRequest, CancelResponse, ListRequest},
    operations::{CancelManagedJobs, ListManagedJobs},
};

use super::{NOT_FOUND, find, parse_job_number};
use crate::{
    cli::Format,
    context::Context,
    error::CliError,
    exit::Exit,
    output::{self, format},
};

const EXAMPLES: &str = "\
Examples:
  windlass jobs cancel 12 13              cancel two jobs, after a confirmation
  windlass jobs cancel -y -n train        cancel your jobs named `train`
  windlass jobs cancel -y --all           cancel all your jobs
  windlass jobs cancel -y --graceful --graceful-timeout 600 12";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Job numbers
    #[arg(value_name = "JOB", value_parser = parse_job_number)]
    jobs: Vec<i64>,
    /// Cancel all your jobs of this name
    #[arg(short, long)]
    name: Option<String>,
    /// Cancel all your jobs
    #[arg(short, long)]
    all: bool,
    /// Cancel the jobs of all users
    #[arg(short = 'u', long)]
    all_users: bool,
    /// Let pending output be written before the nodes are released
    #[arg(long)]
    graceful: bool,
    /// Maximum duration of a graceful end in seconds; then the nodes are released at once
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(i64).range(0..=604_800))]
    graceful_timeout: Option<i64>,
    /// Skip the confirmation prompt
    #[arg(short, long)]
    yes: bool,
}

pub(super) async fn cancel(cx: &Context, args: &Args, format: Format) -> Result<Exit, CliError> {
    let chosen = [!args.jobs.is_empty(), args.name.is_some(), args.all, args.all_users];
    if chosen.iter().filter(|chosen| **chosen).count() != 1 {
        return Err(CliError::usage(
            "expected exactly one of: job numbers, `--name`, `--all`, `--all-users`",
        )
        .hint("run `windlass jobs queue` to list jobs"));
    }
    // All numbers are checked first, so that a typo cancels nothing.
    for job in &args.jobs {
        if find(cx, *job).await?.is_none() {
            return Ok(NOT_FOUND);
        }
    }
    let what = match (&args.name, args.jobs.as_slice()) {
        (Some(name), _) => format!("your jobs named `{name}`"),
        (None, []) if args.all_users => "the jobs of all users".to_owned(),
        (None, []) => "all your jobs".to_owned(),
        (None, [one]) => format!("job {one}"),
        (None, many) => {
            let numbers: Vec<String> = many.iter().map(ToString::to_string).collect();
            format!("jobs {}", numbers.join(", "))
        }
    };
    if !args.yes && !args.jobs.is_empty() {
        let request = ListRequest { job_ids: Some(args.jobs.clone()), ..ListRequest::default() };
        let jobs = cx.call::<ListManagedJobs>(&request).await?;
        super::queue::table(&jobs, false)
            .lines(output::style::Style::stderr())
            .iter()
            .for_each(|line| output::print_message(line));
    }
    if !output::confirm(args.yes, &format!("Cancel {what}?"))? {
        output::print_message("Nothing was cancelled.");
        return Ok(Exit::Failed);
    }
    let request = CancelRequest {
        job_ids: (!args.jobs.is_empty()).then(|| args.jobs.clone()),
        name: args.name.clone(),
        all: args.all,
        all_users: args.all_users,
        graceful: args.graceful,
        graceful_timeout: args.graceful_timeout,
    };
    let done: CancelResponse = cx.call::<CancelManagedJobs>(&request).await?;
    let numbers: Vec<String> = done.job_ids.iter().map(ToString::to_string).collect();
    match numbers.as_slice() {
        [] => output::print_message("Nothing to cancel: no matching job is active."),
        [one] => output::print_message(&format!("Job {one} is being cancelled.")),
        many if many.len() <= 10 => {
            output::print_message(&format!("Jobs {} are being cancelled.", many.join(", ")))
        }
        many => output::print_message(&format!("{} are being cancelled.", format::count(many.len(), "job"))),
    }
    match format {
        Format::Json | Format::Jsonl | Format::Yaml => output::print_one(format, &done, "", |_| ())?,
        Format::Name => numbers.iter().for_each(|number| output::print_data(number)),
        Format::Table | Format::Wide => {}
    }
    Ok(Exit::Done)
}
