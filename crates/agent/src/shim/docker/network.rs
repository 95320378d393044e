//! Bridge network of tasks that do not use the host's network: shared by all, with no traffic between tasks.
//!
//! It belongs to the engine, not to a task: it is created when first needed and kept, as are the firewall rules that
//! block access from its tasks to the metadata addresses, where clouds serve the credentials of a machine. With Podman,
//! which has no networks without traffic between containers, such rules block that traffic as well.

use std::{collections::HashMap, path::Path, process::Stdio, time::Duration};

use bollard::{
    Docker as Engine,
    models::{Network, NetworkCreateRequest},
    query_parameters::ListNetworksOptions,
};
use tokio::process::Command;

use super::{call_with_timeout, error_map};
use crate::shim::runtime::RuntimeError;

pub(crate) const NETWORK: &str = "windlass";

/// Addresses where clouds serve metadata of the machine, including its credentials.
const METADATA_ADDRESSES: [&str; 3] = ["169.254.169.254", "169.254.170.2", "100.100.100.200"];
/// Chain in which engines preserve foreign rules, also through their restarts.
const FIREWALL_CHAIN: &str = "DOCKER-USER";
/// Table and chain for networks of Podman. Those that filter contain rules of the engine that accept packets, and the
/// engine may insert them above ours at any time.
const SUBNET_TABLE: [&str; 2] = ["-t", "mangle"];
const SUBNET_CHAIN: &str = "FORWARD";
/// Contains `1` if the firewall sees packets between containers on one bridge.
const BRIDGE_FILTER_FILE: &str = "/proc/sys/net/bridge/bridge-nf-call-iptables";
const FIREWALL_TIMEOUT: Duration = Duration::from_secs(5);
const NETWORK_LABEL: &str = "ai.windlass.network";

#[derive(Debug, Default)]
pub(super) struct Bridge {
    /// Held while the network is looked up and created, so that two tasks of one shim do not create two networks.
    making: tokio::sync::Mutex<()>,
}

impl Bridge {
    /// Creates the network unless it exists. Nothing may be started on it before it is shielded.
    pub(super) async fn ensure(
        &self,
        engine: &Engine,
        is_podman: bool,
    ) -> Result<UnprotectedNetwork<'_>, RuntimeError> {
        let making = self.making.lock().await;
        let mut all = find_networks(engine).await?;
        let network = match all.len() {
            1 => all.pop(),
            _ => Some(create_network(engine, is_podman).await?),
        };
        let id = network.as_ref().and_then(|network| network.id.clone());
        let subnets = if is_podman { network.map_or_else(Vec::new, subnets) } else { Vec::new() };
        Ok(UnprotectedNetwork { id: id.filter(|_| !is_podman), subnets, _making: making })
    }
}

/// A network whose firewall rules have not been checked. Containers may be created meanwhile.
#[must_use = "tasks on it may reach the cloud's metadata"]
pub(super) struct UnprotectedNetwork<'a> {
    /// Set for Docker.
    id: Option<String>,
    /// Set for Podman.
    subnets: Vec<String>,
    _making: tokio::sync::MutexGuard<'a, ()>,
}

impl UnprotectedNetwork<'_> {
    pub(super) async fn block_metadata(self) {
        if let Some(id) = &self.id {
            shield(id).await;
        }
        shield_subnets(&self.subnets).await;
    }
}

fn subnets(network: Network) -> Vec<String> {
    let pools = network.ipam.and_then(|ipam| ipam.config).unwrap_or_default();
    pools.into_iter().filter_map(|pool| pool.subnet).collect()
}

/// Creates the network and leaves exactly one network of the name.
async fn create_network(engine: &Engine, is_podman: bool) -> Result<Network, RuntimeError> {
    let what = || format!("failed to create network {NETWORK}");
    if find_networks(engine).await?.is_empty() {
        match call_with_timeout(what(), engine.create_network(create_request(is_podman))).await? {
            Ok(_) => {}
            Err(error) if error_map::error_status(&error) == Some(409) => {}
            Err(error) => return Err(error_map::from_call_error(what(), error)),
        }
    }
    // Older engines let two shims that act at once create two networks of one name, and then report the name as
    // ambiguous. All shims keep the same one, so any of them may remove the duplicates.
    let mut same = find_networks(engine).await?.into_iter();
    let keep = same.next();
    for double in same {
        let id = double.id.unwrap_or_default();
        // Fails if a container already uses it; then the next shim tries.
        let _ = call_with_timeout(what(), engine.remove_network(&id)).await?;
    }
    keep.ok_or_else(|| RuntimeError::Refused { what: what(), why: "it was removed again".to_owned() })
}

/// Disables traffic between containers on the network.
const ISOLATION_OPTION: (&str, &str) = ("com.docker.network.bridge.enable_icc", "false");

/// Arguments for the engine's command-line program that create the network. Podman rejects the option.
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

fn create_request(is_podman: bool) -> NetworkCreateRequest {
    let deaf = (ISOLATION_OPTION.0.to_owned(), ISOLATION_OPTION.1.to_owned());
    NetworkCreateRequest {
        name: NETWORK.to_owned(),
        driver: Some("bridge".to_owned()),
        options: (!is_podman).then(|| HashMap::from([deaf])),
        labels: Some(HashMap::from([(NETWORK_LABEL.to_owned(), "true".to_owned())])),
        ..NetworkCreateRequest::default()
    }
}

/// Lists all networks of the name, the one to keep first.
async fn find_networks(engine: &Engine) -> Result<Vec<Network>, RuntimeError> {
    let what = format!("failed to look up network {NETWORK}");
    let filters = HashMap::from([("name".to_owned(), vec![NETWORK.to_owned()])]);
    let listed = call_with_timeout(
        what.clone(),
        engine.list_networks(Some(ListNetworksOptions { filters: Some(filters) })),
    );
    let mut all = listed.await?.map_err(|error| error_map::from_call_error(what, error))?;
    all.retain(|network| network.name.as_deref() == Some(NETWORK));
    all.sort_by(|a, b| (&a.created, &a.id).cmp(&(&b.created, &b.id)));
    Ok(all)
}

/// Adds the firewall rules. Best effort: there may be no firewall, or one of an unknown kind.
pub(crate) async fn shield(network: &str) {
    let Some(short) = network.get(..12) else { return };
    let bridge = format!("br-{short}");
    let Some(rules) = run_iptables(&["-S", FIREWALL_CHAIN]).await else {
        tracing::warn!(bridge, "failed to read firewall rules; tasks may reach the cloud's metadata");
        return;
    };
    let exists = |bridge: &str| Path::new("/sys/class/net").join(bridge).exists();
    for rule in missing_rules(&rules, &bridge).into_iter().chain(stale_rules(&rules, &exists)) {
        let words: Vec<&str> = rule.iter().map(String::as_str).collect();
        if run_iptables(&words).await.is_none() {
            tracing::warn!(rule = rule.join(" "), "failed to change firewall rule");
        }
    }
}

/// Adds the firewall rules for networks of Podman: containers are recognized by their addresses, because the interface
/// of their network exists only while one of them runs. Best effort, as for Docker.
pub(crate) async fn shield_subnets(subnets: &[String]) {
    // The engine gives them IPv4 addresses only, unless its owner configured it otherwise.
    let subnets: Vec<&String> = subnets.iter().filter(|subnet| !subnet.contains(':')).collect();
    if subnets.is_empty() {
        return;
    }
    let list = [SUBNET_TABLE.as_slice(), &["-S", SUBNET_CHAIN]].concat();
    let Some(rules) = run_iptables(&list).await else {
        tracing::warn!(?subnets, "failed to read firewall rules; tasks may reach the cloud's metadata");
        return;
    };
    for rule in subnets.iter().flat_map(|subnet| missing_subnet_rules(&rules, subnet)) {
        let words: Vec<&str> = rule.iter().map(String::as_str).collect();
        if run_iptables(&words).await.is_none() {
            tracing::warn!(rule = rule.join(" "), "failed to change firewall rule");
        }
    }
    if std::fs::read_to_string(BRIDGE_FILTER_FILE).ok().as_deref().map(str::trim) != Some("1") {
        tracing::warn!(
            "tasks on the bridge may reach each other: the kernel passes no packets of bridges to the firewall; load \
             the module `br_netfilter`"
        );
    }
}

/// Returns the rules to add: nothing on the subnet reaches the metadata addresses or another container there. Packets
/// to the host itself, such as those to its name service, do not pass this chain.
fn missing_subnet_rules(rules: &str, subnet: &str) -> Vec<Vec<String>> {
    let metadata = METADATA_ADDRESSES.iter().map(|address| format!("{address}/32"));
    let targets = metadata.chain([subnet.to_owned()]);
    let missing =
        targets.filter(|target| !rules.lines().any(|line| line.ends_with(&subnet_match(subnet, target))));
    missing
        .map(|target| {
            let rule =
                format!("{} -I {SUBNET_CHAIN} {}", SUBNET_TABLE.join(" "), subnet_match(subnet, &target));
            rule.split(' ').map(str::to_owned).collect()
        })
        .collect()
}

fn subnet_match(subnet: &str, target: &str) -> String {
    format!("-s {subnet} -d {target} -j DROP")
}

fn drop_rule(action: &str, bridge: &str, address: &str) -> Vec<String> {
    [action, FIREWALL_CHAIN, "-d", address, "-i", bridge, "-j", "DROP"].map(str::to_owned).to_vec()
}

/// Returns the rules to add to the existing ones.
fn missing_rules(rules: &str, bridge: &str) -> Vec<Vec<String>> {
    let is_there = |address: &&str| {
        let rule = format!("-d {address}/32 -i {bridge} -j DROP");
        rules.lines().any(|line| line.ends_with(&rule))
    };
    METADATA_ADDRESSES
        .iter()
        .filter(|address| !is_there(address))
        .map(|address| drop_rule("-I", bridge, address))
        .collect()
}

/// Returns this module's rules for bridges that no longer exist.
fn stale_rules(rules: &str, exists: &dyn Fn(&str) -> bool) -> Vec<Vec<String>> {
    let gone = |line: &str| {
        let rest = line.strip_prefix(&format!("-A {FIREWALL_CHAIN} -d "))?.strip_suffix(" -j DROP")?;
        let (address, bridge) = rest.split_once("/32 -i ")?;
        let is_ours = METADATA_ADDRESSES.contains(&address) && bridge.starts_with("br-");
        (is_ours && !exists(bridge)).then(|| drop_rule("-D", bridge, address))
    };
    rules.lines().filter_map(gone).collect()
}

/// Returns the output of `iptables` if it succeeded.
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
    fn only_missing_firewall_rules_are_added() {
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
    fn a_podman_subnet_reaches_neither_metadata_nor_itself() {
        let there = "-P FORWARD ACCEPT\n-A FORWARD -s 10.89.0.0/24 -d 169.254.170.2/32 -j DROP\n\
                     -A FORWARD -s 10.89.1.0/24 -d 10.89.1.0/24 -j DROP\n";
        let lines = |subnet| -> Vec<String> {
            missing_subnet_rules(there, subnet).iter().map(|rule| rule.join(" ")).collect()
        };
        assert_eq!(
            lines("10.89.0.0/24"),
            [
                "-t mangle -I FORWARD -s 10.89.0.0/24 -d 169.254.169.254/32 -j DROP",
                "-t mangle -I FORWARD -s 10.89.0.0/24 -d 100.100.100.200/32 -j DROP",
                "-t mangle -I FORWARD -s 10.89.0.0/24 -d 10.89.0.0/24 -j DROP",
            ]
        );
        assert_eq!(lines("10.89.1.0/24").len(), METADATA_ADDRESSES.len());
    }

    #[test]
    fn only_firewall_rules_of_removed_bridges_are_deleted() {
        let taken = stale_rules(RULES, &|bridge| bridge == "br-aaaaaaaaaaaa");
        let lines: Vec<String> = taken.iter().map(|rule| rule.join(" ")).collect();
        assert_eq!(lines, ["-D DOCKER-USER -d 169.254.169.254 -i br-bbbbbbbbbbbb -j DROP"]);
    }
}
