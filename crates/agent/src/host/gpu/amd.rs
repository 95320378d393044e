//! AMD GPUs: found in the kernel's files, named by `amd-smi`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::{Gpu, GpuUsage, Inventory, Vendor, read_sysfs, tool_problems};
use crate::host::vendor_cli;

const TOOL: &str = "amd-smi";
const VENDOR_ID: &str = "0x1002";
/// Names for hosts without the tool; the kernel reports the number only.
const NAMES: [(&str, &str); 10] = [
    ("0x738c", "AMD Instinct MI100"),
    ("0x740f", "AMD Instinct MI210"),
    ("0x740c", "AMD Instinct MI250"),
    ("0x7408", "AMD Instinct MI250X"),
    ("0x74a0", "AMD Instinct MI300A"),
    ("0x74a1", "AMD Instinct MI300X"),
    ("0x74b5", "AMD Instinct MI300X"),
    ("0x74a5", "AMD Instinct MI325X"),
    ("0x75a0", "AMD Instinct MI350X"),
    ("0x75a3", "AMD Instinct MI355X"),
];

pub(super) async fn discover(root: &Path) -> Inventory {
    let cards = list_cards(root);
    if cards.is_empty() {
        return Inventory::default();
    }
    let mut problems = Vec::new();
    let known = match vendor_cli::run(TOOL, &["static", "--asic", "--bus", "--driver", "--json"]).await {
        Ok(text) => parse_static(&text),
        Err(error) => {
            problems.extend(tool_problems(&error));
            ToolInfo::default()
        }
    };
    let driver_version =
        known.driver_version.clone().or_else(|| read_sysfs(&root.join("sys/module/amdgpu/version")));
    let gpus = (0..).zip(cards).map(|(index, card)| card.gpu(index, &known)).collect();
    Inventory { gpus, driver_version, problems }
}

pub(super) fn usage(root: &Path) -> Vec<GpuUsage> {
    let number = |path: PathBuf| read_sysfs(&path).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    let used = |card: Card| GpuUsage {
        memory_mib: number(card.dir.join("mem_info_vram_used")) >> 20,
        percent: number(card.dir.join("gpu_busy_percent")),
        id: card.id,
    };
    list_cards(root).into_iter().map(used).collect()
}

/// One GPU as the kernel reports it.
#[derive(Debug)]
struct Card {
    dir: PathBuf,
    id: String,
    bus: String,
    name: String,
    memory_mib: u64,
    nodes: Vec<PathBuf>,
}

impl Card {
    fn gpu(self, index: u32, known: &ToolInfo) -> Gpu {
        let name = known.names.get(&self.bus).cloned().unwrap_or(self.name);
        let devices = [PathBuf::from("/dev/kfd")].into_iter().chain(self.nodes).collect();
        let (id, memory_mib) = (self.id, self.memory_mib);
        Gpu { vendor: Vendor::Amd, id, index, name, memory_mib, compute_capability: None, devices }
    }
}

/// Returns all render nodes of the vendor with dedicated memory, in the order of their numbers.
fn list_cards(root: &Path) -> Vec<Card> {
    let mut nodes: Vec<(u32, PathBuf)> = std::fs::read_dir(root.join("sys/class/drm"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.strip_prefix("renderD")?.parse().ok()?;
            Some((number, entry.path().join("device")))
        })
        .collect();
    nodes.sort();
    nodes.into_iter().filter_map(|(number, dir)| read_card(number, dir)).collect()
}

fn read_card(render: u32, dir: PathBuf) -> Option<Card> {
    if read_sysfs(&dir.join("vendor"))? != VENDOR_ID {
        return None;
    }
    let memory_mib = read_sysfs(&dir.join("mem_info_vram_total"))?.parse::<u64>().ok()? >> 20;
    let uevent = read_sysfs(&dir.join("uevent")).unwrap_or_default();
    let bus = uevent
        .lines()
        .find_map(|line| line.strip_prefix("PCI_SLOT_NAME="))
        .unwrap_or_default()
        .to_ascii_lowercase();
    // Consumer cards have no unique id; the bus address is used instead.
    let id = read_sysfs(&dir.join("unique_id")).unwrap_or_else(|| bus.clone());
    let number = read_sysfs(&dir.join("device")).unwrap_or_default();
    let listed = || NAMES.iter().find(|(known, _)| *known == number).map(|(_, name)| (*name).to_owned());
    let name =
        read_sysfs(&dir.join("product_name")).or_else(listed).unwrap_or_else(|| format!("AMD GPU {number}"));
    let mut nodes = vec![PathBuf::from(format!("/dev/dri/renderD{render}"))];
    let drm = std::fs::read_dir(dir.join("drm")).into_iter().flatten().flatten();
    let card =
        drm.filter_map(|entry| entry.file_name().into_string().ok()).find(|name| name.starts_with("card"));
    nodes.extend(card.map(|name| Path::new("/dev/dri").join(name)));
    Some(Card { dir, id, bus, name, memory_mib, nodes })
}

#[derive(Debug, Default, PartialEq, Eq)]
struct ToolInfo {
    /// Names by bus address.
    names: BTreeMap<String, String>,
    driver_version: Option<String>,
}

/// Parses the tool's output, which was a list, and later an object that contains one; the fields stayed the same.
fn parse_static(text: &str) -> ToolInfo {
    let mut known = ToolInfo::default();
    let answer: Value = serde_json::from_str(text).unwrap_or_default();
    let list = answer.get("gpu_data").unwrap_or(&answer);
    for gpu in list.as_array().into_iter().flatten() {
        let text = |pointer: &str| gpu.pointer(pointer).and_then(Value::as_str).filter(|text| *text != "N/A");
        if let (Some(bus), Some(name)) = (text("/bus/bdf"), text("/asic/market_name")) {
            known.names.insert(bus.to_ascii_lowercase(), name.to_owned());
        }
        if known.driver_version.is_none() {
            known.driver_version =
                text("/driver/version").or_else(|| text("/driver/driver_version")).map(str::to_owned);
        }
    }
    known
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fixture::Fixture;

    fn two_cards() -> Fixture {
        let fixture = Fixture::new();
        for (render, bus, device) in [(128, "0000:05:00.0", "0x74a1"), (129, "0000:26:00.0", "0x9999")] {
            let dir = format!("sys/class/drm/renderD{render}/device");
            fixture.write(&format!("{dir}/vendor"), "0x1002\n");
            fixture.write(&format!("{dir}/device"), &format!("{device}\n"));
            fixture.write(&format!("{dir}/mem_info_vram_total"), "206141652992\n");
            fixture.write(&format!("{dir}/mem_info_vram_used"), "1073741824\n");
            fixture.write(&format!("{dir}/gpu_busy_percent"), "42\n");
            fixture.write(&format!("{dir}/uevent"), &format!("DRIVER=amdgpu\nPCI_SLOT_NAME={bus}\n"));
            fixture.write(&format!("{dir}/drm/card{}/dev", render - 127), "226:1\n");
        }
        fixture.write("sys/class/drm/renderD128/device/unique_id", "8d1f0a9e4c3b2a17\n");
        fixture.write("sys/class/drm/renderD130/device/vendor", "0x8086\n");
        fixture.write("sys/class/drm/card0/device/vendor", "0x1002\n");
        fixture.write("sys/module/amdgpu/version", "6.12.12\n");
        fixture
    }

    #[test]
    fn amd_gpus_are_detected_from_kernel_files_alone() {
        let fixture = two_cards();
        let known = ToolInfo::default();
        let gpus: Vec<Gpu> =
            (0..).zip(list_cards(fixture.path())).map(|(index, card)| card.gpu(index, &known)).collect();
        let lines: Vec<String> = gpus
            .iter()
            .map(|gpu| format!("{} {} {} {} {:?}", gpu.index, gpu.id, gpu.name, gpu.memory_mib, gpu.devices))
            .collect();
        assert_eq!(
            lines,
            [
                r#"0 8d1f0a9e4c3b2a17 AMD Instinct MI300X 196592 ["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/card1"]"#,
                r#"1 0000:26:00.0 AMD GPU 0x9999 196592 ["/dev/kfd", "/dev/dri/renderD129", "/dev/dri/card2"]"#,
            ]
        );
        let used = usage(fixture.path());
        assert_eq!(used[0], GpuUsage { id: "8d1f0a9e4c3b2a17".into(), memory_mib: 1024, percent: 42 });
    }

    #[test]
    fn output_of_several_amd_tool_versions_is_parsed() {
        let gpu = r#"{"gpu":0,"asic":{"market_name":"AMD Instinct MI300X OAM"},"bus":{"bdf":"0000:05:00.0"},"driver":{"name":"amdgpu","version":"6.8.5"}}"#;
        for answer in [format!("[{gpu}]"), format!(r#"{{"gpu_data":[{gpu}],"system_data":{{}}}}"#)] {
            let known = parse_static(&answer);
            assert_eq!(known.names["0000:05:00.0"], "AMD Instinct MI300X OAM");
            assert_eq!(known.driver_version.as_deref(), Some("6.8.5"));
        }
        for nothing in
            ["", "not JSON", "[]", r#"[{"asic":{"market_name":"N/A"},"bus":{"bdf":"0000:05:00.0"}}]"#]
        {
            assert_eq!(parse_static(nothing), ToolInfo::default(), "{nothing}");
        }
    }
}
