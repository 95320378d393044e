//! `windlass jobs`: managed jobs, which are restarted when their instances are lost.

mod cancel;
mod follow;
mod launch;
mod logs;
mod queue;
mod resources;
mod resume;
pub(crate) mod why;

pub(crate) use self::launch::resolve_values;

use windlass_api::{
    managed_jobs::{ManagedJob, ReadRequest},
    operations::ReadManagedJob,
};
use windlass_model::managed_job::Status;

use crate::{
    cli::{OutputArgs, ServerArgs},
    context::{self, Context},
    error::{CliError, ErrorCode},
    exit::Exit,
    output,
};

const EXAMPLES: &str = "\
Examples:
  windlass jobs launch train.yaml     launch a task file and follow its output
  windlass jobs launch -d -y train.yaml --env LR=0.1 --num-jobs 8
  windlass jobs queue                 list jobs that wait, run or recover
  windlass jobs logs 12               print the output of all attempts of job 12
  windlass why 12                     show why job 12 is waiting, recovering or failed
  windlass jobs cancel -y 12 13       cancel two jobs
  windlass jobs resume 12             run a failed job again, under its number

A managed job is launched again, elsewhere if necessary, when its instances are lost. Task files have the format of
SkyPilot, or that of tasks for `windlass apply`. Exit codes of `launch` and `logs`: 0 succeeded, 100 failed, 101 not
finished, 102 not found, 103 cancelled.";

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
    /// Launch jobs from task files
    Launch(launch::Args),
    /// List jobs and their tasks
    Queue(queue::Args),
    /// Print the output of a job
    Logs(logs::Args),
    /// Cancel jobs
    Cancel(cancel::Args),
    /// Run a failed or cancelled job again, under its number
    Resume(resume::Args),
}

/// Exit code of commands that follow a job, if the job does not exist.
const NOT_FOUND: Exit = Exit::Job(102);

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let format = args.output.format;
    match &args.action {
        None => {
            context::with_context(&args.at, async |cx| queue::show(cx, &queue::Args::default(), format).await)
        }
        Some(Action::Launch(launch)) => launch::run(launch, &args.at, format),
        Some(Action::Queue(queue)) => {
            queue.check(format)?;
            context::with_context(&args.at, async |cx| queue::show(cx, queue, format).await)
        }
        Some(Action::Logs(logs)) => {
            context::with_context(&args.at, async |cx| logs::print(cx, logs, &args.at).await)
        }
        Some(Action::Cancel(cancel)) => {
            context::with_context(&args.at, async |cx| cancel::cancel(cx, cancel, format).await)
        }
        Some(Action::Resume(resume)) => {
            context::with_context(&args.at, async |cx| resume::resume(cx, resume, format).await)
        }
    }
}

/// Parses the number of a job; a name gets a hint instead of a message about digits.
fn parse_job_number(word: &str) -> Result<i64, String> {
    word.parse().map_err(|_| {
        "expected the number of a job, as `windlass jobs queue` shows it; `cancel` and `logs` accept a name as \
         `--name NAME`"
            .to_owned()
    })
}

/// Finds a job by its number. `None` if there is none, after printing that.
async fn find(cx: &Context, job_id: i64) -> Result<Option<ManagedJob>, CliError> {
    match cx.try_call::<ReadManagedJob>(&ReadRequest { job_id }).await {
        Ok(job) => Ok(Some(job)),
        Err(error) if error.is_not_found() => {
            let problem = CliError::new(format!("job {job_id} not found"))
                .code(ErrorCode::UnknownName)
                .why(format!("project `{}` has no job with this number", cx.project))
                .hint("run `windlass jobs queue -a` to list jobs");
            output::print_message(&problem.text());
            Ok(None)
        }
        Err(error) => Err(cx.explain(&error).await),
    }
}

/// Exit code of a command that followed a job.
fn exit_for(job: &ManagedJob) -> Exit {
    match job.status.parse::<Status>().map_or(101, Status::exit_code) {
        0 => Exit::Done,
        code => Exit::Job(code),
    }
}

fn is_job_finished(job: &ManagedJob) -> bool {
    job.tasks.iter().all(|task| is_final(&task.status))
}

fn is_final(status: &str) -> bool {
    status.parse::<Status>().is_ok_and(|status| status.is_final())
}
