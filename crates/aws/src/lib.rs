//! Backend `aws`: an instance is a machine of EC2.
//!
//! The provider creates machines with calls that may be repeated: each carries a token that follows from the instance's
//! id and from the offer, and each machine has a tag with the id. Whatever a server that ended has left behind is found
//! by that tag. The machines are enrolled as those of all providers are (`windlass_backend::machines`).
//!
//! The calls are hand-written: the SDK of AWS for EC2 alone needs more time and memory to compile than everything else.

mod api;
mod cache;
mod check;
mod credentials;
mod errors;
mod http;
mod images;
mod instance_types;
mod instances;
mod network;
mod offers;
mod prices;
mod settings;
mod volumes;
mod xml;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::time::Instant;
use windlass_backend::{
    BackendFinding, BackendFuture, BackendInstance, DeleteProgress, InstanceRequest,
    machines::{MachineProvider, MachineRequest, MachineState},
    volumes::VolumeBackend,
};
use windlass_model::{backend_kind::BackendType, id::InstanceId, plan::offers::Offer};

use self::{
    api::Api,
    cache::Cache,
    images::{ImageError, RegionImage},
    instance_types::RegionTypes,
    network::{NetworkError, RegionNetwork},
    offers::{Reservation, SpotPrices},
    prices::Prices,
};
pub use self::{
    instances::OwnedMachine,
    settings::{AccessKey, Creds, Image, NamedImage, OsImages, Profile, Settings, SettingsError},
};

pub const NAME: &str = BackendType::Aws.as_str();
/// Types and zones change with announcements of AWS.
const TYPES_LIFETIME: Duration = Duration::from_secs(6 * 3600);
const PRICES_LIFETIME: Duration = Duration::from_secs(6 * 3600);
const SPOT_LIFETIME: Duration = Duration::from_secs(300);
const NETWORK_LIFETIME: Duration = Duration::from_secs(300);
const IMAGE_LIFETIME: Duration = Duration::from_secs(3600);
const RESERVATIONS_LIFETIME: Duration = Duration::from_secs(60);
/// Time for which an offer that a quota refused is shown as such.
const QUOTA_LIFETIME: Duration = Duration::from_secs(600);

/// Region, family of the instance type, and whether it is spot: what a quota refers to.
type QuotaKey = (String, String, bool);

/// Provider of machines by EC2.
pub struct AwsProvider {
    settings: Settings,
    api: Api,
    types: Cache<RegionTypes>,
    spot: Cache<SpotPrices>,
    networks: Cache<RegionNetwork>,
    groups: Cache<String>,
    images: Cache<RegionImage>,
    reservations: Cache<Vec<Reservation>>,
    prices: Cache<Prices>,
    over_quota: Mutex<BTreeMap<QuotaKey, Instant>>,
    /// Creations whose result this process does not know.
    uncertain: Mutex<BTreeMap<InstanceId, Instant>>,
}

impl AwsProvider {
    /// Connects to nothing yet.
    pub fn new(settings: Settings) -> Self {
        Self::with_environment(settings, |name| std::env::var(name).ok())
    }

    fn with_environment(settings: Settings, environment: credentials::Environment) -> Self {
        Self {
            api: Api::new(&settings, environment),
            settings,
            types: Cache::new(TYPES_LIFETIME),
            spot: Cache::new(SPOT_LIFETIME),
            networks: Cache::new(NETWORK_LIFETIME),
            groups: Cache::new(NETWORK_LIFETIME),
            images: Cache::new(IMAGE_LIFETIME),
            reservations: Cache::new(RESERVATIONS_LIFETIME),
            prices: Cache::new(PRICES_LIFETIME),
            over_quota: Mutex::default(),
            uncertain: Mutex::default(),
        }
    }

    async fn network(&self, region: &str) -> Result<Arc<RegionNetwork>, NetworkError> {
        self.networks.get(region, RegionNetwork::fetch(&self.api, &self.settings, region)).await
    }

    async fn image(&self, region: &str, image: &Image) -> Result<Arc<RegionImage>, ImageError> {
        let key = format!("{region} {}", images::label(image));
        self.images.get(&key, images::find(&self.api, region, image)).await
    }

    fn is_over_quota(&self, offer: &Offer) -> bool {
        let known = self.over_quota.lock();
        known.get(&quota_key(offer)).is_some_and(|since| since.elapsed() < QUOTA_LIFETIME)
    }
}

/// AWS counts the types of a family together, and spot machines apart.
fn quota_key(offer: &Offer) -> QuotaKey {
    let family: String = offer.instance_type.chars().take_while(char::is_ascii_alphabetic).collect();
    (offer.region.clone(), family, offer.host.spot)
}

impl std::fmt::Debug for AwsProvider {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AwsProvider").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl MachineProvider for AwsProvider {
    fn name(&self) -> &'static str {
        NAME
    }

    fn offers(&self) -> BackendFuture<'_, Vec<Offer>> {
        Box::pin(self.all_offers())
    }

    fn create<'a>(&'a self, request: &'a MachineRequest<'a>) -> BackendFuture<'a, String> {
        Box::pin(self.created(request))
    }

    fn find<'a>(
        &'a self,
        order: &'a InstanceRequest,
        _machine: &'a BackendInstance,
    ) -> BackendFuture<'a, MachineState> {
        Box::pin(self.state(order))
    }

    fn delete<'a>(
        &'a self,
        order: &'a InstanceRequest,
        id: Option<&'a str>,
    ) -> BackendFuture<'a, DeleteProgress> {
        Box::pin(self.deleted(order, id))
    }

    fn check(&self) -> BoxFuture<'_, Vec<BackendFinding>> {
        Box::pin(self.findings())
    }

    fn volumes(&self) -> Option<&dyn VolumeBackend> {
        Some(self)
    }
}
