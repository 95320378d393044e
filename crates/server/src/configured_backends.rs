//! Backends that are configured: which the server has, with which settings, and for which projects.
//!
//! They come from `projects` in `config.yml`. A type of backend has one set of settings on a server: projects that list
//! the same type share it, and different settings for one type are refused when the server starts.

use std::sync::Arc;

use serde_json::Value;
use windlass_aws::AwsProvider;
use windlass_backend::{
    Backend,
    lxd::{self, LxdProvider},
    machines::MachineBackend,
    remote::RemoteBackend,
};
use windlass_model::error_chain::format_chain;

use crate::{config::ProjectConfig, error::Error};

/// Types that can be configured.
pub(crate) const TYPES: [&str; 2] = [windlass_aws::NAME, lxd::NAME];

#[derive(Debug, thiserror::Error)]
pub enum BackendConfigError {
    #[error("unknown backend type `{kind}` of project `{project}` in config.yml: expected `{}`", TYPES.join("`, `"))]
    Unknown { project: String, kind: String },
    #[error(
        "projects `{first}` and `{second}` have different settings for backend `{kind}` in config.yml: a server has one \
         set of settings for each type"
    )]
    Conflict { kind: String, first: String, second: String },
    #[error("project `{project}` lists backend `{kind}` twice in config.yml")]
    Twice { project: String, kind: String },
    #[error("invalid settings of backend `{kind}` in config.yml: {problem}")]
    Settings { kind: String, problem: String },
}

/// Backend with its settings, and the projects that may use it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ConfiguredBackend {
    pub(crate) kind: String,
    pub(crate) settings: Value,
    pub(crate) projects: Vec<String>,
}

/// A backend that the server does not have.
pub(crate) struct MissingBackend {
    pub(crate) message: String,
    /// Change of the configuration of the server. `None` for a type that it cannot have.
    pub(crate) configuration: Option<String>,
}

impl MissingBackend {
    pub(crate) fn new(name: &str, has: &[&str]) -> Self {
        let configuration = TYPES.contains(&name).then(|| {
            format!("add it in `config.yml` of the server, as `projects: [{{name: PROJECT, backends: [{{type: {name}, …}}]}}]`")
        });
        let message = format!("this server has no backend `{name}`; it has `{}`", has.join("`, `"));
        Self { message, configuration }
    }

    /// Refuses a request that needs it. `other`: another change of the request that would help.
    pub(crate) fn refusal(self, other: Option<&str>) -> Error {
        let hints: Vec<&str> = self.configuration.as_deref().into_iter().chain(other).collect();
        match hints[..] {
            [] => Error::refused(self.message),
            _ => Error::refused(format!("{}; hint: {}", self.message, hints.join("; or "))),
        }
    }
}

/// Joins the backends of all projects.
pub(crate) fn collect(projects: &[ProjectConfig]) -> Result<Vec<ConfiguredBackend>, BackendConfigError> {
    let mut all: Vec<ConfiguredBackend> = Vec::new();
    for project in projects {
        for backend in &project.backends {
            let (name, kind) = (|| project.name.clone(), || backend.kind.clone());
            if !TYPES.contains(&backend.kind.as_str()) {
                return Err(BackendConfigError::Unknown { project: name(), kind: kind() });
            }
            match all.iter_mut().find(|known| known.kind == backend.kind) {
                None => all.push(ConfiguredBackend {
                    kind: kind(),
                    settings: backend.settings.clone(),
                    projects: vec![name()],
                }),
                Some(known) if known.projects.contains(&project.name) => {
                    return Err(BackendConfigError::Twice { project: name(), kind: kind() });
                }
                Some(known) if known.settings == backend.settings => known.projects.push(name()),
                Some(known) => {
                    let first = known.projects.first().cloned().unwrap_or_default();
                    return Err(BackendConfigError::Conflict { kind: kind(), first, second: name() });
                }
            }
        }
    }
    Ok(all)
}

/// Builds a backend. `remote` sets up the machines that it rents.
pub(crate) fn open(
    configured: &ConfiguredBackend,
    remote: &Arc<RemoteBackend>,
) -> Result<Arc<dyn Backend>, BackendConfigError> {
    let wrong = |problem: String| BackendConfigError::Settings { kind: configured.kind.clone(), problem };
    match configured.kind.as_str() {
        lxd::NAME => {
            let settings: lxd::Settings = serde_json::from_value(configured.settings.clone())
                .map_err(|error| wrong(error.to_string()))?;
            let settings = settings.validated().map_err(|error| wrong(format_chain(&error)))?;
            let provider = LxdProvider::new(settings).map_err(|error| wrong(format_chain(&error)))?;
            Ok(Arc::new(MachineBackend::new(provider, Arc::clone(remote))))
        }
        windlass_aws::NAME => {
            let settings: windlass_aws::Settings = serde_json::from_value(configured.settings.clone())
                .map_err(|error| wrong(error.to_string()))?;
            let settings = settings.validated().map_err(|error| wrong(format_chain(&error)))?;
            Ok(Arc::new(MachineBackend::new(AwsProvider::new(settings), Arc::clone(remote))))
        }
        other => Err(wrong(format!("no backend has the type `{other}`"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::BackendConfig;

    fn project(name: &str, backends: &[(&str, Value)]) -> ProjectConfig {
        let backends = backends
            .iter()
            .map(|(kind, settings)| BackendConfig { kind: (*kind).to_owned(), settings: settings.clone() });
        ProjectConfig { name: name.to_owned(), backends: backends.collect() }
    }

    #[test]
    fn projects_with_equal_settings_share_a_backend() {
        let settings = json!({"image": "deb12"});
        let all = collect(&[
            project("a", &[("lxd", settings.clone())]),
            project("b", &[("lxd", settings.clone())]),
        ]);
        let expected =
            ConfiguredBackend { kind: "lxd".into(), settings, projects: vec!["a".into(), "b".into()] };
        assert_eq!(all.unwrap(), [expected]);
    }

    #[test]
    fn conflicting_unknown_and_repeated_backends_are_refused() {
        let (one, other) = (("lxd", json!({"image": "a"})), ("lxd", json!({"image": "b"})));
        let refusal = |projects: &[ProjectConfig]| collect(projects).unwrap_err().to_string();
        let conflict = refusal(&[project("a", std::slice::from_ref(&one)), project("b", &[other])]);
        assert!(conflict.contains("`a` and `b` have different settings"), "{conflict}");
        let twice = refusal(&[project("a", &[one.clone(), one])]);
        assert!(twice.contains("twice"), "{twice}");
        let unknown = refusal(&[project("a", &[("gcp", json!({}))])]);
        assert!(
            unknown.contains("unknown backend type `gcp`") && unknown.contains("expected `aws`, `lxd`"),
            "{unknown}"
        );
    }
    #[test]
    fn settings_of_aws_are_checked_when_the_server_starts() {
        let remote = Arc::new(RemoteBackend::new(
            Arc::new(windlass_tunnel::SshPool::new(windlass_tunnel::Backoff::STANDARD)),
            windlass_backend::remote::AgentBinaries::default(),
        ));
        let open = |settings: Value| {
            let configured =
                ConfiguredBackend { kind: "aws".into(), settings, projects: vec!["main".into()] };
            open(&configured, &remote)
        };
        assert_eq!(open(json!({"regions": ["eu-west-1"]})).unwrap().name(), "aws");
        let refused = |settings| open(settings).err().unwrap().to_string();
        let unknown = refused(json!({"region": "eu-west-1"}));
        assert!(unknown.contains("backend `aws`") && unknown.contains("unknown field `region`"), "{unknown}");
        let creds = refused(json!({"creds": {"type": "access_key", "access_key": "a", "secret_key": 7}}));
        assert!(creds.contains("invalid settings of backend `aws`"), "{creds}");
    }
}
