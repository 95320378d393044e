//! Free part of the host, and the sizes that are offered.

use windlass_model::{
    money::Price,
    plan::offers::{Availability, HostSpec, Offer},
    resources::CpuArch,
};

use super::{INSTANCE_KEY, LxdProvider, NAME, ShownInstance, settings::Settings};
use crate::BackendError;

const MIB: u64 = 1024 * 1024;
const MIB_PER_GB: u64 = 1024;
/// CPUs of the sizes that are offered where none are configured.
const USUAL_CPUS: [u32; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Memory per CPU of those sizes, in GB.
const USUAL_GB_PER_CPU: [u64; 3] = [2, 4, 8];

/// Resources of the host that windlass may use, and those that its machines use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct HostCapacity {
    pub(super) arch: Option<CpuArch>,
    pub(super) cpus: u32,
    pub(super) memory_mib: u64,
    pub(super) instances_max: Option<usize>,
    pub(super) used_cpus: u32,
    pub(super) used_memory_mib: u64,
    pub(super) instances: usize,
}

impl LxdProvider {
    pub(super) async fn capacity(&self) -> Result<HostCapacity, BackendError> {
        let what = "read the resources of the host";
        let resources = self.client.get("/1.0/resources").await.map_err(|error| error.to_backend(what))?;
        let arch = match resources["cpu"]["architecture"].as_str() {
            Some("x86_64") => Some(CpuArch::X86),
            Some("aarch64") => Some(CpuArch::Arm),
            Some(_) | None => None,
        };
        let total = resources["cpu"]["total"].as_u64().and_then(|count| u32::try_from(count).ok());
        let memory_mib = resources["memory"]["total"].as_u64().unwrap_or_default() / MIB;
        let limits = self.settings.capacity;
        let mut host = HostCapacity {
            arch,
            cpus: limits.cpus.or(total).unwrap_or_default(),
            memory_mib: limits.memory.map_or(memory_mib, |memory| memory.mib),
            instances_max: limits.instances,
            ..HostCapacity::default()
        };
        for shown in self.instances().await? {
            host.add(&shown);
        }
        Ok(host)
    }
}

impl HostCapacity {
    fn add(&mut self, shown: &ShownInstance) {
        if !shown.config.contains_key(INSTANCE_KEY) {
            return;
        }
        let limit = |key: &str| shown.config.get(key).map(String::as_str).unwrap_or_default();
        self.instances += 1;
        self.used_cpus += limit("limits.cpu").parse::<u32>().unwrap_or_default();
        let memory = limit("limits.memory").strip_suffix("MiB").and_then(|mib| mib.parse::<u64>().ok());
        self.used_memory_mib += memory.unwrap_or_default();
    }

    /// Returns the reason why a machine of this size does not fit now.
    pub(super) fn check(&self, wanted: &HostSpec) -> Result<(), String> {
        if let Some(max) = self.instances_max.filter(|max| self.instances >= *max) {
            return Err(format!("{} of {max} machines exist", self.instances));
        }
        let free = self.cpus.saturating_sub(self.used_cpus);
        if wanted.cpus > free {
            return Err(format!("it needs {} CPUs, and {free} of {} are free", wanted.cpus, self.cpus));
        }
        let free = self.memory_mib.saturating_sub(self.used_memory_mib);
        if wanted.memory_mib > free {
            let (wanted, all) = (wanted.memory_mib, self.memory_mib);
            return Err(format!("it needs {wanted} MiB of memory, and {free} of {all} MiB are free"));
        }
        Ok(())
    }

    /// Sizes that the host could ever hold; those that do not fit now are shown as not available.
    pub(super) fn offers(&self, settings: &Settings) -> Vec<Offer> {
        let sizes: Vec<(String, u32, u64, u64, f64)> = match settings.instance_types.is_empty() {
            false => settings
                .instance_types
                .iter()
                .map(|size| (size.name.clone(), size.cpus, size.memory.mib, size.disk.mib, size.price))
                .collect(),
            true => {
                let of = |cpus: u32| USUAL_GB_PER_CPU.map(|each| (cpus, u64::from(cpus) * each));
                let sizes = USUAL_CPUS.into_iter().flat_map(of);
                sizes.map(|(cpus, gb)| (format!("c{cpus}-m{gb}"), cpus, gb * MIB_PER_GB, 0, 0.0)).collect()
            }
        };
        let possible = sizes
            .into_iter()
            .filter(|(_, cpus, memory_mib, ..)| *cpus <= self.cpus && *memory_mib <= self.memory_mib);
        possible
            .map(|(instance_type, cpus, memory_mib, disk_mib, price)| {
                let host = HostSpec {
                    cpus,
                    arch: self.arch,
                    memory_mib,
                    disk_mib,
                    gpus: Vec::new(),
                    spot: false,
                    runtimes: None,
                };
                Offer {
                    backend: NAME.to_owned(),
                    region: settings.region.clone(),
                    zones: Vec::new(),
                    instance_type,
                    price: Price::from_dollars(price),
                    availability: match self.check(&host) {
                        Ok(()) => Availability::Available,
                        Err(_) => Availability::NotAvailable,
                    },
                    reservation: None,
                    host,
                    total_blocks: 1,
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn shown(config: serde_json::Value) -> ShownInstance {
        serde_json::from_value(json!({"name": "n", "status": "Running", "config": config})).unwrap()
    }

    #[test]
    fn machines_of_windlass_use_the_capacity_and_others_do_not() {
        let mut host = HostCapacity { cpus: 4, memory_mib: 8192, ..HostCapacity::default() };
        host.add(&shown(json!({"limits.cpu": "3", "limits.memory": "4096MiB", INSTANCE_KEY: "x"})));
        host.add(&shown(json!({"limits.cpu": "9", "limits.memory": "9000MiB"})));
        assert_eq!((host.instances, host.used_cpus, host.used_memory_mib), (1, 3, 4096));
        let names = |settings: &Settings| -> Vec<String> {
            let offers = host.offers(settings);
            offers
                .iter()
                .map(|offer| format!("{} {}", offer.instance_type, offer.availability.as_str()))
                .collect()
        };
        let expected = [
            "c1-m2 available",
            "c1-m4 available",
            "c1-m8 not available",
            "c2-m4 not available",
            "c2-m8 not available",
            "c4-m8 not available",
        ];
        assert_eq!(names(&Settings::default()), expected);
    }

    #[test]
    fn a_machine_that_does_not_fit_is_refused_with_the_numbers() {
        let host = HostCapacity {
            cpus: 4,
            memory_mib: 8192,
            used_cpus: 3,
            used_memory_mib: 8000,
            instances: 1,
            ..HostCapacity::default()
        };
        let wanted = |cpus, memory_mib| HostSpec {
            cpus,
            arch: None,
            memory_mib,
            disk_mib: 0,
            gpus: Vec::new(),
            spot: false,
            runtimes: None,
        };
        assert_eq!(host.check(&wanted(1, 100)), Ok(()));
        assert!(host.check(&wanted(2, 100)).unwrap_err().contains("1 of 4 are free"));
        assert!(host.check(&wanted(1, 500)).unwrap_err().contains("192 of 8192 MiB"));
        let full = HostCapacity { instances_max: Some(1), ..host };
        assert_eq!(full.check(&wanted(1, 100)).unwrap_err(), "1 of 1 machines exist");
    }
}
