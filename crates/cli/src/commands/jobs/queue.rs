//! `windlass jobs queue`: jobs, newest first, with a line for each task of jobs with several tasks.

use windlass_api::{
    managed_jobs::{ListRequest, ManagedJob, Task},
    operations::{ListManagedJobs, ReadProject},
    server::EmptyRequest,
};
use windlass_model::{
    managed_job::Status,
    time::{Span, Timestamp},
};

use crate::{
    cli::{Format, WatchArgs},
    commands::logs::parse_since,
    context::Context,
    error::CliError,
    exit::Exit,
    output::{
        ListView, format,
        table::{Cell, Table},
    },
};

const EXAMPLES: &str = "\
Examples:
  windlass jobs queue                          your active jobs, and the newest finished ones
  windlass jobs queue -s RUNNING,RECOVERING    only jobs with these statuses
  windlass jobs queue --since 2h -a -o json    all jobs of the last two hours, as JSON
  windlass jobs queue -v                       with schedule states and reasons";

/// Default number of jobs.
const DEFAULT_LIMIT: i64 = 50;
const PAGE: i64 = 1000;
/// Maximum number of jobs with `-a`.
const ALL_MAX: i64 = 100_000;
/// Maximum length of a reason in the narrow table, in characters.
const REASON_CHARS_MAX: usize = 60;

#[derive(Debug, Default, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Statuses to filter by, separated by commas
    #[arg(short, long = "status", value_name = "STATUS", value_delimiter = ',')]
    status: Vec<String>,
    /// Exclude finished jobs
    #[arg(long)]
    skip_finished: bool,
    /// Show jobs launched since this time: `10m`, `2h`, `1d` ago, or a time
    #[arg(long, value_name = "WHEN")]
    since: Option<String>,
    /// Number of jobs, newest first
    #[arg(short, long, value_name = "N", conflicts_with = "all", value_parser = clap::value_parser!(i64).range(1..=100_000))]
    limit: Option<i64>,
    /// Show all jobs, not only the newest
    #[arg(short, long)]
    all: bool,
    /// Include the jobs of all users
    #[arg(short = 'u', long)]
    all_users: bool,
    /// Show schedule states, pending conditions and reasons
    #[arg(short, long)]
    verbose: bool,
    #[command(flatten)]
    watch: WatchArgs,
}

impl Args {
    /// Rejects contradictory flags before the server is contacted.
    pub(super) fn check(&self, format: Format) -> Result<(), CliError> {
        if self.verbose && format != Format::Table {
            return Err(CliError::usage("`-v` requires the output format `table`").hint("omit `-o`"));
        }
        for word in &self.status {
            if parse_status(word).is_none() {
                let known: Vec<&str> = Status::ALL.iter().map(|status| status.as_str()).collect();
                return Err(CliError::usage(format!("invalid `--status` value `{word}`"))
                    .hint(format!("use one of {}", known.join(", "))));
            }
        }
        Ok(())
    }
}

fn parse_status(word: &str) -> Option<Status> {
    word.to_ascii_uppercase().parse().ok()
}

pub(super) async fn show(cx: &Context, args: &Args, format: Format) -> Result<Exit, CliError> {
    let name = |job: &ManagedJob| job.job_id.to_string();
    let none = "No jobs. Run `windlass jobs launch FILE` to launch one.";
    let list = ListView { project: Some(&cx.project), kind: "jobs", name, none };
    let format = if args.verbose && format == Format::Table { Format::Wide } else { format };
    list.show(format, args.watch.watch, async || fetch(cx, args).await, table).await
}

async fn fetch(cx: &Context, args: &Args) -> Result<Vec<ManagedJob>, CliError> {
    let wanted = if args.all { ALL_MAX } else { args.limit.unwrap_or(DEFAULT_LIMIT) };
    let statuses = args.status.iter().filter_map(|word| parse_status(word));
    let mut request = ListRequest {
        statuses: statuses.map(|status| status.as_str().to_owned()).collect(),
        skip_finished: args.skip_finished,
        all_users: args.all_users,
        since: args.since.as_deref().map(parse_since).transpose()?,
        limit: Some(PAGE.min(wanted)),
        ..ListRequest::default()
    };
    let mut all: Vec<ManagedJob> = Vec::new();
    loop {
        let page = cx.call_with_retry::<ListManagedJobs>(&request).await?;
        let full = i64::try_from(page.len()).ok() == request.limit;
        all.extend(page);
        let left = wanted - i64::try_from(all.len()).unwrap_or(wanted);
        let Some(last) = all.last().filter(|_| full && left > 0) else { break };
        request.prev_job_id = Some(last.job_id);
        request.limit = Some(PAGE.min(left));
    }
    if all.is_empty() {
        // The list of a nonexistent project would be empty as well.
        cx.call::<ReadProject>(&EmptyRequest {}).await?;
    }
    Ok(all)
}

pub(super) fn table(jobs: &[ManagedJob], wide: bool) -> Table {
    let now = format::now();
    let mut head = vec![
        "ID",
        "TASK",
        "NAME",
        "RESOURCES",
        "SUBMITTED",
        "TOT. DURATION",
        "JOB DURATION",
        "#RECOVERIES",
        "STATUS",
    ];
    // The column is omitted if no task waits or failed.
    let waits = !wide && jobs.iter().flat_map(|job| &job.tasks).any(|task| short_reason(task).is_some());
    if wide {
        head.extend(["SCHEDULE", "PENDING", "PRIORITY", "USER", "PLACE", "REASON"]);
    } else if waits {
        head.push("REASON");
    }
    let mut table = Table::new(head);
    table.optional(["TOT. DURATION", "#RECOVERIES", "RESOURCES", "JOB DURATION", "SUBMITTED"]);
    for job in jobs {
        let only = if let [only] = job.tasks.as_slice() { Some(only) } else { None };
        let mut row = job_row(job, wide, now);
        if waits {
            row.push(only.and_then(short_reason).unwrap_or_default().into());
        }
        table.row(row);
        for task in job.tasks.iter().filter(|_| only.is_none()) {
            let mut row = task_row(task, wide, now);
            if waits {
                row.push(short_reason(task).unwrap_or_default().into());
            }
            table.row(row);
        }
    }
    table
}

/// Returns why a task waits or failed, shortened to the column width; `-v` and `windlass why` show the full text.
fn short_reason(task: &Task) -> Option<String> {
    let has_reason = !super::is_final(&task.status) || task.status.starts_with("FAILED");
    let reason = task.reason.as_deref().filter(|_| has_reason)?;
    if reason.chars().count() <= REASON_CHARS_MAX {
        return Some(reason.to_owned());
    }
    Some(reason.chars().take(REASON_CHARS_MAX - 1).chain(['…']).collect())
}

fn format_seconds(secs: Option<i64>) -> String {
    secs.map(|secs| format::span(Span::secs(secs))).unwrap_or_else(|| "-".to_owned())
}

fn job_row(job: &ManagedJob, wide: bool, now: Timestamp) -> Vec<Cell> {
    let only = if let [only] = job.tasks.as_slice() { Some(only) } else { None };
    let count = format::count(job.tasks.len(), "task");
    let mut row = vec![
        job.job_id.to_string().into(),
        "-".into(),
        job.name.as_str().into(),
        only.map_or(count, |task| task.resources.clone()).into(),
        job.submitted_at.map_or_else(|| "-".to_owned(), |at| format::ago(at, now)).into(),
        format_seconds(job.total_duration).into(),
        format_seconds(Some(job.job_duration)).into(),
        job.recovery_count.to_string().into(),
        Cell::status(&job.status),
    ];
    if wide {
        row.extend([
            job.schedule_state.as_str().into(),
            only.and_then(|task| task.pending_kind.clone()).unwrap_or_default().into(),
            job.priority.to_string().into(),
            job.user.as_str().into(),
            only.and_then(|task| task.placement.clone()).unwrap_or_default().into(),
            only.and_then(|task| task.reason.clone()).unwrap_or_default().into(),
        ]);
    }
    row
}

fn task_row(task: &Task, wide: bool, now: Timestamp) -> Vec<Cell> {
    let mut row = vec![
        "".into(),
        task.task_id.to_string().into(),
        task.name.as_str().into(),
        task.resources.as_str().into(),
        task.submitted_at.map_or_else(|| "-".to_owned(), |at| format::ago(at, now)).into(),
        format_seconds(task.total_duration).into(),
        format_seconds(Some(task.job_duration)).into(),
        task.recovery_count.to_string().into(),
        Cell::status(&task.status),
    ];
    if wide {
        row.extend([
            task.schedule_state.as_str().into(),
            task.pending_kind.clone().unwrap_or_default().into(),
            "".into(),
            "".into(),
            task.placement.clone().unwrap_or_default().into(),
            task.reason.clone().unwrap_or_default().into(),
        ]);
    }
    row
}
