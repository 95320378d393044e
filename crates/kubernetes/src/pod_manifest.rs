//! Objects that the backend creates: the pod of an instance, and the secret for the registry of its image.

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde_json::{Map, Value, json};
use windlass_backend::{ContainerRequest, Enrolment};
use windlass_model::{
    id::InstanceId,
    plan::offers::{Gpu, Offer},
    resources::CpuArch,
};

use crate::{nodes, settings::KubernetesSettings};

/// Label of every object that the backend creates.
pub(crate) const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "windlass");
/// Label with the id of the instance.
pub(crate) const INSTANCE_LABEL: &str = "windlass/instance";
/// Container of the job, and the one that places the agent beside it.
pub(crate) const JOB_CONTAINER: &str = "job";
pub(crate) const AGENT_CONTAINER: &str = "agent";
/// Directory that both share, in both.
const SHARED_DIR: &str = "/windlass";
/// Program of the agent in the container.
pub(crate) const AGENT_PATH: &str = "/windlass/agent";
const AGENT_HOME: &str = "/windlass/home";
pub(crate) const AGENT_SOCKET: &str = "/windlass/home/shim.sock";
/// Time between the request to terminate and the end: jobs were stopped before, except in evictions.
const GRACE_SECS: u32 = 30;
/// Maximum number of nodes that are named; the scheduler chooses one of them.
const NODES_MAX: usize = 64;
/// Capabilities of the job's container: those that the policy of a host keeps by default. The agent needs some of them to
/// switch to the user of the job.
const CAPABILITIES: [&str; 10] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETUID",
    "SYS_CHROOT",
];
/// Name under which Docker's own registry keeps its credentials.
const DOCKER_HUB: &str = "https://index.docker.io/v1/";
const LABEL_VALUE_MAX: usize = 63;

/// Name of the pod of an instance, which makes its creation idempotent.
pub(crate) fn name(instance: InstanceId) -> String {
    format!("windlass-{instance}")
}

/// Inputs of a pod.
#[derive(Clone, Copy)]
pub(crate) struct PodInputs<'a> {
    pub(crate) instance: InstanceId,
    /// Name of the instance, for people.
    pub(crate) display_name: &'a str,
    pub(crate) container: &'a ContainerRequest,
    /// Offers that fit, the chosen one first.
    pub(crate) offers: &'a [Offer],
    pub(crate) enrolment: &'a Enrolment,
    pub(crate) tags: &'a std::collections::BTreeMap<String, String>,
    pub(crate) settings: &'a KubernetesSettings,
}

/// Returns the pod of an instance. It contains neither variables nor secrets of the job: those travel to the agent.
pub(crate) fn pod(inputs: &PodInputs<'_>) -> Value {
    let PodInputs { container, settings, offers, .. } = inputs;
    let first = offers.first();
    let gpu = first.and_then(|offer| offer.host.gpus.first()).filter(|_| container.gpus > 0);
    let mut volumes = vec![json!({"name": "windlass", "emptyDir": {}})];
    let mut mounts = vec![json!({"name": "windlass", "mountPath": SHARED_DIR})];
    if let Some(mib) = container.shm_mib {
        volumes
            .push(json!({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": format!("{mib}Mi")}}));
        mounts.push(json!({"name": "shm", "mountPath": "/dev/shm"}));
    }
    let mut spec = json!({
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECS,
        // A job has no rights in the cluster.
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "initContainers": [init_container(container, settings)],
        "containers": [{
            "name": JOB_CONTAINER,
            "image": container.image,
            "command": agent_command(inputs.enrolment),
            "resources": resources(container, gpu),
            "securityContext": job_security(container.privileged),
            "volumeMounts": mounts,
        }],
        "volumes": volumes,
        "affinity": affinity(offers),
        "tolerations": tolerations(settings, gpu),
        "nodeSelector": node_selector(settings, first),
    });
    if container.registry_auth.is_some() {
        spec["imagePullSecrets"] = json!([{"name": name(inputs.instance)}]);
    }
    if let Some(class) = &settings.priority_class {
        spec["priorityClassName"] = json!(class);
    }
    let mut metadata = metadata(inputs.instance);
    metadata["annotations"] = annotations(inputs);
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
}

/// Restrictions of the job's container, as those of a container on a host. The runner switches to the user of the job;
/// before that it performs the steps that need root.
fn job_security(privileged: bool) -> Value {
    if privileged {
        // The API refuses a privileged container without privilege escalation.
        return json!({"runAsUser": 0, "privileged": true});
    }
    json!({
        "runAsUser": 0,
        "privileged": false,
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"], "add": CAPABILITIES},
        "seccompProfile": {"type": "RuntimeDefault"},
    })
}

fn metadata(instance: InstanceId) -> Value {
    json!({
        "name": name(instance),
        "labels": {MANAGED_BY.0: MANAGED_BY.1, INSTANCE_LABEL: instance.to_string()},
    })
}

/// Name and tags, which need not have the form of labels.
fn annotations(inputs: &PodInputs<'_>) -> Value {
    let mut found = Map::new();
    found.insert("windlass/name".to_owned(), json!(inputs.display_name));
    for (key, value) in inputs.tags {
        let key: String = format!("tag.{key}").chars().take(LABEL_VALUE_MAX).collect();
        found.insert(format!("windlass/{}", key.trim_end_matches(['-', '_', '.'])), json!(value));
    }
    Value::Object(found)
}

/// Returns the container that places the agent: a copy from our image, or one that waits until the server has sent it.
fn init_container(container: &ContainerRequest, settings: &KubernetesSettings) -> Value {
    let (image, command) = match &settings.agent_image {
        Some(image) => (image.as_str(), json!(["/windlass-agent", "install", SHARED_DIR])),
        None => {
            let image = settings.helper_image.as_deref().unwrap_or(&container.image);
            // Not every `sleep` knows fractions.
            let wait = format!("until [ -e {AGENT_PATH} ]; do sleep 0.1 2>/dev/null || sleep 1; done");
            (image, json!(["sh", "-c", wait]))
        }
    };
    json!({
        "name": AGENT_CONTAINER,
        "image": image,
        "command": command,
        // It writes to a directory that belongs to root, and nothing else.
        "securityContext": {
            "runAsUser": 0,
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": "windlass", "mountPath": SHARED_DIR}],
    })
}

/// Returns the script that stores the agent from standard input. A copy that was cut off has another size and is not
/// used; `cp` provides a file that may be executed, because not every image has `chmod`.
pub(crate) fn install_script(bytes: usize) -> String {
    format!(
        "set -e; f={AGENT_PATH}.$$; cp /bin/sh $f; cat > $f; s=$(wc -c < $f); \
         if [ $s -ne {bytes} ]; then rm -f $f; echo incomplete >&2; exit 1; fi; mv $f {AGENT_PATH}"
    )
}

fn agent_command(enrolment: &Enrolment) -> Vec<String> {
    let mut command: Vec<String> = [AGENT_PATH, "pod", "--home", AGENT_HOME].map(str::to_owned).to_vec();
    command.extend(["--instance".to_owned(), enrolment.instance.to_string()]);
    command.extend(["--credential-sha256".to_owned(), enrolment.credential_sha256.clone()]);
    command.extend(["--server-key".to_owned(), enrolment.server_key.clone()]);
    command
}

/// Requests reserve what the job names. Memory and GPUs are limits too: more of them would be taken from others.
fn resources(container: &ContainerRequest, gpu: Option<&Gpu>) -> Value {
    let (mut requests, mut limits) = (Map::new(), Map::new());
    if let Some(cpus) = container.cpus {
        requests.insert("cpu".to_owned(), json!(cpus.to_string()));
    }
    if let Some(mib) = container.memory_mib {
        requests.insert("memory".to_owned(), json!(format!("{mib}Mi")));
    }
    if let Some(mib) = container.disk_mib {
        requests.insert("ephemeral-storage".to_owned(), json!(format!("{mib}Mi")));
    }
    if let Some(gpu) = gpu {
        let name = nodes::resource_name(gpu);
        requests.insert(name.clone(), json!(container.gpus.to_string()));
        limits.insert(name, json!(container.gpus.to_string()));
    }
    json!({"requests": requests, "limits": limits})
}

/// Names the nodes that fit: each is a separate term, because a term names only one.
fn affinity(offers: &[Offer]) -> Value {
    let Some(first) = offers.first() else { return Value::Null };
    let same_gpus = |offer: &&Offer| {
        offer.region == first.region
            && offer.host.gpus.first().map(nodes::resource_name)
                == first.host.gpus.first().map(nodes::resource_name)
    };
    let mut names: Vec<&str> = Vec::new();
    for offer in offers.iter().filter(same_gpus) {
        let node = offer.instance_type.split("-mig-").next().unwrap_or_default();
        if !node.is_empty() && !names.contains(&node) {
            names.push(node);
        }
    }
    names.truncate(NODES_MAX);
    let terms: Vec<Value> = names
        .into_iter()
        .map(|name| json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}))
        .collect();
    if terms.is_empty() || first.instance_type == crate::backend::ANY_NODE {
        return Value::Null;
    }
    json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}})
}

fn tolerations(settings: &KubernetesSettings, gpu: Option<&Gpu>) -> Value {
    let configured = settings.tolerations.iter().map(|one| {
        let mut fields = Map::new();
        for (name, text) in
            [("key", &one.key), ("operator", &one.operator), ("value", &one.value), ("effect", &one.effect)]
        {
            if !text.is_empty() {
                fields.insert(name.to_owned(), json!(text));
            }
        }
        Value::Object(fields)
    });
    // Vendors taint nodes with the name of their resource.
    let own = gpu.map(|gpu| json!({"key": nodes::resource_name(gpu), "operator": "Exists"}));
    configured.chain(own).collect()
}

fn node_selector(settings: &KubernetesSettings, offer: Option<&Offer>) -> Value {
    let mut labels: Map<String, Value> =
        settings.node_selector.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
    labels.insert("kubernetes.io/os".to_owned(), json!("linux"));
    if let Some(arch) = offer.and_then(|offer| offer.host.arch) {
        let name = match arch {
            CpuArch::X86 => "amd64",
            CpuArch::Arm => "arm64",
        };
        labels.insert("kubernetes.io/arch".to_owned(), json!(name));
    }
    Value::Object(labels)
}

/// Returns the secret with the credentials for the registry of an image; `None` if it needs none.
pub(crate) fn pull_secret(instance: InstanceId, container: &ContainerRequest) -> Option<Value> {
    let (username, password) = container.registry_auth.as_ref()?;
    let auth = BASE64.encode(format!("{username}:{password}"));
    let login = json!({"username": username, "password": password, "auth": auth});
    let config = json!({"auths": {registry(&container.image): login}}).to_string();
    Some(json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(instance),
        "type": "kubernetes.io/dockerconfigjson",
        "data": {".dockerconfigjson": BASE64.encode(config)},
    }))
}

/// Returns the registry of an image, as credentials name it: the first part of a name that looks like a host.
fn registry(image: &str) -> &str {
    match image.split_once('/') {
        Some((host, _)) if host.contains(['.', ':']) || host == "localhost" => host,
        Some(_) | None => DOCKER_HUB,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use windlass_model::{
        money::Price,
        plan::offers::{Availability, HostSpec},
        resources::GpuVendor,
    };

    use super::*;

    fn offer(node: &str, gpu: Option<&str>) -> Offer {
        let gpu = gpu.map(|name| Gpu::from_name(Some(GpuVendor::Nvidia), name, 0, None));
        Offer {
            backend: "kubernetes".into(),
            region: "east".into(),
            zones: vec![],
            instance_type: node.into(),
            price: Price::ZERO,
            availability: Availability::Available,
            reservation: None,
            host: HostSpec {
                cpus: 4,
                arch: Some(CpuArch::X86),
                memory_mib: 8192,
                disk_mib: 0,
                gpus: gpu.into_iter().collect(),
                spot: false,
                runtimes: None,
            },
            total_blocks: 1,
        }
    }

    fn container() -> ContainerRequest {
        ContainerRequest {
            image: "registry.test:5000/team/app:1".into(),
            registry_auth: None,
            cpus: Some(2),
            memory_mib: None,
            disk_mib: None,
            shm_mib: None,
            gpus: 0,
            privileged: false,
        }
    }

    fn build(container: &ContainerRequest, offers: &[Offer], settings: &KubernetesSettings) -> Value {
        let instance: InstanceId = "0190a0b0-0000-7000-8000-000000000001".parse().unwrap();
        let enrolment = Enrolment {
            instance,
            credential_sha256: "ab".into(),
            server_key: "key".into(),
            gateway_key: None,
        };
        pod(&PodInputs {
            instance,
            display_name: "jobs-0",
            container,
            offers,
            enrolment: &enrolment,
            tags: &BTreeMap::from([("team".to_owned(), "a b".to_owned())]),
            settings,
        })
    }

    #[test]
    fn a_pod_runs_the_agent_in_the_image_of_the_job() {
        let pod = build(&container(), &[offer("n1", None)], &KubernetesSettings::default());
        let job = &pod["spec"]["containers"][0];
        assert_eq!(job["image"], "registry.test:5000/team/app:1");
        assert_eq!(job["command"][0], AGENT_PATH);
        assert_eq!(job["command"][1], "pod");
        assert_eq!(job["resources"], json!({"requests": {"cpu": "2"}, "limits": {}}));
        assert_eq!(job.get("env"), None, "variables travel to the agent");
        assert_eq!(pod["metadata"]["name"], "windlass-0190a0b0-0000-7000-8000-000000000001");
        assert_eq!(
            pod["metadata"]["annotations"],
            json!({"windlass/name": "jobs-0", "windlass/tag.team": "a b"})
        );
        assert_eq!(pod["spec"]["automountServiceAccountToken"], false);
        assert_eq!(pod["spec"]["initContainers"][0]["image"], job["image"], "the image itself has a shell");
    }

    #[test]
    fn containers_of_a_pod_gain_no_privileges_and_keep_a_short_list_of_capabilities() {
        let pod = build(&container(), &[offer("n1", None)], &KubernetesSettings::default());
        for kind in ["containers", "initContainers"] {
            let security = &pod["spec"][kind][0]["securityContext"];
            assert_eq!(security["allowPrivilegeEscalation"], false, "{kind}");
            assert_eq!(security["capabilities"]["drop"], json!(["ALL"]), "{kind}");
            assert_eq!(security["seccompProfile"], json!({"type": "RuntimeDefault"}), "{kind}");
        }
        let added = &pod["spec"]["containers"][0]["securityContext"]["capabilities"]["add"];
        assert_eq!(added, &json!(CAPABILITIES));
        for refused in ["SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN", "NET_RAW", "MKNOD", "DAC_READ_SEARCH"] {
            assert!(!CAPABILITIES.contains(&refused), "{refused}");
        }
        assert!(pod["spec"]["initContainers"][0]["securityContext"]["capabilities"].get("add").is_none());
    }

    #[test]
    fn the_agent_comes_from_an_image_if_one_is_set() {
        let helper =
            KubernetesSettings { helper_image: Some("busybox:1".into()), ..KubernetesSettings::default() };
        let with_helper = build(&container(), &[offer("n1", None)], &helper);
        assert_eq!(with_helper["spec"]["initContainers"][0]["image"], "busybox:1");
        let own = KubernetesSettings { agent_image: Some("windlass/agent:1".into()), ..helper };
        let with_own = build(&container(), &[offer("n1", None)], &own);
        let init = &with_own["spec"]["initContainers"][0];
        assert_eq!(
            (init["image"].as_str(), init["command"][1].as_str()),
            (Some("windlass/agent:1"), Some("install"))
        );
    }

    #[test]
    fn every_request_of_the_job_is_in_the_manifest() {
        let requested = ContainerRequest {
            memory_mib: Some(4096),
            disk_mib: Some(1024),
            shm_mib: Some(512),
            gpus: 1,
            privileged: true,
            registry_auth: Some(("ada".into(), "hunter2".into())),
            ..container()
        };
        let settings =
            KubernetesSettings { priority_class: Some("low".into()), ..KubernetesSettings::default() };
        let offers = [offer("n1", Some("H100")), offer("n2", Some("H100")), offer("n3", None)];
        let pod = build(&requested, &offers, &settings);
        let (spec, job) = (&pod["spec"], &pod["spec"]["containers"][0]);
        assert_eq!(
            job["resources"],
            json!({
                "requests": {"cpu": "2", "memory": "4096Mi", "ephemeral-storage": "1024Mi", "nvidia.com/gpu": "1"},
                "limits": {"nvidia.com/gpu": "1"},
            })
        );
        assert_eq!(job["securityContext"], json!({"runAsUser": 0, "privileged": true}));
        assert_eq!(spec["volumes"][1]["emptyDir"], json!({"medium": "Memory", "sizeLimit": "512Mi"}));
        assert_eq!(job["volumeMounts"][1]["mountPath"], "/dev/shm");
        assert_eq!(spec["priorityClassName"], "low");
        assert_eq!(spec["tolerations"], json!([{"key": "nvidia.com/gpu", "operator": "Exists"}]));
        let terms = &spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
        let names: Vec<&Value> = terms["nodeSelectorTerms"]
            .as_array()
            .unwrap()
            .iter()
            .map(|term| &term["matchFields"][0]["values"][0])
            .collect();
        assert_eq!(names, ["n1", "n2"], "the third has no GPU");
        assert_eq!(spec["imagePullSecrets"][0]["name"], pod["metadata"]["name"]);
        assert!(!pod.to_string().contains("hunter2"), "no password in the pod");
    }

    #[test]
    fn the_secret_of_a_registry_has_the_form_of_docker() {
        let instance: InstanceId = "0190a0b0-0000-7000-8000-000000000001".parse().unwrap();
        assert_eq!(pull_secret(instance, &container()), None);
        let requested = ContainerRequest { registry_auth: Some(("ada".into(), "pw".into())), ..container() };
        let secret = pull_secret(instance, &requested).unwrap();
        let packed = secret["data"][".dockerconfigjson"].as_str().unwrap();
        let config: Value = serde_json::from_slice(&BASE64.decode(packed).unwrap()).unwrap();
        let auth = &config["auths"]["registry.test:5000"];
        assert_eq!((auth["username"].as_str(), auth["password"].as_str()), (Some("ada"), Some("pw")));
        for (image, expected) in [
            ("busybox", DOCKER_HUB),
            ("team/app", DOCKER_HUB),
            ("ghcr.io/a/b", "ghcr.io"),
            ("localhost/a", "localhost"),
        ] {
            assert_eq!(registry(image), expected, "{image}");
        }
    }
}
