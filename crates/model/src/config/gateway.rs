//! `type: gateway`: the public entry point of services, on separate hosts.

use serde::Serialize;

use super::{
    config_macros::{deserialize_by_decoding, schema_literal, table, words},
    decode::{Ctx, Decode, Int, check_keys, decode_word, expect_map, required_field, text},
    error::{Code, Diagnosis},
    interpolate::{self, ReferenceScope},
    name::{Name, Tags},
    profile::BackendType,
    yaml::Node,
};

words! {
    /// Kind of load balancer.
    pub enum LoadBalancerKind {
        Alb = "alb",
    }
}

table! {
    /// Load balancer of the cloud, in front of the gateway.
    pub struct LoadBalancer {
        pub kind as "type": LoadBalancerKind = LoadBalancerKind::Alb,
    }
}

/// Source of the certificate for HTTPS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum Certificate {
    LetsEncrypt,
    Acm {
        arn: String,
    },
    GcpCm {
        name: String,
    },
    /// PEM files on the gateway host.
    Files {
        chain: String,
        key: String,
    },
}

impl Decode for Certificate {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        expect_map(node, cx)?;
        let Some(kind) = node.entry("type") else {
            cx.missing(node, "type", "missing field `type`");
            return None;
        };
        let known = ["lets-encrypt", "acm", "gcp-cm", "files"];
        let kind = cx.under("type", |cx| {
            decode_word(&kind.value, cx, &known, |w| known.iter().position(|k| *k == w))
        })?;
        match kind {
            0 => {
                check_keys(node, &["type"], cx);
                Some(Self::LetsEncrypt)
            }
            1 => {
                check_keys(node, &["type", "arn"], cx);
                required_field(node, "arn", cx).map(|arn| Self::Acm { arn })
            }
            2 => {
                check_keys(node, &["type", "name"], cx);
                required_field(node, "name", cx).map(|name| Self::GcpCm { name })
            }
            _ => {
                check_keys(node, &["type", "chain", "key"], cx);
                let (chain, key) = (required_field(node, "chain", cx), required_field(node, "key", cx));
                Some(Self::Files { chain: chain?, key: key? })
            }
        }
    }
}

/// Non-empty text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct NonEmptyText(pub String);

impl Decode for NonEmptyText {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let word = text(node, cx)?;
        if word.is_empty() { cx.invalid(node, "must not be empty") } else { Some(Self(word.to_owned())) }
    }
}

table! {
    /// The public entry point of services.
    pub struct Gateway {
        /// Name of the gateway. Generated if absent.
        pub name: Option<Name> = None,
        /// Makes this the default gateway of the project. The first gateway becomes the default in any case.
        pub default: Option<bool> = None,
        /// Backend of the gateway host: `local` or `remote`.
        pub backend: BackendType,
        /// Location of the gateway host; shown in lists.
        pub region: String,
        /// Not supported: rejected when the gateway is applied.
        pub instance_type: Option<NonEmptyText> = None,
        /// Domain of the gateway; services are published at `<run>.<domain>`.
        pub domain: Option<String> = None,
        /// Required by `lets-encrypt`, otherwise without effect; `false` produces a warning.
        pub public_ip: bool = true,
        /// Not supported: rejected when the gateway is applied.
        pub load_balancer: Option<LoadBalancer> = None,
        /// Source of the certificates; `null` disables HTTPS.
        pub certificate: Option<Certificate> = Some(Certificate::LetsEncrypt),
        /// Number of gateway hosts. Default: 1.
        pub replicas: Option<Int<1, 9>> = None,
        /// Labels for billing and search.
        pub tags: Option<Tags> = None,
    }
    tag = "gateway";
    check = Self::check;
}

impl Gateway {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        let on = |backend| self.backend == backend;
        if self.load_balancer.is_some() && !on(BackendType::Aws) && !on(BackendType::Gcp) {
            cx.conflict(node, "load_balancer", "`load_balancer` is available only on aws and gcp");
        }
        match &self.certificate {
            None => {}
            Some(Certificate::LetsEncrypt) => self.check_lets_encrypt(node, cx),
            Some(Certificate::Acm { .. }) if !on(BackendType::Aws) => {
                cx.conflict(node, "certificate", "a certificate of type `acm` is available only on aws");
            }
            Some(Certificate::GcpCm { .. }) if !on(BackendType::Gcp) => {
                cx.conflict(node, "certificate", "a certificate of type `gcp-cm` is available only on gcp");
            }
            Some(Certificate::GcpCm { .. }) if self.load_balancer.is_none() => {
                cx.conflict(
                    node,
                    "certificate",
                    "a certificate of type `gcp-cm` requires `load_balancer: {type: alb}`",
                );
            }
            Some(Certificate::Acm { .. } | Certificate::GcpCm { .. } | Certificate::Files { .. }) => {}
        }
        interpolate::check(node, ReferenceScope::Gateway, cx);
    }

    /// Checks that Let's Encrypt can reach the one host that answers for the domain.
    fn check_lets_encrypt(&self, node: &Node, cx: &mut Ctx) {
        let key = if node.entry("certificate").is_some() { "certificate" } else { "type" };
        let hint = "use `certificate: null`, or a certificate of type `files`";
        if !self.public_ip {
            let message = "a lets-encrypt `certificate` requires a public IP address";
            cx.problem(
                Diagnosis::new(Code::Conflict, node.key_span(key), message).at("certificate").hint(hint),
            );
        }
        if self.replicas.is_some_and(|n| n.get() > 1) {
            let message = "a lets-encrypt `certificate` allows only one replica";
            cx.problem(
                Diagnosis::new(Code::Conflict, node.key_span("replicas"), message).at("replicas").hint(hint),
            );
        }
    }
}

deserialize_by_decoding!(Certificate, NonEmptyText);

schema_literal! {
    NonEmptyText, "Word" => _g { "type": "string", "minLength": 1 };
    Certificate, "Certificate" => _g { "oneOf": [
        { "type": "object", "required": ["type"], "additionalProperties": false,
          "properties": { "type": { "const": "lets-encrypt" } } },
        { "type": "object", "required": ["type", "arn"], "additionalProperties": false,
          "properties": { "type": { "const": "acm" }, "arn": { "type": "string" } } },
        { "type": "object", "required": ["type", "name"], "additionalProperties": false,
          "properties": { "type": { "const": "gcp-cm" }, "name": { "type": "string" } } },
        { "type": "object", "required": ["type", "chain", "key"], "additionalProperties": false,
          "properties": { "type": { "const": "files" }, "chain": { "type": "string" }, "key": { "type": "string" } } },
    ] };
}
