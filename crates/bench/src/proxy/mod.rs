//! Our proxy and Debian's nginx, in the same minutes, in front of the same upstream.
//!
//! The proxy has one core for itself; upstream and callers share the other. So it is the other core that may be full
//! first: processor time per request says what throughput alone would hide. Both are asked in turns, and the median of
//! the rounds counts.

mod node;
mod parts;
mod streams;

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, ensure};

use self::parts::{PinnedProcess, WrkRun, WrkSample};
use super::{flags::Flags, sheet::BenchResults};
use windlass_testenv::{
    closed::{self, RequestLoad},
    process,
};
use windlass_testkit::temp_dir;

/// The core of the proxy, and the one of everybody else.
const PROXY_CORE: u32 = 0;
const OTHER_CORE: u32 = 1;
/// Beside those of callers and replicas.
const EXTRA_FILES: u64 = 1_000;

/// What is measured, and for how long.
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

/// The part of the program that another core runs: `windlass-bench WORD …`.
pub fn part(word: &str, arguments: &[String]) -> Option<Result<()>> {
    match word {
        "proxy-node" => Some(node::run(arguments)),
        "proxy-upstream" => Some(parts::upstream(arguments)),
        _ => None,
    }
}

/// Who is measured.
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
                let file = parts::nginx_config(scratch, address, upstream)?;
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
    ensure!(std::thread::available_parallelism()?.get() >= 2, "two cores are needed");
    parts::raise_file_limit(2 * plan.streams as u64 + EXTRA_FILES)?;
    let scratch = temp_dir("proxy")?;
    let address = free_address()?;
    let words = ["proxy-upstream".to_owned(), address.to_string()];
    let upstream = PinnedProcess::start(OTHER_CORE, &std::env::current_exe()?, &words, address).await?;
    let mut sheet = BenchResults::new("proxy")?;
    sheet.say("one core for the proxy, one for callers and upstream; answers of 1 KiB")?;

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

/// As much as goes through, on connections that stay and on a new one for each request.
async fn measure_throughput(
    plan: &ProxyPlan,
    upstream: &PinnedProcess,
    scratch: &Path,
    sheet: &mut BenchResults,
) -> Result<()> {
    for (key, what, closes) in
        [("keep", "connections that stay", false), ("new", "a connection for each request", true)]
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
            // Buffers grow and connections to the upstream are opened.
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
            "throughput, ours by nginx's",
            ours.per_second / theirs.per_second,
            "",
        )?;
        sheet.figure(&format!("{key}_p99_ratio"), "p99, ours by nginx's", ours.p99_ms / theirs.p99_ms, "")?;
    }
    Ok(())
}

/// The middle one of the rounds, by throughput.
fn record_median(
    sheet: &mut BenchResults,
    key: &str,
    system: ProxySystem,
    mut samples: Vec<WrkSample>,
) -> Result<WrkSample> {
    samples.sort_by(|a, b| a.per_second.total_cmp(&b.per_second));
    let (first, last) = (samples.first().copied(), samples.last().copied());
    let (first, last) = first.zip(last).context("no round was run")?;
    let middle = samples.get(samples.len() / 2).copied().context("no round was run")?;
    sheet.put(&format!("{key}_per_s"), middle.per_second);
    sheet.put(&format!("{key}_p50_ms"), middle.p50_ms);
    sheet.put(&format!("{key}_p99_ms"), middle.p99_ms);
    sheet.put(&format!("{key}_cpu_us"), middle.cpu_us);
    sheet.put(&format!("{key}_errors"), samples.iter().map(|sample| sample.errors).sum());
    sheet.say(&format!(
        "  {:<10} {:>9.0} /s ({:.0} to {:.0})   p50 {:>7.3} ms   p99 {:>7.3} ms   {:>6.1} µs of processor each",
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

/// What a proxy adds for one caller who waits for each answer.
async fn measure_added_latency(
    plan: &ProxyPlan,
    upstream: &PinnedProcess,
    scratch: &Path,
    sheet: &mut BenchResults,
) -> Result<()> {
    sheet.say("one caller, one request after the other")?;
    let ask = async |address: SocketAddr| {
        let request = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".to_vec();
        let load = RequestLoad { address: address.to_string(), request, connections: 1, lasts: plan.lasts };
        closed::run_load(&load, |_, _| None).await
    };
    let us = |span: Duration| span.as_secs_f64() * 1e6;
    let direct = ask(upstream.address).await?;
    sheet.figure("direct_p50_us", "straight to the upstream, p50", us(direct.p50), "µs")?;
    sheet.figure("direct_p99_us", "straight to the upstream, p99", us(direct.p99), "µs")?;
    for system in ProxySystem::BOTH {
        let proxy = system.start(upstream.address, scratch).await?;
        let through = ask(proxy.address).await?;
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

/// Resident memory now, after it has come to rest.
async fn measure_idle_memory(proxy: &PinnedProcess) -> Result<f64> {
    process::wait_until_idle(proxy.pid()).await?;
    process::resident_mb(proxy.pid())
}
