//! Setting `backends` of `config.yml`: the entry of type `kubernetes`.

use serde_json::{Map, Value as Json};
use windlass_kubernetes::{KubernetesSettings, NAME};
use windlass_model::config::{
    yaml::{Node, Value},
    yaml_scalars::ScalarValue,
};

/// Name of the setting.
pub(super) const SETTING: &str = "backends";
const TYPE: &str = "type";

/// Reads the list of backends. Returns what was expected if it is invalid.
pub(super) fn read(list: &Node) -> Result<Option<KubernetesSettings>, String> {
    let Value::Seq(entries) = &list.value else {
        return Err("expected a list of backends, each with its `type`".to_owned());
    };
    let mut found = None;
    for entry in entries {
        let Json::Object(mut fields) = to_json(entry) else {
            return Err("expected a mapping with the `type` of the backend".to_owned());
        };
        match fields.remove(TYPE) {
            Some(Json::String(name)) if name == NAME => {}
            Some(other) => return Err(format!("unknown backend type {other}; expected `{NAME}`")),
            None => return Err("a backend has no `type`".to_owned()),
        }
        let settings = KubernetesSettings::from_json(Json::Object(fields));
        let settings = settings.map_err(|error| windlass_model::error_chain::format_chain(&error))?;
        if found.replace(settings).is_some() {
            return Err(format!("`{NAME}` is there twice; list several clusters in its `contexts`"));
        }
    }
    Ok(found)
}

fn to_json(node: &Node) -> Json {
    match &node.value {
        Value::Null => Json::Null,
        Value::Scalar(scalar) => match scalar.meaning() {
            ScalarValue::Bool(value) => Json::Bool(value),
            // Names and labels stay texts, as they are written.
            ScalarValue::Null | ScalarValue::Int(_) | ScalarValue::Float(_) | ScalarValue::Str => {
                Json::String(scalar.text.clone())
            }
        },
        Value::Seq(items) => Json::Array(items.iter().map(to_json).collect()),
        Value::Map(entries) => {
            let fields = entries.iter().map(|entry| (entry.key.clone(), to_json(&entry.value)));
            Json::Object(fields.collect::<Map<_, _>>())
        }
    }
}

#[cfg(test)]
mod tests {
    use windlass_model::config::yaml;

    use super::*;

    fn from(text: &str) -> Result<Option<KubernetesSettings>, String> {
        read(&yaml::read(text).unwrap())
    }

    #[test]
    fn a_cluster_is_configured_as_a_backend() {
        let text = "[{type: kubernetes, kubeconfig: {filename: /k}, contexts: [a], privileged: true}]";
        let settings = from(text).unwrap().unwrap();
        assert_eq!((settings.contexts, settings.privileged), (vec!["a".to_owned()], true));
        assert!(from("[]").unwrap().is_none());
    }

    #[test]
    fn mistakes_are_named() {
        for (text, message) in [
            ("{type: kubernetes}", "expected a list"),
            ("[kubernetes]", "expected a mapping"),
            ("[{namespace: a}]", "a backend has no `type`"),
            ("[{type: vax}]", "unknown backend type \"vax\""),
            ("[{type: kubernetes, namspace: a}]", "unknown field `namspace`"),
            ("[{type: kubernetes}, {type: kubernetes}]", "twice"),
        ] {
            let error = from(text).unwrap_err();
            assert!(error.contains(message), "{text}: {error}");
        }
    }
}
