//! `windlass logs RUN`: the output of its jobs, byte for byte.

use std::{cmp::Reverse, collections::BinaryHeap};

use regex_automata::meta::Regex;
use tokio::time::{Instant, sleep_until};
use windlass_api::{
    operations::ReadRun,
    runs::{Job, ReadRequest, Run},
};
use windlass_model::{
    config::quantities::parse_duration,
    time::{Span, Timestamp},
};

use super::stop::is_finished;
use crate::{
    cli::ServerArgs,
    context::{self, Context},
    error::{CliError, ErrorCode},
    exit::Exit,
    follow::{
        LogChunk, LogMux, LogPages, LogPrinter, LogRange, LogTail, OutputMode, PollBackoff, ProgressTree,
        PumpEnd, deployment_status, find_last_lines, ssh::parse_job_name,
    },
    output::{self, format},
};

const EXAMPLES: &str = "\
Examples:
  windlass logs train                       the output of all its jobs
  windlass logs -f --tail 20 train          the last 20 lines, then new output until the end
  windlass logs --since 10m --grep 'loss=' train
  windlass logs -t train                    each line with its timestamp
  windlass logs --previous train            the output of the previous attempt
  windlass logs train-1-0                   one of several jobs, like --job 1 --replica 0

With several jobs, each line is prefixed with the rank and replica of its job, as in the job name. Files, and pipes in
scripts, receive every byte unchanged. On a terminal, and in pipes that are started from one, control sequences other
than colours are removed unless `--raw` is given.";

#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Run, or one of its jobs: RUN-RANK-REPLICA
    #[arg(value_name = "RUN")]
    pub(crate) name: String,
    /// Follow the output until the run ends
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Number of lines to show from the end of each job's output
    #[arg(long, value_name = "N")]
    pub(crate) tail: Option<usize>,
    /// Show output written since this time: `10s`, `5m`, `1d` ago, or a time such as `2026-11-20T09:00:00Z`
    #[arg(long, value_name = "WHEN")]
    pub(crate) since: Option<String>,
    /// Show output written until this time
    #[arg(long, value_name = "WHEN", conflicts_with = "follow")]
    pub(crate) until: Option<String>,
    /// Regular expression; only matching lines are shown
    #[arg(long, value_name = "PATTERN")]
    pub(crate) grep: Option<String>,
    /// Replica of a service; defaults to all
    #[arg(long, value_name = "N")]
    pub(crate) replica: Option<i64>,
    /// Job of the replica: the rank of the node; defaults to all
    #[arg(long, value_name = "N")]
    pub(crate) job: Option<i64>,
    /// Show the output of the attempt before the newest
    #[arg(long, conflicts_with = "follow")]
    pub(crate) previous: bool,
    /// Prefix each line with the time at which it was written
    #[arg(short, long)]
    pub(crate) timestamps: bool,
    /// Print the output unmodified, including escape sequences, also to a terminal
    #[arg(long)]
    pub(crate) raw: bool,
    /// Show the agent's log about the job instead of the job's output
    #[arg(long)]
    pub(crate) diagnose: bool,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
}

impl Args {
    /// Returns the arguments of a command line without any flag.
    pub(crate) fn plain(name: String, at: ServerArgs) -> Self {
        Self {
            name,
            follow: false,
            tail: None,
            since: None,
            until: None,
            grep: None,
            replica: None,
            job: None,
            previous: false,
            timestamps: false,
            raw: false,
            diagnose: false,
            at,
        }
    }
}

/// Parsed arguments.
struct LogQuery<'a> {
    args: &'a Args,
    since: Option<Timestamp>,
    until: Option<Timestamp>,
    grep: Option<Regex>,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let grep = args.grep.as_deref().map(Regex::new).transpose().map_err(|error| {
        CliError::usage(format!("invalid `--grep` pattern `{}`", args.grep.as_deref().unwrap_or_default()))
            .why(error.syntax_error().map_or_else(|| error.to_string(), ToString::to_string))
    })?;
    let wanted = LogQuery {
        args,
        since: args.since.as_deref().map(parse_since).transpose()?,
        until: args.until.as_deref().map(parse_since).transpose()?,
        grep,
    };
    context::with_context(&args.at, async |cx| wanted.print(cx).await)
}

/// Prints the output of a run's jobs: what exists, or everything until its end.
pub(crate) async fn print_run_logs(
    cx: &Context,
    at: &ServerArgs,
    name: &str,
    follow: bool,
    tail: Option<usize>,
) -> Result<Exit, CliError> {
    let args = Args { follow, tail, ..Args::plain(name.to_owned(), at.clone()) };
    LogQuery { args: &args, since: None, until: None, grep: None }.print(cx).await
}

/// Parses a time: a duration ago, or a timestamp.
pub(crate) fn parse_since(text: &str) -> Result<Timestamp, CliError> {
    if let Ok(secs) = parse_duration(text) {
        return Ok(format::now() - Span::secs(secs));
    }
    Timestamp::parse(text).map_err(|_| {
        CliError::usage(format!("invalid time `{text}`"))
            .hint("use an age such as `10s`, `5m`, `2h` or `1d`, or a time such as `2026-11-20T09:00:00Z`")
    })
}

impl LogQuery<'_> {
    async fn print(&self, cx: &Context) -> Result<Exit, CliError> {
        let unknown = match cx.run(&self.args.name).await {
            Ok(run) => return self.print_run(cx, run).await,
            Err(problem) => problem,
        };
        // The name may be that of a job.
        let Some((name, place)) = parse_job_name(&self.args.name) else { return Err(unknown) };
        let Ok(run) = cx.run(name).await else { return Err(unknown) };
        let args = Args {
            name: name.to_owned(),
            replica: Some(place.replica),
            job: Some(place.job),
            ..self.args.clone()
        };
        LogQuery { args: &args, since: self.since, until: self.until, grep: self.grep.clone() }
            .print_run(cx, run)
            .await
    }

    async fn print_run(&self, cx: &Context, run: Run) -> Result<Exit, CliError> {
        if self.args.follow { self.follow(cx, run).await } else { self.print_existing(cx, &run).await }
    }

    fn parts(&self, run: &Run) -> Vec<((i64, i64), LogRange)> {
        run.jobs.iter().filter_map(|job| self.part(job)).collect()
    }

    /// Returns the requested part of a job's log, ignoring `--tail`.
    fn part(&self, job: &Job) -> Option<((i64, i64), LogRange)> {
        let spec = job.job_spec.value().unwrap_or_default();
        let number = |name: &str| spec[name].as_i64().unwrap_or(0);
        let place = (number("replica_num"), number("job_num"));
        let is_wanted = self.args.replica.is_none_or(|replica| replica == place.0)
            && self.args.job.is_none_or(|job| job == place.1);
        let mut newest_first = job.job_submissions.iter().rev();
        let submission = newest_first.nth(usize::from(self.args.previous)).filter(|_| is_wanted)?;
        let mut part = LogRange::whole(&self.args.name, submission.id);
        (part.since, part.until, part.diagnose) = (self.since, self.until, self.args.diagnose);
        Some((place, part))
    }

    /// Applies `--tail` to a range.
    async fn apply_tail(&self, cx: &Context, mut part: LogRange) -> Result<LogRange, CliError> {
        if let Some(lines) = self.args.tail
            && let Some(offset) = find_last_lines(cx, &part, lines).await?
        {
            part.offset = offset;
        }
        Ok(part)
    }

    /// Prints the existing output in the order in which it was written.
    async fn print_existing(&self, cx: &Context, run: &Run) -> Result<Exit, CliError> {
        let parts = self.parts(run);
        if parts.is_empty() && run.jobs.is_empty() && !is_finished(&run.status) {
            self.print_not_started(run);
            return Ok(Exit::Done);
        }
        if parts.is_empty() {
            return Err(self.no_such_log(run));
        }
        let mut printer = LogPrinter::new(self.args.raw, parts.len() > 1, self.grep.clone())
            .with_timestamps(self.args.timestamps);
        let mut is_empty = true;
        let mut sources = Vec::new();
        for (place, part) in parts {
            let part = self.apply_tail(cx, part).await?;
            sources.push(JobLog { pages: LogPages::new(&part), pieces: Vec::new().into_iter(), place });
        }
        // Merge by time: the oldest chunk is next.
        let mut heads: BinaryHeap<Reverse<(Timestamp, usize, LogChunk)>> = BinaryHeap::new();
        for (index, source) in sources.iter_mut().enumerate() {
            heads.extend(source.next(cx).await?.map(|piece| Reverse((piece.at, index, piece))));
        }
        while let Some(Reverse((_, index, piece))) = heads.pop() {
            is_empty &= piece.bytes.is_empty();
            if !printer.write(sources[index].place, piece.at, &piece.bytes) {
                return Ok(Exit::Done);
            }
            heads.extend(sources[index].next(cx).await?.map(|piece| Reverse((piece.at, index, piece))));
        }
        printer.end();
        if is_empty {
            self.print_not_started(run);
        }
        Ok(Exit::Done)
    }

    /// Prints a note for a run that has not started: having no output yet is not an error.
    fn print_not_started(&self, run: &Run) {
        let mut submissions = run.jobs.iter().flat_map(|job| &job.job_submissions);
        let is_early = |status: &str| matches!(status, "submitted" | "provisioning" | "pulling");
        if is_finished(&run.status)
            || submissions.any(|one| one.job_provisioning_data.is_some() && !is_early(&one.status))
        {
            return;
        }
        let name = &self.args.name;
        let more = if self.args.follow {
            String::new()
        } else {
            format!(", or `windlass logs -f {name}` to follow it")
        };
        let next = deployment_status::next_start(run, format::now());
        let next = next.map(|next| format!(": it starts at {next}")).unwrap_or_default();
        output::print_message(&format!(
            "`{name}` has not started yet{next}. Run `windlass why {name}` to see why{more}."
        ));
    }

    async fn follow(&self, cx: &Context, mut run: Run) -> Result<Exit, CliError> {
        let request = ReadRequest { run_name: None, id: Some(run.id) };
        // No progress is drawn: the user only requested logs.
        let mut tree = ProgressTree::new(&self.args.name);
        let printer =
            LogPrinter::new(self.args.raw, false, self.grep.clone()).with_timestamps(self.args.timestamps);
        self.print_not_started(&run);
        let mut log_mux = LogMux::new(OutputMode::Text(printer));
        let mut pace = PollBackoff::new();
        loop {
            let finished = is_finished(&run.status);
            let parts = self.parts(&run);
            if parts.is_empty() && finished {
                return Err(self.no_such_log(&run));
            }
            for (place, part) in parts {
                match log_mux.submission_of(place) {
                    Some(known) if known == part.submission => continue,
                    Some(_) => {
                        // First print the rest of the previous attempt.
                        if !log_mux.remove(place, &mut tree).await? {
                            return Ok(Exit::Done);
                        }
                        log_mux.add(place, LogTail::new(cx, part));
                    }
                    None => log_mux.add(place, LogTail::new(cx, self.apply_tail(cx, part).await?)),
                }
                pace.news();
            }
            if finished {
                log_mux.finish(&mut tree).await?;
                return Ok(Exit::Done);
            }
            let due = Instant::now() + pace.wait();
            if log_mux.is_empty() {
                sleep_until(due).await;
            } else {
                match log_mux.pump(due, &mut tree).await? {
                    PumpEnd::DeadlineReached => {}
                    PumpEnd::Over => pace.news(),
                    PumpEnd::OutputClosed => return Ok(Exit::Done),
                }
            }
            run = cx.call_with_retry::<ReadRun>(&request).await?;
        }
    }

    fn no_such_log(&self, run: &Run) -> CliError {
        let Args { name, replica, job, previous, .. } = self.args;
        let which = match (replica, job) {
            (None, None) => "a job".to_owned(),
            (Some(replica), None) => format!("replica {replica}"),
            (None, Some(job)) => format!("job {job}"),
            (Some(replica), Some(job)) => format!("job {job} of replica {replica}"),
        };
        let problem = CliError::new(format!("cannot find {which} of `{name}`")).code(ErrorCode::UnknownName);
        if run.jobs.is_empty() {
            return problem.why(format!("the run has no jobs yet; its status is {}", run.status));
        }
        if *previous {
            return problem
                .why("there is only one attempt")
                .hint(format!("run `windlass logs {name}` to print its output"));
        }
        problem.hint(format!("run `windlass ps` to list its {}", format::count(run.jobs.len(), "job")))
    }
}

/// The log of one job, chunk by chunk.
struct JobLog {
    place: (i64, i64),
    pages: LogPages,
    pieces: std::vec::IntoIter<LogChunk>,
}

impl JobLog {
    async fn next(&mut self, cx: &Context) -> Result<Option<LogChunk>, CliError> {
        if let Some(piece) = self.pieces.next() {
            return Ok(Some(piece));
        }
        self.pieces = self.pages.next(cx).await?.into_iter();
        Ok(self.pieces.next())
    }
}
