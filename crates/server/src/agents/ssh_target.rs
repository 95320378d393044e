//! SSH access to instances: to the hosts of an SSH fleet with the settings of the fleet and of the host, to rented
//! machines with the address that their backend reported; and the pinned keys of the host and its jump hosts.

use std::{collections::BTreeMap, net::IpAddr};

use windlass_backend::{
    BackendInstance,
    machines::{self, MachineAddress},
    remote::RemoteHost,
};
use windlass_gateway::gateway_config::{SshLogin, SshLoginError};
use windlass_model::{
    config::fleet::{ProxyJump, SshConfig, SshKey},
    event::Entity,
    id::InstanceId,
};
use windlass_tunnel::{HostKey, HostKeyEntry, KeyError as SshKeyError};

use super::enrolment::{self, EnrolmentError};
use crate::{
    db::{
        Db, DbError, Unit, WriteOutcome, agents as rows,
        documents::{INSTANCE_HOST_KEY, INSTANCE_PROVISIONING, INSTANCE_SSH_SEALED},
    },
    encryption::{AssociatedData, KeyError, Keyring},
    events::{EventSubject, note},
};

const SSH_PORT: u16 = 22;
/// Several replicas may connect to a new host at once: each retries after another was faster.
const PIN_ATTEMPTS_MAX: usize = 8;
/// Maximum number of names with keys per instance: its own and those of its jump hosts.
const PINS_MAX: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum SshTargetError {
    #[error(transparent)]
    Db(#[from] DbError),
    #[error(transparent)]
    Keys(#[from] KeyError),
    #[error("instance {instance} does not exist")]
    NoInstance { instance: InstanceId },
    #[error("instance {instance} is not reached over SSH")]
    NotSsh { instance: InstanceId },
    #[error("failed to derive the key for logging in")]
    LoginKey(#[source] EnrolmentError),
    #[error("cannot log in to {host}: the configuration has no {what} for it")]
    Missing { host: String, what: &'static str },
    #[error(transparent)]
    Login(#[from] SshLoginError),
    #[error("failed to read the pinned host key of {host}")]
    Pinned {
        host: String,
        #[source]
        source: SshKeyError,
    },
    /// Another replica saw a different key for the same name: one of the two is not the host.
    #[error("host key of {host} changed: expected {expected}, it shows {shown}")]
    Changed { host: String, expected: String, shown: String },
    #[error("cannot pin the host keys of instance {instance}: too many concurrent changes")]
    Contended { instance: InstanceId },
    #[error("cannot pin the host keys of instance {instance}: more than {PINS_MAX} names")]
    TooMany { instance: InstanceId },
}

/// SSH target of a host, with all keys pinned so far.
pub async fn load_target(
    db: &Db,
    keys: &Keyring,
    instance: InstanceId,
) -> Result<RemoteHost, SshTargetError> {
    match load_access(db, keys, instance).await? {
        HostAccess::Configured { settings, pins } => build_target(&settings, &pins, instance),
        HostAccess::Rented(login) => {
            Ok(RemoteHost { target: login.target()?, internal_ip: None, network: None })
        }
    }
}

/// SSH login of a host, for use by another process. Contains a private key.
pub async fn load_login(db: &Db, keys: &Keyring, instance: InstanceId) -> Result<SshLogin, SshTargetError> {
    match load_access(db, keys, instance).await? {
        HostAccess::Configured { settings, pins } => build_login(&settings, &pins, instance),
        HostAccess::Rented(login) => Ok(login),
    }
}

enum HostAccess {
    /// Host of an SSH fleet.
    Configured { settings: Box<SshConfig>, pins: BTreeMap<String, String> },
    /// Machine that a backend created.
    Rented(SshLogin),
}

async fn load_access(db: &Db, keys: &Keyring, instance: InstanceId) -> Result<HostAccess, SshTargetError> {
    let row = rows::ssh_target(db, instance).await?.ok_or(SshTargetError::NoInstance { instance })?;
    let pins = pins(instance, row.host_key.as_deref())?;
    let Some(sealed) = row.ssh_sealed else {
        let machine: Option<BackendInstance> =
            INSTANCE_PROVISIONING.decode_opt(instance, row.provisioning.as_deref())?;
        let address = machine.as_ref().and_then(machines::address_of);
        let address = address.ok_or(SshTargetError::NotSsh { instance })?;
        let key = enrolment::login_key(db, keys, instance).await.map_err(SshTargetError::LoginKey)?;
        return Ok(HostAccess::Rented(machine_login(address, key, &pins)));
    };
    let text = keys.open_sealed(&AssociatedData::row("instances", "ssh_sealed", instance.0), &sealed)?;
    let settings = INSTANCE_SSH_SEALED.decode_bytes(instance, &text)?;
    Ok(HostAccess::Configured { settings, pins })
}

/// The key that the backend reported has precedence over one of an earlier connection: a new machine may have the
/// address of an old one.
fn machine_login(address: MachineAddress, key: String, pins: &BTreeMap<String, String>) -> SshLogin {
    let mut login = SshLogin {
        host: address.host,
        port: address.port,
        user: machines::USER.to_owned(),
        key,
        host_key: address.host_key,
        via: None,
    };
    if login.host_key.is_none() {
        login.host_key = pins.get(&login.known_hosts_name()).cloned();
    }
    login
}

/// Pins keys seen for the first time, and records events about them. A pinned name keeps its key: if the host shows a
/// different one, connecting is an error.
pub async fn pin(db: &Db, instance: InstanceId, seen: &[HostKeyEntry]) -> Result<(), SshTargetError> {
    for _ in 0..PIN_ATTEMPTS_MAX {
        let row = rows::ssh_target(db, instance).await?.ok_or(SshTargetError::NoInstance { instance })?;
        let mut known = pins(instance, row.host_key.as_deref())?;
        let fresh = unpinned(&known, seen)?;
        if fresh.is_empty() {
            return Ok(());
        }
        let about = EventSubject {
            entity: Entity::Instance,
            id: instance.0,
            name: &row.name,
            project: Some(row.project),
        };
        let mut reported = Vec::new();
        for HostKeyEntry { host, key } in &fresh {
            known.insert(host.clone(), key.to_openssh());
            let message = format!("first connection to {host}: pinned its host key {key}");
            reported.extend(note(db, None, &about, "host_key_learned", message)?);
        }
        if known.len() > PINS_MAX {
            return Err(SshTargetError::TooMany { instance });
        }
        let text = serde_json::to_string(&known).unwrap_or_default();
        let change = rows::pin(instance, row.host_key.as_deref(), &text);
        match db.write(Unit::new().and([change]).and(reported)).await? {
            WriteOutcome::Done { .. } => return Ok(()),
            WriteOutcome::Stale { .. } => {}
        }
    }
    Err(SshTargetError::Contended { instance })
}

/// Returns those of `seen` that have no pin yet.
fn unpinned(
    known: &BTreeMap<String, String>,
    seen: &[HostKeyEntry],
) -> Result<Vec<HostKeyEntry>, SshTargetError> {
    let mut fresh = Vec::new();
    for findings in seen {
        let Some(line) = known.get(&findings.host) else {
            fresh.push(findings.clone());
            continue;
        };
        let host = findings.host.clone();
        let expected = HostKey::parse(line).map_err(|source| SshTargetError::Pinned { host, source })?;
        if expected != findings.key {
            return Err(SshTargetError::Changed {
                host: findings.host.clone(),
                expected: expected.to_string(),
                shown: findings.key.to_string(),
            });
        }
    }
    Ok(fresh)
}

fn pins(instance: InstanceId, stored: Option<&str>) -> Result<BTreeMap<String, String>, DbError> {
    Ok(INSTANCE_HOST_KEY.decode_opt(instance, stored)?.unwrap_or_default())
}

/// Builds the target. Settings of the host override those of its fleet.
fn build_target(
    settings: &SshConfig,
    pins: &BTreeMap<String, String>,
    instance: InstanceId,
) -> Result<RemoteHost, SshTargetError> {
    let target = build_login(settings, pins, instance)?.target()?;
    let own = settings.hosts.first().and_then(|host| host.params());
    let internal_ip: Option<IpAddr> =
        own.and_then(|own| own.internal_ip.as_ref()).and_then(|ip| ip.0.parse().ok());
    Ok(RemoteHost {
        target,
        internal_ip,
        network: settings.network.as_ref().map(|network| network.0.clone()),
    })
}

fn build_login(
    settings: &SshConfig,
    pins: &BTreeMap<String, String>,
    instance: InstanceId,
) -> Result<SshLogin, SshTargetError> {
    let host = settings.hosts.first().ok_or(SshTargetError::NotSsh { instance })?;
    let own = host.params();
    let name = host.hostname();
    let user = own.and_then(|own| own.user.as_deref()).or(settings.user.as_deref());
    let port = own.and_then(|own| own.port).or(settings.port);
    let key = own.and_then(|own| own.ssh_key.as_ref()).or(settings.ssh_key.as_ref());
    let jump = own.and_then(|own| own.proxy_jump.as_ref()).or(settings.proxy_jump.as_ref());
    let via = jump.map(|jump| jump_login(jump, pins)).transpose()?;
    let user = user.ok_or_else(|| missing(name, "user"))?;
    let login = login_to(name, port.map(|port| port.0), user, key, pins)?;
    Ok(SshLogin { via: via.map(Box::new), ..login })
}

fn jump_login(jump: &ProxyJump, pins: &BTreeMap<String, String>) -> Result<SshLogin, SshTargetError> {
    login_to(&jump.hostname, jump.port.map(|port| port.0), &jump.user, jump.ssh_key.as_ref(), pins)
}

fn login_to(
    host: &str,
    port: Option<i64>,
    user: &str,
    key: Option<&SshKey>,
    pins: &BTreeMap<String, String>,
) -> Result<SshLogin, SshTargetError> {
    let private = key.and_then(|key| key.private.as_deref()).ok_or_else(|| missing(host, "private key"))?;
    let mut login = SshLogin {
        host: host.to_owned(),
        port: port.and_then(|port| u16::try_from(port).ok()).unwrap_or(SSH_PORT),
        user: user.to_owned(),
        key: private.to_owned(),
        host_key: None,
        via: None,
    };
    login.host_key = pins.get(&login.known_hosts_name()).cloned();
    Ok(login)
}

fn missing(host: &str, what: &'static str) -> SshTargetError {
    SshTargetError::Missing { host: host.to_owned(), what }
}
