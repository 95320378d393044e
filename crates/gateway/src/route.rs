//! What the server tells a data plane: which services there are, and where their replicas answer.
//!
//! A snapshot is whole: it replaces the one before. Its generation only grows.

use std::{net::SocketAddr, path::PathBuf};

use serde::{Deserialize, Serialize};

/// All routes at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RouteSnapshot {
    pub generation: u64,
    pub services: Vec<Service>,
}

/// One service: how its requests are treated, and who answers them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Service {
    pub project: String,
    /// The name of the run.
    pub run: String,
    /// Names of hosts it answers to; `*.example.org` stands for one label.
    #[serde(default)]
    pub domains: Vec<String>,
    /// Plain HTTP is sent to HTTPS.
    #[serde(default)]
    pub https: bool,
    /// Requests need a token of a project member.
    pub auth: bool,
    /// The path below which it is mounted is not shown to it.
    #[serde(default = "yes")]
    pub strip_prefix: bool,
    #[serde(default)]
    pub balance: Balance,
    /// Requests that one replica gets at once; others wait. No bound when absent.
    #[serde(default)]
    pub at_once: Option<u32>,
    #[serde(default)]
    pub limits: Vec<RouteLimit>,
    #[serde(default)]
    pub cors: Option<Cors>,
    #[serde(default)]
    pub model: Option<ServedModel>,
    /// The largest body of a request, in bytes; no bound when absent.
    #[serde(default)]
    pub body_max: Option<u64>,
    /// How long a request waits for a replica, in milliseconds. Zero: not at all.
    #[serde(default)]
    pub hold_ms: u64,
    /// How long a replica may take to begin its answer, in milliseconds.
    #[serde(default = "answer_ms")]
    pub answer_ms: u64,
    pub groups: Vec<RouteGroup>,
}

impl Service {
    /// A service without replicas, with everything as usual: open to members only, mounted without its path, no
    /// limits.
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

    /// With these replicas, in one group.
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

/// Equal replicas.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouteGroup {
    pub name: String,
    pub replicas: Vec<ReplicaRoute>,
}

/// Somebody who answers. Who drains is left out of the next snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaRoute {
    pub id: String,
    pub target: ReplicaTarget,
}

/// Where a replica listens.
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

/// Who of the replicas gets the next request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Balance {
    #[default]
    RoundRobin,
    /// The one with the fewest unanswered requests.
    LeastOutstanding,
}

/// How many requests are let through.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouteLimit {
    /// Paths that it is for; the longest prefix wins.
    pub prefix: String,
    pub key: LimitKey,
    pub rps: f64,
    /// Requests above the rate that are let through at once.
    pub burst: u64,
}

/// What shares one budget of requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum LimitKey {
    IpAddress,
    /// The value of a header; the address of the caller where it is absent.
    Header {
        header: String,
    },
}

/// Which pages of other origins may call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cors {
    /// Origins; empty stands for all, without credentials.
    pub origins: Vec<String>,
    /// Cookies and credentials may be sent along; only for listed origins.
    pub credentials: bool,
    /// How long a browser may remember the answer.
    pub max_age_s: u32,
}

/// The model it serves, for the model endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedModel {
    pub name: String,
    /// Where its OpenAI-compatible interface begins.
    pub prefix: String,
    /// When the service was made, in seconds of Unix time.
    pub created: i64,
}
