//! Comparison of the windlass proxy with Debian's nginx, at the same time and with the same upstream.
//!
//! The proxy has a core for itself; upstream and clients share the other. The other core may therefore saturate first:
//! CPU time per request shows what throughput alone would hide. Both are measured alternately, and the median of the
//! rounds counts.

mod node;
mod programs;
mod streams;

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, ensure};

use self::programs::{PinnedProcess, WrkRun, WrkSample};
use super::{flags::Flags, results::BenchResults};
use windlass_testenv::{
    closed_loop::{self, RequestLoad},
    process,
};
use windlass_testkit::temp_dir;

/// The core of the proxy, and that of all other processes.
const PROXY_CORE: u32 = 0;
const OTHER_CORE: u32 = 1;
/// Open files in addition to those of clients and replicas.
const EXTRA_FILES: u64 = 1_000;

/// Measurements and their duration.
#[derive(Clone, Copy, Debug)]
pub struct ProxyPlan {
    rounds: usize,
    lasts: Duration,
    connections: u32,
    streams: usize,
}

impl ProxyPlan {
    pub fn read(flags: &mut Flags) -> Result<Self> {
        let seconds = flags.value("--seconds")?.unwrap_or(5);
        let rounds = flags.value("--rounds")?.unwrap_or(3);
        ensure!(seconds > 0 && rounds > 0, "`--seconds` and `--rounds` must be above 0");
        Ok(Self {
            rounds,
            lasts: Duration::from_secs(seconds),
            connections: flags.value("--connections")?.unwrap_or(64),
            streams: flags.value("--streams")?.unwrap_or(5_000),
        })
    }
}

/// Runs a part of the benchmark that needs another core: `windlass-bench WORD …`.
pub fn run_part(word: &str, arguments: &[String]) -> Option<Result<()>> {
    match word {
        "proxy-node" => Some(node::run(arguments)),
        "proxy-upstream" => Some(programs::run_upstream(arguments)),
        _ => None,
    }
}

/// The measured proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProxySystem {
    Windlass,
    Nginx,
}

impl ProxySystem {
    const BOTH: [Self; 2] = [Self::Windlass, Self::Nginx];

    const fn name(self) -> &'static str {
        match self {
            Self::Windlass => "windlass",
            Self::Nginx => "nginx",
        }
    }

    async fn start(self, upstream: SocketAddr, scratch: &Path) -> Result<PinnedProcess> {
        let address = free_address()?;
        match self {
            Self::Windlass => {
                let program = std::env::current_exe()?;
                let words = ["proxy-node".to_owned(), address.to_string(), upstream.to_string()];
                PinnedProcess::start(PROXY_CORE, &program, &words, address).await
            }
            Self::Nginx => {
                let file = programs::nginx_config(scratch, address, upstream)?;
                let words = ["-c".to_owned(), file.display().to_string()];
                PinnedProcess::start(PROXY_CORE, Path::new("nginx"), &words, address).await
            }
        }
    }
}

fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?)
}

pub async fn run(plan: ProxyPlan) -> Result<()> {
    ensure!(std::thread::available_parallelism()?.get() >= 2, "at least two cores are required");
    programs::raise_file_limit(2 * plan.streams as u64 + EXTRA_FILES)?;
    let scratch = temp_dir("proxy")?;
    let address = free_address()?;
    let words = ["proxy-upstream".to_owned(), address.to_string()];
    let upstream = PinnedProcess::start(OTHER_CORE, &std::env::current_exe()?, &words, address).await?;
    let mut sheet = BenchResults::new("proxy")?;
    sheet.say("one core for the proxy, one for clients and upstream; responses of 1 KiB")?;

    measure_throughput(&plan, &upstream, scratch.path(), &mut sheet).await?;
    measure_added_latency(&plan, &upstream, scratch.path(), &mut sheet).await?;
    for system in ProxySystem::BOTH {
        let proxy = system.start(upstream.address, scratch.path()).await?;
        sheet.about(system.name());
        streams::measure_streams(&proxy, plan.streams, &mut sheet).await?;
    }
    sheet.about("");
    sheet.save()?;
    Ok(())
}

/// Measures the maximum throughput, with keep-alive connections and with a new connection for each request.
async fn measure_throughput(
    plan: &ProxyPlan,
    upstream: &PinnedProcess,
    scratch: &Path,
    sheet: &mut BenchResults,
) -> Result<()> {
    for (key, what, closes) in
        [("keep", "keep-alive connections", false), ("new", "new connection per request", true)]
    {
        let mut samples: [Vec<WrkSample>; 2] = Default::default();
        let proxies = [
            ProxySystem::Windlass.start(upstream.address, scratch).await?,
            ProxySystem::Nginx.start(upstream.address, scratch).await?,
        ];
        let wrk = |address, lasts| WrkRun {
            core: OTHER_CORE,
            address,
            connections: plan.connections,
            lasts,
            closes,
        };
        for proxy in &proxies {
            // Warm-up: buffers grow and connections to the upstream are opened.
            wrk(proxy.address, Duration::from_secs(1)).run(proxy.pid()).await?;
        }
        for _ in 0..plan.rounds {
            for (samples, proxy) in samples.iter_mut().zip(&proxies) {
                samples.push(wrk(proxy.address, plan.lasts).run(proxy.pid()).await?);
            }
        }
        sheet.say(what)?;
        let mut middles = Vec::new();
        for (system, samples) in ProxySystem::BOTH.into_iter().zip(samples) {
            sheet.about(system.name());
            middles.push(record_median(sheet, key, system, samples)?);
        }
        sheet.about("");
        let [ours, theirs] = middles.as_slice() else { continue };
        sheet.figure(
            &format!("{key}_ratio"),
            "throughput, relative to nginx",
            ours.per_second / theirs.per_second,
            "",
        )?;
        sheet.figure(
            &format!("{key}_p99_ratio"),
            "p99, relative to nginx",
            ours.p99_ms / theirs.p99_ms,
            "",
        )?;
    }
    Ok(())
}

/// Records the median of the rounds, by throughput.
fn record_median(
    sheet: &mut BenchResults,
    key: &str,
    system: ProxySystem,
    mut samples: Vec<WrkSample>,
) -> Result<WrkSample> {
    samples.sort_by(|a, b| a.per_second.total_cmp(&b.per_second));
    let (first, last) = (samples.first().copied(), samples.last().copied());
    let (first, last) = first.zip(last).context("no round was measured")?;
    let middle = samples.get(samples.len() / 2).copied().context("no round was measured")?;
    sheet.put(&format!("{key}_per_s"), middle.per_second);
    sheet.put(&format!("{key}_p50_ms"), middle.p50_ms);
    sheet.put(&format!("{key}_p99_ms"), middle.p99_ms);
    sheet.put(&format!("{key}_cpu_us"), middle.cpu_us);
    sheet.put(&format!("{key}_errors"), samples.iter().map(|sample| sample.errors).sum());
    sheet.say(&format!(
        "  {:<10} {:>9.0} /s ({:.0} to {:.0})   p50 {:>7.3} ms   p99 {:>7.3} ms   {:>6.1} µs of CPU per request",
        system.name(),
        middle.per_second,
        first.per_second,
        last.per_second,
        middle.p50_ms,
        middle.p99_ms,
        middle.cpu_us
    ))?;
    Ok(middle)
}

/// Measures the latency that a proxy adds for one client with sequential requests.
async fn measure_added_latency(
    plan: &ProxyPlan,
    upstream: &PinnedProcess,
    scratch: &Path,
    sheet: &mut BenchResults,
) -> Result<()> {
    sheet.say("one client, sequential requests")?;
    let send_request = async |address: SocketAddr| {
        let request = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".to_vec();
        let load = RequestLoad { address: address.to_string(), request, connections: 1, lasts: plan.lasts };
        closed_loop::run_load(&load, |_, _| None).await
    };
    let us = |span: Duration| span.as_secs_f64() * 1e6;
    let direct = send_request(upstream.address).await?;
    sheet.figure("direct_p50_us", "directly to the upstream, p50", us(direct.p50), "µs")?;
    sheet.figure("direct_p99_us", "directly to the upstream, p99", us(direct.p99), "µs")?;
    for system in ProxySystem::BOTH {
        let proxy = system.start(upstream.address, scratch).await?;
        let through = send_request(proxy.address).await?;
        sheet.about(system.name());
        let added = |part: Duration, plain: Duration| us(part) - us(plain);
        sheet.figure(
            "added_p50_us",
            &format!("{} adds, p50", system.name()),
            added(through.p50, direct.p50),
            "µs",
        )?;
        sheet.figure(
            "added_p99_us",
            &format!("{} adds, p99", system.name()),
            added(through.p99, direct.p99),
            "µs",
        )?;
        sheet.about("");
    }
    Ok(())
}

/// Resident memory after the process has become idle.
async fn measure_idle_memory(proxy: &PinnedProcess) -> Result<f64> {
    process::wait_until_idle(proxy.pid()).await?;
    process::resident_mb(proxy.pid())
}
