//! Every level of tests, in order, with a table at the end.

use std::{
    fmt::Write,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    elf,
    engine::{self, Engine},
    faults, fuzz, out, process, setup, sim, tidy, venv,
    workspace::Workspace,
};

const SIM_SEEDS: u64 = 200;
/// Of the container queue, each of which has two hundred containers.
const QUEUE_SEEDS: u64 = 20;
/// Crates whose tests need nothing but a compiler.
const FAST: &[&str] = &["windlass-model", "windlass-engine", "windlass-api", "xtask"];

struct Level {
    name: &'static str,
    run: fn(&Workspace) -> Result<()>,
}

const LEVELS: &[Level] = &[
    Level { name: "set-up", run: setup::ensure },
    Level { name: "format", run: format },
    Level { name: "lints", run: lints },
    Level { name: "tests", run: tests },
    Level { name: "faults", run: faults },
    Level { name: "mutants", run: mutants },
    Level { name: "simulation", run: simulation },
    Level { name: "binaries", run: binaries },
    Level { name: "bad requests", run: fuzz::short },
    Level { name: "tidy", run: tidy::run },
];

const FAST_LEVELS: &[Level] = &[
    Level { name: "format", run: format },
    Level { name: "lints", run: lints },
    Level { name: "fast tests", run: fast_tests },
    Level { name: "tidy", run: tidy::run },
];

pub(crate) fn run(workspace: &Workspace, fast: bool) -> Result<()> {
    let start = Instant::now();
    let mut rows = Vec::new();
    for level in if fast { FAST_LEVELS } else { LEVELS } {
        out::heading(level.name);
        let begun = Instant::now();
        let result = (level.run)(workspace);
        if let Err(error) = &result {
            out::talk(&format!("{} failed: {error:#}", level.name));
        }
        rows.push((level.name, begun.elapsed(), result));
    }
    out::heading("summary");
    out::talk(&table(&rows));
    let failed = rows.iter().filter(|(_, _, result)| result.is_err()).count();
    ensure!(failed == 0, "{failed} of {} levels failed", rows.len());
    out::talk(&format!("all levels passed in {}", seconds(start.elapsed())));
    Ok(())
}

fn table(rows: &[(&str, Duration, Result<()>)]) -> String {
    let mut text = String::new();
    for (name, took, result) in rows {
        let (verdict, note) = match result {
            Ok(()) => ("ok", String::new()),
            Err(error) => ("FAILED", format!("  {error:#}")),
        };
        let _ = writeln!(text, "{name:<12} {verdict:<7} {:>9}{note}", seconds(*took));
    }
    text.trim_end().to_owned()
}

fn seconds(took: Duration) -> String {
    format!("{:.1} s", took.as_secs_f64())
}

fn format(workspace: &Workspace) -> Result<()> {
    process::run(workspace.cargo().args(["fmt", "--all", "--check"]))
}

fn lints(workspace: &Workspace) -> Result<()> {
    let args = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    process::run(workspace.cargo().args(args))
}

/// Tests wait for databases and timers more than they compute: two per core. Nextest's own file cannot
/// say that.
fn threads() -> Result<String> {
    let cores = std::thread::available_parallelism().context("count the cores")?;
    Ok((cores.get() * 2).to_string())
}

fn nextest(workspace: &Workspace, args: &[&str]) -> Result<Command> {
    let mut command = workspace.cargo();
    command.args(["nextest", "run", "--profile", "ci", "--test-threads", &threads()?]).args(args);
    Ok(command)
}

/// All tests, and the programs they start.
fn built_tests(workspace: &Workspace) -> Command {
    let mut command = workspace.cargo();
    command.args(["nextest", "run", "--workspace", "--no-run"]);
    command
}

fn tests(workspace: &Workspace) -> Result<()> {
    process::run(&mut built_tests(workspace))?;
    let engine = Engine::start().context("start a container engine for the tests")?;
    let venvs = venv::for_tests(workspace)?;
    let mut command = nextest(workspace, &["--workspace"])?;
    process::run(command.env(engine::VARIABLE, &engine.socket).envs(venvs))
}

/// What the tests were built as serves here too.
fn faults(workspace: &Workspace) -> Result<()> {
    process::run(&mut built_tests(workspace))?;
    faults::each_once(workspace)
}

fn fast_tests(workspace: &Workspace) -> Result<()> {
    let args: Vec<&str> = FAST.iter().flat_map(|name| ["-p", name]).collect();
    process::run(&mut nextest(workspace, &args)?)
}

/// Known bugs are planted: the simulation proves that its checkers find each of them.
fn mutants(workspace: &Workspace) -> Result<()> {
    // Optimised as the simulation is: a planted bug may need hundreds of seeds to show.
    let args = sim::BUILD.iter().map(|&arg| if arg == "--profile" { "--cargo-profile" } else { arg });
    let args: Vec<&str> = args.chain(["mutants::"]).collect();
    process::run(&mut nextest(workspace, &args)?)
}

fn simulation(workspace: &Workspace) -> Result<()> {
    sim::play(workspace, &sim::Play { seeds: SIM_SEEDS, ..sim::Play::default() })?;
    sim::play(workspace, &sim::Play { seeds: QUEUE_SEEDS, queue: true, ..sim::Play::default() })
}

/// Both binaries are static, say their version, and the examples are valid by the shipped checker.
fn binaries(workspace: &Workspace) -> Result<()> {
    // Both compile as they are shipped, without what tests switch on in the crates below them. What is then
    // looked at was linked for the tests: linking it all once more would show nothing else.
    process::run(workspace.cargo().args(["check", "-p", "windlass-cli", "-p", "windlass-agent"]))?;
    process::run(&mut built_tests(workspace))?;
    for name in ["windlass", "windlass-agent"] {
        let path = workspace.built("debug", name)?;
        elf::check_static(&path)?;
        out::talk(&format!("{name} is static"));
    }
    let files = workspace.files()?;
    let examples = tidy::examples(&files);
    if examples.is_empty() {
        bail!("`examples/` holds no configuration");
    }
    let windlass = workspace.built("debug", "windlass")?;
    let mut check = std::process::Command::new(windlass);
    process::run(check.current_dir(&workspace.root).arg("check").args(&examples))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_names_what_failed() {
        let rows = [
            ("format", Duration::from_millis(1500), Ok(())),
            ("tests", Duration::from_secs(61), Err(anyhow::anyhow!("2 tests failed"))),
        ];
        let expect = "\
format       ok          1.5 s
tests        FAILED     61.0 s  2 tests failed";
        assert_eq!(table(&rows), expect);
    }
}
