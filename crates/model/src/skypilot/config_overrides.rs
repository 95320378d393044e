//! `config`, and its old name `experimental.config_overrides`: settings of the other system that a task overrides.
//!
//! Those with a counterpart here are applied; each of the others causes a warning.

use super::ParseNotes;
use crate::{
    config::{
        decode::excerpt,
        yaml::{Entry, Node, Value},
    },
    resources::Gb,
};

/// Overrides with a counterpart.
#[derive(Debug, Default)]
pub(super) struct ConfigOverrides {
    /// Size of shared memory: `--shm-size` in `docker.run_options`.
    pub(super) shm_size: Option<Gb>,
}

/// Reads the overrides of a task, and reports those without effect.
pub(super) fn decode(document: &Node, notes: &mut ParseNotes) -> ConfigOverrides {
    let mut found = ConfigOverrides::default();
    let old = document.field("experimental").and_then(|node| node.field("config_overrides"));
    read("config", document.field("config"), &mut found, notes);
    read("experimental.config_overrides", old, &mut found, notes);
    for entry in
        entries(document.field("experimental")).iter().filter(|entry| entry.key != "config_overrides")
    {
        warn("experimental", entry, notes);
    }
    found
}

fn entries(node: Option<&Node>) -> &[Entry] {
    match node.map(|node| &node.value) {
        Some(Value::Map(entries)) => entries,
        Some(Value::Null | Value::Scalar(_) | Value::Seq(_)) | None => &[],
    }
}

fn read(above: &str, node: Option<&Node>, found: &mut ConfigOverrides, notes: &mut ParseNotes) {
    for entry in entries(node) {
        if entry.key != "docker" {
            warn(above, entry, notes);
            continue;
        }
        for entry in entries(Some(&entry.value)) {
            if entry.key == "run_options" {
                run_options(above, entry, found, notes);
            } else {
                warn(&format!("{above}.docker"), entry, notes);
            }
        }
    }
}

fn warn(above: &str, entry: &Entry, notes: &mut ParseNotes) {
    let message = format!("`{above}.{}` has no effect: it configures another system", excerpt(&entry.key));
    notes.warn(entry.key_span, format!("{above}.{}", entry.key), message);
}

fn run_options(above: &str, entry: &Entry, found: &mut ConfigOverrides, notes: &mut ParseNotes) {
    let mut texts = Vec::new();
    match &entry.value.value {
        Value::Seq(items) => texts.extend(items.iter().map(|item| (item, item.span))),
        Value::Scalar(_) | Value::Map(_) | Value::Null => texts.push((&entry.value, entry.key_span)),
    }
    for (node, span) in texts {
        let text = match &node.value {
            Value::Scalar(word) => word.text.trim(),
            Value::Null | Value::Seq(_) | Value::Map(_) => "",
        };
        let size = text.strip_prefix("--shm-size").and_then(|rest| rest.strip_prefix(['=', ' ']));
        match size.and_then(docker_size) {
            Some(size) => found.shm_size = Some(size),
            None => {
                let path = format!("{above}.docker.run_options");
                let message = format!(
                    "`{}` in `{path}` has no effect: only `--shm-size=SIZE` is supported",
                    excerpt(text)
                );
                notes.warn(span, path, message);
            }
        }
    }
}

/// Parses a size such as `64m` or `2g` in gibibytes. Without a unit it is in bytes.
fn docker_size(text: &str) -> Option<Gb> {
    let lower = text.trim().to_ascii_lowercase();
    let lower = lower.strip_suffix('b').unwrap_or(&lower);
    let (number, factor) = match lower.chars().last()? {
        'k' => (&lower[..lower.len() - 1], 1024.0 * 1024.0),
        'm' => (&lower[..lower.len() - 1], 1024.0),
        'g' => (&lower[..lower.len() - 1], 1.0),
        _ => (lower, 1024.0 * 1024.0 * 1024.0),
    };
    let number: f64 = number.parse().ok()?;
    (number.is_finite() && number > 0.0).then_some(number / factor)
}
