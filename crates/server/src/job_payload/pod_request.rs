//! Container of a job for a backend whose instances are pods, built from stored data.

use windlass_backend::ContainerRequest;
use windlass_model::{
    config::job_spec::{JobSpec, Requirements},
    plan::{
        execution_mode::{ExecutionMode, ImageChoice},
        offers::{Offer, without_defaults},
    },
};

use super::task_spec::registry_credentials;

const MIB_PER_GB: f64 = 1024.0;

/// Returns the container of a job on this offer; `None` if it does not run in a container there. `spec` has its
/// secrets filled in.
pub(super) fn build(spec: &JobSpec, offer: &Offer) -> Option<ContainerRequest> {
    let choice = ImageChoice::from_spec(spec)?;
    let image = match choice.resolve_on(offer.host.runtimes.as_ref()).ok()? {
        ExecutionMode::Pod { image } => image.to_owned(),
        ExecutionMode::Container { .. } | ExecutionMode::Process(_) => return None,
    };
    let (username, password) = registry_credentials(spec);
    // A new field does not compile until the pod is made for it, or another place is named that does something with it.
    let JobSpec {
        image_name: _,
        default_image: _,
        privileged,
        registry_auth: _,
        requirements:
            Requirements {
                resources: requested,
                max_price: _,
                spot: _,
                reservation: _,
                multinode: _,
                backend_options: _,
            },
        // Refused, by `PodObstacle`.
        volumes: _,
        // Sent to the agent in the pod, by `task_spec` and `runner_start`.
        replica_num: _,
        job_num: _,
        job_name: _,
        jobs_per_replica: _,
        app_specs: _,
        user: _,
        commands: _,
        env: _,
        home_dir: _,
        python: _,
        single_branch: _,
        max_duration: _,
        stop_duration: _,
        ssh_key: _,
        working_dir: _,
        repo_dir: _,
        repo_exists_action: _,
        repo_data: _,
        repo_code_hash: _,
        file_archives: _,
        service_port: _,
        // Decided by the server and its pipelines.
        replica_group: _,
        node_group_index: _,
        node_group_name: _,
        node_group_job_index: _,
        image_architectures: _,
        default_image_from: _,
        utilization_policy: _,
        retry: _,
        probes: _,
    } = spec;
    // A default reserves nothing.
    let named = without_defaults(requested);
    Some(ContainerRequest {
        image,
        registry_auth: (!username.is_empty()).then_some((username, password)),
        cpus: named.cpu.count.min.filter(|count| *count > 0),
        memory_mib: named.memory.min.map(mib).filter(|size| *size > 0),
        disk_mib: named.disk.and_then(|disk| disk.size.min).map(mib).filter(|size| *size > 0),
        shm_mib: requested.shm_size.map(mib).filter(|size| *size > 0),
        gpus: requested.gpu.as_ref().and_then(|gpu| gpu.count.min).unwrap_or_default(),
        privileged: *privileged,
    })
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "sizes in MiB, never negative")]
fn mib(gigabytes: f64) -> u64 {
    (gigabytes * MIB_PER_GB).ceil() as u64
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use windlass_model::{
        money::Price,
        plan::{
            execution_mode::Runtimes,
            offers::{Availability, HostSpec},
        },
    };

    use super::*;

    fn offer() -> Offer {
        Offer {
            backend: "kubernetes".into(),
            region: "east".into(),
            zones: vec![],
            instance_type: "n1".into(),
            price: Price::ZERO,
            availability: Availability::Available,
            reservation: None,
            host: HostSpec {
                cpus: 4,
                arch: None,
                memory_mib: 8192,
                disk_mib: 0,
                gpus: vec![],
                spot: false,
                runtimes: Some(Runtimes::pod(false)),
            },
            total_blocks: 1,
        }
    }

    fn request(more: &Value) -> Option<ContainerRequest> {
        let mut spec = json!({
            "job_num": 0, "job_name": "train-0-0", "commands": ["true"], "env": {"USERNAME": "ada"},
            "image_name": "app:1", "requirements": {"resources": {}},
        });
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        build(&serde_json::from_value(spec).unwrap(), &offer())
    }

    #[test]
    fn a_job_reserves_what_it_names_and_nothing_for_defaults() {
        let plain = request(&json!({})).unwrap();
        assert_eq!((plain.cpus, plain.memory_mib, plain.disk_mib, plain.gpus), (None, None, None, 0));
        let requested = request(&json!({
            "requirements": {"resources": {
                "cpu": {"count": {"min": 3}}, "memory": {"min": 0.5}, "shm_size": 1.5, "disk": {"size": {"min": 7.0}},
                "gpu": {"count": {"min": 2, "max": 4}},
            }},
            "registry_auth": {"username": "${{ env.USERNAME }}", "password": "pw"}, "privileged": true,
        }))
        .unwrap();
        assert_eq!(
            (requested.cpus, requested.memory_mib, requested.disk_mib),
            (Some(3), Some(512), Some(7168))
        );
        assert_eq!((requested.shm_mib, requested.gpus, requested.privileged), (Some(1536), 2, true));
        assert_eq!(requested.registry_auth, Some(("ada".into(), "pw".into())));
    }

    #[test]
    fn a_plain_process_has_no_container() {
        assert_eq!(request(&json!({"image_name": "none"})), None);
        let default = request(&json!({"image_name": "", "default_image": "base:1"})).unwrap();
        assert_eq!(default.image, "base:1");
    }
}
