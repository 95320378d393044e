//! Location and connection details of a job, in the documents that clients read.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use windlass_api::agent::{
    SSH_PORT,
    runner::JobStarted,
    shim::{NetworkMode, TaskInfo},
};
use windlass_model::{
    backend_kind::{self, BackendKind},
    config::{Configuration, dev_environment::Ide, job_spec::JobSpec},
    plan::{
        blocks::host_share,
        execution_mode::{ExecutionMode, ImageChoice, ProcessRights},
        offers::{Offer, granted_gpus},
    },
};

use super::address;
use crate::{
    db::{
        DbError,
        documents::{INSTANCE_GPU_DRIVER, INSTANCE_SSH, INSTANCE_TYPE},
        instances::Instance,
        jobs::Job,
    },
    inventory,
    pass_error::PassError,
};

const HOST_SSH_PORT: u16 = 22;
const MIB_PER_GB: f64 = 1024.0;
/// An account on a host that is reached over SSH.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostLogin {
    pub username: String,
    pub port: u16,
    /// Jump host, if any.
    pub proxy: Option<Value>,
}

impl HostLogin {
    /// Account of an instance; its own settings override those of its fleet. `None`: it is not reached over SSH.
    pub fn of(instance: &Instance, fleet_spec: Option<&Value>) -> Result<Option<Self>, DbError> {
        let kind = instance.backend.as_deref().map(BackendKind::of);
        if kind != Some(BackendKind::UserHosts) {
            return Ok(None);
        }
        let own: Value = INSTANCE_SSH.decode_opt(instance.id, instance.ssh.as_deref())?.unwrap_or_default();
        let shared = fleet_spec.map(|spec| &spec["configuration"]["ssh_config"]);
        let setting = |key: &str| {
            let of_fleet = || shared.map(|shared| shared[key].clone()).unwrap_or_default();
            if own[key].is_null() { of_fleet() } else { own[key].clone() }
        };
        let proxy = setting("proxy_jump");
        let port =
            |value: &Value| value.as_u64().and_then(|port| u16::try_from(port).ok()).unwrap_or(HOST_SSH_PORT);
        let user = setting("user");
        Ok(user.as_str().map(|name| Self {
            username: name.to_owned(),
            port: port(&setting("port")),
            proxy: proxy["hostname"].as_str().map(|hostname| {
                let user = proxy["user"].as_str().or_else(|| user.as_str()).unwrap_or_default();
                json!({ "hostname": hostname, "username": user, "port": port(&proxy["port"]) })
            }),
        }))
    }
}

/// Runtime data of a job, as clients name it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RuntimeData {
    pub network_mode: NetworkMode,
    /// Null where the job has the whole instance.
    pub cpu: Option<f64>,
    pub gpu: Option<i64>,
    /// In GB.
    pub memory: Option<f64>,
    /// Port in the container, port on the host. Null until the container runs.
    pub ports: Option<BTreeMap<u16, u16>>,
    #[serde(default)]
    pub volume_names: Option<Vec<String>>,
    #[serde(default)]
    pub offer: Option<Value>,
    #[serde(default)]
    pub working_dir: Option<String>,
    #[serde(default)]
    pub username: Option<String>,
    #[serde(default)]
    pub container_name: Option<String>,
    #[serde(default)]
    pub gpus_ids: Vec<String>,
    /// Execution mode for people, such as `a container of image debian:12` or `a plain process, confined`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runs_in: Option<String>,
}

impl RuntimeData {
    /// Data that is known as soon as a job has its instance.
    pub fn placed(job: &Job, spec: &JobSpec, instance: &Instance) -> Result<Self, PassError> {
        let offer = inventory::offer(instance)?;
        let blocks = u32::try_from(job.blocks).unwrap_or_default();
        let part = host_share(&offer.host, blocks, offer.total_blocks);
        let whole = blocks >= offer.total_blocks;
        #[expect(clippy::cast_precision_loss, reason = "GB are shown with a fraction")]
        let memory = part.memory_mib as f64 / MIB_PER_GB;
        Ok(Self {
            network_mode: network(whole, spec.jobs_per_replica),
            cpu: (!whole).then(|| f64::from(part.cpus)),
            gpu: Some(granted_gpus(&part, &spec.requirements.resources).into()),
            memory: (!whole).then_some(memory),
            ports: None,
            volume_names: None,
            offer: Some(json!({
                "backend": backend_kind::client_name(&offer.backend),
                "instance": instance_type(instance)?,
                "region": offer.region,
                "price": instance.price.unwrap_or_default(),
                "availability": "busy",
                "blocks": blocks.max(1),
                "total_blocks": offer.total_blocks,
            })),
            working_dir: None,
            username: None,
            container_name: None,
            gpus_ids: Vec::new(),
            runs_in: runs_in(spec, &offer),
        })
    }

    /// Adds the shim's report about the task.
    pub fn seen(&mut self, task: &TaskInfo) {
        if let Some(ports) = &task.ports {
            self.ports = Some(ports.iter().map(|port| (port.container, port.host)).collect());
        }
        if !task.container_name.is_empty() {
            self.container_name = Some(task.container_name.clone());
        }
        if !task.gpus_ids.is_empty() {
            self.gpus_ids.clone_from(&task.gpus_ids);
        }
    }

    /// Adds the runner's report about the job.
    pub fn started(&mut self, started: &JobStarted) {
        self.working_dir = Some(started.working_dir.clone());
        self.username = Some(started.username.clone());
    }
}

/// Execution mode of a placed job. Whether a plain process is confined where it need not be is known only with its
/// task.
fn runs_in(spec: &JobSpec, offer: &Offer) -> Option<String> {
    let image = ImageChoice::from_spec(spec)?;
    match image.resolve_on(offer.host.runtimes.as_ref()).ok()? {
        ExecutionMode::Process(ProcessRights::Server) => None,
        runs_in @ (ExecutionMode::Process(_)
        | ExecutionMode::Container { .. }
        | ExecutionMode::Pod { .. }) => Some(runs_in.to_string()),
    }
}

/// A part of an instance gets separate ports. Several nodes have whole instances, or share one.
pub(super) fn network(whole: bool, jobs_per_replica: u32) -> NetworkMode {
    if whole || jobs_per_replica > 1 { NetworkMode::Host } else { NetworkMode::Bridge }
}

fn instance_type(instance: &Instance) -> Result<Value, DbError> {
    let known = INSTANCE_TYPE.decode_opt(instance.id, instance.instance_type.as_deref())?;
    Ok(known.unwrap_or_else(|| {
        json!({ "name": "", "resources": { "cpus": 0, "memory_mib": 0, "gpus": [], "spot": instance.spot } })
    }))
}

/// Provisioning data of a job, as clients name it: the instance, and how to connect to it.
pub fn provisioning(
    instance: &Instance,
    login: Option<&HostLogin>,
    runtime: Option<&RuntimeData>,
) -> Result<Value, DbError> {
    let own_port = runtime.and_then(|runtime| runtime.ports.as_ref()).and_then(|ports| ports.get(&SSH_PORT));
    // On the server's machine the task's own SSH server is reached directly.
    let is_here = instance.backend.as_deref().is_some_and(backend_kind::is_server_machine);
    let (username, port) = match login {
        Some(login) => (login.username.as_str(), login.port),
        None if is_here => ("root", own_port.copied().unwrap_or(SSH_PORT)),
        None => ("root", HOST_SSH_PORT),
    };
    let hostname = if is_here { Some("127.0.0.1") } else { instance.hostname.as_deref() };
    let driver: Option<Value> =
        INSTANCE_GPU_DRIVER.decode_opt(instance.id, instance.gpu_driver.as_deref())?;
    Ok(json!({
        "backend": backend_kind::client_name(instance.backend.as_deref().unwrap_or_default()),
        "instance_type": instance_type(instance)?,
        "instance_id": instance.name,
        "hostname": hostname,
        "internal_ip": address::for_instance(instance)?,
        "public_ip_enabled": true,
        "region": instance.region.as_deref().unwrap_or_default(),
        "availability_zone": instance.availability_zone,
        "price": instance.price.unwrap_or_default(),
        "username": username,
        "ssh_port": port,
        "ssh_proxy": login.and_then(|login| login.proxy.clone()),
        "dockerized": !is_here,
        "gpu_driver": driver,
    }))
}

/// Connection details for users: the SSH command once they are attached, and the link that opens their editor.
pub fn connection(
    run_name: &str,
    job: &Job,
    configuration: &Configuration,
    working_dir: Option<&str>,
) -> Value {
    let is_first = job.replica_num == 0 && job.job_num == 0;
    let host = if is_first { run_name } else { job.job_name.as_str() };
    let ide = match configuration {
        Configuration::DevEnvironment(dev) => dev.ide,
        Configuration::Task(_)
        | Configuration::Service(_)
        | Configuration::Fleet(_)
        | Configuration::Gateway(_)
        | Configuration::Volume(_) => None,
    };
    let dir = working_dir.unwrap_or("/");
    let (name, url) = match ide {
        None => (None, None),
        Some(Ide::Vscode) => {
            (Some("VS Code"), Some(format!("vscode://vscode-remote/ssh-remote+{host}{dir}")))
        }
        Some(Ide::Cursor) => (Some("Cursor"), Some(format!("cursor://vscode-remote/ssh-remote+{host}{dir}"))),
        Some(Ide::Windsurf) => {
            (Some("Windsurf"), Some(format!("windsurf://vscode-remote/ssh-remote+{host}{dir}")))
        }
        Some(Ide::Zed) => (Some("Zed"), Some(format!("zed://ssh/{host}{dir}"))),
    };
    json!({
        "ide_name": name,
        "attached_ide_url": url,
        "proxied_ide_url": null,
        "attached_ssh_command": ["ssh", host],
        "proxied_ssh_command": null,
        "sshproxy_hostname": null,
        "sshproxy_port": null,
        "sshproxy_upstream_id": null,
    })
}
