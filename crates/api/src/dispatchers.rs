//! Dispatchers of the container queue.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use windlass_model::time::Timestamp;

/// Nodes of one kind that a dispatcher announced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DispatcherNodes {
    /// Empty: the cluster has no partitions.
    pub partition: String,
    pub cpus: u32,
    pub memory_mib: u64,
    pub gpus: u32,
    /// Name of the GPUs in the cluster; empty if the nodes have none.
    pub gpu_type: String,
    /// Number of nodes of this kind.
    pub count: u32,
}

/// A process that takes containers from the queue and has them run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Dispatcher {
    /// Null for one that works without a name, such as `windlass dispatch local`.
    pub name: Option<String>,
    /// `slurm`; null for one without a name.
    pub kind: Option<String>,
    /// True if it contacted the server lately.
    pub online: bool,
    /// Last time at which it announced its nodes; null for one without a name.
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub seen_at: Option<Timestamp>,
    /// Time until which its process holds the token of the dispatcher; null if none does, and for callers who are not
    /// global admins.
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub held_until: Option<Timestamp>,
    /// Process that works with the token, or did last: machine and process id. Null for callers who are not global admins.
    pub process: Option<String>,
    pub nodes: Vec<DispatcherNodes>,
    /// Containers that it has locked and not started, among those that the caller may see.
    pub locked: i64,
    /// Containers that it runs, among those that the caller may see.
    pub running: i64,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DispatcherList {
    /// Time of the database, in microseconds.
    pub as_of: i64,
    /// In the order of their names, those without a name last.
    pub dispatchers: Vec<Dispatcher>,
    /// Containers that no dispatcher has locked, among those that the caller may see.
    pub queued: i64,
}
