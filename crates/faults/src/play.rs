//! Plays rows: so many times, so many at once, each time in a directory of its own.

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

/// No trial takes longer unless it is stuck.
const TRIAL_MAX: Duration = Duration::from_secs(300);
/// The same where rows do not shorten what they wait for.
const LONG_TRIAL_MAX: Duration = Duration::from_secs(1500);

/// What is to be played.
pub struct RunOptions {
    pub rows: Vec<FaultRow>,
    pub times: u64,
    /// At once.
    pub jobs: usize,
    /// Of the first trial; the next has the next.
    pub seed: u64,
    pub is_long: bool,
    /// What each bound is multiplied by: a machine that does other things as well is slower than it should be.
    pub slack: u32,
    /// Where trials have their directories.
    pub dir: PathBuf,
}

/// What came of one trial.
#[derive(Clone, Debug)]
pub struct TrialOutcome {
    pub row: &'static str,
    pub seed: u64,
    pub took: Duration,
    /// How often which fault happened.
    pub fired: Vec<(&'static str, u64)>,
    pub times: Vec<TimedStep>,
    pub violations: Vec<String>,
    /// Left for whoever wants to know why.
    pub kept: Option<PathBuf>,
}

thread_local! {
    /// Where and why this thread panicked last.
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Plays everything and tells of each trial as it ends.
pub fn play(order: &RunOptions, tell: impl Fn(&TrialOutcome) + Sync) -> Result<Vec<TrialOutcome>> {
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
                    tell(&outcome);
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
    // A table has no room for all that a violation says.
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

/// A panic in a row is how its assertions fail.
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
    // What the row left running in the background ends here.
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
