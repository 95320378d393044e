//! Capacity of one machine, and of the nodes of a cluster that has a scheduler with a queue.

use std::{collections::BTreeMap, fmt::Write as _};

use super::{
    ContainerNeeds, GpuRequirement,
    select::{Capacity, Fit},
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceAmount {
    pub cpus: u32,
    pub memory: u64,
    pub gpus: u32,
}

impl ResourceAmount {
    fn from_needs(needs: &ContainerNeeds) -> Self {
        Self { cpus: needs.cpus, memory: needs.memory, gpus: needs.gpus }
    }

    fn covers(self, other: Self) -> bool {
        self.cpus >= other.cpus && self.memory >= other.memory && self.gpus >= other.gpus
    }

    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self {
            cpus: self.cpus.saturating_sub(other.cpus),
            memory: self.memory.saturating_sub(other.memory),
            gpus: self.gpus.saturating_sub(other.gpus),
        }
    }

    /// Returns the parts of `wanted` that are not available.
    fn describe_missing(self, wanted: Self) -> String {
        let mut text = String::new();
        let mut say = |what: &str, wanted: u64, here: u64| {
            if wanted > here {
                let comma = if text.is_empty() { "" } else { ", " };
                let _ = write!(text, "{comma}{wanted} {what} requested, {here} available");
            }
        };
        say("CPUs", wanted.cpus.into(), self.cpus.into());
        say("bytes of memory", wanted.memory, self.memory);
        say("GPUs", wanted.gpus.into(), self.gpus.into());
        text
    }
}

/// Capacity of this machine.
#[derive(Clone, Debug)]
pub struct HostCapacity {
    total: ResourceAmount,
    free: ResourceAmount,
}

impl HostCapacity {
    pub fn new(total: ResourceAmount, used: ResourceAmount) -> Self {
        Self { total, free: total.saturating_sub(used) }
    }
}

impl Capacity for HostCapacity {
    fn check_fit(&self, needs: &ContainerNeeds) -> Fit {
        let wanted = ResourceAmount::from_needs(needs);
        if needs.gpus > 0 && !needs.gpu_requirement.is_any() {
            let request = &needs.gpu_requirement;
            return Fit::Never(format!(
                "it requests GPUs{request}, but this dispatcher does not know the GPU model of its host"
            ));
        }
        if !self.total.covers(wanted) {
            Fit::Never(format!("this host is too small: {}", self.total.describe_missing(wanted)))
        } else if self.free.covers(wanted) {
            Fit::Now
        } else {
            Fit::Later(format!("waiting for capacity on this host: {}", self.free.describe_missing(wanted)))
        }
    }

    fn allocate(&mut self, needs: &ContainerNeeds) {
        self.free = self.free.saturating_sub(ResourceAmount::from_needs(needs));
    }

    fn reserve(&mut self, needs: &ContainerNeeds) {
        self.allocate(needs);
    }
}

/// A node of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterNode {
    pub name: String,
    /// It accepts jobs, or will again.
    pub is_up: bool,
    pub size: ResourceAmount,
    /// GPU types as the cluster names them, with their count. Empty: they have no name.
    pub gpu_types: Vec<(String, u32)>,
    pub partitions: Vec<String>,
    pub features: Vec<String>,
}

impl ClusterNode {
    /// Returns the GPU type that a job with this requirement requests, and its count; no type if any GPU fits.
    pub fn matching_gpus(&self, request: &GpuRequirement) -> (Option<&str>, u32) {
        if request.is_any() {
            return (None, self.size.gpus);
        }
        let meant = self.gpu_types.iter().filter(|(gpu_type, _)| request.matches(gpu_type));
        meant.max_by_key(|(_, count)| *count).map_or((None, 0), |(name, count)| (Some(name), *count))
    }

    fn fits(&self, needs: &ContainerNeeds) -> bool {
        let size = ResourceAmount { gpus: self.matching_gpus(&needs.gpu_requirement).1, ..self.size };
        size.covers(ResourceAmount::from_needs(needs))
    }
}

/// Identical nodes of one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeClass {
    pub partition: String,
    pub size: ResourceAmount,
    /// GPU type as the cluster names it; empty if there is no name, or several.
    pub gpu_type: String,
    pub count: u32,
}

/// Returns the kinds of nodes of a cluster, by partition, smallest first. Nodes that are down are included.
pub fn node_classes(nodes: &[ClusterNode]) -> Vec<NodeClass> {
    let mut kinds: Vec<NodeClass> = Vec::new();
    for node in nodes {
        for partition in &node.partitions {
            let gpu_type = match &node.gpu_types[..] {
                [(name, count)] if *count == node.size.gpus => name.as_str(),
                _ => "",
            };
            let is_alike = |kind: &&mut NodeClass| {
                kind.partition == *partition && kind.size == node.size && kind.gpu_type == gpu_type
            };
            match kinds.iter_mut().find(is_alike) {
                Some(kind) => kind.count += 1,
                None => kinds.push(NodeClass {
                    partition: partition.clone(),
                    size: node.size,
                    gpu_type: gpu_type.to_owned(),
                    count: 1,
                }),
            }
        }
    }
    let order = |kind: &NodeClass| (kind.partition.clone(), kind.size.gpus, kind.size.cpus, kind.size.memory);
    kinds.sort_by_key(order);
    kinds
}

/// A cluster that orders waiting jobs itself: whatever fits some node may wait there, up to a limit.
#[derive(Clone, Debug)]
pub struct ClusterCapacity {
    pub nodes: Vec<ClusterNode>,
    /// Number of jobs that may still be submitted: more would only slow down each query of its queue.
    pub free_job_slots: usize,
}

impl ClusterCapacity {
    fn matches_placement(node: &ClusterNode, needs: &ContainerNeeds) -> bool {
        let partition = needs.partitions.is_empty()
            || needs.partitions.iter().any(|wanted| node.partitions.contains(wanted));
        partition && needs.features.iter().all(|wanted| node.features.contains(wanted))
    }

    /// Returns the GPU type to request, if not any fits: the one that a fitting node has most of.
    pub fn gpu_type(&self, needs: &ContainerNeeds) -> Option<&str> {
        let fitting =
            self.nodes.iter().filter(|node| Self::matches_placement(node, needs) && node.fits(needs));
        let types = fitting.map(|node| node.matching_gpus(&needs.gpu_requirement));
        types.max_by_key(|(_, count)| *count).and_then(|(gpu_type, _)| gpu_type)
    }
}

/// Formats the types as `A100 (4), T4 (2)`.
fn format_gpu_types(nodes: &[&ClusterNode]) -> String {
    let mut types: BTreeMap<&str, u32> = BTreeMap::new();
    for (name, count) in nodes.iter().flat_map(|node| &node.gpu_types) {
        let most = types.entry(name).or_default();
        *most = (*most).max(*count);
    }
    let reported: Vec<String> = types.iter().map(|(name, count)| format!("{name} ({count})")).collect();
    if reported.is_empty() { "no GPUs with a type name".to_owned() } else { reported.join(", ") }
}

impl Capacity for ClusterCapacity {
    fn check_fit(&self, needs: &ContainerNeeds) -> Fit {
        let wanted = ResourceAmount::from_needs(needs);
        let suited: Vec<&ClusterNode> =
            self.nodes.iter().filter(|node| Self::matches_placement(node, needs)).collect();
        let big: Vec<&&ClusterNode> = suited.iter().filter(|node| node.fits(needs)).collect();
        if suited.is_empty() {
            let mut why = "no node".to_owned();
            if !needs.partitions.is_empty() {
                let _ = write!(why, " in partition {}", needs.partitions.join(" or "));
            }
            if !needs.features.is_empty() {
                let _ = write!(why, " with {}", needs.features.join(" and "));
            }
            Fit::Never(why)
        } else if big.is_empty() {
            let most = suited.iter().fold(ResourceAmount::default(), |most, node| ResourceAmount {
                cpus: most.cpus.max(node.size.cpus),
                memory: most.memory.max(node.size.memory),
                gpus: most.gpus.max(node.size.gpus),
            });
            let missing = most.describe_missing(wanted);
            // Each part is available, but on different nodes.
            let missing = match missing.is_empty() {
                true if needs.gpu_requirement.is_any() => {
                    "no single node has all of the requested resources".to_owned()
                }
                true => {
                    format!(
                        "{} GPUs{} requested, available: {}",
                        wanted.gpus,
                        needs.gpu_requirement,
                        format_gpu_types(&suited)
                    )
                }
                false => missing,
            };
            Fit::Never(format!("no node is large enough: {missing}"))
        } else if !big.iter().any(|node| node.is_up) {
            let names: Vec<&str> = big.iter().map(|node| node.name.as_str()).collect();
            Fit::Later(format!("every node that fits is down: {}", names.join(", ")))
        } else if self.free_job_slots == 0 {
            Fit::Later("the limit for queued jobs on the cluster is reached".to_owned())
        } else {
            Fit::Now
        }
    }

    fn allocate(&mut self, _needs: &ContainerNeeds) {
        self.free_job_slots = self.free_job_slots.saturating_sub(1);
    }

    /// Does nothing: the cluster's queue keeps the order.
    fn reserve(&mut self, _needs: &ContainerNeeds) {}

    fn node_classes(&self) -> Vec<NodeClass> {
        node_classes(&self.nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_gpus(name: &str, gpu_types: &[(&str, u32)]) -> ClusterNode {
        let gpu_types: Vec<(String, u32)> =
            gpu_types.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
        let count = gpu_types.iter().map(|(_, count)| count).sum();
        ClusterNode { gpu_types, ..node(name, 64, count, "main") }
    }

    fn gpus(count: u32, gpu: GpuRequirement) -> ContainerNeeds {
        ContainerNeeds { cpus: 1, memory: 1, gpus: count, gpu_requirement: gpu, ..ContainerNeeds::default() }
    }

    #[test]
    fn gpu_requirement_selects_the_matching_gpu_type_of_the_cluster() {
        let nodes = vec![
            with_gpus("n1", &[("a100-40", 4)]),
            with_gpus("n2", &[("tesla_t4", 8)]),
            with_gpus("n3", &[("nvidia_a100_80gb_pcie", 2), ("h100", 2)]),
        ];
        let cluster = ClusterCapacity { nodes, free_job_slots: 9 };
        let model = |model: &str| GpuRequirement { model: Some(model.into()), ..GpuRequirement::default() };
        for (count, request, gpu_type) in [
            (1, GpuRequirement::default(), None),
            (1, model("T4"), Some("tesla_t4")),
            (4, model("A100"), Some("a100-40")),
            (1, model("A100-80GB"), Some("nvidia_a100_80gb_pcie")),
            (
                1,
                GpuRequirement { min_memory: 60 << 30, ..GpuRequirement::default() },
                Some("nvidia_a100_80gb_pcie"),
            ),
            (
                1,
                GpuRequirement { min_compute_capability: Some((9, 0)), ..GpuRequirement::default() },
                Some("h100"),
            ),
        ] {
            let needs = gpus(count, request);
            assert_eq!(cluster.check_fit(&needs), Fit::Now, "{needs:?}");
            assert_eq!(cluster.gpu_type(&needs), gpu_type, "{needs:?}");
        }
        let reported = "no node is large enough: 3 GPUs A100-80GB requested, available: a100-40 (4), h100 (2), \
                    nvidia_a100_80gb_pcie (2), tesla_t4 (8)";
        assert_eq!(cluster.check_fit(&gpus(3, model("A100-80GB"))), Fit::Never(reported.into()));
    }

    fn node(name: &str, cpus: u32, gpus: u32, partition: &str) -> ClusterNode {
        ClusterNode {
            name: name.into(),
            is_up: true,
            size: ResourceAmount { cpus, memory: 4_000, gpus },
            gpu_types: Vec::new(),
            partitions: vec![partition.into()],
            features: vec!["fast".into()],
        }
    }

    fn cluster() -> ClusterCapacity {
        ClusterCapacity { nodes: vec![node("n1", 4, 0, "main"), node("n2", 2, 2, "gpu")], free_job_slots: 1 }
    }

    fn needs(cpus: u32, gpus: u32) -> ContainerNeeds {
        ContainerNeeds { cpus, gpus, memory: 1, ..ContainerNeeds::default() }
    }

    #[test]
    fn a_container_that_can_never_fit_the_cluster_gets_the_reason() {
        let never = |needs: &ContainerNeeds| match cluster().check_fit(needs) {
            Fit::Never(why) => why,
            other @ (Fit::Now | Fit::Later(_)) => panic!("{other:?}"),
        };
        assert_eq!(never(&needs(8, 0)), "no node is large enough: 8 CPUs requested, 4 available");
        assert_eq!(
            never(&needs(4, 2)),
            "no node is large enough: no single node has all of the requested resources"
        );
        let elsewhere = ContainerNeeds { partitions: vec!["night".into()], ..needs(1, 0) };
        assert_eq!(never(&elsewhere), "no node in partition night");
        let odd = ContainerNeeds { features: vec!["fast".into(), "quiet".into()], ..needs(1, 0) };
        assert_eq!(never(&odd), "no node with fast and quiet");
    }

    #[test]
    fn a_container_waits_for_a_node_that_is_down() {
        let mut cluster = cluster();
        cluster.nodes[1].is_up = false;
        assert_eq!(cluster.check_fit(&needs(1, 2)), Fit::Later("every node that fits is down: n2".into()));
        assert_eq!(cluster.check_fit(&needs(1, 0)), Fit::Now);
    }

    #[test]
    fn no_container_fits_when_the_cluster_queue_is_full() {
        let mut cluster = cluster();
        cluster.allocate(&needs(1, 0));
        assert!(matches!(cluster.check_fit(&needs(1, 0)), Fit::Later(_)));
    }

    #[test]
    fn reserved_host_capacity_is_not_given_to_a_smaller_container() {
        let total = ResourceAmount { cpus: 4, memory: 100, gpus: 0 };
        let mut machine = HostCapacity::new(total, ResourceAmount { cpus: 2, ..ResourceAmount::default() });
        let big = needs(4, 0);
        assert_eq!(
            machine.check_fit(&big),
            Fit::Later("waiting for capacity on this host: 4 CPUs requested, 2 available".into())
        );
        machine.reserve(&big);
        assert!(matches!(machine.check_fit(&needs(1, 0)), Fit::Later(_)));
    }

    #[test]
    fn identical_nodes_are_grouped_by_partition_and_size() {
        let node = |name: &str, cpus, partitions: &[&str]| ClusterNode {
            name: name.into(),
            is_up: name != "down",
            size: ResourceAmount { cpus, memory: 1, gpus: 0 },
            gpu_types: Vec::new(),
            partitions: partitions.iter().map(|name| (*name).to_owned()).collect(),
            features: Vec::new(),
        };
        let nodes = [node("a", 8, &["main"]), node("down", 4, &["main", "big"]), node("b", 4, &["main"])];
        let reported: Vec<(String, u32, u32)> = node_classes(&nodes)
            .into_iter()
            .map(|kind| (kind.partition, kind.size.cpus, kind.count))
            .collect();
        assert_eq!(reported, [("big".into(), 4, 1), ("main".into(), 4, 2), ("main".into(), 8, 1)]);
    }
}
