//! `windlass ps`: runs, newest first.

use std::{io::IsTerminal as _, time::Duration};

use serde_json::Value;
use windlass_api::{
    operations::{ListRuns, ReadProject},
    runs::{Job, JobSubmission, ListRequest, Run},
    server::Nothing,
};

use crate::{
    cli::{At, Format, Output},
    context::{self, Context, name_of},
    exit::Exit,
    output::{
        self, List,
        table::{Cell, Table},
        words,
    },
    problem::Problem,
};

const EXAMPLES: &str = "\
Examples:
  windlass ps                  what waits and runs
  windlass ps -a -o wide       finished runs too, with every column
  windlass ps -w               show it again whenever it changes
  windlass ps -n 20 -o json    the newest twenty, for a program";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Finished runs too
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Show it again whenever it changes
    #[arg(short, long)]
    pub(crate) watch: bool,
    /// The newest N, finished or not
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) last: Option<u32>,
    #[command(flatten)]
    pub(crate) at: At,
    #[command(flatten)]
    pub(crate) output: Output,
}

const PAGE: i64 = 100;
/// `-a` shows at most so many; whoever wants more says `-n`.
const ALL_MAX: usize = 1000;
const LOOK_EVERY: Duration = Duration::from_secs(1);

pub(crate) fn run(args: &Args) -> Result<Exit, Problem> {
    if args.watch && !matches!(args.output.format, Format::Table | Format::Wide) {
        return Err(Problem::misuse("`-w` shows tables only").hint("leave out `-o`"));
    }
    context::with(&args.at, async |cx| if args.watch { watch(cx, args).await } else { once(cx, args).await })
}

async fn once(cx: &Context, args: &Args) -> Result<Exit, Problem> {
    let runs = list(cx, args).await?;
    if runs.is_empty() {
        // The list of a project that does not exist is empty too.
        cx.call::<ReadProject>(&Nothing {}).await?;
    }
    let none = if args.all || args.last.is_some() {
        "No runs yet. `windlass apply -f FILE` starts one."
    } else {
        "No active runs. `windlass ps -a` shows finished ones too."
    };
    List { project: Some(&cx.project), kind: "runs", name: name_of, none }.print(
        &runs,
        args.output.format,
        |wide| table(&runs, wide),
    )?;
    Ok(Exit::Done)
}

async fn watch(cx: &Context, args: &Args) -> Result<Exit, Problem> {
    let is_live = std::io::stdout().is_terminal();
    let wide = args.output.format == Format::Wide;
    let mut before = None;
    loop {
        let runs = list(cx, args).await?;
        let lines = table(&runs, wide).lines(output::style::Style::stdout());
        // Ages grow all the time; in a pipe that is no news.
        let news = if is_live { lines.clone() } else { runs.iter().flat_map(state).collect() };
        if before.as_ref() != Some(&news) {
            if is_live {
                draw(&lines);
            } else {
                if before.is_some() {
                    output::data("");
                }
                lines.iter().for_each(|line| output::data(line));
            }
            before = Some(news);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// What of a run is news.
fn state(run: &Run) -> Vec<String> {
    let jobs = run.jobs.iter().filter_map(|job| job.job_submissions.last());
    let jobs = jobs.map(|last| format!("{} {}", last.id, last.status_message));
    std::iter::once(format!("{} {}", run.id, run.status_message)).chain(jobs).collect()
}

/// Over what was there, line by line: a screen that is cleared first would flicker.
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
    output::raw(screen.as_bytes());
}

/// Page by page: a server gives at most a hundred at a time.
async fn list(cx: &Context, args: &Args) -> Result<Vec<Run>, Problem> {
    let only_active = !args.all && args.last.is_none();
    let wanted = args.last.map_or(ALL_MAX, |last| usize::try_from(last).unwrap_or(ALL_MAX));
    let mut request = ListRequest {
        project_name: Some(cx.project.clone()),
        only_active,
        job_submissions_limit: Some(1),
        limit: PAGE.min(i64::try_from(wanted).unwrap_or(PAGE)),
        ..ListRequest::default()
    };
    let mut all: Vec<Run> = Vec::new();
    loop {
        let page = cx.patiently::<ListRuns>(&request).await?;
        let full = i64::try_from(page.len()) == Ok(request.limit);
        all.extend(page);
        let Some(last) = all.last().filter(|_| full && all.len() < wanted) else {
            all.truncate(wanted);
            return Ok(all);
        };
        (request.prev_submitted_at, request.prev_run_id) = (Some(last.submitted_at), Some(last.id));
    }
}

fn table(runs: &[Run], wide: bool) -> Table {
    let now = words::now();
    let mut table = if wide {
        Table::new([
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
            "ERROR",
        ])
    } else {
        Table::new(["NAME", "BACKEND", "GPU", "PRICE", "STATUS", "SUBMITTED"])
    };
    for run in runs {
        match run.jobs.as_slice() {
            [job] => table.row(row(run, Some(job), &name_of(run), wide, now)),
            jobs => {
                table.row(row(run, None, &name_of(run), wide, now));
                for job in jobs {
                    let spec = job.job_spec.value().unwrap_or_default();
                    let (replica, num) = (&spec["replica_num"], &spec["job_num"]);
                    table.row(row(run, Some(job), &format!("  replica={replica} job={num}"), wide, now));
                }
            }
        }
    }
    table
}

fn row(
    run: &Run,
    job: Option<&Job>,
    name: &str,
    wide: bool,
    now: windlass_model::time::Timestamp,
) -> Vec<Cell> {
    let latest = job.and_then(|job| job.job_submissions.last());
    let given = latest.and_then(provisioned).unwrap_or_default();
    let resources = &given["instance_type"]["resources"];
    let region = given["region"].as_str().unwrap_or_default();
    let backend = given["backend"].as_str().map(|name| words::backend(name, region)).unwrap_or_default();
    let price = given["price"].as_f64().map(words::price).unwrap_or_default();
    // A run of one job is what its job is; with several, each says its own.
    let is_its_own = run.status_message.contains("retry") || run.status == "pending";
    let status = latest.filter(|_| run.jobs.len() != 1 || !is_its_own);
    let status = status.map_or(&run.status_message, |latest| &latest.status_message);
    let status = if status.is_empty() { &run.status } else { status };
    let submitted = words::ago(latest.map_or(run.submitted_at, |latest| latest.submitted_at), now);
    if !wide {
        let gpu = words::gpu(resources).unwrap_or_default();
        return vec![
            name.into(),
            backend.into(),
            gpu.into(),
            price.into(),
            Cell::status(status),
            submitted.into(),
        ];
    }
    let spec = run.run_spec.value().unwrap_or_default();
    let fleet = run.fleet.as_ref().map(|fleet| fleet.name.clone()).unwrap_or_default();
    vec![
        name.into(),
        spec["configuration"]["type"].as_str().unwrap_or_default().into(),
        run.user.clone().into(),
        fleet.into(),
        backend.into(),
        words::resources(resources).into(),
        given["instance_type"]["name"].as_str().unwrap_or_default().into(),
        price.into(),
        Cell::status(status),
        submitted.into(),
        error(run, latest).into(),
    ]
}

fn provisioned(submission: &JobSubmission) -> Option<Value> {
    submission.job_provisioning_data.as_ref()?.value().ok()
}

/// The most precise thing that was said.
fn error(run: &Run, latest: Option<&JobSubmission>) -> String {
    let job =
        latest.and_then(|latest| latest.termination_reason_message.clone().or_else(|| latest.error.clone()));
    job.or_else(|| run.error.clone()).unwrap_or_default()
}
