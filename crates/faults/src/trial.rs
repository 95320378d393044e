//! One run of one row.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use windlass_testkit::rng::Rng;

use windlass_testenv::test_env::{HostMode, TestEnv};

/// A step with a time bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimedStep {
    pub what: &'static str,
    pub took: Duration,
    pub bound: Duration,
}

impl TimedStep {
    /// Used share of the bound; more than 1 is a violation.
    pub fn share(&self) -> f64 {
        self.took.as_secs_f64() / self.bound.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

pub struct Trial {
    /// Determines everything that is random in the trial.
    pub seed: u64,
    pub rng: Rng,
    /// Real bounds and waits, where a row usually shortens them.
    pub is_long: bool,
    slack: u32,
    dir: PathBuf,
    pub(super) fired: BTreeMap<&'static str, u64>,
    pub(super) times: Vec<TimedStep>,
    pub(super) violations: Vec<String>,
}

impl Trial {
    pub(super) fn new(seed: u64, dir: PathBuf, is_long: bool, slack: u32) -> Self {
        Self {
            seed,
            rng: Rng::new(seed),
            is_long,
            slack,
            dir,
            fired: BTreeMap::new(),
            times: Vec::new(),
            violations: Vec::new(),
        }
    }

    /// Directory of the trial; kept after a violation.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A separate server, not yet started; its files are in the trial's directory.
    pub fn env(&self, machines: HostMode) -> TestEnv {
        TestEnv::at(self.dir.join("stage"), machines)
    }

    /// Records a fault: called where the fault was observed, never where it was only requested.
    pub fn fired(&mut self, what: &'static str) {
        self.record_faults(what, 1);
    }

    pub fn record_faults(&mut self, what: &'static str, times: u64) {
        *self.fired.entry(what).or_default() += times;
    }

    /// Compares a time with its bound.
    pub fn within(&mut self, what: &'static str, bound: Duration, took: Duration) {
        let bound = bound * self.slack;
        let timed = TimedStep { what, took, bound };
        if took > bound {
            self.violation(&format!("bound: {what} took {took:.1?}, allowed are {bound:?}"));
        }
        self.times.push(timed);
    }

    pub fn violation(&mut self, what: &str) {
        self.violations.push(what.to_owned());
    }

    /// Waits for a time that the seed determines.
    pub async fn pause(&mut self, from_ms: u64, to_ms: u64) {
        let pause = self.rng.millis(from_ms, to_ms);
        tokio::time::sleep(pause).await;
    }

    /// Chooses one of several variants with equal probability.
    pub fn choose<T: Copy>(&mut self, from: &[T]) -> T {
        *self.rng.pick(from)
    }
}
