//! List commands, against a server with no resources and with one.

use crate::{cli_env::CliEnv, snapshot::CliSnapshot};

#[test]
fn an_empty_list_prints_a_hint_instead_of_a_table() {
    let env = CliEnv::new();
    let mut transcript = CliSnapshot::new("lists-empty", &env);
    for thing in ["ps", "fleet", "volume", "gateway", "jobs"] {
        for format in ["table", "json", "jsonl", "name"] {
            transcript.run(&[thing, "-o", format]);
        }
    }
    transcript.end();
    let containers = env.windlass(&["container", "list"]).ok();
    assert_eq!(containers.stdout, "");
    containers.says("No containers. Run `windlass container list --all` to include finished ones.");
}

#[test]
fn delete_is_refused_without_a_terminal_or_yes_flag() {
    let env = CliEnv::new();
    let mut transcript = CliSnapshot::new("delete-unasked", &env);
    transcript.run(&["secret", "set", "SOME", "value"]);
    transcript.run(&["secret", "delete", "SOME"]);
    transcript.run(&["secret", "-o", "name"]);
    for thing in ["volume", "gateway", "fleet"] {
        transcript.run(&[thing, "delete", "some"]);
    }
    transcript.end();
}

/// A new list must be documented.
#[test]
fn every_json_list_is_documented() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let document = std::fs::read_to_string(root.join("../../docs/json.md")).unwrap();
    let mut folders = vec![root.join("src")];
    let mut kinds = std::collections::BTreeSet::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let found = text.split("kind: \"").skip(1).filter_map(|rest| rest.split('"').next());
            kinds.extend(found.map(str::to_owned));
        }
    }
    assert!(kinds.contains("runs"), "{kinds:?}");
    let missing: Vec<_> = kinds.iter().filter(|kind| !document.contains(&format!("| `{kind}` |"))).collect();
    assert!(missing.is_empty(), "`docs/json.md` does not say what a row of {missing:?} is");
}
