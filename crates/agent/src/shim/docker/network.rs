//! The bridge that tasks without the host's network are on: one for all, and none hears another.
//!
//! It belongs to the engine, not to a task: it is made when first needed and stays, as do the firewall rules
//! that keep its tasks from the addresses where clouds hand out a machine's credentials.

use std::{collections::HashMap, process::Stdio, time::Duration};

use bollard::{
    Docker as Engine,
    models::{Network, NetworkCreateRequest},
    query_parameters::ListNetworksOptions,
};
use tokio::process::Command;

use super::{call, failure};
use crate::shim::runtime::RuntimeError;

pub(super) const NETWORK: &str = "windlass";

/// Where clouds answer questions about the machine, also about its credentials.
const METADATA: [&str; 3] = ["169.254.169.254", "169.254.170.2", "100.100.100.200"];
/// Engines keep rules of others in this chain, through their own restarts too.
const CHAIN: &str = "DOCKER-USER";
const FIREWALL: Duration = Duration::from_secs(5);
const MINE: &str = "ai.windlass.network";

/// Makes the network unless it is there.
pub(super) async fn ensure(engine: &Engine) -> Result<(), RuntimeError> {
    let network = match find(engine).await?.into_iter().next() {
        Some(network) => network,
        None => make(engine).await?,
    };
    if let Some(id) = network.id {
        shield(&id).await;
    }
    Ok(())
}

async fn make(engine: &Engine) -> Result<Network, RuntimeError> {
    let what = || format!("make network {NETWORK}");
    let request = NetworkCreateRequest {
        name: NETWORK.to_owned(),
        driver: Some("bridge".to_owned()),
        options: Some(HashMap::from([(
            "com.docker.network.bridge.enable_icc".to_owned(),
            "false".to_owned(),
        )])),
        labels: Some(HashMap::from([(MINE.to_owned(), "true".to_owned())])),
        ..NetworkCreateRequest::default()
    };
    match call(what(), engine.create_network(request)).await? {
        Ok(_) => {}
        Err(error) if failure::status(&error) == Some(409) => {}
        Err(error) => return Err(failure::of_call(what(), error)),
    }
    // Older engines let two shims that ask at once make two networks of one name, and then find the name
    // ambiguous. Everybody keeps the same one, so it does not matter who clears up.
    let mut same = find(engine).await?;
    for double in same.drain(1.min(same.len())..) {
        let id = double.id.unwrap_or_default();
        // It fails where a container is on it already, and then the next one tries.
        let _ = call(what(), engine.remove_network(&id)).await?;
    }
    same.pop().ok_or_else(|| RuntimeError::Refused { what: what(), why: "it is gone again".to_owned() })
}

/// All of the name, the one to keep first.
async fn find(engine: &Engine) -> Result<Vec<Network>, RuntimeError> {
    let what = format!("look for network {NETWORK}");
    let filters = HashMap::from([("name".to_owned(), vec![NETWORK.to_owned()])]);
    let listed =
        call(what.clone(), engine.list_networks(Some(ListNetworksOptions { filters: Some(filters) })));
    let mut all = listed.await?.map_err(|error| failure::of_call(what, error))?;
    all.retain(|network| network.name.as_deref() == Some(NETWORK));
    all.sort_by(|a, b| (&a.created, &a.id).cmp(&(&b.created, &b.id)));
    Ok(all)
}

/// Best effort: there may be no firewall to speak to, or another one that we do not know.
async fn shield(network: &str) {
    let Some(short) = network.get(..12) else { return };
    let bridge = format!("br-{short}");
    for address in METADATA {
        let rule = [CHAIN, "-i", &bridge, "-d", address, "-j", "DROP"];
        if firewall("-C", &rule).await == Some(true) {
            continue;
        }
        if firewall("-I", &rule).await != Some(true) {
            tracing::warn!(
                address,
                bridge,
                "tasks on the bridge may reach the cloud's metadata: no firewall rule"
            );
            return;
        }
    }
}

/// Whether the firewall agreed; `None` when it could not be asked.
async fn firewall(action: &str, rule: &[&str]) -> Option<bool> {
    let mut command = Command::new("iptables");
    command.args(["-w", "3", action]).args(rule).env_clear();
    command.env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let status = tokio::time::timeout(FIREWALL, command.status()).await.ok()?.ok()?;
    Some(status.success())
}
