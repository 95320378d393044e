//! Bill of materials: every crate that the binaries contain, as CycloneDX JSON.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::{output, workspace::Workspace};

/// Packages of the shipped binaries.
const BINARIES: &[&str] = &["windlass-cli", "windlass-agent"];

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    output::print_result(&read(workspace)?);
    Ok(())
}

/// Returns the document for the two binaries.
pub(crate) fn read(workspace: &Workspace) -> Result<String> {
    let metadata = workspace.metadata(&["--filter-platform", "host-tuple"])?;
    let document = document(&metadata, &workspace.read("Cargo.lock")?)?;
    Ok(format!("{document:#}"))
}

fn document(metadata: &Value, lock: &str) -> Result<Value> {
    let packages = metadata["packages"].as_array().context("cargo's metadata has no packages")?;
    let by_id: BTreeMap<&str, &Value> =
        packages.iter().filter_map(|package| Some((package["id"].as_str()?, package))).collect();
    let checksums = checksums(lock);
    let shipped = shipped_packages(metadata, &by_id)?;
    // Ids of cargo contain the path of the checkout, so the order is by name.
    let mut packages: Vec<&Value> = shipped.keys().filter_map(|id| by_id.get(id).copied()).collect();
    packages.sort_by_key(|package| purl(package));
    let components: Vec<Value> = packages.iter().map(|package| component(package, &checksums)).collect();
    let dependencies: Vec<Value> = packages
        .iter()
        .map(|package| {
            let uses = package["id"].as_str().and_then(|id| shipped.get(id)).into_iter().flatten();
            let uses: BTreeSet<String> = uses.filter_map(|id| by_id.get(id)).map(|one| purl(one)).collect();
            json!({ "ref": purl(package), "dependsOn": uses })
        })
        .collect();
    let own = packages.iter().find(|package| package["name"] == BINARIES[0]);
    let version = own.map_or(Value::Null, |package| package["version"].clone());
    let program =
        json!({ "type": "application", "bom-ref": "windlass", "name": "windlass", "version": version });
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": program },
        "components": components,
        "dependencies": dependencies,
    }))
}

fn purl(package: &Value) -> String {
    let word = |key: &str| package[key].as_str().unwrap_or_default();
    format!("pkg:cargo/{}@{}", word("name"), word("version"))
}

/// Returns the packages that the binaries are built from, without those that only tests or build scripts use, and the
/// packages that each of them uses.
fn shipped_packages<'a>(
    metadata: &'a Value,
    by_id: &BTreeMap<&str, &Value>,
) -> Result<BTreeMap<&'a str, Vec<&'a str>>> {
    let nodes =
        metadata["resolve"]["nodes"].as_array().context("cargo's metadata has no dependency graph")?;
    let edges: BTreeMap<&str, &Value> =
        nodes.iter().filter_map(|node| Some((node["id"].as_str()?, &node["deps"]))).collect();
    let is_shipped = |id: &&str| {
        let name = by_id.get(*id).and_then(|package| package["name"].as_str());
        name.is_some_and(|name| BINARIES.contains(&name))
    };
    let mut todo: Vec<&str> = edges.keys().copied().filter(is_shipped).collect();
    let mut shipped = BTreeMap::new();
    while let Some(id) = todo.pop() {
        if shipped.contains_key(id) {
            continue;
        }
        let mut uses = Vec::new();
        for dependency in edges.get(id).and_then(|deps| deps.as_array()).into_iter().flatten() {
            let kinds = dependency["dep_kinds"].as_array();
            let built_in = kinds.is_none_or(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()));
            if built_in {
                uses.extend(dependency["pkg"].as_str());
            }
        }
        todo.extend(&uses);
        shipped.insert(id, uses);
    }
    Ok(shipped)
}

fn component(package: &Value, checksums: &BTreeMap<(String, String), String>) -> Value {
    let word = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
    let (name, version) = (word("name"), word("version"));
    let mut component = json!({
        "type": "library",
        "name": name,
        "version": version,
        "bom-ref": purl(package),
        "purl": purl(package),
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
        assert_eq!(names, ["itoa", "serde", "windlass-cli"]);
        assert_eq!(bill["dependencies"][2]["dependsOn"], json!(["pkg:cargo/serde@1.0.0"]));
        assert_eq!(bill["metadata"]["component"]["version"], "1.0.0");
        assert_eq!(bill["components"][1]["hashes"][0]["content"], "abc");
        assert_eq!(bill["components"][1]["purl"], "pkg:cargo/serde@1.0.0");
    }

    #[test]
    fn sbom_lists_every_dependency_that_cargo_tree_lists() {
        let workspace = Workspace::find().unwrap();
        let bill: Value = serde_json::from_str(&read(&workspace).unwrap()).unwrap();
        let purls: BTreeSet<&str> =
            bill["components"].as_array().unwrap().iter().map(|one| one["purl"].as_str().unwrap()).collect();
        let mut tree = workspace.cargo();
        tree.args(["tree", "--locked", "--edges", "normal", "--prefix", "none", "--format", "{p}"]);
        tree.args(BINARIES.iter().flat_map(|name| ["-p", name]));
        let lines = crate::process::run_for_stdout(&mut tree).unwrap();
        let mut listed = 0;
        for line in lines.lines().filter(|line| !line.is_empty()) {
            let mut words = line.split(' ');
            let (name, version) = (words.next().unwrap(), words.next().unwrap().trim_start_matches('v'));
            assert!(purls.contains(format!("pkg:cargo/{name}@{version}").as_str()), "{line}");
            listed += 1;
        }
        assert!(listed > 100, "{lines}");
    }
}
