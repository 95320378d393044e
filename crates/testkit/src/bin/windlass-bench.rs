//! `windlass-bench engine|api|cli|agent|runs`: figures for people; `cargo xtask bench NAME` builds and starts it.

use anyhow::{Context, Result, bail};
use windlass_testkit::{bench, server::binary};

fn main() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let name = std::env::args().nth(1).context("want a name: engine, api, cli, agent, runs")?;
    let postgres = std::env::var("WINDLASS_BENCH_DATABASE_URL").ok();
    match name.as_str() {
        "engine" => runtime.block_on(bench::engine::run(postgres)),
        "api" => runtime.block_on(bench::api::run(&binary("windlass")?)),
        "cli" => runtime.block_on(bench::cli::run(&binary("windlass")?)),
        "agent" => runtime.block_on(bench::agent::run(&binary("windlass-agent")?)),
        "runs" => {
            let (windlass, agent) = (binary("windlass")?, binary("windlass-agent")?);
            let binaries = bench::runs::Binaries { windlass: &windlass, agent: &agent };
            runtime.block_on(bench::runs::run(&binaries, postgres))
        }
        _ => bail!("unknown benchmark `{name}`; want engine, api, cli, agent or runs"),
    }
}
