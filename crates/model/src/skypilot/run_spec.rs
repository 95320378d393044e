//! Conversion of a task to its run: the configuration that the server submits for one attempt.

use std::collections::BTreeMap;

use serde_json::json;

use super::{infra::Infra, script};
use crate::{
    config::{
        Configuration,
        env::EnvValue,
        error::{Diagnosis, summary},
        job_spec_builder::infer_vendor,
        profile::SpotPolicy,
    },
    managed_job::plan::{
        Accelerator, Candidate, ManagedJobPlan, Script, Shape, TaskBody, TaskPlan, WORKDIR, Workdir,
    },
    resources::{CpuSpec, DiskSpec, GpuSpec, Range, ResourcesSpec},
    time::Timestamp,
};

/// Grace period of the commands of a cancelled task, in seconds. The file format has no field for it.
const STOP_GRACE_SECS: i64 = 30;

/// Reason why a task cannot become a run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("task {task} does not exist; number of tasks: {of}")]
    NoSuchTask { task: u32, of: usize },
    #[error("failed to create the run of task {task}: {}", summary(.problems))]
    Configuration { task: u32, problems: Vec<Diagnosis> },
}

/// Identity of a job. It does not change over its recoveries.
#[derive(Clone, Debug)]
pub struct JobIdentity {
    pub job_id: String,
    pub submitted_at: Timestamp,
    pub user: String,
    /// Position among the copies of one call, and the number of copies.
    pub rank: u32,
    pub copies: u32,
}

/// Resources that a server knows.
#[derive(Clone, Debug, Default)]
pub struct ServerContext {
    /// Fleets of the project.
    pub fleets: Vec<String>,
    /// Backends that rent instances.
    pub backends: Vec<String>,
    /// Nodes are plain processes that share a home directory: each attempt gets a private one.
    pub has_private_home: bool,
    /// There are no spot nodes here: a request for spot nodes gets others.
    pub has_no_spot: bool,
}

/// Run of one attempt.
#[derive(Clone, Debug)]
pub struct AttemptRunSpec {
    pub configuration: Configuration,
    /// Names of secrets whose values the server adds to the environment, outside the configuration.
    pub secrets: Vec<String>,
}

/// Returns an id that is the same for every attempt of a task: programs name their checkpoints by it.
pub fn task_id(plan: &ManagedJobPlan, task: u32, identity: &JobIdentity) -> String {
    let moment = match jiff::Timestamp::from_microsecond(identity.submitted_at.0) {
        Ok(moment) => moment.strftime("%Y-%m-%d-%H-%M-%S-%6f").to_string(),
        Err(_) => identity.submitted_at.0.to_string(),
    };
    let job = plan.name.clone().unwrap_or_else(|| "job".to_owned());
    let several = if plan.tasks.len() > 1 { format!("_{}", plan.task_name(task)) } else { String::new() };
    format!("sky-managed-{moment}_{job}{several}_{}-{task}", identity.job_id)
}

impl AttemptRunSpec {
    /// Returns the run of one attempt of a task on its candidate number `candidate`. `spot` is the choice of a policy.
    pub fn for_attempt(
        plan: &ManagedJobPlan,
        task: u32,
        candidate: u32,
        spot: Option<bool>,
        identity: &JobIdentity,
        site: &ServerContext,
    ) -> Result<Self, Error> {
        let of = plan.tasks.len();
        let found = usize::try_from(task).ok().and_then(|index| plan.tasks.get(index));
        let found = found.ok_or(Error::NoSuchTask { task, of })?;
        let variables = variables(plan, task, identity);
        match &found.body {
            TaskBody::Configuration(own) => {
                let mut own = own.clone();
                for (name, value) in variables {
                    own.run.env.0.insert(name, EnvValue::Value(value));
                }
                own.run.name = None;
                if let Some(spot) = spot {
                    own.profile.provisioning.spot_policy = Some(spot_policy(spot, site));
                }
                Ok(Self { configuration: Configuration::Task(own), secrets: vec![] })
            }
            TaskBody::Script(script) => {
                let candidates = &found.candidates;
                let index = usize::try_from(candidate).unwrap_or(0) % candidates.len().max(1);
                let one = candidates.get(index).cloned().unwrap_or_default();
                let spot = spot.or(one.spot).unwrap_or(false);
                let mut json = configuration(found, script, &one, variables, spot_policy(spot, site), site);
                bind_to_infra(&mut json, one.infra.as_deref(), site);
                bind_to_offers(&mut json, &one);
                let configuration = Configuration::from_json(&json)
                    .map_err(|problems| Error::Configuration { task, problems })?;
                Ok(Self { configuration, secrets: script.secrets.clone() })
            }
        }
    }
}

fn spot_policy(spot: bool, site: &ServerContext) -> SpotPolicy {
    match (spot, site.has_no_spot) {
        (true, false) => SpotPolicy::Spot,
        (true, true) => SpotPolicy::Auto,
        (false, _) => SpotPolicy::OnDemand,
    }
}

/// Restricts a configuration to the meaning of its `infra`.
pub(super) fn bind_to_infra(json: &mut serde_json::Value, infra: Option<&str>, site: &ServerContext) {
    let Some(text) = infra else { return };
    match site.resolve_infra(text) {
        Infra::Anywhere | Infra::OwnInstances => {}
        Infra::Fleet(fleet) => json["fleets"] = json!([fleet]),
        Infra::Place { backend, region, zone } => {
            json["backends"] = backend.map_or(serde_json::Value::Null, |backend| json!([backend]));
            json["regions"] = region.map_or(serde_json::Value::Null, |region| json!([region]));
            json["availability_zones"] = zone.map_or(serde_json::Value::Null, |zone| json!([zone]));
        }
        // It was known when the job was launched: the run reports that it is gone.
        Infra::Unknown => {
            let name = text.split('/').next().unwrap_or_default();
            json["fleets"] = json!([name]);
        }
    }
}

/// Restricts a configuration to instances of a type and a price.
pub(super) fn bind_to_offers(json: &mut serde_json::Value, one: &Candidate) {
    json["max_price"] = json!(one.max_price);
    json["instance_types"] = json!(one.instance_type.as_ref().map(|name| [name]));
}

/// Returns the environment of every process of the task, the same on each node.
fn variables(plan: &ManagedJobPlan, task: u32, identity: &JobIdentity) -> BTreeMap<String, String> {
    let count = u32::try_from(plan.tasks.len()).unwrap_or(u32::MAX);
    let ids: Vec<String> = (0..count).map(|task| task_id(plan, task, identity)).collect();
    let name = plan.task_name(task);
    let cluster = json!({
        "cluster_name": format!("{name}-{}", identity.job_id), "cloud": "windlass", "region": null, "zone": null,
    });
    let mut variables = vec![
        ("SKYPILOT_TASK_ID", task_id(plan, task, identity)),
        ("SKYPILOT_TASK_IDS", ids.join("\n")),
        ("SKYPILOT_MANAGED_JOB_ID", identity.job_id.clone()),
        ("SKYPILOT_JOB_RANK", identity.rank.to_string()),
        ("SKYPILOT_NUM_JOBS", identity.copies.to_string()),
        ("SKYPILOT_CLUSTER_INFO", cluster.to_string()),
        ("SKYPILOT_USER", identity.user.clone()),
    ];
    if let Shape::Group(group) = &plan.shape {
        variables.push(("SKYPILOT_JOBGROUP_NAME", group.name.clone()));
        // Filled in by the runner, which writes the names there as the server learns them.
        match group.inter_connection {
            Some(true) => variables.push((script::HOSTS_FILE, "required".to_owned())),
            None => variables.push((script::HOSTS_FILE, String::new())),
            Some(false) => {}
        }
    }
    variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn configuration(
    task: &TaskPlan,
    script: &Script,
    one: &Candidate,
    variables: BTreeMap<String, String>,
    spot: SpotPolicy,
    site: &ServerContext,
) -> serde_json::Value {
    let mut env = script.envs.clone();
    env.extend(variables);
    // Named here, and filled in by the runner.
    let gate = (task.nodes > 1).then_some(script::GATE_FILE);
    for name in [script::PHASE_FILE, script::PRIVATE_HOME].into_iter().chain(gate) {
        env.insert(name.to_owned(), String::new());
    }
    let mut files: Vec<serde_json::Value> =
        script.files.iter().map(|file| json!({ "local_path": file.local_path, "path": file.path })).collect();
    let mut repos = Vec::new();
    match &script.workdir {
        None => {}
        // Comes first, since files may be copied into it.
        Some(Workdir::Local(path)) => files.insert(0, json!({ "local_path": path, "path": WORKDIR })),
        Some(Workdir::Git { url, reference }) => repos.push(git_workdir(url, reference.as_deref())),
    }
    json!({
        "type": "task",
        "commands": [script::program(script, task.nodes, site.has_private_home)],
        "shell": "/bin/bash",
        "nodes": task.nodes,
        "env": env,
        "image": one.image,
        "resources": ResourcesSpec { shm_size: script.shm_size, ..resources(one) },
        "ports": one.ports,
        "files": files,
        "repos": repos,
        "volumes": script.volumes,
        "spot_policy": spot,
        "max_duration": task.max_duration,
        "stop_duration": STOP_GRACE_SECS,
        "tags": tags(&one.labels),
        "retry": false,
    })
}

/// Returns the repository of a working directory. `reference` is a commit, or else a branch or a tag.
pub(super) fn git_workdir(url: &str, reference: Option<&str>) -> serde_json::Value {
    let is_commit = |text: &&str| text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit());
    let (commit, branch) = (reference.filter(is_commit), reference.filter(|text| !is_commit(text)));
    json!({ "url": url, "branch": branch, "hash": commit, "path": WORKDIR })
}

/// Returns the labels that are valid tags; the parser of the file warns about the others.
pub(super) fn tags(labels: &BTreeMap<String, String>) -> BTreeMap<&str, &str> {
    let kept = labels.iter().filter(|(key, value)| is_tag(key, value));
    kept.map(|(key, value)| (key.as_str(), value.as_str())).collect()
}

/// Returns whether a label is a valid tag.
pub(super) fn is_tag(key: &str, value: &str) -> bool {
    let plain = |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b));
    (1..=60).contains(&key.len()) && value.len() <= 256 && plain(key) && plain(value)
}

/// Returns the resources that a candidate requests. `4` means at least four here: an existing instance is shared, not
/// ordered, and unspecified resources are not required.
pub(super) fn resources(one: &Candidate) -> ResourcesSpec {
    let cpus = one.cpus.map_or(1, |cpus| cpus.of.ceil().max(1.0) as u32);
    ResourcesSpec {
        cpu: CpuSpec { arch: None, count: Range::at_least(cpus) },
        memory: Range::at_least(one.memory.map_or(0.0, |memory| memory.of)),
        shm_size: None,
        gpu: Some(one.accelerator.as_ref().map_or(GpuSpec::count(Range::at_least(0)), gpu)),
        disk: one.disk.map(|size| DiskSpec { size: Range::at_least(size) }),
    }
}

/// Converts an accelerator: `A100-80GB:2` is two A100 with 80 GB each.
fn gpu(one: &Accelerator) -> GpuSpec {
    let count = one.count.ceil().max(1.0) as u32;
    let upper = one.name.to_ascii_uppercase();
    let sized = upper.strip_suffix("GB").and_then(|rest| rest.rsplit_once('-'));
    let (name, memory) = match sized.and_then(|(name, size)| Some((name, size.parse::<f64>().ok()?))) {
        Some((name, size)) => (name.to_owned(), Some(Range::exactly(size))),
        None => (upper, None),
    };
    let names = vec![name];
    let vendor = infer_vendor(Some(&names));
    GpuSpec { vendor, name: Some(names), memory, ..GpuSpec::count(Range::exactly(count)) }
}
