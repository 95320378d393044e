//! Network of containers with an image, which exists once per engine.

use std::net::IpAddr;

use super::{
    AttemptError,
    image::{Engine, PODMAN, run_engine},
};
use crate::shim::docker::{NETWORK, create_command, shield, shield_subnets};

/// Network of containers that are not on the host's.
pub(super) struct ContainerNetwork {
    /// Name or id by which the engine finds it.
    pub(super) name: String,
    /// Address by which containers reach this host.
    pub(super) gateway: Option<IpAddr>,
}

/// Creates the network of containers unless it exists. Blocks the cloud's metadata addresses before anything is started
/// on it.
pub(super) async fn ensure(engine: Engine) -> Result<Option<ContainerNetwork>, AttemptError> {
    let Engine::Docker(program) = engine else { return Ok(None) };
    let failed = |message: String| {
        AttemptError::Host(std::io::Error::other(format!("failed to create network {NETWORK}: {message}")))
    };
    let is_podman = program == PODMAN;
    let name = if is_podman { podman_network().await } else { docker_network(program).await };
    let name = name.map_err(failed)?;
    let format = if is_podman {
        "{{.ID}} {{range .Subnets}}{{.Gateway}} {{.Subnet}} {{end}}"
    } else {
        "{{.Id}} {{range .IPAM.Config}}{{.Gateway}} {{end}}"
    };
    let inspect = ["network", "inspect", "--format", format, &name];
    let found = run_engine(program, &inspect).await.map_err(failed)?;
    let mut parts = found.split_whitespace();
    let id = parts.next().unwrap_or_default();
    let rest: Vec<&str> = parts.collect();
    if is_podman {
        let subnets = rest.iter().filter(|part| part.contains('/')).map(|subnet| (*subnet).to_owned());
        shield_subnets(&subnets.collect::<Vec<_>>()).await;
    } else {
        shield(id).await;
    }
    let gateway = rest.iter().find_map(|gateway| gateway.parse().ok());
    Ok(Some(ContainerNetwork { name, gateway }))
}

/// Network of Podman by its name, which is unique.
async fn podman_network() -> Result<String, String> {
    let inspect = ["network", "inspect", "--format", "{{.ID}}", NETWORK];
    if run_engine(PODMAN, &inspect).await.is_err() {
        let words = create_command(true);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let made = run_engine(PODMAN, &words).await;
        // Another process may have created it at the same time.
        run_engine(PODMAN, &inspect).await.map_err(|message| made.err().unwrap_or(message))?;
    }
    Ok(NETWORK.to_owned())
}

/// Network of Docker by its id, because executors that act at once create several networks of one name, and Docker then
/// rejects the name as ambiguous. All executors use the oldest one, so any of them may remove the others.
async fn docker_network(program: &str) -> Result<String, String> {
    let filter = format!("name=^{NETWORK}$");
    let list = ["network", "ls", "--no-trunc", "--filter", &filter, "--format", "{{.CreatedAt}}\t{{.ID}}"];
    let mut networks = networks_by_age(&run_engine(program, &list).await?);
    if networks.is_empty() {
        let words = create_command(false);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let made = run_engine(program, &words).await;
        networks = networks_by_age(&run_engine(program, &list).await?);
        if networks.is_empty() {
            return Err(made.err().unwrap_or_else(|| "it was removed again".to_owned()));
        }
    }
    let oldest = networks.remove(0);
    for duplicate in networks {
        // Fails if another executor has removed it already.
        let _ = run_engine(program, &["network", "rm", &duplicate]).await;
    }
    Ok(oldest)
}

/// Ids in lines of a creation time and an id, the oldest first.
fn networks_by_age(list: &str) -> Vec<String> {
    let mut all: Vec<(&str, &str)> = list.lines().filter_map(|line| line.trim().split_once('\t')).collect();
    all.sort_unstable();
    all.into_iter().map(|(_, id)| id.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::networks_by_age;

    #[test]
    fn of_networks_with_one_name_the_oldest_is_used() {
        let list = "2026-11-19 05:18:26.12 +0000 UTC\tccc\n2026-11-19 05:18:26.1 +0000 UTC\tbbb\n\
                    2026-11-19 05:18:26 +0000 UTC\taaa\n";
        assert_eq!(networks_by_age(list), ["aaa", "bbb", "ccc"]);
        assert_eq!(networks_by_age(""), Vec::<String>::new());
    }
}
