//! Fuzzing of the API: schemathesis generates requests from the OpenAPI document and sends them to a private server.

use std::{
    fs,
    hash::{BuildHasher as _, RandomState},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{args::Args, output, process, venv, workspace::Workspace};

/// Number of requests of the long form, for both callers together.
const CASES: u32 = 20_000;
/// Number of requests of the short form, which is a test level.
const CASES_SHORT: u32 = 1_000;
/// Fixed, so that a failure of the level can be reproduced.
const SEED_SHORT: u64 = 17;
const DOCUMENT: &str = "docs/api/openapi.json";
/// Runs both callers, one after the other.
const BOTH_CALLERS: &str = "both";
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// The server is private and deleted at the end.
const TOKEN: &str = "fuzz-only-0123456789abcdef0123456789abcdef";

pub(crate) fn run(workspace: &Workspace, mut args: Args) -> Result<()> {
    let what = args.word().context("missing fuzz target: expected `api`")?;
    ensure!(what == "api", "unknown fuzz target `{what}`: expected `api`");
    let cases = args.value("--cases")?.unwrap_or(CASES);
    let seed = match args.value("--seed")? {
        Some(seed) => seed,
        None => random_seed(),
    };
    let caller = args.value("--as")?.unwrap_or_else(|| BOTH_CALLERS.to_owned());
    ensure!(
        [BOTH_CALLERS, "admin", "user"].contains(&caller.as_str()),
        "invalid `--as` value: expected `admin`, `user` or `{BOTH_CALLERS}`"
    );
    args.finish()?;
    process::run(workspace.cargo().args(["build", "-p", "windlass-cli"]))?;
    run_schemathesis(workspace, cases, seed, &caller)
}

/// Uses the random start value of the standard library's hasher.
fn random_seed() -> u64 {
    RandomState::new().hash_one(std::process::id()) >> 32
}

/// Runs the short form with the binary that was built for the tests.
pub(crate) fn run_short(workspace: &Workspace) -> Result<()> {
    run_schemathesis(workspace, CASES_SHORT, SEED_SHORT, BOTH_CALLERS)
}

/// Runs the long form with a new seed.
pub(crate) fn run_long(workspace: &Workspace) -> Result<()> {
    run_schemathesis(workspace, CASES, random_seed(), BOTH_CALLERS)
}

fn run_schemathesis(workspace: &Workspace, cases: u32, seed: u64, caller: &str) -> Result<()> {
    let python = venv::SCHEMATHESIS.ensure(workspace)?.join("bin/python");
    let scratch = process::ScratchDir::new("fuzz")?;
    let (data, work) = (scratch.path().join("server"), scratch.path().join("work"));
    for dir in [&data, &work] {
        fs::create_dir(dir)?;
    }
    let log = scratch.path().join("server.log");
    let mut command = Command::new(workspace.built("debug", "windlass")?);
    command.args(["server", "--host", "127.0.0.1", "--port", "0", "--no-local", "--log-level", "debug"]);
    command
        .arg("--data-dir")
        .arg(&data)
        .env("WINDLASS_SERVER_ADMIN_TOKEN", TOKEN)
        .env("HOME", scratch.path());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&log)?);
    let mut server = process::ChildGuard::spawn(&mut command, "TERM")?;
    let running = data.join("running.json");
    process::wait_until(&mut server, READY_TIMEOUT, "the server is ready", || running.exists())?;
    let running: Value = serde_json::from_str(&fs::read_to_string(&running)?)?;
    let url = running["url"].as_str().context("cannot find the server's URL in `running.json`")?;
    let mut driver = Command::new(python);
    driver
        .arg(workspace.root.join("xtask/fuzz/api.py"))
        .arg(workspace.root.join(DOCUMENT))
        .arg(url)
        .arg(&work);
    driver.args([cases.to_string(), seed.to_string()]).arg(caller).env("WINDLASS_SERVER_ADMIN_TOKEN", TOKEN);
    let sent = process::run(driver.current_dir(&work));
    server.check_alive().context("the server did not survive the requests")?;
    drop(server);
    let log = fs::read_to_string(&log)?;
    // No request may inject a line into the log: each line must be one record.
    let message = |line: &&str| !line.starts_with("windlass is ready at ");
    let forged = log.lines().filter(message).find(|line| serde_json::from_str::<Value>(line).is_err());
    let panics: Vec<&str> = log.lines().filter(|line| line.contains("panicked at")).collect();
    if sent.is_err() || !panics.is_empty() {
        let last: Vec<&str> = log.lines().rev().take(20).collect();
        output::print_message(&format!("last lines of the server's log, newest first:\n{}", last.join("\n")));
    }
    if !panics.is_empty() {
        bail!("the server panicked {} times: {}", panics.len(), panics.join("; "));
    }
    if let Some(line) = forged {
        bail!("a line of the server's log is not a JSON record: {line}");
    }
    sent.with_context(|| {
        format!("fuzzing failed; repeat it with `cargo xtask fuzz api --cases {cases} --seed {seed}`")
    })
}
