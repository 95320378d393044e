//! `cargo xtask test`: runs every test level, prints a line for each, and at the end the commands that repeat failures.

mod changed;
mod levels;
mod report;

use std::{
    io::{Read as _, Seek as _},
    thread,
};

use anyhow::{Context as _, Result, ensure};

use self::{
    levels::{Level, LevelOutcome},
    report::LevelRow,
};
use crate::{
    args::Args, core_usage::CoreMeter, engine::Engine, output, process::Runner, workspace::Workspace,
};

/// Tests wait for databases and timers more than they compute: with two per core, a quarter of the cores is idle.
const TESTS_PER_CORE: usize = 3;

/// The set of tests to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Tests that need no daemon and no root.
    Fast,
    /// Tests that continuous integration runs.
    Full,
    /// All tests, including those that take long.
    Nightly,
}

/// Options of the command line.
#[derive(Clone)]
struct TestOptions {
    scope: Scope,
    /// Limit to changed crates, and those that depend on them.
    changed: Option<changed::ChangeBase>,
    /// Limit to tests whose name contains one of these strings.
    only: Vec<String>,
    /// Only the web UI.
    web: bool,
    /// Print where the time was spent.
    timings: bool,
    /// Number of parallel tests.
    threads: usize,
}

/// State that the levels of a run share.
struct TestContext<'a> {
    workspace: &'a Workspace,
    options: TestOptions,
    runner: Runner,
    /// Started by the first level that needs containers, stopped when the run ends.
    engine: Option<Engine>,
}

pub(crate) fn run(workspace: &Workspace, args: Args) -> Result<()> {
    let options = parse_options(args)?;
    let selection = levels::select_levels(&options);
    let whole = CoreMeter::start();
    let mut context = TestContext { workspace, options, runner: Runner::Foreground, engine: None };
    let rows = thread::scope(|scope| {
        let mut rows: Vec<LevelRow> = Vec::new();
        let mut background = None;
        for level in selection.foreground {
            output::print_heading(level.name);
            let row = run_level(&level, &mut context);
            output::print_message(&report::level_line(&row));
            let is_fatal = level.is_needed_by_the_rest && row.outcome.failure.is_some();
            rows.push(row);
            if is_fatal {
                output::print_message("skipped the remaining levels: they depend on this one");
                return rows;
            }
            if level.name == levels::BUILD_NAME {
                let (options, list) = (context.options.clone(), &selection.background);
                background = Some(scope.spawn(move || run_in_background(workspace, &options, list)));
            }
        }
        if let Some(levels) = background {
            rows.extend(levels.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        rows
    });
    drop(context.engine.take());
    output::print_heading("summary");
    output::print_message(&report::summary(&rows));
    if context.options.timings {
        output::print_heading("timings");
        output::print_message(&report::timings(&rows, context.options.threads));
    }
    let failed = rows.iter().filter(|row| row.outcome.failure.is_some()).count();
    if failed > 0 {
        output::print_heading("commands that repeat the failures");
        output::print_message(&report::rerun_lines(&rows));
    }
    ensure!(failed == 0, "{failed} of {} levels failed", rows.len());
    output::print_message(&format!("all levels passed in {}", report::format_duration(whole.usage().wall)));
    Ok(())
}

fn run_level(level: &Level, context: &mut TestContext) -> LevelRow {
    let meter = CoreMeter::start();
    let outcome = (level.run)(context).unwrap_or_else(LevelOutcome::failed);
    LevelRow { name: level.name, usage: meter.usage(), outcome }
}

/// Runs the levels beside those of the main thread. What each prints follows at its end.
fn run_in_background(workspace: &Workspace, options: &TestOptions, list: &[Level]) -> Vec<LevelRow> {
    let run = |level: &Level| -> Result<LevelRow> {
        let mut printed =
            tempfile::tempfile().context("failed to create a file for the output of a level")?;
        let runner = Runner::Background(printed.try_clone()?);
        let mut context = TestContext { workspace, options: options.clone(), runner, engine: None };
        let row = run_level(level, &mut context);
        let mut text = String::new();
        printed.rewind()?;
        printed.read_to_string(&mut text)?;
        output::print_heading(&format!("{} (ran beside the others)", level.name));
        output::print_message(text.trim_end());
        output::print_message(&report::level_line(&row));
        Ok(row)
    };
    let failed = |level: &Level, error| LevelRow {
        name: level.name,
        usage: CoreMeter::start().usage(),
        outcome: LevelOutcome::failed(error),
    };
    list.iter().map(|level| run(level).unwrap_or_else(|error| failed(level, error))).collect()
}

fn parse_options(mut args: Args) -> Result<TestOptions> {
    let (fast, nightly) = (args.take_flag("--fast"), args.take_flag("--nightly"));
    ensure!(!(fast && nightly), "`--fast` and `--nightly` cannot be used together");
    let scope = match (fast, nightly) {
        (true, _) => Scope::Fast,
        (_, true) => Scope::Nightly,
        (false, false) => Scope::Full,
    };
    let since = args.value::<String>("--since")?;
    let changed =
        (args.take_flag("--changed") || since.is_some()).then_some(changed::ChangeBase { revision: since });
    let mut only = Vec::new();
    while let Some(part) = args.value::<String>("--only")? {
        only.push(part);
    }
    let web = args.take_flag("--web");
    let timings = args.take_flag("--timings");
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let threads = match (args.value::<usize>("-j")?, args.value::<usize>("--jobs")?) {
        (Some(threads), _) | (None, Some(threads)) => threads,
        (None, None) => cores * TESTS_PER_CORE,
    };
    ensure!(threads > 0, "invalid `-j` value: expected a number above 0");
    args.finish()?;
    Ok(TestOptions { scope, changed, only, web, timings, threads })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<TestOptions> {
        parse_options(Args::new(line.split_whitespace().map(str::to_owned)))
    }

    #[test]
    fn without_options_the_full_scope_runs() {
        let options = read("").unwrap();
        assert_eq!(options.scope, Scope::Full);
        assert!(options.changed.is_none() && options.only.is_empty() && !options.timings);
    }

    #[test]
    fn options_choose_scope_crates_tests_and_threads() {
        let options = read("--fast --since v1 --only a --only b --timings -j 6").unwrap();
        assert_eq!(options.scope, Scope::Fast);
        assert_eq!(options.changed.unwrap().revision.as_deref(), Some("v1"));
        assert_eq!((options.only, options.threads), (vec!["a".to_owned(), "b".to_owned()], 6));
        assert_eq!(read("--nightly").unwrap().scope, Scope::Nightly);
    }

    #[test]
    fn invalid_or_contradictory_options_are_rejected() {
        assert!(read("--fast --nightly").is_err());
        assert!(read("-j 0").is_err());
        assert!(read("--slow").is_err());
    }

    #[test]
    fn each_scope_selects_its_levels() {
        let name = |level: &Level| level.name;
        let background = |line: &str| -> Vec<&str> {
            levels::select_levels(&read(line).unwrap()).background.iter().map(name).collect()
        };
        let names = |line: &str| -> Vec<&str> {
            levels::select_levels(&read(line).unwrap()).foreground.iter().map(name).collect()
        };
        assert_eq!(background(""), ["simulation", "lints", "web files"]);
        // The level `web` contains the checks of the files.
        assert_eq!(background("--nightly"), ["simulation", "lints"]);
        assert!(background("--fast").is_empty() && background("--changed").is_empty());
        assert_eq!(names("--fast"), ["format", "build", "tests", "lints", "tidy"]);
        assert_eq!(names("--only x"), ["set-up", "build", "tests"]);
        assert_eq!(names("--web"), ["build", "web"]);
        assert_eq!(
            names(""),
            ["set-up", "format", "tidy", "docs", "build", "tests", "faults", "bad requests", "binaries"]
        );
        let mut nightly = names("--nightly");
        assert_eq!(nightly.remove(6), "rented");
        assert_eq!(nightly.drain(9..).collect::<Vec<_>>(), ["package", "web"]);
        assert_eq!(nightly, names(""));
    }
}
