//! Configuration of a gateway from the server: its services, and access to the hosts of their replicas.
//!
//! Contains credentials for hosts. It is never logged, and stored in a file that only its owner can read.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use serde::{Deserialize, Serialize};
use windlass_tunnel::{HostKey, HostKeyPin, KeyError, LoginKey, SshDestination};

use crate::route::Service;

/// Complete configuration at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GatewayConfig {
    pub services: Vec<Service>,
    /// Hosts, by the name before the slash in the targets of replicas.
    pub sites: BTreeMap<String, ReplicaHost>,
    /// Name of the gateway itself.
    #[serde(default)]
    pub own: Option<String>,
    /// Source of certificates; absent without HTTPS, or if the process has its own setting.
    #[serde(default)]
    pub certificate: Option<CertificateSource>,
}

/// Source of the certificates of a gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum CertificateSource {
    /// ACME authority.
    Acme,
    /// Files on the gateway's own host.
    Files { chain: PathBuf, key: PathBuf },
}

/// Host with replicas.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaHost {
    /// Credential for its agent: a pass to the ports of these replicas only.
    pub credential: String,
    #[serde(rename = "way")]
    pub address: AgentAddress,
}

impl fmt::Debug for ReplicaHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Site").field("way", &self.address).finish_non_exhaustive()
    }
}

/// Connection to the agent of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum AgentAddress {
    /// Socket on the server's machine: only a gateway on that machine can connect.
    Socket { path: PathBuf },
    /// SSH server of the host, which relays every session of this login to the agent.
    Relay { login: SshLogin },
}

/// Address and login of a host, in serialised form.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SshLogin {
    pub host: String,
    pub port: u16,
    pub user: String,
    /// Private key, as text.
    pub key: String,
    /// Pinned host key, as one line; absent until it is known.
    pub host_key: Option<String>,
    pub via: Option<Box<Self>>,
}

impl fmt::Debug for SshLogin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Login({}@{}:{})", self.user, self.host, self.port)
    }
}

/// Invalid key in a login.
#[derive(Debug, thiserror::Error)]
pub enum SshLoginError {
    #[error("cannot log in to {host}: invalid private key")]
    PrivateKey {
        host: String,
        #[source]
        source: KeyError,
    },
    #[error("invalid pinned host key of {host}")]
    Pinned {
        host: String,
        #[source]
        source: KeyError,
    },
}

impl SshLogin {
    /// Converts to an SSH destination.
    pub fn target(&self) -> Result<SshDestination, SshLoginError> {
        let key = LoginKey::parse(&self.key)
            .map_err(|source| SshLoginError::PrivateKey { host: self.host.clone(), source })?;
        let pinned = self.host_key.as_deref().map(HostKey::parse).transpose();
        let pinned = pinned.map_err(|source| SshLoginError::Pinned { host: self.host.clone(), source })?;
        Ok(SshDestination {
            host: self.host.clone(),
            port: self.port,
            user: self.user.clone(),
            keys: vec![key],
            pin: pinned.map_or(HostKeyPin::FirstUse, HostKeyPin::Known),
            via: self.via.as_ref().map(|via| via.target()).transpose()?.map(Box::new),
        })
    }

    /// Returns the name under which the host key is stored.
    pub fn known_hosts_name(&self) -> String {
        SshDestination::known_hosts_name_for(&self.host, self.port)
    }

    /// Returns whether the keys of the host and of all its jump hosts are pinned.
    pub fn is_pinned(&self) -> bool {
        self.host_key.is_some() && self.via.as_ref().is_none_or(|via| via.is_pinned())
    }
}
