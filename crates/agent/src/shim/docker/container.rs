//! Translation of a task into a container: names, labels, limits, mounts, devices. Pure.

use std::{
    collections::{BTreeSet, HashMap},
    path::{Path, PathBuf},
};

use bollard::models::{
    ContainerCreateBody, DeviceMapping, DeviceRequest, HealthConfig, HostConfig, HostConfigLogConfig, Mount,
    MountBindOptions, MountBindOptionsPropagationEnum as Propagation, MountType, PortBinding, PortMap,
    ResourcesUlimits, RestartPolicy, RestartPolicyNameEnum,
};

use windlass_api::agent::shim::NetworkMode;
use windlass_model::id::SubmissionId;

use super::{network::NETWORK, reference::ImageReference, restricted_binds::RestrictedBinds};
use crate::{
    digest::sha256_hex,
    host::gpu::Vendor,
    shim::{
        oci::seccomp::profile_option,
        runtime::{BindMount, PolicyLimits, PreparedTask},
    },
    task_dir::{self, DEVICE_GROUPS_VARIABLE, TaskDir},
};

pub(super) const IS_TASK_LABEL: &str = "ai.dstack.shim.is-task";
pub(super) const TASK_ID_LABEL: &str = "ai.dstack.shim.task-id";
/// Label with the home of the shim that owns the task: several shims may share an engine.
pub(super) const HOME_LABEL: &str = "windlass.shim.home";

/// Characters of a job's name that are kept in the container's name.
const NAME_CHARS_MAX: usize = 200;
/// Maximum size of the container's own output, which only receives messages of a runner that cannot write its log.
const OWN_LOG_SIZE: &str = "256k";
const GPU_CAPABILITIES: [&str; 7] = ["gpu", "utility", "compute", "graphics", "video", "display", "compat32"];
const INFINIBAND: &str = "/dev/infiniband";

/// Properties of the host and its engine.
#[derive(Clone, Debug, Default)]
pub(super) struct EngineFacts {
    /// Value of the label `HOME_LABEL`.
    pub(super) home: String,
    pub(super) entrypoint: Vec<String>,
    /// Read-only binds are recursive: they include the mounts below them (engine API 1.44).
    pub(super) recursive_read_only: bool,
    /// Limits to set explicitly, because the engine's defaults may exceed what it can grant: `(name, value)`.
    pub(super) ulimits: Vec<(&'static str, i64)>,
    pub(super) has_infiniband: bool,
    /// Directory with the host's git for images that have none.
    pub(super) git: Option<PathBuf>,
    /// Mounts without set-user-id programs and devices. `None` if the agent may not mount for the engine.
    pub(super) restricted_binds: Option<RestrictedBinds>,
    /// Containers get Docker's filter of system calls from a file: Podman's own permits more.
    pub(super) is_podman: bool,
    /// There is an NVIDIA driver, so the engine may grant every GPU to an image that requests them.
    pub(super) has_nvidia: bool,
}

/// Lookups on the host that a task needs.
pub(super) struct HostLookup<'a> {
    /// Returns whether a path is on a mount whose later submounts may propagate into a container.
    pub(super) is_shared: &'a dyn Fn(&Path) -> bool,
    /// Returns the group that owns a device file.
    pub(super) group: &'a dyn Fn(&Path) -> Option<u32>,
}

/// Returns the name of a task's container: the name of the job and eight digits that distinguish its submissions.
pub(in crate::shim) fn container_name(job: &str, id: SubmissionId) -> String {
    let keep = |c: char| if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '-' };
    let job: String = job.chars().take(NAME_CHARS_MAX).map(keep).collect();
    let job = job.trim_start_matches(['_', '.', '-']);
    let digits = sha256_hex(id.to_string().as_bytes());
    format!("{}-{}", if job.is_empty() { "task" } else { job }, digits.get(..8).unwrap_or_default())
}

pub(super) fn create_body(
    task: &PreparedTask,
    agent: &Path,
    around: &EngineFacts,
    host: &HostLookup<'_>,
) -> ContainerCreateBody {
    let spec = &task.spec;
    let labels = [
        (IS_TASK_LABEL, "true".to_owned()),
        (TASK_ID_LABEL, spec.id.to_string()),
        (HOME_LABEL, around.home.clone()),
    ];
    let publish = published_ports(task);
    ContainerCreateBody {
        image: Some(ImageReference::parse(&spec.image_name).full()),
        // Numeric ids need no `/etc/passwd` in the image.
        user: Some(match spec.container_user.as_str() {
            "" | "root" => "0".to_owned(),
            other => other.to_owned(),
        }),
        entrypoint: Some(around.entrypoint.clone()),
        env: Some(environment(task, around, host)),
        labels: Some(labels.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()),
        // The image's stop signal and health check are meant for its own program, which is not started.
        stop_signal: Some("SIGTERM".to_owned()),
        healthcheck: Some(HealthConfig { test: Some(vec!["NONE".to_owned()]), ..HealthConfig::default() }),
        exposed_ports: (!publish.is_empty())
            .then(|| publish.iter().map(|port| format!("{port}/tcp")).collect()),
        host_config: Some(host_config(task, agent, around, host)),
        ..ContainerCreateBody::default()
    }
}

/// File with the filter of system calls of a task, for Podman.
pub(super) fn filter_file(dir: &TaskDir) -> PathBuf {
    dir.root().join("seccomp.json")
}

/// Returns the ports to publish. On the host's network there are none.
pub(super) fn published_ports(task: &PreparedTask) -> &[u16] {
    match task.spec.network_mode {
        NetworkMode::Host => &[],
        NetworkMode::Bridge => &task.publish,
    }
}

fn environment(task: &PreparedTask, around: &EngineFacts, host: &HostLookup<'_>) -> Vec<String> {
    let mut env: Vec<String> = task.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    env.push(format!("WINDLASS_TASK_ID={}", task.spec.id));
    let has_nvidia_gpu = task.gpus.iter().any(|gpu| gpu.vendor == Vendor::Nvidia);
    if around.has_nvidia && !has_nvidia_gpu {
        env.push("NVIDIA_VISIBLE_DEVICES=void".to_owned());
    }
    // The engine gives these groups to the runner; the variable, to a job of another user.
    let groups = device_groups(task, host);
    if !groups.is_empty() {
        env.push(format!("{DEVICE_GROUPS_VARIABLE}={}", groups.join(",")));
    }
    env
}

/// Returns the host's groups `video` and `render`, by number: an image may lack these names or use other numbers for them.
fn device_groups(task: &PreparedTask, host: &HostLookup<'_>) -> Vec<String> {
    let amd = task.gpus.iter().filter(|gpu| gpu.vendor == Vendor::Amd).flat_map(|gpu| &gpu.devices);
    let groups: BTreeSet<u32> =
        amd.filter_map(|path| (host.group)(path)).filter(|group| *group != 0).collect();
    groups.iter().map(u32::to_string).collect()
}

/// Restrictions of a container. The same for tasks of runs and for containers of the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ContainerConfinement {
    pub(crate) cap_drop: Vec<String>,
    pub(crate) cap_add: Vec<String>,
    pub(crate) security_opt: Vec<String>,
    /// `None`: no limit other than that of the engine.
    pub(crate) pids_limit: Option<i64>,
    pub(crate) ipc: &'static str,
    pub(crate) network: &'static str,
}

/// Derives the restrictions from the policy of the host.
pub(crate) fn container_confinement(
    limits: &PolicyLimits,
    privileged: bool,
    network: NetworkMode,
) -> ContainerConfinement {
    let mut confinement = ContainerConfinement {
        cap_drop: Vec::new(),
        cap_add: Vec::new(),
        security_opt: Vec::new(),
        pids_limit: (limits.pids > 0).then_some(limits.pids),
        ipc: "private",
        network: match network {
            NetworkMode::Host => "host",
            NetworkMode::Bridge => NETWORK,
        },
    };
    if !privileged {
        confinement.cap_drop.push("ALL".to_owned());
        confinement.cap_add.clone_from(&limits.capabilities);
        if !limits.new_privileges {
            confinement.security_opt.push("no-new-privileges".to_owned());
        }
    }
    confinement
}

fn host_config(task: &PreparedTask, agent: &Path, around: &EngineFacts, host: &HostLookup<'_>) -> HostConfig {
    let spec = &task.spec;
    let privileged = spec.privileged;
    let kept_in = container_confinement(&task.limits, privileged, spec.network_mode);
    let mut config = HostConfig {
        privileged: Some(privileged),
        auto_remove: Some(false),
        restart_policy: Some(RestartPolicy {
            name: Some(RestartPolicyNameEnum::NO),
            maximum_retry_count: None,
        }),
        log_config: Some(log_config()),
        ipc_mode: Some(kept_in.ipc.to_owned()),
        pids_limit: kept_in.pids_limit,
        mounts: Some(mounts(task, agent, around, host)),
        network_mode: Some(kept_in.network.to_owned()),
        port_bindings: Some(port_bindings(published_ports(task))),
        ulimits: Some(ulimits(around)),
        devices: Some(devices(task, around)),
        ..HostConfig::default()
    };
    if spec.cpu > 0.0 {
        #[expect(clippy::cast_possible_truncation, reason = "cores of one host, and a cast saturates")]
        let nano = (spec.cpu * 1e9).round() as i64;
        config.nano_cpus = Some(nano);
    }
    if spec.memory > 0 {
        config.memory = Some(spec.memory);
        // The sum of memory and swap: no swap in addition to the memory.
        config.memory_swap = Some(spec.memory);
    }
    if spec.shm_size > 0 {
        // The engine's default is mounted `noexec`, which breaks programs that compile code into shared memory.
        let options = format!("rw,exec,nosuid,nodev,mode=1777,size={}", spec.shm_size);
        config.tmpfs = Some(HashMap::from([("/dev/shm".to_owned(), options)]));
    }
    if !privileged {
        config.cap_drop = Some(kept_in.cap_drop);
        config.cap_add = Some(kept_in.cap_add);
        let mut options = kept_in.security_opt;
        if around.is_podman {
            options.push(profile_option(&filter_file(&task.dir)));
        }
        config.security_opt = Some(options).filter(|options| !options.is_empty());
    }
    add_gpus(task, host, &mut config);
    config
}

/// Uses `json-file` because it can be read back everywhere: `none` cannot, and `local` is unknown to Podman.
fn log_config() -> HostConfigLogConfig {
    let config = HashMap::from([
        ("max-size".to_owned(), OWN_LOG_SIZE.to_owned()),
        ("max-file".to_owned(), "1".to_owned()),
    ]);
    HostConfigLogConfig { typ: Some("json-file".to_owned()), config: Some(config) }
}

fn mounts(task: &PreparedTask, agent: &Path, around: &EngineFacts, host: &HostLookup<'_>) -> Vec<Mount> {
    let own = [
        (
            BindMount { source: agent.into(), target: task_dir::AGENT_IN_CONTAINER.into(), read_only: true },
            false,
        ),
        (
            BindMount {
                source: task.dir.run(),
                target: task_dir::RUN_DIR_IN_CONTAINER.into(),
                read_only: false,
            },
            false,
        ),
    ];
    let git = around.git.as_ref().map(|dir| {
        let target = task_dir::GIT_IN_CONTAINER.into();
        (BindMount { source: dir.clone(), target, read_only: true }, false)
    });
    let given = task.binds.iter().enumerate().map(|(index, bind)| {
        let is_shared = (host.is_shared)(&bind.source);
        let bind = match &around.restricted_binds {
            // The agent makes its own mount read-only. If the engine did that, it would reset the other options.
            Some(binds) => BindMount {
                source: binds.path(task.spec.id, index),
                target: bind.target.clone(),
                read_only: false,
            },
            None => bind.clone(),
        };
        (bind, is_shared)
    });
    own.into_iter().chain(git).chain(given).map(|(bind, slave)| mount(&bind, slave, around)).collect()
}

fn mount(bind: &BindMount, slave: bool, around: &EngineFacts) -> Mount {
    // Later mounts of the host below a shared mount propagate into the container; never in the other direction.
    let propagation = if slave { Propagation::RSLAVE } else { Propagation::RPRIVATE };
    // An older engine makes only the top mount read-only. Hiding the mounts below is better than leaving them writable.
    let cut = (bind.read_only && !around.recursive_read_only).then_some(true);
    Mount {
        typ: Some(MountType::BIND),
        source: Some(bind.source.to_string_lossy().into_owned()),
        target: Some(bind.target.clone()),
        read_only: Some(bind.read_only),
        bind_options: Some(MountBindOptions {
            propagation: Some(propagation),
            non_recursive: cut,
            ..MountBindOptions::default()
        }),
        ..Mount::default()
    }
}

fn port_bindings(publish: &[u16]) -> PortMap {
    let any = PortBinding { host_ip: Some("127.0.0.1".to_owned()), host_port: Some("0".to_owned()) };
    publish.iter().map(|port| (format!("{port}/tcp"), Some(vec![any.clone()]))).collect()
}

fn ulimits(around: &EngineFacts) -> Vec<ResourcesUlimits> {
    let limit = |name: &str, value| ResourcesUlimits {
        name: Some(name.to_owned()),
        soft: Some(value),
        hard: Some(value),
    };
    let mut limits: Vec<_> = around.ulimits.iter().map(|(name, value)| limit(name, *value)).collect();
    if around.has_infiniband {
        // Adapters access memory directly, so it must stay locked.
        limits.push(limit("memlock", -1));
    }
    limits
}

fn device(host: &str, inside: &str) -> DeviceMapping {
    DeviceMapping {
        path_on_host: Some(host.to_owned()),
        path_in_container: Some(inside.to_owned()),
        cgroup_permissions: Some("rwm".to_owned()),
    }
}

fn devices(task: &PreparedTask, around: &EngineFacts) -> Vec<DeviceMapping> {
    let given = task.spec.gpu_devices.iter();
    let mut devices: Vec<_> = given.map(|one| device(&one.path_on_host, &one.path_in_container)).collect();
    if around.has_infiniband {
        devices.push(device(INFINIBAND, INFINIBAND));
    }
    // The device files of NVIDIA come with the device request.
    for gpu in task.gpus.iter().filter(|gpu| gpu.vendor != Vendor::Nvidia) {
        let same = gpu.devices.iter().map(|path| path.to_string_lossy());
        devices.extend(same.map(|path| device(&path, &path)));
    }
    // GPUs of one vendor share device files.
    let mut seen = BTreeSet::new();
    devices.retain(|one| seen.insert(one.path_in_container.clone()));
    devices
}

fn add_gpus(task: &PreparedTask, host: &HostLookup<'_>, config: &mut HostConfig) {
    let nvidia = task.gpus.iter().filter(|gpu| gpu.vendor == Vendor::Nvidia);
    let nvidia: Vec<String> = nvidia.map(|gpu| gpu.id.clone()).collect();
    if !nvidia.is_empty() {
        config.device_requests = Some(vec![DeviceRequest {
            driver: Some("nvidia".to_owned()),
            device_ids: Some(nvidia),
            capabilities: Some(vec![GPU_CAPABILITIES.map(str::to_owned).to_vec()]),
            ..DeviceRequest::default()
        }]);
    }
    config.group_add = Some(device_groups(task, host)).filter(|groups| !groups.is_empty());
}

#[cfg(test)]
mod tests {
    use windlass_api::agent::shim::{GpuDevice, TaskSpec};

    use super::*;
    use crate::{host::gpu::Gpu, shim::runtime::PolicyLimits};

    fn task(change: impl FnOnce(&mut PreparedTask)) -> PreparedTask {
        let id: SubmissionId = "9c1f0000-0000-4000-8000-000000000001".parse().unwrap();
        let spec: TaskSpec =
            serde_json::from_value(serde_json::json!({"id": id, "name": "train-1-0-0", "image_name": "a:1"}))
                .unwrap();
        let mut task = PreparedTask {
            spec,
            dir: TaskDir::new(Path::new("/home"), id),
            gpus: Vec::new(),
            binds: Vec::new(),
            publish: vec![10999],
            limits: PolicyLimits { pids: 100, new_privileges: false, capabilities: vec!["CHOWN".into()] },
            env: vec![("A".into(), "b".into())],
        };
        change(&mut task);
        task
    }

    fn build(task: &PreparedTask, around: &EngineFacts) -> (ContainerCreateBody, HostConfig) {
        let is_shared = |path: &Path| path == Path::new("/shared");
        let group = |path: &Path| Some(if path == Path::new("/dev/kfd") { 109 } else { 44 });
        let lookup = HostLookup { is_shared: &is_shared, group: &group };
        let body = create_body(task, Path::new("/home/bin/00"), around, &lookup);
        let host = body.host_config.clone().unwrap();
        (body, host)
    }

    fn gpu(vendor: Vendor, id: &str, devices: &[&str]) -> Gpu {
        let devices = devices.iter().map(PathBuf::from).collect();
        let (id, name) = (id.into(), "G".into());
        Gpu { vendor, id, index: 0, name, memory_mib: 1, compute_capability: None, devices }
    }

    #[test]
    fn container_names_are_job_names_without_invalid_characters() {
        let id = task(|_| {}).spec.id;
        assert_eq!(container_name("train-1-0-0", id), "train-1-0-0-fd1686be");
        assert!(container_name("../../x y", id).starts_with("x-y-"));
        assert!(container_name("", id).starts_with("task-"));
        assert!(container_name(&"a".repeat(1000), id).len() < 255);
    }

    #[test]
    fn a_container_gets_only_what_its_task_requests() {
        let (body, host) = build(&task(|_| {}), &EngineFacts::default());
        assert_eq!(body.user.as_deref(), Some("0"));
        assert_eq!(body.env.unwrap(), ["A=b", "WINDLASS_TASK_ID=9c1f0000-0000-4000-8000-000000000001"]);
        assert_eq!(host.privileged, Some(false));
        assert_eq!(host.cap_drop.unwrap(), ["ALL"]);
        assert_eq!(host.cap_add.unwrap(), ["CHOWN"]);
        assert_eq!(host.security_opt.unwrap(), ["no-new-privileges"]);
        assert_eq!((host.nano_cpus, host.memory, host.memory_swap, host.tmpfs), (None, None, None, None));
        assert_eq!(host.pids_limit, Some(100));
        assert_eq!(host.network_mode.as_deref(), Some("host"));
        assert!(host.port_bindings.unwrap().is_empty(), "the host's own network has nothing to map");
        assert_eq!((host.device_requests, host.devices.unwrap().len()), (None, 0));
    }

    #[test]
    fn resource_limits_are_passed_to_the_engine() {
        let task = task(|task| {
            task.spec.cpu = 1.5;
            task.spec.memory = 1 << 30;
            task.spec.shm_size = 64 << 20;
        });
        let (_, host) = build(&task, &EngineFacts::default());
        assert_eq!(host.nano_cpus, Some(1_500_000_000));
        assert_eq!((host.memory, host.memory_swap), (Some(1 << 30), Some(1 << 30)));
        assert!(host.tmpfs.unwrap()["/dev/shm"].contains("exec,nosuid,nodev,mode=1777,size=67108864"));
    }

    #[test]
    fn a_privileged_task_has_no_list_of_capabilities() {
        let (_, host) = build(&task(|task| task.spec.privileged = true), &EngineFacts::default());
        assert_eq!((host.privileged, host.cap_drop, host.cap_add), (Some(true), None, None));
    }

    #[test]
    fn ports_of_a_bridged_task_are_published_only_on_loopback() {
        let (body, host) =
            build(&task(|task| task.spec.network_mode = NetworkMode::Bridge), &EngineFacts::default());
        assert_eq!(body.exposed_ports.unwrap(), ["10999/tcp"]);
        let bindings = host.port_bindings.unwrap();
        let binding = bindings["10999/tcp"].as_ref().unwrap();
        assert_eq!(binding[0].host_ip.as_deref(), Some("127.0.0.1"));
        assert_eq!(host.network_mode.as_deref(), Some(NETWORK));
    }

    #[test]
    fn mounts_never_propagate_from_the_container_to_the_host() {
        let task = task(|task| {
            let bind =
                |source: &str, read_only| BindMount { source: source.into(), target: "/t".into(), read_only };
            task.binds = vec![bind("/shared", false), bind("/plain", true)];
        });
        let seen = |around: &EngineFacts| -> Vec<_> {
            let (_, host) = build(&task, around);
            let describe = |mount: Mount| {
                let options = mount.bind_options.unwrap();
                (
                    mount.source.unwrap(),
                    mount.read_only.unwrap(),
                    options.propagation.unwrap(),
                    options.non_recursive,
                )
            };
            host.mounts.unwrap().into_iter().map(describe).collect()
        };
        let old = seen(&EngineFacts::default());
        assert_eq!(old[0], ("/home/bin/00".into(), true, Propagation::RPRIVATE, Some(true)));
        assert_eq!(old[1].2, Propagation::RPRIVATE);
        assert!(!old[1].1);
        assert_eq!(old[2], ("/shared".into(), false, Propagation::RSLAVE, None));
        assert_eq!(old[3], ("/plain".into(), true, Propagation::RPRIVATE, Some(true)));
        let new = seen(&EngineFacts { recursive_read_only: true, ..EngineFacts::default() });
        assert_eq!(new[3].3, None);
    }

    #[test]
    fn gpus_are_attached_as_each_vendor_requires() {
        let around = EngineFacts { has_nvidia: true, has_infiniband: true, ..EngineFacts::default() };
        let nvidia = task(|task| task.gpus = vec![gpu(Vendor::Nvidia, "GPU-1", &["/dev/nvidia0"])]);
        let (body, host) = build(&nvidia, &around);
        let request = host.device_requests.unwrap().remove(0);
        assert_eq!((request.driver.as_deref(), request.count), (Some("nvidia"), None));
        assert_eq!(request.device_ids.unwrap(), ["GPU-1"]);
        assert_eq!(host.devices.unwrap(), [device(INFINIBAND, INFINIBAND)]);
        assert!(!body.env.unwrap().iter().any(|one| one.starts_with("NVIDIA")));

        let amd = task(|task| {
            task.gpus = vec![gpu(Vendor::Amd, "a", &["/dev/dri/renderD128", "/dev/kfd"])];
            task.spec.gpu_devices =
                vec![GpuDevice { path_on_host: "/dev/x".into(), path_in_container: "/dev/y".into() }];
        });
        let (body, host) = build(&amd, &around);
        let inside: Vec<_> =
            host.devices.unwrap().into_iter().filter_map(|one| one.path_in_container).collect();
        assert_eq!(inside, ["/dev/y", INFINIBAND, "/dev/dri/renderD128", "/dev/kfd"]);
        assert_eq!(host.group_add.unwrap(), ["44", "109"]);
        let env = body.env.unwrap();
        assert!(env.contains(&"NVIDIA_VISIBLE_DEVICES=void".to_owned()));
        assert!(
            env.contains(&"WINDLASS_DEVICE_GROUPS=44,109".to_owned()),
            "for a job of another user: {env:?}"
        );
    }
}
