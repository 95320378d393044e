//! Documents in rows of `instances`: offers, hardware and health.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use windlass_api::agent::shim::HostInfo;
use windlass_backend::{BackendInstance, GpuInfo, HardwareInfo};
use windlass_model::{
    instance::Health,
    plan::offers::{HostSpec, Offer},
    resources::CpuArch,
};

use crate::{
    agents::HostReport,
    db::{
        DbError,
        documents::{
            INSTANCE_OFFER, INSTANCE_PROFILE, INSTANCE_PROVISIONING, INSTANCE_TRACKING, INSTANCE_TYPE,
        },
        instances::Instance,
    },
};

const MIB: u64 = 1 << 20;

/// Column `offer`: the offers to request, best first. `at` is the one that was requested last; its backend created
/// everything that exists for the instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct OfferAttempts {
    pub(crate) at: usize,
    pub(crate) offers: Vec<Offer>,
}

impl OfferAttempts {
    pub(crate) fn of(row: &Instance) -> Result<Option<Self>, DbError> {
        INSTANCE_OFFER.decode_opt(row.id, row.offer.as_deref())
    }

    pub(crate) fn current(&self) -> Option<&Offer> {
        self.offers.get(self.at)
    }
}

/// Column `profile`: the inputs of an order besides its offer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct OrderProfile {
    #[serde(default)]
    pub(crate) tags: std::collections::BTreeMap<String, String>,
}

impl OrderProfile {
    fn of(row: &Instance) -> Result<Self, DbError> {
        Ok(INSTANCE_PROFILE.decode_opt(row.id, row.profile.as_deref())?.unwrap_or_default())
    }
}

/// Column `tracking`: what the pipeline of instances remembers between passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InstanceTracking {
    /// An event reported that the instance cannot be deleted.
    #[serde(default)]
    pub(crate) is_delete_failure_reported: bool,
}

/// Documents of an instance, as its pipeline needs them.
#[derive(Clone, Debug)]
pub(crate) struct InstanceDocuments {
    pub(crate) tries: Option<OfferAttempts>,
    pub(crate) profile: OrderProfile,
    pub(crate) machine: Option<BackendInstance>,
    /// Column `instance_type`.
    pub(crate) kind: Option<Value>,
    pub(crate) tracking: InstanceTracking,
}

impl InstanceDocuments {
    pub(crate) fn of(row: &Instance) -> Result<Self, DbError> {
        Ok(Self {
            tries: OfferAttempts::of(row)?,
            profile: OrderProfile::of(row)?,
            machine: INSTANCE_PROVISIONING.decode_opt(row.id, row.provisioning.as_deref())?,
            kind: INSTANCE_TYPE.decode_opt(row.id, row.instance_type.as_deref())?,
            tracking: INSTANCE_TRACKING.decode_opt(row.id, row.tracking.as_deref())?.unwrap_or_default(),
        })
    }

    /// The offer that was requested last.
    pub(crate) fn offer(&self) -> Option<&Offer> {
        self.tries.as_ref().and_then(OfferAttempts::current)
    }
}

/// Column `instance_type`, from the hardware of the host.
pub(crate) fn host_instance_type(name: &str, has: &HardwareInfo, spot: bool) -> Value {
    let gpus: Vec<Value> = has.gpus.iter().map(|gpu| json!(gpu)).collect();
    let resources = json!({
        "cpus": has.cpus, "memory_mib": has.memory_mib, "spot": spot, "cpu_arch": has.arch,
        "disk": {"size_mib": has.disk_mib}, "gpus": gpus,
    });
    let mut kind = json!({ "name": name, "resources": resources });
    if !has.runtime.is_empty() {
        kind["runtime"] = json!(has.runtime);
    }
    if let Some(why) = &has.engine_away {
        kind[ENGINE_AWAY] = json!(why);
    }
    if let Some(processes) = &has.processes {
        kind[PROCESSES] = json!(processes);
    }
    kind
}

/// Fields of an instance type: how the host treats plain processes, and why its container engine does not answer.
const PROCESSES: &str = "processes";
const ENGINE_AWAY: &str = "engine_away";

/// Stored reason why the container engine of a host does not answer.
pub(crate) fn engine_problem(instance_type: Option<&Value>) -> Option<&str> {
    instance_type?[ENGINE_AWAY].as_str()
}

/// Merges the agent's report into a stored instance type, next to what its backend found.
pub(crate) fn merge_host_report(
    instance_type: &mut Value,
    stored: Option<&Value>,
    news: Option<&HostReport>,
    is_local: bool,
) {
    let before = |key: &str| stored.map(|stored| stored[key].clone()).filter(|value| !value.is_null());
    let processes = match news.and_then(|news| news.info.processes.as_ref()) {
        Some(reported) => Some(json!(reported)),
        // A report without the field overrides an earlier one: it may come from an older agent.
        None if news.is_some() => None,
        None => Some(instance_type[PROCESSES].clone())
            .filter(|found| !found.is_null())
            .or_else(|| before(PROCESSES)),
    };
    if let Some(processes) = processes {
        instance_type[PROCESSES] = processes;
    } else if let Some(fields) = instance_type.as_object_mut() {
        fields.remove(PROCESSES);
    }
    // For the server's own machine the backend knows better: an agent started without a container engine does not
    // report one as missing.
    if is_local {
        return;
    }
    let away = match news {
        Some(news) => news.health.engine.as_ref().map(|why| json!(why)),
        None => before(ENGINE_AWAY),
    };
    if let Some(why) = away {
        instance_type[ENGINE_AWAY] = why;
    } else if let Some(fields) = instance_type.as_object_mut() {
        fields.remove(ENGINE_AWAY);
    }
}

/// Column `instance_type`, from an offer.
pub(crate) fn offer_instance_type(offer: &Offer) -> Value {
    host_instance_type(&offer.instance_type, &hardware(&offer.host), offer.host.spot)
}

fn hardware(host: &HostSpec) -> HardwareInfo {
    let arch = host.arch.map(|arch| match arch {
        CpuArch::X86 => "x86".to_owned(),
        CpuArch::Arm => "arm".to_owned(),
    });
    HardwareInfo {
        cpus: host.cpus,
        arch,
        memory_mib: host.memory_mib,
        disk_mib: host.disk_mib,
        gpus: host.gpus.iter().map(GpuInfo::from).collect(),
        runtime: String::new(),
        engine_away: None,
        processes: None,
        addresses: Vec::new(),
    }
}

/// Hardware of a host as its agent reports it; for instances that the backend did not inspect.
pub(crate) fn reported_hardware(info: &HostInfo) -> HardwareInfo {
    HardwareInfo {
        cpus: info.cpus,
        arch: None,
        memory_mib: info.memory / MIB,
        disk_mib: info.disk_size / MIB,
        gpus: windlass_backend::gpus_from(info).iter().map(GpuInfo::from).collect(),
        runtime: String::new(),
        engine_away: None,
        processes: info.processes.clone(),
        addresses: info.addresses.clone(),
    }
}

/// Values of DCGM for a warning and a failure.
const DCGM_WARN: i64 = 10;
const DCGM_FAIL: i64 = 20;

/// Health of a host, and a description of its problems.
pub(crate) fn host_health(news: &HostReport) -> (Health, Option<String>) {
    let overall = news.health.dcgm.as_ref().map_or(0, |dcgm| dcgm.overall_health);
    let incidents = news.health.dcgm.iter().flat_map(|dcgm| &dcgm.incidents);
    let message: Vec<&str> = incidents
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
    (health, (!message.is_empty()).then(|| message.join("; ")))
}

#[cfg(test)]
mod tests {
    use windlass_api::agent::shim::{ConfinementMethod, InstanceHealth, ProcessMode, ProcessesInfo};

    use super::*;

    fn news(processes: Option<ProcessesInfo>, engine: Option<&str>) -> HostReport {
        let info = HostInfo { gpu_vendor: "none".into(), cpus: 1, processes, ..HostInfo::default() };
        let health = InstanceHealth { engine: engine.map(str::to_owned), ..InstanceHealth::default() };
        HostReport { version: "1.0.0".into(), info, health }
    }

    #[test]
    fn process_support_is_kept_until_the_host_reports_a_change() {
        let reported = ProcessesInfo {
            mode: ProcessMode::Confined,
            confined_by: Some(ConfinementMethod::Users),
            problem: None,
        };
        let fresh = || json!({"name": "ssh", "runtime": "any"});
        let mut kind = fresh();
        merge_host_report(&mut kind, None, Some(&news(Some(reported.clone()), None)), false);
        assert_eq!(kind["processes"], json!(reported));
        let (stored, mut again) = (kind, fresh());
        merge_host_report(&mut again, Some(&stored), None, false);
        assert_eq!(again, stored);
        merge_host_report(&mut again, Some(&stored), Some(&news(None, None)), false);
        assert_eq!(again, fresh());
    }

    #[test]
    fn engine_state_comes_from_the_agent_on_ssh_hosts_and_from_the_backend_locally() {
        let fresh = || json!({"name": "ssh", "runtime": "any"});
        let mut kind = fresh();
        merge_host_report(&mut kind, None, Some(&news(None, Some("no answer"))), false);
        assert_eq!(engine_problem(Some(&kind)), Some("no answer"));
        let (stored, mut back) = (kind, fresh());
        merge_host_report(&mut back, Some(&stored), Some(&news(None, None)), false);
        assert_eq!(engine_problem(Some(&back)), None);
        let mut here = stored.clone();
        merge_host_report(&mut here, Some(&stored), Some(&news(None, None)), true);
        assert_eq!(engine_problem(Some(&here)), Some("no answer"));
    }
}
