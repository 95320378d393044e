//! Offers of a cluster: what each node has for pods of windlass.
//!
//! A node offers what it can allocate without what pods of others request. Pods of windlass are not subtracted: more of
//! them than fit now wait in the queue of the cluster, with the scheduler's reason.

use std::collections::BTreeMap;

use windlass_model::{
    backend_kind::BackendType,
    money::Price,
    plan::{
        execution_mode::Runtimes,
        offers::{Availability, Gpu, HostSpec, Offer},
    },
    resources::{CpuArch, GpuVendor},
};

use crate::{
    objects::{Container, Node, Pod, Quantities, Taint},
    pod_manifest::MANAGED_BY,
    quantity,
    settings::{KubernetesSettings, Toleration},
};

const MIB: f64 = 1_048_576.0;
const MIG_PREFIX: &str = "nvidia.com/mig-";
/// Resources of GPUs, with their vendors.
const GPU_RESOURCES: [(&str, GpuVendor); 6] = [
    ("nvidia.com/gpu", GpuVendor::Nvidia),
    ("amd.com/gpu", GpuVendor::Amd),
    ("habana.ai/gaudi", GpuVendor::Intel),
    ("gpu.intel.com/i915", GpuVendor::Intel),
    ("google.com/tpu", GpuVendor::Google),
    ("tenstorrent.com/tt", GpuVendor::Tenstorrent),
];
/// Labels with the name of the GPU: of the vendors' discovery, then of clouds.
const PRODUCT_LABELS: [&str; 4] = [
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "gpu.intel.com/product",
];
/// Labels of nodes that a cloud may take back, with their values.
const SPOT_LABELS: [(&str, &str); 5] = [
    ("karpenter.sh/capacity-type", "spot"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("cloud.google.com/gke-spot", "true"),
    ("cloud.google.com/gke-preemptible", "true"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
];
const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

/// Returns the offers of a cluster. `pods` are those that are not over.
pub(crate) fn offers(
    region: &str,
    nodes: &[Node],
    pods: &[Pod],
    settings: &KubernetesSettings,
) -> Vec<Offer> {
    let mut used: BTreeMap<&str, Usage> = BTreeMap::new();
    for pod in pods {
        let Some(node) = pod.spec.node_name.as_deref() else { continue };
        let usage = used.entry(node).or_default();
        usage.pods += 1;
        if pod.metadata.labels.get(MANAGED_BY.0).map(String::as_str) != Some(MANAGED_BY.1) {
            usage.add(&pod_requests(pod));
        }
    }
    let empty = Usage::default();
    let usage_of = |node: &Node| used.get(node.metadata.name.as_str()).unwrap_or(&empty);
    let is_selected = |node: &&Node| {
        settings.node_selector.iter().all(|(key, value)| node.metadata.labels.get(key) == Some(value))
    };
    let linux = nodes.iter().filter(|node| matches!(node.status.node_info.os.as_str(), "" | "linux"));
    linux.filter(is_selected).flat_map(|node| node_offers(region, node, usage_of(node), settings)).collect()
}

/// Resources that pods request on a node.
#[derive(Debug, Default)]
struct Usage {
    pods: u32,
    requested: BTreeMap<String, f64>,
}

impl Usage {
    fn add(&mut self, requests: &BTreeMap<String, f64>) {
        for (name, amount) in requests {
            *self.requested.entry(name.clone()).or_default() += amount;
        }
    }

    /// Returns what the node has left of a resource.
    fn left(&self, node: &Node, resource: &str) -> f64 {
        let all = node.status.allocatable.get(resource).and_then(|text| quantity::parse(text));
        let requested = self.requested.get(resource).copied().unwrap_or_default();
        (all.unwrap_or_default() - requested).max(0.0)
    }
}

/// Returns what the scheduler counts for a pod: its containers together, or a larger init container.
fn pod_requests(pod: &Pod) -> BTreeMap<String, f64> {
    let mut total = BTreeMap::new();
    let add = |total: &mut BTreeMap<String, f64>, requests: &Quantities| {
        for (name, text) in requests {
            *total.entry(name.clone()).or_insert(0.0) += quantity::parse(text).unwrap_or_default();
        }
    };
    let is_sidecar = |one: &&Container| one.restart_policy.as_deref() == Some("Always");
    for container in pod.spec.containers.iter().chain(pod.spec.init_containers.iter().filter(is_sidecar)) {
        add(&mut total, &container.resources.requests);
    }
    for init in pod.spec.init_containers.iter().filter(|one| !is_sidecar(one)) {
        for (name, text) in &init.resources.requests {
            let amount = quantity::parse(text).unwrap_or_default();
            let so_far = total.entry(name.clone()).or_insert(0.0);
            *so_far = so_far.max(amount);
        }
    }
    add(&mut total, &pod.spec.overhead);
    total
}

/// Returns one offer of a node, or one for each kind of its GPUs.
fn node_offers(region: &str, node: &Node, usage: &Usage, settings: &KubernetesSettings) -> Vec<Offer> {
    let mut kinds: Vec<(String, Vec<Gpu>)> = Vec::new();
    for resource in node.status.allocatable.keys() {
        let Some((vendor, part)) = gpu_resource(resource) else { continue };
        let count = whole(usage.left(node, resource));
        if count > 0 {
            let gpu = describe_gpu(node, vendor, part.as_deref());
            let suffix = part.map(|part| format!("-mig-{part}")).unwrap_or_default();
            kinds.push((suffix, vec![gpu; count as usize]));
        }
    }
    if kinds.is_empty() {
        kinds.push((String::new(), Vec::new()));
    }
    // Two plain resources of one node would have the same name.
    kinds.sort_by(|left, right| left.0.cmp(&right.0));
    kinds.dedup_by(|next, first| next.0 == first.0);
    kinds.into_iter().map(|(suffix, gpus)| offer(region, node, usage, settings, &suffix, gpus)).collect()
}

fn offer(
    region: &str,
    node: &Node,
    usage: &Usage,
    settings: &KubernetesSettings,
    suffix: &str,
    gpus: Vec<Gpu>,
) -> Offer {
    let labels = &node.metadata.labels;
    let cpus = usage.left(node, "cpu");
    let closed = closed_reason(node, usage, settings, gpus.first());
    let (availability, runtimes) = match closed {
        Some(why) => (Availability::NotAvailable, Runtimes::closed_node(&why)),
        None => (Availability::Available, Runtimes::pod(settings.privileged)),
    };
    Offer {
        backend: BackendType::Kubernetes.as_str().to_owned(),
        region: region.to_owned(),
        zones: labels.get(ZONE_LABEL).cloned().into_iter().collect(),
        instance_type: format!("{}{suffix}", node.metadata.name),
        price: Price::ZERO,
        availability,
        reservation: None,
        host: HostSpec {
            cpus: whole(cpus).max(1),
            arch: arch(&node.status.node_info.architecture),
            memory_mib: mib(usage.left(node, "memory")),
            disk_mib: mib(usage.left(node, "ephemeral-storage")),
            gpus,
            spot: SPOT_LABELS.iter().any(|(key, value)| labels.get(*key).is_some_and(|has| has == value)),
            runtimes: Some(runtimes),
        },
        total_blocks: 1,
    }
}

/// Returns the reason why a node takes no pods now.
fn closed_reason(
    node: &Node,
    usage: &Usage,
    settings: &KubernetesSettings,
    gpu: Option<&Gpu>,
) -> Option<String> {
    if node.spec.unschedulable {
        return Some("it is cordoned".to_owned());
    }
    let ready = node.status.conditions.iter().find(|one| one.kind == "Ready");
    match ready {
        Some(ready) if ready.status == "True" => {}
        Some(ready) => {
            let message = if ready.message.is_empty() { &ready.reason } else { &ready.message };
            return Some(format!("it is not ready: {message}"));
        }
        None => return Some("it has not reported that it is ready".to_owned()),
    }
    let own = gpu.map(resource_name);
    let is_tolerated = |taint: &&Taint| {
        taint.effect == "PreferNoSchedule"
            || own.as_deref() == Some(taint.key.as_str())
            || settings.tolerations.iter().any(|one| tolerates(one, taint))
    };
    if let Some(taint) = node.spec.taints.iter().find(|taint| !is_tolerated(taint)) {
        let value = if taint.value.is_empty() { String::new() } else { format!("={}", taint.value) };
        return Some(format!("its taint `{}{value}:{}` is not tolerated", taint.key, taint.effect));
    }
    let pods = node.status.allocatable.get("pods").and_then(|text| quantity::parse(text));
    if pods.is_some_and(|most| f64::from(usage.pods) >= most) {
        return Some(format!("it has {} pods, as many as it may have", usage.pods));
    }
    let left = usage.left(node, "cpu");
    (left < 1.0).then(|| format!("others request all but {left:.2} of its CPUs"))
}

pub(crate) fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let key_fits =
        toleration.key == taint.key || (toleration.key.is_empty() && toleration.operator == "Exists");
    let effect_fits = toleration.effect.is_empty() || toleration.effect == taint.effect;
    let value_fits = toleration.operator == "Exists" || toleration.value == taint.value;
    key_fits && effect_fits && value_fits
}

/// Returns the vendor of a resource of GPUs, and the profile if it is a part of one.
fn gpu_resource(name: &str) -> Option<(GpuVendor, Option<String>)> {
    if let Some(profile) = name.strip_prefix(MIG_PREFIX) {
        return Some((GpuVendor::Nvidia, Some(profile.to_owned())));
    }
    let (_, vendor) = GPU_RESOURCES.iter().find(|(resource, _)| *resource == name)?;
    Some((*vendor, None))
}

/// Returns the resource that a pod requests for a GPU of an offer.
pub(crate) fn resource_name(gpu: &Gpu) -> String {
    if let Some((_, profile)) = gpu.name.split_once("-MIG-") {
        return format!("{MIG_PREFIX}{}", profile.replace('+', "."));
    }
    let found = GPU_RESOURCES.iter().find(|(_, vendor)| *vendor == gpu.vendor);
    found.map_or("nvidia.com/gpu", |(resource, _)| resource).to_owned()
}

/// Describes a GPU by the labels of its node. `part` is the profile of a part of one.
fn describe_gpu(node: &Node, vendor: GpuVendor, part: Option<&str>) -> Gpu {
    let labels = &node.metadata.labels;
    let product = PRODUCT_LABELS.iter().find_map(|label| labels.get(*label)).map(String::as_str);
    let product = product.unwrap_or_default();
    // GPUs that several pods share at a time have a suffix.
    let product = product.trim_end_matches("-SHARED").replace('-', " ");
    let number = |label: &str| labels.get(label).and_then(|text| text.parse::<u32>().ok());
    let capability = number("nvidia.com/gpu.compute.major").zip(number("nvidia.com/gpu.compute.minor"));
    if let Some(profile) = part {
        let profile = profile.replacen("b.", "b+", 1);
        let whole = Gpu::from_name(Some(vendor), &product, 0, capability);
        // The name of the whole is kept if the product label already is that of a part.
        let base = whole.name.split("-MIG-").next().unwrap_or_default().to_owned();
        return Gpu::from_name(Some(vendor), &format!("{base} MIG {profile}"), 0, whole.compute_capability);
    }
    let memory = labels.get("nvidia.com/gpu.memory").and_then(|text| text.parse().ok());
    let memory = memory.or_else(|| {
        let vram = labels.get("amd.com/gpu.vram")?.trim_end_matches(['G', 'i', 'B']);
        vram.parse::<u64>().ok().map(|gigabytes| gigabytes * 1024)
    });
    Gpu::from_name(Some(vendor), &product, memory.unwrap_or_default(), capability)
}

fn arch(name: &str) -> Option<CpuArch> {
    match name {
        "amd64" => Some(CpuArch::X86),
        "arm64" => Some(CpuArch::Arm),
        _ => None,
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counts of a node, never negative"
)]
fn whole(amount: f64) -> u32 {
    // Sums of fractions must not lose a whole one.
    (amount + 1e-6).floor().min(f64::from(u32::MAX)) as u32
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "sizes of a node, never negative"
)]
fn mib(bytes: f64) -> u64 {
    (bytes / MIB).floor() as u64
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn node(more: &Value) -> Node {
        let mut node = json!({
            "metadata": {"name": "n1", "labels": {}},
            "status": {
                "allocatable": {"cpu": "8", "memory": "32Gi", "ephemeral-storage": "100Gi", "pods": "110"},
                "conditions": [{"type": "Ready", "status": "True"}],
                "nodeInfo": {"architecture": "amd64", "operatingSystem": "linux"},
            },
        });
        merge(&mut node, more);
        serde_json::from_value(node).unwrap()
    }

    fn merge(into: &mut Value, more: &Value) {
        match (into, more) {
            (Value::Object(into), Value::Object(more)) => {
                for (key, value) in more {
                    merge(into.entry(key).or_insert(Value::Null), value);
                }
            }
            (into, more) => *into = more.clone(),
        }
    }

    fn pod(node: &str, cpu: &str, managed: bool) -> Pod {
        let labels = if managed { json!({MANAGED_BY.0: MANAGED_BY.1}) } else { json!({}) };
        serde_json::from_value(json!({
            "metadata": {"name": "p", "labels": labels},
            "spec": {
                "nodeName": node,
                "containers": [{"resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}],
                "initContainers": [{"resources": {"requests": {"cpu": "100m", "memory": "2Gi"}}}],
            },
        }))
        .unwrap()
    }

    fn only(node: Node, pods: &[Pod]) -> Offer {
        let mut found = offers("here", &[node], pods, &KubernetesSettings::default());
        assert_eq!(found.len(), 1, "{found:?}");
        found.remove(0)
    }

    fn closed(node: Node, pods: &[Pod]) -> Option<String> {
        use windlass_model::plan::execution_mode::ContainerSupport;
        let runtimes = only(node, pods).host.runtimes.unwrap();
        if let ContainerSupport::ClosedNode { why } = runtimes.containers { Some(why) } else { None }
    }

    #[test]
    fn a_node_offers_what_pods_of_others_leave() {
        let pods = [pod("n1", "1500m", false), pod("n1", "4", true), pod("n2", "3", false)];
        let offer = only(node(&json!({"metadata": {"labels": {ZONE_LABEL: "z1"}}})), &pods);
        assert_eq!(
            (offer.host.cpus, offer.host.memory_mib),
            (6, 30 * 1024),
            "the larger init container counts"
        );
        assert_eq!((offer.host.disk_mib, offer.host.arch), (100 * 1024, Some(CpuArch::X86)));
        assert_eq!((offer.instance_type.as_str(), offer.zones), ("n1", vec!["z1".to_owned()]));
        assert!(!offer.host.spot);
        let spot = only(node(&json!({"metadata": {"labels": {"cloud.google.com/gke-spot": "true"}}})), &[]);
        assert!(spot.host.spot);
    }

    #[test]
    fn a_node_that_takes_no_pods_says_why() {
        assert_eq!(closed(node(&json!({})), &[]), None);
        for (more, why) in [
            (json!({"spec": {"unschedulable": true}}), "it is cordoned"),
            (
                json!({"status": {"conditions": [{"type": "Ready", "status": "False", "message": "no network"}]}}),
                "it is not ready: no network",
            ),
            (json!({"status": {"conditions": []}}), "it has not reported that it is ready"),
            (
                json!({"spec": {"taints": [{"key": "team", "value": "ml", "effect": "NoSchedule"}]}}),
                "its taint `team=ml:NoSchedule` is not tolerated",
            ),
            (json!({"status": {"allocatable": {"pods": "1"}}}), "it has 1 pods, as many as it may have"),
            (json!({"status": {"allocatable": {"cpu": "1900m"}}}), "others request all but 0.90 of its CPUs"),
        ] {
            assert_eq!(closed(node(&more), &[pod("n1", "1", false)]).as_deref(), Some(why), "{more}");
        }
        let preferred = json!({"spec": {"taints": [{"key": "a", "effect": "PreferNoSchedule"}]}});
        assert_eq!(closed(node(&preferred), &[]), None);
    }

    #[test]
    fn tolerations_match_by_key_value_and_effect() {
        let taint = Taint { key: "team".into(), value: "ml".into(), effect: "NoSchedule".into() };
        let toleration = |key: &str, operator: &str, value: &str, effect: &str| Toleration {
            key: key.into(),
            operator: operator.into(),
            value: value.into(),
            effect: effect.into(),
        };
        for (one, expected) in [
            (toleration("team", "", "ml", ""), true),
            (toleration("team", "Equal", "ml", "NoSchedule"), true),
            (toleration("team", "Exists", "", "NoSchedule"), true),
            (toleration("", "Exists", "", ""), true),
            (toleration("team", "Equal", "other", ""), false),
            (toleration("team", "Equal", "ml", "NoExecute"), false),
            (toleration("other", "Exists", "", ""), false),
        ] {
            assert_eq!(tolerates(&one, &taint), expected, "{one:?}");
        }
    }

    #[test]
    fn gpus_have_the_names_of_the_catalogue() {
        let labels = json!({
            "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559",
            "nvidia.com/gpu.compute.major": "9", "nvidia.com/gpu.compute.minor": "0",
        });
        let gpus =
            json!({"metadata": {"labels": labels}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}});
        let offer = only(node(&gpus), &[]);
        assert_eq!(offer.host.gpus.len(), 8);
        let gpu = &offer.host.gpus[0];
        assert_eq!((gpu.name.as_str(), gpu.memory_mib), ("H100-SXM", 80 * 1024));
        assert_eq!((gpu.compute_capability, resource_name(gpu).as_str()), (Some((9, 0)), "nvidia.com/gpu"));
        // A taint with the name of the resource is that of its vendor, and pods with GPUs tolerate it.
        let mut tainted = gpus.clone();
        merge(
            &mut tainted,
            &json!({"spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}}),
        );
        assert_eq!(closed(node(&tainted), &[]), None);
        let amd = json!({
            "metadata": {"labels": {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM", "amd.com/gpu.vram": "192G"}},
            "status": {"allocatable": {"amd.com/gpu": "4"}},
        });
        let offer = only(node(&amd), &[]);
        assert_eq!((offer.host.gpus.len(), offer.host.gpus[0].memory_mib), (4, 192 * 1024));
        assert_eq!(resource_name(&offer.host.gpus[0]), "amd.com/gpu");
    }

    #[test]
    fn parts_of_gpus_are_offers_of_their_own() {
        let parts = json!({
            "metadata": {"labels": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"}},
            "status": {"allocatable": {"nvidia.com/gpu": "2", "nvidia.com/mig-1g.5gb": "7", "nvidia.com/mig-3g.20gb": "0"}},
        });
        let found = offers("here", &[node(&parts)], &[], &KubernetesSettings::default());
        let kinds: Vec<_> =
            found.iter().map(|one| (one.instance_type.as_str(), one.host.gpus.len())).collect();
        assert_eq!(kinds, [("n1", 2), ("n1-mig-1g.5gb", 7)]);
        let part = &found[1].host.gpus[0];
        assert_eq!((part.name.as_str(), part.memory_mib), ("A100-SXM-MIG-1g.5gb", 5 * 1024));
        assert_eq!(resource_name(part), "nvidia.com/mig-1g.5gb");
    }

    #[test]
    fn only_selected_linux_nodes_count() {
        let windows = node(&json!({"status": {"nodeInfo": {"operatingSystem": "windows"}}}));
        let settings = KubernetesSettings {
            node_selector: [("pool".to_owned(), "jobs".to_owned())].into(),
            ..KubernetesSettings::default()
        };
        let chosen = node(&json!({"metadata": {"name": "n2", "labels": {"pool": "jobs"}}}));
        let found = offers("here", &[windows, node(&json!({})), chosen], &[], &settings);
        assert_eq!(found.iter().map(|one| one.instance_type.as_str()).collect::<Vec<_>>(), ["n2"]);
    }
}
