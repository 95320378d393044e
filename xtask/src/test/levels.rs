//! Test levels, in the order in which they run.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::{Scope, TestContext, TestOptions, changed};
use crate::{
    dist, docs, elf,
    engine::{self, Engine},
    faults, fuzz,
    junit::{self, TestResult},
    lxd_image, output, process, setup, sim, tidy, venv, web,
};

/// Number of seeds that are the same in every run.
const SEEDS_FIXED: u64 = 200;
/// Number of fixed seeds of the container queue; each has two hundred containers.
const QUEUE_SEEDS_FIXED: u64 = 20;
/// Number of fixed seeds of projects that share hosts.
const SHARED_SEEDS_FIXED: u64 = 20;

/// Variable with the directory of the binaries of a cluster.
const KUBERNETES_BINARIES: &str = "WINDLASS_KUBE_BIN";

pub(super) struct Level {
    pub(super) name: &'static str,
    pub(super) run: fn(&mut TestContext) -> Result<LevelOutcome>,
    pub(super) is_needed_by_the_rest: bool,
}

/// The result of a level.
#[derive(Default)]
pub(super) struct LevelOutcome {
    /// One line for the summary.
    pub(super) summary: String,
    pub(super) failure: Option<String>,
    /// Commands that repeat the failures.
    pub(super) repeat: Vec<String>,
    pub(super) tests: Vec<TestResult>,
    /// Duration of the tests themselves.
    pub(super) running: Option<Duration>,
}

impl LevelOutcome {
    pub(super) fn failed(error: anyhow::Error) -> Self {
        Self { failure: Some(format!("{error:#}")), ..Self::default() }
    }

    fn passed(summary: impl Into<String>) -> Self {
        Self { summary: summary.into(), ..Self::default() }
    }

    /// Passed, or failed with the command that repeats it.
    fn from_result(result: Result<()>, summary: impl Into<String>, repeat: &str) -> Self {
        match result {
            Ok(()) => Self::passed(summary),
            Err(error) => Self { repeat: vec![repeat.to_owned()], ..Self::failed(error) },
        }
    }
}

const SET_UP: Level = Level { name: "set-up", run: set_up, is_needed_by_the_rest: true };
const FORMAT: Level = Level { name: "format", run: format, is_needed_by_the_rest: false };
const TIDY: Level = Level { name: "tidy", run: tidy, is_needed_by_the_rest: false };
const DOCS: Level = Level { name: "docs", run: docs, is_needed_by_the_rest: false };
pub(super) const BUILD_NAME: &str = "build";
const BUILD: Level = Level { name: BUILD_NAME, run: build, is_needed_by_the_rest: true };
const TESTS: Level = Level { name: "tests", run: tests, is_needed_by_the_rest: false };
const RENTED: Level = Level { name: "rented", run: rented, is_needed_by_the_rest: false };
const SIMULATION: Level = Level { name: "simulation", run: simulation, is_needed_by_the_rest: false };
const FAULTS: Level = Level { name: "faults", run: faults, is_needed_by_the_rest: false };
const BAD_REQUESTS: Level = Level { name: "bad requests", run: bad_requests, is_needed_by_the_rest: false };
const BINARIES: Level = Level { name: "binaries", run: binaries, is_needed_by_the_rest: false };
const PACKAGE: Level = Level { name: "package", run: package, is_needed_by_the_rest: false };
const WEB_FILES: Level = Level { name: "web files", run: web_files, is_needed_by_the_rest: false };
const WEB: Level = Level { name: "web", run: web, is_needed_by_the_rest: false };
const LINTS: Level = Level { name: "lints", run: lints, is_needed_by_the_rest: false };

/// The levels of a run.
pub(super) struct Selection {
    /// One after the other.
    pub(super) foreground: Vec<Level>,
    /// One after the other, beside those that follow the build, while a core is idle. The tests wait for a quarter of their
    /// time. The first of them does not call cargo: it would hold the lock that the level `tests` needs for its start.
    pub(super) background: Vec<Level>,
}

pub(super) fn select_levels(options: &TestOptions) -> Selection {
    let only = |foreground| Selection { foreground, background: Vec::new() };
    if options.web {
        return only(vec![BUILD, WEB]);
    }
    if !options.only.is_empty() {
        return only(vec![SET_UP, BUILD, TESTS]);
    }
    match (options.scope, &options.changed) {
        (Scope::Fast, _) => only(vec![FORMAT, BUILD, TESTS, LINTS, TIDY]),
        (Scope::Full | Scope::Nightly, Some(_)) => {
            only(vec![SET_UP, FORMAT, TIDY, DOCS, BUILD, TESTS, LINTS])
        }
        (Scope::Full, None) => Selection {
            foreground: vec![SET_UP, FORMAT, TIDY, DOCS, BUILD, TESTS, FAULTS, BAD_REQUESTS, BINARIES],
            background: vec![SIMULATION, LINTS, WEB_FILES],
        },
        (Scope::Nightly, None) => Selection {
            foreground: vec![
                SET_UP,
                FORMAT,
                TIDY,
                DOCS,
                BUILD,
                TESTS,
                RENTED,
                FAULTS,
                BAD_REQUESTS,
                BINARIES,
                PACKAGE,
                WEB,
            ],
            background: vec![SIMULATION, LINTS],
        },
    }
}

fn set_up(context: &mut TestContext) -> Result<LevelOutcome> {
    setup::ensure_for_tests(context.workspace)?;
    Ok(LevelOutcome::passed("requirements installed"))
}

fn format(context: &mut TestContext) -> Result<LevelOutcome> {
    let checked = process::run(context.workspace.cargo().args(["fmt", "--all", "--check"]));
    Ok(LevelOutcome::from_result(checked, "formatted", "cargo fmt --all --check"))
}

fn tidy(context: &mut TestContext) -> Result<LevelOutcome> {
    Ok(LevelOutcome::from_result(tidy::run(context.workspace), "no problems", "cargo xtask tidy"))
}

/// Builds the documentation site and discards it.
fn docs(context: &mut TestContext) -> Result<LevelOutcome> {
    let checked = docs::check(context.workspace);
    let summary = checked.as_ref().map_or_else(|_| String::new(), |pages| format!("{pages} pages"));
    Ok(LevelOutcome::from_result(checked.map(drop), summary, "cargo xtask docs --check"))
}

/// Runs clippy on everything as built for tests, and on the two binaries as shipped: without the code that only tests
/// need.
fn lints(context: &mut TestContext) -> Result<LevelOutcome> {
    let packages = package_flags(context)?;
    let linted = context.runner.run(context.workspace.cargo().arg("clippy").args(&packages).args([
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ]));
    let shipped = ["clippy", "-p", "windlass-cli", "-p", "windlass-agent", "--", "-D", "warnings"];
    let linted = linted.and_then(|()| context.runner.run(context.workspace.cargo().args(shipped)));
    Ok(LevelOutcome::from_result(
        linted,
        "no warnings",
        "cargo clippy --workspace --all-targets -- -D warnings",
    ))
}

/// `--workspace`, or the packages that `--changed` selected.
fn package_flags(context: &TestContext) -> Result<Vec<String>> {
    let Some(since) = &context.options.changed else { return Ok(vec!["--workspace".to_owned()]) };
    let packages = changed::changed_packages(context.workspace, since)?;
    if packages.is_empty() {
        bail!("no crate changed: nothing to test");
    }
    Ok(packages.into_iter().flat_map(|name| ["-p".to_owned(), name]).collect())
}

/// Builds everything that the other levels run, at once.
fn build(context: &mut TestContext) -> Result<LevelOutcome> {
    let mut command = nextest(context)?;
    process::run(command.arg("--no-run"))?;
    if context.options.scope != Scope::Fast {
        venv::ensure_for_tests(context.workspace)?;
    }
    Ok(LevelOutcome::passed("all tests and the programs that they start"))
}

fn profile(scope: Scope) -> &'static str {
    match scope {
        Scope::Fast => "fast",
        Scope::Full => "ci",
        Scope::Nightly => "nightly",
    }
}

/// `cargo nextest run` with the options of the command line.
fn nextest(context: &TestContext) -> Result<Command> {
    let mut command = context.workspace.cargo();
    command.args(["nextest", "run", "--profile", profile(context.options.scope)]);
    command.args(package_flags(context)?);
    // A failed test reports its observation and location; twenty frames of the runtime would hide that.
    command.env("RUST_BACKTRACE", "0");
    Ok(command)
}

fn tests(context: &mut TestContext) -> Result<LevelOutcome> {
    let mut command = nextest(context)?;
    command.args(["--test-threads", &context.options.threads.to_string(), "--no-tests", "fail"]);
    command.args(&context.options.only);
    if context.options.scope != Scope::Fast {
        command
            .env(engine::SOCKET_VARIABLE, shared_engine(context)?)
            .envs(venv::ensure_for_tests(context.workspace)?);
    }
    if context.options.scope == Scope::Nightly {
        let seed = sim::todays_first_seed().to_string();
        output::print_message(&format!("property tests: set PROPTEST_RNG_SEED={seed} to repeat the cases"));
        command.env("PROPTEST_RNG_SEED", seed);
    }
    // Nextest stores its reports below the workspace, independent of cargo's target directory.
    let report =
        context.workspace.root.join("target/nextest").join(profile(context.options.scope)).join("junit.xml");
    // The report of an earlier run would list other tests.
    let _ = std::fs::remove_file(&report);
    let began = std::time::Instant::now();
    let ran = process::run(&mut command);
    let running = began.elapsed();
    let tests = match junit::read_report(&report) {
        Ok(tests) => tests,
        // Nextest stopped before the first test.
        Err(missing) => return Ok(LevelOutcome::failed(ran.err().unwrap_or(missing))),
    };
    let repeat: Vec<String> = tests.iter().filter(|test| test.failed).map(TestResult::repeat).collect();
    let (all, failed) = (tests.len(), repeat.len());
    if let Some(hang) = context.engine.as_ref().filter(|_| failed > 0).and_then(Engine::explain_hang) {
        output::print_message(&hang);
    }
    Ok(LevelOutcome {
        summary: format!("{all} tests, {failed} failed"),
        failure: ran.err().map(|error| format!("{failed} of {all} tests failed: {error:#}")),
        repeat,
        tests,
        running: Some(running),
    })
}

/// Runs the tests with machines of a real LXD, on a real Kubernetes cluster where its binaries are, and with Apptainer where it
/// is installed. Elsewhere only
/// the tests that need none run, in the level `tests`, and the summary says so.
fn rented(context: &mut TestContext) -> Result<LevelOutcome> {
    setup::ensure_for_rented()?;
    let archive = context.workspace.root.join("../shared/kube");
    let has_cluster = std::env::var_os(KUBERNETES_BINARIES).is_some() || archive.is_dir();
    let mut filters = vec!["(binary(it) | binary(e2e)) & test(/^lxd::/)"];
    let mut summary = "machines of a real LXD".to_owned();
    if has_cluster {
        filters.push("test(/real_cluster/)");
        summary.push_str(", pods of a real cluster");
    }
    let has_apptainer = process::succeeds("apptainer", &["--version"]);
    if has_apptainer {
        filters.push("test(/x5_an_apptainer/)");
        summary.push_str(", containers of Apptainer");
    }
    if !has_cluster {
        summary.push_str(&format!(
            "; NOT RUN on a cluster: set `{KUBERNETES_BINARIES}` to a directory with \
             kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and etcd"
        ));
    }
    if !has_apptainer {
        summary.push_str("; NOT RUN in Apptainer: it is not installed");
    }
    let filter = filters.join(" | ");
    let mut command = context.workspace.cargo();
    command.args(["nextest", "run", "--profile", profile(context.options.scope), "--workspace"]);
    command.args(["--ignore-default-filter", "-E", filter.as_str()]);
    command.env("RUST_BACKTRACE", "0").envs(lxd_image::ensure_for_tests(context.workspace)?);
    Ok(LevelOutcome::from_result(process::run(&mut command), summary, "cargo xtask test --nightly"))
}

/// Returns the engine that all levels of a run share.
fn shared_engine(context: &mut TestContext) -> Result<std::path::PathBuf> {
    if context.engine.is_none() {
        context.engine = Some(Engine::start().context("failed to start a container engine for the tests")?);
    }
    context.engine.as_ref().map(|engine| engine.socket.clone()).context("no container engine")
}

/// Runs the fixed seeds, and the seeds of the current day, which have not been run before.
fn simulation(context: &mut TestContext) -> Result<LevelOutcome> {
    let (new, queue_new, shared_new) = match context.options.scope {
        Scope::Fast | Scope::Full => (200, 10, 5),
        Scope::Nightly => (5_000, 200, 500),
    };
    let day = sim::todays_first_seed();
    context.runner.print_message(&format!(
        "new seeds of today: {new} from {day}, {queue_new} of the container queue, and {shared_new} of shared hosts"
    ))?;
    let kinds = [
        ("", SEEDS_FIXED, new),
        (" --queue", QUEUE_SEEDS_FIXED, queue_new),
        (" --shared", SHARED_SEEDS_FIXED, shared_new),
    ];
    let plays = kinds.into_iter().flat_map(|(flag, fixed, new)| [(fixed, 0, flag), (new, day, flag)]);
    let mut outcome = LevelOutcome::passed(format!(
        "{} seeds of runs, {} of the container queue and {} of shared hosts; {new}, {queue_new} and {shared_new} of them \
         new, from {day}",
        SEEDS_FIXED + new,
        QUEUE_SEEDS_FIXED + queue_new,
        SHARED_SEEDS_FIXED + shared_new
    ));
    for (seeds, from, flag) in plays {
        let (queue, shared) = (flag == " --queue", flag == " --shared");
        let play = sim::SimOptions { seeds, from, queue, shared, ..sim::SimOptions::default() };
        if let Err(error) = sim::run_built(context.workspace, &play, &context.runner) {
            outcome.failure = Some(format!("{error:#}"));
            outcome.repeat.push(format!(
                "cargo xtask sim --from {from} --seeds {seeds}{flag}   (each violation above names its seed)"
            ));
        }
    }
    Ok(outcome)
}

fn faults(context: &mut TestContext) -> Result<LevelOutcome> {
    let engine = shared_engine(context)?;
    let played = match context.options.scope {
        Scope::Fast | Scope::Full => faults::run_each_once(context.workspace, &engine),
        Scope::Nightly => faults::run_five_times(context.workspace, &engine),
    };
    Ok(LevelOutcome::from_result(
        played,
        "no violations",
        "cargo xtask faults   (each violation above names its row and seed)",
    ))
}

fn bad_requests(context: &mut TestContext) -> Result<LevelOutcome> {
    let sent = match context.options.scope {
        Scope::Fast | Scope::Full => fuzz::run_short(context.workspace),
        Scope::Nightly => fuzz::run_long(context.workspace),
    };
    Ok(LevelOutcome::from_result(
        sent,
        "no unexpected responses",
        "cargo xtask fuzz api   (the failure above names its seed)",
    ))
}

/// Builds the files of the web UI again, and tries its pages in a browser at the server of the tests.
/// Checks the sources and the committed files of the web UI, without a browser. Where Node 20 cannot be installed, as on
/// Debian 12, the summary says that they were not checked; `--web` and `--nightly` need it.
fn web_files(context: &mut TestContext) -> Result<LevelOutcome> {
    if let Err(missing) = setup::ensure_for_web_files() {
        return Ok(LevelOutcome::passed(format!("NOT RUN: {missing:#}")));
    }
    let checked = web::check_files(context.workspace, &context.runner);
    let summary = "types, contract, unit tests, committed files; pages with --web";
    Ok(LevelOutcome::from_result(checked, summary, "cargo xtask test --web"))
}

fn web(context: &mut TestContext) -> Result<LevelOutcome> {
    let checked = web::check(context.workspace);
    Ok(LevelOutcome::from_result(
        checked,
        "reproducible, within the budgets, pages without findings",
        "cargo xtask test --web",
    ))
}

/// Packages the binaries of the tests, and installs, upgrades and removes the Debian package.
fn package(context: &mut TestContext) -> Result<LevelOutcome> {
    let built = context.workspace.built("debug", "windlass")?;
    let dir = built.parent().context("the binary has no directory")?;
    let tried = dist::run_with_binaries(context.workspace, dir);
    Ok(LevelOutcome::from_result(
        tried,
        "installed, upgraded and removed",
        "cargo xtask dist --profile dev --try",
    ))
}

/// Checks that both binaries are static, and that the shipped checker accepts the examples.
fn binaries(context: &mut TestContext) -> Result<LevelOutcome> {
    let workspace = context.workspace;
    for name in ["windlass", "windlass-agent"] {
        elf::check_static(&workspace.built("debug", name)?)?;
    }
    let files = workspace.files()?;
    let examples = tidy::check_examples(&files);
    if examples.is_empty() {
        bail!("`examples/` contains no configuration");
    }
    let mut check = Command::new(workspace.built("debug", "windlass")?);
    process::run(check.current_dir(&workspace.root).arg("check").args(&examples))?;
    Ok(LevelOutcome::passed(format!("both binaries are static; {} examples are valid", examples.len())))
}
