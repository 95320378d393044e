//! Decoding of a tree into typed values, with every problem collected.
//!
//! A decoder that fails reports why and returns `None`; its caller continues with the next field, so one pass over a
//! file reports all of its problems.

use std::{borrow::Cow, collections::BTreeMap};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::{
    error::{Code, Diagnosis, SourceSpan, summary},
    yaml::{Node, Scalar, Value},
    yaml_scalars::ScalarValue,
};

/// Treatment of unknown keys and nulls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeMode {
    /// Files that users write: an unknown key is a mistake.
    Strict,
    /// JSON from clients: a newer client may send unknown keys, and writes null for "not set".
    Lenient,
}

/// A type that can be decoded from a tree.
pub trait Decode: Sized {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self>;
}

/// A type that is a set of named fields. It can stand alone or share a mapping with other sets.
pub trait Fields: Sized {
    fn keys(keys: &mut Vec<&'static str>);
    fn decode_fields(node: &Node, cx: &mut Ctx) -> Option<Self>;
    fn write_fields<M: serde::ser::SerializeMap>(&self, map: &mut M) -> Result<(), M::Error>;
    fn properties(generator: &mut SchemaGenerator, into: &mut SchemaProperties);
}

/// Properties of an object schema under construction.
#[derive(Default)]
pub struct SchemaProperties {
    pub properties: serde_json::Map<String, serde_json::Value>,
    pub required: Vec<&'static str>,
}

enum PathSegment {
    Key(Cow<'static, str>),
    Index(usize),
}

/// Maximum number of problems reported for one file. More are not useful, and an untrusted file could produce a
/// million.
pub const PROBLEMS_MAX: usize = 100;

/// Current path of the decoder, and the problems found so far.
pub struct Ctx {
    mode: DecodeMode,
    path: Vec<PathSegment>,
    problems: Vec<Diagnosis>,
    unreported_count: usize,
}

impl Ctx {
    pub fn new(mode: DecodeMode) -> Self {
        Self { mode, path: Vec::new(), problems: Vec::new(), unreported_count: 0 }
    }

    pub fn is_strict(&self) -> bool {
        self.mode == DecodeMode::Strict
    }

    /// Returns the problems, in source order.
    pub fn into_problems(mut self) -> Vec<Diagnosis> {
        self.problems.sort_by_key(|problem| problem.span.start);
        if self.unreported_count > 0 {
            let message = format!("{} more problems are not shown", self.unreported_count);
            self.problems.push(Diagnosis::new(Code::TooLarge, SourceSpan::NONE, message));
        }
        self.problems
    }

    /// Returns whether further problems are only counted.
    pub(crate) fn is_full(&self) -> bool {
        self.problems.len() >= PROBLEMS_MAX
    }

    /// Runs `body` with `key` appended to the path.
    pub fn under<T>(&mut self, key: impl Into<Cow<'static, str>>, body: impl FnOnce(&mut Self) -> T) -> T {
        self.path.push(PathSegment::Key(key.into()));
        let result = body(self);
        self.path.pop();
        result
    }

    /// Runs `body` with the index of a list item appended to the path.
    pub fn at_index<T>(&mut self, index: usize, body: impl FnOnce(&mut Self) -> T) -> T {
        self.path.push(PathSegment::Index(index));
        let result = body(self);
        self.path.pop();
        result
    }

    fn path(&self) -> String {
        let mut path = String::new();
        for step in &self.path {
            match step {
                PathSegment::Key(key) if path.is_empty() => path.push_str(key),
                PathSegment::Key(key) => path.extend([".", key]),
                PathSegment::Index(index) => path.push_str(&format!("[{index}]")),
            }
        }
        path
    }

    /// Returns the last key on the path: the name of the field in messages.
    pub fn field(&self) -> String {
        let key = self.path.iter().rev().find_map(|step| match step {
            PathSegment::Key(key) => Some(key.to_string()),
            PathSegment::Index(_) => None,
        });
        key.unwrap_or_else(|| "configuration".to_owned())
    }

    pub fn problem(&mut self, diagnosis: Diagnosis) {
        if self.is_full() {
            self.unreported_count += 1;
            return;
        }
        let path = self.path();
        let path = match (path.is_empty(), diagnosis.path.is_empty()) {
            (_, true) => path,
            (true, false) => diagnosis.path.clone(),
            (false, false) => format!("{path}.{}", diagnosis.path),
        };
        self.problems.push(Diagnosis { path, ..diagnosis });
    }

    /// Reports a problem and returns the `None` that the decoder returns in turn.
    pub fn fail<T>(&mut self, diagnosis: Diagnosis) -> Option<T> {
        self.problem(diagnosis);
        None
    }

    /// Reports a value of the wrong shape: `commands` must be a list, not text.
    pub fn wrong_type<T>(&mut self, node: &Node, expected: &str) -> Option<T> {
        let message = format!("`{}` must be {expected}, not {}", self.field(), describe(node));
        let mut diagnosis = Diagnosis::new(Code::WrongType, node.span, message);
        if let Value::Scalar(scalar) = &node.value
            && matches!(scalar.meaning(), ScalarValue::Bool(_))
            && expected.contains("string")
        {
            diagnosis = diagnosis.hint(format!("quote the value to make it a string: \"{}\"", scalar.text));
        }
        self.fail(diagnosis)
    }

    /// Reports a value of the right shape that is not valid for this field.
    pub fn invalid<T>(&mut self, node: &Node, reason: impl AsRef<str>) -> Option<T> {
        let message = format!("invalid `{}`: {}", self.field(), reason.as_ref());
        self.fail(Diagnosis::new(Code::InvalidValue, node.span, message))
    }

    pub fn out_of_range<T>(&mut self, node: &Node, reason: impl AsRef<str>) -> Option<T> {
        let message = format!("`{}` {}", self.field(), reason.as_ref());
        self.fail(Diagnosis::new(Code::OutOfRange, node.span, message))
    }

    /// Reports two settings of one mapping that contradict each other; points at `key`.
    pub fn conflict(&mut self, node: &Node, key: &'static str, message: impl Into<String>) {
        self.problem(Diagnosis::new(Code::Conflict, node.key_span(key), message).at(key));
    }

    pub fn missing(&mut self, node: &Node, key: &'static str, message: impl Into<String>) {
        let start = node.span.start;
        let end = node.span.end;
        self.problem(Diagnosis::new(Code::MissingField, SourceSpan { start, end }, message).at(key));
    }
}

/// Decodes one value, or returns all of its problems.
pub fn decode<T: Decode>(node: &Node, mode: DecodeMode) -> Result<T, Vec<Diagnosis>> {
    let mut cx = Ctx::new(mode);
    let value = T::decode(node, &mut cx);
    let problems = cx.into_problems();
    match value {
        Some(value) if problems.is_empty() => Ok(value),
        Some(_) | None => Err(problems),
    }
}

/// Implements `Deserialize` through `Decode`: reads any JSON and decodes it leniently.
pub(crate) fn from_serde<'de, T: Decode, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    let json = serde_json::Value::deserialize(deserializer)?;
    decode(&Node::from_json(&json), DecodeMode::Lenient).map_err(|e| serde::de::Error::custom(summary(&e)))
}

fn describe(node: &Node) -> String {
    match &node.value {
        Value::Null => "an empty value".to_owned(),
        Value::Seq(_) => "a list".to_owned(),
        Value::Map(_) => "a mapping".to_owned(),
        Value::Scalar(scalar) => match scalar.meaning() {
            ScalarValue::Bool(b) => format!("a boolean ({b})"),
            ScalarValue::Int(_) | ScalarValue::Float(_) => format!("a number ({})", excerpt(&scalar.text)),
            ScalarValue::Str | ScalarValue::Null => format!("`{}`", excerpt(&scalar.text)),
        },
    }
}

/// Shortens a value for use in a one-line message.
pub(crate) fn excerpt(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    if line.len() == text.len() && line.chars().count() <= 60 {
        return text.to_owned();
    }
    let head: String = line.chars().take(57).collect();
    format!("{head}…")
}

/// Returns the known value that is closest to the one written, if it is close.
pub(crate) fn closest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if word.len() > 64 {
        return None;
    }
    let folded = word.to_lowercase().replace('_', "-");
    known
        .into_iter()
        .map(|known| (strsim::damerau_levenshtein(&folded, &known.to_lowercase().replace('_', "-")), known))
        .filter(|(distance, known)| *distance <= 1 + known.len().min(word.len()) / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, known)| known)
}

/// Decodes one of a closed set of values.
pub(crate) fn decode_word<T>(
    node: &Node,
    cx: &mut Ctx,
    known: &[&'static str],
    parse: impl Fn(&str) -> Option<T>,
) -> Option<T> {
    // A value may resolve to a boolean (`off`, `on`) and still be one of the set.
    let Some(scalar) = scalar(node) else { return cx.wrong_type(node, "a string") };
    if let Some(value) = parse(&scalar.text) {
        return Some(value);
    }
    let message = format!("`{}` is not a valid value for `{}`", excerpt(&scalar.text), cx.field());
    let hint = match closest(&scalar.text, known.iter().copied()) {
        Some(word) => format!("did you mean `{word}`?"),
        None => format!("use one of {}", known.join(", ")),
    };
    cx.fail(Diagnosis::new(Code::InvalidValue, node.span, message).hint(hint))
}

/// Fields of `resources` that are written one level too high.
const RESOURCE_KEYS: [&str; 5] = ["cpu", "gpu", "memory", "disk", "shm_size"];

/// Rejects unknown keys. Lenient mode ignores them.
pub fn check_keys(node: &Node, known: &[&'static str], cx: &mut Ctx) {
    let Value::Map(entries) = &node.value else { return };
    if !cx.is_strict() {
        return;
    }
    let free: Vec<&str> = known.iter().copied().filter(|key| node.entry(key).is_none()).collect();
    for entry in entries.iter().filter(|entry| !known.contains(&entry.key.as_str())) {
        if cx.is_full() {
            // The search for a similar key is the expensive part, and its result would not be shown.
            cx.unreported_count += 1;
            continue;
        }
        let message = format!("unknown field `{}`", excerpt(&entry.key));
        let mut diagnosis = Diagnosis::new(Code::UnknownField, entry.key_span, message).at(entry.key.clone());
        let is_resource = known.contains(&"resources") && RESOURCE_KEYS.contains(&entry.key.as_str());
        diagnosis.hint = Some(match closest(&entry.key, free.iter().copied()) {
            _ if is_resource => format!("it is a field of `resources`: `resources: {{{}: …}}`", entry.key),
            Some(key) => format!("did you mean `{key}`?"),
            None => format!("known fields: {}", known.join(", ")),
        });
        cx.problem(diagnosis);
    }
}

/// Requires the node to be a mapping.
pub fn expect_map(node: &Node, cx: &mut Ctx) -> Option<()> {
    match &node.value {
        Value::Map(_) => Some(()),
        Value::Null | Value::Scalar(_) | Value::Seq(_) => cx.wrong_type(node, "a mapping"),
    }
}

/// Decodes a field that may be absent.
pub fn optional_field<T: Decode>(
    node: &Node,
    key: &'static str,
    cx: &mut Ctx,
    default: impl FnOnce() -> T,
) -> Option<T> {
    let Some(entry) = node.entry(key) else { return Some(default()) };
    // Clients write null for "not set" even where only a value makes sense.
    if entry.value.value == Value::Null && !cx.is_strict() {
        return cx.under(key, |cx| {
            let mut quiet = Ctx::new(cx.mode);
            Some(T::decode(&entry.value, &mut quiet).unwrap_or_else(default))
        });
    }
    cx.under(key, |cx| {
        let value = T::decode(&entry.value, cx);
        // A list or mapping is reported at its key: an empty one has no other position.
        if value.is_none() && entry.value.value == Value::Null {
            repoint(cx, entry.key_span);
        }
        value
    })
}

fn repoint(cx: &mut Ctx, span: SourceSpan) {
    if let Some(last) = cx.problems.last_mut() {
        last.span = span;
    }
}

/// Decodes a field that must be present.
pub(crate) fn required_field<T: Decode>(node: &Node, key: &'static str, cx: &mut Ctx) -> Option<T> {
    if node.entry(key).is_none() {
        cx.missing(node, key, format!("missing field `{key}`"));
        return None;
    }
    optional_field(node, key, cx, || None).flatten_required(node, key, cx)
}

trait FlattenRequired<T> {
    fn flatten_required(self, node: &Node, key: &'static str, cx: &mut Ctx) -> Option<T>;
}

impl<T> FlattenRequired<T> for Option<Option<T>> {
    fn flatten_required(self, node: &Node, key: &'static str, cx: &mut Ctx) -> Option<T> {
        let inner = self?;
        if inner.is_none() {
            cx.missing(node, key, format!("field `{key}` must not be null"));
        }
        inner
    }
}

impl<T: Decode> Decode for Option<T> {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if node.value == Value::Null { Some(None) } else { T::decode(node, cx).map(Some) }
    }
}

impl<T: Decode> Decode for Vec<T> {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let Value::Seq(items) = &node.value else { return cx.wrong_type(node, "a list") };
        let decoded: Vec<_> =
            items.iter().enumerate().map(|(i, item)| cx.at_index(i, |cx| T::decode(item, cx))).collect();
        decoded.into_iter().collect()
    }
}

impl<T: Decode> Decode for BTreeMap<String, T> {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let Value::Map(entries) = &node.value else { return cx.wrong_type(node, "a mapping") };
        let decoded: Vec<_> = entries
            .iter()
            .map(|entry| {
                let value = cx.under(entry.key.clone(), |cx| T::decode(&entry.value, cx));
                value.map(|value| (entry.key.clone(), value))
            })
            .collect();
        decoded.into_iter().collect()
    }
}

/// Returns the text of a scalar: a string, or a number where text is expected.
pub(crate) fn text<'a>(node: &'a Node, cx: &mut Ctx) -> Option<&'a str> {
    match &node.value {
        Value::Scalar(scalar) if !matches!(scalar.meaning(), ScalarValue::Bool(_)) => Some(&scalar.text),
        Value::Null | Value::Scalar(_) | Value::Seq(_) | Value::Map(_) => cx.wrong_type(node, "a string"),
    }
}

/// Returns the scalar, for fields with a short syntax; `None` for a list or mapping.
pub(crate) fn scalar(node: &Node) -> Option<&Scalar> {
    match &node.value {
        Value::Scalar(scalar) => Some(scalar),
        Value::Null | Value::Seq(_) | Value::Map(_) => None,
    }
}

pub(crate) fn is_map(node: &Node) -> bool {
    matches!(node.value, Value::Map(_))
}

impl Decode for String {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        text(node, cx).map(str::to_owned)
    }
}

impl Decode for bool {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let word = scalar(node).map(|scalar| scalar.text.to_ascii_lowercase());
        match word.as_deref() {
            Some("true" | "yes" | "on" | "1") => Some(true),
            Some("false" | "no" | "off" | "0") => Some(false),
            Some(_) | None => cx.wrong_type(node, "true or false"),
        }
    }
}

/// Returns a whole number, also if written in quotes or as `2.0`.
pub(crate) fn parse_integer(scalar: &Scalar) -> Option<i64> {
    let meaning =
        if scalar.plain { scalar.meaning() } else { super::yaml_scalars::resolve_scalar(scalar.text.trim()) };
    match meaning {
        ScalarValue::Int(n) => Some(n),
        ScalarValue::Float(n) if n.fract() == 0.0 && n.abs() < 9e15 => Some(n as i64),
        ScalarValue::Float(_) | ScalarValue::Null | ScalarValue::Bool(_) | ScalarValue::Str => None,
    }
}

impl Decode for i64 {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        match scalar(node).and_then(parse_integer) {
            Some(n) => Some(n),
            None => cx.wrong_type(node, "a whole number"),
        }
    }
}

impl Decode for u32 {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let n = i64::decode(node, cx)?;
        match Self::try_from(n) {
            Ok(n) => Some(n),
            Err(_) => cx.out_of_range(node, format!("must be between 0 and {}, not {n}", Self::MAX)),
        }
    }
}

impl Decode for f64 {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let number =
            scalar(node).and_then(|scalar| match super::yaml_scalars::resolve_scalar(scalar.text.trim()) {
                ScalarValue::Int(n) => Some(n as Self),
                ScalarValue::Float(n) => Some(n),
                ScalarValue::Str => scalar.text.trim().parse().ok(),
                ScalarValue::Null | ScalarValue::Bool(_) => None,
            });
        match number {
            Some(n) if n.is_finite() => Some(n),
            Some(_) => cx.out_of_range(node, "must be a finite number"),
            None => cx.wrong_type(node, "a number"),
        }
    }
}

/// A whole number with its bounds in the type: parser and schema use the same two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Int<const MIN: i64, const MAX: i64>(pub i64);

impl<const MIN: i64, const MAX: i64> Int<MIN, MAX> {
    pub const fn get(self) -> i64 {
        self.0
    }
}

impl<const MIN: i64, const MAX: i64> Decode for Int<MIN, MAX> {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let n = i64::decode(node, cx)?;
        if (MIN..=MAX).contains(&n) {
            return Some(Self(n));
        }
        let bounds =
            if MAX == i64::MAX { format!("at least {MIN}") } else { format!("between {MIN} and {MAX}") };
        cx.out_of_range(node, format!("must be {bounds}, not {n}"))
    }
}

impl<const MIN: i64, const MAX: i64> JsonSchema for Int<MIN, MAX> {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        format!("Int{MIN}To{MAX}").into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        if MAX == i64::MAX {
            json_schema!({ "type": "integer", "minimum": MIN })
        } else {
            json_schema!({ "type": "integer", "minimum": MIN, "maximum": MAX })
        }
    }
}
