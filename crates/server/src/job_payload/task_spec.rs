//! Task specification of a submission, built from stored data.

use windlass_api::agent::shim::{self, ProcessIsolation, TaskSpec};
use windlass_model::{
    config::{
        interpolate::{self, DollarEscape, Reference, Substitution},
        job_spec::{JobSpec, Requirements},
        mounts::Mount,
        run::RegistryAuth,
    },
    plan::{
        blocks::host_share,
        execution_mode::{ExecutionMode, PLAIN_PROCESS_IMAGE, ProcessRights},
        offers::{Offer, granted_gpus},
    },
    resources::ResourcesSpec,
};

use super::{
    address,
    connection_info::{HostLogin, network},
};
use crate::{attachments::TaskMounts, db::jobs::Job};

const MIB: u64 = 1 << 20;
const GIB: f64 = (1_u64 << 30) as f64;

pub(super) struct Inputs<'a> {
    pub(super) job: &'a Job,
    /// With secrets filled in.
    pub(super) spec: &'a JobSpec,
    /// Resources and runtimes of its instance.
    pub(super) offer: &'a Offer,
    /// `None`: as the job specifies; the agent rejects what it cannot run.
    pub(super) runs_in: Option<ExecutionMode<'a>>,
    /// Network volumes of the job, attached.
    pub(super) mounts: TaskMounts,
    pub(super) user_key: Option<&'a str>,
    pub(super) project: &'a str,
    pub(super) project_key: Option<&'a str>,
    /// Account on the host, if it is reached over SSH.
    pub(super) login: Option<&'a HostLogin>,
}

pub(super) fn build(inputs: &Inputs<'_>) -> TaskSpec {
    let Inputs { job, spec, offer, runs_in, mounts, user_key, project, project_key, login: _ } = inputs;
    // A new field does not compile until this runtime does something with it, or another place is named that does.
    let JobSpec {
        jobs_per_replica,
        image_name: _,
        default_image: _,
        app_specs: _,
        service_port: _,
        privileged,
        registry_auth: _,
        requirements:
            Requirements { resources, max_price: _, spot: _, reservation: _, multinode: _, backend_options: _ },
        volumes: _,
        // Sent to the runner, by `runner_start`.
        replica_num: _,
        job_num: _,
        job_name: _,
        user: _,
        commands: _,
        env: _,
        home_dir: _,
        python: _,
        single_branch: _,
        max_duration: _,
        stop_duration: _,
        ssh_key: _,
        working_dir: _,
        repo_dir: _,
        repo_exists_action: _,
        repo_data: _,
        repo_code_hash: _,
        file_archives: _,
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
    let ResourcesSpec { shm_size, disk, gpu: _, cpu: _, memory: _ } = resources;
    let blocks = u32::try_from(job.blocks).unwrap_or_default();
    // The job gets devices of its blocks, as many as requested, and no others.
    let part = host_share(&offer.host, blocks, offer.total_blocks);
    let whole = blocks >= offer.total_blocks;
    let several = *jobs_per_replica > 1;
    let (registry_username, registry_password) = registry_credentials(spec);
    let host_keys = host_keys(inputs);
    // The cluster has given the pod its devices and its memory, and pulled its image.
    let in_pod = matches!(runs_in, Some(ExecutionMode::Pod { .. }));
    let (registry_username, registry_password) =
        if in_pod { Default::default() } else { (registry_username, registry_password) };
    TaskSpec {
        id: job.id,
        name: job.job_name.clone(),
        registry_username,
        registry_password,
        image_name: image_name(spec, *runs_in),
        // The runner switches to the user of the job; before that it performs the steps that need root.
        container_user: "root".to_owned(),
        privileged: *privileged && !in_pod,
        gpu: if in_pod { 0 } else { granted_gpus(&part, resources).into() },
        cpu: if whole { 0.0 } else { f64::from(part.cpus) },
        memory: if whole { 0 } else { bytes(part.memory_mib.saturating_mul(MIB)) },
        shm_size: shm_size.filter(|_| !in_pod).map_or(0, gigabytes),
        network_mode: network(whole, *jobs_per_replica),
        volumes: mounts.volumes.clone(),
        volume_mounts: mounts.volume_mounts.clone(),
        instance_mounts: instance_mounts(spec),
        gpu_devices: Vec::new(),
        project: (*project).to_owned(),
        host_ssh_user: host_keys.as_ref().map(|(user, _)| user.clone()).unwrap_or_default(),
        host_ssh_keys: host_keys.map(|(_, key)| vec![key]).unwrap_or_default(),
        container_ssh_keys: [*project_key, *user_key]
            .into_iter()
            .flatten()
            .map(|key| key.trim().to_owned())
            .filter(|key| !key.is_empty())
            .collect(),
        app_ports: app_ports(spec),
        pids: 0,
        // The minimum selected the instance; the maximum is the limit of the job.
        disk: disk.as_ref().and_then(|disk| disk.size.max).map_or(0, gigabytes),
        cluster: several,
        node_address: (several && !whole)
            .then(|| address::on_shared_instance(job.run_id, job.replica_num, job.job_num)),
        process_isolation: process_isolation(*runs_in),
        claims: None,
    }
}

/// Image as sent to the agent: `none` for a plain process.
fn image_name(spec: &JobSpec, runs_in: Option<ExecutionMode<'_>>) -> String {
    let requested = if spec.image_name.is_empty() { PLAIN_PROCESS_IMAGE } else { &spec.image_name };
    runs_in.map_or(requested, ExecutionMode::image_name).to_owned()
}

fn process_isolation(runs_in: Option<ExecutionMode<'_>>) -> ProcessIsolation {
    match runs_in {
        // The pod isolates it.
        Some(ExecutionMode::Process(ProcessRights::Server) | ExecutionMode::Pod { .. }) => {
            ProcessIsolation::Own
        }
        Some(
            ExecutionMode::Process(
                ProcessRights::Unknown | ProcessRights::OwnUser | ProcessRights::AgentUser,
            )
            | ExecutionMode::Container { .. },
        )
        | None => ProcessIsolation::Confined,
    }
}

/// User name and password for the registry of a job, with its variables; empty if it has none.
pub(crate) fn registry_credentials(spec: &JobSpec) -> (String, String) {
    let part = |part: fn(&RegistryAuth) -> &String| {
        spec.registry_auth.as_ref().map(|auth| with_variables(part(auth), spec)).unwrap_or_default()
    };
    (part(|auth| &auth.username), part(|auth| &auth.password))
}

/// Substitutes variables that no client has filled in.
fn with_variables(text: &str, spec: &JobSpec) -> String {
    let resolve = |reference: &Reference| match reference {
        Reference::Named { namespace, name } if namespace == "env" => {
            Ok(spec.env.get(name).map_or(Substitution::Keep, |value| Substitution::Value(value.clone())))
        }
        Reference::Named { .. } | Reference::Address { .. } => Ok(Substitution::Keep),
    };
    interpolate::substitute(text, DollarEscape::Keep, resolve).unwrap_or_else(|_| text.to_owned())
}

/// Account on the host through which the user reaches the container, and the user's key. A host that is not reached
/// over SSH has no such account.
fn host_keys(inputs: &Inputs<'_>) -> Option<(String, String)> {
    let login = inputs.login?;
    let key = inputs.user_key.map(str::trim).filter(|key| !key.is_empty())?;
    Some((login.username.clone(), key.to_owned()))
}

/// Ports of the service's program, and of the applications of tasks and dev environments.
fn app_ports(spec: &JobSpec) -> Vec<u16> {
    let mut ports: Vec<u16> =
        spec.service_port.into_iter().chain(spec.app_specs.iter().map(|app| app.port)).collect();
    ports.sort_unstable();
    ports.dedup();
    ports
}

fn instance_mounts(spec: &JobSpec) -> Vec<shim::InstanceMount> {
    let mount = |mount: &Mount| match mount {
        Mount::Instance(mount) => Some(shim::InstanceMount {
            instance_path: mount.instance_path.clone(),
            path: mount.path.clone(),
            optional: mount.optional,
        }),
        Mount::Volume(_) => None,
    };
    spec.volumes.iter().flatten().filter_map(mount).collect()
}

fn bytes(amount: u64) -> i64 {
    i64::try_from(amount).unwrap_or(i64::MAX)
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a size of memory in bytes; more than fits is all there is"
)]
fn gigabytes(amount: f64) -> i64 {
    (amount * GIB) as i64
}
