//! Conversion of a service file to services of `windlass apply`.
//!
//! The resources of a file may have alternatives, of which a service gets one: accelerators that differ only in their
//! name become one request, and each other alternative becomes a separate configuration. The caller chooses by offers.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use super::{
    Infra, SecretValue, ServerContext, TaskSecrets,
    run_spec::{bind_to_infra, bind_to_offers, git_workdir, resources, tags},
    script,
    service::{Balance, ReadinessProbe, ServiceSection},
};
use crate::{
    config::{
        Configuration,
        error::{Code, Diagnosis, SourceSpan},
        interpolate,
        profile::SpotPolicy,
    },
    managed_job::plan::{Candidate, Script, WORKDIR, Workdir, run_priority},
    resources::ResourcesSpec,
};

/// Interval between the probes of a replica, in seconds. The file format has no field for it.
const PROBE_INTERVAL: i64 = 10;
/// Grace period of a replica that is removed, in seconds.
const STOP_GRACE_SECS: i64 = 30;
const JSON_TYPE: &str = "application/json";
/// Prefix of the stored secrets of services.
const SECRET_PREFIX: &str = "serve_";
/// Variable that changes with the values of the secrets, so that the replicas are replaced.
pub const SECRETS_VERSION: &str = "WINDLASS_SECRETS_VERSION";

/// A service file that can run here.
#[derive(Clone, Debug)]
pub struct ServiceFile {
    pub name: Option<String>,
    pub section: ServiceSection,
    pub script: Script,
    pub candidates: Vec<Candidate>,
    /// The file lists alternatives without an order.
    pub is_cheapest_first: bool,
    /// Values from the file or the command line; secrets without one refer to those of the project.
    pub secrets: TaskSecrets,
    pub warnings: Vec<Diagnosis>,
}

/// Replacement of the replicas by an update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpdateMode {
    /// One new replica at a time.
    #[default]
    Rolling,
    /// All new replicas are started beside the old ones.
    BlueGreen,
}

/// Choices that a file does not make.
#[derive(Clone, Debug, Default)]
pub struct ServiceSettings {
    pub name: String,
    pub mode: UpdateMode,
    /// True: requests require a token of a project member.
    pub has_auth: bool,
    /// Version of the secrets with values, if there are any.
    pub secrets_version: Option<u64>,
}

/// One of the alternatives of a file.
#[derive(Clone, Debug)]
pub struct ServiceAlternative {
    pub configuration: Configuration,
    /// Its resources, for people.
    pub description: String,
}

/// Alternatives of a file, and what has no effect on this server.
#[derive(Clone, Debug)]
pub struct ServiceAlternatives {
    pub all: Vec<ServiceAlternative>,
    pub warnings: Vec<String>,
}

/// Reason why a file cannot become a service on this server.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("`infra: {0}` is neither a fleet of the project nor a backend of the server")]
    UnknownInfra(String),
    #[error("`target_qps_per_replica` has no value for any of the accelerators in `resources`")]
    NoTarget,
    #[error("failed to create the service: {}", crate::config::error::summary(.0))]
    Configuration(Vec<Diagnosis>),
}

/// Returns the name under which a value of a service's secret is stored.
pub fn stored_secret_name(service: &str, secret: &str) -> String {
    format!("{}{secret}", stored_secret_prefix(service))
}

/// Returns the beginning of the names of the stored secrets of a service.
pub fn stored_secret_prefix(service: &str) -> String {
    format!("{SECRET_PREFIX}{}__", service.replace('-', "_"))
}

/// Candidates that become one configuration.
struct CandidateClass<'a> {
    first: &'a Candidate,
    names: Vec<String>,
    resources: Json,
    target: Option<f64>,
}

impl ServiceFile {
    /// Returns the secrets to store, by the names under which the service refers to them.
    pub fn stored_secrets(&self, service: &str) -> BTreeMap<String, SecretValue> {
        let stored = self.secrets.iter();
        stored.map(|(name, value)| (stored_secret_name(service, name), value.clone())).collect()
    }

    /// Returns a configuration for each alternative, in the order of the file.
    pub fn configurations(
        &self,
        settings: &ServiceSettings,
        site: &ServerContext,
    ) -> Result<ServiceAlternatives, Error> {
        let mut warnings = Vec::new();
        let candidates = self.usable_candidates(site, &mut warnings)?;
        let classes = self.classes(&candidates, &mut warnings);
        if classes.is_empty() {
            return Err(Error::NoTarget);
        }
        if site.has_no_spot && candidates.iter().any(|one| one.spot == Some(true)) {
            warnings.push(
                "`use_spot` has no effect: the server has no cloud backend, and its instances are not reclaimed"
                    .to_owned(),
            );
        }
        let all = classes.iter().map(|class| self.alternative(class, settings, site));
        Ok(ServiceAlternatives { all: all.collect::<Result<_, _>>()?, warnings })
    }

    /// Checks what does not depend on a server: the configurations of a server that rents nothing.
    pub fn check(&self) -> Result<(), Vec<Diagnosis>> {
        let settings = ServiceSettings { name: "service".to_owned(), ..ServiceSettings::default() };
        match self.configurations(&settings, &ServerContext { has_no_spot: true, ..ServerContext::default() })
        {
            Ok(_) => Ok(()),
            Err(Error::Configuration(problems)) => Err(problems),
            Err(error @ (Error::UnknownInfra(_) | Error::NoTarget)) => Err(vec![
                Diagnosis::new(Code::InvalidValue, SourceSpan::NONE, error.to_string()).at("service"),
            ]),
        }
    }

    /// Leaves out candidates in unknown locations, unless there are no others.
    fn usable_candidates(
        &self,
        site: &ServerContext,
        warnings: &mut Vec<String>,
    ) -> Result<Vec<Candidate>, Error> {
        let mut usable = Vec::new();
        let mut warn = |text: String| {
            if !warnings.contains(&text) {
                warnings.push(text);
            }
        };
        let mut unknown = None;
        for one in &self.candidates {
            let infra = one.infra.as_deref();
            match infra.map(|text| (text, site.resolve_infra(text))) {
                Some((text, Infra::Unknown)) => {
                    unknown = Some(text.to_owned());
                    warn(format!(
                        "`infra: {text}` is ignored: it is neither a fleet of the project nor a backend of the server"
                    ));
                    continue;
                }
                Some((text, Infra::OwnInstances)) => warn(format!(
                    "`infra: {text}` has no effect: the server has no cloud backend and uses its own instances for \
                     every cloud"
                )),
                Some((_, Infra::Anywhere | Infra::Fleet(_) | Infra::Place { .. })) | None => {}
            }
            usable.push(one.clone());
        }
        match unknown {
            Some(text) if usable.is_empty() => Err(Error::UnknownInfra(text)),
            Some(_) | None => Ok(usable),
        }
    }

    /// Unites candidates that differ only in the name of their accelerator.
    fn classes<'a>(
        &self,
        candidates: &'a [Candidate],
        warnings: &mut Vec<String>,
    ) -> Vec<CandidateClass<'a>> {
        let mut classes: Vec<CandidateClass<'a>> = Vec::new();
        for one in candidates {
            let request = ResourcesSpec { shm_size: self.script.shm_size, ..resources(one) };
            let gpu = request.gpu.as_ref();
            let names = gpu.and_then(|gpu| gpu.name.clone()).unwrap_or_default();
            let count = gpu.and_then(|gpu| gpu.count.min).unwrap_or(1);
            let accelerator = one.accelerator.as_ref().map(|accelerator| (accelerator.name.as_str(), count));
            let target = match &self.section.target_qps {
                None => None,
                Some(target) => match target.of(accelerator) {
                    Some(target) => Some(target),
                    None => {
                        let what =
                            accelerator.map_or("no accelerator".to_owned(), |(name, _)| format!("`{name}`"));
                        warnings.push(format!(
                            "the alternative with {what} is ignored: `target_qps_per_replica` has no value for it"
                        ));
                        continue;
                    }
                },
            };
            let mut json = json!(request);
            json["gpu"]["name"] = Json::Null;
            let is_same = |class: &&mut CandidateClass<'_>| {
                let bare = |one: &Candidate| Candidate { accelerator: None, ..one.clone() };
                class.resources == json && class.target == target && bare(class.first) == bare(one)
            };
            match classes.iter_mut().find(is_same).filter(|_| one.accelerator.is_some()) {
                Some(class) => class.names.extend(names),
                None => classes.push(CandidateClass { first: one, names, resources: json, target }),
            }
        }
        classes
    }

    fn alternative(
        &self,
        class: &CandidateClass<'_>,
        settings: &ServiceSettings,
        site: &ServerContext,
    ) -> Result<ServiceAlternative, Error> {
        let json = self.json(class, settings, site);
        let configuration = Configuration::from_json(&json).map_err(Error::Configuration)?;
        let one = class.first;
        let what = match &one.accelerator {
            Some(accelerator) if class.names.len() == 1 => {
                format!("{}:{}", accelerator.name, accelerator.count)
            }
            Some(accelerator) => format!("{}:{}", class.names.join(" or "), accelerator.count),
            None => "no accelerator".to_owned(),
        };
        let at = one.infra.as_ref().map(|infra| format!(" at {infra}")).unwrap_or_default();
        Ok(ServiceAlternative { configuration, description: format!("{what}{at}") })
    }

    fn json(&self, class: &CandidateClass<'_>, settings: &ServiceSettings, site: &ServerContext) -> Json {
        let one = class.first;
        let mut request = class.resources.clone();
        if !class.names.is_empty() {
            request["gpu"]["name"] = json!(class.names);
        }
        let program = script::service_program(&self.script, site.has_private_home);
        let commands = json!([interpolate::escape(&program)]);
        let (files, repos) = self.sources();
        let section = &self.section;
        let surge = match settings.mode {
            UpdateMode::Rolling => 1,
            UpdateMode::BlueGreen => section.max_replicas.clamp(1, 1000),
        };
        let mut json = json!({
            "type": "service",
            "name": settings.name,
            "port": section.port,
            "shell": "/bin/bash",
            "env": self.env(settings),
            "image": one.image,
            "files": files,
            "repos": repos,
            "volumes": self.script.volumes,
            "auth": settings.has_auth,
            "probes": [probe(&section.probe)],
            "deployment": { "surge": surge, "ready_within": section.probe.initial_delay },
            "balance": match section.balance {
                Balance::RoundRobin => "round-robin",
                Balance::LeastLoad => "least-outstanding",
            },
            "stop_duration": STOP_GRACE_SECS,
            "tags": tags(&one.labels),
            "retry": true,
        });
        let (min, max) = (section.min_replicas, section.max_replicas);
        let is_spot = one.spot == Some(true) && !site.has_no_spot;
        let base = section.base_ondemand.min(max);
        if is_spot && base > 0 && max > base {
            let spot = spot_policy(section, true);
            json["groups"] = json!([
                {
                    "name": "ondemand", "replicas": base, "resources": request, "commands": commands,
                    "spot_policy": SpotPolicy::OnDemand,
                },
                with_scaling(
                    json!({ "name": "spot", "resources": request, "commands": commands, "spot_policy": spot }),
                    (min.saturating_sub(base), max - base),
                    class.target,
                    section,
                ),
            ]);
        } else {
            // If all replicas are on-demand, or the server rents nothing, one group is enough.
            json["commands"] = commands;
            json["resources"] = request;
            let policy = match (site.has_no_spot, one.spot) {
                (true, Some(true)) => SpotPolicy::Auto,
                (_, _) => spot_policy(section, is_spot && base == 0),
            };
            json["spot_policy"] = json!(policy);
            json = with_scaling(json, (min, max), class.target, section);
        }
        bind_to_infra(&mut json, one.infra.as_deref(), site);
        bind_to_offers(&mut json, one);
        json["priority"] = json!(section.priority.map(|priority| run_priority(priority.into())));
        json
    }

    /// Returns `files` and `repos`. The working directory comes first, since files may be copied into it.
    fn sources(&self) -> (Vec<Json>, Vec<Json>) {
        let files = self.script.files.iter();
        let mut files: Vec<Json> =
            files.map(|file| json!({ "local_path": file.local_path, "path": file.path })).collect();
        let mut repos = Vec::new();
        match &self.script.workdir {
            None => {}
            Some(Workdir::Local(path)) => files.insert(0, json!({ "local_path": path, "path": WORKDIR })),
            Some(Workdir::Git { url, reference }) => repos.push(git_workdir(url, reference.as_deref())),
        }
        (files, repos)
    }

    fn env(&self, settings: &ServiceSettings) -> BTreeMap<String, String> {
        let mut env = self.script.envs.clone();
        for name in &self.script.secrets {
            let stored = match self.secrets.contains_key(name) {
                true => stored_secret_name(&settings.name, name),
                false => name.clone(),
            };
            env.insert(name.clone(), format!("${{{{ secrets.{stored} }}}}"));
        }
        if let Some(version) = settings.secrets_version {
            env.insert(SECRETS_VERSION.to_owned(), version.to_string());
        }
        env.insert("SKYPILOT_SERVICE_NAME".to_owned(), settings.name.clone());
        // Named here, and filled in by the runner.
        for name in [script::PHASE_FILE, script::PRIVATE_HOME] {
            env.insert(name.to_owned(), String::new());
        }
        env
    }
}

fn spot_policy(section: &ServiceSection, is_spot: bool) -> SpotPolicy {
    match (is_spot, section.has_dynamic_fallback) {
        (true, true) => SpotPolicy::Auto,
        (true, false) => SpotPolicy::Spot,
        (false, _) => SpotPolicy::OnDemand,
    }
}

fn with_scaling(
    mut json: Json,
    (min, max): (u32, u32),
    target: Option<f64>,
    section: &ServiceSection,
) -> Json {
    json["replicas"] = json!({ "min": min, "max": max });
    if let Some(target) = target.filter(|_| max > min) {
        json["scaling"] = json!({
            "metric": "rps", "target": target, "scale_up_delay": section.upscale_delay,
            "scale_down_delay": section.downscale_delay,
        });
    }
    json
}

fn probe(of: &ReadinessProbe) -> Json {
    let text = |text: &str| interpolate::escape(text);
    let mut headers: Vec<Json> =
        of.headers.iter().map(|(name, value)| json!({ "name": name, "value": text(value) })).collect();
    let has_type = of.headers.keys().any(|name| name.eq_ignore_ascii_case("content-type"));
    if of.body.is_some() && !has_type {
        headers.push(json!({ "name": "Content-Type", "value": JSON_TYPE }));
    }
    json!({
        "type": "http",
        "url": text(&of.path),
        "method": if of.body.is_some() { "post" } else { "get" },
        "headers": headers,
        "body": of.body.as_deref().map(text),
        "timeout": of.timeout,
        "interval": PROBE_INTERVAL,
    })
}
