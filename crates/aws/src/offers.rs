//! Offers: each type in each zone, on demand and spot, with its price if it is known.

use std::collections::{BTreeMap, BTreeSet};

use windlass_backend::BackendError;
use windlass_model::{
    money::Price,
    plan::offers::{Availability, HostSpec, Offer},
};

use crate::{
    AwsProvider, NAME,
    api::{Api, Params},
    errors::ApiError,
    instance_types::{InstanceType, RegionTypes},
    prices::Prices,
    xml::Element,
};

const MIB_PER_GB: u64 = 1024;
const LINUX: &str = "Linux/UNIX";
const READ: &str = "read the offers";

/// Spot prices of a region, by type and zone.
pub(crate) type SpotPrices = BTreeMap<(String, String), Price>;

/// Hardware, zones and prices of a region.
struct Region<'a> {
    name: &'a str,
    types: &'a RegionTypes,
    /// Zones with a subnet.
    zones: BTreeSet<&'a str>,
    spot: &'a SpotPrices,
    prices: &'a Prices,
    disk_mib: u64,
    reservations: &'a [Reservation],
}

/// Capacity that the account has reserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reservation {
    id: String,
    instance_type: String,
    zone: String,
    is_free: bool,
}

impl AwsProvider {
    /// Offers of all regions. A region that does not answer is left out, unless none does.
    pub(crate) async fn all_offers(&self) -> Result<Vec<Offer>, BackendError> {
        let prices = self.prices().await;
        let regions = self.settings.regions.iter().map(|region| self.region_offers(region, &prices));
        let mut all = Vec::new();
        let (mut first_error, mut is_any) = (None, false);
        for (region, offers) in
            self.settings.regions.iter().zip(futures_util::future::join_all(regions).await)
        {
            match offers {
                Ok(offers) => {
                    is_any = true;
                    all.extend(offers);
                }
                Err(error) => {
                    tracing::warn!(%region, %error, "failed to read the offers of a region");
                    first_error.get_or_insert(error);
                }
            }
        }
        match first_error.filter(|_| !is_any) {
            Some(error) => Err(error),
            None => Ok(self.without_quota(all)),
        }
    }

    async fn region_offers(&self, region: &str, prices: &Prices) -> Result<Vec<Offer>, BackendError> {
        let patterns = &self.settings.instance_types;
        let types = self.types.get(region, RegionTypes::fetch(&self.api, region, patterns));
        let types = types.await.map_err(|error| error.to_backend(READ))?;
        let network = self.network(region).await.map_err(|error| error.to_backend(READ))?;
        let spot = self.spot.get(region, fetch_spot_prices(&self.api, region, patterns)).await;
        let spot = spot.map_err(|error| error.to_backend(READ))?;
        // Accounts without reservations often have no permission to list them.
        let reservations = self.reservations.get(region, fetch_reservations(&self.api, region)).await;
        let reservations = reservations.unwrap_or_else(|error| {
            tracing::debug!(%region, %error, "failed to list the capacity reservations");
            std::sync::Arc::default()
        });
        let region = Region {
            name: region,
            types: &types,
            zones: network.subnets.keys().map(String::as_str).collect(),
            spot: &spot,
            prices,
            disk_mib: u64::from(self.settings.disk_size) * MIB_PER_GB,
            reservations: &reservations,
        };
        Ok(region.offers())
    }

    /// Prices of the configured catalogue. One that cannot be read leaves the prices of the table.
    async fn prices(&self) -> std::sync::Arc<Prices> {
        let Some(place) = &self.settings.prices else { return std::sync::Arc::default() };
        match self.prices.get(place, Prices::fetch(self.api.http(), place)).await {
            Ok(prices) => prices,
            Err(error) => {
                tracing::warn!(%error, "failed to read the catalogue of prices");
                std::sync::Arc::default()
            }
        }
    }

    /// Marks the offers that a quota refused a short time ago.
    fn without_quota(&self, mut offers: Vec<Offer>) -> Vec<Offer> {
        for offer in &mut offers {
            if self.is_over_quota(offer) {
                offer.availability = Availability::NoQuota;
            }
        }
        offers
    }
}

impl Region<'_> {
    fn offers(&self) -> Vec<Offer> {
        let nowhere = BTreeSet::new();
        let mut offers = Vec::new();
        for one in &self.types.types {
            let zones = self.types.zones.get(&one.name).unwrap_or(&nowhere);
            for zone in zones.iter().filter(|zone| self.zones.contains(zone.as_str())) {
                let price = self.prices.find(self.name, &one.name).map(|(price, _)| price);
                if one.on_demand {
                    offers.push(self.offer(one, zone, false, price));
                }
                if one.spot
                    && let Some(price) = self.spot.get(&(one.name.clone(), zone.clone()))
                {
                    offers.push(self.offer(one, zone, true, Some(*price)));
                }
                let of_zone = |reservation: &&Reservation| {
                    reservation.instance_type == one.name && reservation.zone == *zone
                };
                for reservation in self.reservations.iter().filter(of_zone) {
                    let mut offer = self.offer(one, zone, false, price);
                    offer.reservation = Some(reservation.id.clone());
                    if !reservation.is_free {
                        offer.availability = Availability::NotAvailable;
                    }
                    offers.push(offer);
                }
            }
        }
        offers
    }

    fn offer(&self, one: &InstanceType, zone: &str, spot: bool, price: Option<Price>) -> Offer {
        Offer {
            backend: NAME.to_owned(),
            region: self.name.to_owned(),
            zones: vec![zone.to_owned()],
            instance_type: one.name.clone(),
            price: price.unwrap_or(Price::UNKNOWN),
            availability: Availability::Unknown,
            reservation: None,
            host: HostSpec { spot, disk_mib: self.disk_mib, ..one.host.clone() },
            total_blocks: 1,
        }
    }
}

/// Reads the present spot prices of a region.
async fn fetch_spot_prices(api: &Api, region: &str, patterns: &[String]) -> Result<SpotPrices, ApiError> {
    let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let query = Params::new()
        .with("StartTime", now)
        .with_list("ProductDescription", [LINUX])
        .with_filter("instance-type", patterns);
    let found = api.list(region, "DescribeSpotPriceHistory", query, "spotPriceHistorySet").await?;
    Ok(newest_prices(&found))
}

/// The history contains the present price and earlier ones, in no documented order.
fn newest_prices(history: &[Element]) -> SpotPrices {
    let mut newest: BTreeMap<(String, String), (&str, Price)> = BTreeMap::new();
    for entry in history {
        let (Some(name), Some(zone)) = (entry.text("instanceType"), entry.text("availabilityZone")) else {
            continue;
        };
        let Some(dollars) = entry.number::<f64>("spotPrice").filter(|dollars| *dollars > 0.0) else {
            continue;
        };
        let since = entry.text("timestamp").unwrap_or_default();
        let known =
            newest.entry((name.to_owned(), zone.to_owned())).or_insert((since, Price::from_dollars(dollars)));
        if since > known.0 {
            *known = (since, Price::from_dollars(dollars));
        }
    }
    newest.into_iter().map(|(key, (_, price))| (key, price)).collect()
}

async fn fetch_reservations(api: &Api, region: &str) -> Result<Vec<Reservation>, ApiError> {
    let query = Params::new().with_filter("state", ["active"]);
    let found = api.list(region, "DescribeCapacityReservations", query, "capacityReservationSet").await?;
    Ok(found.iter().filter_map(Reservation::read).collect())
}

impl Reservation {
    fn read(item: &Element) -> Option<Self> {
        Some(Self {
            id: item.text("capacityReservationId")?.to_owned(),
            instance_type: item.text("instanceType")?.to_owned(),
            zone: item.text("availabilityZone")?.to_owned(),
            is_free: item.number::<u32>("availableInstanceCount").is_some_and(|count| count > 0),
        })
    }
}

#[cfg(test)]
mod tests {
    use windlass_model::resources::CpuArch;

    use super::*;

    fn items(text: &str) -> Vec<Element> {
        Element::parse(&format!("<r><set>{text}</set></r>")).unwrap().items("set").cloned().collect()
    }

    #[test]
    fn the_newest_spot_price_of_each_zone_is_used() {
        let entry = |zone: &str, price: &str, since: &str| {
            format!(
                "<item><instanceType>g5.xlarge</instanceType><availabilityZone>{zone}</availabilityZone>\
                 <spotPrice>{price}</spotPrice><timestamp>{since}</timestamp></item>"
            )
        };
        let history = items(
            &[
                entry("a", "0.4", "2026-11-02T00:00:00.000Z"),
                entry("a", "0.3", "2026-11-01T00:00:00.000Z"),
                entry("a", "0.5", "2026-11-03T00:00:00.000Z"),
                entry("b", "x", "2026-11-03T00:00:00.000Z"),
            ]
            .concat(),
        );
        let expected = SpotPrices::from([(("g5.xlarge".into(), "a".into()), Price::from_dollars(0.5))]);
        assert_eq!(newest_prices(&history), expected);
    }

    #[test]
    fn each_zone_with_a_subnet_is_an_offer_of_each_market() {
        let host = HostSpec {
            cpus: 4,
            arch: Some(CpuArch::X86),
            memory_mib: 16_384,
            disk_mib: 0,
            gpus: vec![],
            spot: false,
            runtimes: None,
        };
        let named = |name: &str, spot| InstanceType {
            name: name.to_owned(),
            host: host.clone(),
            on_demand: true,
            spot,
            efa_interfaces: 0,
        };
        let zones = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        let types = RegionTypes {
            types: vec![named("m7i.xlarge", true), named("x9.xlarge", false)],
            zones: BTreeMap::from([
                ("m7i.xlarge".into(), zones(&["a", "b", "c"])),
                ("x9.xlarge".into(), zones(&["a"])),
            ]),
        };
        let spot = SpotPrices::from([(("m7i.xlarge".into(), "b".into()), Price::from_dollars(0.1))]);
        let reserved = Reservation::read(
            &items(
                "<item><capacityReservationId>cr-1</capacityReservationId><instanceType>x9.xlarge</instanceType>\
                 <availabilityZone>a</availabilityZone><availableInstanceCount>0</availableInstanceCount></item>",
            )[0],
        );
        let region = Region {
            name: "us-east-1",
            types: &types,
            zones: BTreeSet::from(["a", "b"]),
            spot: &spot,
            prices: &Prices::default(),
            disk_mib: 1024,
            reservations: &[reserved.unwrap()],
        };
        let shown: Vec<String> = region
            .offers()
            .iter()
            .map(|offer| {
                let spot = if offer.host.spot { " spot" } else { "" };
                let reservation = offer.reservation.as_deref().unwrap_or_default();
                format!(
                    "{} {:?} {}{spot} {} {reservation}",
                    offer.instance_type,
                    offer.zones,
                    offer.price,
                    offer.availability.as_str()
                )
            })
            .collect();
        let expected = [
            "m7i.xlarge [\"a\"] $0.2016/h unknown ",
            "m7i.xlarge [\"b\"] $0.2016/h unknown ",
            "m7i.xlarge [\"b\"] $0.1/h spot unknown ",
            "x9.xlarge [\"a\"] unknown price unknown ",
            "x9.xlarge [\"a\"] unknown price not available cr-1",
        ];
        assert_eq!(shown, expected);
    }
}
