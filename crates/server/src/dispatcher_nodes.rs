//! Dispatchers and the nodes that they reported last.

use serde::{Deserialize, Serialize};
use windlass_model::time::{Span, Timestamp};

use crate::db::{Db, DbError, dispatchers as rows, documents::DISPATCHER_NODES};

/// Time after which a dispatcher that has not reported counts as offline.
pub(crate) const SILENT_AFTER: Span = Span::mins(2);

/// Nodes of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeGroup {
    /// Empty: there are no partitions.
    #[serde(default)]
    pub partition: String,
    pub cpus: u32,
    pub memory_mib: u64,
    #[serde(default)]
    pub gpus: u32,
    /// Name of the GPUs in the cluster; empty if they have none.
    #[serde(default)]
    pub gpu_type: String,
    /// Number of nodes of this kind.
    pub count: u32,
}

/// A dispatcher as it last reported.
#[derive(Clone, Debug)]
pub(crate) struct DispatcherView {
    pub name: String,
    pub kind: String,
    pub nodes: Vec<NodeGroup>,
    pub seen_at: Timestamp,
}

pub(crate) async fn list(db: &Db) -> Result<Vec<DispatcherView>, DbError> {
    let view = |row: rows::Dispatcher| {
        let nodes = DISPATCHER_NODES.decode(&row.name, &row.nodes)?;
        Ok(DispatcherView { name: row.name, kind: row.kind, nodes, seen_at: row.seen_at })
    };
    rows::list(db).await?.into_iter().map(view).collect()
}
