//! The bridge that tasks without the host's network are on: one for all, and none hears another.
//!
//! It belongs to the engine, not to a task: it is made when first needed and stays, as do the firewall rules
//! that keep its tasks from the addresses where clouds hand out a machine's credentials.

use std::{collections::HashMap, path::Path, process::Stdio, time::Duration};

use bollard::{
    Docker as Engine,
    models::{Network, NetworkCreateRequest},
    query_parameters::ListNetworksOptions,
};
use tokio::process::Command;

use super::{call_with_timeout, failure};
use crate::shim::runtime::RuntimeError;

pub(crate) const NETWORK: &str = "windlass";

/// Where clouds answer questions about the machine, also about its credentials.
const METADATA_ADDRESSES: [&str; 3] = ["169.254.169.254", "169.254.170.2", "100.100.100.200"];
/// Engines keep rules of others in this chain, through their own restarts too.
const FIREWALL_CHAIN: &str = "DOCKER-USER";
const FIREWALL_TIMEOUT: Duration = Duration::from_secs(5);
const NETWORK_LABEL: &str = "ai.windlass.network";

#[derive(Debug, Default)]
pub(super) struct Bridge {
    /// Held while looking and making, so that two tasks of one shim do not make two networks.
    making: tokio::sync::Mutex<()>,
}

impl Bridge {
    /// Makes the network unless it is there. Nothing may be started on it before it is shielded.
    pub(super) async fn ensure(&self, engine: &Engine) -> Result<UnprotectedNetwork<'_>, RuntimeError> {
        let making = self.making.lock().await;
        let mut all = find_networks(engine).await?;
        let network = match all.len() {
            1 => all.pop(),
            _ => Some(create_network(engine).await?),
        };
        Ok(UnprotectedNetwork { id: network.and_then(|network| network.id), _making: making })
    }
}

/// A network whose firewall rules have not been looked at. Containers may be made meanwhile.
#[must_use = "tasks on it may reach the cloud's metadata"]
pub(super) struct UnprotectedNetwork<'a> {
    id: Option<String>,
    _making: tokio::sync::MutexGuard<'a, ()>,
}

impl UnprotectedNetwork<'_> {
    pub(super) async fn shield(self) {
        if let Some(id) = &self.id {
            shield(id).await;
        }
    }
}

/// Leaves exactly one network of the name.
async fn create_network(engine: &Engine) -> Result<Network, RuntimeError> {
    let what = || format!("make network {NETWORK}");
    if find_networks(engine).await?.is_empty() {
        match call_with_timeout(what(), engine.create_network(create_request())).await? {
            Ok(_) => {}
            Err(error) if failure::error_status(&error) == Some(409) => {}
            Err(error) => return Err(failure::from_call_error(what(), error)),
        }
    }
    // Older engines let two shims that ask at once make two networks of one name, and then find the name
    // ambiguous. Everybody keeps the same one, so it does not matter who clears up.
    let mut same = find_networks(engine).await?.into_iter();
    let keep = same.next();
    for double in same {
        let id = double.id.unwrap_or_default();
        // It fails where a container is on it already, and then the next one tries.
        let _ = call_with_timeout(what(), engine.remove_network(&id)).await?;
    }
    keep.ok_or_else(|| RuntimeError::Refused { what: what(), why: "it is gone again".to_owned() })
}

/// Containers on the network do not see each other.
const ISOLATION_OPTION: (&str, &str) = ("com.docker.network.bridge.enable_icc", "false");

/// The words for an engine's own program that make the network. Podman knows no networks whose containers are kept apart.
pub(crate) fn create_command(is_podman: bool) -> Vec<String> {
    let label = format!("{NETWORK_LABEL}=true");
    let mut words = vec!["network", "create", "--driver", "bridge", "--label", &label];
    let deaf = format!("{}={}", ISOLATION_OPTION.0, ISOLATION_OPTION.1);
    if !is_podman {
        words.extend(["--opt", &deaf]);
    }
    words.push(NETWORK);
    words.into_iter().map(str::to_owned).collect()
}

fn create_request() -> NetworkCreateRequest {
    let deaf = (ISOLATION_OPTION.0.to_owned(), ISOLATION_OPTION.1.to_owned());
    NetworkCreateRequest {
        name: NETWORK.to_owned(),
        driver: Some("bridge".to_owned()),
        options: Some(HashMap::from([deaf])),
        labels: Some(HashMap::from([(NETWORK_LABEL.to_owned(), "true".to_owned())])),
        ..NetworkCreateRequest::default()
    }
}

/// All of the name, the one to keep first.
async fn find_networks(engine: &Engine) -> Result<Vec<Network>, RuntimeError> {
    let what = format!("look for network {NETWORK}");
    let filters = HashMap::from([("name".to_owned(), vec![NETWORK.to_owned()])]);
    let listed = call_with_timeout(
        what.clone(),
        engine.list_networks(Some(ListNetworksOptions { filters: Some(filters) })),
    );
    let mut all = listed.await?.map_err(|error| failure::from_call_error(what, error))?;
    all.retain(|network| network.name.as_deref() == Some(NETWORK));
    all.sort_by(|a, b| (&a.created, &a.id).cmp(&(&b.created, &b.id)));
    Ok(all)
}

/// Best effort: there may be no firewall to speak to, or another one that we do not know.
pub(crate) async fn shield(network: &str) {
    let Some(short) = network.get(..12) else { return };
    let bridge = format!("br-{short}");
    let Some(rules) = run_iptables(&["-S", FIREWALL_CHAIN]).await else {
        tracing::warn!(bridge, "tasks on the bridge may reach the cloud's metadata: no firewall to tell");
        return;
    };
    let exists = |bridge: &str| Path::new("/sys/class/net").join(bridge).exists();
    for rule in missing_rules(&rules, &bridge).into_iter().chain(stale_rules(&rules, &exists)) {
        let words: Vec<&str> = rule.iter().map(String::as_str).collect();
        if run_iptables(&words).await.is_none() {
            tracing::warn!(rule = rule.join(" "), "the firewall does not take a rule");
        }
    }
}

fn rule(action: &str, bridge: &str, address: &str) -> Vec<String> {
    [action, FIREWALL_CHAIN, "-d", address, "-i", bridge, "-j", "DROP"].map(str::to_owned).to_vec()
}

/// Rules to add, given those there are.
fn missing_rules(rules: &str, bridge: &str) -> Vec<Vec<String>> {
    let is_there = |address: &&str| {
        let rule = format!("-d {address}/32 -i {bridge} -j DROP");
        rules.lines().any(|line| line.ends_with(&rule))
    };
    METADATA_ADDRESSES
        .iter()
        .filter(|address| !is_there(address))
        .map(|address| rule("-I", bridge, address))
        .collect()
}

/// Rules of ours for a bridge that is no more.
fn stale_rules(rules: &str, exists: &dyn Fn(&str) -> bool) -> Vec<Vec<String>> {
    let gone = |line: &str| {
        let rest = line.strip_prefix(&format!("-A {FIREWALL_CHAIN} -d "))?.strip_suffix(" -j DROP")?;
        let (address, bridge) = rest.split_once("/32 -i ")?;
        let is_ours = METADATA_ADDRESSES.contains(&address) && bridge.starts_with("br-");
        (is_ours && !exists(bridge)).then(|| rule("-D", bridge, address))
    };
    rules.lines().filter_map(gone).collect()
}

/// What the firewall said, if it agreed.
async fn run_iptables(words: &[&str]) -> Option<String> {
    let mut command = Command::new("iptables");
    command.args(["-w", "3"]).args(words).env_clear();
    command.env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin");
    command.stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(FIREWALL_TIMEOUT, command.output()).await.ok()?.ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: &str = "-N DOCKER-USER\n\
        -A DOCKER-USER -d 169.254.169.254/32 -i br-aaaaaaaaaaaa -j DROP\n\
        -A DOCKER-USER -d 169.254.169.254/32 -i br-bbbbbbbbbbbb -j DROP\n\
        -A DOCKER-USER -d 10.0.0.1/32 -i br-bbbbbbbbbbbb -j DROP\n\
        -A DOCKER-USER -j RETURN\n";

    #[test]
    fn each_rule_is_added_once() {
        let added = missing_rules(RULES, "br-aaaaaaaaaaaa");
        let lines: Vec<String> = added.iter().map(|rule| rule.join(" ")).collect();
        assert_eq!(
            lines,
            [
                "-I DOCKER-USER -d 169.254.170.2 -i br-aaaaaaaaaaaa -j DROP",
                "-I DOCKER-USER -d 100.100.100.200 -i br-aaaaaaaaaaaa -j DROP",
            ]
        );
        assert_eq!(missing_rules("", "br-c").len(), METADATA_ADDRESSES.len());
    }

    #[test]
    fn rules_for_bridges_that_are_gone_are_taken_away_and_no_others() {
        let taken = stale_rules(RULES, &|bridge| bridge == "br-aaaaaaaaaaaa");
        let lines: Vec<String> = taken.iter().map(|rule| rule.join(" ")).collect();
        assert_eq!(lines, ["-D DOCKER-USER -d 169.254.169.254 -i br-bbbbbbbbbbbb -j DROP"]);
    }
}
