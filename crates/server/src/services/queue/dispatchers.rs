//! Dispatchers by name: the nodes that they announce become offers.

use serde_json::{Map, Value, json};
use windlass_model::{queue::QueueCaller, time::Span};

use super::{Error, Requester, Result};
use crate::{
    app::App,
    db::{Unit, WriteOutcome, dispatchers as rows},
    dispatcher_nodes::{NodeGroup, SILENT_AFTER},
};

const NAME_MAX: usize = 64;
const DESCRIPTION_MAX: usize = 200;
/// Maximum seconds for which a process may hold a token without renewal.
const LEASE_MAX: i64 = 3600;
/// Maximum number of kinds of nodes that one dispatcher may announce.
const NODES_MAX: usize = 1000;

/// Records the name and nodes of a dispatcher. Repeated calls serve as keepalive.
pub async fn record_heartbeat(
    app: &App,
    asker: &Requester,
    name: &str,
    reported: &Map<String, Value>,
) -> Result<Value> {
    let QueueCaller::Dispatcher { token } = &asker.who else {
        return Err(Error::denied("only a dispatcher's token may report nodes"));
    };
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(fits) {
        return Err(Error::invalid(format!(
            "invalid dispatcher name: expected 1 to {NAME_MAX} letters, digits, `-`, `_` or `.`"
        )));
    }
    let kind = reported.get("kind").and_then(Value::as_str).unwrap_or("other");
    let nodes = reported.get("nodes").cloned().unwrap_or_else(|| json!([]));
    let nodes: Vec<NodeGroup> =
        serde_json::from_value(nodes).map_err(|error| Error::invalid(format!("nodes: {error}")))?;
    if nodes.len() > NODES_MAX || kind.len() > NAME_MAX {
        return Err(Error::invalid(format!("`nodes` must have at most {NODES_MAX} entries")));
    }
    let change = rows::record_heartbeat(name, kind, token, &serde_json::to_string(&nodes)?, SILENT_AFTER.0);
    match app.db().write(Unit::new().and([change])).await? {
        WriteOutcome::Done { .. } => Ok(json!({ "name": name, "kind": kind, "nodes": nodes })),
        WriteOutcome::Stale { .. } => {
            Err(Error::invalid(format!("dispatcher name `{name}` is already in use: choose another name")))
        }
    }
}

/// Acquires or renews the lease of a dispatcher's token: one process at a time uses it. Zero seconds release it.
pub async fn claim_lease(app: &App, asker: &Requester, reported: &Map<String, Value>) -> Result<Value> {
    let QueueCaller::Dispatcher { token } = &asker.who else {
        return Err(Error::denied("only a dispatcher's token may hold a lease"));
    };
    let text = |name: &str| {
        let text = reported.get(name).and_then(Value::as_str).unwrap_or_default();
        if text.is_empty() || text.len() > DESCRIPTION_MAX {
            return Err(Error::invalid(format!(
                "`lease.{name}` must have 1 to {DESCRIPTION_MAX} characters"
            )));
        }
        Ok(text)
    };
    let (holder, described) = (text("holder")?, text("described")?);
    let seconds =
        reported.get("seconds").and_then(Value::as_i64).filter(|secs| (0..=LEASE_MAX).contains(secs));
    let seconds =
        seconds.ok_or_else(|| Error::invalid(format!("`lease.seconds` must be from 0 to {LEASE_MAX}")))?;
    let change = rows::claim_lease(token, holder, described, Span::secs(seconds).0);
    match app.db().write(Unit::new().and([change])).await? {
        WriteOutcome::Done { .. } => Ok(json!({ "held": true })),
        WriteOutcome::Stale { .. } => {
            Ok(json!({ "held": false, "holder": rows::lease_holder(app.db(), token).await? }))
        }
    }
}
