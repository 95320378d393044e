//! Normalisation of GPU names of drivers, labels, Slurm and users.

use windlass_model::gpu::{MODELS, identify_device, matches_request, vendor_of};
use windlass_model::resources::GpuVendor;

/// Name and MiB that a driver reports (0 = not reported), and the normalised name.
const DEVICES: &[(&str, u64, &str, Option<u64>)] = &[
    // Names as `nvidia-smi` prints them.
    ("NVIDIA H200", 143_771, "H200", Some(141)),
    ("NVIDIA H200 NVL", 143_771, "H200-NVL", Some(141)),
    ("NVIDIA H100 80GB HBM3", 81_559, "H100-SXM", Some(80)),
    ("NVIDIA H100 PCIe", 81_559, "H100-PCIe", Some(80)),
    ("NVIDIA H100 NVL", 95_830, "H100-NVL", Some(94)),
    ("NVIDIA H800", 81_559, "H800", Some(80)),
    ("NVIDIA H20", 97_871, "H20", Some(96)),
    ("NVIDIA GH200 480GB", 97_871, "GH200", Some(96)),
    ("NVIDIA GH200 144G HBM3e", 147_456, "GH200", Some(144)),
    ("NVIDIA B200", 183_359, "B200", Some(180)),
    ("NVIDIA B300 SXM6 AC", 275_040, "B300-SXM", Some(268)),
    ("NVIDIA GB200", 189_471, "GB200", Some(186)),
    ("NVIDIA GB10", 122_570, "GB10", Some(128)),
    ("NVIDIA A100-SXM4-80GB", 81_920, "A100-SXM", Some(80)),
    ("NVIDIA A100-SXM4-40GB", 40_960, "A100-SXM", Some(40)),
    ("NVIDIA A100 80GB PCIe", 81_920, "A100-PCIe", Some(80)),
    ("NVIDIA A100-PCIE-40GB", 40_960, "A100-PCIe", Some(40)),
    ("A100-PCIE-40GB", 40_536, "A100-PCIe", Some(40)),
    ("NVIDIA A100-PG509-200", 40_960, "A100", Some(40)),
    ("NVIDIA A800-SXM4-80GB", 81_920, "A800-SXM", Some(80)),
    ("NVIDIA A40", 46_068, "A40", Some(48)),
    ("NVIDIA A30", 24_576, "A30", Some(24)),
    ("NVIDIA A16", 15_356, "A16", Some(16)),
    ("NVIDIA A10", 23_028, "A10", Some(24)),
    ("NVIDIA A10G", 23_028, "A10G", Some(24)),
    ("NVIDIA A2", 15_356, "A2", Some(16)),
    ("NVIDIA L4", 23_034, "L4", Some(24)),
    ("NVIDIA L40", 46_068, "L40", Some(48)),
    ("NVIDIA L40S", 46_068, "L40S", Some(48)),
    ("NVIDIA L20", 46_068, "L20", Some(48)),
    ("Tesla T4", 15_360, "T4", Some(16)),
    // Types of clusters.
    ("a100-40", 0, "A100", Some(40)),
    ("a100_80", 0, "A100", Some(80)),
    ("Tesla V100-SXM2-16GB", 16_160, "V100-SXM", Some(16)),
    ("Tesla V100-SXM2-32GB", 32_510, "V100-SXM", Some(32)),
    ("Tesla V100-SXM2-32GB-LS", 32_510, "V100-SXM", Some(32)),
    ("Tesla V100-PCIE-16GB", 16_160, "V100-PCIe", Some(16)),
    ("Tesla V100S-PCIE-32GB", 32_510, "V100S-PCIe", Some(32)),
    ("Tesla P100-PCIE-16GB", 16_280, "P100-PCIe", Some(16)),
    ("Tesla P40", 24_451, "P40", Some(24)),
    ("Tesla P4", 7_611, "P4", Some(8)),
    ("Tesla K80", 11_441, "K80", Some(12)),
    ("Tesla M60", 8_129, "M60", Some(8)),
    ("NVIDIA RTX A6000", 49_140, "A6000", Some(48)),
    ("NVIDIA RTX A5000", 24_564, "A5000", Some(24)),
    ("NVIDIA RTX A4000", 16_376, "A4000", Some(16)),
    ("Quadro RTX 6000", 24_220, "RTX6000", Some(24)),
    ("Quadro RTX 8000", 48_601, "RTX8000", Some(48)),
    ("NVIDIA RTX 6000 Ada Generation", 49_140, "RTX6000Ada", Some(48)),
    ("NVIDIA RTX 4000 Ada Generation", 20_475, "RTX4000Ada", Some(20)),
    ("NVIDIA RTX 5880 Ada Generation", 49_140, "RTX5880Ada", Some(48)),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887, "RTXPRO6000", Some(96)),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97_887, "RTXPRO6000", Some(96)),
    ("NVIDIA GeForce RTX 5090", 32_607, "RTX5090", Some(32)),
    ("NVIDIA GeForce RTX 4090", 24_564, "RTX4090", Some(24)),
    ("NVIDIA GeForce RTX 4090 D", 24_564, "RTX4090D", Some(24)),
    ("NVIDIA GeForce RTX 4080 SUPER", 16_376, "RTX4080Super", Some(16)),
    ("NVIDIA GeForce RTX 3090", 24_576, "RTX3090", Some(24)),
    ("NVIDIA GeForce RTX 3080", 10_240, "RTX3080", Some(10)),
    ("GeForce RTX 2080 Ti", 11_019, "RTX2080Ti", Some(11)),
    ("NVIDIA GeForce GTX 1080 Ti", 11_264, "GTX1080Ti", Some(11)),
    ("NVIDIA TITAN RTX", 24_220, "TITANRTX", Some(24)),
    ("NVIDIA TITAN V", 12_066, "TITANV", Some(12)),
    // Parts of GPUs, whose memory is the part's.
    ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20_480, "A100-SXM-MIG-3g.20gb", Some(20)),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", 10_240, "H100-SXM-MIG-1g.10gb+me", Some(10)),
    // Labels of Kubernetes, types of Slurm's gres, names of clouds: without a memory size.
    ("NVIDIA-A100-SXM4-80GB", 0, "A100-SXM", Some(80)),
    ("NVIDIA-H100-80GB-HBM3", 0, "H100-SXM", Some(80)),
    ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", 0, "A100-SXM-MIG-1g.5gb", Some(5)),
    ("nvidia-tesla-t4", 0, "T4", Some(16)),
    ("nvidia-h100-mega-80gb", 0, "H100", Some(80)),
    ("nvidia_a100-sxm4-80gb", 0, "A100-SXM", Some(80)),
    ("a100", 0, "A100", None),
    ("a100_3g.20gb", 0, "A100-MIG-3g.20gb", Some(20)),
    ("tesla_v100", 0, "V100", None),
    ("h100_nvl", 0, "H100-NVL", None),
    ("rtx_a6000", 0, "A6000", Some(48)),
    ("A100-80GB-SXM", 0, "A100-SXM", Some(80)),
    ("RTX6000-Ada", 0, "RTX6000Ada", Some(48)),
    ("T4g", 0, "T4G", Some(16)),
    // Other vendors.
    ("AMD Instinct MI300X", 196_592, "MI300X", Some(192)),
    ("AMD Instinct MI300X OAM", 196_592, "MI300X-OAM", Some(192)),
    ("AMD Instinct MI325X", 262_128, "MI325X", Some(256)),
    ("AMD Instinct MI250X / MI250", 65_520, "MI250X", Some(64)),
    ("AMD Instinct MI210", 65_520, "MI210", Some(64)),
    ("AMD Radeon PRO W7900", 49_136, "W7900", Some(48)),
    ("HL-205", 32_768, "Gaudi", Some(32)),
    ("HL-225", 98_304, "Gaudi2", Some(96)),
    ("HL-325L", 131_072, "Gaudi3", Some(128)),
    ("Gaudi HL-205", 0, "Gaudi", Some(32)),
    ("Intel(R) Data Center GPU Max 1550", 131_072, "Max1550", Some(128)),
    ("n300", 24_576, "n300", Some(24)),
    ("p150b", 32_768, "p150", Some(32)),
    // Unknown devices: they keep their name, and a usual size.
    ("NVIDIA Z9000 Ultra", 63_900, "NVIDIA Z9000 Ultra", Some(64)),
    ("Some Card, Limited, Edition", 8_192, "Some Card, Limited, Edition", Some(8)),
];

#[test]
fn every_spelling_of_a_gpu_resolves_to_one_name() {
    for &(message, mib, name, gigabytes) in DEVICES {
        let found = identify_device(message, (mib > 0).then_some(mib));
        assert_eq!(
            (found.name.as_str(), found.memory_mib.map(|mib| mib / 1024)),
            (name, gigabytes),
            "{message}"
        );
        let again = identify_device(&found.name, found.memory_mib);
        assert_eq!(
            (again.name, again.memory_mib),
            (found.name, found.memory_mib),
            "{message}, a second time"
        );
        assert!(matches_request(message, name, found.memory_mib.unwrap_or(0)), "{message} is {name}");
    }
}

/// Cases of a request, a device by its driver's name and MiB, and whether it matches.
#[test]
fn a_gpu_request_matches_only_the_devices_it_names() {
    for (wanted, driver, mib, meant) in [
        ("H200", "NVIDIA H200", 143_771, true),
        ("h200", "NVIDIA H200", 143_771, true),
        ("NVIDIA H200", "NVIDIA H200", 143_771, true),
        ("H200-SXM", "NVIDIA H200", 143_771, true),
        ("H200-NVL", "NVIDIA H200", 143_771, false),
        ("H100", "NVIDIA H200", 143_771, false),
        ("H20", "NVIDIA H200", 143_771, false),
        ("H100", "NVIDIA H100 NVL", 95_830, true),
        ("H100-SXM", "NVIDIA H100 NVL", 95_830, false),
        ("H100NVL", "NVIDIA H100 NVL", 95_830, true),
        ("A100", "NVIDIA A100-SXM4-40GB", 40_960, true),
        ("A100-80GB", "NVIDIA A100-SXM4-40GB", 40_960, false),
        ("A100-80GB", "NVIDIA A100 80GB PCIe", 81_920, true),
        ("A100-80GB-SXM", "NVIDIA A100 80GB PCIe", 81_920, false),
        ("A100", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20_480, false),
        ("A100-MIG-3g.20gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20_480, true),
        ("V100-32GB", "Tesla V100-SXM2-16GB", 16_160, false),
        ("V100-32GB", "Tesla V100-SXM2-32GB", 32_510, true),
        ("L4", "NVIDIA L40", 46_068, false),
        ("A10", "NVIDIA A10G", 23_028, false),
        ("RTX6000", "NVIDIA RTX 6000 Ada Generation", 49_140, false),
        ("RTX6000Ada", "NVIDIA RTX 6000 Ada Generation", 49_140, true),
        ("RTXA6000", "NVIDIA RTX A6000", 49_140, true),
        ("RTX 4090", "NVIDIA GeForce RTX 4090", 24_564, true),
        ("RTX4090", "NVIDIA GeForce RTX 4090 D", 24_564, false),
        ("MI300X", "AMD Instinct MI300X OAM", 196_592, true),
        ("gaudi2", "HL-225", 98_304, true),
        ("Z9000 Ultra", "NVIDIA Z9000 Ultra", 63_900, true),
        ("z9000-ultra", "NVIDIA Z9000 Ultra", 63_900, true),
        ("Z9000", "NVIDIA Z9000 Ultra", 63_900, false),
    ] {
        let has = identify_device(driver, Some(mib));
        assert_eq!(
            matches_request(wanted, &has.name, has.memory_mib.unwrap()),
            meant,
            "{wanted} on {driver}"
        );
    }
}

#[test]
fn each_catalogue_name_matches_only_its_own_model() {
    for model in MODELS {
        let found = identify_device(model.name, None);
        assert_eq!((found.name.as_str(), found.vendor), (model.name, Some(model.vendor)));
        assert!(!model.memory_gb.is_empty() && model.memory_gb.is_sorted(), "{}", model.name);
        let is_nvidia = model.vendor == GpuVendor::Nvidia;
        assert_eq!(model.compute_capability.is_some(), is_nvidia, "{}", model.name);
        for other in MODELS {
            let same = std::ptr::eq(model, other);
            assert_eq!(matches_request(model.name, other.name, 0), same, "{} and {}", model.name, other.name);
        }
    }
}

#[test]
fn the_vendor_is_derived_from_the_device_name() {
    for (name, vendor) in [
        ("H100", Some(GpuVendor::Nvidia)),
        ("Tesla X", Some(GpuVendor::Nvidia)),
        ("AMD GPU 29631", Some(GpuVendor::Amd)),
        ("gaudi9", Some(GpuVendor::Intel)),
        ("tt-quietbox", Some(GpuVendor::Tenstorrent)),
        ("v5litepod-8", Some(GpuVendor::Google)),
        ("v6e-4", Some(GpuVendor::Google)),
        ("something", None),
    ] {
        assert_eq!(vendor_of(name), vendor, "{name}");
    }
}
