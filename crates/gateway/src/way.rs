//! What a gateway is told: its services, and how it comes to the hosts of their replicas.
//!
//! All of it opens hosts. It is never logged, and kept in a file that its owner alone may read.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use serde::{Deserialize, Serialize};
use windlass_tunnel::{HostKey, HostKeyPin, KeyError, LoginKey, SshDestination};

use crate::route::Service;

/// Everything at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GatewayConfig {
    pub services: Vec<Service>,
    /// By the name that stands before the slash in the targets of replicas.
    pub sites: BTreeMap<String, ReplicaHost>,
    /// The name of the gateway itself.
    #[serde(default)]
    pub own: Option<String>,
    /// Where certificates come from; nothing is no HTTPS, or the process's own business.
    #[serde(default)]
    pub certificate: Option<CertificateSource>,
}

/// Where the certificates of a gateway come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum CertificateSource {
    /// An authority that speaks ACME.
    Acme,
    /// Files on the gateway's own host.
    Files { chain: PathBuf, key: PathBuf },
}

/// A host with replicas.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaHost {
    /// What is shown at its agent's door: a pass to the ports of these replicas, and nothing more.
    pub credential: String,
    pub way: AgentAddress,
}

impl fmt::Debug for ReplicaHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Site").field("way", &self.way).finish_non_exhaustive()
    }
}

/// How its agent is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum AgentAddress {
    /// The machine of the server: only a gateway on that machine comes there.
    Socket {
        path: PathBuf,
    },
    Ssh {
        socket: String,
        login: SshLogin,
    },
}

/// Where a host is and how to log in there, as it is written down.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SshLogin {
    pub host: String,
    pub port: u16,
    pub user: String,
    /// A private key, as text.
    pub key: String,
    /// The line of the key that the host is known by; absent before anybody was there.
    pub host_key: Option<String>,
    pub via: Option<Box<Self>>,
}

impl fmt::Debug for SshLogin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Login({}@{}:{})", self.user, self.host, self.port)
    }
}

/// Why nobody can log in with what is written.
#[derive(Debug, thiserror::Error)]
pub enum SshLoginError {
    #[error("log in to {host}: its private key cannot be used")]
    PrivateKey {
        host: String,
        #[source]
        source: KeyError,
    },
    #[error("read the host key that {host} is pinned to")]
    Pinned {
        host: String,
        #[source]
        source: KeyError,
    },
}

impl SshLogin {
    /// Ready to be used.
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

    /// The name its key is kept under.
    pub fn known_hosts_name(&self) -> String {
        SshDestination::known_hosts_name_for(&self.host, self.port)
    }

    /// Whether the host and all on the way to it are known by their keys.
    pub fn is_pinned(&self) -> bool {
        self.host_key.is_some() && self.via.as_ref().is_none_or(|via| via.is_pinned())
    }
}
