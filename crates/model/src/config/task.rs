//! `type: task`: commands that run until they end, on one node or on several.

use super::{
    config_macros::table,
    decode::{Ctx, Int},
    error::{Code, Diagnosis},
    interpolate::{self, ReferenceScope},
    name::GroupName,
    ports::PortMapping,
    profile, run,
    yaml::{Node, Value},
};
use crate::resources::ResourcesSpec;

/// Number of nodes.
pub type Nodes = Int<1, { i64::MAX }>;

table! {
    /// A group of identical nodes of a task.
    pub struct NodeGroup {
        /// Name of the group. Default: its position.
        pub name: Option<GroupName> = None,
        /// Number of nodes.
        pub nodes: Nodes = Int(1),
        /// Resources that each node requests. Not inherited from the task.
        pub resources: ResourcesSpec = ResourcesSpec::default(),
        /// Commands that each node runs.
        pub commands: Vec<String> = vec![],
        /// Ports to forward to the client.
        pub ports: Vec<PortMapping> = vec![],
    }
}

table! {
    /// Commands that run until they end.
    pub struct Task {
        /// Commands to run, joined with `&&`.
        pub commands: Vec<String> = vec![],
        /// Ports to forward to the client.
        pub ports: Vec<PortMapping> = vec![],
        /// Number of nodes. Default: 1.
        pub nodes: Option<Nodes> = None => omit,
        /// Groups of nodes with different settings.
        pub groups: Option<Vec<NodeGroup>> = None => omit,
    }
    flatten {
        pub run: run::Run,
        pub profile: profile::ProfileProperties,
    }
    tag = "task";
    check = Self::check;
}

impl Task {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        match &self.groups {
            None => run::check_something_to_run(!self.commands.is_empty(), &self.run, node, cx),
            Some(groups) => self.check_groups(groups, node, cx),
        }
        let sizes: Option<Vec<i64>> = self.groups.as_ref().map(|g| g.iter().map(|g| g.nodes.get()).collect());
        interpolate::check(node, ReferenceScope::Task(sizes.as_deref()), cx);
    }

    fn check_groups(&self, groups: &[NodeGroup], node: &Node, cx: &mut Ctx) {
        let taken = [
            (self.nodes.is_some(), "nodes"),
            (!self.commands.is_empty(), "commands"),
            (!self.ports.is_empty(), "ports"),
            (self.run.entrypoint.is_some(), "entrypoint"),
        ];
        for (set, key) in taken {
            if set {
                cx.conflict(
                    node,
                    key,
                    format!("`{key}` and `groups` are mutually exclusive; set it in the groups"),
                );
            }
        }
        if groups.is_empty() {
            cx.conflict(node, "groups", "`groups` must not be empty");
        }
        let names = groups.iter().map(|group| group.name.as_ref().map(|name| name.0.as_str()));
        check_group_names(names, node, cx);
        for (index, group) in groups.iter().enumerate() {
            if group.commands.is_empty() && self.run.image.is_none() {
                let at = group_node(node, "groups", index).unwrap_or(node);
                cx.under("groups", |cx| {
                    cx.at_index(index, |cx| {
                        cx.missing(
                            at,
                            "commands",
                            "each group requires `commands` unless the task has an `image`",
                        );
                    });
                });
            }
        }
    }

    /// Returns the number of nodes of the whole task.
    pub fn nodes_total(&self) -> i64 {
        match &self.groups {
            Some(groups) => groups.iter().map(|group| group.nodes.get()).fold(0, i64::saturating_add),
            None => self.nodes.map_or(1, Int::get),
        }
    }
}

pub(crate) fn group_node<'a>(node: &'a Node, key: &str, index: usize) -> Option<&'a Node> {
    match &node.field(key)?.value {
        Value::Seq(items) => items.get(index),
        Value::Null | Value::Scalar(_) | Value::Map(_) => None,
    }
}

/// Checks that group names are unique; the name of an unnamed group is its position.
pub(crate) fn check_group_names<'a>(names: impl Iterator<Item = Option<&'a str>>, node: &Node, cx: &mut Ctx) {
    let mut seen = std::collections::BTreeSet::new();
    for (index, name) in names.enumerate() {
        let name = name.map_or_else(|| index.to_string(), str::to_owned);
        if !seen.insert(name.clone()) {
            let span = group_node(node, "groups", index).map_or(node.span, |group| group.key_span("name"));
            let message = format!("two groups have the name `{name}`");
            cx.problem(Diagnosis::new(Code::Conflict, span, message).at(format!("groups[{index}].name")));
        }
    }
}
