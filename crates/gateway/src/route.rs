//! Routes from the server: the services, and the addresses of their replicas.
//!
//! A snapshot is complete and replaces the previous one. Its generation only increases.

use std::{net::SocketAddr, path::PathBuf};

use serde::{Deserialize, Serialize};

/// All routes at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RouteSnapshot {
    pub generation: u64,
    pub services: Vec<Service>,
}

/// Service: handling of its requests, and its replicas.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Service {
    pub project: String,
    /// Name of the run.
    pub run: String,
    /// Host names of the service; `*` in `*.example.org` stands for one label.
    #[serde(default)]
    pub domains: Vec<String>,
    /// Redirects plain HTTP to HTTPS.
    #[serde(default)]
    pub https: bool,
    /// Requires a token of a project member.
    pub auth: bool,
    /// Removes the path prefix of the service from requests.
    #[serde(default = "yes")]
    pub strip_prefix: bool,
    #[serde(default)]
    pub balance: Balance,
    /// Maximum number of concurrent requests per replica; others wait. Unlimited if absent.
    #[serde(default)]
    pub at_once: Option<u32>,
    #[serde(default)]
    pub limits: Vec<RouteLimit>,
    #[serde(default)]
    pub cors: Option<Cors>,
    #[serde(default)]
    pub model: Option<ServedModel>,
    /// Maximum size of a request body, in bytes; unlimited if absent.
    #[serde(default)]
    pub body_max: Option<u64>,
    /// Maximum time that a request waits for a replica, in milliseconds. Zero: it does not wait.
    #[serde(default)]
    pub hold_ms: u64,
    /// Time within which a replica must start its response, in milliseconds.
    #[serde(default = "answer_ms")]
    pub answer_ms: u64,
    pub groups: Vec<RouteGroup>,
}

impl Service {
    /// Service without replicas and with default settings: for members only, path prefix removed, no limits.
    pub fn new(project: impl Into<String>, run: impl Into<String>) -> Self {
        Self {
            project: project.into(),
            run: run.into(),
            domains: Vec::new(),
            https: false,
            auth: true,
            strip_prefix: true,
            balance: Balance::default(),
            at_once: None,
            limits: Vec::new(),
            cors: None,
            model: None,
            body_max: None,
            hold_ms: 0,
            answer_ms: answer_ms(),
            groups: Vec::new(),
        }
    }

    /// Sets the replicas, in one group.
    #[must_use]
    pub fn with_replicas(mut self, replicas: Vec<ReplicaRoute>) -> Self {
        self.groups = vec![RouteGroup { name: "0".to_owned(), replicas }];
        self
    }
}

const fn yes() -> bool {
    true
}

const fn answer_ms() -> u64 {
    300_000
}

/// Group of equivalent replicas.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouteGroup {
    pub name: String,
    pub replicas: Vec<ReplicaRoute>,
}

/// Replica that receives requests. A draining replica is omitted from the next snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaRoute {
    pub id: String,
    pub target: ReplicaTarget,
}

/// Address of a replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ReplicaTarget {
    Tcp {
        address: SocketAddr,
    },
    Unix {
        path: PathBuf,
    },
    /// Through a tunnel that the connector knows by name.
    Tunnel {
        name: String,
        port: u16,
    },
}

/// Selection of the replica for the next request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Balance {
    #[default]
    RoundRobin,
    /// The replica with the fewest outstanding requests.
    LeastOutstanding,
}

/// Rate limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouteLimit {
    /// Prefix of the paths that it applies to; the longest prefix wins.
    pub prefix: String,
    pub key: LimitKey,
    pub rps: f64,
    /// Requests above the rate that are admitted at once.
    pub burst: u64,
}

/// Requests that share one budget.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum LimitKey {
    IpAddress,
    /// By the value of a header; by the address of the caller if it is absent.
    Header {
        header: String,
    },
}

/// Access for pages of other origins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cors {
    /// Allowed origins; empty means all, without credentials.
    pub origins: Vec<String>,
    /// Allows cookies and credentials; only for listed origins.
    pub credentials: bool,
    /// Time for which a browser may cache the response, in seconds.
    pub max_age_s: u32,
}

/// Model that the service provides, for the model endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedModel {
    pub name: String,
    /// Path prefix of its OpenAI-compatible API.
    pub prefix: String,
    /// Creation time of the service, in seconds of Unix time.
    pub created: i64,
}
