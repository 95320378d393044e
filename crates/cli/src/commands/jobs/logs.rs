//! `windlass jobs logs`: what the attempts of a job's tasks wrote, one after the other.

use std::time::Duration;

use windlass_api::{
    managed_jobs::{ListRequest, ManagedJob, Task},
    operations::{ListManagedJobs, ReadRun},
    runs,
};

use super::{NOT_FOUND, exit_of, find, is_final, is_over};
use crate::{
    cli::At,
    commands::logs::of_run,
    context::Context,
    exit::Exit,
    output::{self, words},
    problem::{Code, Problem},
};

const EXAMPLES: &str = "\
Examples:
  windlass jobs logs 12                  follow job 12 over all its recoveries
  windlass jobs logs 12 eval             one task of several, by its name or number
  windlass jobs logs -n train            the newest that is called so
  windlass jobs logs --no-follow --attempt 1 12
  windlass jobs logs --controller 12     what became of it, and why";

const LOOK_EVERY: Duration = Duration::from_millis(200);

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The job, by its number; your newest, if not given
    #[arg(value_name = "JOB")]
    pub(super) job: Option<i64>,
    /// One task of it, by its number or name
    #[arg(value_name = "TASK", requires = "job")]
    pub(super) task: Option<String>,
    /// The newest job that is called so
    #[arg(short, long, conflicts_with = "job")]
    pub(super) name: Option<String>,
    /// Go on until the job ends (this is what happens anyway)
    #[arg(short, long, overrides_with = "no_follow")]
    pub(super) follow: bool,
    /// Only what there is
    #[arg(long)]
    pub(super) no_follow: bool,
    /// Only the last N lines of each attempt
    #[arg(long, value_name = "N")]
    pub(super) tail: Option<usize>,
    /// One attempt, counted from 1, or `all`, which is what is shown anyway
    #[arg(long, value_name = "K")]
    pub(super) attempt: Option<String>,
    /// What became of the job, instead of what it wrote
    #[arg(long)]
    pub(super) controller: bool,
}

pub(super) async fn print(cx: &Context, args: &Args, at: &At) -> Result<Exit, Problem> {
    let attempt = match args.attempt.as_deref() {
        None | Some("all") => None,
        Some(word) => Some(word.parse::<usize>().ok().filter(|number| *number > 0).ok_or_else(|| {
            Problem::misuse(format!("`{word}` is not an attempt")).hint("a number from 1 on, or `all`")
        })?),
    };
    let Some(job) = chosen(cx, args).await? else { return Ok(NOT_FOUND) };
    if args.controller {
        return controller(cx, &job).await;
    }
    let task = match &args.task {
        None => None,
        Some(word) => Some(task_of(&job, word)?.task_id),
    };
    let follower = Follower { cx, at, task, attempt, tail: args.tail, follow: !args.no_follow };
    let job = follower.run(job).await?;
    Ok(if args.no_follow { Exit::Done } else { exit_of(&job) })
}

/// Follows a job from its launch to its end.
pub(super) async fn follow(cx: &Context, at: &At, job: ManagedJob) -> Result<ManagedJob, Problem> {
    Follower { cx, at, task: None, attempt: None, tail: None, follow: true }.run(job).await
}

async fn chosen(cx: &Context, args: &Args) -> Result<Option<ManagedJob>, Problem> {
    if let Some(job) = args.job {
        return find(cx, job).await;
    }
    let request = ListRequest { name: args.name.clone(), limit: Some(1), ..ListRequest::default() };
    let newest = cx.call::<ListManagedJobs>(&request).await?.pop();
    if newest.is_none() {
        let problem = Problem::new("find a job of yours")
            .code(Code::UnknownName)
            .why(
                args.name
                    .as_ref()
                    .map_or("you have none".to_owned(), |name| format!("none is called `{name}`")),
            )
            .hint("`windlass jobs queue -a -u` lists them all");
        output::say(&problem.text());
    }
    Ok(newest)
}

fn task_of<'a>(job: &'a ManagedJob, word: &str) -> Result<&'a Task, Problem> {
    let by_number = |task: &&Task| word.parse::<u32>() == Ok(task.task_id);
    let by_name = |task: &&Task| task.name == word;
    job.tasks.iter().find(by_name).or_else(|| job.tasks.iter().find(by_number)).ok_or_else(|| {
        let names: Vec<&str> = job.tasks.iter().map(|task| task.name.as_str()).collect();
        Problem::new(format!("find task `{word}` of job {}", job.job_id))
            .code(Code::UnknownName)
            .hint(format!("it has {}", names.join(", ")))
    })
}

/// The events of a job: the log of whoever drives it.
async fn controller(cx: &Context, job: &ManagedJob) -> Result<Exit, Problem> {
    let request = windlass_api::events::ListRequest {
        target_managed_jobs: Some(vec![job.id]),
        ascending: true,
        limit: 100,
        ..windlass_api::events::ListRequest::default()
    };
    for event in cx.call::<windlass_api::operations::ListEvents>(&request).await? {
        output::data(&output::printable(&format!("{}  {}", words::stamp(event.recorded_at), event.message)));
    }
    Ok(Exit::Done)
}

struct Follower<'a> {
    cx: &'a Context,
    at: &'a At,
    task: Option<u32>,
    attempt: Option<usize>,
    tail: Option<usize>,
    follow: bool,
}

impl Follower<'_> {
    /// Task by task, attempt by attempt. The answer is the job as it was seen last.
    async fn run(&self, mut job: ManagedJob) -> Result<ManagedJob, Problem> {
        let count = u32::try_from(job.tasks.len()).unwrap_or_default();
        for number in (0..count).filter(|number| self.task.is_none_or(|task| task == *number)) {
            let mut shown = 0;
            while let Some(task) = job.tasks.iter().find(|task| task.task_id == number) {
                let over = is_final(&task.status);
                let runs = task.runs.clone();
                let several = count > 1 && self.task.is_none();
                for (index, run) in runs.iter().enumerate().skip(shown) {
                    if self.attempt.is_some_and(|attempt| attempt != index + 1) {
                        shown = index + 1;
                        continue;
                    }
                    if !self.exists(run).await? {
                        break;
                    }
                    if index > 0 || (several && number > 0) {
                        output::say(&format!(
                            "── {} (attempt {})",
                            job.tasks[number as usize].name,
                            index + 1
                        ));
                    }
                    of_run(self.cx, self.at, run, self.follow, self.tail).await?;
                    shown = index + 1;
                }
                if !self.follow
                    || (over && shown >= runs.len())
                    || (over && !self.may_come(&runs, shown).await?)
                {
                    break;
                }
                tokio::time::sleep(LOOK_EVERY).await;
                job = self.again(&job).await?;
            }
        }
        while self.follow && self.task.is_none() && !is_over(&job) {
            tokio::time::sleep(LOOK_EVERY).await;
            job = self.again(&job).await?;
        }
        Ok(job)
    }

    /// An attempt is numbered before it is made; of a task that is over the last may never have been.
    async fn may_come(&self, runs: &[String], shown: usize) -> Result<bool, Problem> {
        match runs.get(shown) {
            Some(run) => self.exists(run).await,
            None => Ok(false),
        }
    }

    async fn exists(&self, run: &str) -> Result<bool, Problem> {
        let request = runs::ReadRequest { run_name: Some(run.to_owned()), id: None };
        match self.cx.try_call::<ReadRun>(&request).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_absent() => Ok(false),
            Err(error) if error.is_lost() => Ok(false),
            Err(error) => Err(self.cx.explain(&error).await),
        }
    }

    async fn again(&self, job: &ManagedJob) -> Result<ManagedJob, Problem> {
        let request = windlass_api::managed_jobs::ReadRequest { job_id: job.job_id };
        self.cx.patiently::<windlass_api::operations::ReadManagedJob>(&request).await
    }
}
