//! Room on one machine, and on the nodes of a cluster that has a queue of its own.

use std::fmt::Write as _;

use super::{
    Needs,
    choose::{Fit, Room},
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    pub cpus: u32,
    pub memory: u64,
    pub gpus: u32,
}

impl Amount {
    fn of(needs: &Needs) -> Self {
        Self { cpus: needs.cpus, memory: needs.memory, gpus: needs.gpus }
    }

    fn holds(self, other: Self) -> bool {
        self.cpus >= other.cpus && self.memory >= other.memory && self.gpus >= other.gpus
    }

    #[must_use]
    pub fn less(self, other: Self) -> Self {
        Self {
            cpus: self.cpus.saturating_sub(other.cpus),
            memory: self.memory.saturating_sub(other.memory),
            gpus: self.gpus.saturating_sub(other.gpus),
        }
    }

    /// What of `wanted` is not here.
    fn missing(self, wanted: Self) -> String {
        let mut text = String::new();
        let mut say = |what: &str, wanted: u64, here: u64| {
            if wanted > here {
                let comma = if text.is_empty() { "" } else { ", " };
                let _ = write!(text, "{comma}{wanted} {what} of {here}");
            }
        };
        say("cpus", wanted.cpus.into(), self.cpus.into());
        say("bytes of memory", wanted.memory, self.memory);
        say("GPUs", wanted.gpus.into(), self.gpus.into());
        text
    }
}

/// This machine.
#[derive(Clone, Debug)]
pub struct Machine {
    total: Amount,
    free: Amount,
}

impl Machine {
    pub fn new(total: Amount, used: Amount) -> Self {
        Self { total, free: total.less(used) }
    }
}

impl Room for Machine {
    fn fit(&self, needs: &Needs) -> Fit {
        let wanted = Amount::of(needs);
        if !self.total.holds(wanted) {
            Fit::Never(format!("this machine is too small: {}", self.total.missing(wanted)))
        } else if self.free.holds(wanted) {
            Fit::Now
        } else {
            Fit::Later(format!("waits for room on this machine: {} free", self.free.missing(wanted)))
        }
    }

    fn take(&mut self, needs: &Needs) {
        self.free = self.free.less(Amount::of(needs));
    }

    fn reserve(&mut self, needs: &Needs) {
        self.take(needs);
    }
}

/// A node of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub name: String,
    /// It takes work, or will again.
    pub is_up: bool,
    pub size: Amount,
    pub partitions: Vec<String>,
    pub features: Vec<String>,
}

/// Machines of one partition that are alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    pub partition: String,
    pub size: Amount,
    pub count: u32,
}

/// What a cluster has, partition by partition, the smallest machines first. Those that are down come back.
pub fn kinds(nodes: &[Node]) -> Vec<Kind> {
    let mut kinds: Vec<Kind> = Vec::new();
    for node in nodes {
        for partition in &node.partitions {
            match kinds.iter_mut().find(|kind| kind.partition == *partition && kind.size == node.size) {
                Some(kind) => kind.count += 1,
                None => kinds.push(Kind { partition: partition.clone(), size: node.size, count: 1 }),
            }
        }
    }
    let order = |kind: &Kind| (kind.partition.clone(), kind.size.gpus, kind.size.cpus, kind.size.memory);
    kinds.sort_by_key(order);
    kinds
}

/// A cluster that orders waiting jobs itself: whatever could run on some node may wait there, up to a bound.
#[derive(Clone, Debug)]
pub struct Cluster {
    pub nodes: Vec<Node>,
    /// Jobs that may still be handed over: more would only make each look at its queue slower.
    pub open: usize,
}

impl Cluster {
    fn suits(node: &Node, needs: &Needs) -> bool {
        let partition = needs.partitions.is_empty()
            || needs.partitions.iter().any(|wanted| node.partitions.contains(wanted));
        partition && needs.features.iter().all(|wanted| node.features.contains(wanted))
    }
}

impl Room for Cluster {
    fn fit(&self, needs: &Needs) -> Fit {
        let wanted = Amount::of(needs);
        let suited: Vec<&Node> = self.nodes.iter().filter(|node| Self::suits(node, needs)).collect();
        let big: Vec<&&Node> = suited.iter().filter(|node| node.size.holds(wanted)).collect();
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
            let most = suited.iter().fold(Amount::default(), |most, node| Amount {
                cpus: most.cpus.max(node.size.cpus),
                memory: most.memory.max(node.size.memory),
                gpus: most.gpus.max(node.size.gpus),
            });
            let missing = most.missing(wanted);
            // Each part is there, but on different nodes.
            let missing =
                if missing.is_empty() { "no single node has all of it".to_owned() } else { missing };
            Fit::Never(format!("no node is big enough: {missing}"))
        } else if !big.iter().any(|node| node.is_up) {
            let names: Vec<&str> = big.iter().map(|node| node.name.as_str()).collect();
            Fit::Later(format!("every node that fits is down: {}", names.join(", ")))
        } else if self.open == 0 {
            Fit::Later("the cluster's queue holds as many of our jobs as it may".to_owned())
        } else {
            Fit::Now
        }
    }

    fn take(&mut self, _needs: &Needs) {
        self.open = self.open.saturating_sub(1);
    }

    /// The cluster's own queue keeps the order.
    fn reserve(&mut self, _needs: &Needs) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, cpus: u32, gpus: u32, partition: &str) -> Node {
        Node {
            name: name.into(),
            is_up: true,
            size: Amount { cpus, memory: 4_000, gpus },
            partitions: vec![partition.into()],
            features: vec!["fast".into()],
        }
    }

    fn cluster() -> Cluster {
        Cluster { nodes: vec![node("n1", 4, 0, "main"), node("n2", 2, 2, "gpu")], open: 1 }
    }

    fn needs(cpus: u32, gpus: u32) -> Needs {
        Needs { cpus, gpus, memory: 1, ..Needs::default() }
    }

    #[test]
    fn a_cluster_says_why_something_can_never_run_there() {
        let never = |needs: &Needs| match cluster().fit(needs) {
            Fit::Never(why) => why,
            other @ (Fit::Now | Fit::Later(_)) => panic!("{other:?}"),
        };
        assert_eq!(never(&needs(8, 0)), "no node is big enough: 8 cpus of 4");
        assert_eq!(never(&needs(4, 2)), "no node is big enough: no single node has all of it");
        let elsewhere = Needs { partitions: vec!["night".into()], ..needs(1, 0) };
        assert_eq!(never(&elsewhere), "no node in partition night");
        let odd = Needs { features: vec!["fast".into(), "quiet".into()], ..needs(1, 0) };
        assert_eq!(never(&odd), "no node with fast and quiet");
    }

    #[test]
    fn a_node_that_is_down_is_waited_for() {
        let mut cluster = cluster();
        cluster.nodes[1].is_up = false;
        assert_eq!(cluster.fit(&needs(1, 2)), Fit::Later("every node that fits is down: n2".into()));
        assert_eq!(cluster.fit(&needs(1, 0)), Fit::Now);
    }

    #[test]
    fn a_full_queue_of_the_cluster_is_not_filled_further() {
        let mut cluster = cluster();
        cluster.take(&needs(1, 0));
        assert!(matches!(cluster.fit(&needs(1, 0)), Fit::Later(_)));
    }

    #[test]
    fn a_machine_keeps_what_a_bigger_one_waits_for() {
        let total = Amount { cpus: 4, memory: 100, gpus: 0 };
        let mut machine = Machine::new(total, Amount { cpus: 2, ..Amount::default() });
        let big = needs(4, 0);
        assert_eq!(machine.fit(&big), Fit::Later("waits for room on this machine: 4 cpus of 2 free".into()));
        machine.reserve(&big);
        assert!(matches!(machine.fit(&needs(1, 0)), Fit::Later(_)));
    }

    #[test]
    fn machines_that_are_alike_are_told_once() {
        let node = |name: &str, cpus, partitions: &[&str]| Node {
            name: name.into(),
            is_up: name != "down",
            size: Amount { cpus, memory: 1, gpus: 0 },
            partitions: partitions.iter().map(|name| (*name).to_owned()).collect(),
            features: Vec::new(),
        };
        let nodes = [node("a", 8, &["main"]), node("down", 4, &["main", "big"]), node("b", 4, &["main"])];
        let told: Vec<(String, u32, u32)> =
            kinds(&nodes).into_iter().map(|kind| (kind.partition, kind.size.cpus, kind.count)).collect();
        assert_eq!(told, [("big".into(), 4, 1), ("main".into(), 4, 2), ("main".into(), 8, 1)]);
    }
}
