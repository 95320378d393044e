//! Benchmarks: a release build of the testkit's program, with a private Postgres beside it.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{args::Args, out, postgres::Postgres, process, workspace::Workspace};

const BINARY: &str = "windlass-bench";

pub(crate) fn run(workspace: &Workspace, mut args: Args) -> Result<()> {
    let name = args.word().context("name a benchmark: engine, api, …")?;
    ensure!(workspace.testkit_has(BINARY)?, "windlass-testkit has no binary `{BINARY}` yet");
    // The server is measured as people run it: its own binary, in its own process.
    let build = ["build", "--release", "-p", "windlass-testkit", "-p", "windlass-cli", "--bins"];
    process::run(workspace.cargo().args(build))?;
    let program = workspace.built("release", BINARY)?;

    let mut command = Command::new(program);
    command.current_dir(&workspace.root).arg(name).args(args.rest());
    // Kept until the benchmark has ended: dropping it stops the database.
    let _postgres = match std::env::var_os("WINDLASS_BENCH_DATABASE_URL") {
        Some(_) => None,
        None => {
            let postgres = Postgres::start()?;
            out::talk(&format!("Postgres at {}", postgres.url));
            command.env("WINDLASS_BENCH_DATABASE_URL", &postgres.url);
            Some(postgres)
        }
    };
    process::run(&mut command)
}
