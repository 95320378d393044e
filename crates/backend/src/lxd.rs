//! LXD and Incus: system containers or virtual machines of a server with their API.
//!
//! The name of a machine follows from the instance's id, so that a repeated creation finds the first one. Its
//! configuration names the instance (`user.windlass-instance`), which shows who owns it in the tools of LXD as well.

mod capacity;
mod check;
mod client;
mod settings;
mod volumes;

use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::time::{Instant, sleep};
use windlass_model::{backend_kind::BackendType, id::InstanceId, plan::offers::Offer};

use self::client::{ApiError, Client};
pub use self::settings::{InstanceType, Kind, Settings, SettingsError};
use crate::{
    BackendError, BackendFinding, BackendFuture, BackendInstance, DeleteProgress, InstanceRequest,
    machines::{MachineAddress, MachineProvider, MachineRequest, MachineState},
    volumes::VolumeBackend,
};

pub const NAME: &str = BackendType::Lxd.as_str();
const SSH_PORT: u16 = 22;
/// Key of a machine's configuration with the id of its instance.
pub const INSTANCE_KEY: &str = "user.windlass-instance";
const NAME_KEY: &str = "user.windlass-name";
/// Public key of the server that created the machine.
const SERVER_KEY: &str = "user.windlass-server";
const TAG_PREFIX: &str = "user.windlass-tag.";
/// Host key of a machine, in the order in which SSH clients prefer them.
const HOST_KEY_FILE: &str = "/etc/ssh/ssh_host_ed25519_key.pub";
/// Time for which a creation waits for another one of the same machine.
const BUSY_MAX: Duration = Duration::from_secs(120);
const BUSY_POLL: Duration = Duration::from_millis(200);

/// Provider of machines by LXD or Incus.
#[derive(Debug)]
pub struct LxdProvider {
    settings: Settings,
    client: Client,
}

/// Instance as LXD shows it.
#[derive(Debug, Deserialize)]
struct ShownInstance {
    name: String,
    status: String,
    #[serde(default)]
    config: std::collections::BTreeMap<String, String>,
    #[serde(default)]
    devices: Map<String, Value>,
}

impl LxdProvider {
    /// Connects to nothing yet; reads the certificates.
    pub fn new(settings: Settings) -> Result<Self, SettingsError> {
        let client = Client::new(&settings)?;
        Ok(Self { settings, client })
    }

    /// Names and instance ids of the machines that windlass created there, of this and of other servers.
    pub async fn list(&self) -> Result<Vec<(String, String)>, BackendError> {
        let shown = self.instances().await?;
        let owned = shown.into_iter().filter_map(|mut shown| {
            let id = shown.config.remove(INSTANCE_KEY)?;
            Some((shown.name, id))
        });
        Ok(owned.collect())
    }

    async fn instances(&self) -> Result<Vec<ShownInstance>, BackendError> {
        let shown = self.client.get("/1.0/instances?recursion=1").await;
        parse("list the instances", shown.map_err(|error| error.to_backend("list the instances"))?)
    }

    async fn instance(&self, name: &str) -> Result<Option<ShownInstance>, BackendError> {
        match self.client.get(&format!("/1.0/instances/{name}")).await {
            Ok(shown) => parse("find the machine", shown).map(Some),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error.to_backend("find the machine")),
        }
    }

    async fn created(&self, request: &MachineRequest<'_>) -> Result<String, BackendError> {
        let name = machine_name(request.order.instance);
        match self.instance(&name).await? {
            Some(found) => self.check_owner(request, &found)?,
            None => {
                let host = self.capacity().await?;
                host.check(&request.offer.host).map_err(|message| BackendError::NoCapacity { message })?;
                let made =
                    self.client.change("POST", "/1.0/instances", &self.definition(&name, request)).await;
                match made {
                    Ok(()) => {}
                    // Another request was faster; its machine may not be complete yet, which the start waits for.
                    Err(error) if error.is_conflict() || error.is_busy() => {}
                    Err(error) => return Err(creation_error(&error)),
                }
            }
        }
        self.start(&name).await?;
        Ok(name)
    }

    fn check_owner(&self, request: &MachineRequest<'_>, found: &ShownInstance) -> Result<(), BackendError> {
        if found.config.get(INSTANCE_KEY) == Some(&request.order.instance.to_string()) {
            return Ok(());
        }
        let message = format!("an instance {} exists, and windlass did not create it", found.name);
        Err(BackendError::Refused { what: "create the machine", message })
    }

    /// Request body that creates a machine.
    fn definition(&self, name: &str, request: &MachineRequest<'_>) -> Value {
        let (order, host, settings) = (request.order, &request.offer.host, &self.settings);
        let mut config: Map<String, Value> =
            settings.config.iter().map(|(key, value)| (key.clone(), value.0.clone().into())).collect();
        for (key, value) in &order.tags {
            config.insert(format!("{TAG_PREFIX}{key}"), value.clone().into());
        }
        config.insert("limits.cpu".into(), host.cpus.to_string().into());
        config.insert("limits.memory".into(), format!("{}MiB", host.memory_mib).into());
        config.insert("user.user-data".into(), request.user_data.clone().into());
        config.insert(INSTANCE_KEY.into(), order.instance.to_string().into());
        config.insert(NAME_KEY.into(), order.name.clone().into());
        config.insert(SERVER_KEY.into(), order.enrolment.server_key.clone().into());
        let mut devices = Map::new();
        if host.disk_mib > 0 {
            let size = format!("{}MiB", host.disk_mib);
            let root = json!({ "type": "disk", "path": "/", "pool": settings.storage_pool, "size": size });
            devices.insert("root".into(), root);
        }
        json!({
            "name": name,
            "type": settings.kind.as_str(),
            "source": { "type": "image", "alias": settings.image },
            "profiles": settings.profiles,
            "config": config,
            "devices": devices,
        })
    }

    /// Starts the machine unless it runs. Waits while another request creates or starts it.
    async fn start(&self, name: &str) -> Result<(), BackendError> {
        let until = Instant::now() + BUSY_MAX;
        let action = json!({ "action": "start", "timeout": 30 });
        loop {
            let error =
                match self.client.change("PUT", &format!("/1.0/instances/{name}/state"), &action).await {
                    Ok(()) => return Ok(()),
                    Err(error) => error,
                };
            let state = self.instance(name).await?;
            match state.as_ref().map(|shown| shown.status.as_str()) {
                Some("Running") => return Ok(()),
                Some(_) if error.is_transport() || error.is_busy() => {}
                // A concurrent creation that failed removes its half.
                None => {
                    return Err(BackendError::Unavailable {
                        what: "start the machine",
                        message: "it disappeared while it was created".to_owned(),
                    });
                }
                Some(_) => return Err(error.to_backend("start the machine")),
            }
            if Instant::now() >= until {
                return Err(error.to_backend("start the machine"));
            }
            sleep(BUSY_POLL).await;
        }
    }

    async fn state(&self, instance: InstanceId) -> Result<MachineState, BackendError> {
        let name = machine_name(instance);
        let starting = |message: &str| Ok(MachineState::Starting { message: message.to_owned() });
        let Some(shown) = self.instance(&name).await? else {
            return Ok(MachineState::Gone { message: format!("{name} no longer exists in LXD") });
        };
        match shown.status.as_str() {
            "Running" => {}
            // Stopped by hand, or by a restart of the host.
            "Stopped" => {
                self.start(&name).await?;
                return starting("starting it again");
            }
            "Error" => {
                return Ok(MachineState::Gone { message: format!("LXD reports an error of {name}") });
            }
            other => return starting(&format!("its status in LXD is {other}")),
        }
        let state = self.client.get(&format!("/1.0/instances/{name}/state")).await;
        let state = state.map_err(|error| error.to_backend("read the state of the machine"))?;
        let Some(host) = address(&state) else { return starting("waiting for its address") };
        let path = format!("/1.0/instances/{name}/files?path={}", client::percent_encode(HOST_KEY_FILE));
        match self.client.read(&path).await {
            Ok(text) if text.starts_with("ssh-") => Ok(MachineState::Running(MachineAddress {
                host,
                port: SSH_PORT,
                host_key: Some(host_key_line(&text)),
                internal_ip: None,
            })),
            Ok(_) => starting("waiting for its SSH host key"),
            // Virtual machines have no files before their agent runs.
            Err(error) if error.is_answer() => starting("waiting for its SSH host key"),
            Err(error) => Err(error.to_backend("read the host key of the machine")),
        }
    }

    async fn deleted(&self, instance: InstanceId) -> Result<DeleteProgress, BackendError> {
        let name = machine_name(instance);
        let Some(shown) = self.instance(&name).await? else { return Ok(DeleteProgress::Gone) };
        if shown.config.get(INSTANCE_KEY) != Some(&instance.to_string()) {
            return Ok(DeleteProgress::Gone);
        }
        if shown.status != "Stopped" {
            let stop = json!({ "action": "stop", "force": true, "timeout": 30 });
            match self.client.change("PUT", &format!("/1.0/instances/{name}/state"), &stop).await {
                Ok(()) => {}
                Err(error) if error.is_not_found() => return Ok(DeleteProgress::Gone),
                // It stopped at the same moment, or another request is stopping it: the deletion decides.
                Err(error) if error.is_answer() => {}
                Err(error) => return Err(error.to_backend("stop the machine")),
            }
        }
        match self.client.change("DELETE", &format!("/1.0/instances/{name}"), &Value::Null).await {
            Ok(()) => Ok(DeleteProgress::Gone),
            Err(error) if error.is_not_found() => Ok(DeleteProgress::Gone),
            Err(error) if error.is_busy() => Ok(DeleteProgress::InProgress),
            Err(error) => Err(error.to_backend("delete the machine")),
        }
    }
}

/// Name of an instance's machine. LXD permits letters, digits and `-`, at most 63.
pub fn machine_name(instance: InstanceId) -> String {
    format!("windlass-{}", instance.0.simple())
}

fn parse<T: serde::de::DeserializeOwned>(what: &'static str, shown: Value) -> Result<T, BackendError> {
    serde_json::from_value(shown).map_err(|error| BackendError::Unavailable {
        what,
        message: format!("unexpected response of LXD: {error}"),
    })
}

/// Errors of a creation that another offer or host may not have are a lack of capacity.
fn creation_error(error: &ApiError) -> BackendError {
    let message = error.to_string();
    let lower = message.to_lowercase();
    let full = ["no space left", "reached maximum", "exceeds", "not enough", "quota"];
    if error.is_answer() && full.iter().any(|word| lower.contains(word)) {
        return BackendError::NoCapacity { message };
    }
    error.to_backend("create the machine")
}

/// The address that other machines use: of an interface that LXD connects, not of one that the machine made itself,
/// such as the bridge of a container engine.
fn address(state: &Value) -> Option<String> {
    let interfaces = state["network"].as_object()?;
    let connected = interfaces.iter().filter(|(name, interface)| {
        *name != "lo" && interface["host_name"].as_str().is_some_and(|name| !name.is_empty())
    });
    let mut addresses: Vec<(bool, &str)> = connected
        .flat_map(|(_, interface)| interface["addresses"].as_array().into_iter().flatten())
        .filter(|address| address["scope"] == "global")
        .filter_map(|address| Some((address["family"] != "inet", address["address"].as_str()?)))
        .collect();
    addresses.sort_unstable();
    addresses.first().map(|(_, address)| (*address).to_owned())
}

/// The key without its comment.
fn host_key_line(text: &str) -> String {
    text.split_whitespace().take(2).collect::<Vec<_>>().join(" ")
}

impl MachineProvider for LxdProvider {
    fn name(&self) -> &'static str {
        NAME
    }

    fn offers(&self) -> BackendFuture<'_, Vec<Offer>> {
        Box::pin(async move { Ok(self.capacity().await?.offers(&self.settings)) })
    }

    fn create<'a>(&'a self, request: &'a MachineRequest<'a>) -> BackendFuture<'a, String> {
        Box::pin(self.created(request))
    }

    fn find<'a>(
        &'a self,
        order: &'a InstanceRequest,
        _machine: &'a BackendInstance,
    ) -> BackendFuture<'a, MachineState> {
        Box::pin(self.state(order.instance))
    }

    fn delete<'a>(
        &'a self,
        order: &'a InstanceRequest,
        _id: Option<&'a str>,
    ) -> BackendFuture<'a, DeleteProgress> {
        Box::pin(self.deleted(order.instance))
    }

    fn check(&self) -> BoxFuture<'_, Vec<BackendFinding>> {
        Box::pin(check::findings(&self.settings, &self.client))
    }

    fn volumes(&self) -> Option<&dyn VolumeBackend> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_of_an_interface_that_lxd_connects_and_ipv4_is_preferred() {
        let global =
            |family: &str, address: &str| json!({"family": family, "address": address, "scope": "global"});
        let link = json!({"family": "inet6", "address": "fe80::1", "scope": "link"});
        let state = json!({"network": {
            "lo": {"host_name": "", "addresses": [{"family": "inet", "address": "127.0.0.1", "scope": "local"}]},
            "docker0": {"host_name": "", "addresses": [global("inet", "172.17.0.1")]},
            "eth0": {"host_name": "veth1", "addresses": [link.clone(), global("inet6", "fd00::7"), global("inet", "10.7.0.2")]},
        }});
        assert_eq!(address(&state).as_deref(), Some("10.7.0.2"));
        let young = json!({"network": {"eth0": {"host_name": "veth1", "addresses": [link]}}});
        assert_eq!(address(&young), None);
        assert_eq!(address(&json!({"network": null})), None);
    }

    #[test]
    fn the_comment_of_a_host_key_is_dropped() {
        assert_eq!(host_key_line("ssh-ed25519 AAAA root@image\n"), "ssh-ed25519 AAAA");
    }
}
