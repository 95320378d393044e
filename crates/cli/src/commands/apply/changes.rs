//! What differs between what runs and what is wanted: field by field, as people write them. Pure.

use serde_json::Value;

/// Longer values are cut.
const VALUE_MAX: usize = 60;
/// Fields whose values may be secrets.
const HIDDEN: [&str; 2] = ["env", "registry_auth"];

/// A line for each field that differs. An absent field and a null one are the same.
pub(super) fn lines(old: &Value, new: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    compare("", old, new, &mut lines);
    lines
}

fn compare(path: &str, old: &Value, new: &Value, lines: &mut Vec<String>) {
    if old == new {
        return;
    }
    let nothing = Value::Null;
    if let (Some(before), Some(after)) = (old.as_object(), new.as_object()) {
        let mut names: Vec<&String> = before.keys().chain(after.keys()).collect();
        names.sort();
        names.dedup();
        for name in names {
            let below = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            compare(&below, before.get(name).unwrap_or(&nothing), after.get(name).unwrap_or(&nothing), lines);
        }
        return;
    }
    if let (Some(before), Some(after)) = (old.as_array(), new.as_array()) {
        for index in 0..before.len().max(after.len()) {
            let below = format!("{path}[{index}]");
            compare(
                &below,
                before.get(index).unwrap_or(&nothing),
                after.get(index).unwrap_or(&nothing),
                lines,
            );
        }
        return;
    }
    let hidden = path.split(['.', '[']).any(|part| HIDDEN.contains(&part));
    let shown = |value: &Value| if hidden { "(hidden)".to_owned() } else { cut(&value.to_string()) };
    lines.push(match (old.is_null(), new.is_null()) {
        (true, _) => format!("+ {path}: {}", shown(new)),
        (_, true) => format!("- {path}: {}", shown(old)),
        (false, false) => format!("~ {path}: {} → {}", shown(old), shown(new)),
    });
}

fn cut(text: &str) -> String {
    if text.chars().count() <= VALUE_MAX {
        return text.to_owned();
    }
    text.chars().take(VALUE_MAX - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::lines;

    #[test]
    fn each_field_that_differs_has_a_line_and_secrets_none() {
        let old =
            json!({"commands": ["a", "b"], "env": {"TOKEN": "s3cret", "B": "1"}, "nodes": 1, "name": null});
        let new = json!({"commands": ["a", "c", "d"], "env": {"TOKEN": "other", "B": "1"}, "priority": 3});
        assert_eq!(
            lines(&old, &new),
            [
                r#"~ commands[1]: "b" → "c""#,
                r#"+ commands[2]: "d""#,
                "~ env.TOKEN: (hidden) → (hidden)",
                "- nodes: 1",
                "+ priority: 3",
            ]
        );
        assert!(lines(&old, &old).is_empty());
    }
}
