//! Request routing of a service: model, gateway, HTTPS, rate limits, probes, scaling.

use serde::Serialize;

use super::{
    config_macros::{deserialize_by_decoding, schema_literal, table, words},
    decode::{
        Ctx, Decode, Int, check_keys, decode_word, excerpt, is_map, optional_field, required_field, scalar,
        text,
    },
    error::{Code, Diagnosis},
    name::ResourceReference,
    quantities::{PositiveNumber, Seconds, parse_range},
    schema::subschema,
    yaml::Node,
};
use crate::resources::Range;

/// Gateway that publishes a service.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum GatewayChoice {
    /// False: none. True: the default one, which must exist.
    Flag(bool),
    Named(ResourceReference),
}

impl Decode for GatewayChoice {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let flag = scalar(node).and_then(|scalar| match scalar.meaning() {
            super::yaml_scalars::ScalarValue::Bool(flag) => Some(flag),
            super::yaml_scalars::ScalarValue::Null
            | super::yaml_scalars::ScalarValue::Int(_)
            | super::yaml_scalars::ScalarValue::Float(_)
            | super::yaml_scalars::ScalarValue::Str => None,
        });
        match flag {
            Some(flag) => Some(Self::Flag(flag)),
            None => ResourceReference::decode(node, cx).map(Self::Named),
        }
    }
}

/// Use of HTTPS by a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Https {
    Flag(bool),
    /// HTTPS if the gateway has a certificate.
    Auto,
}

impl Decode for Https {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if scalar(node).is_some_and(|scalar| scalar.text == "auto") {
            return Some(Self::Auto);
        }
        bool::decode(node, cx).map(Self::Flag)
    }
}

impl Serialize for Https {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Flag(flag) => serializer.serialize_bool(*flag),
            Self::Auto => serializer.serialize_str("auto"),
        }
    }
}

words! {
    /// Task of a model.
    pub enum ModelKind {
        Chat = "chat",
    }
}

/// Model that a service serves, by its protocol.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "format", rename_all = "lowercase")]
pub enum Model {
    OpenAi {
        #[serde(rename = "type")]
        kind: ModelKind,
        name: String,
        prefix: String,
    },
    Tgi {
        #[serde(rename = "type")]
        kind: ModelKind,
        name: String,
        chat_template: Option<String>,
        eos_token: Option<String>,
    },
}

impl Model {
    pub fn name(&self) -> &str {
        match self {
            Self::OpenAi { name, .. } | Self::Tgi { name, .. } => name,
        }
    }
}

const PREFIX: &str = "/v1";

impl Decode for Model {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let kind = ModelKind::Chat;
        if !is_map(node) {
            let name = text(node, cx)?.to_owned();
            return Some(Self::OpenAi { kind, name, prefix: PREFIX.to_owned() });
        }
        let format = node.entry("format").map(|entry| &entry.value);
        let Some(format) = format else {
            cx.missing(node, "format", "missing field `format`");
            return None;
        };
        let known = ["openai", "tgi"];
        let format = cx.under("format", |cx| {
            decode_word(format, cx, &known, |w| known.iter().copied().find(|k| *k == w))
        })?;
        let kind_read = optional_field(node, "type", cx, || kind);
        let name = required_field(node, "name", cx);
        if format == "openai" {
            check_keys(node, &["type", "name", "format", "prefix"], cx);
            let prefix = optional_field(node, "prefix", cx, || PREFIX.to_owned());
            return Some(Self::OpenAi { kind: kind_read?, name: name?, prefix: prefix? });
        }
        check_keys(node, &["type", "name", "format", "chat_template", "eos_token"], cx);
        let chat_template = optional_field(node, "chat_template", cx, || None);
        let eos_token = optional_field(node, "eos_token", cx, || None);
        Some(Self::Tgi {
            kind: kind_read?,
            name: name?,
            chat_template: chat_template?,
            eos_token: eos_token?,
        })
    }
}

/// Number of replicas: a number, or a range with an upper end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Replicas {
    pub min: u32,
    pub max: u32,
}

impl Replicas {
    pub const fn exactly(n: u32) -> Self {
        Self { min: n, max: n }
    }
    pub const fn is_fixed(self) -> bool {
        self.min == self.max
    }
}

impl Decode for Replicas {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let range = if is_map(node) {
            Range::<u32>::decode(node, cx)?
        } else {
            match parse_range::<u32>(text(node, cx)?) {
                Ok(range) => range,
                Err(reason) => return cx.invalid(node, reason),
            }
        };
        match range.max {
            None => cx.invalid(node, "a range of replicas requires an upper bound"),
            Some(max) => Some(Self { min: range.min.unwrap_or(0), max }),
        }
    }
}

words! {
    /// Metric that scaling is based on.
    pub enum Metric {
        /// Requests per second and replica.
        Rps = "rps",
        /// Concurrent requests per replica.
        Concurrency = "concurrency",
        /// Requests that wait for a replica, per replica.
        QueueDepth = "queue-depth",
    }
}

table! {
    /// Rules for adding and removing replicas.
    pub struct Scaling {
        /// Metric that is measured.
        pub metric: Metric,
        /// Target value of the metric per replica.
        pub target: PositiveNumber,
        /// Length of the measured window: 30s, 60s or 300s. Default: 60s.
        pub window: Option<Seconds> = None,
        /// Minimum time before replicas are added.
        pub scale_up_delay: Seconds = Seconds(300),
        /// Minimum time before replicas are removed.
        pub scale_down_delay: Seconds = Seconds(600),
    }
    check = Self::check;
}

impl Scaling {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        if self.window.is_some_and(|window| ![30, 60, 300].contains(&window.0)) {
            let message = "`window` must be 30s, 60s or 300s";
            cx.problem(Diagnosis::new(Code::OutOfRange, node.key_span("window"), message).at("window"));
        }
    }
}

/// Checks that a range of replicas has `scaling`, and that a fixed number has none.
pub(crate) fn check_scaling(replicas: Replicas, scaling: bool, node: &Node, cx: &mut Ctx) {
    if !replicas.is_fixed() && !scaling {
        let message = "a range of `replicas` requires `scaling`";
        cx.problem(Diagnosis::new(Code::MissingField, node.key_span("replicas"), message).at("scaling"));
    }
    if replicas.is_fixed() && scaling {
        cx.conflict(node, "scaling", "`scaling` requires a range of `replicas`, such as 1..4");
    }
}

/// Property by which requests share one rate limit.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum LimitKey {
    IpAddress,
    Header { header: String },
}

impl Decode for LimitKey {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        super::decode::expect_map(node, cx)?;
        let Some(kind) = node.entry("type") else {
            cx.missing(node, "type", "missing field `type`");
            return None;
        };
        let known = ["ip_address", "header"];
        let kind = cx.under("type", |cx| {
            decode_word(&kind.value, cx, &known, |w| known.iter().copied().find(|k| *k == w))
        })?;
        if kind == "ip_address" {
            check_keys(node, &["type"], cx);
            return Some(Self::IpAddress);
        }
        check_keys(node, &["type", "header"], cx);
        let header: String = required_field(node, "header", cx)?;
        let valid = (1..=500).contains(&header.len())
            && header.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
        if !valid {
            let at = node.field("header").unwrap_or(node);
            return cx.under("header", |cx| {
                cx.invalid(at, "a header name consists of at most 500 letters, digits, `-` and `_`")
            });
        }
        Some(Self::Header { header })
    }
}

/// Prefix of a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Prefix(pub String);

impl Decode for Prefix {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let word = text(node, cx)?;
        if !word.starts_with('/')
            || word.contains(|c: char| c.is_whitespace() || matches!(c, '\\' | '{' | '}'))
        {
            return cx.invalid(
                node,
                format!(
                    "`{}` must start with `/` and contain no spaces, backslashes or braces",
                    excerpt(word)
                ),
            );
        }
        if word.len() > 4094 {
            return cx.out_of_range(node, "must have at most 4094 characters");
        }
        Some(Self(word.to_owned()))
    }
}

/// Requests per second: at least one per minute.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Rps(pub f64);

impl Decode for Rps {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let n = f64::decode(node, cx)?;
        if (1.0 / 60.0..=1.5e17).contains(&n) {
            return Some(Self(n));
        }
        cx.out_of_range(node, format!("must be at least 1/60 (one request per minute), not {n}"))
    }
}

table! {
    /// Limit on the rate of requests.
    pub struct RateLimit {
        /// Path prefix that the limit applies to; the longest matching prefix wins.
        pub prefix: Prefix = Prefix("/".to_owned()),
        /// Property by which requests share the limit.
        pub key: LimitKey = LimitKey::IpAddress,
        /// Maximum number of requests per second.
        pub rps: Rps,
        /// Number of requests above the rate that are accepted at once.
        pub burst: Int<0, { i64::MAX }> = Int(0),
    }
}

words! {
    /// Kind of probe.
    pub enum ProbeKind {
        Http = "http",
    }
}

words! {
    /// HTTP method of a probe.
    pub enum Method {
        Get = "get",
        Post = "post",
        Put = "put",
        Delete = "delete",
        Patch = "patch",
        Head = "head",
    }
}

/// Non-empty text of bounded length.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Text<const MAX: usize>(pub String);

impl<const MAX: usize> Decode for Text<MAX> {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let word = text(node, cx)?;
        let chars = word.chars().count();
        if (1..=MAX).contains(&chars) {
            return Some(Self(word.to_owned()));
        }
        cx.out_of_range(node, format!("must have 1 to {MAX} characters, not {chars}"))
    }
}

impl<const MAX: usize> schemars::JsonSchema for Text<MAX> {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> std::borrow::Cow<'static, str> {
        format!("Text{MAX}").into()
    }
    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "minLength": 1, "maxLength": MAX })
    }
}

table! {
    /// HTTP header of a probe.
    pub struct ProbeHeader {
        pub name: Text<256>,
        pub value: Text<2048>,
    }
}

table! {
    /// A request that determines whether a replica is ready.
    pub struct Probe {
        /// Kind of probe.
        pub kind as "type": ProbeKind,
        /// Path of the request. Default: `/`.
        pub url: Option<Text<2048>> = None,
        /// HTTP method of the request. Default: `get`.
        pub method: Option<Method> = None,
        /// HTTP headers of the request, at most 16.
        pub headers: Vec<ProbeHeader> = vec![],
        /// Body of the request; not with `get` and `head`.
        pub body: Option<Text<2048>> = None,
        /// Timeout of the request, from 1s to 5m. Default: 10s.
        pub timeout: Option<Seconds> = None,
        /// Time between requests, at least 1s. Default: 15s.
        pub interval: Option<Seconds> = None,
        /// Number of consecutive successes after which the replica is ready. Default: 1.
        pub ready_after: Option<Int<1, { i64::MAX }>> = None,
        /// Stops probing once the replica is ready.
        pub until_ready: Option<bool> = None,
    }
    check = Self::check;
}

impl Probe {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        if self.body.is_some() && matches!(self.method, None | Some(Method::Get | Method::Head)) {
            cx.conflict(node, "body", "`body` requires a method other than get and head");
        }
        if self.headers.len() > 16 {
            cx.conflict(node, "headers", "at most 16 headers are allowed");
        }
        let mut range =
            |set: Option<Seconds>, key: &'static str, allowed: std::ops::RangeInclusive<i64>, words: &str| {
                if set.is_some_and(|secs| !allowed.contains(&secs.0)) {
                    let message = format!("`{key}` must be {words}");
                    cx.problem(Diagnosis::new(Code::OutOfRange, node.key_span(key), message).at(key));
                }
            };
        range(self.timeout, "timeout", 1..=300, "between 1s and 5m");
        range(self.interval, "interval", 1..=i64::MAX, "at least 1s");
    }
}

deserialize_by_decoding!(GatewayChoice, Https, Model, Replicas, LimitKey, Prefix, Rps);

schema_literal! {
    GatewayChoice, "GatewayChoice" => generator { "anyOf": [{ "type": "boolean" }, subschema::<ResourceReference>(generator)] };
    Https, "Https" => _g { "anyOf": [{ "type": "boolean" }, { "const": "auto" }] };
    Model, "Model" => _g { "anyOf": [
        { "type": "string" },
        { "type": "object", "required": ["name", "format"], "additionalProperties": false, "properties": {
            "type": { "const": "chat" }, "name": { "type": "string" }, "format": { "const": "openai" },
            "prefix": { "type": "string", "default": PREFIX } } },
        { "type": "object", "required": ["name", "format"], "additionalProperties": false, "properties": {
            "type": { "const": "chat" }, "name": { "type": "string" }, "format": { "const": "tgi" },
            "chat_template": { "type": ["string", "null"] }, "eos_token": { "type": ["string", "null"] } } },
    ] };
    Replicas, "Replicas" => generator { "allOf": [subschema::<Range<u32>>(generator)] };
    LimitKey, "LimitKey" => _g { "oneOf": [
        { "type": "object", "required": ["type"], "additionalProperties": false,
          "properties": { "type": { "const": "ip_address" } } },
        { "type": "object", "required": ["type", "header"], "additionalProperties": false, "properties": {
            "type": { "const": "header" },
            "header": { "type": "string", "maxLength": 500, "pattern": "^[a-zA-Z0-9-_]+$" } } },
    ] };
    Prefix, "Prefix" => _g { "type": "string", "maxLength": 4094, "pattern": "^/[^\\s\\\\{}]*$" };
    Rps, "Rps" => _g { "type": "number", "minimum": 1.0 / 60.0 };
}
