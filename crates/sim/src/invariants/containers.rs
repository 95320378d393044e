//! Invariants of the container queue's log.

use std::collections::BTreeMap;

use serde_json::Value;

const TRANSITIONS: [(&str, &str); 7] = [
    ("Queued", "Locked"),
    ("Queued", "Cancelled"),
    ("Locked", "Queued"),
    ("Locked", "Running"),
    ("Locked", "Cancelled"),
    ("Running", "Complete"),
    ("Running", "Cancelled"),
];

/// Returns the violations in a log of the queue: illegal changes, skipped or reused attempts, containers that did not
/// end, or more than once.
pub fn find_violations(history: &[Value], records: &BTreeMap<String, Value>) -> Vec<String> {
    let mut found = Vec::new();
    let mut ends: BTreeMap<&str, usize> = BTreeMap::new();
    let mut locks: BTreeMap<&str, u64> = BTreeMap::new();
    for row in history {
        let uuid = row["object_uuid"].as_str().unwrap_or_default();
        let (old, new) = (&row["properties"]["old_attributes"], &row["properties"]["new_attributes"]);
        let (Some(before), Some(after)) = (old["state"].as_str(), new["state"].as_str()) else { continue };
        if !records.contains_key(uuid) || before == after {
            continue;
        }
        if !TRANSITIONS.contains(&(before, after)) {
            found.push(format!("{uuid} went from {before} to {after}"));
        }
        if is_final(new) {
            *ends.entry(uuid).or_default() += 1;
        }
        if after == "Locked" {
            let attempt = new["attempt"].as_u64().unwrap_or(0);
            let last = locks.insert(uuid, attempt).unwrap_or(0);
            if attempt != last + 1 {
                found.push(format!("{uuid} has attempt {attempt} after {last}"));
            }
        }
    }
    let odd = records.keys().filter(|uuid| ends.get(uuid.as_str()) != Some(&1));
    found.extend(odd.map(|uuid| format!("{uuid} ended {} times", ends.get(uuid.as_str()).unwrap_or(&0))));
    found
}

pub fn is_final(record: &Value) -> bool {
    record["state"] == "Complete" || record["state"] == "Cancelled"
}
