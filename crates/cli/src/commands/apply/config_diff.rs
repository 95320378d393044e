//! Differences between a running configuration and a new one, field by field, in the notation of configurations. Pure.

use serde_json::Value;

/// Maximum length of a value in characters; longer values are truncated.
const VALUE_MAX: usize = 60;
/// Number of characters shown before the first difference of two truncated values.
const CONTEXT_CHARS: usize = 12;
/// Substrings of variable names whose values are hidden.
const SECRET_NAMES: [&str; 7] = ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "KEY", "CREDENTIAL", "AUTH"];

/// Returns a line for each field that differs. An absent field equals a null one.
pub(super) fn render_changes(old: &Value, new: &Value) -> Vec<String> {
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
    let hidden = is_secret(path);
    let shown =
        |value: &Value| if hidden { "(hidden)".to_owned() } else { truncate_from(&value.to_string(), 0) };
    lines.push(match (old.is_null(), new.is_null()) {
        (true, _) => format!("+ {path}: {}", shown(new)),
        (_, true) => format!("- {path}: {}", shown(old)),
        (false, false) if hidden => format!("~ {path}: changed (hidden)"),
        (false, false) => {
            let (old, new) = truncate_pair(&old.to_string(), &new.to_string());
            format!("~ {path}: {old} → {new}")
        }
    });
}

/// Returns whether the value at a path is a credential, or a variable whose name suggests one.
fn is_secret(path: &str) -> bool {
    if let Some((_, name)) =
        path.split_once("env.").filter(|(before, _)| before.is_empty() || before.ends_with('.'))
    {
        let name = name.to_ascii_uppercase();
        return SECRET_NAMES.iter().any(|part| name.contains(part));
    }
    path.ends_with("registry_auth.password")
}

/// Truncates two different values so that the difference stays visible.
fn truncate_pair(old: &str, new: &str) -> (String, String) {
    let longest = old.chars().count().max(new.chars().count());
    if longest <= VALUE_MAX {
        return (old.to_owned(), new.to_owned());
    }
    let same = old.chars().zip(new.chars()).take_while(|(left, right)| left == right).count();
    let from = same.saturating_sub(CONTEXT_CHARS);
    // A prefix shorter than the context is not replaced by an ellipsis.
    let from = if from < CONTEXT_CHARS { 0 } else { from };
    (truncate_from(old, from), truncate_from(new, from))
}

/// Returns the part of a text from a character index on, truncated.
fn truncate_from(text: &str, from: usize) -> String {
    let rest = text.chars().skip(from);
    let start = if from > 0 { "…" } else { "" };
    if rest.clone().count() <= VALUE_MAX {
        return format!("{start}{}", rest.collect::<String>());
    }
    format!("{start}{}…", rest.take(VALUE_MAX - 1).collect::<String>())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::render_changes;

    #[test]
    fn diff_shows_one_line_per_changed_field_and_hides_only_secrets() {
        let old = json!({"commands": ["a", "b"], "env": {"HF_TOKEN": "s3cret", "B": "1"}, "nodes": 1, "name": null,
                   "registry_auth": {"username": "a", "password": "x"}});
        let new = json!({"commands": ["a", "c", "d"], "env": {"HF_TOKEN": "other", "B": "2"}, "priority": 3,
                         "registry_auth": {"username": "b", "password": "y"}});
        assert_eq!(
            render_changes(&old, &new),
            [
                r#"~ commands[1]: "b" → "c""#,
                r#"+ commands[2]: "d""#,
                r#"~ env.B: "1" → "2""#,
                "~ env.HF_TOKEN: changed (hidden)",
                "- nodes: 1",
                "+ priority: 3",
                "~ registry_auth.password: changed (hidden)",
                r#"~ registry_auth.username: "a" → "b""#,
            ]
        );
        assert!(render_changes(&old, &old).is_empty());
    }

    #[test]
    fn diff_shortens_long_values_around_the_difference() {
        let long = |end: &str| json!({ "commands": [format!("{}{end}", "python train.py --data /mnt/data ".repeat(4))] });
        let lines = render_changes(&long("--lr 1"), &long("--lr 2"));
        assert_eq!(lines, [r#"~ commands[0]: …t/data --lr 1" → …t/data --lr 2""#]);
        let start = |first: &str| json!({ "a": format!("{first}{}", "x".repeat(100)) });
        let line = super::render_changes(&start("1"), &start("2")).remove(0);
        assert!(line.starts_with("~ a: \"1xxx") && line.contains("x… → \"2xxx"), "{line}");
    }
}
