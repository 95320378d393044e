//! Quantities with a short syntax: durations, memory, ranges, positive numbers, one-or-many.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Serialize, Serializer};

use super::{
    config_macros::{deserialize_by_decoding, schema_literal},
    decode::{Ctx, Decode, check_keys, excerpt, is_map, optional_field, parse_integer, scalar, text},
    schema,
    yaml::{Node, Scalar, Value},
    yaml_scalars::ScalarValue,
};
use crate::resources::{Gb, Range};

/// Parses `90`, `30s`, `5m`, `2h`, `3d` or `1w`, in seconds.
pub fn parse_duration(text: &str) -> Result<i64, String> {
    let bad = || format!("`{}` is not a duration such as 90, 30s, 5m, 2h, 3d or 1w", excerpt(text));
    let trimmed = text.trim();
    let (amount, unit) = match trimmed.find(|c: char| !c.is_ascii_digit()) {
        None => (trimmed, 1),
        Some(at) => {
            let unit = match trimmed[at..].trim() {
                "s" => 1,
                "m" => 60,
                "h" => 3_600,
                "d" => 86_400,
                "w" => 604_800,
                _ => return Err(bad()),
            };
            (&trimmed[..at], unit)
        }
    };
    let amount: i64 = amount.parse().map_err(|_| bad())?;
    amount.checked_mul(unit).ok_or_else(bad)
}

/// Parses a size in gibibytes: `16` and `16GB` are 16, `512MB` is 0.5, `1TB` is 1024.
pub fn parse_memory(text: &str) -> Result<Gb, String> {
    let bad = || format!("`{}` is not a size such as 512MB, 16GB or 1TB", excerpt(text));
    let compact: String =
        text.chars().filter(|c| !c.is_whitespace()).collect::<String>().to_ascii_uppercase();
    let (amount, factor) = match compact.find(|c: char| c.is_ascii_alphabetic()) {
        None => (compact.as_str(), 1.0),
        Some(at) => match &compact[at..] {
            "MB" => (&compact[..at], 1.0 / 1024.0),
            "GB" => (&compact[..at], 1.0),
            "TB" => (&compact[..at], 1024.0),
            _ => return Err(bad()),
        },
    };
    let valid = amount.starts_with(|c: char| c.is_ascii_digit())
        && amount.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let amount: f64 = valid.then(|| amount.parse().ok()).flatten().ok_or_else(bad)?;
    if amount.is_finite() { Ok(amount * factor) } else { Err(bad()) }
}

/// One end of a range.
pub trait Bound: PartialOrd + Copy {
    const WHAT: &'static str;
    fn parse(text: &str) -> Result<Self, String>;
}

impl Bound for u32 {
    const WHAT: &'static str = "count";
    fn parse(text: &str) -> Result<Self, String> {
        let whole = text.split_once('.').filter(|(_, f)| !f.is_empty() && f.bytes().all(|b| b == b'0'));
        let digits = whole.map_or(text, |(n, _)| n);
        digits.parse().map_err(|_| format!("`{}` is not a whole number of at least 0", excerpt(text)))
    }
}

impl Bound for Gb {
    const WHAT: &'static str = "size";
    fn parse(text: &str) -> Result<Self, String> {
        parse_memory(text)
    }
}

/// Parses `4` (exactly), `4..`, `..8` or `4..8`.
pub fn parse_range<T: Bound>(text: &str) -> Result<Range<T>, String> {
    let compact: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let end = |text: &str| if text.is_empty() { Ok(None) } else { T::parse(text).map(Some) };
    let range = match compact.split_once("..") {
        None if compact.is_empty() => return Err("expected a number or a range".to_owned()),
        None => Range::exactly(T::parse(&compact)?),
        Some((min, max)) => Range { min: end(min)?, max: end(max)? },
    };
    check_range(&range)?;
    Ok(range)
}

fn check_range<T: Bound>(range: &Range<T>) -> Result<(), String> {
    match (range.min, range.max) {
        (None, None) => Err("a range requires at least one bound".to_owned()),
        (Some(min), Some(max)) if min > max => Err("the lower bound is above the upper bound".to_owned()),
        (Some(_) | None, Some(_)) | (Some(_), None) => Ok(()),
    }
}

/// An end of a range inside `{min: …, max: …}`.
struct RangeEnd<T>(T);

impl<T: Bound> Decode for RangeEnd<T> {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        match T::parse(text(node, cx)?) {
            Ok(value) => Some(Self(value)),
            Err(reason) => cx.invalid(node, reason),
        }
    }
}

impl<T: Bound> Decode for Range<T> {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if is_map(node) {
            check_keys(node, &["min", "max"], cx);
            return decode_min_max(node, cx);
        }
        if !matches!(node.value, Value::Scalar(_)) {
            return cx.wrong_type(node, &format!("a {} or a range such as 4..8", T::WHAT));
        }
        match parse_range(text(node, cx)?) {
            Ok(range) => Some(range),
            Err(reason) => cx.invalid(node, reason),
        }
    }
}

/// Decodes `min` and `max` of a mapping that may have other keys.
fn decode_min_max<T: Bound>(node: &Node, cx: &mut Ctx) -> Option<Range<T>> {
    let min: Option<Option<RangeEnd<T>>> = optional_field(node, "min", cx, || None);
    let max: Option<Option<RangeEnd<T>>> = optional_field(node, "max", cx, || None);
    let range = Range { min: min?.map(|end| end.0), max: max?.map(|end| end.0) };
    match check_range(&range) {
        Ok(()) => Some(range),
        Err(reason) => cx.invalid(node, reason),
    }
}

impl JsonSchema for Range<u32> {
    fn schema_name() -> Cow<'static, str> {
        "CountRange".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let end = json_schema!({ "type": ["integer", "null"], "minimum": 0 });
        range_schema(&end, r"^\s*(\d+\s*(\.\.\s*(\d+)?)?|\.\.\s*\d+)\s*$")
    }
}

impl JsonSchema for Range<Gb> {
    fn schema_name() -> Cow<'static, str> {
        "SizeRange".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let end = json_schema!({ "type": ["number", "string", "null"] });
        range_schema(&end, r"^[0-9.\sMmGgTtBb]+$")
    }
}

fn range_schema(end: &Schema, pattern: &str) -> Schema {
    json_schema!({ "anyOf": [
        { "type": "number", "minimum": 0 },
        { "type": "string", "pattern": pattern },
        { "type": "object", "properties": { "min": end, "max": end }, "additionalProperties": false },
    ] })
}

/// A size in gibibytes: `512MB`, `16GB`, `1TB`, or a bare number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct MemorySize(pub Gb);

impl Decode for MemorySize {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        match parse_memory(text(node, cx)?) {
            Ok(gb) => Some(Self(gb)),
            Err(reason) => cx.invalid(node, reason),
        }
    }
}

/// A duration in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Seconds(pub i64);

fn decode_seconds(node: &Node, word: &Scalar, cx: &mut Ctx) -> Option<i64> {
    if let Some(n) = parse_integer(word) {
        return if n >= 0 { Some(n) } else { cx.out_of_range(node, format!("must be at least 0, not {n}")) };
    }
    match parse_duration(&word.text) {
        Ok(n) => Some(n),
        Err(reason) => cx.invalid(node, reason),
    }
}

impl Decode for Seconds {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        match scalar(node) {
            Some(word) if !matches!(word.meaning(), ScalarValue::Bool(_)) => {
                decode_seconds(node, word, cx).map(Self)
            }
            Some(_) | None => cx.wrong_type(node, "a duration such as 90 or 5m"),
        }
    }
}

/// A limit that can be switched off: `off` or `false` removes it, `true` or null keeps the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OffableDuration {
    #[default]
    Unset,
    Off,
    Seconds(i64),
}

impl OffableDuration {
    pub const fn is_set(self) -> bool {
        !matches!(self, Self::Unset)
    }
}

impl Serialize for OffableDuration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Unset => serializer.serialize_none(),
            Self::Off => serializer.serialize_str("off"),
            Self::Seconds(n) => serializer.serialize_i64(*n),
        }
    }
}

impl Decode for OffableDuration {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let word = match &node.value {
            Value::Null => return Some(Self::Unset),
            Value::Scalar(word) => word,
            Value::Seq(_) | Value::Map(_) => return cx.wrong_type(node, "a duration or `off`"),
        };
        match (word.meaning(), word.text.as_str()) {
            (ScalarValue::Bool(true), _) => Some(Self::Unset),
            (ScalarValue::Bool(false), _) | (_, "off") => Some(Self::Off),
            _ => decode_seconds(node, word, cx).map(Self::Seconds),
        }
    }
}

/// Maximum idle time; -1 (`off`) means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct IdleDuration(pub Option<i64>);

impl Decode for IdleDuration {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if scalar(node).and_then(parse_integer) == Some(-1) {
            return Some(Self(Some(-1)));
        }
        OffableDuration::decode(node, cx).map(|value| match value {
            OffableDuration::Unset => Self(None),
            OffableDuration::Off => Self(Some(-1)),
            OffableDuration::Seconds(n) => Self(Some(n)),
        })
    }
}

/// Maximum time without a connection to a dev environment; `off` is the same as not set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct InactivityDuration(pub Option<i64>);

impl Decode for InactivityDuration {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        OffableDuration::decode(node, cx).map(|value| match value {
            OffableDuration::Unset | OffableDuration::Off => Self(None),
            OffableDuration::Seconds(n) => Self(Some(n)),
        })
    }
}

/// A number above zero.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct PositiveNumber(pub f64);

impl Decode for PositiveNumber {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let n = f64::decode(node, cx)?;
        if n > 0.0 { Some(Self(n)) } else { cx.out_of_range(node, format!("must be above 0, not {n}")) }
    }
}

/// One text or a list; printed as it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    pub fn as_slice(&self) -> &[String] {
        match self {
            Self::One(word) => std::slice::from_ref(word),
            Self::Many(words) => words,
        }
    }
}

impl Decode for OneOrMany {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        match &node.value {
            Value::Seq(_) => Vec::decode(node, cx).map(Self::Many),
            Value::Null | Value::Scalar(_) | Value::Map(_) => String::decode(node, cx).map(Self::One),
        }
    }
}

deserialize_by_decoding!(
    MemorySize,
    Seconds,
    OffableDuration,
    IdleDuration,
    InactivityDuration,
    PositiveNumber,
    OneOrMany
);

const DURATION: &str = r"^\s*\d+\s*[smhdw]?\s*$";

schema_literal! {
    MemorySize, "Memory" => _g { "type": ["number", "string"], "pattern": r"^\s*[0-9.]+\s*([MmGgTt][Bb])?\s*$" };
    Seconds, "Duration" => _g { "anyOf": [{ "type": "integer", "minimum": 0 }, { "type": "string", "pattern": DURATION }] };
    OffableDuration, "OffableDuration" => _g { "anyOf": [
        { "type": "integer", "minimum": 0 }, { "type": "string", "pattern": DURATION },
        { "const": "off" }, { "type": ["boolean", "null"] }] };
    IdleDuration, "IdleDuration" => _g { "anyOf": [
        { "type": "integer", "minimum": -1 }, { "type": "string", "pattern": DURATION },
        { "const": "off" }, { "type": ["boolean", "null"] }] };
    InactivityDuration, "InactivityDuration" => generator {
        "allOf": [schema::subschema::<OffableDuration>(generator)] };
    PositiveNumber, "Positive" => _g { "type": "number", "exclusiveMinimum": 0 };
    OneOrMany, "OneOrMany" => _g { "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" } }] };
}
