//! Ports: `8080`, `80:8080`, `*:8080`.

use serde::Serialize;

use super::{
    config_macros::{deserialize_by_decoding, schema_literal},
    decode::{Ctx, Decode, check_keys, excerpt, is_map, optional_field, required_field, text},
    error::{Code, Diagnosis},
    yaml::Node,
};

/// A port of the container, and the local port that it is forwarded to. No local port means any free one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PortMapping {
    pub local_port: Option<u16>,
    pub container_port: u16,
}

/// Ports of the windlass agents inside a container; never opened for users.
pub const RESERVED_PORTS: std::ops::RangeInclusive<u16> = 10_000..=10_999;

fn parse_port(text: &str) -> Result<u16, String> {
    let number = text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten();
    match number {
        Some(0) | None => Err(format!("`{}` is not a port between 1 and 65535", excerpt(text))),
        Some(port) => Ok(port),
    }
}

impl PortMapping {
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        match text.split_once(':') {
            None => parse_port(text).map(|port| Self { local_port: Some(port), container_port: port }),
            Some((local, container)) => {
                let local_port = if local == "*" { None } else { Some(parse_port(local)?) };
                Ok(Self { local_port, container_port: parse_port(container)? })
            }
        }
    }
}

struct PortNumber(u16);

impl Decode for PortNumber {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let n = i64::decode(node, cx)?;
        match u16::try_from(n) {
            Ok(n) if n > 0 => Some(Self(n)),
            Ok(_) | Err(_) => cx.out_of_range(node, format!("must be between 1 and 65535, not {n}")),
        }
    }
}

fn decode_object(node: &Node, cx: &mut Ctx) -> Option<PortMapping> {
    check_keys(node, &["local_port", "container_port"], cx);
    let local: Option<Option<PortNumber>> = optional_field(node, "local_port", cx, || None);
    let container: Option<PortNumber> = required_field(node, "container_port", cx);
    Some(PortMapping { local_port: local?.map(|port| port.0), container_port: container?.0 })
}

impl Decode for PortMapping {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if is_map(node) {
            return decode_object(node, cx);
        }
        match Self::parse(text(node, cx)?) {
            Ok(mapping) => Some(mapping),
            Err(reason) => cx.fail(Diagnosis::new(Code::OutOfRange, node.span, reason)),
        }
    }
}

/// Port that a service listens on. The part before the colon is kept but has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct ServicePort(pub PortMapping);

impl Decode for ServicePort {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if is_map(node) {
            return decode_object(node, cx).map(Self);
        }
        let word = text(node, cx)?;
        match PortMapping::parse(word) {
            Ok(PortMapping { local_port: None, .. }) => {
                cx.invalid(node, "a service has no local port; use the container port alone")
            }
            Ok(mapping) if word.contains(':') => Some(Self(mapping)),
            Ok(mapping) => Some(Self(PortMapping { local_port: Some(80), ..mapping })),
            Err(reason) => cx.fail(Diagnosis::new(Code::OutOfRange, node.span, reason)),
        }
    }
}

deserialize_by_decoding!(PortMapping, ServicePort);

schema_literal! {
    PortMapping, "Port" => _g { "anyOf": [
        { "type": "integer", "minimum": 1, "maximum": 65535 },
        { "type": "string", "pattern": "^([0-9]+|\\*):[0-9]+$" },
        { "type": "object", "required": ["container_port"], "additionalProperties": false, "properties": {
            "local_port": { "type": ["integer", "null"], "minimum": 1, "maximum": 65535 },
            "container_port": { "type": "integer", "minimum": 1, "maximum": 65535 } } },
    ] };
    ServicePort, "ServicePort" => _g { "anyOf": [
        { "type": "integer", "minimum": 1, "maximum": 65535 },
        { "type": "string", "pattern": "^[0-9]+:[0-9]+$" },
        { "type": "object", "required": ["container_port"], "additionalProperties": false, "properties": {
            "local_port": { "type": ["integer", "null"], "minimum": 1, "maximum": 65535 },
            "container_port": { "type": "integer", "minimum": 1, "maximum": 65535 } } },
    ] };
}
