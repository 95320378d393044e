//! The connection between one replica and the database: sometimes slow or cut, and occasionally a commit succeeds but
//! its acknowledgement is lost.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::sleep;
use windlass_server::db::{DbError, FaultHook, HookFuture};

use crate::{network::ReplicaFreeze, rng::Rng};

/// Fault rates, in percent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DbFaultRates {
    pub refused: u64,
    pub acknowledgement_lost: u64,
    pub slow: u64,
}

pub(super) struct FaultyDbLink {
    pub freeze: ReplicaFreeze,
    pub rng: Arc<Mutex<Rng>>,
    pub fault_rates: Arc<Mutex<DbFaultRates>>,
    /// Number of database calls.
    pub calls: Arc<AtomicU64>,
}

impl FaultyDbLink {
    fn should_fail(&self, percent: impl Fn(DbFaultRates) -> u64) -> bool {
        let percent = percent(*self.fault_rates.lock());
        percent > 0 && self.rng.lock().chance(percent)
    }

    async fn delay(&self) {
        let most = if self.should_fail(|s| s.slow) { 3_000 } else { 2 };
        let time = self.rng.lock().millis(0, most);
        if time > Duration::ZERO {
            sleep(time).await;
        }
        self.freeze.wait().await;
    }
}

fn connection_reset(what: &'static str) -> Arc<dyn std::error::Error + Send + Sync> {
    Arc::new(io::Error::new(io::ErrorKind::ConnectionReset, format!("{what}: simulated connection reset")))
}

impl FaultHook for FaultyDbLink {
    fn before<'a>(&'a self, what: &'static str) -> HookFuture<'a> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move {
            self.delay().await;
            match self.should_fail(|s| s.refused) {
                true => Err(DbError::Unavailable { what, source: connection_reset(what) }),
                false => Ok(()),
            }
        })
    }

    fn after<'a>(&'a self, what: &'static str) -> HookFuture<'a> {
        Box::pin(async move {
            self.delay().await;
            match self.should_fail(|s| s.acknowledgement_lost) {
                true => Err(DbError::Unknown { source: connection_reset(what) }),
                false => Ok(()),
            }
        })
    }
}
