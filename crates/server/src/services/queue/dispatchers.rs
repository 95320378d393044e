//! Dispatchers by name: the nodes that they announce become offers.

use std::{cmp::Reverse, collections::HashMap};

use serde_json::{Map, Value, json};
use windlass_api::dispatchers::{Dispatcher, DispatcherList, DispatcherNodes};
use windlass_model::{
    queue::QueueCaller,
    time::{Span, Timestamp},
};

use super::{Error, Requester, Result, auth};
use crate::{
    app::App,
    auth::Caller,
    db::{Unit, WriteOutcome, dispatchers as rows, documents::DISPATCHER_NODES},
    dispatcher_nodes::{NodeGroup, SILENT_AFTER},
};

/// Time for which a dispatcher without a name is listed after it has ended.
const LISTED_FOR: Span = Span::hours(24);
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

/// Numbers of containers by the token that holds them.
#[derive(Clone, Copy, Debug, Default)]
struct HeldCounts {
    locked: i64,
    running: i64,
}

/// Dispatchers as a user may see them: only users of the queue see any, and only global admins see their processes.
pub async fn list_for(app: &App, caller: &Caller) -> crate::error::Result<DispatcherList> {
    let now = app.db().now().await?;
    let mut listed = DispatcherList { as_of: now.0, dispatchers: Vec::new(), queued: 0 };
    if !auth::can_submit(app, &caller.user) {
        return Ok(listed);
    }
    let is_admin = caller.user.admin;
    let owner = (!is_admin).then(|| auth::user_uuid(caller.user.id));
    let mut held: HashMap<String, HeldCounts> = HashMap::new();
    for one in rows::held_containers(app.db(), owner.as_deref()).await? {
        match (one.token_uuid, one.state.as_str()) {
            (_, "Queued") => listed.queued += one.count,
            (Some(token), "Locked") => held.entry(token).or_default().locked += one.count,
            (Some(token), _) => held.entry(token).or_default().running += one.count,
            (None, _) => {}
        }
    }
    let leases = rows::leases(app.db(), now - LISTED_FOR).await?;
    let mut leases: HashMap<String, rows::DispatcherLease> =
        leases.into_iter().map(|lease| (lease.token_uuid.clone(), lease)).collect();
    let mut named = rows::list(app.db()).await?;
    // A token that was used under several names works under the last of them.
    named.sort_by_key(|row| Reverse(row.seen_at));
    let mut dispatchers: Vec<Dispatcher> = Vec::new();
    for row in named {
        let (lease, counts) = (leases.remove(&row.token_uuid), held.remove(&row.token_uuid));
        let mut dispatcher = describe(lease.as_ref(), counts, is_admin, now);
        dispatcher.online = now.since(row.seen_at) < SILENT_AFTER;
        let nodes: Vec<NodeGroup> = DISPATCHER_NODES.decode(&row.name, &row.nodes)?;
        dispatcher.nodes = nodes.into_iter().map(nodes_to_wire).collect();
        (dispatcher.name, dispatcher.kind) = (Some(row.name), Some(row.kind));
        dispatcher.seen_at = Some(row.seen_at);
        dispatchers.push(dispatcher);
    }
    let mut unnamed: Vec<rows::DispatcherLease> = leases.into_values().collect();
    unnamed.sort_by(|one, other| one.token_uuid.cmp(&other.token_uuid));
    dispatchers.sort_by(|one, other| one.name.cmp(&other.name));
    for lease in unnamed {
        let counts = held.remove(&lease.token_uuid);
        dispatchers.push(describe(Some(&lease), counts, is_admin, now));
    }
    listed.dispatchers = dispatchers;
    Ok(listed)
}

/// A dispatcher without a name.
fn describe(
    lease: Option<&rows::DispatcherLease>,
    counts: Option<HeldCounts>,
    is_admin: bool,
    now: Timestamp,
) -> Dispatcher {
    let counts = counts.unwrap_or_default();
    let held_until = lease.map(|lease| lease.expires_at).filter(|at| *at > now);
    Dispatcher {
        name: None,
        kind: None,
        online: held_until.is_some(),
        seen_at: None,
        held_until: held_until.filter(|_| is_admin),
        process: lease.filter(|_| is_admin).map(|lease| lease.described.clone()),
        nodes: Vec::new(),
        locked: counts.locked,
        running: counts.running,
    }
}

fn nodes_to_wire(group: NodeGroup) -> DispatcherNodes {
    let NodeGroup { partition, cpus, memory_mib, gpus, gpu_type, count } = group;
    DispatcherNodes { partition, cpus, memory_mib, gpus, gpu_type, count }
}
