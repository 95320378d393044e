//! Runs the fault matrix: `windlass-faults --row F14 --times 5`. `cargo xtask faults` builds it and what it needs.

use std::{
    io::Write as _,
    path::PathBuf,
    process::ExitCode,
    sync::atomic::{AtomicUsize, Ordering},
};

use anyhow::{Context, Result, bail, ensure};
use windlass_faults::{self as faults, FaultRow, RunOptions, report};

/// More than the number of cores, because trials mostly wait.
const JOBS: usize = 3;

#[derive(Default)]
struct Args {
    rows: Vec<String>,
    skip: Vec<String>,
    times: u64,
    jobs: usize,
    seed: Option<u64>,
    dir: Option<PathBuf>,
    is_long: bool,
    slack: u32,
    /// Run as in continuous integration.
    is_daily: bool,
    list: bool,
    json: bool,
    markdown: bool,
}

fn main() -> Result<ExitCode> {
    let args = parse_args()?;
    let rows = select_rows(&args)?;
    let mut out = std::io::stdout();
    if args.list {
        writeln!(out, "{}", report::render_list(&rows))?;
        return Ok(ExitCode::SUCCESS);
    }
    let seed = args.seed.map_or_else(random_seed, Ok)?;
    let dir = args
        .dir
        .clone()
        .unwrap_or_else(|| std::env::temp_dir().join(format!("windlass-faults-{}", std::process::id())));
    let (is_long, slack) = (args.is_long, args.slack);
    let order = RunOptions { rows, times: args.times, jobs: args.jobs, seed, is_long, slack, dir };
    let all = order.rows.len() as u64 * order.times;
    let _ = writeln!(std::io::stderr(), "{all} trials, {} at once, first seed {seed}", order.jobs);
    let done = AtomicUsize::new(0);
    let outcomes = faults::run_trials(&order, |outcome| {
        let number = done.fetch_add(1, Ordering::Relaxed) + 1;
        let _ = writeln!(std::io::stderr(), "[{number}/{all}] {}", report::render_trial(outcome));
    })?;
    // Fails unless the directory is empty, that is, nothing was kept.
    let _ = std::fs::remove_dir(&order.dir);
    let lines = report::summarize_rows(&order.rows, &outcomes);
    if args.json {
        writeln!(out, "{:#}", report::render_json(&lines))?;
    } else if args.markdown {
        write!(out, "{}", report::render_markdown(&lines))?;
    } else {
        writeln!(out, "{}", report::render_table(&lines))?;
    }
    let is_clean = outcomes.iter().all(|outcome| outcome.violations.is_empty());
    Ok(if is_clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// 32 bits, so that a user can type it.
fn random_seed() -> Result<u64> {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes).context("draw a seed")?;
    Ok(u32::from_le_bytes(bytes).into())
}

fn select_rows(args: &Args) -> Result<Vec<FaultRow>> {
    let all = faults::all_rows();
    for id in &args.rows {
        ensure!(all.iter().any(|row| row.id == id), "there is no row `{id}`; `--list` lists them");
    }
    let wanted = |row: &FaultRow| {
        let is_named = args.rows.is_empty() || args.rows.iter().any(|id| id == row.id);
        let is_left =
            args.skip.iter().any(|id| id == row.id) || (args.is_daily && row.ci_exclusion().is_some());
        is_named && !is_left
    };
    for (row, why) in all.iter().filter_map(|row| Some((row, row.ci_exclusion()?))).filter(|_| args.is_daily)
    {
        writeln!(std::io::stderr(), "left to `cargo xtask faults`: {}, which {why}", row.id)?;
    }
    Ok(all.into_iter().filter(wanted).collect())
}

fn parse_args() -> Result<Args> {
    let mut args = Args { times: 1, jobs: JOBS, slack: 1, ..Args::default() };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().with_context(|| format!("`{word}` wants a value"));
        let number = |text: String| text.parse::<u64>().with_context(|| format!("`{word}` wants a number"));
        match word.as_str() {
            "--row" => args.rows.push(value()?.to_uppercase()),
            "--skip" => args.skip.push(value()?.to_uppercase()),
            "--times" => args.times = number(value()?)?,
            "--jobs" => args.jobs = usize::try_from(number(value()?)?)?,
            "--seed" => args.seed = Some(number(value()?)?),
            "--dir" => args.dir = Some(value()?.into()),
            "--long" => args.is_long = true,
            "--slack" => args.slack = u32::try_from(number(value()?)?)?,
            "--daily" => args.is_daily = true,
            "--list" => args.list = true,
            "--json" => args.json = true,
            "--markdown" => args.markdown = true,
            _ => bail!(
                "unknown argument `{word}`; want --row ID, --skip ID, --times N, --jobs J, --seed S, --dir DIR, \
                 --long, --slack N, --daily, --list, --json, --markdown"
            ),
        }
    }
    Ok(args)
}
