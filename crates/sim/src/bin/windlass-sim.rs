//! Runs simulation seeds: `windlass-sim --seeds 1000`, or `SEED=17 windlass-sim` to replay one.

use std::{
    collections::BTreeMap,
    io::Write,
    path::PathBuf,
    process::ExitCode,
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use parking_lot::Mutex;
use windlass_sim::{
    queue_sim,
    runs::{self, Report, Tenancy},
};

/// Interval of progress reports.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

struct Args {
    seeds: u64,
    from: u64,
    jobs: usize,
    /// Directory for the databases of seeds with violations.
    keep: Option<PathBuf>,
    /// Simulate the container queue and its dispatchers, instead of runs.
    queue: bool,
    /// Simulate several projects that share hosts.
    shared: bool,
}

/// Totals over all seeds so far.
#[derive(Default)]
struct Totals {
    played: u64,
    violating: u64,
    runs: usize,
    preemptions: usize,
    managed_jobs: usize,
    outcomes: BTreeMap<String, u64>,
    passes: u64,
    calls: u64,
    virtual_secs: u64,
    fired: BTreeMap<&'static str, u64>,
}

fn main() -> Result<ExitCode> {
    let args = parse_args()?;
    let (next, end) = (AtomicU64::new(args.from), args.from + args.seeds);
    let (started, total) = (Instant::now(), Mutex::new(Totals::default()));
    std::thread::scope(|scope| {
        // Nothing is ever sent: the channel closes when the last worker ends.
        let (playing, over) = mpsc::channel::<()>();
        for _ in 0..args.jobs {
            let (playing, next, total, keep) = (playing.clone(), &next, &total, args.keep.as_deref());
            let (queue, shared) = (args.queue, args.shared);
            scope.spawn(move || {
                let _playing = playing;
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    let tenancy = if shared { Tenancy::Shared } else { Tenancy::Single };
                    let report = match queue {
                        true => queue_sim::simulate(seed),
                        false => runs::simulate_keeping(seed, tenancy, keep),
                    };
                    let flag = if queue {
                        " --queue"
                    } else if shared {
                        " --shared"
                    } else {
                        ""
                    };
                    total.lock().add(seed, report, flag);
                }
            });
        }
        drop(playing);
        while over.recv_timeout(PROGRESS_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            total.lock().print_summary(args.seeds, started.elapsed().as_secs_f64());
        }
    });
    let total = total.into_inner();
    total.print(started.elapsed().as_secs_f64())?;
    Ok(if total.violating == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn parse_args() -> Result<Args> {
    let mut args = Args {
        seeds: 100,
        from: 0,
        jobs: std::thread::available_parallelism().map_or(1, |n| n.get()),
        keep: None,
        queue: false,
        shared: false,
    };
    if let Ok(seed) = std::env::var("SEED") {
        args.from = seed.parse().context("invalid `SEED` value: expected a number")?;
        args.seeds = 1;
    }
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().with_context(|| format!("`{word}` requires a value"));
        let mut number = || value()?.parse::<u64>().with_context(|| format!("`{word}` requires a number"));
        match word.as_str() {
            "--seeds" => args.seeds = number()?,
            "--from" => args.from = number()?,
            "--jobs" => args.jobs = usize::try_from(number()?)?,
            "--keep" => args.keep = Some(value()?.into()),
            "--queue" => args.queue = true,
            "--shared" => args.shared = true,
            "--log" => tracing_subscriber::fmt().with_writer(std::io::stderr).init(),
            _ => bail!(
                "unknown argument `{word}`: expected --seeds N, --from K, --jobs J, --keep DIR, --queue, --shared or --log"
            ),
        }
    }
    Ok(args)
}

impl Totals {
    fn add(&mut self, seed: u64, report: Result<Report>, flag: &str) {
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
                self.preemptions += report.preemptions;
                self.managed_jobs += report.managed_jobs;
                for (outcome, times) in report.outcomes {
                    *self.outcomes.entry(outcome).or_default() += times;
                }
                self.passes += report.passes;
                self.calls += report.calls;
                self.virtual_secs += report.virtual_secs;
                if !report.violations.is_empty() {
                    self.violating += 1;
                    for v in report.violations.iter().take(4) {
                        let _ = writeln!(err, "seed {seed}: {} {}", v.id, v.what);
                    }
                    let _ = writeln!(err, "  replay: SEED={seed} cargo xtask sim{flag}");
                }
            }
        }
    }

    /// Reports the progress.
    fn print_summary(&self, of: u64, secs: f64) {
        let rate = self.played as f64 / secs;
        let _ = writeln!(
            std::io::stderr(),
            "{} of {of} seeds in {secs:.0} s, {rate:.1} seeds/s, {} with violations",
            self.played,
            self.violating
        );
    }

    fn print(&self, secs: f64) -> std::io::Result<()> {
        let mut out = std::io::stdout();
        for (fault, times) in &self.fired {
            writeln!(out, "{times:>9}  {fault}")?;
        }
        writeln!(out, "tasks of {} managed jobs:", self.managed_jobs)?;
        for (outcome, times) in &self.outcomes {
            writeln!(out, "{times:>9}  {outcome}")?;
        }
        let speed = self.virtual_secs as f64 / secs;
        writeln!(
            out,
            "{} seeds, {} runs, {} preemptions, {} passes, {} database calls in {secs:.1} s ({:.1} seeds/s, {speed:.0} times real time); {} with violations",
            self.played,
            self.runs,
            self.preemptions,
            self.passes,
            self.calls,
            self.played as f64 / secs,
            self.violating
        )
    }
}
