//! `$X` and `${X}` in values that the client interprets: replaced once, from the variables of the file.
//!
//! An unknown name stays unchanged. An inserted value is never parsed again.

use std::collections::BTreeMap;

use crate::config::yaml::{Entry, Node, Scalar, Value};

/// Returns the text with every known variable replaced.
pub(super) fn substitute_text(text: &str, vars: &BTreeMap<String, String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        let (name, len) = match after.strip_prefix('{') {
            Some(inner) => match inner.find('}') {
                Some(end) => (&inner[..end], end + 2),
                None => ("", 0),
            },
            None => {
                let end = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                let name = &after[..end.unwrap_or(after.len())];
                (name, name.len())
            }
        };
        match vars.get(name) {
            Some(value) => {
                out.push_str(value);
                rest = &after[len..];
            }
            None => {
                out.push('$');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}

/// Returns the tree with the variables in every scalar and key replaced.
pub(super) fn substitute_tree(node: &Node, vars: &BTreeMap<String, String>) -> Node {
    let value = match &node.value {
        Value::Null => Value::Null,
        Value::Scalar(scalar) => {
            Value::Scalar(Scalar { text: substitute_text(&scalar.text, vars), plain: scalar.plain })
        }
        Value::Seq(items) => Value::Seq(items.iter().map(|item| substitute_tree(item, vars)).collect()),
        Value::Map(entries) => Value::Map(
            entries
                .iter()
                .map(|entry| Entry {
                    key: substitute_text(&entry.key, vars),
                    key_span: entry.key_span,
                    value: substitute_tree(&entry.value, vars),
                })
                .collect(),
        ),
    };
    Node { value, span: node.span }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_variables_are_substituted_once_and_unknown_ones_are_kept() {
        let vars = BTreeMap::from([
            ("A".to_owned(), "$B".to_owned()),
            ("B".to_owned(), "two".to_owned()),
            ("A_B".to_owned(), "both".to_owned()),
        ]);
        let cases = [
            ("x/$A/y", "x/$B/y"),
            ("${B}s", "twos"),
            ("$A_B-$B", "both-two"),
            ("$C ${C} ${ $", "$C ${C} ${ $"),
            ("no dollars", "no dollars"),
            ("$B$B", "twotwo"),
        ];
        for (before, after) in cases {
            assert_eq!(substitute_text(before, &vars), after, "{before}");
        }
    }
}
