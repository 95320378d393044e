//! GPU matching from a driver's report to a job's request, end to end.

use windlass_api::agent::shim::HostInfo;
use windlass_backend::gpus_from;
use windlass_model::{
    config::resources::parse_gpu,
    plan::offers::{HostSpec, host_shortfalls},
    resources::{CpuSpec, Range, ResourcesSpec},
};

fn host(vendor: &str, name: &str, memory: u64, count: u32, capability: Option<(u32, u32)>) -> HostSpec {
    let info = HostInfo {
        gpu_vendor: vendor.into(),
        gpu_name: name.into(),
        gpu_memory: memory,
        gpu_count: count,
        gpu_compute_capability: capability,
        addresses: Vec::new(),
        disk_size: 1 << 40,
        cpus: 16,
        memory: 128 << 30,
        processes: None,
    };
    let gpus = gpus_from(&info);
    HostSpec {
        cpus: 16,
        arch: None,
        memory_mib: 131_072,
        disk_mib: 1_048_576,
        gpus,
        spot: false,
        runtimes: None,
    }
}

/// Returns the shortfalls, as users read them.
fn shortfall(host: &HostSpec, gpu: &str, capability: Option<(u32, u32)>) -> String {
    let mut gpu = parse_gpu(gpu).unwrap();
    gpu.compute_capability = capability;
    let cpu = CpuSpec { arch: None, count: Range::ANY };
    let wanted = ResourcesSpec { cpu, gpu: Some(gpu), ..ResourcesSpec::default() };
    let short: Vec<String> = host_shortfalls(host, &wanted).iter().map(ToString::to_string).collect();
    short.join("; ")
}

#[test]
fn a_gpu_host_fits_requests_by_name_memory_vendor_or_compute_capability() {
    let h200 = host("nvidia", "NVIDIA H200", 143_771, 1, Some((9, 0)));
    for gpu in
        ["H200", "h200:1", "141GB", "nvidia:H200:1", "H200:141GB", "H100,H200", "100GB..", "nvidia", "1"]
    {
        assert_eq!(shortfall(&h200, gpu, None), "", "{gpu}");
    }
    assert_eq!(shortfall(&h200, "nvidia", Some((9, 0))), "");
    assert_eq!(shortfall(&h200, "nvidia", Some((8, 6))), "");
    for (gpu, capability, why) in [
        ("H100", None, "needs GPU H100, has H200"),
        ("amd", None, "needs amd GPUs, has nvidia"),
        ("80GB", None, "needs exactly 80GB of memory per GPU, has 141GB"),
        ("nvidia", Some((10, 0)), "needs compute capability 10.0, has 9.0"),
    ] {
        assert_eq!(shortfall(&h200, gpu, capability), why, "{gpu}");
    }
}

#[test]
fn gpu_memory_requests_match_the_nominal_size_not_the_reported_size() {
    for (name, memory, gpu) in [
        ("NVIDIA H100 80GB HBM3", 81_559, "H100:80GB"),
        ("Tesla T4", 15_360, "T4:16GB"),
        ("NVIDIA L4", 23_034, "24GB"),
        ("NVIDIA A40", 46_068, "A40:48GB"),
        ("NVIDIA A100-SXM4-40GB", 40_960, "A100:40GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887, "RTXPRO6000:96GB"),
    ] {
        assert_eq!(shortfall(&host("nvidia", name, memory, 1, None), gpu, None), "", "{gpu} on {name}");
    }
    let mi300x = host("amd", "AMD Instinct MI300X", 196_592, 8, None);
    assert_eq!(shortfall(&mi300x, "amd:MI300X:8", None), "");
    assert_eq!(shortfall(&mi300x, "192GB:8", None), "");
}
