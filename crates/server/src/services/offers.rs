//! What a project's own instances offer to a job.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use windlass_api::{
    backends::BackendType,
    offers::{self as wire, InstanceType},
};
use windlass_model::{
    config::job_spec::JobSpec,
    id::ProjectId,
    instance::Status,
    money::Price,
    plan::offers::{Availability, Gpu, Host, Needs, Offer, fit},
    resources::GpuVendor,
};

use crate::{
    app::App,
    db::{
        Page,
        instances::{self, Instance, Query},
    },
    error::Result,
};

/// More instances than a person would look at; placement looks at all of them.
const INSTANCES_MAX: i64 = 1000;

/// An instance that could be used, as the wire and as placement see it.
pub(crate) struct Existing {
    instance: InstanceType,
    offer: Offer,
    backend: BackendType,
    free_blocks: u32,
}

/// Instances that answer, whether they are in use or not.
pub(crate) async fn existing(app: &App, project: ProjectId) -> Result<Vec<Existing>> {
    let page = Page { limit: INSTANCES_MAX, ..Page::default() };
    let query = Query { projects: Some(vec![project]), fleets: None, only_active: true, page };
    let rows = instances::list(app.db(), &query).await?;
    Ok(rows.iter().filter_map(read).collect())
}

/// `None` for what cannot take a job: not ready, not reachable, not well, or not known well enough.
fn read(row: &Instance) -> Option<Existing> {
    let ready = matches!(row.status, Status::Idle | Status::Busy);
    if !ready || row.unreachable || row.health == "failure" {
        return None;
    }
    let instance: InstanceType = serde_json::from_str(row.instance_type.as_deref()?).ok()?;
    let backend = serde_json::from_value(json!(row.backend)).ok()?;
    let total_blocks = u32::try_from(row.total_blocks.unwrap_or(1)).ok()?.max(1);
    let busy_blocks = u32::try_from(row.busy_blocks).unwrap_or(total_blocks);
    let offer = Offer {
        backend: row.backend.clone()?,
        region: row.region.clone().unwrap_or_default(),
        zones: row.availability_zone.iter().cloned().collect(),
        instance_type: instance.name.clone(),
        price: Price::dollars(row.price.unwrap_or(0.0)),
        availability: if row.status == Status::Idle { Availability::Idle } else { Availability::Busy },
        reservation: None,
        host: host(&instance.resources)?,
        total_blocks,
    };
    Some(Existing { instance, offer, backend, free_blocks: total_blocks.saturating_sub(busy_blocks) })
}

fn host(resources: &wire::Resources) -> Option<Host> {
    let gpu = |gpu: &wire::Gpu| {
        Some(Gpu {
            vendor: match &gpu.vendor {
                None => GpuVendor::Nvidia,
                Some(vendor) => serde_json::from_value(json!(vendor)).ok()?,
            },
            name: gpu.name.clone(),
            memory_mib: u64::try_from(gpu.memory_mib).ok()?,
            compute_capability: None,
        })
    };
    Some(Host {
        cpus: u32::try_from(resources.cpus).ok()?,
        arch: resources.cpu_arch.as_ref().and_then(|arch| serde_json::from_value(json!(arch)).ok()),
        memory_mib: u64::try_from(resources.memory_mib).ok()?,
        disk_mib: resources.disk.as_ref().and_then(|disk| u64::try_from(disk.size_mib).ok()).unwrap_or(0),
        gpus: resources.gpus.iter().map(gpu).collect::<Option<_>>()?,
        spot: resources.spot,
    })
}

/// Those that fit the job: free ones first, then by price.
pub(crate) fn for_job(existing: &[Existing], job: &JobSpec) -> Vec<wire::Offer> {
    let needs = Needs {
        resources: Some(job.requirements.resources.clone()),
        max_price: job.requirements.max_price.map(Price::dollars),
        spot: job.requirements.spot,
        reservation: job.requirements.reservation.clone(),
        whole: job.requirements.multinode == Some(true),
        ..Needs::default()
    };
    let mut offers: Vec<wire::Offer> = existing
        .iter()
        .filter_map(|one| {
            let blocks = fit(&one.offer, &needs).ok()?;
            let free = blocks <= one.free_blocks;
            Some(wire::Offer {
                backend: one.backend,
                instance: one.instance.clone(),
                region: one.offer.region.clone(),
                price: one.offer.price.as_dollars(),
                availability: if free { "idle" } else { "busy" }.into(),
                blocks: blocks.into(),
                total_blocks: one.offer.total_blocks.into(),
            })
        })
        .collect();
    offers.sort_by(|a, b| {
        (a.availability != "idle", a.price)
            .partial_cmp(&(b.availability != "idle", b.price))
            .unwrap_or(std::cmp::Ordering::Equal)
    });
    offers
}

/// The same offers, by what GPU they have.
pub(crate) fn by_gpu(offers: &[wire::Offer]) -> Vec<Value> {
    let mut groups = BTreeMap::<(String, i64, String), Vec<&wire::Offer>>::new();
    for offer in offers {
        if let Some(gpu) = offer.instance.resources.gpus.first() {
            let vendor = gpu.vendor.clone().unwrap_or_else(|| "nvidia".into());
            groups.entry((gpu.name.clone(), gpu.memory_mib, vendor)).or_default().push(offer);
        }
    }
    let group = |((name, memory_mib, vendor), offers): (_, Vec<&wire::Offer>)| {
        let counts = offers.iter().map(|offer| offer.instance.resources.gpus.len());
        let price = |pick: fn(f64, f64) -> f64| offers.iter().map(|offer| offer.price).reduce(pick);
        let words = |word: fn(&wire::Offer) -> Value| {
            let mut words: Vec<Value> = offers.iter().map(|offer| word(offer)).collect();
            words.sort_by_key(Value::to_string);
            words.dedup();
            words
        };
        json!({
            "name": name, "memory_mib": memory_mib, "vendor": vendor,
            "availability": words(|offer| json!(offer.availability)),
            "spot": words(|offer| json!(if offer.instance.resources.spot { "spot" } else { "on-demand" })),
            "count": { "min": counts.clone().min(), "max": counts.max() },
            "price": { "min": price(f64::min), "max": price(f64::max) },
            "backends": words(|offer| json!(offer.backend)),
            "regions": words(|offer| json!(offer.region)),
        })
    };
    groups.into_iter().map(group).collect()
}
