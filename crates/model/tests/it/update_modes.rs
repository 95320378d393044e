//! Effect of a change of each field of a configuration on a run or a fleet that exists. The list is compared with the
//! schema, so that a new field is not forgotten: the difference of `update_modes.txt` is what is decided about it.

use std::fmt::Write as _;

use serde_json::{Value, json};
use windlass_model::plan::diff::{self, FieldChange, ForbiddenChange, UpdateMode};

const SCHEMA: &str = include_str!("../../../../schema/windlass.schema.json");
const LIST: &str = include_str!("update_modes.txt");

type Compare = fn(&Value, &Value) -> Result<Vec<FieldChange>, ForbiddenChange>;

/// Name in the schema, value of `type`, and comparison of two configurations.
const KINDS: [(&str, &str, Compare); 4] = [
    ("DevEnvironment", "dev-environment", diff::diff_run_configuration),
    ("Fleet", "fleet", diff::diff_fleet),
    ("Service", "service", diff::diff_run_configuration),
    ("Task", "task", diff::diff_run_configuration),
];

fn effect(kind: &str, field: &str, compare: Compare) -> &'static str {
    // Neither of the two can be read, so no default is filled in on one side only.
    let before = json!({ "type": kind, "resources": [] });
    let mut after = before.clone();
    after[field] = json!("a value that nothing has");
    match compare(&before, &after).as_deref() {
        Ok([FieldChange { mode: UpdateMode::InPlace, .. }]) => "in place",
        Ok([FieldChange { mode: UpdateMode::Rolling, .. }]) => "replica by replica",
        Err(ForbiddenChange { path }) if path == field => "only after a stop",
        other => panic!("{kind} {field}: {other:?}"),
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a test may look at the world; the model may not")]
fn the_effect_of_a_change_of_every_field_is_listed() {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let mut found = String::new();
    for (name, kind, compare) in KINDS {
        let fields = schema["definitions"][name]["properties"].as_object().unwrap();
        for field in fields.keys().filter(|field| *field != "type") {
            writeln!(found, "{kind} {field}: {}", effect(kind, field, compare)).unwrap();
        }
    }
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/update_modes.txt"), found).unwrap();
        return;
    }
    assert_eq!(found, LIST, "run it with UPDATE=1, and read the difference");
}
