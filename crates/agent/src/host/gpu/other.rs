//! Accelerators of Intel (Gaudi) and Tenstorrent.

use std::path::{Path, PathBuf};

use super::{Gpu, Inventory, Vendor, read_sysfs, tool_problems};
use crate::host::vendor_cli;

const GAUDI_TOOL: &str = "hl-smi";
const GAUDI_QUERY: &str = "index,uuid,name,memory.total,driver_version";
/// Memory in MiB of each type of card.
const TENSTORRENT_MEMORY: [(&str, u64); 5] =
    [("n150", 12 << 10), ("n300", 24 << 10), ("p100", 28 << 10), ("p150", 32 << 10), ("p300", 64 << 10)];

pub(super) async fn gaudi(root: &Path) -> Inventory {
    let arguments = ["-Q", GAUDI_QUERY, "-f", "csv,noheader,nounits"];
    match vendor_cli::run(GAUDI_TOOL, &arguments).await {
        Ok(text) => parse_gaudi(&text, &root.join("dev/accel")),
        Err(error) => Inventory { problems: tool_problems(&error), ..Inventory::default() },
    }
}

fn parse_gaudi(text: &str, nodes: &Path) -> Inventory {
    let mut inventory = Inventory::default();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let columns: Vec<&str> = line.split(',').map(str::trim).collect();
        let gpu = (columns.len() == 5).then(|| -> Option<Gpu> {
            let (index, memory_mib) = (columns[0].parse().ok()?, columns[3].parse().ok()?);
            let node = |name: String| nodes.join(&name).exists().then(|| Path::new("/dev/accel").join(name));
            let devices = [format!("accel{index}"), format!("accel_controlD{index}")]
                .into_iter()
                .filter_map(node)
                .collect();
            inventory.driver_version = Some(columns[4].to_owned());
            let (id, name) = (columns[1].to_owned(), columns[2].to_owned());
            let vendor = Vendor::Intel;
            Some(Gpu { vendor, id, index, name, memory_mib, compute_capability: None, devices })
        });
        match gpu.flatten() {
            Some(gpu) => inventory.gpus.push(gpu),
            None => {
                inventory.problems.push(format!("hl-smi: {}", line.chars().take(200).collect::<String>()))
            }
        }
    }
    inventory
}

/// Finds cards by their device files; the kernel reports the type of each.
pub(super) fn tenstorrent(root: &Path) -> Inventory {
    let mut numbers: Vec<u32> = std::fs::read_dir(root.join("dev/tenstorrent"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    numbers.sort_unstable();
    let mut inventory = Inventory::default();
    for index in numbers {
        let dir = root.join(format!("sys/class/tenstorrent/tenstorrent!{index}"));
        let kind = read_sysfs(&dir.join("tt_card_type")).unwrap_or_default();
        let memory = TENSTORRENT_MEMORY.iter().find(|(known, _)| kind.starts_with(known));
        let Some((_, memory_mib)) = memory else {
            inventory.problems.push(format!("/dev/tenstorrent/{index}: unknown card type `{kind}`"));
            continue;
        };
        inventory.gpus.push(Gpu {
            vendor: Vendor::Tenstorrent,
            id: read_sysfs(&dir.join("tt_serial")).unwrap_or_else(|| format!("tenstorrent-{index}")),
            index,
            name: kind,
            memory_mib: *memory_mib,
            compute_capability: None,
            devices: vec![PathBuf::from(format!("/dev/tenstorrent/{index}"))],
        });
    }
    inventory
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fixture::Fixture;

    #[test]
    fn gaudi_gpus_are_parsed_from_hl_smi_output() {
        let fixture = Fixture::new();
        fixture.write("accel0", "");
        let text = "0, 01P0-HL2080A0-15-TNBS18-03-07-00, HL-225, 98304, 1.15.1-62f612b\nWarning: something\n";
        let found = parse_gaudi(text, fixture.path());
        let [gpu] = found.gpus.as_slice() else { panic!("{found:?}") };
        assert_eq!((gpu.name.as_str(), gpu.memory_mib, gpu.index), ("HL-225", 98304, 0));
        assert_eq!(gpu.devices, [Path::new("/dev/accel/accel0")]);
        assert_eq!(found.driver_version.as_deref(), Some("1.15.1-62f612b"));
        assert_eq!(found.problems, ["hl-smi: Warning: something"]);
    }

    #[test]
    fn tenstorrent_cards_are_found_by_their_device_files() {
        let fixture = Fixture::new();
        for (index, kind) in [(0, "n300"), (1, "x999"), (10, "p150a")] {
            fixture.write(&format!("dev/tenstorrent/{index}"), "");
            fixture.write(&format!("sys/class/tenstorrent/tenstorrent!{index}/tt_card_type"), kind);
        }
        fixture.write("dev/tenstorrent/by-id", "");
        fixture.write("sys/class/tenstorrent/tenstorrent!0/tt_serial", "100014211723\n");
        let found = tenstorrent(fixture.path());
        let lines: Vec<String> = found
            .gpus
            .iter()
            .map(|gpu| format!("{} {} {} {}", gpu.index, gpu.id, gpu.name, gpu.memory_mib))
            .collect();
        assert_eq!(lines, ["0 100014211723 n300 24576", "10 tenstorrent-10 p150a 32768"]);
        assert_eq!(found.problems, ["/dev/tenstorrent/1: unknown card type `x999`"]);
    }
}
