//! Environment variables: a mapping, or a list of `K=V` and `K`.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer, ser::SerializeMap as _};

use super::{
    config_macros::{deserialize_by_decoding, schema_literal},
    decode::{Ctx, Decode, excerpt, text},
    error::{Code, Diagnosis},
    yaml::{Node, Value},
};

/// Environment variables of a run, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Env(pub BTreeMap<String, EnvValue>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EnvValue {
    Value(String),
    /// Only the name is set: the client inserts the value from its environment.
    FromClient,
}

impl Env {
    /// Returns the names without a value; a run cannot start while there are any.
    pub fn unresolved(&self) -> Vec<&str> {
        self.0
            .iter()
            .filter(|(_, value)| **value == EnvValue::FromClient)
            .map(|(name, _)| name.as_str())
            .collect()
    }

    /// Sets a variable, even if the configuration does not name it.
    pub fn set(&mut self, name: &str, value: &str) {
        self.0.insert(name.to_owned(), EnvValue::Value(value.to_owned()));
    }

    /// Resolves names without a value; those that `look_up` does not find stay unresolved.
    pub fn resolve(&mut self, mut find: impl FnMut(&str) -> Option<String>) {
        for (name, value) in &mut self.0 {
            if *value == EnvValue::FromClient
                && let Some(found) = find(name)
            {
                *value = EnvValue::Value(found);
            }
        }
    }

    /// Returns the variables that have a value.
    pub fn values(&self) -> BTreeMap<String, String> {
        let resolved = self.0.iter().filter_map(|(name, value)| match value {
            EnvValue::Value(value) => Some((name.clone(), value.clone())),
            EnvValue::FromClient => None,
        });
        resolved.collect()
    }
}

/// Returns whether the name matches `[a-zA-Z_][a-zA-Z0-9_]*`.
pub fn is_env_name(name: &str) -> bool {
    !name.starts_with(|c: char| c.is_ascii_digit())
        && !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

impl Decode for Env {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        match &node.value {
            Value::Map(entries) => {
                let decoded: Vec<_> = entries
                    .iter()
                    .map(|entry| {
                        cx.under(entry.key.clone(), |cx| {
                            let value = decode_value(&entry.value, cx);
                            if entry.key.is_empty() || entry.key.contains(['=', '\0', '\n']) {
                                let message =
                                    format!("invalid environment variable name `{}`", excerpt(&entry.key));
                                return cx.fail(Diagnosis::new(Code::InvalidValue, entry.key_span, message));
                            }
                            value.map(|value| (entry.key.clone(), value))
                        })
                    })
                    .collect();
                decoded.into_iter().collect::<Option<_>>().map(Self)
            }
            Value::Seq(items) => decode_list(items, cx),
            Value::Null | Value::Scalar(_) => cx.wrong_type(node, "a mapping or a list of `NAME=value`"),
        }
    }
}

/// Decodes a value of the mapping form: text, or the `{"key": …}` that clients send for an unresolved name.
fn decode_value(node: &Node, cx: &mut Ctx) -> Option<EnvValue> {
    if node.entry("key").is_some() {
        return Some(EnvValue::FromClient);
    }
    if node.value == Value::Null {
        let message = "a variable in a mapping requires a value";
        let hint = "to pass it from your environment, use the list form: `- NAME`";
        return cx.fail(Diagnosis::new(Code::WrongType, node.span, message).hint(hint));
    }
    text(node, cx).map(|value| EnvValue::Value(value.to_owned()))
}

fn decode_list(items: &[Node], cx: &mut Ctx) -> Option<Env> {
    let mut env = BTreeMap::new();
    let mut valid = true;
    for (index, item) in items.iter().enumerate() {
        let entry = cx.at_index(index, |cx| {
            let word = text(item, cx)?;
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, EnvValue::Value(value.to_owned())),
                None => (word, EnvValue::FromClient),
            };
            if !is_env_name(name) {
                let message = format!("`{}` is not of the form `NAME` or `NAME=value`", excerpt(word));
                let hint = "names consist of letters, digits and `_`, and do not start with a digit";
                return cx.fail(Diagnosis::new(Code::InvalidValue, item.span, message).hint(hint));
            }
            Some((name.to_owned(), value))
        });
        match entry {
            None => valid = false,
            Some((name, value)) => {
                if env.insert(name.clone(), value).is_some() {
                    valid = false;
                    let message = format!("duplicate variable `{name}`");
                    cx.at_index(index, |cx| cx.problem(Diagnosis::new(Code::Conflict, item.span, message)));
                }
            }
        }
    }
    valid.then_some(Env(env))
}

impl Serialize for Env {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            match value {
                EnvValue::Value(value) => map.serialize_entry(name, value)?,
                EnvValue::FromClient => map.serialize_entry(name, &BTreeMap::from([("key", name)]))?,
            }
        }
        map.end()
    }
}

deserialize_by_decoding!(Env);

schema_literal! {
    Env, "Env" => _g { "anyOf": [
        { "type": "array", "items": { "type": "string", "pattern": "^([a-zA-Z_][a-zA-Z0-9_]*)(=[\\s\\S]*$|$)" } },
        { "type": "object", "additionalProperties": { "type": ["string", "number"] } },
    ] };
}
