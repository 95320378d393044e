//! `service`: the readiness probe, the replicas and the balancing of a service.
//!
//! Only the section itself is decoded here; its conversion to a service is in `service_spec`.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::{ParseNotes, resources::TaskResources, substitute};
use crate::{
    config::{
        decode::{
            Ctx, Decode, Int, check_keys, decode_word, excerpt, expect_map, is_map, optional_field, scalar,
            text,
        },
        error::{Code, Diagnosis},
        yaml::{Node, Scalar, Value},
        yaml_scalars::ScalarValue,
    },
    managed_job::plan::Candidate,
};

pub(super) const KEYS: [&str; 6] =
    ["readiness_probe", "replica_policy", "replicas", "ports", "load_balancing_policy", "tls"];
pub(super) const PROBE_KEYS: [&str; 5] =
    ["path", "post_data", "initial_delay_seconds", "timeout_seconds", "headers"];
pub(super) const POLICY_KEYS: [&str; 10] = [
    "min_replicas",
    "max_replicas",
    "target_qps_per_replica",
    "num_overprovision",
    "queue_length_threshold",
    "base_ondemand_fallback_replicas",
    "dynamic_ondemand_fallback",
    "spot_placer",
    "upscale_delay_seconds",
    "downscale_delay_seconds",
];
pub(super) const TLS_KEYS: [&str; 2] = ["keyfile", "certfile"];
const BALANCING: [&str; 3] = ["round_robin", "least_load", "instance_aware_least_load"];

/// Defaults of the file format, in seconds.
const INITIAL_DELAY: i64 = 1200;
const PROBE_TIMEOUT: i64 = 15;
const UPSCALE_DELAY: i64 = 300;
const DOWNSCALE_DELAY: i64 = 1200;
/// Maximum timeout of a probe, in seconds.
const PROBE_TIMEOUT_MAX: i64 = 300;
const REPLICAS_MAX: i64 = 10_000;

/// A decoded section.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceSection {
    pub probe: ReadinessProbe,
    pub min_replicas: u32,
    pub max_replicas: u32,
    pub target_qps: Option<TargetQps>,
    /// Replicas that are always on on-demand instances, if the others are on spot instances.
    pub base_ondemand: u32,
    /// On-demand instances replace spot instances that are not available.
    pub has_dynamic_fallback: bool,
    pub upscale_delay: i64,
    pub downscale_delay: i64,
    pub port: u16,
    pub balance: Balance,
    /// `resources.priority`.
    pub priority: Option<i32>,
}

/// Request that determines whether a replica is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadinessProbe {
    pub path: String,
    /// Body, as JSON: the request is a POST.
    pub body: Option<String>,
    pub headers: BTreeMap<String, String>,
    /// Seconds that a new replica has to become ready.
    pub initial_delay: i64,
    pub timeout: i64,
}

/// Requests per second that one replica should answer.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetQps {
    Same(f64),
    /// By accelerator: `A100`, or `A100:2`.
    ByAccelerator(BTreeMap<String, f64>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Balance {
    RoundRobin,
    LeastLoad,
}

struct ReplicaPolicy {
    min: u32,
    max: u32,
    target: Option<TargetQps>,
    base_ondemand: u32,
    has_dynamic_fallback: bool,
    upscale_delay: i64,
    downscale_delay: i64,
}

impl ReplicaPolicy {
    const fn fixed(replicas: u32) -> Self {
        Self {
            min: replicas,
            max: replicas,
            target: None,
            base_ondemand: 0,
            has_dynamic_fallback: false,
            upscale_delay: UPSCALE_DELAY,
            downscale_delay: DOWNSCALE_DELAY,
        }
    }
}

/// Decodes the section of a document. `None` without a problem: it cannot run here, and a refusal says why.
pub(super) fn decode(
    document: &Node,
    vars: &BTreeMap<String, String>,
    resources: &TaskResources,
    cx: &mut Ctx,
    notes: &mut ParseNotes,
) -> Option<ServiceSection> {
    let section = document.field("service")?;
    let section = &substitute::substitute_tree(section, vars);
    let candidates = &resources.candidates;
    report_fields_of_jobs(document, notes);
    cx.under("service", |cx| {
        expect_map(section, cx)?;
        check_keys(section, &KEYS, cx);
        let probe = readiness_probe(section, cx);
        let policy = replicas(section, cx, notes);
        let balance = balancing_policy(section, policy.as_ref(), cx);
        tls(section, cx, notes);
        let own_port: Option<Option<Int<1, 65_535>>> = optional_field(section, "ports", cx, || None);
        let own_port = own_port?.and_then(|port| u16::try_from(port.get()).ok());
        let (probe, policy, balance) = (probe?, policy?, balance?);
        let port = port(document, own_port, candidates, notes)?;
        warn_spot(section, &policy, candidates, notes);
        Some(ServiceSection {
            probe,
            min_replicas: policy.min,
            max_replicas: policy.max,
            target_qps: policy.target,
            base_ondemand: policy.base_ondemand,
            has_dynamic_fallback: policy.has_dynamic_fallback,
            upscale_delay: policy.upscale_delay,
            downscale_delay: policy.downscale_delay,
            port,
            balance,
            priority: resources.priority,
        })
    })
}

/// Reports fields of the document that apply to jobs only.
fn report_fields_of_jobs(document: &Node, notes: &mut ParseNotes) {
    for (key, why) in [
        ("max_duration", "it runs until it is stopped"),
        ("deadline", "it runs until it is stopped"),
        ("depends_on", "it starts at once"),
    ] {
        if document.field(key).is_some() {
            let message = format!("`{key}` is not supported in a service: {why}");
            let hint = format!("remove `{key}`, or launch the file as a job, without `service`");
            notes.refuse(document.key_span(key), key, message, Some(hint));
        }
    }
    let resources = document.field("resources");
    for key in ["job_recovery", "spot_recovery"] {
        if let Some(resources) = resources.filter(|resources| resources.field(key).is_some()) {
            let message =
                format!("`{key}` has no effect in a service: replicas that end are always replaced");
            notes.warn(resources.key_span(key), format!("resources.{key}"), message);
        }
    }
}

fn readiness_probe(section: &Node, cx: &mut Ctx) -> Option<ReadinessProbe> {
    let Some(node) = section.field("readiness_probe") else {
        let message = "a service requires `readiness_probe`: the path that a ready replica answers";
        let diagnosis = Diagnosis::new(Code::MissingField, section.span, message).at("readiness_probe");
        return cx.fail(diagnosis.hint("for example `readiness_probe: /health`"));
    };
    cx.under("readiness_probe", |cx| {
        if !is_map(node) {
            return Some(ReadinessProbe {
                path: probe_path(node, cx)?,
                body: None,
                headers: BTreeMap::new(),
                initial_delay: INITIAL_DELAY,
                timeout: PROBE_TIMEOUT,
            });
        }
        check_keys(node, &PROBE_KEYS, cx);
        let Some(path) = node.field("path") else {
            return cx.fail(
                Diagnosis::new(Code::MissingField, node.span, "`readiness_probe` requires `path`").at("path"),
            );
        };
        let path = cx.under("path", |cx| probe_path(path, cx));
        let body = match node.field("post_data") {
            None => Some(None),
            Some(data) => cx.under("post_data", |cx| post_data(data, cx)).map(Some),
        };
        let headers: Option<Option<BTreeMap<String, String>>> = optional_field(node, "headers", cx, || None);
        let delay = seconds(node, "initial_delay_seconds", INITIAL_DELAY, cx);
        let timeout = seconds(node, "timeout_seconds", PROBE_TIMEOUT, cx);
        let timeout = timeout?;
        if !(1..=PROBE_TIMEOUT_MAX).contains(&timeout) {
            let message = format!("`timeout_seconds` must be between 1 and {PROBE_TIMEOUT_MAX}");
            let span = node.key_span("timeout_seconds");
            return cx.fail(Diagnosis::new(Code::OutOfRange, span, message).at("timeout_seconds"));
        }
        Some(ReadinessProbe {
            path: path?,
            body: body?,
            headers: headers?.unwrap_or_default(),
            initial_delay: delay?.max(1),
            timeout,
        })
    })
}

fn probe_path(node: &Node, cx: &mut Ctx) -> Option<String> {
    let path = text(node, cx)?;
    if path.starts_with('/') {
        return Some(path.to_owned());
    }
    cx.invalid(node, format!("`{}` must start with `/`", excerpt(path)))
}

/// Returns the body as JSON: a mapping, or a text that is JSON.
fn post_data(node: &Node, cx: &mut Ctx) -> Option<String> {
    if let Some(word) = scalar(node) {
        let parsed: Result<Json, _> = serde_json::from_str(&word.text);
        return match parsed {
            Ok(value) => Some(value.to_string()),
            Err(error) => cx.invalid(node, format!("it is not JSON: {error}")),
        };
    }
    Some(to_json(node).to_string())
}

fn to_json(node: &Node) -> Json {
    match &node.value {
        Value::Null => Json::Null,
        Value::Seq(items) => items.iter().map(to_json).collect(),
        Value::Map(entries) => {
            let fields = entries.iter().map(|entry| (entry.key.clone(), to_json(&entry.value)));
            Json::Object(fields.collect::<Map<_, _>>())
        }
        Value::Scalar(word) => scalar_json(word),
    }
}

fn scalar_json(word: &Scalar) -> Json {
    match word.meaning() {
        ScalarValue::Null => Json::Null,
        ScalarValue::Bool(value) => json!(value),
        ScalarValue::Int(value) => json!(value),
        ScalarValue::Float(value) => json!(value),
        ScalarValue::Str => json!(word.text),
    }
}

/// Decodes a number of seconds, rounded up.
fn seconds(node: &Node, key: &'static str, default: i64, cx: &mut Ctx) -> Option<i64> {
    let value: Option<f64> = optional_field(node, key, cx, || None)?;
    match value {
        None => Some(default),
        Some(value) if (0.0..=1e9).contains(&value) => Some(whole(value.ceil())),
        Some(value) => {
            let message = format!("`{key}` must be at least 0, not {value}");
            cx.fail(Diagnosis::new(Code::OutOfRange, node.key_span(key), message).at(key))
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the caller checked the range")]
const fn whole(value: f64) -> i64 {
    value as i64
}

type Count = Int<0, REPLICAS_MAX>;

fn count(number: Option<Count>) -> Option<u32> {
    number.and_then(|number| u32::try_from(number.get()).ok())
}

fn replicas(section: &Node, cx: &mut Ctx, notes: &mut ParseNotes) -> Option<ReplicaPolicy> {
    let simple: Option<Option<Count>> = optional_field(section, "replicas", cx, || None);
    let policy = section.field("replica_policy");
    if policy.is_some() && section.field("replicas").is_some() {
        cx.conflict(section, "replicas", "`replicas` and `replica_policy` are mutually exclusive");
        return None;
    }
    let Some(policy) = policy else {
        return Some(ReplicaPolicy::fixed(count(simple?).unwrap_or(1)));
    };
    cx.under("replica_policy", |cx| replica_policy(policy, cx, notes))
}

fn replica_policy(node: &Node, cx: &mut Ctx, notes: &mut ParseNotes) -> Option<ReplicaPolicy> {
    expect_map(node, cx)?;
    check_keys(node, &POLICY_KEYS, cx);
    let min: Option<Option<Count>> = optional_field(node, "min_replicas", cx, || None);
    let max: Option<Option<Count>> = optional_field(node, "max_replicas", cx, || None);
    let target = target_qps(node, cx);
    let base: Option<Option<Count>> = optional_field(node, "base_ondemand_fallback_replicas", cx, || None);
    let dynamic: Option<Option<bool>> = optional_field(node, "dynamic_ondemand_fallback", cx, || None);
    let upscale_delay = seconds(node, "upscale_delay_seconds", UPSCALE_DELAY, cx);
    let downscale_delay = seconds(node, "downscale_delay_seconds", DOWNSCALE_DELAY, cx);
    refuse_policies(node, cx, notes);
    let Some(min) = count(min?) else {
        let message = "`replica_policy` requires `min_replicas`";
        return cx.fail(Diagnosis::new(Code::MissingField, node.span, message).at("min_replicas"));
    };
    let (max, target) = (count(max?), target?);
    if let Some(max) = max.filter(|max| *max < min) {
        let message = format!("`max_replicas` must be at least `min_replicas` ({min}), not {max}");
        let span = node.key_span("max_replicas");
        return cx.fail(Diagnosis::new(Code::OutOfRange, span, message).at("max_replicas"));
    }
    match (max, &target) {
        (None, Some(_)) => {
            let message = "`target_qps_per_replica` requires `max_replicas`";
            let span = node.key_span("target_qps_per_replica");
            return cx.fail(Diagnosis::new(Code::MissingField, span, message).at("max_replicas"));
        }
        (Some(max), None) if max > min => {
            let message = "`max_replicas` above `min_replicas` requires `target_qps_per_replica`";
            let span = node.key_span("max_replicas");
            return cx.fail(Diagnosis::new(Code::MissingField, span, message).at("target_qps_per_replica"));
        }
        (_, _) => {}
    }
    let max = max.unwrap_or(min);
    if target.is_some() && max == min {
        let message = "`target_qps_per_replica` has no effect: `min_replicas` and `max_replicas` are equal";
        notes.warn(
            node.key_span("target_qps_per_replica"),
            "service.replica_policy.target_qps_per_replica",
            message,
        );
    }
    Some(ReplicaPolicy {
        min,
        max,
        target: target.filter(|_| max > min),
        base_ondemand: count(base?).unwrap_or(0),
        has_dynamic_fallback: dynamic?.unwrap_or(false),
        upscale_delay: upscale_delay?,
        downscale_delay: downscale_delay?,
    })
}

/// Refuses the policies that have no counterpart here.
fn refuse_policies(node: &Node, cx: &mut Ctx, notes: &mut ParseNotes) {
    let path = |key: &str| format!("service.replica_policy.{key}");
    let over: Option<Option<Count>> = optional_field(node, "num_overprovision", cx, || None);
    if over.flatten().is_some_and(|count| count.get() > 0) {
        let message =
            "`num_overprovision` is not supported: a service has the replicas that its traffic needs";
        let hint = "raise `min_replicas`, or lower `target_qps_per_replica`".to_owned();
        notes.refuse(node.key_span("num_overprovision"), path("num_overprovision"), message, Some(hint));
    }
    if node.field("queue_length_threshold").is_some() {
        let message = "`queue_length_threshold` is not supported: it applies to pools";
        let hint = "use `target_qps_per_replica`".to_owned();
        let key = "queue_length_threshold";
        notes.refuse(node.key_span(key), path(key), message, Some(hint));
    }
    if let Some(placer) = node.field("spot_placer") {
        let known = ["dynamic_fallback"];
        let parse = |word: &str| word.eq_ignore_ascii_case(known[0]).then_some(());
        if cx.under("spot_placer", |cx| decode_word(placer, cx, &known, parse)).is_some() {
            let message = "`spot_placer` is not supported: offers are chosen by price, and those that were reclaimed are \
                           avoided for a while";
            let hint = "remove it; `dynamic_ondemand_fallback: true` allows on-demand instances".to_owned();
            notes.refuse(node.key_span("spot_placer"), path("spot_placer"), message, Some(hint));
        }
    }
}

fn target_qps(node: &Node, cx: &mut Ctx) -> Option<Option<TargetQps>> {
    let Some(value) = node.field("target_qps_per_replica") else { return Some(None) };
    let positive = |value: f64, node: &Node, cx: &mut Ctx| {
        if value > 0.0 { Some(value) } else { cx.out_of_range(node, "must be greater than 0") }
    };
    cx.under("target_qps_per_replica", |cx| {
        if !is_map(value) {
            let number = f64::decode(value, cx)?;
            return positive(number, value, cx).map(|number| Some(TargetQps::Same(number)));
        }
        let numbers = BTreeMap::<String, f64>::decode(value, cx)?;
        if numbers.is_empty() {
            return cx.invalid(value, "it names no accelerator");
        }
        for number in numbers.values() {
            positive(*number, value, cx)?;
        }
        Some(Some(TargetQps::ByAccelerator(numbers)))
    })
}

impl TargetQps {
    /// Returns the value for a replica with this accelerator.
    pub fn of(&self, accelerator: Option<(&str, u32)>) -> Option<f64> {
        match self {
            Self::Same(number) => Some(*number),
            Self::ByAccelerator(numbers) => {
                let (name, count) = accelerator?;
                let exact = format!("{name}:{count}");
                let find = |wanted: &str| {
                    let found = numbers.iter().find(|(name, _)| name.eq_ignore_ascii_case(wanted));
                    found.map(|(_, number)| *number)
                };
                find(&exact).or_else(|| find(name))
            }
        }
    }
}

fn balancing_policy(section: &Node, policy: Option<&ReplicaPolicy>, cx: &mut Ctx) -> Option<Balance> {
    let Some(node) = section.field("load_balancing_policy") else { return Some(Balance::LeastLoad) };
    let word = cx.under("load_balancing_policy", |cx| {
        decode_word(node, cx, &BALANCING, |word| BALANCING.iter().copied().find(|known| *known == word))
    })?;
    let by_accelerator =
        policy.is_some_and(|policy| matches!(policy.target, Some(TargetQps::ByAccelerator(_))));
    if word == "instance_aware_least_load" && policy.is_some() && !by_accelerator {
        let message =
            "`instance_aware_least_load` requires `target_qps_per_replica` as a mapping of accelerators";
        cx.conflict(section, "load_balancing_policy", message);
        return None;
    }
    // All replicas of a service have the same accelerators here, so load is comparable as it is.
    Some(if word == "round_robin" { Balance::RoundRobin } else { Balance::LeastLoad })
}

fn tls(section: &Node, cx: &mut Ctx, notes: &mut ParseNotes) {
    let Some(node) = section.field("tls") else { return };
    let valid = cx.under("tls", |cx| {
        expect_map(node, cx)?;
        check_keys(node, &TLS_KEYS, cx);
        Some(())
    });
    if valid.is_some() {
        let message = "`tls` is not supported: certificates belong to the gateway that publishes the service";
        let hint = "create a gateway with `certificate: {type: files, chain: …, key: …}`, and remove `tls`"
            .to_owned();
        notes.refuse(section.key_span("tls"), "service.tls", message, Some(hint));
    }
}

/// Returns the port of the service: `service.ports`, or the only one of `resources.ports`.
fn port(document: &Node, own: Option<u16>, candidates: &[Candidate], notes: &mut ParseNotes) -> Option<u16> {
    let open: Vec<u16> = candidates.first().map(|one| one.ports.clone()).unwrap_or_default();
    let (message, hint) = match (own, open.as_slice()) {
        _ if candidates.iter().any(|one| one.ports != open) => (
            "the alternatives in `resources` open different ports".to_owned(),
            "open the same ports in all of them".to_owned(),
        ),
        (Some(port), []) => return Some(port),
        (Some(port), open) if open.contains(&port) => return Some(port),
        (Some(port), _) => (
            format!("`ports` of the service is {port}, which `resources.ports` does not open"),
            format!("add {port} to `resources.ports`"),
        ),
        (None, [port]) => return Some(*port),
        (None, []) => (
            "the service has no port".to_owned(),
            "set `resources.ports` to the port that its replicas listen on".to_owned(),
        ),
        (None, _) => (
            "the service opens several ports".to_owned(),
            "name the one that answers requests in `service.ports`".to_owned(),
        ),
    };
    let span = document.key_span("service");
    notes.refuse(span, "service.ports", message, Some(hint));
    None
}

/// Warns about spot policies of a service without spot replicas.
fn warn_spot(section: &Node, policy: &ReplicaPolicy, candidates: &[Candidate], notes: &mut ParseNotes) {
    if candidates.iter().any(|one| one.spot == Some(true)) {
        return;
    }
    let Some(node) = section.field("replica_policy") else { return };
    let set = [
        ("base_ondemand_fallback_replicas", policy.base_ondemand > 0),
        ("dynamic_ondemand_fallback", policy.has_dynamic_fallback),
    ];
    for (key, _) in set.into_iter().filter(|(_, is_set)| *is_set) {
        let message =
            format!("`{key}` has no effect: the replicas do not use spot instances (`use_spot: true`)");
        notes.warn(node.key_span(key), format!("service.replica_policy.{key}"), message);
    }
}
