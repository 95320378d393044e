//! One play of one row.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use windlass_testkit::rng::Rng;

use windlass_testenv::stage::{HostMode, TestEnv};

/// Something that had to happen within a bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimedStep {
    pub what: &'static str,
    pub took: Duration,
    pub bound: Duration,
}

impl TimedStep {
    /// Part of the bound that was used; more than 1 is a violation.
    pub fn share(&self) -> f64 {
        self.took.as_secs_f64() / self.bound.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

pub struct Trial {
    /// Says everything that is random about it.
    pub seed: u64,
    pub rng: Rng,
    /// Bounds and waits as long as in earnest, where a row shortens them.
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

    /// Its own; kept when something was wrong.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A server of its own, not yet started; its files are in the trial's directory.
    pub fn stage(&self, machines: HostMode) -> TestEnv {
        TestEnv::at(self.dir.join("stage"), machines)
    }

    /// A fault happened: said where it was seen to happen, never where it was only asked for.
    pub fn fired(&mut self, what: &'static str) {
        self.record_faults(what, 1);
    }

    pub fn record_faults(&mut self, what: &'static str, times: u64) {
        *self.fired.entry(what).or_default() += times;
    }

    /// Holds a time against its bound.
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

    /// Waits for some time that only the seed knows.
    pub async fn pause(&mut self, from_ms: u64, to_ms: u64) {
        let pause = self.rng.millis(from_ms, to_ms);
        tokio::time::sleep(pause).await;
    }

    /// One of several ways, each as often as the others.
    pub fn choose<T: Copy>(&mut self, from: &[T]) -> T {
        *self.rng.pick(from)
    }
}
