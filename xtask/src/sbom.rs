//! Bill of materials: every crate that the binaries contain, as CycloneDX JSON.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::{output, workspace::Workspace};

/// Packages of the shipped binaries.
const BINARIES: &[&str] = &["windlass-cli", "windlass-agent"];

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let metadata = workspace.metadata(&["--filter-platform", "host-tuple"])?;
    let document = document(&metadata, &workspace.read("Cargo.lock")?)?;
    output::print_result(&format!("{document:#}"));
    Ok(())
}

fn document(metadata: &Value, lock: &str) -> Result<Value> {
    let packages = metadata["packages"].as_array().context("cargo's metadata has no packages")?;
    let by_id: BTreeMap<&str, &Value> =
        packages.iter().filter_map(|package| Some((package["id"].as_str()?, package))).collect();
    let checksums = checksums(lock);
    let components: Vec<Value> = shipped_packages(metadata, &by_id)?
        .into_iter()
        .filter_map(|id| by_id.get(id).copied())
        .map(|package| component(package, &checksums))
        .collect();
    Ok(json!({ "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": components }))
}

/// Returns the packages that the binaries are built from, without those that only tests or build scripts use.
fn shipped_packages<'a>(metadata: &'a Value, by_id: &BTreeMap<&str, &Value>) -> Result<BTreeSet<&'a str>> {
    let nodes =
        metadata["resolve"]["nodes"].as_array().context("cargo's metadata has no dependency graph")?;
    let edges: BTreeMap<&str, &Value> =
        nodes.iter().filter_map(|node| Some((node["id"].as_str()?, &node["deps"]))).collect();
    let is_shipped = |id: &&str| {
        let name = by_id.get(*id).and_then(|package| package["name"].as_str());
        name.is_some_and(|name| BINARIES.contains(&name))
    };
    let mut todo: Vec<&str> = edges.keys().copied().filter(is_shipped).collect();
    let mut seen = BTreeSet::new();
    while let Some(id) = todo.pop() {
        if !seen.insert(id) {
            continue;
        }
        for dependency in edges.get(id).and_then(|deps| deps.as_array()).into_iter().flatten() {
            let kinds = dependency["dep_kinds"].as_array();
            let built_in = kinds.is_none_or(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()));
            if built_in {
                todo.extend(dependency["pkg"].as_str());
            }
        }
    }
    Ok(seen)
}

fn component(package: &Value, checksums: &BTreeMap<(String, String), String>) -> Value {
    let word = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
    let (name, version) = (word("name"), word("version"));
    let mut component = json!({
        "type": "library",
        "name": name,
        "version": version,
        "purl": format!("pkg:cargo/{name}@{version}"),
        "licenses": [{ "expression": word("license") }],
    });
    if let Some(sum) = checksums.get(&(name, version)) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": sum }]);
    }
    component
}

/// Checksums of `Cargo.lock`, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let mut found = BTreeMap::new();
    for package in lock.split("[[package]]").skip(1) {
        let value = |key: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \""));
            line.and_then(|rest| rest.strip_suffix('"')).map(str::to_owned)
        };
        if let (Some(name), Some(version), Some(sum)) = (value("name"), value("version"), value("checksum")) {
            found.insert((name, version), sum);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sbom_lists_only_crates_that_are_linked_in() {
        let package =
            |id: &str, name: &str| json!({ "id": id, "name": name, "version": "1.0.0", "license": "MIT" });
        let needs = |id: &str, kind: Value| json!({ "pkg": id, "dep_kinds": [{ "kind": kind }] });
        let metadata = json!({
            "packages": [package("a", "windlass-cli"), package("b", "serde"), package("c", "proptest"), package("d", "cc"), package("e", "itoa")],
            "resolve": { "nodes": [
                { "id": "a", "deps": [needs("b", Value::Null), needs("c", json!("dev")), needs("d", json!("build"))] },
                { "id": "b", "deps": [needs("e", Value::Null)] },
                { "id": "c", "deps": [] }, { "id": "d", "deps": [] }, { "id": "e", "deps": [] },
            ] },
        });
        let lock = "[[package]]\nname = \"serde\"\nversion = \"1.0.0\"\nchecksum = \"abc\"\n\n[[package]]\nname = \"x\"\n";
        let bill = document(&metadata, lock).unwrap();
        let names: Vec<&str> =
            bill["components"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["windlass-cli", "serde", "itoa"]);
        assert_eq!(bill["components"][1]["hashes"][0]["content"], "abc");
        assert_eq!(bill["components"][1]["purl"], "pkg:cargo/serde@1.0.0");
    }
}
