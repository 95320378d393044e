//! Offers against needs, blocks, and the messages of shortfalls.

use proptest::prelude::*;
use windlass_model::{
    explain::{Refusal, Shortfall, refusal_summary},
    money::Price,
    plan::{
        blocks::{Blocks, UnevenBlocks, host_share, smallest_fitting, split_count},
        execution_mode::ImageChoice,
        offers::{
            Gpu, HostSpec, InstanceFilter, InstanceNeeds, Location, Offer, granted_gpus, host_shortfalls,
            is_instance_selected, shortfalls, smallest_fit,
        },
    },
    resources::{CpuArch, DiskSpec, GpuSpec, GpuVendor, Range, ResourcesSpec},
};

use super::placement::{host, needs, offer};

fn gpu_spec() -> GpuSpec {
    GpuSpec {
        vendor: None,
        name: None,
        count: Range::at_least(1),
        memory: None,
        total_memory: None,
        compute_capability: None,
    }
}

/// Applies one change to a request that fits, and compares the message of the shortfall ("" = it still fits).
#[track_caller]
fn check(change: impl FnOnce(&mut InstanceNeeds, &mut Offer), expect: &str) {
    let (mut instance_needs, mut has) = (needs(2, 0), offer(host(8, 2), 1, 1.5));
    instance_needs.resources.as_mut().unwrap().gpu = Some(gpu_spec());
    has.host.arch = Some(CpuArch::X86);
    has.zones = vec!["here-a".into()];
    assert_eq!(shortfalls(&has, &instance_needs), []);
    change(&mut instance_needs, &mut has);
    let message: Vec<_> = shortfalls(&has, &instance_needs).iter().map(ToString::to_string).collect();
    assert_eq!(message.join("; "), expect);
}

fn resources(needs: &mut InstanceNeeds) -> &mut windlass_model::resources::ResourcesSpec {
    needs.resources.as_mut().unwrap()
}

fn gpu(needs: &mut InstanceNeeds) -> &mut GpuSpec {
    resources(needs).gpu.as_mut().unwrap()
}

#[test]
fn ranges_are_inclusive_at_both_ends() {
    check(|needs, _| resources(needs).cpu.count = Range::exactly(8), "");
    check(|needs, _| resources(needs).cpu.count = Range::exactly(9), "needs exactly 9 CPUs, has 8");
    check(|needs, _| resources(needs).memory = Range { min: Some(1.0), max: Some(32.0) }, "");
    let narrow = Range { min: Some(1.0), max: Some(31.0) };
    check(move |needs, _| resources(needs).memory = narrow, "needs 1GB to 31GB of memory, has 32GB");
}

#[test]
fn disk_size_is_checked_only_if_the_offer_states_it() {
    let disk = || Some(DiskSpec { size: Range::at_least(100.0) });
    check(|needs, _| resources(needs).disk = disk(), "");
    check(
        |needs, has| {
            resources(needs).disk = disk();
            has.host.disk_mib = 50 * 1024;
        },
        "needs at least 100GB of disk, has 50GB",
    );
}

#[test]
fn the_architecture_must_be_equal_if_given() {
    check(|needs, _| resources(needs).cpu.arch = Some(CpuArch::X86), "");
    check(|needs, _| resources(needs).cpu.arch = Some(CpuArch::Arm), "needs arm CPUs, has x86");
}

#[test]
fn gpu_names_ignore_case_and_every_failed_gpu_filter_is_reported() {
    check(|needs, _| gpu(needs).name = Some(vec!["a100".into(), "h100".into()]), "");
    check(
        |needs, _| {
            *gpu(needs) = GpuSpec {
                vendor: Some(GpuVendor::Amd),
                name: Some(vec!["MI300X".into()]),
                count: Range::at_least(4),
                memory: Some(Range::at_least(192.0)),
                total_memory: Some(Range::at_least(200.0)),
                compute_capability: Some((9, 0)),
            };
        },
        "needs at least 4 GPUs, has 2; needs amd GPUs, has nvidia; needs GPU MI300X, has H100; \
         needs at least 192GB of memory per GPU, has 80GB; needs at least 200GB of GPU memory in total, has 160GB; \
         needs compute capability 9.0, has an unknown one",
    );
}

#[test]
fn an_existing_host_may_exceed_an_exact_request_and_a_cloud_offer_may_not() {
    let exact = |needs: &mut InstanceNeeds| {
        gpu(needs).count = Range::exactly(1);
        resources(needs).cpu.count = Range::exactly(2);
    };
    check(|needs, _| exact(needs), "needs exactly 2 CPUs, has 8; needs exactly 1 GPU, has 2");
    for backend in ["local", "remote", "slurm"] {
        let on = |has: &mut Offer| has.backend = backend.into();
        check(|needs, has| (exact(needs), on(has)).1, "");
        check(|needs, has| (gpu(needs).count = Range::exactly(3), on(has)).1, "needs exactly 3 GPUs, has 2");
    }
    let machine = host(4, 2);
    let given = |count| {
        let mut wanted = needs(2, 0).resources.unwrap();
        wanted.gpu = Some(GpuSpec { count, ..gpu_spec() });
        granted_gpus(&host_share(&machine, 1, 1), &wanted)
    };
    assert_eq!([given(Range::exactly(1)), given(Range::at_least(1)), given(Range::exactly(0))], [1, 2, 0]);
}

#[test]
fn gpu_filters_are_skipped_for_a_host_without_gpus_when_none_are_required() {
    let mut instance_needs = needs(2, 0).resources.unwrap();
    instance_needs.gpu =
        Some(GpuSpec { name: Some(vec!["A100".into()]), count: Range::at_least(0), ..gpu_spec() });
    assert_eq!(host_shortfalls(&host(4, 0), &instance_needs), []);
    assert_eq!(host_shortfalls(&host(4, 1), &instance_needs).len(), 1);
}

#[test]
fn regions_backends_types_price_spot_and_reservation_filter_offers() {
    check(|needs, _| needs.regions = Some(vec!["HERE".into()]), "");
    check(|needs, _| needs.regions = Some(vec!["eu".into(), "us".into()]), "needs region eu or us, is here");
    check(|needs, _| needs.backends = Some(vec!["aws".into()]), "needs backend aws, is ssh");
    check(|needs, _| needs.zones = Some(vec!["here-b".into()]), "needs zone here-b, is here-a");
    check(|needs, _| needs.instance_types = Some(vec!["m5".into()]), "needs instance type m5, is c8g2");
    check(|needs, _| needs.max_price = Some(Price::from_dollars(1.5)), "");
    check(
        |needs, _| needs.max_price = Some(Price::from_dollars(1.49)),
        "costs $1.5/h, at most $1.49/h is allowed",
    );
    check(|needs, _| needs.spot = Some(true), "needs spot, is on-demand");
    check(|needs, _| needs.reservation = Some("r".into()), "needs reservation r, has none");
}

#[test]
fn every_mount_point_needs_a_volume_in_the_same_place() {
    let at = |region: &str, zone: Option<&str>| Location {
        backend: "ssh".into(),
        region: region.into(),
        zone: zone.map(Into::into),
    };
    check(|needs, _| needs.volumes = vec![vec![at("there", None), at("here", None)]], "");
    let volumes = vec![vec![at("here", Some("here-a"))], vec![at("here", Some("here-b"))]];
    check(move |needs, _| needs.volumes = volumes, "its volumes are in ssh here here-b");
}

#[test]
fn an_image_for_other_cpus_fits_no_host_of_a_known_architecture() {
    let needs = |instance_needs: &mut InstanceNeeds, built_for: &[CpuArch]| {
        instance_needs.image = Some(ImageChoice::Image("app:1".into()));
        instance_needs.image_architectures = built_for.to_vec();
    };
    check(|instance_needs, _| needs(instance_needs, &[]), "");
    check(|instance_needs, _| needs(instance_needs, &[CpuArch::X86]), "");
    check(
        |instance_needs, _| needs(instance_needs, &[CpuArch::Arm]),
        "needs arm CPUs for image app:1, has x86",
    );
    check(
        |instance_needs, has| {
            needs(instance_needs, &[CpuArch::Arm]);
            has.host.arch = None;
        },
        "",
    );
    let short = Shortfall::ImageArch { image: "app:1".into(), built_for: CpuArch::Arm, has: CpuArch::X86 };
    assert_eq!(short.cure(), "use an image for x86 CPUs, or an instance with arm CPUs");
    assert!(short.is_permanent() && !short.is_temporary());
}

#[test]
fn instances_are_selected_by_name_hostname_or_number() {
    let number = InstanceFilter::Number { fleet: "f".into(), instance_num: 3 };
    let named = [InstanceFilter::Name("f-1".into()), InstanceFilter::Hostname("10.0.0.2".into()), number];
    assert!(is_instance_selected(&named, "f-1", None, "g", 0));
    assert!(is_instance_selected(&named, "x", Some("10.0.0.2"), "g", 0));
    assert!(is_instance_selected(&named, "x", None, "f", 3));
    assert!(!is_instance_selected(&named, "x", Some("10.0.0.3"), "f", 2));
}

#[test]
fn blocks_must_divide_evenly_and_auto_uses_the_largest_even_split() {
    assert_eq!(split_count(Blocks::Auto, 32, 8), Ok(8));
    assert_eq!(split_count(Blocks::Auto, 12, 8), Ok(4));
    assert_eq!(split_count(Blocks::Auto, 6, 0), Ok(6));
    assert_eq!(split_count(Blocks::Count(4), 32, 8), Ok(4));
    assert_eq!(split_count(Blocks::Count(3), 32, 8), Err(UnevenBlocks { blocks: 3, cpus: 32, gpus: 8 }));
}

#[test]
fn refusal_summary_gives_the_first_refusal_in_full_and_counts_the_rest() {
    let far = Refusal { place: "a".into(), count: 1, shortfalls: vec![Shortfall::NotCluster] };
    let near = Refusal { place: "b".into(), count: 3, shortfalls: vec![Shortfall::Unreachable] };
    let message =
        "b and 2 more: is unreachable (check its network and agent); and 1 other place does not fit";
    assert_eq!(refusal_summary(&[near, far]).as_deref(), Some(message));
    assert_eq!(refusal_summary(&[]), None);
}

#[test]
fn a_shortfall_on_the_wire_has_kind_message_and_cure() {
    let shortfall = Shortfall::Cpus { wanted: Range::at_least(8), has: 4 };
    let json = serde_json::to_value(&shortfall).unwrap();
    let expect = serde_json::json!({"kind": "cpus", "message": "needs at least 8 CPUs, has 4",
        "cure": "lower cpu to 4", "passes": false, "patch": {"resources.cpu.count": 4}});
    assert_eq!(json, expect);
}

#[test]
fn a_shortfall_has_a_patch_only_if_one_field_of_the_configuration_resolves_it() {
    let patch = |shortfall: Shortfall| serde_json::to_value(shortfall).unwrap()["patch"].clone();
    let memory = Shortfall::Memory { wanted: Range::at_least(64.0), has: 62.789 };
    assert_eq!(patch(memory), serde_json::json!({"resources.memory": "62.78GB.."}), "rounded down");
    let gpus = |has| Shortfall::GpuCount { wanted: Range::at_least(8), has };
    assert_eq!(patch(gpus(4)), serde_json::json!({"resources.gpu.count": 4}));
    assert_eq!(patch(gpus(0)), serde_json::Value::Null);
    let backend = Shortfall::NotListed { what: "backend", wanted: vec!["aws".into()], has: "gcp".into() };
    assert_eq!(patch(backend), serde_json::json!({"backends": null}));
    assert_eq!(patch(Shortfall::Unreachable), serde_json::Value::Null);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// The number of blocks is the smallest that fits: it fits, and no smaller one does.
    #[test]
    fn a_job_gets_the_smallest_number_of_blocks(
        cpus in 1_u32..64, gpus in 0_u32..9, memory in 0.0_f64..300.0, per_block in 1_u32..5, blocks in 1_u32..9,
    ) {
        let mut instance_needs = needs(cpus, gpus);
        instance_needs.resources.as_mut().unwrap().memory = Range::at_least(memory);
        let has = offer(host(per_block * blocks * 2, blocks as usize), blocks, 1.0);
        let resources = instance_needs.resources.clone().unwrap();
        let whole = |k: u32| {
            let part = host_share(&has.host, k, blocks);
            let part = windlass_model::plan::offers::HostSpec {
                cpus: part.cpus, memory_mib: part.memory_mib, gpus: part.gpus.to_vec(), ..has.host.clone()
            };
            host_shortfalls(&part, &resources).is_empty()
        };
        let expect = (1..=blocks).find(|k| whole(*k));
        prop_assert_eq!(smallest_fit(&has, &instance_needs).ok(), expect);
        if let Some(expect) = expect {
            prop_assert_eq!(smallest_fitting(&has.host, blocks, instance_needs.needs_whole_instance, instance_needs.resources.as_ref()), expect);
        }
        let gpus: &[Gpu] = host_share(&has.host, blocks, blocks).gpus;
        prop_assert_eq!(gpus.len(), has.host.gpus.len());
    }
}

#[test]
fn default_resources_are_not_required_of_the_local_instance() {
    let small = HostSpec { memory_mib: 2 * 1024, disk_mib: 10 * 1024, ..host(1, 0) };
    let at = |backend: &str| Offer { backend: backend.into(), ..offer(small.clone(), 1, 0.0) };
    let needs = |change: fn(&mut ResourcesSpec)| {
        let mut resources = ResourcesSpec::default();
        change(&mut resources);
        InstanceNeeds { resources: Some(resources), ..InstanceNeeds::default() }
    };
    assert_eq!(smallest_fit(&at("local"), &needs(|_| ())), Ok(1));
    assert_eq!(shortfalls(&at("aws"), &needs(|_| ())).len(), 3);
    assert_eq!(shortfalls(&at("local"), &needs(|wanted| wanted.memory = Range::at_least(4.0))).len(), 1);
    let shared = Offer { total_blocks: 4, ..Offer { host: host(4, 0), ..at("local") } };
    assert_eq!(smallest_fit(&shared, &needs(|_| ())), Ok(1), "one block of several");
}

#[test]
fn a_run_without_a_spot_policy_uses_that_of_its_fleet() {
    let limits = |spot, spot_by_default| InstanceNeeds {
        spot,
        is_spot_default: spot_by_default,
        ..InstanceNeeds::default()
    };
    let run = limits(Some(false), true);
    assert_eq!(run.with_fleet_limits(&limits(None, true)).spot, Some(false));
    assert_eq!(run.with_fleet_limits(&limits(Some(true), false)).spot, Some(true));
    assert_eq!(run.with_fleet_limits(&limits(None, false)).spot, None, "auto");
    let given = limits(Some(false), false);
    assert_eq!(given.with_fleet_limits(&limits(Some(true), false)).spot, Some(false));
}
