//! Documents that a row of `instances` carries: what it may become, what it is, how it is.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use windlass_api::agent::shim::HostInfo;
use windlass_backend::{Has, HasGpu};
use windlass_model::{
    instance::Health,
    plan::offers::{Host, Offer},
    resources::CpuArch,
};

use crate::{agents::HostNews, db::instances::Instance};

const MIB: u64 = 1 << 20;

/// Column `offer`: what is to be asked for, best first. `at` is the one that was asked for last; everything made
/// for the instance was made by its backend.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tries {
    pub(crate) at: usize,
    pub(crate) offers: Vec<Offer>,
}

impl Tries {
    pub(crate) fn of(row: &Instance) -> Option<Self> {
        row.offer.as_deref().and_then(|text| serde_json::from_str(text).ok())
    }

    pub(crate) fn current(&self) -> Option<&Offer> {
        self.offers.get(self.at)
    }
}

/// Column `profile`: what an order is made of beside its offer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct OrderFacts {
    #[serde(default)]
    pub(crate) tags: std::collections::BTreeMap<String, String>,
}

impl OrderFacts {
    pub(crate) fn of(row: &Instance) -> Self {
        row.profile.as_deref().and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }
}

/// Column `instance_type`, from what the host itself has.
pub(crate) fn type_of_host(name: &str, has: &Has, spot: bool) -> Value {
    let gpus: Vec<Value> = has.gpus.iter().map(|gpu| json!(gpu)).collect();
    let resources = json!({
        "cpus": has.cpus, "memory_mib": has.memory_mib, "spot": spot, "cpu_arch": has.arch,
        "disk": {"size_mib": has.disk_mib}, "gpus": gpus,
    });
    if has.runtime.is_empty() {
        return json!({ "name": name, "resources": resources });
    }
    json!({ "name": name, "resources": resources, "runtime": has.runtime })
}

/// Column `instance_type`, from what was offered.
pub(crate) fn type_of_offer(offer: &Offer) -> Value {
    type_of_host(&offer.instance_type, &has(&offer.host), offer.host.spot)
}

fn has(host: &Host) -> Has {
    let arch = host.arch.map(|arch| match arch {
        CpuArch::X86 => "x86".to_owned(),
        CpuArch::Arm => "arm".to_owned(),
    });
    Has {
        cpus: host.cpus,
        arch,
        memory_mib: host.memory_mib,
        disk_mib: host.disk_mib,
        gpus: host.gpus.iter().map(HasGpu::from).collect(),
        runtime: String::new(),
        addresses: Vec::new(),
    }
}

/// What a host has, as its agent tells; for machines whose backend did not look.
pub(crate) fn has_of(info: &HostInfo) -> Has {
    Has {
        cpus: info.cpus,
        arch: None,
        memory_mib: info.memory / MIB,
        disk_mib: info.disk_size / MIB,
        gpus: windlass_backend::gpus_of(info).iter().map(HasGpu::from).collect(),
        runtime: String::new(),
        addresses: info.addresses.clone(),
    }
}

/// What DCGM calls a warning and a failure.
const DCGM_WARN: i64 = 10;
const DCGM_FAIL: i64 = 20;

/// How a host is, and what is wrong with it.
pub(crate) fn health_of(news: &HostNews) -> (Health, Option<String>) {
    let overall = news.health.dcgm.as_ref().map_or(0, |dcgm| dcgm.overall_health);
    let incidents = news.health.dcgm.iter().flat_map(|dcgm| &dcgm.incidents);
    let said: Vec<&str> = incidents
        .map(|incident| incident.error_message.as_str())
        .chain(news.health.problems.iter().map(String::as_str))
        .collect();
    let health = if overall >= DCGM_FAIL {
        Health::Failure
    } else if overall >= DCGM_WARN || !news.health.problems.is_empty() {
        Health::Warning
    } else {
        Health::Healthy
    };
    (health, (!said.is_empty()).then(|| said.join("; ")))
}
