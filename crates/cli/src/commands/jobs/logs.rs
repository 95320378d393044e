//! `windlass jobs logs`: the output of all attempts of a job's tasks. The output of parallel tasks is interleaved.

use windlass_api::{
    events,
    managed_jobs::{ListRequest, ManagedJob, Task},
    operations::{ListEvents, ListManagedJobs},
};

use super::{
    NOT_FOUND, exit_for, find,
    follow::{JobFollower, run_exists},
    parse_job_number,
};
use crate::{
    cli::ServerArgs,
    commands::logs::print_run_logs,
    context::Context,
    error::{CliError, ErrorCode},
    exit::Exit,
    output::{self, format},
};

const EXAMPLES: &str = "\
Examples:
  windlass jobs logs 12                  follow job 12 across all its recoveries
  windlass jobs logs 12 eval             one of several tasks, by name or number
  windlass jobs logs -n train            your newest job named `train`
  windlass jobs logs --no-follow --attempt 1 12
  windlass jobs logs --controller 12     the events of the job, with reasons";

/// Page size of events.
const EVENTS_MAX: i64 = 100;

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Job number; defaults to your newest job
    #[arg(value_name = "JOB", value_parser = parse_job_number)]
    pub(super) job: Option<i64>,
    /// Task of the job, by number or name
    #[arg(value_name = "TASK", requires = "job")]
    pub(super) task: Option<String>,
    /// Name of a job, instead of its number; selects the newest
    #[arg(short, long, conflicts_with = "job")]
    pub(super) name: Option<String>,
    /// Follow the output until the job ends (default)
    #[arg(short, long, overrides_with = "no_follow")]
    pub(super) follow: bool,
    /// Print the existing output and exit
    #[arg(long)]
    pub(super) no_follow: bool,
    /// Number of lines to show from the end of each attempt
    #[arg(long, value_name = "N")]
    pub(super) tail: Option<usize>,
    /// Attempt, counted from 1, or `all` (default)
    #[arg(long, value_name = "K")]
    pub(super) attempt: Option<String>,
    /// Show the events of the job instead of its output
    #[arg(long)]
    pub(super) controller: bool,
}

pub(super) async fn print(cx: &Context, args: &Args, at: &ServerArgs) -> Result<Exit, CliError> {
    let attempt = match args.attempt.as_deref() {
        None | Some("all") => None,
        Some(word) => Some(word.parse::<usize>().ok().filter(|number| *number > 0).ok_or_else(|| {
            CliError::usage(format!("invalid `--attempt` value `{word}`"))
                .hint("use a number of at least 1, or `all`")
        })?),
    };
    let Some(job) = find_job(cx, args).await? else { return Ok(NOT_FOUND) };
    if args.controller {
        return print_controller_log(cx, &job).await;
    }
    let task = match &args.task {
        None => None,
        Some(word) => Some(find_task(&job, word)?.task_id),
    };
    let selection = LogSelection { task, attempt, tail: args.tail };
    if args.no_follow {
        print_existing(cx, at, &job, &selection).await?;
        return Ok(Exit::Done);
    }
    Ok(exit_for(&JobFollower::new(cx, &job, selection).run(job).await?))
}

/// The selected part of a job's output.
#[derive(Clone, Debug, Default)]
pub(super) struct LogSelection {
    /// Number of the selected task.
    pub(super) task: Option<u32>,
    /// Selected attempt, counted from 1.
    pub(super) attempt: Option<usize>,
    /// Number of lines from the end of each attempt.
    pub(super) tail: Option<usize>,
}

impl LogSelection {
    pub(super) fn has_task(&self, task: &Task) -> bool {
        self.task.is_none_or(|only| only == task.task_id)
    }

    /// `index` counts from 0.
    pub(super) fn has_attempt(&self, index: usize) -> bool {
        self.attempt.is_none_or(|only| only == index + 1)
    }
}

/// Prints the existing output, task by task and attempt by attempt.
async fn print_existing(
    cx: &Context,
    at: &ServerArgs,
    job: &ManagedJob,
    selection: &LogSelection,
) -> Result<(), CliError> {
    let several = job.tasks.len() > 1 && selection.task.is_none();
    for task in job.tasks.iter().filter(|task| selection.has_task(task)) {
        for (index, run) in task.runs.iter().enumerate().filter(|(index, _)| selection.has_attempt(*index)) {
            // An attempt is numbered before its run is created; the last one may have no run.
            if !run_exists(cx, run).await? {
                break;
            }
            if index > 0 || (several && task.task_id > 0) {
                output::print_message(&format!("── {} (attempt {})", task.name, index + 1));
            }
            print_run_logs(cx, at, run, false, selection.tail).await?;
        }
    }
    Ok(())
}

async fn find_job(cx: &Context, args: &Args) -> Result<Option<ManagedJob>, CliError> {
    if let Some(job) = args.job {
        return find(cx, job).await;
    }
    let request = ListRequest { name: args.name.clone(), limit: Some(1), ..ListRequest::default() };
    let newest = cx.call::<ListManagedJobs>(&request).await?.pop();
    if newest.is_none() {
        let problem = CliError::new("no job found")
            .code(ErrorCode::UnknownName)
            .why(args.name.as_ref().map_or("you have no managed jobs".to_owned(), |name| {
                format!("you have no job named `{name}`")
            }))
            .hint("run `windlass jobs queue -a -u` to list the jobs of all users");
        output::print_message(&problem.text());
    }
    Ok(newest)
}

fn find_task<'a>(job: &'a ManagedJob, word: &str) -> Result<&'a Task, CliError> {
    let by_number = |task: &&Task| word.parse::<u32>() == Ok(task.task_id);
    let by_name = |task: &&Task| task.name == word;
    job.tasks.iter().find(by_name).or_else(|| job.tasks.iter().find(by_number)).ok_or_else(|| {
        let names: Vec<&str> = job.tasks.iter().map(|task| task.name.as_str()).collect();
        CliError::new(format!("no task `{word}` in job {}", job.job_id))
            .code(ErrorCode::UnknownName)
            .hint(format!("its tasks are: {}", names.join(", ")))
    })
}

/// Prints the events of a job, page by page: the log of its controller.
async fn print_controller_log(cx: &Context, job: &ManagedJob) -> Result<Exit, CliError> {
    let mut request = events::ListRequest {
        target_managed_jobs: Some(vec![job.id]),
        ascending: true,
        limit: EVENTS_MAX,
        ..events::ListRequest::default()
    };
    loop {
        let page = cx.call::<ListEvents>(&request).await?;
        for event in &page {
            let at = format::timestamp(event.recorded_at);
            output::print_data(&output::printable(&format!("{at}  {}", event.message)));
        }
        let Some(last) = page.last().filter(|_| i64::try_from(page.len()) == Ok(EVENTS_MAX)) else {
            return Ok(Exit::Done);
        };
        (request.prev_recorded_at, request.prev_id) = (Some(last.recorded_at), Some(last.id));
    }
}
