//! `type: service`: replicas that answer requests, behind a gateway or the server's proxy.

use super::{
    config_macros::{deserialize_by_decoding, table, words},
    decode::{Ctx, Decode, Fields as _, Int, check_keys, expect_map},
    error::{Code, Diagnosis},
    interpolate::{self, ReferenceScope},
    name::{GroupName, PythonVersion},
    ports::ServicePort,
    profile::{self, RetrySetting, SpotPolicy},
    run,
    serving::{Balance, Cors, Deployment},
    task::{check_group_names, group_node},
    traffic::{GatewayChoice, Https, Metric, Model, Probe, RateLimit, Replicas, Scaling, check_scaling},
    yaml::{Node, Value},
};
use crate::resources::ResourcesSpec;

words! {
    /// Program that distributes requests to the other groups.
    pub enum RouterKind {
        Smg = "sglang" | "smg",
        Dynamo = "dynamo",
    }
}

table! {
    /// Makes a group the router of the service.
    pub struct Router {
        pub kind as "type": RouterKind = RouterKind::Smg,
    }
}

table! {
    /// A group of identical replicas.
    pub struct ReplicaGroup {
        /// Name of the group. Default: its position.
        pub name: Option<GroupName> = None,
        /// Number of replicas: a number or a range.
        pub replicas: Replicas,
        /// Rules for adding and removing replicas.
        pub scaling: Option<Scaling> = None,
        /// Resources that each replica requests. Not inherited from the service.
        pub resources: ResourcesSpec = ResourcesSpec::default(),
        /// Spot instances, on-demand instances, or either (`auto`).
        pub spot_policy: Option<SpotPolicy> = None,
        /// Reservation or capacity block of the cloud.
        pub reservation: Option<String> = None,
        /// Commands that each replica runs.
        pub commands: Vec<String> = vec![],
        /// Image of the container; `none` means a plain process.
        pub image: Option<String> = None,
        /// Version of Python to prepare; not together with an image.
        pub python: Option<PythonVersion> = None,
        /// Uses the server's image with the CUDA compiler.
        pub nvcc: Option<bool> = None,
        /// Uses the server's image with Docker inside.
        pub docker: Option<bool> = None,
        /// Grants full access to the host's devices.
        pub privileged: Option<bool> = None,
        /// Not supported: rejected when the service is applied.
        pub router: Option<Router> = None,
    }
    check = Self::check;
}

impl ReplicaGroup {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        run::check_image_choice(
            self.image.as_deref(),
            self.python.is_some(),
            self.nvcc,
            self.docker,
            node,
            cx,
        );
        check_scaling(self.replicas, self.scaling.is_some(), node, cx);
        if self.router.is_some() && self.replicas != Replicas::exactly(1) {
            cx.conflict(node, "router", "a group with a `router` must have exactly one replica");
        }
    }
}

table! {
    /// Replicas that answer requests.
    pub struct ServiceProperties {
        /// Port that the service listens on.
        pub port: ServicePort,
        /// Commands to run, joined with `&&`.
        pub commands: Vec<String> = vec![],
        /// Gateway of the service: the name of a gateway of this project, `false` for none, `true` for the default one.
        pub gateway: Option<GatewayChoice> = None,
        /// Removes the path prefix of the server's proxy from requests.
        pub strip_prefix: bool = true,
        /// Model that the service serves, for the model endpoint.
        pub model: Option<Model> = None,
        /// Serves HTTPS at the gateway. Default: `true`.
        pub https: Option<Https> = None,
        /// Requires requests to carry a token of a project member.
        pub auth: bool = true,
        /// Number of replicas: a number or a range. Default: 1.
        pub replicas: Option<Replicas> = None,
        /// Rules for adding and removing replicas.
        pub scaling: Option<Scaling> = None,
        /// Limits on the rate of requests.
        pub rate_limits: Vec<RateLimit> = vec![],
        /// Requests that determine whether a replica is ready.
        pub probes: Option<Vec<Probe>> = None,
        /// Rules for replacing replicas when the configuration changes.
        pub deployment: Option<Deployment> = None => omit,
        /// Selection of the replica for the next request. Default: `round-robin`.
        pub balance: Option<Balance> = None => omit,
        /// Maximum number of concurrent requests per replica; further requests wait. Default: no limit.
        pub max_concurrency: Option<Int<1, 100_000>> = None => omit,
        /// Origins whose web pages may call the service.
        pub cors: Option<Cors> = None => omit,
        /// Groups of replicas with different settings.
        pub groups: Option<Vec<ReplicaGroup>> = None => omit,
    }
    flatten {
        pub run: run::Run,
        pub profile: profile::ProfileProperties,
    }
    tag = "service";
    check = Self::check;
    title = "Service";
}

/// A service. Decodes the old form of groups (a list under `replicas`) as the new one.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(transparent)]
pub struct Service(pub ServiceProperties);

impl std::ops::Deref for Service {
    type Target = ServiceProperties;
    fn deref(&self) -> &ServiceProperties {
        &self.0
    }
}

impl Decode for Service {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        expect_map(node, cx)?;
        let modern = upgrade_old_spelling(node, cx);
        let node = modern.as_ref().unwrap_or(node);
        let mut keys = Vec::new();
        ServiceProperties::keys(&mut keys);
        check_keys(node, &keys, cx);
        ServiceProperties::decode_fields(node, cx).map(Self)
    }
}

deserialize_by_decoding!(Service);

impl schemars::JsonSchema for Service {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Service".into()
    }
    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let mut schema = ServiceProperties::json_schema(generator);
        // The old form of groups: a list under `replicas`, with `count` for the number of replicas.
        if let Some(replicas) = schema.pointer_mut("/properties/replicas") {
            let modern = replicas.take();
            let groups = <Vec<ReplicaGroup>>::json_schema(generator);
            *replicas = serde_json::json!({ "anyOf": [modern, groups] });
        }
        if let Some(group) = generator.definitions_mut().get_mut("ReplicaGroup") {
            let count = group["properties"]["replicas"].clone();
            group["properties"]["count"] = count;
            group["anyOf"] = serde_json::json!([{ "required": ["replicas"] }, { "required": ["count"] }]);
            if let Some(group) = group.as_object_mut() {
                group.remove("required");
            }
        }
        schema
    }
}

/// Converts old spellings to new ones: groups under `replicas`, and `count` for the replicas of a group.
fn upgrade_old_spelling(node: &Node, cx: &mut Ctx) -> Option<Node> {
    let mut node = node.clone();
    let old = matches!(node.field("replicas").map(|list| &list.value), Some(Value::Seq(_)));
    if old && node.field("groups").is_some() {
        cx.conflict(&node, "replicas", "a list in `replicas` and `groups` are mutually exclusive");
    }
    let Value::Map(entries) = &mut node.value else { return None };
    if old {
        entries.retain(|entry| entry.key != "groups");
    }
    for entry in entries.iter_mut() {
        if old && entry.key == "replicas" {
            entry.key = "groups".to_owned();
        }
        if entry.key == "groups"
            && let Value::Seq(groups) = &mut entry.value.value
        {
            for group in groups {
                rename_count(group);
            }
        }
    }
    Some(node)
}

fn rename_count(group: &mut Node) {
    if group.entry("replicas").is_some() {
        return;
    }
    if let Value::Map(entries) = &mut group.value {
        for entry in entries.iter_mut().filter(|entry| entry.key == "count") {
            entry.key = "replicas".to_owned();
        }
    }
}

impl ServiceProperties {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        match &self.groups {
            None => {
                run::check_something_to_run(!self.commands.is_empty(), &self.run, node, cx);
                check_scaling(
                    self.replicas.unwrap_or(Replicas::exactly(1)),
                    self.scaling.is_some(),
                    node,
                    cx,
                );
            }
            Some(groups) => self.check_groups(groups, node, cx),
        }
        self.check_traffic(node, cx);
        let sizes: Option<Vec<i64>> = self
            .groups
            .as_ref()
            .map(|groups| groups.iter().map(|group| i64::from(group.replicas.min)).collect());
        interpolate::check(node, ReferenceScope::Service(sizes.as_deref()), cx);
    }

    fn check_traffic(&self, node: &Node, cx: &mut Ctx) {
        let mut prefixes: Vec<&str> = self.rate_limits.iter().map(|limit| limit.prefix.0.as_str()).collect();
        prefixes.sort_unstable();
        if let Some(twice) = prefixes.windows(2).find(|pair| pair[0] == pair[1]) {
            cx.conflict(node, "rate_limits", format!("two rate limits have the prefix `{}`", twice[0]));
        }
        let own = self.scaling.iter();
        let of_groups = self.groups.iter().flatten().filter_map(|group| group.scaling.as_ref());
        if self.max_concurrency.is_none() && own.chain(of_groups).any(|one| one.metric == Metric::QueueDepth)
        {
            let message =
                "`metric: queue-depth` requires `max_concurrency`: without it, no requests are queued";
            cx.missing(node, "max_concurrency", message);
        }
        let Some(probes) = &self.probes else { return };
        if probes.len() > 10 {
            let message = format!("`probes` must have at most 10 entries, not {}", probes.len());
            cx.problem(Diagnosis::new(Code::OutOfRange, node.key_span("probes"), message).at("probes"));
        } else if probes.iter().enumerate().any(|(index, probe)| probes[..index].contains(probe)) {
            cx.conflict(node, "probes", "two `probes` are identical");
        }
    }

    fn check_groups(&self, groups: &[ReplicaGroup], node: &Node, cx: &mut Ctx) {
        let taken = [
            (self.replicas.is_some(), "replicas"),
            (self.scaling.is_some(), "scaling"),
            (!self.commands.is_empty(), "commands"),
        ];
        for (set, key) in taken {
            if set {
                cx.conflict(
                    node,
                    key,
                    format!("`{key}` and `groups` are mutually exclusive; set it in the groups"),
                );
            }
        }
        if groups.is_empty() {
            cx.conflict(node, "groups", "`groups` must not be empty");
        }
        check_group_names(
            groups.iter().map(|group| group.name.as_ref().map(|name| name.0.as_str())),
            node,
            cx,
        );
        self.check_either_level(groups, node, cx);
        for (index, group) in groups.iter().enumerate() {
            if group.commands.is_empty() && group.image.is_none() && self.run.image.is_none() {
                let at = group_node(node, "groups", index).unwrap_or(node);
                let message = "each group requires `commands`, or an `image` in the group or the service";
                cx.under("groups", |cx| cx.at_index(index, |cx| cx.missing(at, "commands", message)));
            }
        }
        self.check_router(groups, node, cx);
    }

    /// Rejects settings that are present both on the service and in its groups.
    fn check_either_level(&self, groups: &[ReplicaGroup], node: &Node, cx: &mut Ctx) {
        let (run, choice) = (&self.run, &self.profile.provisioning);
        let any = |set: fn(&ReplicaGroup) -> bool| groups.iter().any(set);
        let both = [
            (run.image.is_some() && any(|g| g.image.is_some()), "image"),
            (run.docker.is_some() && any(|g| g.docker.is_some()), "docker"),
            (run.privileged && any(|g| g.privileged.is_some()), "privileged"),
            (run.python.is_some() && any(|g| g.python.is_some()), "python"),
            (run.nvcc.is_some() && any(|g| g.nvcc.is_some()), "nvcc"),
            (choice.spot_policy.is_some() && any(|g| g.spot_policy.is_some()), "spot_policy"),
            (choice.reservation.is_some() && any(|g| g.reservation.is_some()), "reservation"),
        ];
        for (clash, key) in both {
            if clash {
                cx.conflict(
                    node,
                    key,
                    format!("`{key}` can be set on the service or in its groups, not both"),
                );
            }
        }
    }

    fn check_router(&self, groups: &[ReplicaGroup], node: &Node, cx: &mut Ctx) {
        let routers: Vec<&Router> = groups.iter().filter_map(|group| group.router.as_ref()).collect();
        if routers.len() > 1 {
            cx.conflict(node, "groups", "at most one group can have a `router`");
        }
        let retries = match &self.profile.provisioning.retry {
            None | Some(RetrySetting::Flag(false)) => false,
            Some(RetrySetting::Flag(true) | RetrySetting::Policy(_)) => true,
        };
        if retries && routers.iter().any(|router| router.kind == RouterKind::Dynamo) {
            cx.conflict(node, "retry", "`retry` and a router of type dynamo are mutually exclusive");
        }
    }
}
