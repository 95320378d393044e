//! Profiles: how and where to run, independent of what to run.
//!
//! The properties are set in `profiles.yml`, or directly in a run configuration, which takes precedence.

use serde::Serialize;

use super::{
    config_macros::{deserialize_by_decoding, schema_literal, table, words},
    decode::{Ctx, Decode, Int, check_keys, closest, is_map, required_field, text},
    error::{Code, Diagnosis},
    name::{ResourceReference, Tags},
    quantities::{IdleDuration, OffableDuration, OneOrMany, PositiveNumber, Seconds},
    schema::subschema,
    yaml::{Node, Value},
};

words! {
    /// Provider of instances.
    pub enum BackendType {
        AmdDevCloud = "amddevcloud",
        Aws = "aws",
        Azure = "azure",
        CloudRift = "cloudrift",
        Crusoe = "crusoe",
        Cudo = "cudo",
        DataCrunch = "datacrunch",
        Daytona = "daytona",
        DigitalOcean = "digitalocean",
        Dstack = "dstack",
        Gcp = "gcp",
        HotAisle = "hotaisle",
        JarvisLabs = "jarvislabs",
        Kubernetes = "kubernetes",
        Lambda = "lambda",
        Lium = "lium",
        /// The machine that the server runs on.
        Local = "local",
        /// LXD or Incus.
        Lxd = "lxd",
        /// A scripted cloud, for tests and trials.
        Mock = "mock",
        /// SSH hosts.
        Remote = "remote",
        Nebius = "nebius",
        Oci = "oci",
        Runpod = "runpod",
        Seeweb = "seeweb",
        Slurm = "slurm",
        TensorDock = "tensordock",
        VastAi = "vastai",
        Verda = "verda",
        Vultr = "vultr",
    }
}

words! {
    /// Use of spot instances, which the provider may reclaim.
    pub enum SpotPolicy {
        Spot = "spot",
        OnDemand = "on-demand",
        Auto = "auto",
    }
}

words! {
    /// Permission to create new instances for a run.
    pub enum CreationPolicy {
        Reuse = "reuse",
        ReuseOrCreate = "reuse-or-create",
    }
}

words! {
    /// Order in which the nodes of a run start.
    pub enum StartupOrder {
        Any = "any",
        MasterFirst = "master-first",
        WorkersFirst = "workers-first",
    }
}

words! {
    /// Condition under which a multi-node run is done.
    pub enum StopCriteria {
        AllDone = "all-done",
        MasterDone = "master-done",
    }
}

words! {
    /// Event after which a job may be retried.
    pub enum RetryEvent {
        NoCapacity = "no-capacity",
        Interruption = "interruption",
        Error = "error",
    }
}

words! {
    /// Order of the offers of Vast.ai.
    pub enum OfferOrder {
        Score = "score",
        Price = "price",
    }
}

words! {
    /// Backends that have specific options.
    pub enum OptionsBackend {
        VastAi = "vastai",
    }
}

table! {
    /// Events after which a job is retried, and the time limit.
    pub struct RetryPolicy {
        /// Events after which to retry. Default: all of them.
        pub on_events: Option<Vec<RetryEvent>> = None,
        /// Time limit, from the first failure in a row. Default: one hour.
        pub duration: Option<Seconds> = None,
    }
    check = Self::check;
}

impl RetryPolicy {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        if self.on_events.as_ref().is_some_and(Vec::is_empty) {
            cx.conflict(node, "on_events", "`on_events` must list at least one event");
        }
    }
}

/// `true`, `false` or a retry policy.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum RetrySetting {
    Flag(bool),
    Policy(RetryPolicy),
}

impl Decode for RetrySetting {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if is_map(node) {
            RetryPolicy::decode(node, cx).map(Self::Policy)
        } else {
            bool::decode(node, cx).map(Self::Flag)
        }
    }
}

table! {
    /// Stops a run whose GPUs are not used.
    pub struct UtilizationPolicy {
        /// Percent; a run that stays below it for the whole window is terminated.
        pub min_gpu_utilization: Int<0, 100>,
        /// Length of the window, from 5 minutes to an hour.
        pub time_window: Seconds,
    }
    check = Self::check;
}

impl UtilizationPolicy {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        if !(300..=3600).contains(&self.time_window.0) {
            let message = "`time_window` must be between 5m and 1h";
            cx.problem(
                Diagnosis::new(Code::OutOfRange, node.key_span("time_window"), message).at("time_window"),
            );
        }
    }
}

/// One cron expression of five fields, or several: the earliest next time of any is used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Cron(pub OneOrMany);

/// Parses a cron expression of five fields: minute, hour, day, month, day of week, in UTC.
pub fn parse_cron(text: &str) -> Result<croner::Cron, String> {
    if text.split_whitespace().count() != 5 {
        return Err("a cron expression has five fields: minute, hour, day, month, day of the week".to_owned());
    }
    text.parse::<croner::Cron>().map_err(|error| match cron_out_of_range(text) {
        Some(reason) => format!("`{text}`: {reason}"),
        None => format!("`{text}`: {error}"),
    })
}

/// Returns a message about the first number that is out of range for its field.
fn cron_out_of_range(text: &str) -> Option<String> {
    let fields =
        [("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("day of the week", 0, 7)];
    for ((name, min, max), field) in fields.into_iter().zip(text.split_whitespace()) {
        // The part after a slash is a step.
        let ends =
            field.split(',').filter_map(|part| part.split('/').next()).flat_map(|part| part.split('-'));
        let wrong = ends.filter_map(|end| end.parse::<u32>().ok()).find(|end| !(min..=max).contains(end));
        if let Some(number) = wrong {
            return Some(format!("{name} {number} is not between {min} and {max}"));
        }
    }
    None
}

impl Decode for Cron {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let cron = OneOrMany::decode(node, cx)?;
        if cron.as_slice().is_empty() {
            return cx.invalid(node, "at least one expression is required");
        }
        for text in cron.as_slice() {
            if let Err(reason) = parse_cron(text) {
                return cx.invalid(node, reason);
            }
        }
        Some(Self(cron))
    }
}

table! {
    /// Times at which a run starts repeatedly.
    pub struct Schedule {
        /// Five fields, in UTC: `0 8 * * mon-fri`. A list is allowed.
        pub cron: Cron,
    }
}

/// One instance that a run may use.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum InstanceSelector {
    Name { name: String },
    Hostname { hostname: String },
    Member { fleet: ResourceReference, instance: u32 },
}

struct NonEmptyName(String);

impl Decode for NonEmptyName {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let word = text(node, cx)?;
        if word.is_empty() { cx.invalid(node, "must not be empty") } else { Some(Self(word.to_owned())) }
    }
}

impl Decode for InstanceSelector {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if !is_map(node) {
            return NonEmptyName::decode(node, cx).map(|name| Self::Name { name: name.0 });
        }
        if node.entry("fleet").is_some() || node.entry("instance").is_some() {
            check_keys(node, &["fleet", "instance"], cx);
            let fleet = required_field(node, "fleet", cx);
            let instance = required_field(node, "instance", cx);
            return Some(Self::Member { fleet: fleet?, instance: instance? });
        }
        if node.entry("hostname").is_some() {
            check_keys(node, &["hostname"], cx);
            return required_field(node, "hostname", cx)
                .map(|NonEmptyName(hostname)| Self::Hostname { hostname });
        }
        check_keys(node, &["name"], cx);
        required_field(node, "name", cx).map(|NonEmptyName(name)| Self::Name { name })
    }
}

/// Instances that a run may use: at least one.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct InstanceSelectors(pub Vec<InstanceSelector>);

impl Decode for InstanceSelectors {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let list = Vec::decode(node, cx)?;
        if list.is_empty() { cx.invalid(node, "at least one instance is required") } else { Some(Self(list)) }
    }
}

/// A number from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Fraction(pub f64);

impl Decode for Fraction {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let n = f64::decode(node, cx)?;
        if (0.0..=1.0).contains(&n) {
            Some(Self(n))
        } else {
            cx.out_of_range(node, format!("must be between 0 and 1, not {n}"))
        }
    }
}

table! {
    /// Options of one backend.
    pub struct BackendOptions {
        /// Backend that the options apply to.
        pub backend as "type": OptionsBackend = OptionsBackend::VastAi,
        /// Order of the offers.
        pub offer_order: Option<OfferOrder> = None,
        /// Excludes hosts below this reliability.
        pub min_reliability: Option<Fraction> = None,
        /// Excludes hosts below this score.
        pub min_score: Option<Int<0, { i64::MAX }>> = None,
    }
}

/// Options of backends, at most one entry for each backend.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct AllBackendOptions(pub Vec<BackendOptions>);

impl Decode for AllBackendOptions {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let list: Vec<BackendOptions> = Vec::decode(node, cx)?;
        if list.len() > OptionsBackend::ALL.len() {
            return cx.fail(Diagnosis::new(
                Code::Conflict,
                node.span,
                "only one entry per backend is allowed",
            ));
        }
        Some(Self(list))
    }
}

table! {
    /// Properties that select instances; also part of fleets.
    pub struct Provisioning {
        /// Backends to request instances from.
        pub backends: Option<Vec<BackendType>> = None,
        /// Regions to request instances from. Case is ignored.
        pub regions: Option<Vec<String>> = None,
        /// Availability zones to request instances from.
        pub availability_zones: Option<Vec<String>> = None,
        /// Instance types of the cloud.
        pub instance_types: Option<Vec<String>> = None,
        /// Reservation or capacity block of the cloud.
        pub reservation: Option<String> = None,
        /// Spot instances, on-demand instances, or either (`auto`). Default: on demand.
        pub spot_policy: Option<SpotPolicy> = None,
        /// Retry policy: `true`, `false`, or the events and the time limit. Default: no retries.
        pub retry: Option<RetrySetting> = None,
        /// Maximum price per hour, in dollars.
        pub max_price: Option<PositiveNumber> = None,
        /// Time after which an idle instance is terminated. Default: 5 minutes for runs, 3 days for fleets.
        pub idle_duration: IdleDuration = IdleDuration(None),
        /// Labels for billing and search.
        pub tags: Option<Tags> = None,
        /// Options of individual backends. They have no effect and produce a warning.
        pub backend_options: Option<AllBackendOptions> = None,
    }
}

table! {
    /// All properties of a profile.
    pub struct ProfileProperties {
        /// Maximum duration of a run. Default: no limit.
        pub max_duration: OffableDuration = OffableDuration::Unset,
        /// Grace period of the commands after the run is stopped, before they are killed. Default: 5 minutes.
        pub stop_duration: OffableDuration = OffableDuration::Unset,
        /// Permission to create new instances. Default: `reuse-or-create`.
        pub creation_policy: Option<CreationPolicy> = None,
        /// Stops runs that do not use their GPUs.
        pub utilization_policy: Option<UtilizationPolicy> = None,
        /// Order in which the nodes of a task start.
        pub startup_order: Option<StartupOrder> = None,
        /// Condition under which a multi-node task is done.
        pub stop_criteria: Option<StopCriteria> = None,
        /// Starts the run at these times.
        pub schedule: Option<Schedule> = None,
        /// Fleets of this project that the run may use.
        pub fleets: Option<Vec<ResourceReference>> = None,
        /// Restricts the run to these instances.
        pub instances: Option<InstanceSelectors> = None,
        /// Image for runs that name none, on instances that allow no plain processes.
        pub default_image: Option<String> = None,
    }
    flatten {
        pub provisioning: Provisioning,
    }
    title = "ProfileProperties";
}

table! {
    /// A named set of properties.
    pub struct Profile {
        /// Name to select the profile by.
        pub name: String = String::new(),
        /// Uses this profile if no other is selected.
        pub default: bool = false,
    }
    flatten {
        pub properties: ProfileProperties,
    }
}

table! {
    /// The file `profiles.yml`.
    pub struct Profiles {
        /// Profiles, with unique names.
        pub profiles: Vec<Profile>,
    }
    check = Self::check;
}

impl Profiles {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        let Some(Value::Seq(items)) = node.field("profiles").map(|list| &list.value) else { return };
        for (index, (profile, item)) in self.profiles.iter().zip(items).enumerate() {
            let earlier = &self.profiles[..index];
            if profile.name.is_empty() {
                cx.under("profiles", |cx| {
                    cx.at_index(index, |cx| cx.missing(item, "name", "missing field `name`"))
                });
            } else if earlier.iter().any(|other| other.name == profile.name) {
                let message = format!("duplicate profile `{}`", profile.name);
                cx.problem(
                    Diagnosis::new(Code::Conflict, item.key_span("name"), message)
                        .at(format!("profiles[{index}].name")),
                );
            }
            if profile.default && earlier.iter().any(|other| other.default) {
                let message = "only one profile can be the default";
                cx.problem(
                    Diagnosis::new(Code::Conflict, item.key_span("default"), message)
                        .at(format!("profiles[{index}].default")),
                );
            }
        }
    }

    /// Returns the profile of that name, or the default profile if no name is passed.
    pub fn select(&self, name: Option<&str>) -> Result<Option<&Profile>, String> {
        let Some(name) = name else { return Ok(self.profiles.iter().find(|profile| profile.default)) };
        self.profiles.iter().find(|profile| profile.name == name).map(Some).ok_or_else(|| {
            let known = self.profiles.iter().map(|profile| profile.name.as_str());
            match closest(name, known) {
                Some(other) => format!("no profile `{name}`; did you mean `{other}`?"),
                None => format!("no profile `{name}`"),
            }
        })
    }
}

impl ProfileProperties {
    /// Returns these properties where set, and those of `base` elsewhere.
    #[must_use]
    pub fn or(&self, base: &Self) -> Self {
        let (p, q) = (&self.provisioning, &base.provisioning);
        let offable = |a: OffableDuration, b: OffableDuration| if a.is_set() { a } else { b };
        Self {
            max_duration: offable(self.max_duration, base.max_duration),
            stop_duration: offable(self.stop_duration, base.stop_duration),
            creation_policy: self.creation_policy.or(base.creation_policy),
            utilization_policy: self.utilization_policy.clone().or_else(|| base.utilization_policy.clone()),
            startup_order: self.startup_order.or(base.startup_order),
            stop_criteria: self.stop_criteria.or(base.stop_criteria),
            schedule: self.schedule.clone().or_else(|| base.schedule.clone()),
            fleets: self.fleets.clone().or_else(|| base.fleets.clone()),
            instances: self.instances.clone().or_else(|| base.instances.clone()),
            default_image: self.default_image.clone().or_else(|| base.default_image.clone()),
            provisioning: Provisioning {
                backends: p.backends.clone().or_else(|| q.backends.clone()),
                regions: p.regions.clone().or_else(|| q.regions.clone()),
                availability_zones: p.availability_zones.clone().or_else(|| q.availability_zones.clone()),
                instance_types: p.instance_types.clone().or_else(|| q.instance_types.clone()),
                reservation: p.reservation.clone().or_else(|| q.reservation.clone()),
                spot_policy: p.spot_policy.or(q.spot_policy),
                retry: p.retry.clone().or_else(|| q.retry.clone()),
                max_price: p.max_price.or(q.max_price),
                idle_duration: IdleDuration(p.idle_duration.0.or(q.idle_duration.0)),
                tags: p.tags.clone().or_else(|| q.tags.clone()),
                backend_options: p.backend_options.clone().or_else(|| q.backend_options.clone()),
            },
        }
    }
}

impl Provisioning {
    /// Returns the keys that are set: fleets of SSH hosts allow none.
    pub(crate) fn set_keys(node: &Node) -> Vec<&'static str> {
        let mut keys = Vec::new();
        <Self as super::decode::Fields>::keys(&mut keys);
        keys.retain(|key| node.field(key).is_some());
        keys
    }
}

deserialize_by_decoding!(
    RetrySetting,
    Cron,
    InstanceSelector,
    InstanceSelectors,
    Fraction,
    AllBackendOptions
);

schema_literal! {
    RetrySetting, "Retry" => generator { "anyOf": [{ "type": "boolean" }, subschema::<RetryPolicy>(generator)] };
    Cron, "Cron" => generator { "allOf": [subschema::<OneOrMany>(generator)] };
    InstanceSelector, "InstanceSelector" => generator { "anyOf": [
        { "type": "string", "minLength": 1 },
        { "type": "object", "required": ["name"], "additionalProperties": false,
          "properties": { "name": { "type": "string", "minLength": 1 } } },
        { "type": "object", "required": ["hostname"], "additionalProperties": false,
          "properties": { "hostname": { "type": "string", "minLength": 1 } } },
        { "type": "object", "required": ["fleet", "instance"], "additionalProperties": false, "properties": {
            "fleet": subschema::<ResourceReference>(generator), "instance": { "type": "integer", "minimum": 0 } } },
    ] };
    InstanceSelectors, "Instances" => generator {
        "type": "array", "minItems": 1, "items": subschema::<InstanceSelector>(generator) };
    Fraction, "Fraction" => _g { "type": "number", "minimum": 0, "maximum": 1 };
    AllBackendOptions, "AllBackendOptions" => generator {
        "type": "array", "maxItems": 1, "items": subschema::<BackendOptions>(generator) };
}
