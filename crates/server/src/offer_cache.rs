//! Cache of the offers of all backends, so that backends are queried rarely.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};
use windlass_backend::Backends;
use windlass_model::plan::{
    blocks,
    offers::{Offer, smallest_fit},
};

use crate::parsed_fleet_spec::ParsedFleetSpec;

/// Age after which a snapshot is queried again.
const SNAPSHOT_MAX_AGE: Duration = Duration::from_secs(5);
/// Maximum time for a backend to return its offers. Placement waits for it.
const OFFERS_TIMEOUT: Duration = Duration::from_secs(10);

/// The last snapshot, and when it was received.
type CachedSnapshot = Option<(Instant, Arc<OfferSnapshot>)>;

/// The offers of all backends, for placement and for the creation of instances.
#[derive(Clone, Debug)]
pub struct OfferCache {
    backends: Backends,
    known: Arc<Mutex<CachedSnapshot>>,
    /// Serializes queries: one caller queries, the others wait for its result.
    refreshing: Arc<tokio::sync::Mutex<()>>,
}

/// Offers of all backends at one time.
#[derive(Clone, Debug, Default)]
pub struct OfferSnapshot {
    pub offers: Vec<Offer>,
    /// Error messages of the backends that did not answer.
    pub silent: Vec<String>,
}

impl OfferSnapshot {
    /// The offers that a project with these backends may use.
    #[must_use]
    pub fn granted(&self, backends: &BTreeSet<String>) -> Self {
        let offers = self.offers.iter().filter(|offer| backends.contains(&offer.backend));
        Self { offers: offers.cloned().collect(), silent: self.silent.clone() }
    }

    /// Offers from which a fleet may create instances, cheapest first, split into the fleet's blocks.
    pub fn for_fleet(&self, shape: &ParsedFleetSpec) -> Vec<Offer> {
        let limits = shape.own_limits();
        let wanted = self.offers.iter().filter(|offer| offer.availability.is_worth_trying());
        let mut offers: Vec<Offer> = wanted
            .filter(|offer| smallest_fit(offer, &limits).is_ok())
            .filter_map(|offer| {
                let gpus = u32::try_from(offer.host.gpus.len()).unwrap_or(u32::MAX);
                let total_blocks = blocks::split_count(shape.blocks(), offer.host.cpus, gpus).ok()?;
                Some(Offer { total_blocks, ..offer.clone() })
            })
            .collect();
        offers.sort_by(|left, right| (left.price, left).cmp(&(right.price, right)));
        offers
    }
}

impl OfferCache {
    pub fn new(backends: Backends) -> Self {
        Self { backends, known: Arc::default(), refreshing: Arc::default() }
    }

    pub async fn seen(&self) -> Arc<OfferSnapshot> {
        if let Some(seen) = self.fresh_snapshot() {
            return seen;
        }
        let _refreshing = self.refreshing.lock().await;
        if let Some(seen) = self.fresh_snapshot() {
            return seen;
        }
        let seen = Arc::new(self.query_backends().await);
        *self.known.lock() = Some((Instant::now(), Arc::clone(&seen)));
        seen
    }

    fn fresh_snapshot(&self) -> Option<Arc<OfferSnapshot>> {
        let known = self.known.lock();
        known.as_ref().filter(|(at, _)| at.elapsed() < SNAPSHOT_MAX_AGE).map(|(_, seen)| Arc::clone(seen))
    }

    async fn query_backends(&self) -> OfferSnapshot {
        let requested = self.backends.all().map(|backend| async {
            let answer = timeout(OFFERS_TIMEOUT, backend.offers()).await;
            (backend.name(), answer)
        });
        let mut seen = OfferSnapshot::default();
        for (name, answer) in join_all(requested).await {
            match answer {
                Ok(Ok(offers)) => seen.offers.extend(offers),
                Ok(Err(error)) => seen.silent.push(format!("{name}: {error}")),
                Err(_) => {
                    seen.silent.push(format!("{name}: no answer within {} s", OFFERS_TIMEOUT.as_secs()))
                }
            }
        }
        for message in &seen.silent {
            tracing::warn!(message, "failed to list the offers of a backend");
        }
        seen
    }
}
