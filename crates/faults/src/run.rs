//! Runs rows repeatedly and in parallel, each trial in a separate directory.

use std::{
    cell::RefCell,
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use parking_lot::Mutex;

use super::{FaultRow, RowTest, TimedStep, Trial};

/// Time limit of a trial; a longer one is stuck.
const TRIAL_MAX: Duration = Duration::from_secs(300);
/// Time limit of a trial in the long form, in which rows do not shorten waits.
const LONG_TRIAL_MAX: Duration = Duration::from_secs(1500);

/// Rows to run, and how.
pub struct RunOptions {
    pub rows: Vec<FaultRow>,
    pub times: u64,
    /// Number of parallel trials.
    pub jobs: usize,
    /// Seed of the first trial; each further trial uses the next one.
    pub seed: u64,
    pub is_long: bool,
    /// Multiplier of all bounds, for a machine that is busy with other work.
    pub slack: u32,
    /// Parent of the trials' directories.
    pub dir: PathBuf,
}

/// The result of one trial.
#[derive(Clone, Debug)]
pub struct TrialOutcome {
    pub row: &'static str,
    pub seed: u64,
    pub took: Duration,
    /// Number of faults by kind.
    pub fired: Vec<(&'static str, u64)>,
    pub times: Vec<TimedStep>,
    pub violations: Vec<String>,
    /// Directory kept for analysis.
    pub kept: Option<PathBuf>,
}

thread_local! {
    /// Location and message of this thread's last panic.
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs all trials and reports each at its end.
pub fn run_trials(order: &RunOptions, notify: impl Fn(&TrialOutcome) + Sync) -> Result<Vec<TrialOutcome>> {
    std::fs::create_dir_all(&order.dir).with_context(|| format!("make {}", order.dir.display()))?;
    std::panic::set_hook(Box::new(|info| {
        LAST_PANIC.with(|words| *words.borrow_mut() = Some(info.to_string()));
    }));
    let trials =
        (0..order.times).flat_map(|time| order.rows.iter().map(move |row| (*row, order.seed + time)));
    let queue: Mutex<VecDeque<(FaultRow, u64)>> = Mutex::new(trials.collect());
    let outcomes = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..order.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let Some((row, seed)) = queue.lock().pop_front() else { return };
                    let outcome = run_trial(&row, seed, order);
                    notify(&outcome);
                    outcomes.lock().push(outcome);
                }
            });
        }
    });
    let _ = std::panic::take_hook();
    Ok(outcomes.into_inner())
}

fn run_trial(row: &FaultRow, seed: u64, order: &RunOptions) -> TrialOutcome {
    let dir = order.dir.join(format!("{}-{seed}", row.id));
    let mut trial = Trial::new(seed, dir.clone(), order.is_long, order.slack);
    let began = Instant::now();
    if let Err(error) = try_run_trial(row, &mut trial, &dir) {
        trial.violation(&format!("{error:#}"));
    }
    if trial.fired.is_empty() && trial.violations.is_empty() {
        trial.violation("no fault fired: this proves nothing");
    }
    let kept = (!trial.violations.is_empty()).then(|| dir.clone());
    // Violations are too long for a table.
    let _ = match &kept {
        Some(dir) => std::fs::write(dir.join("violations.txt"), trial.violations.join("\n\n") + "\n"),
        None => std::fs::remove_dir_all(&dir),
    };
    TrialOutcome {
        row: row.id,
        seed,
        took: began.elapsed(),
        fired: trial.fired.into_iter().collect(),
        times: trial.times,
        violations: trial.violations,
        kept,
    }
}

/// Runs a trial; assertions of a row fail with a panic.
fn try_run_trial(row: &FaultRow, trial: &mut Trial, dir: &Path) -> Result<()> {
    let (RowTest::Now(play) | RowTest::OutsideCi(_, play)) = row.play;
    let _ = std::fs::remove_dir_all(dir);
    std::fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
    let limit = if trial.is_long { LONG_TRIAL_MAX } else { TRIAL_MAX };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("start the runtime")?;
    let played = catch_unwind(AssertUnwindSafe(|| {
        runtime.block_on(async { tokio::time::timeout(limit, play(trial)).await })
    }));
    // Ends background tasks of the row.
    runtime.shutdown_timeout(Duration::from_secs(5));
    match played {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => anyhow::bail!("it takes longer than {limit:?}"),
        Err(_) => {
            let words = LAST_PANIC.with(|words| words.borrow_mut().take());
            anyhow::bail!("{}", words.unwrap_or_else(|| "it panicked without a word".to_owned()))
        }
    }
}
