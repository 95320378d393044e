//! `windlass logs RUN`: what a job wrote, to the byte.

use std::time::Duration;

use windlass_api::{
    operations::ReadRun,
    runs::{JobSubmission, ReadRequest, Run},
};
use windlass_model::{
    config::units::parse_duration,
    time::{Span, Timestamp},
};

use super::stop::is_finished;
use crate::{
    apply::Tail,
    cli::LogsArgs,
    context::{self, Context},
    exit::Exit,
    output::{self, words},
    problem::Problem,
};

const LOOK_EVERY: Duration = Duration::from_millis(150);

pub(crate) fn run(args: &LogsArgs) -> Result<Exit, Problem> {
    let since = args.since.as_deref().map(since).transpose()?;
    context::with(&args.at, async |cx| print(cx, args, since).await)
}

/// A length of time ago, or a moment.
fn since(text: &str) -> Result<Timestamp, Problem> {
    if let Ok(secs) = parse_duration(text) {
        return Ok(words::now() - Span::secs(secs));
    }
    Timestamp::parse(text).map_err(|_| {
        Problem::misuse(format!("`{text}` is not a time"))
            .hint("`10s`, `5m`, `2h` or `1d` ago, or a time such as `2026-11-20T09:00:00Z`")
    })
}

async fn print(cx: &Context, args: &LogsArgs, since: Option<Timestamp>) -> Result<Exit, Problem> {
    let mut run = cx.run(&args.name).await?;
    let request = ReadRequest { run_name: None, id: Some(run.id) };
    let mut tail: Option<Tail> = None;
    loop {
        let finished = is_finished(&run.status);
        match job(&run, args) {
            Some(latest) if tail.as_ref().is_none_or(|tail| tail.submission() != latest.id) => {
                if !drain(cx, tail.as_mut()).await? {
                    return Ok(Exit::Done);
                }
                tail = Some(Tail::new(&args.name, latest.id, since, args.diagnose));
            }
            Some(_) => {}
            None if finished || !args.follow => return Err(no_job(&run, args)),
            None => {}
        }
        if !drain(cx, tail.as_mut()).await? || finished || !args.follow {
            return Ok(Exit::Done);
        }
        tokio::time::sleep(LOOK_EVERY).await;
        run = cx.call::<ReadRun>(&request).await?;
    }
}

async fn drain(cx: &Context, tail: Option<&mut Tail>) -> Result<bool, Problem> {
    let Some(tail) = tail else { return Ok(true) };
    loop {
        let bytes = tail.next(cx).await?;
        if bytes.is_empty() {
            return Ok(true);
        }
        if !output::raw(&bytes) {
            return Ok(false);
        }
    }
}

fn job<'a>(run: &'a Run, args: &LogsArgs) -> Option<&'a JobSubmission> {
    let found = run.jobs.iter().find(|job| {
        let spec = job.job_spec.value().unwrap_or_default();
        spec["replica_num"].as_i64().unwrap_or(0) == args.replica
            && spec["job_num"].as_i64().unwrap_or(0) == args.job
    });
    found.and_then(|job| job.job_submissions.last())
}

fn no_job(run: &Run, args: &LogsArgs) -> Problem {
    let problem =
        Problem::new(format!("find job {} of replica {} of `{}`", args.job, args.replica, args.name));
    if run.jobs.is_empty() {
        return problem.why(format!("the run has no job yet: it is {}", run.status));
    }
    problem.hint(format!("`windlass ps` shows its {}", words::count(run.jobs.len(), "job")))
}
