//! YAML text of a JSON document.

use std::fmt::Write as _;

use serde_json::Value;

/// Words that YAML 1.1 or 1.2 readers do not take for text.
const RESERVED_WORDS: [&str; 10] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n", "none"];

/// Renders a document in block style. Reading it as YAML gives the same document.
pub fn to_yaml(value: &Value) -> String {
    let mut text = String::new();
    write_value(&mut text, value, 0);
    text.trim_start_matches('\n').trim_start_matches(' ').to_owned()
}

/// Writes a value after its key or dash: a scalar on the same line, a collection below it.
fn write_value(text: &mut String, value: &Value, depth: usize) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (key, value) in fields {
                let _ = write!(text, "\n{:indent$}{}:", "", scalar(key), indent = depth * 2);
                write_value(text, value, depth + 1);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for item in items {
                let _ = write!(text, "\n{:indent$}-", "", indent = depth * 2);
                let start = text.len();
                write_value(text, item, depth + 1);
                // The first field of an object follows its dash.
                let is_nested = matches!(item, Value::Object(fields) if !fields.is_empty());
                if is_nested {
                    text.replace_range(start..start + 1 + (depth + 1) * 2, " ");
                }
            }
        }
        Value::Object(_) => text.push_str(" {}"),
        Value::Array(_) => text.push_str(" []"),
        Value::String(word) => {
            let _ = write!(text, " {}", scalar(word));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {
            let _ = write!(text, " {value}");
        }
    }
}

/// Returns a plain scalar where every YAML reader takes it for text, otherwise a quoted one.
fn scalar(word: &str) -> String {
    let is_plain = word.starts_with(|letter: char| letter.is_ascii_alphabetic())
        && word.chars().all(|letter| letter.is_ascii_alphanumeric() || "_./-".contains(letter))
        && !RESERVED_WORDS.contains(&word.to_ascii_lowercase().as_str());
    // JSON strings are YAML strings.
    if is_plain { word.to_owned() } else { Value::from(word).to_string() }
}

#[cfg(test)]
mod tests {
    use crate::config::yaml::{self, Node, Value as Yaml};
    use serde_json::json;

    use super::*;

    /// The document that a YAML reader sees.
    fn read(node: &Node) -> Value {
        match &node.value {
            Yaml::Null => Value::Null,
            Yaml::Map(entries) => {
                entries.iter().map(|entry| (entry.key.clone(), read(&entry.value))).collect()
            }
            Yaml::Seq(items) => items.iter().map(read).collect(),
            Yaml::Scalar(word) if word.plain => {
                serde_json::from_str(&word.text).unwrap_or_else(|_| word.text.as_str().into())
            }
            Yaml::Scalar(word) => word.text.as_str().into(),
        }
    }

    #[test]
    fn yaml_text_reads_back_as_the_same_document() {
        let words =
            ["", "a b", "true", "No", "12", "1e3", "- x", "a: b", "#", "ü\n\t\"'\\", "2026-01-01", "~", "x."];
        let document = json!({
            "version": 1, "words": words, "12": {"deep": [{"a": [], "b": {}}, [1, [2]], null, {"c": null}]},
            "price": 1.5, "spot": false, "list": [{"name": "x", "items": [{"y": 1}]}], "key with space": -3,
        });
        let text = to_yaml(&document);
        assert_eq!(read(&yaml::read(&text).unwrap()), document, "{text}");
        assert_eq!(to_yaml(&json!({"a": [{"b": 1, "c": "x"}], "d": {}})), "a:\n  - b: 1\n    c: x\nd: {}");
        assert_eq!(to_yaml(&json!([])), "[]");
    }
}
