//! Settings of the backend, as `config.yml` lists them under `backends`.

use std::{collections::BTreeMap, path::PathBuf};

use serde::Deserialize;
use serde_json::Value;

/// Namespace of a context that names none.
pub(crate) const DEFAULT_NAMESPACE: &str = "default";

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("invalid settings of backend `kubernetes`")]
    Shape(#[from] serde_json::Error),
    #[error("failed to read the kubeconfig `{}`", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("invalid kubeconfig: {message}")]
    Kubeconfig { message: String },
    #[error("not in a cluster: {message}; set `kubeconfig` for backend `kubernetes`")]
    NotInCluster { message: String },
    #[error("invalid `tolerations` entry {index} of backend `kubernetes`: {message}")]
    Toleration { index: usize, message: String },
    #[error("failed to set up TLS for cluster `{cluster}`: {message}")]
    Tls { cluster: String, message: String },
}

/// Settings of backend `kubernetes`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KubernetesSettings {
    /// `None`: the service account of the pod that the server runs in.
    pub kubeconfig: Option<KubeconfigSource>,
    /// Contexts of the kubeconfig, which are the regions of the backend. Empty: its current context.
    pub contexts: Vec<String>,
    /// Namespace of the pods. `None`: that of the context.
    pub namespace: Option<String>,
    /// Image that contains `windlass-agent` as its entrypoint. `None`: the server sends the program to each pod, which
    /// needs a shell in the init container.
    pub agent_image: Option<String>,
    /// Image of the init container that receives the program. `None`: that of the job.
    pub helper_image: Option<String>,
    /// True to accept jobs with `privileged`.
    pub privileged: bool,
    /// Taints that pods tolerate, as in a pod.
    pub tolerations: Vec<Toleration>,
    /// Labels that a node must have.
    pub node_selector: BTreeMap<String, String>,
    /// Priority class of the pods.
    pub priority_class: Option<String>,
}

/// A kubeconfig: a file, or its text.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "lowercase")]
pub enum KubeconfigSource {
    Filename(PathBuf),
    Data(String),
}

/// The text contains credentials.
impl std::fmt::Debug for KubeconfigSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Filename(path) => f.debug_tuple("Filename").field(path).finish(),
            Self::Data(_) => f.write_str("Data(…)"),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Toleration {
    /// Empty with `Exists`: every taint.
    pub key: String,
    /// `Equal`, which is the default, or `Exists`.
    pub operator: String,
    pub value: String,
    /// Empty: every effect.
    pub effect: String,
}

impl KubernetesSettings {
    /// Reads the settings of one entry of `backends`, without its `type`.
    pub fn from_json(entry: Value) -> Result<Self, SettingsError> {
        let settings: Self = serde_json::from_value(entry)?;
        for (index, toleration) in settings.tolerations.iter().enumerate() {
            let failed = |message: &str| SettingsError::Toleration { index, message: message.to_owned() };
            match toleration.operator.as_str() {
                "Exists" if !toleration.value.is_empty() => {
                    return Err(failed("`Exists` accepts no `value`"));
                }
                "Exists" => {}
                "" | "Equal" if toleration.key.is_empty() => return Err(failed("expected a `key`")),
                "" | "Equal" => {}
                _ => return Err(failed("expected the operator `Equal` or `Exists`")),
            }
        }
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn settings_have_the_shape_of_config_yml() {
        let settings = KubernetesSettings::from_json(json!({
            "kubeconfig": {"filename": "/etc/kube.yml"}, "contexts": ["east", "west"], "namespace": "jobs",
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        }));
        let settings = settings.unwrap();
        assert!(
            matches!(settings.kubeconfig, Some(KubeconfigSource::Filename(path)) if path.ends_with("kube.yml"))
        );
        assert_eq!((settings.contexts.len(), settings.namespace.as_deref()), (2, Some("jobs")));
    }

    #[test]
    fn unknown_keys_and_impossible_tolerations_are_refused() {
        for (entry, message) in [
            (json!({"contxts": []}), "invalid settings of backend `kubernetes`"),
            (json!({"tolerations": [{"operator": "Exists", "value": "x"}]}), "`Exists` accepts no `value`"),
            (json!({"tolerations": [{"value": "x"}]}), "expected a `key`"),
            (json!({"tolerations": [{"key": "a", "operator": "Is"}]}), "expected the operator"),
        ] {
            let error = KubernetesSettings::from_json(entry).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        }
    }

    #[test]
    fn the_text_of_a_kubeconfig_is_not_printed() {
        let source = KubeconfigSource::Data("token: hunter2".into());
        assert!(!format!("{source:?}").contains("hunter2"));
    }
}
