//! Rented machines: one way to enrol the machines of every backend that creates whole machines.
//!
//! A provider creates a machine that runs the script of [`user_data`] at its first start: it lets the server log in with
//! a key of this one instance. From then on the machine is set up as an SSH host is, over the same connections. The
//! provider reports the machine's host key if it can read it over its own authenticated API; otherwise the key is pinned
//! at the first connection.

pub mod user_data;

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::{Instant, sleep};
use windlass_model::{
    id::InstanceId,
    plan::offers::{HostSpec, Offer},
};
use windlass_tunnel::{HostKey, HostKeyPin, SshDestination};

use crate::{
    Backend, BackendError, BackendFinding, BackendFuture, BackendInstance, DeleteProgress, HardwareInfo,
    InstanceRequest, InstanceSource, InstanceState,
    remote::{RemoteBackend, RemoteHost, RemoteState},
    volumes::VolumeBackend,
};

/// Account that the server uses on the machines.
pub const USER: &str = "windlass";
/// Time for which one call waits for a machine that starts, so that it is used as soon as it is ready.
const START_WAIT: Duration = Duration::from_secs(20);
const START_POLL: Duration = Duration::from_millis(150);

/// Request for a machine.
#[derive(Debug)]
pub struct MachineRequest<'a> {
    pub order: &'a InstanceRequest,
    pub offer: &'a Offer,
    /// Script that the machine runs as root at its first start. Contains no secret.
    pub user_data: String,
}

/// SSH address of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineAddress {
    pub host: String,
    pub port: u16,
    /// Host key as one line, if the provider can read it; it is then the only accepted one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_key: Option<String>,
    /// Address for other machines of the same network; `None`: `host`, if it is an address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub internal_ip: Option<String>,
}

/// State of a machine, as its provider reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineState {
    /// The provider has no such machine. A new one may still appear.
    Unknown,
    /// It exists, and its address is not known yet.
    Starting { message: String },
    /// It has an address. Its SSH server may not respond yet.
    Running(MachineAddress),
    /// It existed and has ended.
    Gone { message: String },
}

/// API that creates machines. Every call is idempotent; the instance's id is the key.
pub trait MachineProvider: Send + Sync + 'static {
    fn name(&self) -> &'static str;

    fn offers(&self) -> BackendFuture<'_, Vec<Offer>>;

    /// Creates the machine, or finds the one that was created for this instance; returns the provider's id.
    fn create<'a>(&'a self, request: &'a MachineRequest<'a>) -> BackendFuture<'a, String>;

    /// Returns the present state of the machine. `machine` has the id that [`Self::create`] returned.
    fn find<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, MachineState>;

    /// Deletes the machine. `id` is what [`Self::create`] returned; `None` if that was never stored.
    fn delete<'a>(
        &'a self,
        order: &'a InstanceRequest,
        id: Option<&'a str>,
    ) -> BackendFuture<'a, DeleteProgress>;

    /// Checks the settings, as [`Backend::check`] does.
    fn check(&self) -> BoxFuture<'_, Vec<BackendFinding>>;

    fn volumes(&self) -> Option<&dyn VolumeBackend> {
        None
    }
}

/// Part of [`BackendInstance::memo`] of a rented machine, next to [`RemoteState`].
#[derive(Debug, Default, Serialize, Deserialize)]
struct MachineMemo {
    #[serde(flatten)]
    remote: RemoteState,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    address: Option<MachineAddress>,
    /// Region of its offer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    region: Option<String>,
}

/// Returns the region of a rented machine; `None` for an instance of another kind.
pub fn region_of(machine: &BackendInstance) -> Option<String> {
    serde_json::from_value::<MachineMemo>(machine.memo.clone()).ok()?.region
}

/// Returns the SSH address of a rented machine; `None` for an instance of another kind, or before it is known.
pub fn address_of(machine: &BackendInstance) -> Option<MachineAddress> {
    serde_json::from_value::<MachineMemo>(machine.memo.clone()).ok()?.address
}

/// Backend that rents machines from a provider.
pub struct MachineBackend<P> {
    provider: P,
    remote: Arc<RemoteBackend>,
}

impl<P: MachineProvider> MachineBackend<P> {
    /// `remote` sets up the machines: it shares its connections with the calls to agents.
    pub fn new(provider: P, remote: Arc<RemoteBackend>) -> Self {
        Self { provider, remote }
    }

    async fn created(&self, order: &InstanceRequest) -> Result<BackendInstance, BackendError> {
        let offer = offer_of(order)?;
        let key = login_key(order)?.public_line();
        let user_data = user_data::login_script(USER, &key);
        let id = self.provider.create(&MachineRequest { order, offer, user_data }).await?;
        Ok(BackendInstance {
            id,
            reach: None,
            hostname: None,
            internal_ip: None,
            has: None,
            agent_version: None,
            memo: starting_memo("the machine is starting", &offer.region),
        })
    }

    async fn found(
        &self,
        order: &InstanceRequest,
        machine: &BackendInstance,
    ) -> Result<InstanceState, BackendError> {
        let until = Instant::now() + START_WAIT;
        loop {
            let message = match self.provider.find(order, machine).await? {
                MachineState::Unknown => return Ok(InstanceState::Unknown),
                MachineState::Gone { message } => return Ok(InstanceState::Gone { message }),
                MachineState::Starting { message } => message,
                MachineState::Running(address) if machine.reach.is_some() => {
                    return self.reached(order, machine, &address).await;
                }
                MachineState::Running(address) => match self.set_up(order, machine, &address).await? {
                    SetupProgress::Done(found) => return Ok(InstanceState::Running(*found)),
                    SetupProgress::Refused(message) => return Ok(InstanceState::Gone { message }),
                    SetupProgress::NotYet(message) => message,
                },
            };
            if Instant::now() >= until {
                let memo = starting_memo(&message, &offer_of(order)?.region);
                return Ok(InstanceState::Starting(BackendInstance { memo, ..machine.clone() }));
            }
            sleep(START_POLL).await;
        }
    }

    /// Sets up a machine for the first time, as soon as it accepts the server's key.
    async fn set_up(
        &self,
        order: &InstanceRequest,
        machine: &BackendInstance,
        address: &MachineAddress,
    ) -> Result<SetupProgress, BackendError> {
        let host = host_order(order, address)?;
        // The first start may not have run the script yet, or may be replacing the host key of the image.
        if let Err(error) = self.remote.log_in(&host).await {
            return Ok(SetupProgress::NotYet(format!("waiting for its SSH server: {error}")));
        }
        match self.remote.create(&host).await {
            Ok(found) => {
                let found = with_address(machine, found, address, offer_of(order)?)?;
                Ok(SetupProgress::Done(Box::new(found)))
            }
            // No later attempt would succeed on this machine.
            Err(error @ BackendError::Refused { .. }) => {
                Ok(SetupProgress::Refused(format!("the machine cannot be used: {error}")))
            }
            Err(
                error @ (BackendError::Unavailable { .. }
                | BackendError::NoCapacity { .. }
                | BackendError::HostKeyChanged { .. }),
            ) => Ok(SetupProgress::NotYet(error.to_string())),
        }
    }

    /// Returns the state of a machine that was set up before; restarts or updates its agent if necessary.
    async fn reached(
        &self,
        order: &InstanceRequest,
        machine: &BackendInstance,
        address: &MachineAddress,
    ) -> Result<InstanceState, BackendError> {
        let address = with_known_key(machine, address);
        let host = host_order(order, &address)?;
        match self.remote.find(&host, machine).await? {
            InstanceState::Running(found) => {
                let found = with_address(machine, found, &address, offer_of(order)?)?;
                Ok(InstanceState::Running(found))
            }
            other @ (InstanceState::Starting(_) | InstanceState::Gone { .. } | InstanceState::Unknown) => {
                Ok(other)
            }
        }
    }
}

/// Private state of a machine that is not set up yet.
fn starting_memo(message: &str, region: &str) -> serde_json::Value {
    json!({ "said": message, "region": region })
}

enum SetupProgress {
    Done(Box<BackendInstance>),
    NotYet(String),
    Refused(String),
}

fn offer_of(order: &InstanceRequest) -> Result<&Offer, BackendError> {
    match &order.want {
        InstanceSource::Offer(offer) => Ok(offer),
        InstanceSource::Host(_) => Err(BackendError::Refused {
            what: "create a machine",
            message: "the request is for an SSH host".to_owned(),
        }),
    }
}

fn login_key(order: &InstanceRequest) -> Result<&windlass_tunnel::LoginKey, BackendError> {
    order.login.as_ref().ok_or_else(|| BackendError::Refused {
        what: "create a machine",
        message: "the request has no key for logging in".to_owned(),
    })
}

/// Returns the request for the same instance as an SSH host at this address.
fn host_order(order: &InstanceRequest, address: &MachineAddress) -> Result<InstanceRequest, BackendError> {
    let pin = match &address.host_key {
        Some(line) => HostKeyPin::Known(HostKey::parse(line).map_err(|error| BackendError::Unavailable {
            what: "read the host key of the machine",
            message: error.to_string(),
        })?),
        None => HostKeyPin::FirstUse,
    };
    let target = SshDestination {
        host: address.host.clone(),
        port: address.port,
        user: USER.to_owned(),
        keys: vec![login_key(order)?.clone()],
        pin,
        via: None,
    };
    let internal_ip = address.internal_ip.as_deref().unwrap_or(&address.host).parse().ok();
    let want = InstanceSource::Host(Box::new(RemoteHost { target, internal_ip, network: None }));
    Ok(InstanceRequest { want, ..order.clone() })
}

/// Adds the key of earlier connections, where the provider reports none: it is then the only accepted one.
fn with_known_key(machine: &BackendInstance, address: &MachineAddress) -> MachineAddress {
    let known = address_of(machine).filter(|known| known.host == address.host);
    let host_key = address.host_key.clone().or_else(|| known.and_then(|known| known.host_key));
    MachineAddress { host_key, ..address.clone() }
}

/// Returns what the SSH part found, as the machine of its provider.
fn with_address(
    machine: &BackendInstance,
    found: BackendInstance,
    address: &MachineAddress,
    offer: &Offer,
) -> Result<BackendInstance, BackendError> {
    // At the first connection the key that was presented becomes the only accepted one.
    let remote = RemoteState::of(&found);
    let name = SshDestination::known_hosts_name_for(&address.host, address.port);
    let host_key = address.host_key.clone().or_else(|| remote.host_keys.get(&name).cloned());
    let address = Some(MachineAddress { host_key, ..address.clone() });
    let memo = serde_json::to_value(MachineMemo { remote, address, region: Some(offer.region.clone()) })
        .map_err(|error| BackendError::Unavailable {
            what: "store the machine's address",
            message: error.to_string(),
        })?;
    let has = found.has.map(|has| within_offer(has, &offer.host));
    Ok(BackendInstance { id: machine.id.clone(), has, memo, ..found })
}

/// Limits the reported hardware to the offer: a system container may report that of its host.
fn within_offer(has: HardwareInfo, offer: &HostSpec) -> HardwareInfo {
    let disk_mib = if offer.disk_mib > 0 { has.disk_mib.min(offer.disk_mib) } else { has.disk_mib };
    HardwareInfo {
        cpus: has.cpus.min(offer.cpus),
        memory_mib: has.memory_mib.min(offer.memory_mib),
        disk_mib,
        ..has
    }
}

impl<P: MachineProvider> Backend for MachineBackend<P> {
    fn name(&self) -> &'static str {
        self.provider.name()
    }

    fn offers(&self) -> BackendFuture<'_, Vec<Offer>> {
        self.provider.offers()
    }

    fn create<'a>(&'a self, order: &'a InstanceRequest) -> BackendFuture<'a, BackendInstance> {
        Box::pin(self.created(order))
    }

    fn find<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, InstanceState> {
        Box::pin(self.found(order, machine))
    }

    fn delete<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: Option<&'a BackendInstance>,
    ) -> BackendFuture<'a, DeleteProgress> {
        Box::pin(async move {
            self.remote.forget(order.instance);
            self.provider.delete(order, machine.map(|machine| machine.id.as_str())).await
        })
    }

    fn is_outdated<'a>(&'a self, machine: &'a BackendInstance) -> BoxFuture<'a, bool> {
        self.remote.is_outdated(machine)
    }

    fn progress(&self, instance: InstanceId) -> Option<String> {
        self.remote.progress(instance)
    }

    fn check(&self) -> BoxFuture<'_, Vec<BackendFinding>> {
        self.provider.check()
    }

    fn volumes(&self) -> Option<&dyn VolumeBackend> {
        self.provider.volumes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(memo: serde_json::Value) -> BackendInstance {
        BackendInstance {
            id: "m".into(),
            reach: None,
            hostname: None,
            internal_ip: None,
            has: None,
            agent_version: None,
            memo,
        }
    }

    #[test]
    fn only_rented_machines_have_an_address_in_their_state() {
        let address = MachineAddress {
            host: "10.0.0.7".into(),
            port: 22,
            host_key: Some("ssh-ed25519 AAAA".into()),
            internal_ip: None,
        };
        let remote = RemoteState { agent_sha256: "ab".into(), ..RemoteState::default() };
        let memo = MachineMemo {
            remote: remote.clone(),
            address: Some(address.clone()),
            region: Some("lab".into()),
        };
        let stored = instance(serde_json::to_value(memo).unwrap());
        assert_eq!((address_of(&stored), region_of(&stored)), (Some(address), Some("lab".to_owned())));
        assert_eq!(RemoteState::of(&stored), remote, "the SSH part reads its own state beside it");
        assert_eq!(address_of(&instance(json!({ "said": "the machine is starting" }))), None);
        assert_eq!(address_of(&instance(serde_json::to_value(remote).unwrap())), None);
    }

    #[test]
    fn the_key_of_earlier_connections_is_kept_where_the_provider_reports_none() {
        let at = |host: &str, key: Option<&str>| MachineAddress {
            host: host.to_owned(),
            port: 22,
            host_key: key.map(str::to_owned),
            internal_ip: None,
        };
        let memo = MachineMemo { address: Some(at("10.0.0.7", Some("old"))), ..MachineMemo::default() };
        let stored = instance(serde_json::to_value(memo).unwrap());
        let key = |address| with_known_key(&stored, &address).host_key;
        assert_eq!(key(at("10.0.0.7", None)).as_deref(), Some("old"));
        assert_eq!(key(at("10.0.0.7", Some("new"))).as_deref(), Some("new"), "the provider knows better");
        assert_eq!(key(at("10.0.0.8", None)), None, "another address");
    }

    #[test]
    fn reported_hardware_never_exceeds_the_offer() {
        let has = HardwareInfo {
            cpus: 64,
            arch: None,
            memory_mib: 500_000,
            disk_mib: 900,
            gpus: Vec::new(),
            runtime: String::new(),
            engine_away: None,
            processes: None,
            addresses: Vec::new(),
        };
        let mut offer = HostSpec {
            cpus: 2,
            arch: None,
            memory_mib: 4096,
            disk_mib: 0,
            gpus: Vec::new(),
            spot: false,
            runtimes: None,
        };
        let limited = within_offer(has.clone(), &offer);
        assert_eq!((limited.cpus, limited.memory_mib, limited.disk_mib), (2, 4096, 900));
        offer.disk_mib = 100;
        assert_eq!(within_offer(has, &offer).disk_mib, 100);
    }
}
