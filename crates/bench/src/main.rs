//! `windlass-bench NAME`: runs a benchmark; `cargo xtask bench NAME` builds and starts it.

use anyhow::{Context, Result, bail};
use windlass_bench::{self as bench, flags::Flags, runs::Binaries};
use windlass_testenv::server::binary_path;

/// The allocator of `windlass`: the measured proxy runs in this program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const NAMES: &str = "engine, api, cli, agent, containers, runs, cost, isolation, dispatch, load, jobs, spot, sharing, reclaim, growth, proxy, report";

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let Some(done) = words.split_first().and_then(|(word, rest)| bench::proxy::run_part(word, rest)) {
        return done;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let mut words = words.into_iter();
    let name = words.next().with_context(|| format!("missing benchmark name: expected one of {NAMES}"))?;
    let mut flags = Flags::new(words);
    let postgres = std::env::var("WINDLASS_BENCH_DATABASE_URL").ok();
    let (windlass, agent) = (binary_path("windlass")?, binary_path("windlass-agent")?);
    let binaries = Binaries { windlass: &windlass, agent: &agent };
    match name.as_str() {
        "engine" => flags.finish().and_then(|()| runtime.block_on(bench::engine::run(postgres))),
        "api" => flags.finish().and_then(|()| runtime.block_on(bench::api::run(&windlass))),
        "cli" => flags.finish().and_then(|()| runtime.block_on(bench::cli::run(&windlass))),
        "agent" => flags.finish().and_then(|()| runtime.block_on(bench::agent::run(&agent))),
        "containers" => flags.finish().and_then(|()| runtime.block_on(bench::agent::containers::run(&agent))),
        "runs" => {
            let peer = flags.value::<String>("--peer")?;
            flags.finish()?;
            match peer.as_deref() {
                None => runtime.block_on(bench::runs::run(&binaries, postgres)),
                Some("dstack") => runtime.block_on(bench::peer::run(&binaries)),
                Some(other) => bail!("unknown `--peer` value `{other}`: expected `dstack`"),
            }
        }
        "isolation" => {
            flags.finish().and_then(|()| runtime.block_on(bench::runs::measure_isolation(&binaries)))
        }
        "cost" => {
            let plan = bench::cost::CostPlan::read(&mut flags, postgres)?;
            flags.finish()?;
            runtime.block_on(bench::cost::run(&binaries, &plan))
        }
        "dispatch" => flags.finish().and_then(|()| runtime.block_on(bench::dispatch::run())),
        "growth" => flags.finish().and_then(|()| runtime.block_on(bench::growth::run(&binaries))),
        "proxy" => {
            let plan = bench::proxy::ProxyPlan::read(&mut flags)?;
            flags.finish()?;
            runtime.block_on(bench::proxy::run(plan))
        }
        // In the root of the repository: adds the results to the documentation.
        "report" => {
            flags.finish()?;
            bench::report::run(&std::env::current_dir()?, &bench::results::results_dir()?)
        }
        "load" => {
            let plan = bench::load::LoadPlan::read(&mut flags, postgres)?;
            flags.finish()?;
            runtime.block_on(bench::load::run(&binaries, &plan))
        }
        "jobs" => {
            let plan = bench::jobs::JobsPlan::read(&mut flags, postgres)?;
            flags.finish()?;
            runtime.block_on(bench::jobs::run(&binaries, &plan))
        }
        // Likewise: its table is in the page about spot policies.
        "spot" => {
            let plan = bench::spot::SpotPlan::read(&mut flags)?;
            flags.finish()?;
            bench::spot::run(&std::env::current_dir()?, &plan)
        }
        // Likewise: its table is in the page about sharing.
        "sharing" => {
            flags.finish()?;
            bench::sharing::run(&std::env::current_dir()?)
        }
        // Likewise: its chart is on that page.
        "reclaim" => {
            flags.finish()?;
            runtime.block_on(bench::reclaim::run(&binaries, &std::env::current_dir()?))
        }
        _ => bail!("unknown benchmark `{name}`: expected one of {NAMES}"),
    }
}
