//! Constraints of a run on new instances in its fleet.

use serde_json::{Value, json};
use windlass_model::config::{
    Configuration,
    fleet_limits::{LimitConflict, intersect},
};

use super::{accept, refuse, trimmed};

fn meet(fleet: &str, run: &str) -> Result<(Value, Value), Vec<LimitConflict>> {
    let Configuration::Fleet(fleet) = accept(&format!("type: fleet\nnodes: 0..\n{fleet}")) else {
        panic!("a fleet")
    };
    let run = accept(&format!("type: task\ncommands: [x]\n{run}"));
    let both = intersect(&fleet, &run.profile().unwrap().provisioning, &run.run().unwrap().resources)?;
    let provisioning = trimmed(serde_json::to_value(&both.provisioning).unwrap());
    Ok((provisioning, trimmed(serde_json::to_value(&both.resources).unwrap())))
}

#[test]
fn combined_limits_are_the_narrower_of_fleet_and_run() {
    let fleet = "backends: [aws, gcp]\nregions: [EU-West-1, us]\nspot_policy: auto\nmax_price: 5\nidle_duration: off\n\
                 tags: {a: fleet, b: fleet}\nresources: {cpu: 4..16, memory: 8GB.., gpu: 'A100,H100:1..8', disk: null}";
    let run = "backends: [gcp, azure]\nregions: [eu-west-1]\nspot_policy: spot\nmax_price: 7\nidle_duration: 1h\n\
               tags: {a: run}\nreservation: r\nresources: {cpu: 2..8, memory: 16GB..64GB, gpu: 'h100:80GB:4..', shm_size: 1GB}";
    let (provisioning, resources) = meet(fleet, run).unwrap();
    assert_eq!(
        provisioning,
        json!({"backends": ["gcp"], "regions": ["eu-west-1"], "spot_policy": "spot", "max_price": 5.0,
               "idle_duration": 3600, "tags": {"a": "run", "b": "fleet"}, "reservation": "r"})
    );
    assert_eq!(
        resources,
        json!({"cpu": {"count": {"min": 4, "max": 8}}, "memory": {"min": 16.0, "max": 64.0}, "shm_size": 1.0,
               "gpu": {"name": ["h100"], "count": {"min": 4, "max": 8}, "memory": {"min": 80.0, "max": 80.0}},
               "disk": {"size": {"min": 100.0}}})
    );
}

#[test]
fn every_conflict_between_fleet_and_run_limits_is_listed() {
    let fleet = "backends: [aws]\nregions: [a]\navailability_zones: [z]\ninstance_types: [t]\nreservation: r\nspot_policy: spot\n\
                 resources: {cpu: 'x86:2', memory: 8GB, gpu: 'nvidia:H100:24GB:1', disk: 10GB}";
    let run = "backends: [gcp]\nregions: [b]\navailability_zones: [y]\ninstance_types: [u]\nreservation: s\nspot_policy: on-demand\n\
               resources: {cpu: 'arm:4', memory: 9GB, gpu: 'amd:MI300X:48GB:2', disk: 20GB}";
    use LimitConflict::*;
    assert_eq!(
        meet(fleet, run).unwrap_err(),
        [
            Reservation,
            SpotPolicy,
            Backends,
            Regions,
            AvailabilityZones,
            InstanceTypes,
            CpuArch,
            CpuCount,
            Memory,
            GpuVendor,
            GpuName,
            GpuCount,
            GpuMemory,
            Disk
        ]
    );
}

#[test]
fn a_limit_set_by_only_the_fleet_or_the_run_applies() {
    let (provisioning, resources) =
        meet("", "resources: {cpu: 3}\nidle_duration: 5m\nspot_policy: auto").unwrap();
    assert_eq!(provisioning, json!({"idle_duration": 300, "spot_policy": "auto"}));
    assert_eq!(resources["cpu"]["count"], json!({"min": 3, "max": 3}));
    let (provisioning, _) = meet("spot_policy: on-demand\nidle_duration: 1d\nmax_price: 2", "").unwrap();
    assert_eq!(provisioning, json!({"spot_policy": "on-demand", "idle_duration": 86400, "max_price": 2.0}));
    let (_, resources) =
        meet("resources: {gpu: {compute_capability: 7.5}}", "resources: {gpu: {compute_capability: 8.0}}")
            .unwrap();
    assert_eq!(resources["gpu"]["compute_capability"], json!([8, 0]));
}

#[test]
fn settings_that_a_slurm_cluster_would_ignore_are_refused() {
    for backend in ["backend: slurm", "backends: [slurm]"] {
        let with = |setting: &str| refuse(&format!("type: fleet\nnodes: 0..2\n{backend}\n{setting}\n"));
        assert_eq!(with("blocks: 2"), ["C016 blocks"], "{backend}");
        assert_eq!(with("blocks: auto"), ["C016 blocks"], "{backend}");
        assert_eq!(with("placement: cluster"), ["C016 placement"], "{backend}");
    }
    accept("type: fleet\nnodes: 0..2\nbackends: [aws, slurm]\nblocks: 2\nplacement: cluster\n");
    accept("type: fleet\nnodes: 0..2\nbackend: slurm\nplacement: any\nblocks: 1\n");
}
