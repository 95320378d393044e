//! Plays seeds: `windlass-sim --seeds 1000`, or `SEED=17 windlass-sim` to replay one.

use std::{
    collections::BTreeMap,
    io::Write,
    process::ExitCode,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use parking_lot::Mutex;
use windlass_testkit::sim::{self, Report};

struct Args {
    seeds: u64,
    from: u64,
    jobs: usize,
}

/// What came of all seeds so far.
#[derive(Default)]
struct Total {
    played: u64,
    violating: u64,
    runs: usize,
    passes: u64,
    virtual_secs: u64,
    fired: BTreeMap<&'static str, u64>,
}

fn main() -> Result<ExitCode> {
    let args = args()?;
    let (next, end) = (AtomicU64::new(args.from), args.from + args.seeds);
    let (started, total) = (Instant::now(), Mutex::new(Total::default()));
    std::thread::scope(|scope| {
        for _ in 0..args.jobs {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    let report = sim::play(seed);
                    total.lock().add(seed, report);
                }
            });
        }
    });
    let total = total.into_inner();
    total.print(started.elapsed().as_secs_f64())?;
    Ok(if total.violating == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn args() -> Result<Args> {
    let mut args =
        Args { seeds: 100, from: 0, jobs: std::thread::available_parallelism().map_or(1, |n| n.get()) };
    if let Ok(seed) = std::env::var("SEED") {
        args.from = seed.parse().context("SEED is not a number")?;
        args.seeds = 1;
    }
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number =
            || words.next().context("a number is missing")?.parse::<u64>().context("not a number");
        match word.as_str() {
            "--seeds" => args.seeds = number()?,
            "--from" => args.from = number()?,
            "--jobs" => args.jobs = usize::try_from(number()?)?,
            "--log" => tracing_subscriber::fmt().with_writer(std::io::stderr).init(),
            _ => bail!("unknown argument `{word}`; want --seeds N, --from K, --jobs J, --log"),
        }
    }
    Ok(args)
}

impl Total {
    fn add(&mut self, seed: u64, report: Result<Report>) {
        self.played += 1;
        let mut err = std::io::stderr();
        match report {
            Err(error) => {
                self.violating += 1;
                let _ = writeln!(err, "seed {seed}: {error:#}");
            }
            Ok(report) => {
                for (fault, times) in &report.fired {
                    *self.fired.entry(fault).or_default() += times;
                }
                self.runs += report.runs;
                self.passes += report.passes;
                self.virtual_secs += report.virtual_secs;
                if !report.violations.is_empty() {
                    self.violating += 1;
                    for v in report.violations.iter().take(4) {
                        let _ = writeln!(err, "seed {seed}: {} {}", v.id, v.what);
                    }
                    let _ = writeln!(err, "  replay: SEED={seed} cargo xtask sim");
                }
            }
        }
    }

    fn print(&self, secs: f64) -> std::io::Result<()> {
        let mut out = std::io::stdout();
        for (fault, times) in &self.fired {
            writeln!(out, "{times:>9}  {fault}")?;
        }
        let speed = self.virtual_secs as f64 / secs;
        writeln!(
            out,
            "{} seeds, {} runs, {} passes in {secs:.1} s ({:.1} seeds/s, {speed:.0} times real time); {} with violations",
            self.played,
            self.runs,
            self.passes,
            self.played as f64 / secs,
            self.violating
        )
    }
}
