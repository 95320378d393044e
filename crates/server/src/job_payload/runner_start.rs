//! Request that starts the runner of a job, built from stored data.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use windlass_api::agent::runner::{
    ClusterInfo, FileArchive, JobSpec as Orders, JobSubmission, RepoCredentials, RepoData, Run as RunOrders,
    RunSpec, SshKey, SubmitBody, User,
};
use windlass_model::{
    config::{job_spec::JobSpec, references::insert_addresses},
    resources::ResourcesSpec,
};

use super::{STOP_MAX_SECS, address};
use crate::{
    db::{
        documents::{JOB_SPEC, RUN_SPEC},
        jobs::Job,
        pipeline_rows::job_nodes::JobNode,
        runs::Run,
    },
    inventory,
    pass_error::PassError,
};

/// Variable with the port on which a service listens.
const PORT_VARIABLE: &str = "PORT";

pub(super) struct Inputs<'a> {
    pub(super) run: &'a Run,
    pub(super) job: &'a Job,
    /// With secrets filled in.
    pub(super) spec: JobSpec,
    pub(super) project_name: Option<&'a str>,
    /// Overridden by the job's own.
    pub(super) fleet_env: BTreeMap<String, String>,
    /// All nodes of the replica, including this one, in order.
    pub(super) nodes: &'a [JobNode],
    /// Addresses that the commands may name.
    pub(super) addresses: &'a BTreeMap<(u32, u32), String>,
    pub(super) key: Option<SshKey>,
    pub(super) repo_credentials: Option<RepoCredentials>,
    /// Bytes of output per hour; `None`: no limit.
    pub(super) log_quota_hour: Option<u64>,
}

/// Parts of a run specification that a runner knows.
#[derive(Deserialize)]
struct StoredRunSpec {
    repo_id: Option<String>,
    repo_data: Option<Value>,
    configuration_path: Option<String>,
    #[serde(default)]
    configuration: Value,
}

pub(super) fn build(inputs: &Inputs<'_>) -> Result<SubmitBody, PassError> {
    let Inputs { run, job, spec, .. } = inputs;
    let stored: StoredRunSpec = RUN_SPEC.decode(run.id, &run.spec)?;
    let is_dev = stored.configuration["type"] == "dev-environment";
    let mut configuration = stored.configuration;
    // The runner needs nothing else of it, and it may contain credentials.
    if let Some(fields) = configuration.as_object_mut() {
        fields.retain(|name, _| matches!(name.as_str(), "type" | "name"));
    }
    let run_spec = RunSpec {
        run_name: Some(run.name.clone()),
        repo_id: stored.repo_id,
        repo_data: stored.repo_data.as_ref().and_then(repo_data),
        configuration_path: stored.configuration_path,
        configuration,
    };
    Ok(SubmitBody {
        run: RunOrders {
            id: run.id.to_string(),
            run_spec: Some(run_spec.clone()),
            project_name: inputs.project_name.map(str::to_owned),
        },
        job_spec: build_orders(inputs, spec, is_dev),
        job_submission: JobSubmission { id: job.id.to_string() },
        cluster_info: Some(cluster(inputs.nodes, job, &inputs.spec.requirements.resources)?),
        // They are only in the variables that name them.
        secrets: BTreeMap::new(),
        repo_credentials: inputs.repo_credentials.clone(),
        log_quota_hour: inputs.log_quota_hour,
        run_spec: Some(run_spec),
    })
}

fn build_orders(inputs: &Inputs<'_>, spec: &JobSpec, is_dev: bool) -> Orders {
    // A new field does not compile until the runner gets it, or another place is named that does something with it.
    let JobSpec {
        replica_num,
        job_num,
        jobs_per_replica,
        user,
        commands,
        env: own_env,
        python,
        single_branch,
        max_duration,
        stop_duration,
        working_dir,
        repo_dir,
        repo_exists_action,
        repo_data: own_repo_data,
        repo_code_hash: _,
        file_archives,
        service_port,
        // The key is opened for the call.
        ssh_key: _,
        // The runner determines it from the user.
        home_dir: _,
        // Sent to the shim, by `task_spec`.
        job_name: _,
        app_specs: _,
        image_name: _,
        default_image: _,
        privileged: _,
        registry_auth: _,
        requirements: _,
        volumes: _,
        // Decided by the server and its pipelines.
        replica_group: _,
        node_group_index: _,
        node_group_name: _,
        node_group_job_index: _,
        image_architectures: _,
        default_image_from: _,
        utilization_policy: _,
        retry: _,
        probes: _,
    } = spec;
    let mut env = inputs.fleet_env.clone();
    if let Some(port) = service_port {
        env.insert(PORT_VARIABLE.to_owned(), port.to_string());
    }
    env.extend(own_env.clone());
    let find = |group, member| inputs.addresses.get(&(group, member)).cloned();
    let mut commands = insert_addresses(commands, find);
    if !is_dev {
        without_terminal(&mut commands);
    }
    Orders {
        replica_num: (*replica_num).into(),
        job_num: (*job_num).into(),
        jobs_per_replica: (*jobs_per_replica).into(),
        user: user.clone().map(|user| User {
            uid: user.uid,
            gid: user.gid,
            username: user.username,
            groupname: user.groupname,
        }),
        commands,
        env,
        single_branch: single_branch.unwrap_or(true),
        max_duration: *max_duration,
        // Without a limit, the runner would apply its default.
        stop_duration: Some(stop_duration.unwrap_or(STOP_MAX_SECS)),
        ssh_key: inputs.key.clone(),
        working_dir: working_dir.clone(),
        repo_data: own_repo_data.as_ref().and_then(repo_data),
        repo_dir: Some(repo_dir.clone()),
        repo_exists_action: repo_exists_action.map(|action| action.as_str().to_owned()),
        file_archives: file_archives
            .iter()
            .map(|file| FileArchive { id: file.id.to_string(), path: file.path.clone() })
            .collect(),
        python: python.clone(),
        // Users work in a dev environment; all other output goes to a log.
        tty: Some(is_dev),
    }
}

/// Removes `-i`: an interactive shell without a terminal prints warnings.
fn without_terminal(argv: &mut Vec<String>) {
    if let [_, interactive, command, _] = &argv[..]
        && interactive == "-i"
        && command == "-c"
    {
        argv.remove(1);
    }
}

/// Repository data that the client sent; a kind that runners do not know is left out, and then nothing is cloned.
fn repo_data(sent: &Value) -> Option<RepoData> {
    serde_json::from_value(sent.clone()).ok()
}

/// Nodes of a replica with their addresses and devices.
pub(super) fn cluster(
    nodes: &[JobNode],
    job: &Job,
    wanted: &ResourcesSpec,
) -> Result<ClusterInfo, PassError> {
    let mut info = ClusterInfo::default();
    let mut gpus = Vec::with_capacity(nodes.len());
    for node in nodes {
        let address = address::for_node(node, job.run_id, job.replica_num, nodes.len() > 1)?;
        info.job_ips.push(address.unwrap_or_default());
        gpus.push(match &node.instance {
            Some(instance) => inventory::gpu_count(instance, node.blocks, wanted)?.into(),
            None => 0,
        });
    }
    info.master_job_ip = info.job_ips.first().cloned().unwrap_or_default();
    info.gpus_per_job = gpus.first().copied().unwrap_or_default();
    info.gpus_per_node = Some(gpus);
    Ok(info)
}

/// Addresses by group and member. `groups` names those of a service, whose members are its replicas.
pub(super) fn addresses_by_group(
    nodes: &[JobNode],
    job: &Job,
    groups: Option<&[String]>,
) -> Result<BTreeMap<(u32, u32), String>, PassError> {
    let mut known = BTreeMap::new();
    let mut members: BTreeMap<u32, u32> = BTreeMap::new();
    for node in nodes {
        let spec: JobSpec =
            JOB_SPEC.decode(format_args!("of node {} of run {}", node.num, job.run_id), &node.job_spec)?;
        let place = match groups {
            None => Some((spec.node_group_index, spec.node_group_job_index)),
            Some(names) => {
                let group = names.iter().position(|name| *name == spec.replica_group);
                group.and_then(|group| u32::try_from(group).ok()).map(|group| {
                    let next = members.entry(group).or_default();
                    *next += 1;
                    (group, *next - 1)
                })
            }
        };
        let several = groups.is_none() && nodes.len() > 1;
        let address = address::for_node(node, job.run_id, job.replica_num, several)?;
        if let (Some(place), Some(address)) = (place, address) {
            known.insert(place, address);
        }
    }
    Ok(known)
}

/// Variables of a fleet: those with a value.
pub(super) fn variables(env: &Value) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    env.as_object()
        .into_iter()
        .flatten()
        .filter_map(|(name, value)| Some((name.clone(), text(value)?)))
        .collect()
}

/// Address of a repository that needs no credentials.
pub(super) fn public_repo(run: &Run) -> Result<Option<RepoCredentials>, PassError> {
    let spec: Value = RUN_SPEC.decode(run.id, &run.spec)?;
    let url = spec["configuration"]["repos"][0]["url"].as_str();
    Ok(url.map(|url| RepoCredentials { clone_url: url.to_owned(), private_key: None, oauth_token: None }))
}
