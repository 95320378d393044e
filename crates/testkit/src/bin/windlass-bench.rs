//! `windlass-bench engine|api`: figures for people; `cargo xtask bench NAME` builds and starts it.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use windlass_testkit::bench;

fn main() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let name = std::env::args().nth(1).context("want a name: engine, api")?;
    match name.as_str() {
        "engine" => runtime.block_on(bench::engine::run(std::env::var("WINDLASS_BENCH_DATABASE_URL").ok())),
        "api" => runtime.block_on(bench::api::run(&server()?)),
        _ => bail!("unknown benchmark `{name}`; want engine or api"),
    }
}

/// The `windlass` binary that was built beside this one.
fn server() -> Result<PathBuf> {
    let here = std::env::current_exe()?;
    let server = here.parent().context("no directory")?.join("windlass");
    if !server.is_file() {
        bail!("`{}` is not there; build windlass-cli in the same profile", server.display());
    }
    Ok(server)
}
