//! What goes wrong by chance.

use sha2::{Digest as _, Sha256};

use super::{
    Mock,
    ledger::{Made, now_ms},
};
use crate::BackendError;

/// Of so many times, one of the first goes wrong.
const SOON: u64 = 4;
/// A machine so young may not be known everywhere in the cloud.
const YOUNG_MS: i64 = 2_000;

impl Mock {
    /// Whether it goes wrong now, in `percent` of all times: the seed says when first, which is soon. Whoever asks
    /// holds the books.
    fn strikes(&self, what: &str, percent: u64) -> Result<bool, BackendError> {
        if percent == 0 {
            return Ok(false);
        }
        let time = self.ledger.count(&format!("asked {what}"))?;
        let every = (100 / percent).max(1);
        let drawn = Sha256::digest(format!("{} {what}", self.script.faults.seed));
        let struck = time % every == u64::from(drawn[0]) % every.min(SOON);
        if struck {
            self.ledger.count(what)?;
        }
        Ok(struck)
    }

    pub(super) fn may_create(&self) -> Result<(), BackendError> {
        let faults = &self.script.faults;
        self.may_ask("create the instance")?;
        if self.strikes("create error", faults.create_error)? {
            return Err(unavailable("create the instance", "internal error"));
        }
        if faults.quota.is_some_and(|most| self.ledger.machines() >= most) {
            self.ledger.count("quota")?;
            return Err(BackendError::NoCapacity { said: "the quota of machines is used up".to_owned() });
        }
        Ok(())
    }

    pub(super) fn may_delete(&self) -> Result<(), BackendError> {
        self.may_ask("delete the instance")?;
        match self.strikes("delete error", self.script.faults.delete_error)? {
            true => Err(unavailable("delete the instance", "internal error")),
            false => Ok(()),
        }
    }

    fn may_ask(&self, what: &'static str) -> Result<(), BackendError> {
        match self.strikes("throttled", self.script.faults.throttled)? {
            true => Err(unavailable(what, "too many requests")),
            false => Ok(()),
        }
    }

    /// The machine is there, and whoever asked for it hears otherwise.
    pub(super) fn ends_half_way(&self) -> Result<(), BackendError> {
        match self.strikes("half way", self.script.faults.half_way)? {
            true => Err(unavailable("create the instance", "service unavailable")),
            false => Ok(()),
        }
    }

    pub(super) fn is_unknown_yet(&self, made: &Made) -> Result<bool, BackendError> {
        Ok(now_ms() < made.made_ms + YOUNG_MS && self.strikes("stale", self.script.faults.stale)?)
    }
}

fn unavailable(what: &'static str, said: &str) -> BackendError {
    BackendError::Unavailable { what, said: format!("{said}, as the script says") }
}
