//! `windlass ps`: runs, newest first.

use std::{borrow::Cow, io::IsTerminal as _, time::Duration};

use serde_json::Value;
use windlass_api::{
    operations::{ListRuns, ReadProject},
    runs::{Job, JobSubmission, ListRequest, Run},
    server::EmptyRequest,
};
use windlass_model::time::Timestamp;

use super::is_finished;
use crate::{
    cli::{Format, OutputArgs, ServerArgs},
    context::{self, Context, run_name},
    error::CliError,
    exit::Exit,
    follow::deployment_status,
    output::{
        self, ListView, format,
        table::{Cell, Table},
    },
};

const EXAMPLES: &str = "\
Examples:
  windlass ps                  active runs
  windlass ps -a -o wide       also finished runs, with all columns
  windlass ps -w               update the table when it changes
  windlass ps -n 20 -o json    the newest 20 runs, as JSON
  windlass ps 'train-*' --status failed --user ada

If a run has several jobs, each is named RUN-RANK-REPLICA, here and in other commands. The URL of a service and the next
start of a schedule are shown in additional columns if a run has one.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Names of runs, finished or not; `*` matches any characters, `?` one
    #[arg(value_name = "RUN")]
    pub(crate) names: Vec<String>,
    /// Include finished runs
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Update the output when it changes
    #[arg(short, long)]
    pub(crate) watch: bool,
    /// Number of runs, newest first, finished or not
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) last: Option<u32>,
    /// Status to filter by; may be repeated
    #[arg(long, value_name = "STATUS", value_parser = [
        "pending", "submitted", "provisioning", "running", "terminating", "terminated", "failed", "done"])]
    pub(crate) status: Vec<String>,
    /// User to filter by
    #[arg(long, value_name = "USER")]
    pub(crate) user: Option<String>,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

impl Args {
    /// Returns whether finished runs are excluded.
    fn only_active(&self) -> bool {
        let filters = self.all || self.last.is_some() || !self.names.is_empty();
        !filters && !self.status.iter().any(|status| is_finished(status))
    }

    fn includes(&self, run: &Run) -> bool {
        let name = run_name(run);
        (self.status.is_empty() || self.status.contains(&run.status))
            && (self.names.is_empty() || self.names.iter().any(|pattern| matches(pattern, &name)))
    }

    fn is_filtered(&self) -> bool {
        !self.names.is_empty() || !self.status.is_empty() || self.user.is_some()
    }
}

/// Returns whether a name matches a pattern.
fn matches(pattern: &str, name: &str) -> bool {
    let mut letters = pattern.chars();
    match letters.next() {
        None => name.is_empty(),
        Some('*') => {
            let rest = letters.as_str();
            name.char_indices().any(|(at, _)| matches(rest, &name[at..])) || matches(rest, "")
        }
        Some(letter) => {
            let mut of_name = name.chars();
            let fits = of_name.next().is_some_and(|other| letter == '?' || letter == other);
            fits && matches(letters.as_str(), of_name.as_str())
        }
    }
}

const PAGE: i64 = 100;
/// Maximum number of runs with `-a`; `-n` allows more.
const ALL_MAX: usize = 1000;
const POLL_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    if args.watch && !matches!(args.output.format, Format::Table | Format::Wide) {
        return Err(CliError::usage("`-w` requires the output format `table` or `wide`").hint("omit `-o`"));
    }
    context::with_context(&args.at, async |cx| {
        if args.watch { watch(cx, args).await } else { print_once(cx, args).await }
    })
}

async fn print_once(cx: &Context, args: &Args) -> Result<Exit, CliError> {
    let runs = list(cx, args).await?;
    if runs.is_empty() {
        // The list of a nonexistent project would be empty as well.
        cx.call::<ReadProject>(&EmptyRequest {}).await?;
    }
    let none = if args.is_filtered() {
        "No matching runs. Run `windlass ps -a` to list all runs."
    } else if args.all || args.last.is_some() {
        "No runs yet. Run `windlass apply -f FILE` to start one."
    } else {
        "No active runs. Run `windlass ps -a` to include finished ones."
    };
    ListView { project: Some(&cx.project), kind: "runs", name: run_name, none }.print(
        &runs,
        args.output.format,
        |wide| table(&runs, wide, &cx.url),
    )?;
    Ok(Exit::Done)
}

async fn watch(cx: &Context, args: &Args) -> Result<Exit, CliError> {
    let is_live = std::io::stdout().is_terminal();
    let wide = args.output.format == Format::Wide;
    let mut before = None;
    loop {
        let runs = list(cx, args).await?;
        let table = table(&runs, wide, &cx.url);
        let lines = if wide { table.whole().screen() } else { table.screen() };
        // Ages change continuously; in a pipe that alone does not print the table again.
        let news = if is_live { lines.clone() } else { runs.iter().flat_map(change_key).collect() };
        if before.as_ref() != Some(&news) {
            if is_live {
                draw(&lines);
            } else {
                if before.is_some() {
                    output::print_data("");
                }
                lines.iter().for_each(|line| output::print_data(line));
            }
            before = Some(news);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// The parts of a run whose change updates the output.
fn change_key(run: &Run) -> Vec<String> {
    let jobs = run.jobs.iter().filter_map(|job| job.job_submissions.last());
    let jobs = jobs.map(|last| format!("{} {}", last.id, last.status_message));
    std::iter::once(format!("{} {}", run.id, run.status_message)).chain(jobs).collect()
}

/// Overwrites the screen line by line, because clearing it first would flicker.
fn draw(lines: &[String]) {
    let room = rustix::termios::tcgetwinsize(std::io::stdout()).map_or(usize::MAX, |size| size.ws_row.into());
    let mut screen = String::from("\x1b[H");
    if lines.len() <= 1 {
        screen.push_str("No runs.\x1b[K\n");
    }
    for line in lines.iter().filter(|_| lines.len() > 1).take(room.saturating_sub(1)) {
        screen.push_str(&format!("{line}\x1b[K\n"));
    }
    screen.push_str("\x1b[J");
    output::write_raw(screen.as_bytes());
}

/// Lists page by page: a server returns at most a hundred runs at once.
async fn list(cx: &Context, args: &Args) -> Result<Vec<Run>, CliError> {
    let wanted = args.last.map_or(ALL_MAX, |last| usize::try_from(last).unwrap_or(ALL_MAX));
    let mut request = ListRequest {
        project_name: Some(cx.project.clone()),
        username: args.user.clone(),
        only_active: args.only_active(),
        job_submissions_limit: Some(1),
        queue_positions: true,
        // With client-side filters, a page may contain no match.
        limit: if args.is_filtered() { PAGE } else { PAGE.min(i64::try_from(wanted).unwrap_or(PAGE)) },
        ..ListRequest::default()
    };
    let mut all: Vec<Run> = Vec::new();
    loop {
        let page = cx.call_with_retry::<ListRuns>(&request).await?;
        let full = i64::try_from(page.len()) == Ok(request.limit);
        let last = page.last().map(|last| (last.submitted_at, last.id));
        all.extend(page.into_iter().filter(|run| args.includes(run)));
        let Some((time, id)) = last.filter(|_| full && all.len() < wanted) else {
            all.truncate(wanted);
            return Ok(all);
        };
        (request.prev_submitted_at, request.prev_run_id) = (Some(time), Some(id));
    }
}

/// Columns of a table.
struct Columns {
    wide: bool,
    /// Optional columns, true if one of the runs has a value.
    url: bool,
    next_start: bool,
    message: bool,
}

impl Columns {
    fn for_runs(runs: &[Run], wide: bool, server: &str) -> Self {
        let now = format::now();
        Self {
            wide,
            url: runs.iter().any(|run| url(run, server).is_some()),
            next_start: runs.iter().any(|run| deployment_status::next_start(run, now).is_some()),
            message: runs.iter().any(|run| {
                let jobs = run.jobs.iter().filter(|_| run.jobs.len() > 1).map(Some);
                std::iter::once(run.jobs.first().filter(|_| run.jobs.len() == 1))
                    .chain(jobs)
                    .any(|job| !status(run, job, wide).1.is_empty() && !is_next_start(run, job, wide))
            }),
        }
    }

    fn head(&self) -> Vec<&'static str> {
        let mut head = if self.wide {
            vec![
                "NAME",
                "TYPE",
                "USER",
                "FLEET",
                "BACKEND",
                "RESOURCES",
                "INSTANCE",
                "PRICE",
                "STATUS",
                "SUBMITTED",
            ]
        } else {
            vec!["NAME", "BACKEND", "GPU", "PRICE", "STATUS", "SUBMITTED"]
        };
        head.extend(self.url.then_some("URL"));
        head.extend(self.next_start.then_some("NEXT START"));
        head.extend(self.message.then_some("MESSAGE"));
        head.extend(self.wide.then_some("ERROR"));
        head
    }
}

/// Returns whether the message is that of the column NEXT START.
fn is_next_start(run: &Run, job: Option<&Job>, wide: bool) -> bool {
    status(run, job, wide).1.starts_with("next start at ")
        && deployment_status::next_start(run, format::now()).is_some()
}

/// URL of a service that has not ended.
fn url(run: &Run, server: &str) -> Option<String> {
    deployment_status::url(run, server).filter(|_| !is_finished(&run.status))
}

/// The run without the replicas that an update or less traffic made superfluous, while it is active.
fn without_replaced_jobs(run: &Run) -> Run {
    let mut run = run.clone();
    if !is_finished(&run.status) {
        run.jobs.retain(|job| {
            let latest = job.job_submissions.last();
            latest.is_none_or(|latest| {
                !is_finished(&latest.status) || latest.termination_reason.as_deref() != Some("scaled_down")
            })
        });
    }
    run
}

/// Status of a run or of one of its jobs, with its message. A job that waits says how many runs are before it.
fn status<'a>(run: &'a Run, job: Option<&'a Job>, wide: bool) -> (&'a str, Cow<'a, str>) {
    let (status, message) = described_status(run, job, wide);
    let latest = job.and_then(|job| job.job_submissions.last());
    let ahead = latest.and_then(|latest| latest.queue_position).filter(|ahead| *ahead > 0);
    match ahead.and_then(|ahead| usize::try_from(ahead).ok()) {
        Some(ahead) if message.is_empty() => {
            (status, format!("{} before it", format::count(ahead, "run")).into())
        }
        Some(ahead) => (status, format!("{} before it; {message}", format::count(ahead, "run")).into()),
        None => (status, message.into()),
    }
}

/// Status and message; the message of a run that waits is the sentence of `why`.
fn described_status<'a>(run: &'a Run, job: Option<&'a Job>, wide: bool) -> (&'a str, &'a str) {
    let (status, message) = own_status(run, job);
    if let Some(reason) = run.reason.as_deref().filter(|_| job.is_none() || run.jobs.len() == 1) {
        return (status, reason);
    }
    // A separate column has the reason in the wide table, and an exit status says enough.
    let is_explained = wide || !message.is_empty() || status.starts_with("exited");
    let is_whole_run = job.is_none() || run.jobs.len() == 1;
    let reason = run.reasons.first().filter(|_| run.status == "failed" && is_whole_run && !is_explained);
    (status, reason.map_or(message, String::as_str))
}

fn own_status<'a>(run: &'a Run, job: Option<&'a Job>) -> (&'a str, &'a str) {
    // A run with one job shows the status of the job; with several, each job has its own.
    let is_its_own = run.retrying || run.status == "pending";
    let latest = job.and_then(|job| job.job_submissions.last());
    match latest.filter(|_| run.jobs.len() != 1 || !is_its_own) {
        Some(latest) => format::split_status(&latest.status, &latest.status_message),
        None => format::split_status(&run.status, &run.status_message),
    }
}

fn table(runs: &[Run], wide: bool, server: &str) -> Table {
    let runs: Vec<Run> = runs.iter().map(without_replaced_jobs).collect();
    let columns = Columns::for_runs(&runs, wide, server);
    let mut table = Table::new(columns.head());
    table.keep("STATUS");
    table.fold("URL");
    table.optional(["PRICE", "GPU", "BACKEND", "SUBMITTED"]);
    for run in &runs {
        let shown = RunRows { run, columns: &columns, now: format::now() };
        let (url, name) = (url(run, server).unwrap_or_default(), run_name(run));
        match run.jobs.as_slice() {
            [job] => table.row(shown.row(Some(job), &name, url)),
            jobs => {
                table.row(shown.row(None, &name, url));
                for job in jobs {
                    let spec = job.job_spec.value().unwrap_or_default();
                    let name = spec["job_name"].as_str().unwrap_or("?");
                    table.row(shown.row(Some(job), &format!("  {name}"), String::new()));
                }
            }
        }
    }
    table
}

/// Data for the rows of one run.
struct RunRows<'a> {
    run: &'a Run,
    columns: &'a Columns,
    now: Timestamp,
}

impl RunRows<'_> {
    fn row(&self, job: Option<&Job>, name: &str, url: String) -> Vec<Cell> {
        let Self { run, columns, now } = self;
        let latest = job.and_then(|job| job.job_submissions.last());
        let given = latest.and_then(provisioning_data).unwrap_or_default();
        let resources = &given["instance_type"]["resources"];
        let region = given["region"].as_str().unwrap_or_default();
        let backend = given["backend"].as_str().map(|name| format::backend(name, region)).unwrap_or_default();
        let price = given["price"].as_f64().map(format::price).unwrap_or_default();
        let (status, message) = status(run, job, columns.wide);
        let message = if is_next_start(run, job, columns.wide) { Cow::Borrowed("") } else { message };
        // A retry submits the job again, and not the run.
        let of_job = latest.filter(|_| run.jobs.len() > 1).map(|latest| latest.submitted_at);
        let submitted = format::ago(of_job.unwrap_or(run.submitted_at), *now);
        let mut row: Vec<Cell> = vec![name.into()];
        if columns.wide {
            let spec = run.run_spec.value().unwrap_or_default();
            let fleet = run.fleet.as_ref().map(|fleet| fleet.name.clone()).unwrap_or_default();
            row.extend([
                spec["configuration"]["type"].as_str().unwrap_or_default().into(),
                run.user.clone().into(),
                fleet.into(),
                backend.into(),
                format::resources(resources).into(),
                given["instance_type"]["name"].as_str().unwrap_or_default().into(),
            ]);
        } else {
            row.extend([backend.into(), format::gpu(resources).unwrap_or_default().into()]);
        }
        row.extend([price.into(), Cell::status(status), submitted.into()]);
        if columns.url {
            row.push(url.into());
        }
        if columns.next_start {
            let is_whole_run = job.is_none() || run.jobs.len() == 1;
            let next = deployment_status::next_start(run, *now).filter(|_| is_whole_run);
            row.push(next.unwrap_or_default().into());
        }
        if columns.message {
            row.push(message.into_owned().into());
        }
        if columns.wide {
            row.push(error_message(run, latest).into());
        }
        row
    }
}

fn provisioning_data(submission: &JobSubmission) -> Option<Value> {
    submission.job_provisioning_data.as_ref()?.value().ok()
}

/// Returns the most specific error message.
fn error_message(run: &Run, latest: Option<&JobSubmission>) -> String {
    let job =
        latest.and_then(|latest| latest.termination_reason_message.clone().or_else(|| latest.error.clone()));
    job.or_else(|| run.error.clone()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use windlass_api::runs::Run;

    use super::{matches, table};
    use crate::output::style::Style;

    fn run(name: &str, more: &Value, jobs: &[Value]) -> Run {
        let time = "2026-11-20T09:00:00Z";
        let jobs: Vec<Value> = jobs
            .iter()
            .zip(0..)
            .map(|(job, num): (&Value, i64)| {
                let mut submission = json!({"id": uuid::Uuid::nil(), "submission_num": 0, "submitted_at": time,
                    "last_processed_at": time});
                submission.as_object_mut().unwrap().extend(job.as_object().unwrap().clone());
                json!({"job_spec": {"job_name": format!("{name}-0-{num}"), "replica_num": num, "job_num": 0},
                    "job_submissions": [submission]})
            })
            .collect();
        let mut value = json!({
            "id": uuid::Uuid::nil(), "project_name": "main", "user": "admin", "submitted_at": time,
            "last_processed_at": time, "status": "running", "run_spec": {"run_name": name}, "jobs": jobs,
        });
        value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn long_status_messages_are_truncated_in_their_own_column() {
        let sentence = "no place for it now: local-0 needs 64 CPUs, has 2, and there is nothing else";
        let waits = run("waits", &json!({"status": "pending", "status_message": sentence}), &[]);
        let lines = table(&[waits], false, "http://h").lines_fitting(Style::plain(), Some(60));
        assert!(lines[0].contains("STATUS") && lines[0].ends_with("MESSAGE"), "{lines:?}");
        assert!(lines[1].contains("  pending  ") && lines[1].ends_with('…'), "{lines:?}");
        assert!(lines.iter().all(|line| line.chars().count() <= 60), "{lines:?}");
    }

    #[test]
    fn ps_shows_the_service_url_and_its_job_names() {
        let job = json!({"status": "running", "status_message": "running"});
        let service = json!({"service": {"url": "/proxy/services/main/web/"}});
        let web = run("web", &service, &[job.clone(), job]);
        let lines = table(std::slice::from_ref(&web), false, "http://h:3000").lines(Style::plain());
        assert!(lines[0].ends_with("URL"), "{lines:?}");
        assert!(
            lines[1].starts_with("web ") && lines[1].ends_with("http://h:3000/proxy/services/main/web/"),
            "{lines:?}"
        );
        assert!(lines[2].starts_with("  web-0-0 ") && lines[3].starts_with("  web-0-1 "), "{lines:?}");
        let next =
            run("later", &json!({"status": "pending", "next_triggered_at": "2126-01-01T00:00:00Z"}), &[]);
        let lines = table(&[next], false, "http://h").lines(Style::plain());
        assert!(lines[0].contains("NEXT START") && lines[1].contains("2126-01-01T00:00:00Z"), "{lines:?}");
        // The message would repeat that column.
        let repeats = json!({"status": "pending", "status_message": "next start at 2126-01-01T00:00:00Z",
            "reason": "next start at 2126-01-01T00:00:00Z", "next_triggered_at": "2126-01-01T00:00:00Z"});
        let lines = table(&[run("later", &repeats, &[])], false, "http://h").lines(Style::plain());
        assert!(lines[0].ends_with("NEXT START"), "{lines:?}");
    }

    #[test]
    fn a_failed_run_shows_its_reason_and_a_service_only_its_current_replicas() {
        let why = "local-0: needs at least 64 CPUs, has 2";
        let ended = json!({"status": "failed", "status_message": "no capacity"});
        let failed = run("big", &json!({"status": "failed", "reasons": [why]}), &[ended]);
        let lines = table(std::slice::from_ref(&failed), false, "http://h").lines(Style::plain());
        assert!(lines[1].contains("no capacity") && lines[1].ends_with(why), "{lines:?}");
        let exited = json!({"status": "failed", "status_message": "exited (3)"});
        let failed = run("bad", &json!({"status": "failed", "reasons": ["the commands failed"]}), &[exited]);
        let lines = table(&[failed], false, "http://h").lines(Style::plain());
        assert!(!lines[0].contains("MESSAGE"), "{lines:?}");
        let old = json!({"status": "terminated", "termination_reason": "scaled_down"});
        let current = json!({"status": "running", "status_message": "running"});
        let web = run("web", &json!({}), &[old, current]);
        let lines = table(&[web], false, "http://h").lines(Style::plain());
        assert!(
            lines.len() == 2 && lines[1].starts_with("web ") && lines[1].contains("running"),
            "{lines:?}"
        );
    }

    #[test]
    fn a_waiting_run_shows_the_sentence_of_why() {
        let why = "no instance for it yet: local-0: needs at least 64 CPUs, has 2 (lower cpu to 2)";
        let job = json!({"status": "submitted", "status_message": "local-0: needs at least 64 CPUs, has 2 (lower cpu to 2)"});
        let waits = run("big", &json!({"status": "submitted", "reason": why}), std::slice::from_ref(&job));
        let lines = table(std::slice::from_ref(&waits), false, "http://h").lines(Style::plain());
        assert!(lines[1].contains("  submitted  ") && lines[1].ends_with(why), "{lines:?}");
        let nodes = run("nodes", &json!({"status": "submitted", "reason": why}), &[job.clone(), job]);
        let lines = table(std::slice::from_ref(&nodes), false, "http://h").lines(Style::plain());
        assert!(lines[1].ends_with(why) && !lines[2].contains("no instance for it yet"), "{lines:?}");
    }

    #[test]
    fn name_patterns_match_with_wildcards() {
        for (pattern, name) in [
            ("train", "train"),
            ("tr*", "train"),
            ("*in", "train"),
            ("tr??n", "train"),
            ("*", "a"),
            ("a*", "a"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("train", "train-2"), ("tr?n", "train"), ("*x", "train"), ("", "a")] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }
}
