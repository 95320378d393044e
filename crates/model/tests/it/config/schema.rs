//! The committed schema is the generated one, and agrees with the parser.

use std::path::{Path, PathBuf};

use serde_json::Value;
use windlass_model::config::{self, yaml};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[expect(clippy::disallowed_methods, reason = "the schema and the examples are files")]
fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

#[expect(clippy::disallowed_methods, reason = "`UPDATE=1` writes the file anew")]
fn keep(name: &str, generated: &Value) {
    let path = root().join("schema").join(name);
    let text = serde_json::to_string_pretty(generated).unwrap() + "\n";
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    assert!(read(&path) == text, "schema/{name} is stale: run the tests with UPDATE=1");
}

#[test]
fn the_committed_schema_is_the_generated_one() {
    keep("windlass.schema.json", &config::schema());
    keep("profiles.schema.json", &config::profiles_schema());
}

/// Converts the tree to JSON as an editor sees it, with YAML 1.1 scalars resolved.
fn to_json(node: &yaml::Node) -> Value {
    use windlass_model::config::yaml_scalars::ScalarValue;
    match &node.value {
        yaml::Value::Null => Value::Null,
        yaml::Value::Seq(items) => items.iter().map(to_json).collect(),
        yaml::Value::Map(entries) => entries.iter().map(|e| (e.key.clone(), to_json(&e.value))).collect(),
        yaml::Value::Scalar(scalar) => match scalar.meaning() {
            ScalarValue::Null => Value::Null,
            ScalarValue::Bool(b) => b.into(),
            ScalarValue::Int(n) => n.into(),
            ScalarValue::Float(n) => n.into(),
            ScalarValue::Str => scalar.text.clone().into(),
        },
    }
}

/// Validates against enough of draft-07 for our schema; patterns are left to editors.
fn valid(schema: &Value, value: &Value, root: &Value) -> bool {
    let Some(map) = schema.as_object() else { return schema != &Value::Bool(false) };
    let each = |key: &str| map.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    map.iter().all(|(word, rule)| match word.as_str() {
        "$ref" => valid(root.pointer(&rule.as_str().unwrap()[1..]).unwrap(), value, root),
        "allOf" => each("allOf").iter().all(|s| valid(s, value, root)),
        "anyOf" => each("anyOf").iter().any(|s| valid(s, value, root)),
        "oneOf" => each("oneOf").iter().filter(|s| valid(s, value, root)).count() == 1,
        "const" => value == rule,
        "enum" => each("enum").contains(value),
        "type" => match rule.as_str() {
            Some(kind) => is_kind(kind, value),
            None => each("type").iter().any(|kind| is_kind(kind.as_str().unwrap(), value)),
        },
        "minimum" => value.as_f64().is_none_or(|n| n >= rule.as_f64().unwrap()),
        "maximum" => value.as_f64().is_none_or(|n| n <= rule.as_f64().unwrap()),
        "exclusiveMinimum" => value.as_f64().is_none_or(|n| n > rule.as_f64().unwrap()),
        "required" => value
            .as_object()
            .is_none_or(|o| each("required").iter().all(|key| o.contains_key(key.as_str().unwrap()))),
        "properties" => value.as_object().is_none_or(|o| {
            o.iter().all(|(key, item)| rule.get(key).is_none_or(|schema| valid(schema, item, root)))
        }),
        "additionalProperties" => value.as_object().is_none_or(|o| {
            let known = map.get("properties").and_then(Value::as_object);
            o.iter().all(|(key, item)| known.is_some_and(|k| k.contains_key(key)) || valid(rule, item, root))
        }),
        "items" => value.as_array().is_none_or(|items| items.iter().all(|item| valid(rule, item, root))),
        _ => true,
    })
}

fn is_kind(kind: &str, value: &Value) -> bool {
    match kind {
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|n| n.fract() == 0.0),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "object" => value.is_object(),
        "array" => value.is_array(),
        "null" => value.is_null(),
        other => panic!("unknown type {other}"),
    }
}

fn yaml_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder);
    let paths = entries.into_iter().flatten().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = paths.filter(|path| path.extension().is_some_and(|ext| ext == "yml")).collect();
    files.sort();
    files
}

#[test]
fn the_schema_accepts_what_the_reader_accepts() {
    let schema = config::schema();
    let mut files = yaml_files(&root().join("examples"));
    files.extend(yaml_files(&root().join("../shared/corpus/dstack")));
    let mut accepted = 0;
    for path in files {
        let text = read(&path);
        let Ok(parsed) = config::parse(&text) else { continue };
        accepted += 1;
        assert!(valid(&schema, &to_json(&parsed.node), &schema), "{}", path.display());
        let printed = serde_json::to_value(&parsed.configuration).unwrap();
        let reread = config::parse(&printed.to_string()).unwrap();
        assert_eq!(reread.configuration, parsed.configuration, "{}", path.display());
    }
    assert!(accepted >= 8, "only {accepted} files");
}

#[test]
fn the_schema_refuses_invalid_configurations() {
    let schema = config::schema();
    for text in [
        "type: task\ncomands: [x]",
        "type: tsak\ncommands: [x]",
        "commands: [x]",
        "type: task\ncommands: x",
        "type: task\npriority: 101",
        "type: service\nimage: a",
        "type: fleet\nnodes: 1\nplacement: close",
        "type: volume\nbackend: aws\nsize: 1GB",
        "type: task\nresources: {gpu: {cuont: 1}}",
    ] {
        assert!(!valid(&schema, &to_json(&yaml::read(text).unwrap()), &schema), "{text}");
    }
}

#[test]
fn every_example_configuration_parses() {
    let files = yaml_files(&root().join("examples"));
    assert!(files.len() >= 8);
    for path in files {
        let text = read(&path);
        if let Err(problems) = config::parse(&text) {
            panic!("{}", config::render(&problems, &path.display().to_string(), &text));
        }
    }
}
