//! `windlass logs RUN`: what a job wrote, to the byte.

use tokio::time::{Instant, sleep_until};
use windlass_api::{
    operations::ReadRun,
    runs::{JobSubmission, ReadRequest, Run},
};
use windlass_model::{
    config::units::parse_duration,
    time::{Span, Timestamp},
};

use super::{
    apply::{Copied, Pace, Pages, Tail},
    stop::is_finished,
};
use crate::{
    cli::At,
    context::{self, Context},
    exit::Exit,
    output::words,
    problem::Problem,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The run
    #[arg(value_name = "RUN")]
    pub(crate) name: String,
    /// Go on until the run ends
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Which replica of a service
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) replica: i64,
    /// Which job of the replica: the rank of the node
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) job: i64,
    /// Only what was written since then: `10s`, `5m`, `1d` ago, or a time such as `2026-11-20T09:00:00Z`
    #[arg(long, value_name = "WHEN")]
    pub(crate) since: Option<String>,
    /// What the agent wrote about the job, instead of what the job wrote
    #[arg(long)]
    pub(crate) diagnose: bool,
    #[command(flatten)]
    pub(crate) at: At,
}

pub(crate) fn run(args: &Args) -> Result<Exit, Problem> {
    let since = args.since.as_deref().map(since).transpose()?;
    context::with(&args.at, async |cx| print(cx, args, since).await)
}

/// A length of time ago, or a moment.
pub(crate) fn since(text: &str) -> Result<Timestamp, Problem> {
    if let Ok(secs) = parse_duration(text) {
        return Ok(words::now() - Span::secs(secs));
    }
    Timestamp::parse(text).map_err(|_| {
        Problem::misuse(format!("`{text}` is not a time"))
            .hint("`10s`, `5m`, `2h` or `1d` ago, or a time such as `2026-11-20T09:00:00Z`")
    })
}

async fn print(cx: &Context, args: &Args, since: Option<Timestamp>) -> Result<Exit, Problem> {
    let run = cx.run(&args.name).await?;
    if args.follow {
        return follow(cx, args, since, run).await;
    }
    let latest = job(&run, args).ok_or_else(|| no_job(&run, args))?;
    Pages::new(&args.name, latest.id, since, args.diagnose).copy(cx).await?;
    Ok(Exit::Done)
}

async fn follow(cx: &Context, args: &Args, since: Option<Timestamp>, mut run: Run) -> Result<Exit, Problem> {
    let request = ReadRequest { run_name: None, id: Some(run.id) };
    let mut tail: Option<Tail<'_>> = None;
    let mut pace = Pace::new();
    loop {
        let finished = is_finished(&run.status);
        match job(&run, args) {
            Some(latest) if tail.as_ref().is_none_or(|tail| tail.submission() != latest.id) => {
                // First all of the submission before.
                if !finish(tail.as_mut()).await? {
                    return Ok(Exit::Done);
                }
                tail = Some(Tail::new(cx, &args.name, latest.id, since, args.diagnose));
                pace.news();
            }
            Some(_) => {}
            None if finished => return Err(no_job(&run, args)),
            None => {}
        }
        if finished {
            finish(tail.as_mut()).await?;
            return Ok(Exit::Done);
        }
        let due = Instant::now() + pace.wait();
        match &mut tail {
            Some(tail) => match tail.copy(due).await? {
                Copied::Due => {}
                Copied::Over => pace.news(),
                Copied::Unread => return Ok(Exit::Done),
            },
            None => sleep_until(due).await,
        }
        run = cx.patiently::<ReadRun>(&request).await?;
    }
}

async fn finish(tail: Option<&mut Tail<'_>>) -> Result<bool, Problem> {
    match tail {
        Some(tail) => tail.finish().await,
        None => Ok(true),
    }
}

fn job<'a>(run: &'a Run, args: &Args) -> Option<&'a JobSubmission> {
    let found = run.jobs.iter().find(|job| {
        let spec = job.job_spec.value().unwrap_or_default();
        spec["replica_num"].as_i64().unwrap_or(0) == args.replica
            && spec["job_num"].as_i64().unwrap_or(0) == args.job
    });
    found.and_then(|job| job.job_submissions.last())
}

fn no_job(run: &Run, args: &Args) -> Problem {
    let problem =
        Problem::new(format!("find job {} of replica {} of `{}`", args.job, args.replica, args.name));
    if run.jobs.is_empty() {
        return problem.why(format!("the run has no job yet: it is {}", run.status));
    }
    problem.hint(format!("`windlass ps` shows its {}", words::count(run.jobs.len(), "job")))
}
