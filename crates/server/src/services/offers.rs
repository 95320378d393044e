//! Offers to a job: from a project's own instances, and from the backends that its fleets may use.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::{Value, json};
use windlass_api::{
    agent::shim::ProcessMode,
    backends::BackendType,
    offers::{self as wire, InstanceType},
};
use windlass_model::{
    backend_kind::is_server_machine,
    config::job_spec::JobSpec,
    explain::{Refusal, Shortfall},
    id::{FleetId, ProjectId, RunId, SubmissionId, UserId},
    money::Price,
    plan::{
        blocks,
        execution_mode::{ExecutionMode, ImageChoice},
        offers::{Availability, InstanceNeeds, Offer, is_instance_selected, smallest_fit},
        place::{
            FleetChoice, FleetSnapshot, InstanceCreation, InstanceSnapshot, Inventory, PlacementOutcome,
            REFUSALS_MAX, Readiness, RefusalReport, WaitingNode, WaitingReplica, place_replicas,
        },
    },
    resources::CpuArch,
    time::{Span, Timestamp},
};

use crate::{
    app::App,
    db::{
        Db,
        pipeline_rows::placement::{self, PoolInventory},
    },
    error::{Error, Result},
    inventory,
    offer_cache::OfferCache,
    parsed_run_spec::ParsedRunSpec,
    pass_error::PassError,
    plain_processes::ProcessRights,
};

/// Everything on which a job of a project may be placed, as placement sees it.
pub(crate) struct OfferSupply {
    project: ProjectId,
    stock: PoolInventory,
    inventory: Inventory,
    /// Time at which it was read.
    now: Timestamp,
}

pub(crate) async fn load_supply(app: &App, project: ProjectId) -> Result<OfferSupply> {
    OfferSupply::of(app.db(), app.market(), app.settings().local_processes, project)
        .await
        .map_err(supply_error)
}

impl OfferSupply {
    pub(crate) async fn of(
        db: &Db,
        market: &OfferCache,
        local_processes: ProcessMode,
        project: ProjectId,
    ) -> std::result::Result<Self, PassError> {
        let now = db.now().await?;
        let stock = placement::load_inventory(db, &[project], now).await?;
        let allowed = ProcessRights::now(db, local_processes).await?;
        let inventory = inventory::build_inventory(&stock, &market.seen().await.offers, allowed)?;
        Ok(Self { project, stock, inventory, now })
    }

    /// Fleets that a run names; `None` means any.
    fn named_fleets(&self, shape: &ParsedRunSpec) -> Option<Vec<FleetId>> {
        shape.fleet_names().map(|names| self.stock.select(self.project, names))
    }

    /// Fleets that a run names and that do not exist.
    fn missing_fleets(&self, shape: &ParsedRunSpec) -> Vec<String> {
        self.stock.missing(self.project, shape.fleet_names().unwrap_or_default())
    }
}

pub(crate) fn supply_error(error: PassError) -> Error {
    if let PassError::Db(error) = error {
        return error.into();
    }
    Error::refused(format!("failed to read the instances of the project: {error}"))
}

/// Requirements of a job, and its fleets.
struct OfferQuery<'a> {
    needs: InstanceNeeds,
    /// Number of nodes that start together.
    nodes: u32,
    fleets: Option<Vec<FleetId>>,
    creation: InstanceCreation,
    inventory: &'a Inventory,
}

impl OfferQuery<'_> {
    /// Returns whether the job may use the fleet. Multi-node jobs must stay together: only cluster fleets accept them,
    /// and those with a single instance, which the nodes share.
    fn can_use(&self, fleet: &FleetSnapshot) -> bool {
        let named = self.fleets.as_ref().is_none_or(|names| names.contains(&fleet.id));
        named && (fleet.is_cluster || !self.needs.needs_whole_instance || fleet.has_one_instance_at_most())
    }

    /// Number of blocks of an instance of the fleet that one node needs, if the job fits. Nodes that share an instance
    /// fit on it together.
    fn blocks_on(&self, fleet: &FleetSnapshot, offer: &Offer) -> Option<u32> {
        let needs = self.needs.with_fleet_limits(&fleet.limits);
        if !needs.needs_whole_instance || !fleet.has_one_instance_at_most() {
            return smallest_fit(offer, &needs).ok();
        }
        let part = InstanceNeeds { needs_whole_instance: false, ..needs.into_owned() };
        let blocks = smallest_fit(offer, &part).ok()?;
        (blocks.saturating_mul(self.nodes) <= offer.total_blocks).then_some(blocks)
    }

    fn existing(&self, instance: &InstanceSnapshot) -> Option<wire::Offer> {
        let fleet = self.inventory.fleets.iter().find(|fleet| fleet.id == instance.fleet)?;
        if instance.readiness != Readiness::Ready || !self.can_use(fleet) {
            return None;
        }
        let (name, host) = (&instance.name, instance.hostname.as_deref());
        let named = self.needs.instances.as_ref();
        if named
            .is_some_and(|list| !is_instance_selected(list, name, host, &fleet.name, instance.instance_num))
        {
            return None;
        }
        let total = instance.offer.total_blocks;
        let blocks = self.blocks_on(fleet, &instance.offer)?;
        let held: u32 = instance.holds.iter().map(|held| held.blocks).sum();
        let free = total.saturating_sub(held);
        let availability = if blocks <= free { "idle" } else { "busy" };
        Some(to_wire(&instance.offer, availability.to_owned(), blocks, total))
    }

    /// Offer of an instance that a fleet would create. The first suitable fleet represents all.
    fn new_offer(&self, offer: &Offer) -> Option<wire::Offer> {
        if self.creation == InstanceCreation::Reuse || self.needs.instances.is_some() {
            return None;
        }
        self.inventory.fleets.iter().filter(|fleet| has_capacity(fleet) && self.can_use(fleet)).find_map(
            |fleet| {
                let gpus = u32::try_from(offer.host.gpus.len()).unwrap_or(u32::MAX);
                let total_blocks = blocks::split_count(fleet.blocks, offer.host.cpus, gpus).ok()?;
                let divided = Offer { total_blocks, ..offer.clone() };
                smallest_fit(offer, &fleet.limits).ok()?;
                let blocks = self.blocks_on(fleet, &divided)?;
                Some(to_wire(&divided, availability_name(offer), blocks, total_blocks))
            },
        )
    }
}

fn has_capacity(fleet: &FleetSnapshot) -> bool {
    let has = u32::try_from(fleet.instance_nums.len()).unwrap_or(u32::MAX);
    fleet.can_create && fleet.nodes_max.is_none_or(|max| has < max)
}

/// Availability as serialized.
fn availability_name(offer: &Offer) -> String {
    json!(offer.availability).as_str().unwrap_or("unknown").to_owned()
}

fn to_wire(offer: &Offer, availability: String, blocks: u32, total_blocks: u32) -> wire::Offer {
    let size = |mib: u64| i64::try_from(mib).unwrap_or(i64::MAX);
    let gpus = offer.host.gpus.iter().map(|gpu| wire::Gpu {
        name: gpu.name.clone(),
        memory_mib: size(gpu.memory_mib),
        vendor: Some(gpu.vendor.as_str().to_owned()),
    });
    wire::Offer {
        backend: BackendType::from_name(&offer.backend),
        instance: InstanceType {
            name: offer.instance_type.clone(),
            resources: wire::Resources {
                cpus: offer.host.cpus.into(),
                memory_mib: size(offer.host.memory_mib),
                gpus: gpus.collect(),
                spot: offer.host.spot,
                disk: (offer.host.disk_mib > 0).then(|| wire::Disk { size_mib: size(offer.host.disk_mib) }),
                cpu_arch: offer.host.arch.map(|arch| {
                    let word = match arch {
                        CpuArch::X86 => "x86",
                        CpuArch::Arm => "arm",
                    };
                    word.to_owned()
                }),
                description: String::new(),
            },
        },
        region: offer.region.clone(),
        price: offer.price.as_dollars(),
        availability,
        blocks: blocks.into(),
        total_blocks: total_blocks.into(),
    }
}

fn offer_query<'a>(supply: &'a OfferSupply, shape: &ParsedRunSpec, job: &JobSpec) -> OfferQuery<'a> {
    let (fleets, creation) = (supply.named_fleets(shape), shape.creation());
    OfferQuery {
        needs: shape.needs_of(job),
        nodes: job.jobs_per_replica,
        fleets,
        creation,
        inventory: &supply.inventory,
    }
}

/// Offers that fit the job: idle instances first, then by price.
pub(crate) fn for_job(supply: &OfferSupply, shape: &ParsedRunSpec, job: &JobSpec) -> Vec<wire::Offer> {
    let (inventory, requested) = (&supply.inventory, offer_query(supply, shape, job));
    let existing = inventory.instances.iter().filter_map(|instance| requested.existing(instance));
    sort_offers(
        existing.chain(inventory.offers.iter().filter_map(|offer| requested.new_offer(offer))).collect(),
    )
}

/// Lowest price of the offers that fit the job and are available now.
pub(crate) fn cheapest(supply: &OfferSupply, shape: &ParsedRunSpec, job: &JobSpec) -> Option<Price> {
    let word = |availability: Availability| json!(availability).as_str().map(str::to_owned);
    let known = [Availability::Idle, Availability::Available, Availability::Unknown].map(word);
    let offers = for_job(supply, shape, job);
    let open = offers.iter().filter(|offer| known.contains(&Some(offer.availability.clone())));
    open.map(|offer| Price::from_dollars(offer.price)).min()
}

/// Lowest price per hour of what the job would hold: of all offers that fit it, also of those that are in use.
pub(crate) fn least_price(supply: &OfferSupply, shape: &ParsedRunSpec, job: &JobSpec) -> Option<Price> {
    let offers = for_job(supply, shape, job);
    let share = |offer: &wire::Offer| {
        let part = |count: i64| u64::try_from(count).unwrap_or_default().max(1);
        Price(Price::from_dollars(offer.price).0 * part(offer.blocks) / part(offer.total_blocks))
    };
    offers.iter().map(share).min()
}

/// Instances that backends would create for a fleet with these limits.
pub(crate) fn for_fleet(offers: &[Offer], limits: &InstanceNeeds, split: blocks::Blocks) -> Vec<wire::Offer> {
    let fits = offers.iter().filter(|offer| smallest_fit(offer, limits).is_ok());
    let divided = fits.filter_map(|offer| {
        let gpus = u32::try_from(offer.host.gpus.len()).unwrap_or(u32::MAX);
        let total = blocks::split_count(split, offer.host.cpus, gpus).ok()?;
        Some(to_wire(offer, availability_name(offer), total, total))
    });
    sort_offers(divided.collect())
}

fn sort_offers(mut offers: Vec<wire::Offer>) -> Vec<wire::Offer> {
    offers.sort_by(|a, b| {
        (a.availability != "idle", a.price)
            .partial_cmp(&(b.availability != "idle", b.price))
            .unwrap_or(std::cmp::Ordering::Equal)
    });
    offers
}

/// The jobs of one replica of a run that is not submitted, as placement would see it.
pub(crate) fn planned_replica(
    supply: &OfferSupply,
    user: UserId,
    shape: &ParsedRunSpec,
    jobs: &[&JobSpec],
) -> WaitingReplica {
    let node = |(number, job): (u128, &&JobSpec)| WaitingNode {
        job: SubmissionId(uuid::Uuid::from_u128(number)),
        needs: Arc::new(shape.needs_of(job)),
    };
    let rank = shape.rank();
    WaitingReplica {
        project: supply.project,
        user,
        run: RunId(uuid::Uuid::nil()),
        replica_num: 0,
        class: rank.class,
        priority: rank.priority,
        since: supply.now,
        nodes: (0..).zip(jobs).map(node).collect(),
        fleet_choice: FleetChoice::Choose,
        usable_fleets: None,
        fleets: supply.named_fleets(shape),
        missing_fleets: supply.missing_fleets(shape),
        creation: shape.creation(),
        max_duration: jobs.first().and_then(|job| job.max_duration).map(Span::secs),
        resubmitted_at: None,
    }
}

/// Reasons why such a replica would not start at once, all of them, nearest miss first. `None`: it would.
pub(crate) fn wait_reasons(supply: &OfferSupply, planned: WaitingReplica) -> Option<Arc<RefusalReport>> {
    match place_replicas(&[planned], &supply.inventory, supply.now).pop()?.outcome {
        PlacementOutcome::Placed { .. } => None,
        PlacementOutcome::Waits { why, .. } | PlacementOutcome::Never { why } => Some(why),
    }
}

/// Offers that do not fit the job, with all reasons: nearest miss first, equal ones grouped.
pub(crate) fn rejected_offers(supply: &OfferSupply, shape: &ParsedRunSpec, job: &JobSpec) -> RefusalReport {
    let inventory = &supply.inventory;
    let requested = offer_query(supply, shape, job);
    let needs = &requested.needs;
    let mut refusals: Vec<Refusal> = Vec::new();
    let mut add = |place: String, short: Vec<Shortfall>| match refusals
        .iter_mut()
        .find(|known| known.shortfalls == short)
    {
        Some(known) => known.count += 1,
        None => refusals.push(Refusal { place, count: 1, shortfalls: short }),
    };
    for name in supply.missing_fleets(shape) {
        let known = inventory.fleets.iter().map(|fleet| fleet.name.clone()).collect();
        add(format!("fleet {name}"), vec![Shortfall::FleetMissing { known }]);
    }
    // The offer of the local backend is the existing instance, which has reported its own resources.
    let has_local = inventory.instances.iter().any(|instance| is_server_machine(&instance.offer.backend));
    for instance in inventory.instances.iter().filter(|instance| instance.readiness == Readiness::Ready) {
        let Some(fleet) = inventory.fleets.iter().find(|fleet| fleet.id == instance.fleet) else { continue };
        if let Err(short) = smallest_fit(&instance.offer, &needs.with_fleet_limits(&fleet.limits)) {
            add(instance.name.clone(), short);
        }
    }
    if shape.creation() != InstanceCreation::Reuse && inventory.fleets.iter().any(has_capacity) {
        // A part of an offer that a fleet would create may fit where the whole does not.
        let unsuitable = |offer: &&Offer| {
            !(has_local && is_server_machine(&offer.backend)) && requested.new_offer(offer).is_none()
        };
        for offer in inventory.offers.iter().filter(unsuitable) {
            if let Err(short) = smallest_fit(offer, needs) {
                add(offer.location_name(), short);
            }
        }
    }
    refusals.sort_by_key(|refusal| refusal.shortfalls.len());
    let left_out = refusals.len().saturating_sub(REFUSALS_MAX);
    refusals.truncate(REFUSALS_MAX);
    RefusalReport { refusals, left_out, for_good: false }
}

/// Execution modes of the job on the instances that fit it; on any instance, if none does.
pub(crate) fn runs_in(supply: &OfferSupply, shape: &ParsedRunSpec, job: &JobSpec) -> Vec<String> {
    let Some(image) = ImageChoice::from_spec(job) else { return Vec::new() };
    let needs = shape.needs_of(job);
    let inventory = &supply.inventory;
    let instances = inventory.instances.iter().map(|instance| &instance.offer);
    let mut known: Vec<ExecutionMode<'_>> = Vec::new();
    for offer in instances.chain(&inventory.offers) {
        if let Ok(runs_in) = image.resolve_on(offer.host.runtimes.as_ref())
            && !known.contains(&runs_in)
            && smallest_fit(offer, &needs).is_ok()
        {
            known.push(runs_in);
        }
    }
    if known.is_empty() {
        known.extend(image.resolve_on(None).ok());
    }
    known.iter().map(ToString::to_string).collect()
}

/// Properties by which GPUs are grouped, besides their type.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GpuGrouping {
    pub(crate) backend: bool,
    pub(crate) region: bool,
    pub(crate) count: bool,
}

impl GpuGrouping {
    /// Parses the grouping. A region is meaningful only within its backend.
    pub(crate) fn read(words: &[String]) -> Result<Self> {
        let mut by = Self::default();
        for word in words {
            match word.as_str() {
                "gpu" => {}
                "backend" => by.backend = true,
                "region" => by.region = true,
                "count" => by.count = true,
                _ => {
                    return Err(Error::field(
                        "group_by",
                        "must contain only `gpu`, `backend`, `region` and `count`",
                    ));
                }
            }
        }
        if by.region && !by.backend {
            return Err(Error::refused("Cannot group by 'region' without also grouping by 'backend'"));
        }
        Ok(by)
    }
}

/// The same offers, grouped by GPU; the cheapest GPU first.
pub(crate) fn by_gpu(offers: &[wire::Offer], by: GpuGrouping) -> Vec<Value> {
    let mut groups = BTreeMap::<(String, i64, String, [String; 3]), Vec<&wire::Offer>>::new();
    for offer in offers {
        let gpus = &offer.instance.resources.gpus;
        if let Some(gpu) = gpus.first() {
            let vendor = gpu.vendor.clone().unwrap_or_else(|| "nvidia".into());
            let apart = [
                by.backend.then(|| offer.backend.as_str().to_owned()),
                by.region.then(|| offer.region.clone()),
                by.count.then(|| gpus.len().to_string()),
            ];
            let key = (gpu.name.clone(), gpu.memory_mib, vendor, apart.map(Option::unwrap_or_default));
            groups.entry(key).or_default().push(offer);
        }
    }
    let mut rows: Vec<(f64, Value)> = groups.values().map(|offers| gpu_row(offers, by)).collect();
    rows.sort_by(|left, right| left.0.total_cmp(&right.0));
    rows.into_iter().map(|(_, row)| row).collect()
}

/// One row, and the lowest price of one GPU in it.
fn gpu_row(offers: &[&wire::Offer], by: GpuGrouping) -> (f64, Value) {
    let count =
        |offer: &wire::Offer| u32::try_from(offer.instance.resources.gpus.len()).unwrap_or(u32::MAX).max(1);
    let each = |offer: &wire::Offer| offer.price / f64::from(count(offer));
    let counts = offers.iter().map(|offer| count(offer));
    let price = |pick: fn(f64, f64) -> f64| offers.iter().map(|offer| each(offer)).reduce(pick);
    let words = |word: fn(&wire::Offer) -> Value| {
        let mut words: Vec<Value> = offers.iter().map(|offer| word(offer)).collect();
        words.sort_by_key(Value::to_string);
        words.dedup();
        words
    };
    let gpu = offers.first().and_then(|offer| offer.instance.resources.gpus.first());
    let mut row = json!({
        "name": gpu.map(|gpu| &gpu.name), "memory_mib": gpu.map(|gpu| gpu.memory_mib),
        "vendor": gpu.and_then(|gpu| gpu.vendor.as_deref()).unwrap_or("nvidia"),
        "availability": words(|offer| json!(offer.availability)),
        "spot": words(|offer| json!(if offer.instance.resources.spot { "spot" } else { "on-demand" })),
        "count": { "min": counts.clone().min(), "max": counts.max() },
        "price": { "min": price(f64::min), "max": price(f64::max) },
    });
    let (backends, regions) = (words(|offer| json!(offer.backend)), words(|offer| json!(offer.region)));
    if by.backend {
        row["backend"] = backends.first().cloned().unwrap_or_default();
    } else {
        row["backends"] = backends.into();
    }
    if by.region {
        row["region"] = regions.first().cloned().unwrap_or_default();
    } else {
        row["regions"] = regions.into();
    }
    (price(f64::min).unwrap_or(f64::MAX), row)
}
