//! `type: fleet`: a set of instances, rented or reached over SSH.

use std::net::IpAddr;

use serde::{Serialize, Serializer, ser::SerializeMap as _};

use super::{
    config_macros::{deserialize_by_decoding, schema_literal, table, words},
    decode::{Ctx, Decode, Int, check_keys, excerpt, is_map, optional_field, text},
    env::Env,
    error::{Code, Diagnosis},
    name::Name,
    profile::{BackendType, Provisioning},
    quantities::{Seconds, parse_range},
    schema::subschema,
    yaml::{Node, Value},
};
use crate::resources::ResourcesSpec;

words! {
    /// Placement of the instances of a fleet relative to each other.
    pub enum Placement {
        Any = "any",
        /// Close together, with a fast network between them.
        Cluster = "cluster",
    }
}

/// Number of blocks that an instance is split into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// The largest number that divides both CPUs and GPUs.
    Auto,
    Count(u32),
}

impl Decode for Blocks {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if super::decode::scalar(node).is_some_and(|scalar| scalar.text == "auto") {
            return Some(Self::Auto);
        }
        match u32::decode(node, cx)? {
            0 => cx.out_of_range(node, "must be at least 1, or `auto`"),
            n => Some(Self::Count(n)),
        }
    }
}

impl Serialize for Blocks {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Count(n) => serializer.serialize_u32(*n),
        }
    }
}

/// Number of instances: never below `min`, initially `target`, never above `max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FleetNodes {
    pub min: u32,
    pub target: u32,
    pub max: Option<u32>,
}

impl Decode for FleetNodes {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let nodes = if is_map(node) {
            check_keys(node, &["min", "target", "max"], cx);
            let min = optional_field(node, "min", cx, || 0u32);
            let target = optional_field(node, "target", cx, || None);
            let max = optional_field(node, "max", cx, || None);
            let min = min?;
            Self { min, target: target?.unwrap_or(min), max: max? }
        } else {
            match parse_range::<u32>(text(node, cx)?) {
                Ok(range) => {
                    let min = range.min.unwrap_or(0);
                    Self { min, target: min, max: range.max }
                }
                Err(reason) => return cx.invalid(node, reason),
            }
        };
        if nodes.target < nodes.min || nodes.max.is_some_and(|max| nodes.target > max) {
            return cx.invalid(node, "`min` must not exceed `target`, and `target` must not exceed `max`");
        }
        Some(nodes)
    }
}

impl Serialize for FleetNodes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("min", &self.min)?;
        map.serialize_entry("max", &self.max)?;
        if self.target != self.min {
            map.serialize_entry("target", &self.target)?;
        }
        map.end()
    }
}

table! {
    /// SSH key pair, read by the client. The server never returns the private key.
    pub struct SshKey {
        pub public: String,
        pub private: Option<String> = None,
    }
}

/// A TCP port.
pub type Port = Int<1, 65535>;

table! {
    /// Host that all connections go through.
    pub struct ProxyJump {
        pub hostname: String,
        pub port: Option<Port> = None,
        pub user: String,
        pub identity_file: String,
        pub ssh_key: Option<SshKey> = None,
    }
}

table! {
    /// One host, with the settings that differ from the other hosts.
    pub struct HostParams {
        pub hostname: String,
        pub port: Option<Port> = None,
        pub user: Option<String> = None,
        pub identity_file: Option<String> = None,
        pub proxy_jump: Option<ProxyJump> = None,
        /// Private address of the host, if it has several addresses. Set it for all hosts or for none.
        pub internal_ip: Option<InternalIp> = None,
        pub ssh_key: Option<SshKey> = None,
        pub blocks: Option<Blocks> = None,
    }
}

/// A host: a hostname, or a mapping with further settings.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Host {
    Name(String),
    Params(Box<HostParams>),
}

impl Host {
    pub fn hostname(&self) -> &str {
        match self {
            Self::Name(name) => name,
            Self::Params(params) => &params.hostname,
        }
    }

    pub fn params(&self) -> Option<&HostParams> {
        match self {
            Self::Name(_) => None,
            Self::Params(params) => Some(params),
        }
    }
}

impl Decode for Host {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if is_map(node) {
            return HostParams::decode(node, cx).map(Box::new).map(Self::Params);
        }
        let name = text(node, cx)?;
        if name.is_empty() || name.starts_with('-') {
            return cx.invalid(node, format!("`{}` is not a host name", excerpt(name)));
        }
        Some(Self::Name(name.to_owned()))
    }
}

fn is_private(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => {
            ip.is_private() || ip.is_link_local() || (ip.octets()[0] == 100 && ip.octets()[1] & 0xc0 == 64)
        }
        IpAddr::V6(ip) => (ip.segments()[0] & 0xfe00) == 0xfc00,
    }
}

/// Private address of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct InternalIp(pub String);

impl Decode for InternalIp {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let word = text(node, cx)?;
        match word.parse::<IpAddr>() {
            Ok(ip) if is_private(ip) => Some(Self(word.to_owned())),
            Ok(_) => cx.invalid(node, format!("`{}` is not a private address", excerpt(word))),
            Err(_) => cx.invalid(node, format!("`{}` is not an IP address", excerpt(word))),
        }
    }
}

/// Private network, such as `10.0.0.0/16`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Network(pub String);

impl Decode for Network {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let word = text(node, cx)?;
        let (ip, prefix) = word.split_once('/').map_or((word, None), |(ip, prefix)| (ip, Some(prefix)));
        let parsed = ip.parse::<IpAddr>().ok().filter(|ip| {
            let bits = if ip.is_ipv4() { 32 } else { 128 };
            prefix.is_none_or(|prefix| prefix.parse::<u8>().is_ok_and(|prefix| prefix <= bits))
        });
        match parsed {
            Some(ip) if is_private(ip) => Some(Self(word.to_owned())),
            Some(_) => cx.invalid(node, format!("`{}` is not a private network", excerpt(word))),
            None => cx.invalid(node, format!("`{}` is not a network such as 10.0.0.0/16", excerpt(word))),
        }
    }
}

table! {
    /// SSH hosts of a fleet.
    pub struct SshConfig {
        /// User on every host that names none.
        pub user: Option<String> = None,
        /// SSH port. Default: 22.
        pub port: Option<Port> = None,
        /// Path of the private key: RSA, ECDSA or Ed25519, without a passphrase.
        pub identity_file: Option<String> = None,
        /// Contents of the key; set by the client.
        pub ssh_key: Option<SshKey> = None,
        /// Host that all connections go through.
        pub proxy_jump: Option<ProxyJump> = None,
        /// Private network that the hosts share.
        pub network: Option<Network> = None,
        /// Hosts of the fleet; each becomes an instance.
        pub hosts: Vec<Host>,
    }
    check = Self::check;
}

impl SshConfig {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        if self.hosts.is_empty() {
            cx.conflict(node, "hosts", "`hosts` must list at least one host");
        }
        let with_ip =
            self.hosts.iter().filter(|host| host.params().is_some_and(|p| p.internal_ip.is_some())).count();
        if with_ip > 0 && with_ip < self.hosts.len() {
            cx.conflict(node, "hosts", "`internal_ip` must be set for all hosts or for none");
        }
        if with_ip > 0 && self.network.is_some() {
            cx.conflict(node, "network", "`network` and `internal_ip` are mutually exclusive");
        }
        if cx.is_strict() {
            self.check_access(node, cx);
        }
    }

    /// Checks that every host in a file has a user and a key. Clients have applied this check before they send.
    fn check_access(&self, node: &Node, cx: &mut Ctx) {
        let Some(Value::Seq(items)) = node.field("hosts").map(|hosts| &hosts.value) else { return };
        for (index, (host, item)) in self.hosts.iter().zip(items).enumerate() {
            let params = host.params();
            let user = self.user.is_some() || params.is_some_and(|p| p.user.is_some());
            let key = self.identity_file.is_some()
                || self.ssh_key.is_some()
                || params.is_some_and(|p| p.identity_file.is_some() || p.ssh_key.is_some());
            for (given, field) in [(user, "user"), (key, "identity_file")] {
                if !given {
                    let message = format!("host `{}` has no `{field}`", excerpt(host.hostname()));
                    let hint = format!("set `{field}` in `ssh_config` or for the host");
                    let path = format!("hosts[{index}].{field}");
                    cx.problem(Diagnosis::new(Code::MissingField, item.span, message).at(path).hint(hint));
                }
            }
        }
    }
}

table! {
    /// Rules by which running jobs of a fleet end so that others can start.
    pub struct PreemptionPolicy {
        /// Time that a job runs before it may be preempted. It doubles each time that a job is preempted.
        pub min_run: Seconds = Seconds(1_800),
        /// Time that a job waits before others are preempted for it.
        pub wait: Seconds = Seconds(60),
        /// Time that a preempted job has to exit.
        pub grace: Seconds = Seconds(60),
        /// Maximum number of replicas that are preempted in ten minutes.
        pub budget: Int<1, 10_000> = Int(32),
    }
    check = Self::check;
}

impl PreemptionPolicy {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        let times = [("min_run", self.min_run), ("wait", self.wait), ("grace", self.grace)];
        for (name, time) in times {
            if !(0..=PREEMPTION_TIME_MAX).contains(&time.0) {
                let message = format!("`{name}` must be between 0s and 7d");
                cx.problem(Diagnosis::new(Code::OutOfRange, node.key_span(name), message).at(name));
            }
        }
    }
}

/// Longest time of a preemption policy, in seconds.
const PREEMPTION_TIME_MAX: i64 = 7 * 24 * 3_600;

/// `on`, `off` or a policy.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum PreemptionSetting {
    Flag(bool),
    Policy(PreemptionPolicy),
}

impl PreemptionSetting {
    /// Returns the policy, unless preemption is off.
    pub fn policy(&self) -> Option<PreemptionPolicy> {
        match self {
            Self::Flag(false) => None,
            Self::Flag(true) => Some(PreemptionPolicy {
                min_run: Seconds(1_800),
                wait: Seconds(60),
                grace: Seconds(60),
                budget: Int(32),
            }),
            Self::Policy(policy) => Some(policy.clone()),
        }
    }
}

impl Decode for PreemptionSetting {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if is_map(node) {
            PreemptionPolicy::decode(node, cx).map(Self::Policy)
        } else {
            bool::decode(node, cx).map(Self::Flag)
        }
    }
}

table! {
    /// A set of instances.
    pub struct Fleet {
        /// Name of the fleet. Generated if absent.
        pub name: Option<Name> = None,
        /// Placement of the instances relative to each other.
        pub placement: Option<Placement> = None,
        /// Number of blocks that each instance is split into, so that several jobs can share it.
        pub blocks: Blocks = Blocks::Count(1),
        /// Number of instances to rent: `2`, `1..4`, `..4`.
        pub nodes: Option<FleetNodes> = None,
        /// Resources that each instance must have. Any instance if absent.
        pub resources: Option<ResourcesSpec> = None,
        /// SSH hosts that form the fleet, instead of rented instances.
        pub ssh_config: Option<SshConfig> = None,
        /// The only backend of the fleet: `slurm` for clusters behind a dispatcher.
        pub backend: Option<BackendType> = None,
        /// Name of the dispatcher that jobs go through. Any if absent.
        pub dispatcher: Option<String> = None,
        /// Partition of the cluster. Any if absent.
        pub partition: Option<String> = None,
        /// Whether running jobs end so that jobs of a higher class, or of a project below its share, can start. Default:
        /// `off`.
        pub preemption: Option<PreemptionSetting> = None,
        /// Environment variables for the agent on each host and for its jobs; SSH fleets only.
        pub env: Env = Env::default(),
    }
    flatten {
        pub provisioning: Provisioning,
    }
    tag = "fleet";
    check = Self::check;
}

impl Fleet {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        match (&self.nodes, &self.ssh_config) {
            (None, None) => {
                let message = "either `nodes` or `ssh_config` is required";
                cx.problem(Diagnosis::new(Code::MissingField, node.span, message).at("nodes"));
            }
            (Some(_), Some(_)) => {
                cx.conflict(node, "nodes", "`nodes` and `ssh_config` are mutually exclusive")
            }
            (Some(_), None) | (None, Some(_)) => {}
        }
        self.check_backend(node, cx);
        if self.ssh_config.is_some() {
            for key in Provisioning::set_keys(node) {
                cx.conflict(
                    node,
                    key,
                    format!("`{key}` applies to instances of a backend, not to `ssh_config`"),
                );
            }
        } else if !self.env.0.is_empty() {
            cx.conflict(node, "env", "`env` requires `ssh_config`");
        }
    }
}

impl Fleet {
    /// Checks `backend`, `dispatcher` and `partition`, the short forms of `backends`, `regions` and
    /// `availability_zones`.
    fn check_backend(&self, node: &Node, cx: &mut Ctx) {
        let machines = &self.provisioning;
        let taken = [
            ("backend", self.backend.is_some(), "backends", machines.backends.is_some()),
            ("dispatcher", self.dispatcher.is_some(), "regions", machines.regions.is_some()),
            (
                "partition",
                self.partition.is_some(),
                "availability_zones",
                machines.availability_zones.is_some(),
            ),
        ];
        for (key, given, other, other_given) in taken {
            if given && other_given {
                cx.conflict(node, key, format!("`{key}` and `{other}` are mutually exclusive"));
            }
            if given && self.ssh_config.is_some() {
                cx.conflict(node, key, format!("`{key}` cannot be used with `ssh_config`"));
            }
            if given && key != "backend" && self.backend != Some(BackendType::Slurm) {
                cx.conflict(node, key, format!("`{key}` requires `backend: slurm`"));
            }
        }
        self.check_slurm(node, cx);
    }

    /// Checks that a fleet of Slurm clusters has no setting that the cluster would ignore.
    fn check_slurm(&self, node: &Node, cx: &mut Ctx) {
        let is_slurm = |backend: &BackendType| *backend == BackendType::Slurm;
        let mut backends = self.provisioning.backends.iter().flatten().chain(&self.backend).peekable();
        if backends.peek().is_none() || !backends.all(is_slurm) {
            return;
        }
        if self.blocks != Blocks::Count(1) {
            let message = "`blocks` does not apply to `slurm`: each job is a job of the cluster, which divides its nodes";
            cx.conflict(node, "blocks", message);
        }
        if self.placement == Some(Placement::Cluster) {
            let message = "`placement: cluster` does not apply to `slurm`: jobs there have one node";
            cx.conflict(node, "placement", message);
        }
    }
}

deserialize_by_decoding!(Blocks, FleetNodes, Host, InternalIp, Network, PreemptionSetting);

schema_literal! {
    Blocks, "Blocks" => _g { "anyOf": [{ "const": "auto" }, { "type": "integer", "minimum": 1 }] };
    FleetNodes, "FleetNodes" => _g { "anyOf": [
        { "type": "integer", "minimum": 0 },
        { "type": "string", "pattern": "^\\s*\\d*\\s*(\\.\\.\\s*\\d*)?\\s*$" },
        { "type": "object", "additionalProperties": false, "properties": {
            "min": { "type": "integer", "minimum": 0 },
            "target": { "type": ["integer", "null"], "minimum": 0 },
            "max": { "type": ["integer", "null"], "minimum": 0 } } },
    ] };
    Host, "Host" => generator { "anyOf": [{ "type": "string", "minLength": 1 }, subschema::<HostParams>(generator)] };
    PreemptionSetting, "Preemption" => generator { "anyOf": [
        { "type": "boolean" }, { "enum": ["on", "off"] }, subschema::<PreemptionPolicy>(generator),
    ] };
    InternalIp, "InternalIp" => _g { "type": "string" };
    Network, "Network" => _g { "type": "string" };
}
