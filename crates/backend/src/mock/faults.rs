//! Random faults.

use sha2::{Digest as _, Sha256};

use super::{
    MockCloud,
    ledger::{InstanceRecord, now_ms},
};
use crate::BackendError;

/// The first fault occurs within this many calls.
const EARLY_CALLS: u64 = 4;
/// Age below which an instance may be unknown to parts of the cloud.
const STALE_WINDOW_MS: i64 = 2_000;

impl MockCloud {
    /// Returns whether a fault occurs now, in `percent` of all calls. The seed determines the first one, which is
    /// early. The caller holds the lock of the records.
    fn should_fail(&self, what: &str, percent: u64) -> Result<bool, BackendError> {
        if percent == 0 {
            return Ok(false);
        }
        let time = self.ledger.count(&format!("asked {what}"))?;
        let every = (100 / percent).max(1);
        let drawn = Sha256::digest(format!("{} {what}", self.script.faults.seed));
        let struck = time % every == u64::from(drawn[0]) % every.min(EARLY_CALLS);
        if struck {
            self.ledger.count(what)?;
        }
        Ok(struck)
    }

    pub(super) fn check_create(&self) -> Result<(), BackendError> {
        let faults = &self.script.faults;
        self.check_throttle("create the instance")?;
        if self.should_fail("create error", faults.create_error)? {
            return Err(unavailable("create the instance", "internal error"));
        }
        if faults.quota.is_some_and(|most| self.ledger.instance_count() >= most) {
            self.ledger.count("quota")?;
            return Err(BackendError::NoCapacity { message: "the instance quota is exhausted".to_owned() });
        }
        Ok(())
    }

    pub(super) fn check_delete(&self) -> Result<(), BackendError> {
        self.check_throttle("delete the instance")?;
        match self.should_fail("delete error", self.script.faults.delete_error)? {
            true => Err(unavailable("delete the instance", "internal error")),
            false => Ok(()),
        }
    }

    fn check_throttle(&self, what: &'static str) -> Result<(), BackendError> {
        match self.should_fail("throttled", self.script.faults.throttled)? {
            true => Err(unavailable(what, "too many requests")),
            false => Ok(()),
        }
    }

    /// Fails after the instance was created.
    pub(super) fn fail_after_create(&self) -> Result<(), BackendError> {
        match self.should_fail("half way", self.script.faults.half_way)? {
            true => Err(unavailable("create the instance", "service unavailable")),
            false => Ok(()),
        }
    }

    pub(super) fn is_listing_stale(&self, made: &InstanceRecord) -> Result<bool, BackendError> {
        Ok(now_ms() < made.made_ms + STALE_WINDOW_MS
            && self.should_fail("stale", self.script.faults.stale)?)
    }
}

fn unavailable(what: &'static str, message: &str) -> BackendError {
    BackendError::Unavailable { what, message: format!("{message} (scripted)") }
}
