//! Derivation of jobs from a run: everything that the server computes when a run is planned or scaled.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    Configuration,
    dev_environment::DevEnvironment,
    interpolate::{self, DollarEscape, Reference, Substitution},
    job_spec::{
        AppSpec, DefaultImageSource, FileArchive, JobSpec, ProbeSpec, REPO_DIR, Requirements, RetrySpec,
    },
    mounts::{Mount, VolumeMount},
    name::UnixUser,
    ports::{self, PortMapping},
    profile::{ProfileProperties, RetryEvent, RetrySetting, SpotPolicy},
    quantities::{OffableDuration, OneOrMany},
    run::Run,
    service::{ReplicaGroup, Service},
    shell,
    task::Task,
    traffic::{Method, Model, Probe, ProbeHeader, ProbeKind, Replicas, Text},
};
use crate::{
    plan::execution_mode::PLAIN_PROCESS_IMAGE,
    resources::{CpuArch, GpuVendor, ResourcesSpec},
};

/// Default grace period of a run that is stopped, in seconds.
pub const STOP_DURATION: i64 = 300;
/// Default time during which a job is retried, in seconds.
pub const RETRY_DURATION: i64 = 3600;

/// Reason why no jobs can be derived.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("a {kind} has no jobs")]
    NotARun { kind: &'static str },
    #[error("nothing to run: set `commands` or `entrypoint`, or use an image that has a command")]
    NothingToRun,
    #[error(
        "the server has no image for `{field}: true`: use `image` instead, or start the server with `--{setting}`"
    )]
    NoImageFor { field: &'static str, setting: &'static str },
    #[error("invalid `entrypoint` value `{entrypoint}`: {reason}")]
    Entrypoint { entrypoint: String, reason: &'static str },
    #[error("invalid reference in `{text}`: {reason}")]
    Interpolate { text: String, reason: String },
    #[error("variable `{name}` has no value")]
    UnresolvedVariable { name: String },
    #[error("replica group {index} does not exist")]
    NoSuchGroup { index: usize },
}

/// Default images for runs that name none: settings of the server, the project or the profile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DefaultImages {
    /// Image for instances that do not allow plain processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Image with the CUDA compiler, for `nvcc: true`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvcc: Option<String>,
    /// Image with Docker inside, for `docker: true`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub docker: Option<String>,
    /// Origin of `base`: the setting that applies.
    #[serde(default, skip_serializing_if = "DefaultImageSource::is_server")]
    pub base_from: DefaultImageSource,
}

impl DefaultImages {
    /// Returns these settings of the server with the image of a project, if it has one.
    #[must_use]
    pub fn with_project(&self, image: Option<&str>) -> Self {
        match image {
            None => self.clone(),
            Some(image) => {
                Self { base: Some(image.to_owned()), base_from: DefaultImageSource::Project, ..self.clone() }
            }
        }
    }
}

/// Parts of a run specification that jobs inherit in addition to the configuration.
#[derive(Clone, Debug, Default)]
pub struct InheritedSpec {
    pub repo_data: Option<serde_json::Value>,
    pub repo_code_hash: Option<String>,
    pub repo_dir: Option<String>,
    pub working_dir: Option<String>,
    pub file_archives: Vec<FileArchive>,
    pub images: DefaultImages,
    /// Architectures of the images that have no build for all of them, as their registries report.
    pub image_architectures: BTreeMap<String, Vec<CpuArch>>,
}

/// All inputs of the derivation.
#[derive(Clone, Copy)]
pub struct JobSpecInputs<'a> {
    pub run_name: &'a str,
    pub configuration: &'a Configuration,
    /// Profile of the run; properties set in the configuration take precedence.
    pub profile: Option<&'a ProfileProperties>,
    pub inherited: &'a InheritedSpec,
    /// URL of the server for a job with `dstack: true`.
    pub server_url: Option<&'a str>,
}

/// Returns the initial jobs of a run: the minimum number of replicas of every group.
pub fn job_specs(inputs: &JobSpecInputs<'_>) -> Result<Vec<JobSpec>, Error> {
    let mut specs = Vec::new();
    let mut replica_num = 0;
    for group in 0..replica_groups(inputs.configuration) {
        for _ in 0..replica_range(inputs.configuration, group)?.min {
            specs.extend(replica_specs(inputs, group, replica_num)?);
            replica_num += 1;
        }
    }
    Ok(specs)
}

/// Returns one replica of each group: shown in a plan, also if a service starts with no replicas.
pub fn plan_specs(inputs: &JobSpecInputs<'_>) -> Result<Vec<JobSpec>, Error> {
    let groups = 0..replica_groups(inputs.configuration);
    let specs: Result<Vec<_>, _> = groups.map(|group| replica_specs(inputs, group, 0)).collect();
    Ok(specs?.into_iter().flatten().collect())
}

/// Returns the number of replica groups; one unless the run is a service with `groups`.
pub fn replica_groups(configuration: &Configuration) -> usize {
    match configuration {
        Configuration::Service(service) => service.groups.as_ref().map_or(1, Vec::len),
        Configuration::Task(_)
        | Configuration::DevEnvironment(_)
        | Configuration::Fleet(_)
        | Configuration::Gateway(_)
        | Configuration::Volume(_) => 1,
    }
}

/// Returns the names of the replica groups, by position.
pub fn replica_group_names(configuration: &Configuration) -> Vec<String> {
    let groups = match configuration {
        Configuration::Service(service) => service.groups.as_deref(),
        Configuration::Task(_)
        | Configuration::DevEnvironment(_)
        | Configuration::Fleet(_)
        | Configuration::Gateway(_)
        | Configuration::Volume(_) => None,
    };
    match groups {
        None => vec!["0".to_owned()],
        Some(groups) => groups.iter().enumerate().map(|(index, group)| group_name(index, group)).collect(),
    }
}

fn group_name(index: usize, group: &ReplicaGroup) -> String {
    group.name.as_ref().map_or_else(|| index.to_string(), |name| name.0.clone())
}

/// Returns the permitted number of replicas of a group.
pub fn replica_range(configuration: &Configuration, group: usize) -> Result<Replicas, Error> {
    match configuration {
        Configuration::Service(service) => match &service.groups {
            None => Ok(service.replicas.unwrap_or(Replicas::exactly(1))),
            Some(groups) => groups.get(group).map(|g| g.replicas).ok_or(Error::NoSuchGroup { index: group }),
        },
        Configuration::Task(_) | Configuration::DevEnvironment(_) => Ok(Replicas::exactly(1)),
        Configuration::Fleet(_) | Configuration::Gateway(_) | Configuration::Volume(_) => {
            Err(Error::NotARun { kind: configuration.kind() })
        }
    }
}

/// Returns the jobs of one replica.
pub fn replica_specs(
    inputs: &JobSpecInputs<'_>,
    group: usize,
    replica_num: u32,
) -> Result<Vec<JobSpec>, Error> {
    match inputs.configuration {
        Configuration::Task(task) => task_specs(inputs, task, replica_num),
        Configuration::Service(service) => {
            service_spec(inputs, service, group, replica_num).map(|spec| vec![spec])
        }
        Configuration::DevEnvironment(dev) => dev_spec(inputs, dev, replica_num).map(|spec| vec![spec]),
        Configuration::Fleet(_) | Configuration::Gateway(_) | Configuration::Volume(_) => {
            Err(Error::NotARun { kind: inputs.configuration.kind() })
        }
    }
}

/// Properties that differ between the jobs of a run.
struct JobVariant<'a> {
    commands: Vec<String>,
    resources: &'a ResourcesSpec,
    ports: &'a [PortMapping],
    image: Option<&'a str>,
    python: Option<&'a str>,
    docker: bool,
    nvcc: bool,
    privileged: bool,
    spot_policy: Option<SpotPolicy>,
    reservation: Option<&'a str>,
}

/// Position of a job in its run.
struct JobPosition {
    replica_num: u32,
    job_num: u32,
    jobs_per_replica: u32,
    replica_group: String,
    node_group: (u32, String, u32),
}

fn base_variant<'a>(run: &'a Run, profile: &'a ProfileProperties) -> JobVariant<'a> {
    JobVariant {
        commands: vec![],
        resources: &run.resources,
        ports: &[],
        image: run.image.as_deref(),
        python: run.python.as_ref().map(|python| python.0.as_str()),
        docker: run.docker == Some(true),
        nvcc: run.nvcc == Some(true),
        privileged: run.privileged,
        spot_policy: profile.provisioning.spot_policy,
        reservation: profile.provisioning.reservation.as_deref(),
    }
}

fn to_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn task_specs(inputs: &JobSpecInputs<'_>, task: &Task, replica_num: u32) -> Result<Vec<JobSpec>, Error> {
    let profile = merge_profile(&task.profile, inputs.profile);
    let total = u32::try_from(task.nodes_total()).unwrap_or(u32::MAX);
    let position = |job_num, node_group| JobPosition {
        replica_num,
        job_num,
        jobs_per_replica: total,
        replica_group: "0".to_owned(),
        node_group,
    };
    let mut specs = Vec::new();
    let Some(groups) = &task.groups else {
        let part = JobVariant {
            commands: task.commands.clone(),
            ports: &task.ports,
            ..base_variant(&task.run, &profile)
        };
        for job in 0..total {
            specs.push(job_spec(
                inputs,
                &task.run,
                &profile,
                &part,
                position(job, (0, "0".to_owned(), job)),
            )?);
        }
        return Ok(specs);
    };
    for (index, group) in groups.iter().enumerate() {
        let name = group.name.as_ref().map_or_else(|| index.to_string(), |name| name.0.clone());
        let part = JobVariant {
            commands: group.commands.clone(),
            ports: &group.ports,
            resources: &group.resources,
            ..base_variant(&task.run, &profile)
        };
        for member in 0..u32::try_from(group.nodes.get()).unwrap_or(0) {
            let at = position(to_u32(specs.len()), (to_u32(index), name.clone(), member));
            specs.push(job_spec(inputs, &task.run, &profile, &part, at)?);
        }
    }
    Ok(specs)
}

fn service_spec(
    inputs: &JobSpecInputs<'_>,
    service: &Service,
    group: usize,
    replica_num: u32,
) -> Result<JobSpec, Error> {
    let profile = merge_profile(&service.profile, inputs.profile);
    let base = JobVariant { commands: service.commands.clone(), ..base_variant(&service.run, &profile) };
    let (part, name) = match &service.groups {
        None => (base, "0".to_owned()),
        Some(groups) => {
            let found = groups.get(group).ok_or(Error::NoSuchGroup { index: group })?;
            (group_variant(base, found), group_name(group, found))
        }
    };
    let position = JobPosition {
        replica_num,
        job_num: 0,
        jobs_per_replica: 1,
        replica_group: name,
        node_group: (0, "0".to_owned(), 0),
    };
    let mut spec = job_spec(inputs, &service.run, &profile, &part, position)?;
    spec.service_port = Some(service.port.0.container_port);
    spec.probes = probes(service.probes.as_deref(), service.model.as_ref());
    Ok(spec)
}

/// Applies the settings of a replica group, which take precedence over those of the service.
fn group_variant<'a>(base: JobVariant<'a>, group: &'a ReplicaGroup) -> JobVariant<'a> {
    JobVariant {
        commands: group.commands.clone(),
        resources: &group.resources,
        ports: &[],
        image: group.image.as_deref().or(base.image),
        python: group.python.as_ref().map(|python| python.0.as_str()).or(base.python),
        docker: group.docker.unwrap_or(base.docker),
        nvcc: group.nvcc.unwrap_or(base.nvcc),
        privileged: group.privileged.unwrap_or(base.privileged),
        spot_policy: group.spot_policy.or(base.spot_policy),
        reservation: group.reservation.as_deref().or(base.reservation),
    }
}

fn dev_spec(inputs: &JobSpecInputs<'_>, dev: &DevEnvironment, replica_num: u32) -> Result<JobSpec, Error> {
    let profile = merge_profile(&dev.profile, inputs.profile);
    let stay = ["echo 'The dev environment is ready.'", "tail -f /dev/null"].map(str::to_owned);
    let commands = dev.run.setup.iter().chain(&dev.init).cloned().chain(stay).collect();
    let part = JobVariant { commands, ports: &dev.ports, ..base_variant(&dev.run, &profile) };
    let position = JobPosition {
        replica_num,
        job_num: 0,
        jobs_per_replica: 1,
        replica_group: "0".to_owned(),
        node_group: (0, "0".to_owned(), 0),
    };
    let mut spec = job_spec(inputs, &dev.run, &profile, &part, position)?;
    spec.single_branch = Some(dev.run.single_branch.unwrap_or(false));
    Ok(spec)
}

fn merge_profile(own: &ProfileProperties, base: Option<&ProfileProperties>) -> ProfileProperties {
    base.map_or_else(|| own.clone(), |base| own.or(base))
}

fn job_spec(
    inputs: &JobSpecInputs<'_>,
    run: &Run,
    profile: &ProfileProperties,
    part: &JobVariant<'_>,
    position: JobPosition,
) -> Result<JobSpec, Error> {
    let JobPosition { replica_num, job_num, jobs_per_replica, replica_group, node_group } = position;
    let repo = run.repos.first().map(|repo| &repo.0);
    let (node_group_index, node_group_name, node_group_job_index) = node_group;
    let resources = effective_resources(part);
    let image_name = image_name(&inputs.inherited.images, part)?;
    let image_architectures = inputs.inherited.image_architectures.get(&image_name).cloned();
    let images = &inputs.inherited.images;
    let default_image = profile.default_image.clone().or_else(|| images.base.clone());
    let default_image = default_image.filter(|_| image_name.is_empty());
    let default_image_from = match profile.default_image {
        Some(_) => DefaultImageSource::Run,
        None => images.base_from,
    };
    Ok(JobSpec {
        replica_num,
        job_num,
        job_name: format!("{}-{job_num}-{replica_num}", inputs.run_name),
        jobs_per_replica,
        replica_group,
        node_group_index,
        node_group_name,
        node_group_job_index,
        app_specs: app_specs(part.ports),
        user: run.user.as_ref().and_then(|user| UnixUser::parse(&user.0).ok()),
        commands: argv(run, part)?,
        env: environment(inputs, run)?,
        home_dir: None,
        image_name,
        image_architectures: image_architectures.unwrap_or_default(),
        default_image_from: default_image.as_ref().map(|_| default_image_from),
        default_image,
        python: part.python.map(str::to_owned),
        privileged: part.privileged || (part.docker && part.image.is_none()),
        single_branch: Some(run.single_branch.unwrap_or(true)),
        max_duration: match profile.max_duration {
            OffableDuration::Seconds(secs) => Some(secs),
            OffableDuration::Off | OffableDuration::Unset => None,
        },
        stop_duration: match profile.stop_duration {
            OffableDuration::Seconds(secs) => Some(secs),
            OffableDuration::Off => None,
            OffableDuration::Unset => Some(STOP_DURATION),
        },
        utilization_policy: profile.utilization_policy.clone(),
        registry_auth: run.registry_auth.clone(),
        requirements: requirements(profile, part, resources, jobs_per_replica > 1),
        retry: retry(profile.provisioning.retry.as_ref()),
        volumes: Some(volumes(&run.volumes, job_num)?),
        ssh_key: None,
        working_dir: run
            .working_dir
            .as_ref()
            .map(|dir| dir.0.clone())
            .or_else(|| inputs.inherited.working_dir.clone()),
        repo_dir: repo
            .map(|repo| repo.path.clone())
            .or_else(|| inputs.inherited.repo_dir.clone())
            .unwrap_or_else(|| REPO_DIR.to_owned()),
        repo_exists_action: repo.map(|repo| repo.if_exists),
        repo_data: inputs.inherited.repo_data.clone(),
        repo_code_hash: inputs.inherited.repo_code_hash.clone(),
        file_archives: inputs.inherited.file_archives.clone(),
        service_port: None,
        probes: vec![],
    })
}

fn requirements(
    profile: &ProfileProperties,
    part: &JobVariant<'_>,
    resources: ResourcesSpec,
    multinode: bool,
) -> Requirements {
    Requirements {
        resources,
        max_price: profile.provisioning.max_price.map(|price| price.0),
        spot: match part.spot_policy {
            Some(SpotPolicy::Spot) => Some(true),
            Some(SpotPolicy::OnDemand) | None => Some(false),
            Some(SpotPolicy::Auto) => None,
        },
        reservation: part.reservation.map(str::to_owned),
        multinode: Some(multinode),
        backend_options: profile.provisioning.backend_options.clone(),
    }
}

fn app_specs(ports: &[PortMapping]) -> Vec<AppSpec> {
    let open = ports.iter().filter(|port| !ports::RESERVED_PORTS.contains(&port.container_port));
    let app = |(index, port): (usize, &PortMapping)| AppSpec {
        port: port.container_port,
        map_to_port: port.local_port,
        app_name: format!("app_{index}"),
        url_path: None,
        url_query_params: None,
    };
    open.enumerate().map(app).collect()
}

/// Returns the image of a job; empty if the run names none.
fn image_name(images: &DefaultImages, part: &JobVariant<'_>) -> Result<String, Error> {
    let set =
        |image: &Option<String>, field, setting| image.clone().ok_or(Error::NoImageFor { field, setting });
    match part.image {
        Some(image) => Ok(image.to_owned()),
        None if part.docker => set(&images.docker, "docker", "docker-image"),
        None if part.nvcc => set(&images.nvcc, "nvcc", "nvcc-image"),
        None => Ok(String::new()),
    }
}

/// Returns the command line of the container: entry point and arguments, or a shell with the commands; empty for the
/// command of the image.
fn argv(run: &Run, part: &JobVariant<'_>) -> Result<Vec<String>, Error> {
    let argv: Vec<String> = if let Some(entrypoint) = &run.entrypoint {
        let words = shell::split(entrypoint)
            .map_err(|reason| Error::Entrypoint { entrypoint: entrypoint.clone(), reason })?;
        words.into_iter().chain(part.commands.iter().cloned()).collect()
    } else if !part.commands.is_empty() {
        let usual = if part.image.is_some() { "/bin/sh" } else { "/bin/bash" };
        let shell = run.shell.as_ref().map_or_else(|| usual.to_owned(), super::run::Shell::path);
        let start = (part.docker && part.image.is_none()).then(|| "start-dockerd".to_owned());
        let commands: Vec<String> = start.into_iter().chain(part.commands.iter().cloned()).collect();
        vec![shell, "-i".to_owned(), "-c".to_owned(), shell::join(&commands)]
    } else {
        // The agent runs the command of the image.
        Vec::new()
    };
    if argv.is_empty() && part.image.is_none_or(|image| image == PLAIN_PROCESS_IMAGE) {
        return Err(Error::NothingToRun);
    }
    Ok(argv)
}

fn environment(inputs: &JobSpecInputs<'_>, run: &Run) -> Result<BTreeMap<String, String>, Error> {
    if let Some(name) = run.env.unresolved().first() {
        return Err(Error::UnresolvedVariable { name: (*name).to_owned() });
    }
    let mut env = run.env.values();
    if let (true, Some(url)) = (run.dstack, inputs.server_url) {
        env.entry("DSTACK_SERVER_URL".to_owned()).or_insert_with(|| url.to_owned());
    }
    Ok(env)
}

fn retry(retry: Option<&RetrySetting>) -> Option<RetrySpec> {
    let all = || RetryEvent::ALL.to_vec();
    match retry {
        None | Some(RetrySetting::Flag(false)) => None,
        Some(RetrySetting::Flag(true)) => Some(RetrySpec { on_events: all(), duration: RETRY_DURATION }),
        Some(RetrySetting::Policy(policy)) => Some(RetrySpec {
            on_events: policy.on_events.clone().unwrap_or_else(all),
            duration: policy.duration.map_or(RETRY_DURATION, |secs| secs.0),
        }),
    }
}

/// Returns the mounts with the volume names of this job.
fn volumes(mounts: &[Mount], job_num: u32) -> Result<Vec<Mount>, Error> {
    let rank = |reference: &Reference| match reference {
        Reference::Named { namespace, name }
            if namespace == "dstack" && matches!(name.as_str(), "node_rank" | "job_num") =>
        {
            Ok(Substitution::Value(job_num.to_string()))
        }
        Reference::Named { .. } | Reference::Address { .. } => {
            Err(format!("`{reference}` is not available here"))
        }
    };
    let name = |text: &String| {
        interpolate::substitute(text, DollarEscape::Unescape, rank)
            .map_err(|error| Error::Interpolate { text: text.clone(), reason: error.reason })
    };
    mounts
        .iter()
        .map(|mount| match mount {
            Mount::Instance(_) => Ok(mount.clone()),
            Mount::Volume(VolumeMount { name: names, path }) => {
                let names: Result<Vec<_>, _> = names.as_slice().iter().map(name).collect();
                Ok(Mount::Volume(VolumeMount { name: OneOrMany::Many(names?), path: path.clone() }))
            }
        })
        .collect()
}

fn probes(given: Option<&[Probe]>, model: Option<&Model>) -> Vec<ProbeSpec> {
    match (given, model) {
        (Some(probes), _) => probes.iter().map(probe).collect(),
        (None, Some(model)) => vec![chat_probe(model)],
        (None, None) => vec![],
    }
}

fn probe(probe: &Probe) -> ProbeSpec {
    ProbeSpec {
        kind: probe.kind,
        url: probe.url.as_ref().map_or_else(|| "/".to_owned(), |url| url.0.clone()),
        method: probe.method.unwrap_or(Method::Get),
        headers: probe.headers.clone(),
        body: probe.body.as_ref().map(|body| body.0.clone()),
        timeout: probe.timeout.map_or(10, |secs| secs.0),
        interval: probe.interval.map_or(15, |secs| secs.0),
        ready_after: probe.ready_after.map_or(1, super::decode::Int::get),
        until_ready: probe.until_ready.unwrap_or(false),
    }
}

/// Returns the default probe of a model: the shortest possible chat request.
fn chat_probe(model: &Model) -> ProbeSpec {
    let prefix = match model {
        Model::OpenAi { prefix, .. } => prefix.trim_end_matches('/'),
        Model::Tgi { .. } => "/v1",
    };
    let messages = [BTreeMap::from([("role", "user"), ("content", "hi")])];
    let body = serde_json::json!({ "model": model.name(), "messages": messages, "max_tokens": 1 });
    ProbeSpec {
        kind: ProbeKind::Http,
        url: format!("{prefix}/chat/completions"),
        method: Method::Post,
        headers: vec![ProbeHeader {
            name: Text("Content-Type".to_owned()),
            value: Text("application/json".to_owned()),
        }],
        body: Some(body.to_string()),
        timeout: 30,
        interval: 15,
        ready_after: 1,
        until_ready: false,
    }
}

/// Returns the resources completed with what the GPU names imply.
fn effective_resources(part: &JobVariant<'_>) -> ResourcesSpec {
    let mut resources = part.resources.clone();
    if let Some(gpu) = &mut resources.gpu {
        gpu.vendor = gpu.vendor.or_else(|| infer_vendor(gpu.name.as_deref()));
    }
    resources
}

/// Returns the vendor that all GPU names imply, if they agree.
pub fn infer_vendor(names: Option<&[String]>) -> Option<GpuVendor> {
    let mut vendors = names?.iter().map(|name| crate::gpu::vendor_of(name));
    let first = vendors.next().flatten()?;
    vendors.all(|vendor| vendor == Some(first)).then_some(first)
}
