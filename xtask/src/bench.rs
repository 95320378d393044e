//! Benchmarks: an optimised build of the testkit's program, with a private Postgres and container engine beside it.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{
    args::Args,
    engine::{self, Engine},
    out,
    postgres::Postgres,
    process, venv,
    workspace::Workspace,
};

const BINARY: &str = "windlass-bench";

pub(crate) fn run(workspace: &Workspace, mut args: Args) -> Result<()> {
    let name =
        args.word().context("name a benchmark: engine, api, cli, agent, runs, load, growth, report")?;
    // `sim` is optimised too, and built in a third of the time.
    let profile = args.value::<String>("--profile")?.unwrap_or_else(|| "release".to_owned());
    ensure!(workspace.testkit_has(BINARY)?, "windlass-testkit has no binary `{BINARY}` yet");
    // Server and agent are measured as people run them: their own binaries, in their own processes.
    let packages = ["-p", "windlass-testkit", "-p", "windlass-cli", "-p", "windlass-agent"];
    process::run(workspace.cargo().args(["build", "--profile", &profile, "--bins"]).args(packages))?;
    let program = workspace.built(&profile, BINARY)?;

    let mut command = Command::new(program);
    let words = args.rest();
    command.current_dir(&workspace.root).arg(&name).args(&words);
    command.env("WINDLASS_BENCH_RESULTS", workspace.target()?.join("bench"));
    // Kept until the benchmark has ended: dropping it stops the database.
    let _postgres = match std::env::var_os("WINDLASS_BENCH_DATABASE_URL") {
        Some(_) => None,
        None if name == "report" => None,
        None => {
            let postgres = Postgres::start()?;
            out::talk(&format!("Postgres at {}", postgres.url));
            command.env("WINDLASS_BENCH_DATABASE_URL", &postgres.url);
            Some(postgres)
        }
    };
    if words.iter().any(|word| word == "--peer") {
        let (variable, home) = venv::for_peer(workspace)?;
        command.env(variable, home);
    }
    // Likewise; only some benchmarks start containers.
    let _engine = match std::env::var_os(engine::VARIABLE) {
        None if name == "agent" || name == "runs" => {
            let engine = Engine::start()?;
            command.env(engine::VARIABLE, &engine.socket);
            Some(engine)
        }
        _ => None,
    };
    process::run(&mut command)
}
