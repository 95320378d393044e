//! Backends in `config.yml`: those that projects may use, with their settings.
//!
//! ```yaml
//! projects:
//! - name: main
//!   backends:
//!   - type: lxd
//!     image: debian12
//! ```

use serde_json::Value as Json;
use windlass_model::config::yaml::{Node, Value};

/// Name of the key in `config.yml`.
pub(super) const KEY: &str = "projects";

/// Project with the backends that `config.yml` gives it.
#[derive(Clone, Debug, PartialEq)]
pub struct ProjectConfig {
    pub name: String,
    pub backends: Vec<BackendConfig>,
}

/// Backend in `config.yml`.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendConfig {
    /// Value of `type`.
    pub kind: String,
    /// The other keys.
    pub settings: Json,
}

/// Reads the value of `projects`. An error is what is wrong and what was expected.
pub(super) fn read(node: &Node) -> Result<Vec<ProjectConfig>, String> {
    let Value::Seq(list) = &node.value else { return Err("expected a list of projects".to_owned()) };
    let projects: Vec<ProjectConfig> = list.iter().map(read_project).collect::<Result<_, _>>()?;
    let mut names = std::collections::BTreeSet::new();
    match projects.iter().find(|project| !names.insert(&project.name)) {
        Some(twice) => Err(format!("project `{}` is listed twice", twice.name)),
        None => Ok(projects),
    }
}

fn read_project(node: &Node) -> Result<ProjectConfig, String> {
    let Value::Map(entries) = &node.value else {
        return Err("expected projects with the keys `name` and `backends`".to_owned());
    };
    if let Some(other) = entries.iter().find(|entry| !matches!(entry.key.as_str(), "name" | "backends")) {
        return Err(format!("unknown key `{}` of a project: expected `name` and `backends`", other.key));
    }
    let name = match node.field("name").map(|name| &name.value) {
        Some(Value::Scalar(word)) if !word.text.is_empty() => word.text.clone(),
        _ => return Err("a project has no `name`".to_owned()),
    };
    let backends = match node.field("backends").map(|backends| &backends.value) {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Seq(list)) => {
            list.iter().map(|one| read_backend(&name, one)).collect::<Result<Vec<_>, _>>()?
        }
        Some(Value::Scalar(_) | Value::Map(_)) => {
            return Err(format!("expected a list of backends of project `{name}`"));
        }
    };
    Ok(ProjectConfig { name, backends })
}

fn read_backend(project: &str, node: &Node) -> Result<BackendConfig, String> {
    let Json::Object(mut settings) = to_json(node) else {
        return Err(format!("expected keys and values for each backend of project `{project}`"));
    };
    match settings.remove("type") {
        Some(Json::String(kind)) => Ok(BackendConfig { kind, settings: Json::Object(settings) }),
        _ => Err(format!("a backend of project `{project}` has no `type`")),
    }
}

/// Scalars that JSON would parse as numbers or booleans are such; the rest is text.
fn to_json(node: &Node) -> Json {
    match &node.value {
        Value::Null => Json::Null,
        Value::Scalar(word) if word.plain => {
            serde_json::from_str(&word.text).unwrap_or_else(|_| word.text.clone().into())
        }
        Value::Scalar(word) => word.text.clone().into(),
        Value::Seq(list) => list.iter().map(to_json).collect(),
        Value::Map(entries) => {
            entries.iter().map(|entry| (entry.key.clone(), to_json(&entry.value))).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use windlass_model::config::yaml;

    use super::*;

    fn read_text(text: &str) -> Result<Vec<ProjectConfig>, String> {
        read(&yaml::read(text).unwrap())
    }

    #[test]
    fn backends_are_read_with_their_type_and_settings() {
        let text = "- name: main\n  backends:\n  - {type: lxd, image: deb12, capacity: {cpus: 4}, price: '1'}\n- name: lab\n";
        let projects = read_text(text).unwrap();
        assert_eq!(projects[0].backends[0].kind, "lxd");
        assert_eq!(
            projects[0].backends[0].settings,
            json!({"image": "deb12", "capacity": {"cpus": 4}, "price": "1"})
        );
        assert_eq!((projects[1].name.as_str(), projects[1].backends.len()), ("lab", 0));
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_the_reason() {
        for (text, expected) in [
            ("main", "a list of projects"),
            ("- main", "the keys `name` and `backends`"),
            ("- {name: main, users: []}", "unknown key `users`"),
            ("- {backends: []}", "no `name`"),
            ("- {name: main, backends: lxd}", "a list of backends of project `main`"),
            ("- {name: main, backends: [lxd]}", "keys and values for each backend of project `main`"),
            ("- {name: main, backends: [{image: x}]}", "has no `type`"),
            ("- {name: main}\n- {name: main}", "listed twice"),
        ] {
            let refused = read_text(text).unwrap_err();
            assert!(refused.contains(expected), "{text}: {refused}");
        }
    }
}
